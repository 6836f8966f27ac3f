#!/usr/bin/env bash
# On a machine with a GPU: build, GPU tests without a skip, benchmarks and the demo to JSON, compute-sanitizer.
# Usage: scripts/gpu_check.sh [STEP...]   steps: build tests bench sanitize; none: all. Results go to $OUT, or where the
# repository keeps them.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
VENV=${VENV:-.venv}
export WEAKREF_EXT_WERROR=1 WEAKREF_EXT_CUDA=1 WEAKREF_EXT_REQUIRE_CUDA=1 PYTHONUNBUFFERED=1

build() {
  make --no-print-directory VENV="$VENV" "$VENV/tested"
  "$VENV/bin/python" -m weakref_ext info
}

tests() { # a process a file: a test that breaks the CUDA context must not take the others with it
  local failed=0
  for file in $(grep -l "mark.cuda" tests/test_*.py); do
    "$VENV/bin/python" -m pytest -m cuda -p no:cacheprovider --tb=short "$file" || failed=1
  done
  return $failed
}

bench() {
  "$VENV/bin/python" -m weakref_ext demo --json "$OUT/demo_gpu.json"
  "$VENV/bin/python" -m benchmarks --out "$OUT"
}

sanitize() {
  # API errors are not reported: some tests ask for them. It keeps Python frames for its backtraces, so that what they
  # refer to lives on: tests of memory that is given back are left out. The second pass has every block from the driver.
  local memcheck="compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9"
  $memcheck "$VENV/bin/python" -m pytest -m cuda -p no:cacheprovider tests/test_cuda.py tests/test_cudagraph_gpu.py \
    tests/test_breakable_gpu.py -k "not allocators and not gives_the_memory_back and not many_breaks and not given_up" | tee "$OUT/memcheck.txt" | tail -n 4
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 $memcheck "$VENV/bin/python" -m pytest -p no:cacheprovider tests/test_cuda.py \
    -k "geometry or dtype or no_synchronization" | tee -a "$OUT/memcheck.txt" | tail -n 4
}

for step in "${@:-build tests bench sanitize}"; do
  for name in $step; do
    echo "== $name"
    "$name"
  done
done
