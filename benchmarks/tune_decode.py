"""Geometries of the decode kernels against each other: ``python -m benchmarks.tune_decode``.

For every shape the geometry that a plan would take and some neighbours of it (warps, stages) are timed as
:mod:`qmoe_ep.benchmark.layer` times a layer: a graph of calls on disjoint experts, the median replay. The rules of
:func:`qmoe_ep.kernels.decode_geometry.choose_geometry` are read off this table; nothing is timed when a plan is made.
The output of every geometry is poisoned and then compared with that of the provider, which
:mod:`qmoe_ep.benchmark.layer` compares with the float64 reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import qmoe_ep
from qmoe_ep.benchmark.layer import DTYPES, SHAPES, Case, Layer
from qmoe_ep.benchmark.timing import ReadLimit, median_microseconds
from qmoe_ep.call import CallDescription, describe_call
from qmoe_ep.capabilities import Capabilities
from qmoe_ep.cuda.tensor import DeviceTensor
from qmoe_ep.graph_capture import Capture
from qmoe_ep.kernels import decode
from qmoe_ep.kernels.decode_geometry import Geometry, choose_geometry
from qmoe_ep.kernels.plan import Plan
from qmoe_ep.nvrtc_cache import ModuleCache

Pair = tuple[Geometry, Geometry]


def neighbours(chosen: Pair) -> Iterator[Pair]:
    """The chosen geometry, and with other warps and stages of one kernel."""
    gate, down = chosen
    yield chosen
    for stages in (2, 3, 4):
        for ahead in range(stages + 1):
            yield replace(gate, stages=stages, ahead=ahead), down
    for warps in (8, 10, 12, 16):
        for stages in (2, 3, 4):
            yield replace(gate, warps=warps, stages=stages), down
            yield gate, replace(down, warps=warps, stages=stages)


class Calls:
    """One call per disjoint set of experts, with the operands of all of them on the device."""

    def __init__(self, layer: Layer) -> None:
        gpu, self.layer = layer.gpu, layer
        count = max(2, min(layer.experts // layer.k, 16))
        self.x = gpu.to_device(layer.rng.standard_normal((1, layer.hidden)).astype(DTYPES[layer.case.dtype]))
        self.logits = [gpu.to_device(layer.logits(1, call)) for call in range(count)]
        self.expected = [self._provider(logits) for logits in self.logits]
        weights = (layer.weights.get(i) for i in range(2, 10))
        self.call: CallDescription = describe_call(layer.node, [self.x, self.logits[0], *weights])
        self.output = gpu.empty((1, layer.hidden), self.x.dtype)
        self.scratch = gpu.empty((1 << 22,), np.float32)

    def _provider(self, logits: DeviceTensor) -> np.ndarray[Any, Any]:
        output = self.layer.gpu.empty((1, self.layer.hidden), self.x.dtype)
        self.layer.kernel.execute([self.x, logits], [output])
        return output.numpy().astype(np.float64)

    def launches(self, plan: Plan, modules: ModuleCache) -> list[list[Any]]:
        """Of every call, the prepared launches of a plan."""
        result = []
        for logits in self.logits:
            addresses: dict[int | str, int] = {i: tensor.pointer for i, tensor in self.layer.weights.items()}
            addresses |= {0: self.x.pointer, 1: logits.pointer, "output": self.output.pointer}
            addresses |= {slot: self.scratch.pointer for slot, _ in plan.scratch}
            prepared = []
            for step in plan.steps:
                function = modules.function(step.module, step.entry)
                launch = self.layer.gpu.runtime.prepare(step, function, "tuning")
                launch.bind(step.pointers, addresses)
                prepared.append(launch)
            result.append(prepared)
        return result

    def difference(self, launches: list[list[Any]]) -> float:
        """Largest relative difference of any call's output from the provider's."""
        runtime, largest = self.layer.gpu.runtime, 0.0
        for prepared, expected in zip(launches, self.expected, strict=True):
            with runtime.lock, runtime.current():
                runtime.memset(self.output.pointer, 0xFF, self.output.nbytes)
                for launch in prepared:
                    launch.enqueue()
            got = self.output.numpy().astype(np.float64)
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            largest = max(largest, float(error)) if np.isfinite(error) else float("inf")
        return largest

    def microseconds(self, launches: list[list[Any]]) -> float:
        """Of one call."""
        repeats = max(1, 48 // len(launches))
        with Capture(self.layer.gpu.runtime) as capture:
            for _ in range(repeats):
                for prepared in launches:
                    for launch in prepared:
                        launch.enqueue()
        with capture.graph as graph:
            return median_microseconds(self.layer.gpu.runtime, graph.replay) / repeats / len(launches)


def tune(layer: Layer, limit: ReadLimit, modules: ModuleCache, others: bool) -> None:
    """Print a table for one shape."""
    capabilities: Capabilities = layer.gpu.runtime.capabilities()
    calls = Calls(layer)
    shapes = decode.shapes(calls.call, capabilities)
    chosen = None if isinstance(shapes, str) else choose_geometry(*shapes, capabilities)
    if chosen is None:
        print(f"{layer.case.shape.name}: not served")
        return
    nbytes = calls.call.top_k * sum(matrix.expert_bytes for matrix in calls.call.experts.matrices)
    bound = limit.microseconds(nbytes)
    case = layer.case
    title = f"{case.shape.name} {case.dtype} int{case.bits} blocks of {case.block_size}"
    print(f"{title}: {nbytes / 1e6:.1f} MB, limit {bound:.2f} us", flush=True)
    plans = {
        pair: plan
        for pair in (dict.fromkeys(neighbours(chosen)) if others else (chosen,))
        if (plan := decode.plan(calls.call, capabilities, geometry=pair)) is not None
    }
    modules.preload([step.module for plan in plans.values() for step in plan.steps])
    for (gate, down), plan in plans.items():
        launches = calls.launches(plan, modules)
        difference = calls.difference(launches)
        whole = calls.microseconds(launches)
        parts = [calls.microseconds([[prepared[i]] for prepared in launches]) for i in range(2)]
        print(
            f"  {gate.warps:2}x{gate.stages}/{gate.ahead} {down.warps:2}x{down.stages} {whole:7.2f} us "
            f"{whole / bound:5.2f} gate/up {parts[0]:6.2f} down {parts[1]:6.2f} difference {difference:.1e}",
            flush=True,
        )


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="*", default=["float16"], choices=DTYPES)
    parser.add_argument("--bits", nargs="*", type=int, default=[4])
    parser.add_argument("--blocks", nargs="*", type=int, default=[32])
    parser.add_argument("--chosen", action="store_true", help="only the geometry that a plan takes")
    options = parser.parse_args()
    with qmoe_ep.CudaExecutionProvider() as gpu:
        limit, modules = ReadLimit(gpu.runtime), ModuleCache(gpu.runtime)
        for shape in options.shapes:
            for dtype in options.dtypes:
                for bits in options.bits:
                    for block in options.blocks:
                        layer = Layer(gpu, Case(SHAPES[shape], dtype, bits, block))
                        tune(layer, limit, modules, not options.chosen)
                        layer.kernel.close()
                        del layer
        limit.close()


if __name__ == "__main__":
    main()
