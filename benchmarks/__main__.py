"""``python -m benchmarks [NAME...]``: every benchmark that this machine can run, as tables and JSON."""

import sys

from ._harness import main

sys.exit(main(*sys.argv[1:]))
