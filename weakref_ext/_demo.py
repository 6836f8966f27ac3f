"""``python -m weakref_ext demo``: what keeping a capture's output costs, four ways, on a GPU or over CPU storages."""

import gc
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import is_weak_ref, owner_alive, weak_ref_tensors

SIZES = [1, 2, 4, *range(8, 513, 8)]
MIB = 2**20
TOLERANCE_MIB = 2.0  # of the nested way above the floor

Output = tuple[torch.Tensor, list[torch.Tensor]]


class Decoder(torch.nn.Module):
    """A stack of residual blocks that gives ``(hidden, [aux, ...])``, as EAGLE3 targets do: the first blocks' results.

    Input (tokens, hidden) and every output alike: (tokens, hidden) of the weights' dtype.
    """

    def __init__(self, hidden: int, layers: int = 4, num_aux: int = 3) -> None:
        super().__init__()
        self.num_aux = num_aux
        self.ups = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.downs = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> Output:
        aux = []
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.nn.functional.silu(up(torch.nn.functional.rms_norm(x, x.shape[-1:]))))
            aux.append(x)
        return torch.nn.functional.rms_norm(x, x.shape[-1:]), aux[: self.num_aux]


# What a wrapper keeps of a capture's output.
WAYS: dict[str, Callable[[Output], Any]] = {
    "strong": lambda out: out,
    "one level weak": lambda out: (weak_ref_tensors(out[0]), out[1]),
    "nested weak": weak_ref_tensors,
    "dropped (floor)": lambda out: None,
}


@dataclass
class Row:
    """One way: memory in MiB after all captures, once the model's own references are gone."""

    way: str
    pool_mib: float
    pinned_mib: float
    owners_alive: int
    tensors: int
    equals_eager: bool | None


def flat(kept: Output | None) -> list[torch.Tensor]:
    return [] if kept is None else [kept[0], *kept[1]]


def held(tensor: torch.Tensor) -> bool:
    """Whether the output's memory is still allocated: by the tensor itself, or by another owner."""
    return not is_weak_ref(tensor) or owner_alive(tensor)


@contextmanager
def fresh_pool() -> Iterator[Any]:
    """A fresh graph pool, gone from the device afterwards."""
    gc.collect()
    torch.cuda.empty_cache()
    yield torch.cuda.graph_pool_handle()
    gc.collect()
    torch.cuda.empty_cache()


def segments_of(pool: Any) -> list[dict[str, Any]]:
    """The pool's part of the allocator's snapshot.

    Not ``memory_snapshot(pool)``: with torch 2.11 and handles above 256, which CPython does not share, the process
    crashed comparing the handle's numbers afterwards, as if each such call had dropped a reference to them.
    """
    return [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool)]


def warm_stream(model: Decoder, x: torch.Tensor) -> torch.cuda.Stream:
    """A stream to capture on: library handles and workspaces belong to no capture."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(x)
    torch.cuda.synchronize()
    return stream


def capture_all(
    model: Decoder, x: torch.Tensor, sizes: list[int], way: str, pool: Any, stream: torch.cuda.Stream
) -> tuple[dict[int, Any], dict[int, torch.cuda.CUDAGraph]]:
    """Capture every size into one pool, in the order given: what is kept of each one's output, and its graph."""
    kept, graphs = {}, {}
    for size in sizes:
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size], pool=pool, stream=stream):
            # inside the capture, so that the next one can have the memory
            kept[size] = WAYS[way](model(x[:size]))
    return kept, graphs


def on_gpu(model: Decoder, x: torch.Tensor, sizes: list[int], way: str) -> Row:
    """Capture every size, largest first, into one pool; then replay every size against eager."""
    stream = warm_stream(model, x)
    with fresh_pool() as pool:
        kept, graphs = capture_all(model, x, sorted(sizes, reverse=True), way, pool, stream)
        segments = segments_of(pool)
        pool_bytes = sum(segment["total_size"] for segment in segments)
        pinned = sum(segment["allocated_size"] for segment in segments)
        equal = None if kept[sizes[0]] is None else True
        for size in sizes:
            if equal:
                x.normal_()
                expected = model(x[:size])
                graphs[size].replay()
                equal = all(map(torch.equal, flat(kept[size]), flat(expected)))
        outputs = [tensor for out in kept.values() for tensor in flat(out)]
        row = Row(way, pool_bytes / MIB, pinned / MIB, sum(map(held, outputs)), len(outputs), equal)
        del kept, graphs, outputs
    return row


def on_cpu(model: Decoder, x: torch.Tensor, sizes: list[int], way: str) -> Row:
    """The same without graphs: which output bytes stay allocated once the model's references are gone."""
    kept, probes, equal = {}, [], None
    for size in sizes:
        out = model(x[:size])
        probes += flat(weak_ref_tensors(out))
        kept[size] = WAYS[way](out)
        if kept[size] is not None:
            equal = equal is not False and all(map(torch.equal, flat(kept[size]), flat(model(x[:size]))))
        del out
    outputs = [tensor for out in kept.values() for tensor in flat(out)]
    pinned = sum(probe.nbytes for probe in probes if owner_alive(probe)) / MIB
    return Row(way, pinned, pinned, sum(map(held, outputs)), len(outputs), equal)


@torch.inference_mode()
def measure(device: str, hidden: int, sizes: list[int]) -> list[Row]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Decoder(hidden).to(device, dtype)
    x = torch.randn(max(sizes), hidden, device=device, dtype=dtype)
    run = on_gpu if device == "cuda" else on_cpu
    return [run(model, x, sizes, way) for way in WAYS]


def table(rows: list[Row], device: str) -> str:
    first = "pool MiB" if device == "cuda" else "allocated MiB"
    lines = [f"{'outputs kept':16} {first:>13} {'pinned MiB':>11} {'owners alive':>13} {'= eager':>8}"]
    for row in rows:
        equal = {None: "-", True: "yes", False: "NO"}[row.equals_eager]
        alive = f"{row.owners_alive}/{row.tensors}"
        lines.append(f"{row.way:16} {row.pool_mib:13.1f} {row.pinned_mib:11.1f} {alive:>13} {equal:>8}")
    return "\n".join(lines)


def main(json_file: str | None = None, hidden: int | None = None, sizes: list[int] | None = None) -> int:
    """Print the table; 0 if the nested way is at the floor and every replay equals eager."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = hidden or (4096 if device == "cuda" else 256)
    sizes = sizes or SIZES
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU storages: no GPU here"
    print(f"{len(sizes)} capture sizes {sizes[0]} to {sizes[-1]}, hidden {hidden}, 3 aux outputs, on {name}")
    rows = measure(device, hidden, sizes)
    print(table(rows, device))
    by_way = {row.way: row for row in rows}
    nested, floor, strong = by_way["nested weak"], by_way["dropped (floor)"], by_way["strong"]
    above = nested.pool_mib - floor.pool_mib
    saved = strong.pool_mib - nested.pool_mib
    print(f"nested weak refs: {above:.1f} MiB above the floor, {saved:.1f} MiB below strong outputs")
    if json_file:
        machine = dict(device=name, torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version())
        result = dict(machine=machine, hidden=hidden, sizes=sizes, rows=[asdict(row) for row in rows])
        with open(json_file, "w") as file:
            json.dump(result, file, indent=1)
    good = above <= TOLERANCE_MIB and nested.owners_alive == 0 and False not in [row.equals_eager for row in rows]
    return 0 if good else 1
