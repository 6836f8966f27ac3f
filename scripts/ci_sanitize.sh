#!/usr/bin/env bash
# The Python suite under AddressSanitizer and UndefinedBehaviorSanitizer: `scripts/ci_sanitize.sh [PYTEST_OPTION...]`.
# PYTHON has torch and the test extra. torch and CPython are not instrumented: it sees what our code does. Leaks are
# the C++ tests' and tests/test_leaks.py's business: CPython itself leaves memory at exit.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
mkdir -p build/sanitize
WEAKREF_EXT_SANITIZE=1 WEAKREF_EXT_DEBUG=1 MAX_JOBS=${JOBS:-$(nproc)} \
  "$python" setup.py -q build --build-base build/sanitize --build-lib build/sanitize/lib >build/sanitize/build.log 2>&1 ||
  { cat build/sanitize/build.log; exit 1; }
preload=$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so)
# -P: not the package in this folder, but the one built above. PYTHONMALLOC=malloc shows every Python object to the
# sanitizer. protect_shadow_gap=0 lets CUDA map its memory.
PYTHONPATH=build/sanitize/lib PYTHONMALLOC=malloc LD_PRELOAD=$preload UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  ASAN_OPTIONS=detect_leaks=0:protect_shadow_gap=0 "$python" -P -m pytest -p no:cacheprovider "$@"
