"""One vLLM engine with EAGLE3 on dummy weights: its greedy tokens, and what its captures hold.

usage: python scripts/vllm/arm.py stock|python|plugin breakable|piecewise|partition --models FOLDER --json FILE
  stock    vLLM as released: one level
  python   a recursion in Python over vLLM's own operator: the figure to reach
  plugin   weakref_ext, found by vLLM itself through its entry point
Target: Llama, 8 layers, hidden 4096, of which the drafter (1 layer) takes 3 auxiliary hidden states.
"""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("arm", choices=["stock", "python", "plugin"])
parser.add_argument("path", choices=["breakable", "piecewise", "partition"])
parser.add_argument("--models", type=Path, required=True)
parser.add_argument("--json", type=Path, required=True)
parser.add_argument("--sizes", help="capture sizes; 1, 2, 4, 8, 16 ... 512 on breakable, 8, 16, 32 on the other paths")
parser.add_argument("--tp", type=int, default=1)
args = parser.parse_args()
if args.sizes:
    sizes = [int(size) for size in args.sizes.split(",")]
else:
    sizes = [1, 2, 4, *range(8, 513, 8)] if args.path == "breakable" else [8, 16, 32]

os.environ.update(
    VLLM_USE_BREAKABLE_CUDAGRAPH=str(int(args.path == "breakable")),
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # measure() goes to the workers by value
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
)
if args.arm == "plugin":
    os.environ.pop("VLLM_PLUGINS", None)
else:
    os.environ["VLLM_PLUGINS"] = ""  # none

LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
DRAFTER = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}


def recursion():
    """Replace vLLM's function by a recursion over its own per-tensor one, in this process."""
    import vllm.compilation.breakable_cudagraph as breakable
    import vllm.compilation.cuda_graph as cuda_graph
    import vllm.utils.torch_utils as torch_utils

    def weak_ref_tensors(value):
        if type(value) in (list, tuple):
            return type(value)(map(weak_ref_tensors, value))
        return torch_utils.weak_ref_tensor(value)

    for module in (torch_utils, cuda_graph, breakable):
        module.weak_ref_tensors = weak_ref_tensors


def measure(worker):
    """In a worker: the memory of its graph pools, and the stored outputs' tensors that somebody owns: in a graph pool
    ("pinned"), and outside of one ("elsewhere": weights, static buffers)."""
    import gc
    import sys

    import torch

    gc.collect()
    torch.cuda.synchronize()
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    result = dict(
        allocated_mib=torch.cuda.memory_allocated() / 2**20,
        pool_mib=sum(s["total_size"] for s in segments) / 2**20,
        pool_active_mib=sum(s["active_size"] for s in segments) / 2**20,
    )
    plugin = sys.modules.get("weakref_ext.integrations.vllm")
    cuda_graph = sys.modules["vllm.compilation.cuda_graph"]
    breakable = sys.modules["vllm.compilation.breakable_cudagraph"]
    result["patched"] = plugin is not None and cuda_graph.weak_ref_tensors is plugin.weak_ref_tensors
    stored = [
        e.output for w in cuda_graph.CUDAGraphWrapper._all_instances for e in w.concrete_cudagraph_entries.values()
    ]
    stored += [e.output for w in breakable.BreakableCUDAGraphWrapper._all_instances for e in w.entries.values()]
    result["stored"] = len(stored)
    if result["patched"]:
        import weakref_ext

        leaves = [leaf for out in stored for leaf in torch.utils._pytree.tree_leaves(out)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        result.update(tensors=len(tensors), pinned=[], elsewhere=[])
        for tensor in tensors:
            if not weakref_ext.is_weak_ref(tensor) or weakref_ext.owner_alive(tensor):
                address = tensor.data_ptr()
                inside = any(s["address"] <= address < s["address"] + s["total_size"] for s in segments)
                result["pinned" if inside else "elsewhere"].append(list(tensor.shape))
        result["structures"] = sorted({weakref_ext.describe(out) for out in stored})
    return result


def main():
    for name, config in (("target", LLAMA), ("drafter", DRAFTER)):
        (args.models / name).mkdir(parents=True, exist_ok=True)
        (args.models / name / "config.json").write_text(json.dumps(config))
    if args.arm == "python":
        if args.tp > 1:
            parser.error("the recursion is put in by hand, which reaches one process only")
        recursion()
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    compilation = dict(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes))
    if args.path == "partition":
        compilation["use_inductor_graph_partition"] = True
    start = time.time()
    llm = LLM(
        model=str(args.models / "target"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=4096,  # the same KV cache in every arm, whatever is left for it
        attention_backend="TRITON_ATTN",
        enable_prefix_caching=False,
        tensor_parallel_size=args.tp,
        compilation_config=compilation,
        speculative_config=dict(method="eagle3", model=str(args.models / "drafter"), num_speculative_tokens=3),
    )
    started = time.time() - start
    outputs = llm.generate(
        [dict(prompt_token_ids=[1, 5, 9, 11] * 8), dict(prompt_token_ids=[1, 7, 3] * 5)],
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False),
    )
    result = dict(arm=args.arm, path=args.path, tp=args.tp, sizes=len(sizes), start_s=round(started, 1))
    result["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    result["workers"] = llm.collective_rpc(measure)
    result["machine"] = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, vllm=vllm.__version__)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
