"""Compile the whole matrix of kernel variants, for an architecture at a time, and report registers and spills.

    python scripts/compile_matrix.py --arch sm_90a --jobs 8

Run it when device code changes. The test suite compiles a pairwise-covering part of the same matrix.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kernel_variants import every_call  # noqa: E402

from qmoe_ep.call import CallDescription  # noqa: E402
from qmoe_ep.capabilities import Capabilities  # noqa: E402
from qmoe_ep.errors import NvrtcError  # noqa: E402
from qmoe_ep.kernels import portable  # noqa: E402
from qmoe_ep.kernels.plan import ModuleSource, Plan  # noqa: E402
from qmoe_ep.nvrtc_cache import compile_module  # noqa: E402

# Each product of axes is compiled in full; the axes not named stay at their first value.
PRODUCTS: tuple[tuple[str, ...], ...] = (
    ("function", "bits1", "block_size", "zero_points1", "dtype", "rows"),
    ("bits2", "block_size", "zero_points2", "scale_dtype", "dtype", "rows", "odd"),
    ("bits1", "block_size", "scale_dtype", "bias_dtype", "dtype"),
    ("bits1", "bits3", "zero_points1", "zero_points3", "function"),
    ("router_dtype", "routing_dtype", "normalize"),
)
FAMILIES: dict[str, Callable[[CallDescription, Capabilities], Plan]] = {"portable": portable.plan}


def modules(family: str, arch: str) -> Iterator[ModuleSource]:
    """Every distinct module of a family, in the order of the products."""
    capabilities = Capabilities.for_arch(arch)
    seen: set[str] = set()
    for call in itertools.chain.from_iterable(map(every_call, PRODUCTS)):
        for step in FAMILIES[family](call, capabilities).steps:
            if step.module.name not in seen:
                seen.add(step.module.name)
                yield step.module


def compile_one(module: ModuleSource, arch: str) -> list[str]:
    """Compile a module and say what is wrong with it."""
    try:
        compiled = compile_module(module, arch)
    except NvrtcError as error:
        return [f"{module.name}: {error}"]
    return [
        f"{module.name}: {report.entry} spills {report.spill_store_bytes} bytes at {report.registers} registers"
        for report in compiled.report()
        if report.spill_store_bytes or report.spill_load_bytes
    ]


def main() -> int:
    """Compile; exit code 1 if a module doesn't compile or spills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="portable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=int, default=None, help="stop after so many modules")
    options = parser.parse_args()
    os.environ["QMOE_EP_CACHE_DISABLE"] = "1"
    started, count, problems = time.monotonic(), 0, 0
    todo = itertools.islice(modules(options.family, options.arch), options.limit)
    with ThreadPoolExecutor(options.jobs) as pool:
        for messages in pool.map(lambda module: compile_one(module, options.arch), todo):
            count, problems = count + 1, problems + bool(messages)
            for message in messages:
                print(message)
    print(f"{count} modules for {options.arch}, {problems} with problems, {time.monotonic() - started:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
