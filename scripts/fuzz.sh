#!/usr/bin/env bash
# Fuzzes the walk: `scripts/fuzz.sh [LIBFUZZER_OPTION...]`, by default for 60 s. PYTHON has torch, atheris and an
# installed weakref_ext (for its metadata; what is fuzzed is an instrumented build of its own, in build/fuzz).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
mkdir -p build/fuzz/corpus
g++ -std=c++20 -O2 -fPIC -c fuzz/coverage.cpp -o build/fuzz/coverage.o
CFLAGS="-fsanitize-coverage=trace-pc" LDFLAGS="$PWD/build/fuzz/coverage.o" MAX_JOBS=${JOBS:-$(nproc)} \
  "$python" setup.py -q build --build-base build/fuzz --build-lib build/fuzz/lib >build/fuzz/build.log 2>&1 ||
  { cat build/fuzz/build.log; exit 1; }
[ $# -gt 0 ] || set -- -max_total_time=60
PYTHONPATH=build/fuzz/lib exec "$python" -X faulthandler fuzz/fuzz_walk.py -max_len=256 -timeout=120 -artifact_prefix=build/fuzz/ \
  -print_final_stats=1 "$@" build/fuzz/corpus fuzz/seeds
