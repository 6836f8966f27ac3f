#!/usr/bin/env bash
# The C++ library: builds, tests, sanitizes and lints it. `PYTHON=... scripts/ci_native.sh [STEP...]`, by default every
# step. PYTHON's torch is the LibTorch; tidy reads all of csrc, the others build the part without Python.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ $# -gt 0 ] || set -- library asan tsan tidy
jobs=${JOBS:-$(nproc)}
torch=$("$python" -c 'import torch; print(torch.utils.cmake_prefix_path)')
if [ ! -e /usr/include/gtest/gtest.h ]; then
  (apt-get update -qq && apt-get install -y -qq --no-install-recommends libgtest-dev) >/dev/null
fi

build() { # NAME CMAKE_OPTION... (afresh: CMake's cache would keep the torch of an earlier PYTHON)
  local name=$1
  shift
  cmake --fresh -S . -B "build/$name" -G Ninja -DCMAKE_PREFIX_PATH="$torch" -DWEAKREF_EXT_WERROR=ON "$@" \
    >"build/$name.log" 2>&1 || { cat "build/$name.log"; return 1; }
  cmake --build "build/$name" -j"$jobs"
}

library() { # as a user builds it, then a project that uses what was installed
  build library -DCMAKE_BUILD_TYPE=Release
  ctest --test-dir build/library --output-on-failure -j"$jobs"
  cmake --install build/library --prefix build/prefix >/dev/null
  cmake --fresh -S examples/cpp -B build/example -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_PREFIX_PATH="$torch;$PWD/build/prefix" >/dev/null 2>&1
  cmake --build build/example
  build/example/example
}

asan() { # with LeakSanitizer
  build asan -DCMAKE_BUILD_TYPE=Debug -DWEAKREF_EXT_SANITIZE=address,undefined
  ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_init_order=1 UBSAN_OPTIONS=print_stacktrace=1 \
    ctest --test-dir build/asan --output-on-failure -j"$jobs"
}

tsan() { # without address randomization: ThreadSanitizer of this age does not know the wide layout of new kernels
  build tsan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DWEAKREF_EXT_SANITIZE=thread
  TSAN_OPTIONS=halt_on_error=1 setarch -R ctest --test-dir build/tsan --output-on-failure -j"$jobs" -R '^Threads'
}

tidy() {
  "$python" - <<'PY' >build/tidy.txt
import pathlib, sysconfig
from torch.utils import cpp_extension
lines = [line.split() for line in pathlib.Path("csrc/sources.txt").read_text().splitlines()]
print(*(f"csrc/{name}" for kind, name in lines if kind != "cuda" or cpp_extension.CUDA_HOME))
cuda = [f"{cpp_extension.CUDA_HOME}/include"] if cpp_extension.CUDA_HOME else []
print(*(f"-isystem{path}" for path in [*cpp_extension.include_paths(), *cuda, sysconfig.get_paths()["include"]]))
PY
  { read -ra sources; read -ra includes; } <build/tidy.txt
  printf '%s\n' "${sources[@]}" |
    xargs -I{} -P"$jobs" "$(dirname "$("$python" -c 'import sys; print(sys.executable)')")/clang-tidy" --quiet {} -- \
      -std=c++20 "${includes[@]}"
}

mkdir -p build
for step in "$@"; do
  echo "== $step"
  SECONDS=0
  $step
  echo "== $step: $SECONDS s"
done
