"""Builds and tests weakref_ext against every torch release from 2.11 on, and prints the README's table.

Then imports each build under the next release, which must be refused.

    python scripts/versions.py [VERSION...] [--envs build/versions] [--json results.json] [pytest options after --]

Without versions: all that pip offers for this Python. Each gets a virtual environment of its own under --envs, kept for
the next run. A release that cannot be installed is a row of the table and no failure. Needs the network and, as most
releases on PyPI are CUDA builds, some 6 GB of disk each. No GPU needed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST = (2, 11)
TOOLS = ["setuptools>=77", "wheel", "ninja", "numpy", "pytest", "hypothesis"]
FACTS = """
import json, weakref_ext, weakref_ext._load as load
print(json.dumps({**load.build_facts(), **load.running_facts()}))
"""


def offered() -> list[str]:
    text = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"Available versions: (.*)", text)
    assert found, text
    releases = {version.partition("+")[0] for version in found[1].split(", ")}
    key = {release: tuple(map(int, release.split("."))) for release in releases}
    return sorted((release for release in releases if key[release] >= OLDEST), key=key.__getitem__)


def build_and_test(version: str, envs: Path, pytest_options: list[str]) -> dict[str, object]:
    """What one release gives: its facts, the suite's closing line, and the step that failed, if any."""
    env = envs / version
    python = str(env / "bin" / "python")
    # A copy of its own, built in place: the working tree and the other copies stay as they are, and tests that run the
    # package in processes of their own find it.
    tree = env / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for file in subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")[
        :-1
    ]:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tree / file)
    steps = {
        "venv": [sys.executable, "-m", "venv", str(env)],
        "torch": [python, "-m", "pip", "install", "-q", "-U", f"torch=={version}", *TOOLS],
        "build": [python, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", "."],
        "import": [python, "-c", FACTS],
        "tests": [python, "-m", "pytest", "-o", "addopts=--strict-markers", "-p", "no:cacheprovider"],
    }
    steps["tests"] += pytest_options
    result: dict[str, object] = {"torch": version}
    for step, command in steps.items():
        print(f"{version}: {step}", file=sys.stderr)
        environment = {**os.environ, "WEAKREF_EXT_WERROR": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=environment)
        lines = done.stdout.strip().splitlines()
        if step == "import" and done.returncode == 0:
            result.update(json.loads(lines[-1]))
        if step == "tests":
            result["tests"] = lines[-1].strip("= ") if lines else ""
        if done.returncode != 0:
            print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
            return {**result, "failed": step}
    return result


def refused_under(built: Path, running: Path) -> bool:
    """Whether importing the build of one environment with the torch of another is the error that says what to do."""
    package = built / "tree" / "weakref_ext"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(package, Path(folder) / "weakref_ext")
        code = f"import sys; sys.path.insert(0, {folder!r}); import weakref_ext"
        done = subprocess.run([running / "bin" / "python", "-P", "-c", code], capture_output=True, text=True)
    return "Rebuild it against the running torch" in done.stderr


def table(results: list[dict[str, object]]) -> str:
    rows = ["| torch | CUDA | Python | builds with -Werror, imports | tests |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        failed = result.get("failed")
        built = "no" if failed in ("venv", "torch", "build", "import") else "yes"
        cuda = result.get("cuda") or "none"
        rows.append(
            f"| {result['torch']} | {cuda} | {result.get('python', '')} | {built} | {result.get('tests') or failed} |"
        )
    return "\n".join(rows)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("versions", nargs="*", metavar="VERSION")
    arguments.add_argument("--envs", type=Path, default=ROOT / "build" / "versions")
    arguments.add_argument("--json", type=Path)
    own, _, pytest_options = " ".join(sys.argv[1:]).partition(" -- ")
    options = arguments.parse_args(own.split())
    results = [
        build_and_test(version, options.envs.resolve(), pytest_options.split())
        for version in options.versions or offered()
    ]
    envs = [options.envs.resolve() / str(result["torch"]).partition("+")[0] for result in results]
    for result, built, running in zip(results, envs, envs[1:] + envs[:1], strict=True):
        if "failed" not in result and built != running and not refused_under(built, running):
            result["failed"] = f"imports under torch {running.name}"
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return int(any(result.get("failed") not in (None, "torch") for result in results))


if __name__ == "__main__":
    sys.exit(main())
