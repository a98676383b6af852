"""Small programs on the runtime layer, shared by its tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from qmoe_ep.graph_capture import CallSignature, Capture, CapturedGraph, GraphResources, WarmedCalls, registrar
from qmoe_ep.memory import Allocation
from qmoe_ep.nvrtc_cache import ModuleCache
from qmoe_ep.runtime import Runtime
from qmoe_ep.scratch import ScratchPool

from .machine import Machine
from .toys import scale_step

__all__ = [
    "ToyKernel",
    "allocated",
    "embedder_stream",
    "everything",
    "foreign_capture",
    "in_embedder",
    "launch_and_destroy",
    "read",
    "run_scale",
]


def embedder_stream(simulated: Any) -> int:
    """Return the handle of a stream that another library made in the primary context."""
    with in_embedder(simulated) as binding:
        return int(binding.cuStreamCreate(0)[1])


@contextlib.contextmanager
def allocated(runtime: Runtime, *sizes: int) -> Iterator[list[Allocation]]:
    """Allocate, and release at the end whatever happens."""
    made: list[Allocation] = []
    try:
        for size in sizes:
            made.append(runtime.allocate(size, "operand"))
        yield made
    finally:
        for allocation in made:
            allocation.release()


def read(runtime: Runtime, allocation: Allocation) -> npt.NDArray[np.float32]:
    """Return a device buffer as f32."""
    host = np.full(allocation.nbytes // 4, np.nan, np.float32)
    runtime.dtoh(host, allocation.pointer)
    return host


def run_scale(runtime: Runtime, count: int = 100) -> npt.NDArray[Any]:
    """Return 3 * (0, 1, …, count - 1), computed on the device; nothing stays allocated, even on failure."""
    step = scale_step(count, 3.0)
    launch = runtime.prepare(step, ModuleCache(runtime).function(step.module, step.entry), "node 7")
    with allocated(runtime, 4 * count, 4 * count) as (source, destination):
        runtime.htod(source.pointer, np.arange(count, dtype=np.float32))
        with runtime.lock, runtime.current():
            launch.bind(step.pointers, {"source": source.pointer, "destination": destination.pointer})
            launch.enqueue()
        return read(runtime, destination)


class ToyKernel:
    """output = 6 * input by way of a scratch slot: two launches, as a real kernel object orders its call."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.modules = ModuleCache(runtime)
        self.scratch = ScratchPool(runtime, "node 7")
        self.warmed: WarmedCalls[int] = WarmedCalls(limit=2)
        self.used: tuple[Allocation, ...] = ()

    @staticmethod
    def signature(count: int) -> CallSignature:
        return CallSignature((("float32", (count,)), None), (("float32", (count,)),))

    def execute(self, source: Allocation, destination: Allocation) -> None:
        """Scale f32 buffers of one size."""
        count, runtime = source.nbytes // 4, self.runtime
        with runtime.lock, runtime.current():
            runtime.collect()
            owner = registrar(runtime)
            signature = self.signature(count)
            if owner is not None:
                self.warmed.require(signature)
                owner.register(source)
                owner.register(destination)
            with self.scratch.call(owner) as call:
                between = call.ensure("between", 4 * count)
                for factor, of, to in ((2.0, source.pointer, between), (3.0, between, destination.pointer)):
                    step = scale_step(count, factor)
                    launch = runtime.prepare(step, self.modules.function(step.module, step.entry), "node 7")
                    launch.bind(step.pointers, {"source": of, "destination": to})
                    launch.enqueue()
                call.publish()
                self.used = tuple(call.used.values())
            if owner is None:
                self.warmed.remember(signature, count)
        runtime.synchronize()

    def capture(
        self, source: Allocation, destination: Allocation, update: CapturedGraph | None = None
    ) -> CapturedGraph:
        """Capture one call."""
        with Capture(self.runtime, update) as capture:
            self.execute(source, destination)
        return capture.graph


@contextlib.contextmanager
def in_embedder(simulated: Any) -> Iterator[Any]:
    """Call the driver as another library does, in the primary context."""
    binding = simulated.driver
    with simulated.embedder():
        binding.cuCtxPushCurrent(binding.cuDevicePrimaryCtxRetain(0)[1])
        try:
            yield binding
        finally:
            binding.cuCtxPopCurrent()
            binding.cuDevicePrimaryCtxRelease(0)


@contextlib.contextmanager
def foreign_capture(simulated: Any, runtime: Runtime, executables: list[Any]) -> Iterator[None]:
    """Capture a runtime's stream as its embedder would; appends (executable, stream) at the end."""
    with in_embedder(simulated) as binding:
        assert not binding.cuStreamBeginCapture(runtime.stream, 1)[0]
    try:
        yield
    finally:
        with in_embedder(simulated) as binding:
            graph = binding.cuStreamEndCapture(runtime.stream)[1]
            executables.append((binding.cuGraphInstantiate(graph, 0)[1], runtime.stream))
            binding.cuGraphDestroy(graph)


def launch_and_destroy(simulated: Any, executables: list[Any]) -> None:
    """Launch an embedder's graphs, wait, and drop them."""
    with in_embedder(simulated) as binding:
        for executable, stream in executables:
            binding.cuGraphLaunch(executable, stream)
            binding.cuStreamSynchronize(stream)
            binding.cuGraphExecDestroy(executable)


def everything(simulated: Machine, runtime: Runtime) -> None:
    """Use every part of the runtime layer once. Results are checked; failures surface as the package's errors."""
    other = embedder_stream(simulated)
    with allocated(runtime, 40, 40, 80, 80) as (source, destination, large_source, large_destination):
        values = np.arange(10, dtype=np.float32)
        runtime.htod(source.pointer, values)
        runtime.memset(large_source.pointer, 0, 80)
        kernel = ToyKernel(runtime)
        try:
            kernel.execute(source, destination)
            with kernel.capture(source, destination) as graph:
                kernel.execute(large_source, large_destination)
                runtime.memset(destination.pointer, 0xFF, 40)
                graph.replay()
                np.testing.assert_array_equal(read(runtime, destination), 6 * values)
                runtime.memset(destination.pointer, 0xFF, 40)
                graph.replay(other)
                np.testing.assert_array_equal(read(runtime, destination), 6 * values)
                runtime.dtod(source.pointer, large_source.pointer, 40)
                kernel.capture(source, destination, update=graph)
                with Capture(runtime, update=graph):
                    kernel.execute(source, destination)
                    kernel.execute(source, destination)
                graph.replay()
                np.testing.assert_array_equal(read(runtime, destination), np.zeros(10))
            resources = GraphResources(runtime, kernel.used)
            executables: list[Any] = []
            try:
                with foreign_capture(simulated, runtime, executables):
                    kernel.execute(source, destination)
            finally:
                launch_and_destroy(simulated, executables)
            resources.close()
            step = scale_step(4, 1.0, shared_bytes=100_000)
            runtime.prepare(step, kernel.modules.function(step.module, step.entry))
            runtime.trim()
            runtime.memory_statistics()
            with Runtime(stream=other) as guest:
                assert run_scale(guest).tolist() == [3.0 * number for number in range(100)]
        finally:
            kernel.scratch.close()
