"""Compares the arms of scripts/gpu_vllm.sh: python scripts/vllm/check.py FOLDER. Fails where a promise does.

Writes FOLDER/vllm_gpu.json: what each arm took, and the promises.

Per path: the same greedy tokens in all arms; the plugin's graph memory within 2 MiB of the recursion's; its log line
once per process; no stored output pins memory of a graph pool. On the breakable path also 390 MiB or more below stock:
there the auxiliary hidden states, 16,647 tokens x 3 x 4096 x 2 bytes over the 67 sizes, are nested.
"""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
TOLERANCE_MIB, SAVED_MIB = 2, 390
promises: list[dict] = []
figures: dict[str, dict] = {}


def promise(text: str, holds: bool) -> None:
    promises.append(dict(what=text, holds=holds))
    print("ok  " if holds else "FAIL", text)


def memory(arm: dict) -> list[float]:
    return [worker["allocated_mib"] for worker in arm["workers"]]


paths = sorted({file.stem.split("_")[1] for file in folder.glob("vllm_*_plugin.json")})
if not paths:
    sys.exit(f"{folder} holds no vllm_PATH_plugin.json")
for path in paths:
    arms = {arm: json.loads((folder / f"vllm_{path}_{arm}.json").read_text()) for arm in ("stock", "plugin")}
    recursion = folder / f"vllm_{path}_python.json"
    if recursion.exists():
        arms["python"] = json.loads(recursion.read_text())
    plugin = arms["plugin"]
    tp, workers = plugin["tp"], plugin["workers"]
    figures[path] = {
        name: dict(sizes=arm["sizes"], tp=tp, stored_outputs=arm["workers"][0]["stored"], allocated_mib=memory(arm),
                   pool_mib=[worker["pool_mib"] for worker in arm["workers"]])
        for name, arm in arms.items()
    }  # fmt: skip
    for name, arm in arms.items():
        pools = ", ".join(f"{worker['pool_mib']:.0f} MiB" for worker in arm["workers"])
        print(
            f"{path} {name}: allocated {memory(arm)} MiB, pools {pools}, {arm['workers'][0]['stored']} stored outputs"
        )
    promise(
        f"{path}: same tokens in {', '.join(arms)}", all(arm["tokens"] == plugin["tokens"] for arm in arms.values())
    )
    promise(f"{path}: vLLM loaded the plugin by itself", all(worker["patched"] for worker in workers))
    promise(f"{path}: outputs were captured", all(worker["stored"] for worker in workers))
    promise(f"{path}: stock and recursion ran without it", not any(
        worker["patched"] for name, arm in arms.items() if name != "plugin" for worker in arm["workers"]))  # fmt: skip
    pinned = [shape for worker in workers for shape in worker["pinned"]]
    elsewhere = sum(len(worker["elsewhere"]) for worker in workers)
    promise(
        f"{path}: nothing of a graph pool pinned (found {pinned}; {elsewhere} owned outside of the pools)", not pinned
    )
    lines = (folder / f"vllm_{path}_plugin.log").read_text().count("weakref_ext: patched vLLM")
    processes = 1 if tp == 1 else tp + 1
    promise(f"{path}: {lines} log lines in {processes} processes", lines == processes)
    if "python" in arms:
        apart = max(abs(a - b) for a, b in zip(memory(plugin), memory(arms["python"]), strict=True))
        promise(f"{path}: {apart:.1f} MiB from the recursion", apart <= TOLERANCE_MIB)
    saved = min(a - b for a, b in zip(memory(arms["stock"]), memory(plugin), strict=True))
    if path == "breakable" and plugin["sizes"] == 67:
        promise(f"{path}: {saved:.1f} MiB below stock", saved >= SAVED_MIB)
    else:
        promise(f"{path}: no more memory than stock ({saved:.1f} MiB below)", saved >= -TOLERANCE_MIB)
summary = dict(machine=plugin["machine"], paths=figures, promises=promises)
(folder / "vllm_gpu.json").write_text(json.dumps(summary, indent=1) + "\n")
sys.exit(not all(each["holds"] for each in promises))
