"""Downloads the pinned releases of the engines and unpacks their Python sources: .peers/NAME-VERSION/.

usage: python scripts/fetch_peers.py [NAME ...]     all of them: 0.7 GB to download, 150 MB to keep
The tests and `python -m benchmarks.peer_faults` run against these files. What is there already stays.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PINNED = [
    ("vllm", "0.33.0"),
    ("vllm", "0.26.0"),  # the release for torch 2.11
    ("sglang", "0.5.23"),
    ("transformer_engine", "2.20.2"),
    ("megatron_core", "0.19.2"),
]
FOLDER = Path(__file__).parents[1] / ".peers"
TARGET = ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none"]
PLATFORMS = ["any", *(f"manylinux{tag}_x86_64" for tag in ("2014", "_2_24", "_2_28", "_2_31", "_2_34", "_2_35"))]


def fetch(name: str, version: str) -> None:
    target = FOLDER / f"{name}-{version}"
    if target.exists():
        return
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *TARGET]
        command += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([*command, "--dest", temporary, f"{name}=={version}"], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            sources = [member for member in archive.namelist() if member.endswith((".py", "METADATA"))]
            archive.extractall(unpacked, sources)
        unpacked.rename(target)
    print(f"{target.name}: {sum(1 for _ in target.rglob('*.py'))} files")


if __name__ == "__main__":
    for name, version in PINNED:
        if not sys.argv[1:] or name in sys.argv[1:]:
            fetch(name, version)
