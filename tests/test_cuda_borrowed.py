"""Calls in an embedder's memory and on its streams, on the simulated driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import simulated.kernels_decode
import simulated.kernels_portable
from problems import Problem, Recipe, build
from simulated.scenarios import embedder_stream, in_embedder
from special_problems import special
from test_cuda_provider import on_device

from qmoe_ep import CudaError, CudaExecutionProvider, QMoEError, user_objects
from qmoe_ep.cuda.borrowed import BorrowedCalls
from qmoe_ep.cuda.tensor import DeviceTensor
from qmoe_ep.errors import CaptureError
from qmoe_ep.graph_capture import embedders_graph
from qmoe_ep.telemetry import RouteTelemetry, RouteTelemetryConfig, runtime_memory

assert simulated.kernels_portable
assert simulated.kernels_decode


@pytest.fixture
def gpu(simulated: Any) -> Iterator[CudaExecutionProvider]:
    """A provider whose runtime lends context and memory."""
    with CudaExecutionProvider(kernels="portable") as provider:
        simulated.watch(provider.runtime)
        yield provider


@dataclass
class Embedder:
    """Allocates scratch, and keeps it all."""

    gpu: CudaExecutionProvider
    held: list[DeviceTensor] = field(default_factory=list)

    def allocate(self, nbytes: int) -> int:
        self.held.append(self.gpu.empty(max(nbytes, 1), np.uint8))
        return self.held[-1].pointer


@dataclass
class Call:
    """One problem on the device."""

    gpu: CudaExecutionProvider
    problem: Problem
    described: int = 0

    def __post_init__(self) -> None:
        self.operands = on_device(self.gpu, list(self.problem.inputs))
        self.output = self.gpu.to_device(self.problem.poisoned_output())

    def describe(self) -> Any:
        self.described += 1
        return self.problem.node, self.operands

    def run(self, calls: BorrowedCalls, stream: int, allocate: Any, telemetry: RouteTelemetry | None = None) -> None:
        addresses = [0 if o is None else o.pointer for o in self.operands]
        signature = tuple(None if o is None else o.signature for o in self.operands)
        calls.execute(signature, self.describe, addresses, self.output.pointer, stream, allocate, telemetry)

    def check(self, stream: int) -> None:
        self.gpu.runtime.wait_for_stream(stream)
        self.problem.check_closely(self.output.numpy())


def borrowed(gpu: CudaExecutionProvider) -> BorrowedCalls:
    return BorrowedCalls(gpu.runtime, gpu.modules, only_portable=True)


@pytest.mark.parametrize("rows", [1, 5])
def test_streams_and_memory_of_others(gpu: CudaExecutionProvider, simulated: Any, rows: int) -> None:
    calls, embedder = borrowed(gpu), Embedder(gpu)
    call = Call(gpu, build(Recipe(leading=(rows,), zero_points=(True, True, True), biases=(True, True, True))))
    gpu.synchronize()
    for stream in (embedder_stream(simulated), embedder_stream(simulated), 0):
        call.output.copy_from(call.problem.poisoned_output())
        gpu.runtime.order_stream_after(stream)
        call.run(calls, stream, embedder.allocate)
        call.check(stream)
    assert call.described == 3
    call.run(calls, stream, embedder.allocate)
    assert call.described == 3
    call.check(stream)


@pytest.mark.parametrize(("form", "function"), [("fp4", "geglu"), ("fp8 global", "limit after"), ("nvfp4", "relu2")])
def test_number_formats(gpu: CudaExecutionProvider, simulated: Any, form: str, function: str) -> None:
    calls, embedder = borrowed(gpu), Embedder(gpu)
    call = Call(gpu, special(form, function, 6, sparse=True))
    stream = embedder_stream(simulated)
    gpu.runtime.order_stream_after(stream)
    call.run(calls, stream, embedder.allocate)
    call.check(stream)


def test_alignment_is_part_of_what_is_prepared(gpu: CudaExecutionProvider, simulated: Any) -> None:
    calls, embedder = borrowed(gpu), Embedder(gpu)
    call = Call(gpu, build(Recipe(leading=(2,), dtype="float16", router_dtype="float16")))
    stream = embedder_stream(simulated)
    gpu.runtime.order_stream_after(stream)
    call.run(calls, stream, embedder.allocate)
    call.check(stream)
    x = call.operands[0]
    assert x is not None
    room = gpu.empty(x.nbytes + 16, np.uint8)
    shifted = gpu.view(room.pointer + 2, x.shape, x.dtype, room)
    call.operands[0] = shifted.copy_from(x)
    call.output.copy_from(call.problem.poisoned_output())
    gpu.runtime.order_stream_after(stream)
    call.run(calls, stream, embedder.allocate)
    call.check(stream)
    assert call.described == 2


def test_nothing_runs_for_zero_rows(gpu: CudaExecutionProvider, simulated: Any) -> None:
    call = Call(gpu, build(Recipe(leading=(0,))))
    call.run(borrowed(gpu), embedder_stream(simulated), pytest.fail)


def test_a_misfit_is_refused_before_anything_is_allocated(gpu: CudaExecutionProvider, simulated: Any) -> None:
    calls, call = borrowed(gpu), Call(gpu, build(Recipe()))
    call.operands[3] = gpu.to_device(np.ones((1, 2, 3), np.float32))
    for _ in range(2):
        with pytest.raises(QMoEError, match="fc1_scales"):
            call.run(calls, embedder_stream(simulated), pytest.fail)
    assert call.described == 2


def test_a_failed_launch_leaves_the_next_call_right(gpu: CudaExecutionProvider, simulated: Any) -> None:
    calls, embedder = borrowed(gpu), Embedder(gpu)
    call, stream = Call(gpu, build(Recipe())), embedder_stream(simulated)
    gpu.runtime.order_stream_after(stream)

    def fail(_: int) -> int:
        raise CudaError("CUDA_ERROR_OUT_OF_MEMORY", "allocate", "allocate scratch")

    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        call.run(calls, stream, fail)
    call.run(calls, stream, embedder.allocate)
    call.check(stream)


def test_a_cold_call_is_captured_and_its_graph_keeps_the_telemetry_record(
    gpu: CudaExecutionProvider, simulated: Any
) -> None:
    calls = borrowed(gpu)
    call, stream = Call(gpu, build(Recipe(leading=(3,), experts=4, k=2))), embedder_stream(simulated)
    telemetry = RouteTelemetry(runtime_memory(gpu.runtime), 2, None, 7)
    telemetry.arm(RouteTelemetryConfig(4, 2, mode="counts"))
    gpu.runtime.order_stream_after(stream)
    # Under its own capture an embedder's allocator works on memory that it has already.
    room = gpu.empty(1 << 20, np.uint8)
    before = gpu.memory_statistics().allocations
    with in_embedder(simulated) as binding:
        assert not binding.cuStreamBeginCapture(stream, 1)[0]
    call.run(calls, stream, lambda _: room.pointer, telemetry)
    with in_embedder(simulated) as binding:
        graph = binding.cuStreamEndCapture(stream)[1]
        executable = binding.cuGraphInstantiate(graph, 0)[1]
        binding.cuGraphDestroy(graph)
    assert np.isnan(call.output.numpy()).all()
    for _ in range(2):
        with in_embedder(simulated) as binding:
            binding.cuGraphLaunch(executable, stream)
        call.check(stream)
    snapshot = telemetry.snapshot()
    assert snapshot is not None
    assert (snapshot.rows, snapshot.routes) == (6, 12)
    telemetry.disarm()
    del telemetry
    gc.collect()
    assert gpu.memory_statistics().allocations == before
    with in_embedder(simulated) as binding:
        binding.cuGraphLaunch(executable, stream)
        binding.cuStreamSynchronize(stream)
        binding.cuGraphExecDestroy(executable)
    assert gpu.memory_statistics().allocations == before - 1
    assert user_objects.pending() == 0


def test_eager_calls_count_before_the_record_is_read_or_goes(gpu: CudaExecutionProvider, simulated: Any) -> None:
    calls, embedder = borrowed(gpu), Embedder(gpu)
    call, stream = Call(gpu, build(Recipe(leading=(3,), experts=4, k=2))), embedder_stream(simulated)
    telemetry = RouteTelemetry(runtime_memory(gpu.runtime), 2, None, 7)
    telemetry.arm(RouteTelemetryConfig(4, 2, mode="bitmap"))
    gpu.runtime.order_stream_after(stream)
    call.run(calls, stream, embedder.allocate, telemetry)
    snapshot = telemetry.snapshot()
    assert snapshot is not None
    assert snapshot.rows == 3
    call.run(calls, stream, embedder.allocate, telemetry)
    del telemetry
    gc.collect()
    gpu.memory_statistics()
    call.check(stream)


def test_synchronous_calls_wait_for_their_stream(simulated: Any) -> None:
    with CudaExecutionProvider(kernels="portable", synchronous=True) as gpu:
        simulated.watch(gpu.runtime)
        call, stream, embedder = Call(gpu, build(Recipe())), embedder_stream(simulated), Embedder(gpu)
        gpu.synchronize()
        call.run(borrowed(gpu), stream, embedder.allocate)
        call.problem.check_closely(call.output.numpy())


def test_an_invalid_capture_is_said(gpu: CudaExecutionProvider, simulated: Any) -> None:
    stream = embedder_stream(simulated)
    runtime = gpu.runtime
    with runtime.lock, runtime.current():
        assert embedders_graph(runtime, stream) is None
    with in_embedder(simulated) as binding:
        binding.cuStreamBeginCapture(stream, 1)
        binding.cuStreamSynchronize(stream)
    simulated.violations.clear()
    with runtime.lock, runtime.current(), pytest.raises(CaptureError, match="invalidated"):
        embedders_graph(runtime, stream)
    with in_embedder(simulated) as binding:
        binding.cuStreamEndCapture(stream)
