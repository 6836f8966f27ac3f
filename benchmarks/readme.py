"""Rewrites the blocks of README.md between <!-- NAME --> and <!-- /NAME --> from the committed results alone.

``python -m benchmarks.readme``. A table whose results do not exist is left out; no figure is written by hand.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ._harness import RESULTS, load
from .walk import ENTRY, FLOOR, MAIN, OURS, TE, VLLM

README = Path(__file__).parents[1] / "README.md"
MODE = "inference mode"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]], align: str = "---:") -> str:
    """`align`: of all columns but the first."""
    head = list(head)
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def on(machine: dict[str, Any]) -> str:
    return f"{machine['gpu'] or machine['cpu'] + ' CPU'}, torch {machine['torch']}"


def spread(row: dict[str, float], digits: int = 2, scale: float = 1) -> str:
    median, low, high = (row[key] / scale for key in ("median", "q1", "q3"))
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def walk(folder: Path) -> str | None:
    results = [result for kind in ("gpu", "cpu") if (result := load(f"walk_{kind}", folder))]
    if not results:
        return None
    tables = [result["structures"][MODE][MAIN] for result in results]
    names = sorted(
        {name for rows in tables for name in rows},
        key=lambda name: next(rows[name]["median"] for rows in tables if name in rows),
    )
    body = [[name, *(spread(rows[name], scale=1e3) if name in rows else "" for rows in tables)] for name in names]
    text = f"One call for `{MAIN}`, µs: median (quartiles), in {MODE}.\n\n"
    text += markdown(["", *(on(result["machine"]) for result in results)], body)
    for result in results:
        faster = {name: row["median"] for name, row in result["times_faster"][MODE][MAIN].items()}
        said = [
            f"the {what} is {faster[f'{ours} / {other}']:.1f} times faster than the {than}"
            for what, ours, than, other in (
                ("op", OURS, "vLLM way", VLLM),
                ("Python entry", ENTRY, "vLLM way", VLLM),
                ("op", OURS, "TE way", TE),
            )
            if f"{ours} / {other}" in faster
        ]
        if said:
            said.append(f"the Python entry takes {1 / faster[f'{ENTRY} / {FLOOR}']:.2f} of the floor's time")
            text += f"\n\nOn {on(result['machine'])}: {', '.join(said)} (medians of the ratios within a round);"
            rows = result["structures"][MODE][MAIN]
            froms = [f"the vLLM way is {result['peers']['vllm']}"]
            froms += [f"TE's is {result['peers']['transformer_engine']}"] if TE in rows else []
            text += " " + "; ".join(froms) + "."
    return text


def memory(folder: Path) -> str | None:
    result = load("memory_gpu", folder)
    if result is None:
        return None
    sizes = result["rows"][0]["sizes"]
    pools: dict[int, dict[str, float]] = {}
    for row in result["rows"]:
        if (row["sizes"], row["order"], row["hidden"]) == (sizes, "largest first", 4096):
            pools.setdefault(row["num_aux"], {})[row["way"]] = row["pool_mib"]
    ways = list(next(iter(pools.values())))
    body = [[str(num_aux), *(f"{by_way[way]:.0f}" for way in ways)] for num_aux, by_way in pools.items()]
    return f"Graph pool for sizes {sizes} tokens, hidden 4096, bf16, MiB, on {on(result['machine'])}.\n\n" + markdown(
        ["aux outputs", *ways], body
    )


def capture(folder: Path) -> str | None:
    result = load("capture_gpu", folder)
    if result is None:
        return None
    body = [
        [
            title,
            spread(each["capture_us"][ENTRY], 0),
            spread(each["walk_us"][ENTRY]),
            f"{each['share_percent'][ENTRY]['median']:.2f} %",
            f"{each['share_percent'][VLLM]['median']:.2f} %",
            f"{each['share_percent'][TE]['median']:.2f} %",
        ]
        for title, each in result["captures"].items()
    ]
    head = ["model", "capture, µs", "our walk in it, µs", "our share", "vLLM way's", "TE way's"]
    text = f"A call in each capture of {len(result['sizes'])} sizes, cold, hidden {result['hidden']}, Python entry, "
    return text + f"on {on(result['machine'])}.\n\n" + markdown(head, body)


def replay(folder: Path) -> str | None:
    result = load("replay_gpu", folder)
    if result is None:
        return None
    added = result["replay_added_ns"]["weak - strong"]
    text = f"A replay with weak outputs kept takes {spread(added, 0)} ns more than one with strong outputs, of "
    return text + f"{result['replay']['strong']['median']:,.0f} ns, on {on(result['machine'])}."


def engine(folder: Path) -> str | None:
    result = load("vllm_gpu", folder)
    if result is None:
        return None
    arms = {"stock": "as released", "python": "Python recursion", "plugin": "plugin"}
    body = [
        [
            f"{path.replace('-tp2', ' on two GPUs')}, {rows['plugin']['sizes']} sizes",
            *(mib(rows[arm]) if arm in rows else "" for arm in arms),
        ]
        for path, rows in result["paths"].items()
    ]
    machine = result["machine"]
    text = (
        f"vLLM {machine['vllm']}, whole: EAGLE3 with 3 aux outputs of 4096 on dummy weights, the same tokens in every "
    )
    text += f"column. MiB allocated, and in graph pools, on {machine['gpu']}, torch {machine['torch']}.\n\n"
    return text + markdown(["captures", *arms.values()], body)


def mib(arm: dict[str, Any]) -> str:
    return f"{arm['allocated_mib'][0]:,.1f}, {arm['pool_mib'][0]:.0f}"


def faults(folder: Path) -> str | None:
    """Those seen with nothing stood in for the engine."""
    result = load("peer_faults_cuda", folder)
    if result is None:
        return None
    seen = [each for each in result["faults"] if "stand-in" not in each["how"] and each["input"] != "the same"]
    body = [[each["function"], each["input"], each["today"].partition(":")[0], each["with"]] for each in seen]
    return markdown(["released function", "input", "today", "with the drop-in"], body, align="---")


BLOCKS = {"numbers": (walk, memory, engine, capture, replay), "faults": (faults,)}


def rewritten(text: str, folder: Path = RESULTS) -> str:
    """`text` with its blocks made from the results of today.

    Raises ValueError where markers are missing.
    """
    for name, tables in BLOCKS.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"no block between {start} and {end}")
        made = "\n\n".join(part for table in tables if (part := table(folder)))
        text = f"{before}{start}\n{made}\n{end}{after}"
    return text


if __name__ == "__main__":
    try:
        README.write_text(rewritten(README.read_text()))
    except ValueError as error:
        sys.exit(f"{README.name}: {error}")
