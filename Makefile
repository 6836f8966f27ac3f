# make demo and make test do all the set-up that they need, on a fresh clone.
VENV ?= .venv
PYTHON ?= python3
PIP = $(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation

.PHONY: demo test lint clean

demo: $(VENV)/built
	$(VENV)/bin/python -m weakref_ext demo

test: $(VENV)/tested
	$(VENV)/bin/python -m pytest

lint: $(VENV)/linted
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(shell git ls-files "*.cpp" "*.h")

$(VENV)/created: scripts/make_venv.py
	$(PYTHON) scripts/make_venv.py $(VENV) $(TORCH)
	touch $@

$(VENV)/built: $(VENV)/created setup.py pyproject.toml $(wildcard csrc/* csrc/cuda/*)
	$(PIP) -e .
	touch $@

$(VENV)/tested: $(VENV)/created setup.py pyproject.toml $(wildcard csrc/* csrc/cuda/*)
	$(PIP) -e '.[test]'
	touch $@ $(VENV)/built

$(VENV)/linted: $(VENV)/tested
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info weakref_ext/*.so weakref_ext/_build.py
