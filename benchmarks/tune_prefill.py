"""Where a prefill call spends its time: ``python -m benchmarks.tune_prefill``.

Captures graphs of the first 1, 2, … launches of a call's plan and reports the differences of their medians, so that
launches that overlap count as they do in the whole. Routing may be skewed: ``--skew one`` sends every token to one
expert first, ``zipf`` draws experts with probability 1 / rank, ``even`` gives all the same number of tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np

import qmoe_ep
from benchmarks.layer import DTYPES, SHAPES, Layer, machine
from benchmarks.timing import median_microseconds
from qmoe_ep.call import describe_call
from qmoe_ep.cuda.variants import choose_plan
from qmoe_ep.graph_capture import Capture
from qmoe_ep.kernels import grouped, prefill
from qmoe_ep.kernels.plan import Plan
from qmoe_ep.nvrtc_cache import ModuleCache

FAMILIES = {"auto": choose_plan, "prefill": prefill.plan, "grouped": grouped.plan}


def skewed_logits(layer: Layer, rows: int, skew: str) -> np.ndarray[Any, Any]:
    """Logits [rows, experts] whose largest k give the wanted spread of tokens."""
    rng, experts = np.random.default_rng(1), layer.experts
    logits = rng.standard_normal((rows, experts))
    if skew == "one":
        logits[:, 0] += 50
    elif skew == "zipf":
        logits = -np.log(rng.exponential(size=(rows, experts)) * np.arange(1, experts + 1))
    elif skew == "even":
        first = np.arange(rows)[:, None] * layer.k + np.arange(layer.k)
        np.put_along_axis(logits, first % experts, 50.0, axis=1)
    return logits.astype(DTYPES[layer.dtype])


def measure(layer: Layer, rows: int, family: str, skew: str, whole: bool) -> dict[str, Any]:
    """Time of every launch of one call, µs, by name; only of all together if ``whole``."""
    gpu, runtime = layer.gpu, layer.gpu.runtime
    x = layer.rng.standard_normal((rows, layer.hidden)).astype(DTYPES[layer.dtype])
    operands: dict[Any, Any] = {
        0: gpu.to_device(x),
        1: gpu.to_device(skewed_logits(layer, rows, skew)),
        **layer.weights,
    }
    call = describe_call(layer.node, [operands.get(i) for i in range(10)])
    plan: Plan | None = FAMILIES[family](call, runtime.capabilities())
    if plan is None:
        raise SystemExit(f"the {family} kernels do not serve {layer.shape} at {rows} rows")
    modules = ModuleCache(runtime)
    modules.preload([step.module for step in plan.steps])
    addresses = {index: tensor.pointer for index, tensor in operands.items()}
    output = gpu.to_device(np.full(x.shape, np.nan, x.dtype))
    addresses["output"] = output.pointer
    times: list[float] = []
    with contextlib.ExitStack() as stack:
        for slot, nbytes in plan.scratch:
            buffer = runtime.allocate(max(nbytes, 1), slot)
            stack.callback(buffer.release)
            addresses[slot] = buffer.pointer
        launches = []
        for step in plan.steps:
            launch: Any = runtime.prepare(step, modules.function(step.module, step.entry), "benchmark")
            launch.bind(step.pointers, addresses)
            launches.append(launch)
        for end in [len(launches)] if whole else range(1, len(launches) + 1):
            with Capture(runtime) as capture:
                for launch in launches[:end]:
                    launch.enqueue()
            with capture.graph as graph:
                times.append(median_microseconds(runtime, graph.replay, 7, 2))
        runtime.wait()
    total = times[-1]
    steps = (
        {}
        if whole
        else {step.name: round(t - b, 1) for step, t, b in zip(plan.steps, times, [0.0, *times], strict=False)}
    )
    tflops = 2e-6 * rows * layer.k * 3 * layer.hidden * layer.inter / total
    result = {"shape": layer.shape, "rows": rows, "dtype": layer.dtype, "skew": skew, "variant": plan.variant}
    scratch = round(sum(nbytes for _, nbytes in plan.scratch) / 2**20, 1)
    return result | {"us": round(total, 1), "tflops": round(tflops, 1), "scratch_mib": scratch, "steps": steps}


def main() -> None:
    """Parse the command line, measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="*", type=int, default=[512, 4096])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--families", nargs="*", default=["auto"], choices=FAMILIES)
    parser.add_argument("--skews", nargs="*", default=["random"], choices=["random", "one", "zipf", "even"])
    parser.add_argument("--whole", action="store_true", help="only the whole call")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    results = []
    with qmoe_ep.CudaExecutionProvider() as gpu:
        for shape in options.shapes:
            layer = Layer(gpu, shape, options.dtype, options.bits, options.block)
            for rows in options.rows:
                for family in options.families:
                    for skew in options.skews:
                        results.append(measure(layer, rows, family, skew, options.whole))
                        print(json.dumps(results[-1]), flush=True)
            layer.kernel.close()
            del layer
        record = machine(gpu) | {"results": results}
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
