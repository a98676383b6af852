"""Where a call of many rows spends its time: ``python -m benchmarks.tune_prefill``.

Captures graphs of the first 1, 2, … launches of a call's plan and reports the differences of their medians, so that
launches that overlap count as they do in the whole. Whole layers, errors and other routing are for ``qmoe-ep bench``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np

import qmoe_ep
from qmoe_ep.benchmark.layer import DTYPES, ROUTINGS, SHAPES, Case, Layer, machine
from qmoe_ep.benchmark.timing import median_microseconds
from qmoe_ep.call import describe_call
from qmoe_ep.cuda.variants import choose_plan
from qmoe_ep.graph_capture import Capture
from qmoe_ep.kernels import grouped, prefill
from qmoe_ep.kernels.plan import Plan
from qmoe_ep.nvrtc_cache import ModuleCache

FAMILIES = {"auto": choose_plan, "prefill": prefill.plan, "grouped": grouped.plan}


def measure(layer: Layer, rows: int, family: str) -> dict[str, Any]:
    """Time of every launch of one call, µs, by name."""
    gpu, runtime = layer.gpu, layer.gpu.runtime
    x = layer.rng.standard_normal((rows, layer.hidden)).astype(DTYPES[layer.case.dtype])
    operands: dict[Any, Any] = {
        0: gpu.to_device(x),
        1: gpu.to_device(layer.logits(rows, 0)),
        **layer.weights,
    }
    call = describe_call(layer.node, [operands.get(i) for i in range(10)])
    plan: Plan | None = FAMILIES[family](call, runtime.capabilities())
    if plan is None:
        raise SystemExit(f"the {family} kernels do not serve {layer.case.shape.name} at {rows} rows")
    modules = ModuleCache(runtime)
    modules.preload([step.module for step in plan.steps])
    addresses = {index: tensor.pointer for index, tensor in operands.items()}
    output = gpu.to_device(np.full(x.shape, np.nan, x.dtype))
    addresses["output"] = output.pointer
    times: list[float] = []
    buffers = []
    with contextlib.ExitStack() as stack:
        for slot, nbytes in plan.scratch:
            buffer = runtime.allocate(max(nbytes, 1), slot)
            stack.callback(buffer.release)
            buffers.append(buffer)
            addresses[slot] = buffer.pointer
        launches = []
        for step in plan.steps:
            launch: Any = runtime.prepare(step, modules.function(step.module, step.entry), "benchmark")
            launch.bind(step.pointers, addresses)
            launches.append(launch)
        for end in range(1, len(launches) + 1):
            with runtime.lock, runtime.current(), Capture(runtime) as capture:
                for buffer in buffers:
                    capture.register(buffer)
                for launch in launches[:end]:
                    launch.enqueue()
            with capture.graph as graph:
                times.append(median_microseconds(runtime, graph.replay, 7, 2))
        runtime.wait()
    steps = {s.name: round(t - b, 1) for s, t, b in zip(plan.steps, times, [0.0, *times], strict=False)}
    return {
        "shape": layer.case.shape.name,
        "rows": rows,
        "dtype": layer.case.dtype,
        "routing": layer.case.routing,
        "variant": plan.variant,
        "us": round(times[-1], 1),
        "tflops": round(6e-6 * rows * layer.k * layer.hidden * layer.inter / times[-1], 1),
        "scratch_mib": round(sum(nbytes for _, nbytes in plan.scratch) / 2**20, 1),
        "steps": steps,
    }


def main() -> None:
    """Parse the command line, measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="*", type=int, default=[512, 4096])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--families", nargs="*", default=["auto"], choices=FAMILIES)
    parser.add_argument("--routing", default="normal", choices=ROUTINGS)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    results = []
    with qmoe_ep.CudaExecutionProvider() as gpu:
        for shape in options.shapes:
            layer = Layer(gpu, Case(SHAPES[shape], options.dtype, options.bits, options.block, options.routing))
            for rows in options.rows:
                for family in options.families:
                    results.append(measure(layer, rows, family))
                    print(json.dumps(results[-1]), flush=True)
            layer.kernel.close()
            del layer
        record = machine(gpu) | {"results": results}
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
