"""A tensor parallel model, its all-reduces captured in CUDA graphs, with nested outputs: every rank checks its own.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Without GPUs it runs over gloo, and the wrappers pass calls through. Exits with 1 on a rank where a check fails.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import weakref_ext
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper, eager_break

HIDDEN, INNER, LAYERS = 512, 2048, 6
AUX_LAYERS = (1, 3, 4)
SIZES = (64, 32, 8, 1)

eager_all_reduce = eager_break(dist.all_reduce)


class Mlp:
    """Layers whose inner dimension is split over the ranks; ``model(x)`` returns ``(hidden, [aux, aux, aux])``."""

    def __init__(self, rank: int, world: int, device: torch.device, reduce: object) -> None:
        generator = torch.Generator().manual_seed(0)
        part = slice(rank * INNER // world, (rank + 1) * INNER // world)
        self.layers = []
        for _ in range(LAYERS):
            up, down = (torch.randn(INNER, HIDDEN, generator=generator) / HIDDEN**0.5 for _ in range(2))
            self.layers.append((up[part].to(device), down[part].to(device)))
        self.reduce = reduce

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        aux = []
        for i, (up, down) in enumerate(self.layers):
            partial = F.relu(x @ up.T) @ down
            self.reduce(partial)
            x = x + 0.1 * partial
            if i in AUX_LAYERS:
                aux.append(x)
        return x * 1, aux


def check(name: str, wrapper: CUDAGraphWrapper, model: Mlp, device: torch.device) -> list[str]:
    """What is wrong, one line each: values against eager, for every size twice, in both orders; and pinned memory."""
    failures = []
    for turn, sizes in enumerate((SIZES, SIZES[::-1])):
        for size in sizes:
            x = torch.randn(size, HIDDEN, generator=torch.Generator().manual_seed(size + turn)).to(device)
            expected, out = model(x), wrapper(x)
            pairs = [(expected[0], out[0]), *zip(expected[1], out[1], strict=True)]
            wrong = [i for i, (a, b) in enumerate(pairs) if not torch.allclose(a, b, rtol=1e-4, atol=1e-4)]
            if wrong or len(pairs) != 1 + len(AUX_LAYERS):
                failures.append(f"{name}: size {size}, turn {turn}: tensors {wrong} differ from eager")
            if wrapper.enabled and not all(weakref_ext.is_weak_ref(t) for _, t in pairs):
                failures.append(f"{name}: size {size}: an output is strong")
    failures += [f"{name}: {row} pins memory" for row in wrapper.report() if row.pinned_bytes]
    return failures


def main() -> int:
    cuda = torch.cuda.is_available()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))
    try:
        world = dist.get_world_size()
        with torch.inference_mode():
            captured = Mlp(rank, world, device, dist.all_reduce)
            broken = Mlp(rank, world, device, eager_all_reduce)
            # NCCL's watchdog thread polls events meanwhile, which must not count against the capture
            full = CUDAGraphWrapper(captured, capture_error_mode="thread_local")
            breakable = BreakableCUDAGraphWrapper(broken, capture_error_mode="thread_local")
            failures = check("full", full, captured, device) + check("breakable", breakable, broken, device)
            segments = [row.segments for row in breakable.report()]
            if breakable.enabled and segments != [LAYERS + 1] * len(SIZES):
                failures.append(f"breakable: {segments} segments, expected {LAYERS + 1} each")
        print(f"rank {rank} of {world}: {'; '.join(failures) or 'every check holds'}", flush=True)
        if cuda:
            full.clear()  # graphs with collectives go before their communicator
            breakable.clear()
            torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
