#!/usr/bin/env bash
# vLLM 0.26.0, whole, with and without the plugin, on a GPU machine with torch 2.11. Fetch it first with
# `scripts/vllm/pack.sh .gpu_vllm` and bring .gpu_vllm/1 and .gpu_vllm/2 there. Each call takes less than ten minutes:
#   scripts/gpu_vllm.sh unpack FOLDER            one of the two folders; then the other
#   scripts/gpu_vllm.sh build                    weakref_ext with its metadata, where vLLM finds the entry point
#   scripts/gpu_vllm.sh path PATH [ARM ...]      breakable | piecewise | partition; arms stock, python, plugin
#   scripts/gpu_vllm.sh tp2                      stock and plugin on two GPUs, breakable
#   scripts/gpu_vllm.sh test                     the breakable scenarios, under vLLM's own wrapper
#   scripts/gpu_vllm.sh check                    compares the arms
#   scripts/gpu_vllm.sh faults                   benchmarks/peer_faults.py on CUDA tensors (needs .peers)
# Results go to $OUT (default: benchmarks/results): vllm_PATH_ARM.json and .log. Everything else to $VLLM_HOME.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${VLLM_HOME:-${TMPDIR:-/tmp}/weakref_ext_vllm}
out=${OUT:-benchmarks/results}
mkdir -p "$home/site" "$home/root" "$out"
export PYTHONPATH="$home/root:$home/site"

arm() { # LABEL ARM PATH OPTION...
  local name="$out/vllm_$1_$2"
  timeout 280 python3 scripts/vllm/arm.py "$2" "$3" --models "$home/models" --json "$name.json" "${@:4}" > "$name.log" 2>&1 ||
    { tail -n 40 "$name.log"; return 1; }
  tail -n 1 "$name.log"
}

case ${1:-} in
  unpack)
    cp "$2"/libraries.* "$home/"
    if [ -d "$2/wheels" ]; then
      python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$home/site" "$2"/wheels/*.whl
      tar -xJf "$2/python.tar.xz" -C "$home/root"
    fi
    cat "$home"/libraries.* | tar -xJf - -C "$home/root" 2> /dev/null || echo "not all parts of the libraries are here yet" ;;
  build)
    python3 -m pip install -q --no-index --no-deps --no-build-isolation --upgrade --target "$home/site" . ;;
  path)
    arms=("${@:3}")
    [ $# -gt 2 ] || arms=(stock python plugin)
    for name in "${arms[@]}"; do arm "$2" "$name" "$2"; done ;;
  tp2)
    for name in stock plugin; do arm breakable-tp2 "$name" breakable --tp 2 --sizes 8,16,32; done ;;
  test)
    # from elsewhere: the package that was built, not the sources beside it
    repo=$PWD
    cd "$home"
    python3 -m pytest -c "$repo/pyproject.toml" -o pythonpath= --import-mode=importlib -p no:cacheprovider \
      "$repo/tests/test_gpu_vllm.py" ;;
  faults)
    python3 benchmarks/peer_faults.py
    for file in docs/peer_faults_cuda.md benchmarks/results/peer_faults_cuda.json; do
      [ "$file" -ef "$out/${file##*/}" ] || cp "$file" "$out/"
    done ;;
  check)
    python3 scripts/vllm/check.py "$out" ;;
  *)
    sed -n '2,11p' "$0"; exit 2 ;;
esac
