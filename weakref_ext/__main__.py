"""``python -m weakref_ext demo`` shows what weak refs save; ``info`` prints the facts that a bug report needs."""

import argparse
import os
import sys

import torch

from . import __version__, _demo, _load


def info() -> int:
    print(f"weakref_ext {__version__}")
    for title, facts in (("built with", _load.build_facts()), ("running", _load.running_facts())):
        print(f"{title:11}", ", ".join(f"{name} {value}" for name, value in facts.items()))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"{'GPUs':11}", ", ".join(gpus) or "none")
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("WEAKREF_EXT_")]
    print(f"{'variables':11}", " ".join(variables) or "none")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m weakref_ext", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, build facts, GPUs")
    demo = commands.add_parser("demo", help="four ways of keeping a capture's output, and what each costs")
    demo.add_argument("--json", metavar="FILE")
    demo.add_argument("--hidden", type=int, help="default 4096 on a GPU, 256 on a CPU")
    demo.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], metavar="1,2,4")
    args = parser.parse_args()
    return info() if args.command == "info" else _demo.main(args.json, args.hidden, args.sizes)


if __name__ == "__main__":
    sys.exit(main())
