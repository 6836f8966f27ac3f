#!/usr/bin/env bash
# usage: scripts/vllm/pack.sh DEST
# Fetches what vLLM 0.26.0 needs on a GPU machine with torch 2.11, Python 3.12 and no package index, in two folders of
# less than 64 MiB: DEST/1 (wheels of its dependencies, its Python, a part of its libraries) and DEST/2 (the other parts).
# Its flash-attention libraries (450 MB) stay out: engines there need attention_backend="TRITON_ATTN".
set -euo pipefail
dest=${1:?usage: pack.sh DEST}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$dest/1/wheels" "$dest/2"

options=(--quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none --platform any)
for tag in 1 2014 _2_5 _2_17 _2_24 _2_27 _2_28 _2_34; do options+=(--platform "manylinux${tag}_x86_64"); done
download() { python3 -m pip download "${options[@]}" --dest "$@"; }

download "$work" vllm==0.26.0
download "$dest/1/wheels" annotated-types apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors==0.17.0 \
  depyf==0.20.0 dill fastapi httpcore2 httpx2 ijson jiter lark==1.2.2 llguidance loguru msgspec openai openai-harmony \
  opentelemetry-api partial-json-parser prometheus-fastapi-instrumentator pybase64 pydantic python-json-logger pyzmq \
  setproctitle sniffio starlette truststore typing-inspection watchfiles xgrammar
core=$(unzip -p "$dest"/1/wheels/pydantic-[0-9]*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core==\([0-9.]*\).*/\1/p')
download "$dest/1/wheels" "pydantic-core==$core"

unzip -q "$work"/vllm-*.whl -d "$work/v" -x 'vllm/vllm_flash_attn/_vllm*' vllm/vllm-rs 'vllm/third_party/*/include/*'
echo "# instead of the library that is left out; TRITON_ATTN does not call it" > "$work/v/vllm/vllm_flash_attn/_vllm_fa2_C.py"
tar -C "$work/v" --exclude='*.so' -cf - . | xz -T0 -3 > "$dest/1/python.tar.xz"
tar -C "$work/v" -cf - vllm/{_C_stable_libtorch.abi3,cumem_allocator.abi3,spinloop.abi3,fs_io_C.abi3}.so |
  xz -T0 -6 | split -b 31m -d - "$work/libraries."
mv "$work/libraries.00" "$dest/1/"
mv "$work"/libraries.* "$dest/2/"
du -sh "$dest/1" "$dest/2"
