"""Layers on a GPU, from a checkout: ``python -m benchmarks.layer`` is ``qmoe-ep bench``."""

from __future__ import annotations

import sys

from qmoe_ep.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
