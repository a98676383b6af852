"""Telemetry producers: windows, snapshots, lifetimes, on the host and on the simulated driver."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simulated.kernels_portable
from problems import Problem, Recipe, build
from simulated.plugin import Simulation

from qmoe_ep import (
    CaptureError,
    CpuExecutionProvider,
    CudaError,
    CudaExecutionProvider,
    QMoEError,
    RouteTelemetryConfig,
    TelemetrySnapshot,
    TelemetryUnsupported,
)
from qmoe_ep.operator import MATRIX_INPUTS
from qmoe_ep.routing import route
from qmoe_ep.telemetry import MAX_COUNT, RouteTelemetry

assert simulated.kernels_portable

COUNTS = RouteTelemetryConfig(4, 2, "counts")
TRACE = RouteTelemetryConfig(4, 2, "trace", 4)
WEIGHTS = sorted(i for indices in MATRIX_INPUTS.values() for i in indices)
Array = np.ndarray[Any, Any]


@pytest.fixture
def gpu(simulated: Simulation) -> Iterator[CudaExecutionProvider]:
    """A provider on the simulated driver, which leaves nothing behind."""
    with CudaExecutionProvider(kernels="portable") as provider:
        simulated.watch(provider.runtime)
        yield provider


class Node:
    """A kernel with its operands, on either provider."""

    def __init__(self, provider: Any, problem: Problem, node_id: int = 7) -> None:
        self.problem, self.provider = problem, provider
        self.kernel = provider.create_kernel(problem.node, node_id)
        place = getattr(provider, "to_device", lambda array: array)
        self.inputs = [None if o is None else place(np.ascontiguousarray(o)) for o in problem.inputs]
        self.output = place(problem.poisoned_output())
        self.count = place(np.array([0], np.int32))

    def call(self, valid: int | None = None) -> None:
        """Execute."""
        if valid is not None and isinstance(self.count, np.ndarray):
            self.count[0] = valid
        elif valid is not None:
            self.count.copy_from(np.array([valid], np.int32))
        self.kernel.execute(self.inputs, [self.output], valid_rows=None if valid is None else self.count)

    @property
    def telemetry(self) -> RouteTelemetry:
        """The kernel's producer."""
        producer: RouteTelemetry = self.kernel.telemetry
        return producer

    def snapshot(self) -> TelemetrySnapshot:
        """Of an armed producer."""
        snapshot = self.telemetry.snapshot()
        assert snapshot is not None
        return snapshot

    def selected(self, rows: int) -> Array:
        """The experts of the first rows."""
        logits = self.problem.inputs[1]
        assert logits is not None
        return np.asarray(route(logits[:rows], None, top_k=2, normalize=True)[0])


def counts_of(selected: Array, times: int = 1) -> list[int]:
    """How often each of 4 experts is selected."""
    return [int(count) * times for count in np.bincount(selected.reshape(-1), minlength=4)]


@pytest.fixture(params=["cpu", "cuda"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """Five rows, four experts, k = 2."""
    problem = build(Recipe(leading=(5,)))
    if request.param == "cpu":
        yield Node(CpuExecutionProvider(), problem)
        return
    yield Node(request.getfixturevalue("gpu"), problem)


# --- windows ---------------------------------------------------------------------------------------


def test_disarmed_is_the_default(node: Node) -> None:
    telemetry = node.telemetry
    node.call()
    assert (telemetry.armed, telemetry.record, telemetry.footprint_bytes) == (False, None, 0)
    assert telemetry.snapshot() is None
    telemetry.disarm()
    telemetry.pause()
    telemetry.resume()
    telemetry.reset_boundary()


def test_calls_accumulate_until_the_boundary(node: Node) -> None:
    node.telemetry.arm(COUNTS)
    for valid in (None, None, 3, 0):
        node.call(valid)
    first = node.snapshot()
    expected = np.array(counts_of(node.selected(5), 2)) + counts_of(node.selected(3))
    assert (first.rows, first.routes) == (13, 26)
    assert first.counts is not None
    assert first.counts.tolist() == expected.tolist()
    assert first.experts == tuple(np.flatnonzero(expected))
    assert (first.node, first.executor, first.mode, first.trace) == (7, None, "counts", None)
    assert not first.paused
    assert first.unix_time > 1e9
    node.telemetry.reset_boundary()
    second = node.snapshot()
    assert (second.epoch, second.rows, second.routes, second.experts) == (first.epoch + 1, 0, 0, ())
    assert first.rows == 13
    with pytest.raises(ValueError, match="read-only"):
        first.counts[0] = 1
    with pytest.raises(AttributeError):
        first.rows = 1  # type: ignore[misc]


def test_bitmap_has_no_counts(node: Node) -> None:
    node.telemetry.arm(RouteTelemetryConfig(4, 2))
    node.call(1)
    snapshot = node.snapshot()
    assert snapshot.counts is None
    assert snapshot.experts == tuple(sorted(node.selected(1)[0].tolist()))


def test_trace_keeps_the_last_rows(node: Node) -> None:
    node.telemetry.arm(TRACE)
    node.call(3)
    snapshot = node.snapshot()
    assert snapshot.trace is not None
    assert snapshot.trace.tolist() == node.selected(3).tolist()
    node.call(2)
    node.call(1)
    snapshot = node.snapshot()
    assert snapshot.trace is not None
    assert snapshot.trace.tolist() == [
        *node.selected(3)[2:].tolist(),
        *node.selected(2).tolist(),
        *node.selected(1).tolist(),
    ]
    assert snapshot.lost_rows == 2
    again = TelemetrySnapshot.from_dict(json.loads(json.dumps(snapshot.to_dict())))
    assert again.to_dict() == snapshot.to_dict()
    node.telemetry.reset_boundary()
    assert node.snapshot().trace is not None
    assert node.snapshot().to_dict()["trace"] == []


def test_margins_of_a_trace(node: Node) -> None:
    node.telemetry.arm(replace(TRACE, margins=True))
    node.call(3)
    snapshot, logits = node.snapshot(), node.problem.inputs[1]
    assert (snapshot.trace is not None, snapshot.margins is not None, logits is not None) == (True, True, True)
    assert logits is not None
    falling = -np.sort(-logits[:3], axis=1)
    np.testing.assert_array_equal(snapshot.margins, falling[:, 1] - falling[:, 2])
    assert node.telemetry.footprint_bytes == replace(TRACE, margins=True).record_bytes
    again = TelemetrySnapshot.from_dict(json.loads(json.dumps(snapshot.to_dict())))
    np.testing.assert_array_equal(again.margins, snapshot.margins)
    node.telemetry.reset_boundary()
    assert node.snapshot().to_dict()["margins"] == []
    node.telemetry.arm(TRACE)
    node.call(3)
    assert node.snapshot().margins is None


def test_margins_where_nothing_is_rejected() -> None:
    node = Node(CpuExecutionProvider(), build(Recipe(leading=(2,), k=4)))
    node.telemetry.arm(RouteTelemetryConfig(4, 4, "trace", 4, margins=True))
    node.call()
    snapshot = node.snapshot()
    assert snapshot.margins is not None
    assert snapshot.margins.tolist() == [np.inf] * 2
    # JSON has no word for it.
    again = TelemetrySnapshot.from_dict(json.loads(json.dumps(snapshot.to_dict(), allow_nan=False)))
    assert np.isnan(again.margins).all()


def test_pause_keeps_the_address(node: Node) -> None:
    node.telemetry.arm(COUNTS, paused=True)
    record = node.telemetry.record
    node.call()
    assert (node.snapshot().rows, node.snapshot().paused) == (0, True)
    node.telemetry.resume()
    node.call()
    node.telemetry.pause()
    node.call()
    assert (node.snapshot().rows, node.telemetry.paused) == (5, True)
    node.telemetry.reset_boundary()
    assert node.snapshot().paused
    assert node.telemetry.record is record


def test_other_sizes_leave_the_record_alone_and_run(node: Node) -> None:
    node.telemetry.arm(replace(COUNTS, num_experts=5))
    node.call()
    assert node.snapshot().rows == 0
    output = node.output if isinstance(node.output, np.ndarray) else node.output.numpy()
    node.problem.check(output)


def test_another_k_is_unsupported_and_changes_nothing(node: Node) -> None:
    with pytest.raises(TelemetryUnsupported, match=r"expected 2, the k of node 7, got 3"):
        node.telemetry.arm(replace(COUNTS, routes_per_row=3))
    assert not node.telemetry.armed
    node.telemetry.arm(COUNTS)
    record = node.telemetry.record
    with pytest.raises(TelemetryUnsupported):
        node.telemetry.arm(replace(COUNTS, routes_per_row=1))
    assert node.telemetry.record is record


def test_arming_again_begins_a_window(node: Node) -> None:
    node.telemetry.arm(COUNTS)
    node.call()
    first = node.snapshot()
    node.telemetry.arm(TRACE)
    assert node.telemetry.footprint_bytes == TRACE.record_bytes
    assert node.telemetry.config == TRACE
    assert (node.snapshot().rows, node.snapshot().mode) == (0, "trace")
    assert node.snapshot().epoch > first.epoch
    node.telemetry.disarm()
    assert node.telemetry.snapshot() is None


def test_preset_and_saturation(node: Node) -> None:
    with pytest.raises(QMoEError, match="not armed"):
        node.telemetry.preset(1, np.zeros(4, int))
    node.telemetry.arm(COUNTS)
    node.telemetry.preset(10, np.array([20, 0, 0, 0]))
    node.call()
    snapshot = node.snapshot()
    assert (snapshot.rows, snapshot.routes, snapshot.saturated) == (15, 30, False)
    node.telemetry.preset(MAX_COUNT - 3, np.array([MAX_COUNT] * 4, np.uint64))
    node.call()
    snapshot = node.snapshot()
    assert (snapshot.rows, snapshot.routes, snapshot.saturated) == (MAX_COUNT, MAX_COUNT, True)
    assert snapshot.counts is not None
    assert snapshot.counts.tolist() == [MAX_COUNT] * 4
    for rows, counts in ((-1, [0] * 4), (1, [0] * 3), (1, [3, 0, 0, 0])):
        with pytest.raises(QMoEError, match="expected"):
            node.telemetry.preset(rows, np.array(counts))
    assert node.snapshot().rows == MAX_COUNT


def test_exporters_and_calls_of_other_threads(node: Node) -> None:
    node.telemetry.arm(COUNTS)
    stop, seen = threading.Event(), list[TelemetrySnapshot]()

    def export() -> None:
        while not stop.is_set():
            seen.append(node.snapshot())
            node.telemetry.reset_boundary()

    exporter = threading.Thread(target=export)
    exporter.start()
    for _ in range(30):
        node.call()
    stop.set()
    exporter.join()
    epochs = [snapshot.epoch for snapshot in [*seen, node.snapshot()]]
    assert epochs == sorted(set(epochs))
    for snapshot in seen:
        assert snapshot.counts is not None
        assert int(snapshot.counts.sum()) == snapshot.routes == 2 * snapshot.rows


def test_arming_and_reading_from_many_threads(node: Node) -> None:
    provider, failures = node.provider, list[BaseException]()
    with provider.executor_scope(1, 1):
        shared = Node(provider, node.problem, 3)

    def repeat(action: Callable[[], object]) -> None:
        try:
            for _ in range(25):
                action()
        except BaseException as failure:
            failures.append(failure)

    actions: list[Callable[[], object]] = [
        lambda: shared.telemetry.arm(COUNTS),
        lambda: shared.telemetry.arm(TRACE),
        shared.telemetry.snapshot,
        shared.telemetry.disarm,
        shared.telemetry.reset_boundary,
        shared.call,
        provider.telemetry.clear,
    ]
    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    shared.telemetry.arm(COUNTS)
    shared.call()
    assert shared.snapshot().rows == 5


# --- executors -------------------------------------------------------------------------------------


def test_specialisations_share_and_executors_do_not(node: Node) -> None:
    provider, problem = node.provider, node.problem
    with provider.executor_scope(executor=1, generation=1):
        one, other = Node(provider, problem, 3), Node(provider, problem, 3)
    with provider.executor_scope(executor=2, generation=1):
        foreign = Node(provider, problem, 3)
    assert one.telemetry is other.telemetry
    assert foreign.telemetry is not one.telemetry
    one.telemetry.arm(COUNTS)
    for caller in (one, other, foreign, node):
        caller.call()
    snapshot = one.snapshot()
    assert (snapshot.rows, snapshot.executor, snapshot.node) == (10, 1, 3)
    assert not foreign.telemetry.armed
    assert provider.telemetry.sources(executor=1) == {3: one.telemetry}
    provider.retire_executor(executor=1, generation=1, cleanup=lambda _: provider.telemetry.remove(1))
    assert not one.telemetry.armed
    with pytest.raises(QMoEError, match="retired"), provider.executor_scope(1, 1):
        pass
    one.call()


def test_failed_calls_are_not_counted(node: Node) -> None:
    node.telemetry.arm(COUNTS)
    with pytest.raises(QMoEError):
        node.kernel.execute(node.inputs, [])
    assert node.snapshot().rows == 0


def test_without_telemetry() -> None:
    provider = CpuExecutionProvider(route_telemetry=False)
    with provider.executor_scope(1, 1):
        kernel = provider.create_kernel(build(Recipe()).node)
    assert kernel.telemetry is None
    seen: list[bool] = []
    provider.retire_executor(1, 2, seen.append)
    assert seen == [False]
    provider.close()


# --- on the device ---------------------------------------------------------------------------------


def test_capture_refuses_changes_before_anything_is_enqueued(gpu: CudaExecutionProvider, simulated: Simulation) -> None:
    node = Node(gpu, build(Recipe(leading=(5,))))
    telemetry = node.telemetry
    telemetry.arm(COUNTS)
    node.call()
    with gpu.capture() as capture:
        node.call()
        before = len(simulated.log)
        for change in (
            lambda: telemetry.arm(TRACE),
            telemetry.disarm,
            telemetry.reset_boundary,
            telemetry.snapshot,
            telemetry.pause,
            telemetry.resume,
            lambda: telemetry.preset(1, np.zeros(4, int)),
        ):
            with pytest.raises(CaptureError, match="route telemetry of node 7 while the stream is capturing"):
                change()
        enqueued = [str(call) for call in simulated.log[before:] if "Memcpy" in str(call) or "Alloc" in str(call)]
        assert not enqueued
    assert telemetry.config == COUNTS
    capture.graph.replay()
    assert node.snapshot().rows == 10
    capture.graph.close()


def test_replays_count_and_follow_pause(gpu: CudaExecutionProvider) -> None:
    node = Node(gpu, build(Recipe(leading=(5,))))
    node.telemetry.arm(COUNTS, paused=True)
    node.call(3)
    with gpu.capture() as capture:
        node.kernel.execute(node.inputs, [node.output], valid_rows=node.count)
    capture.graph.replay()
    node.telemetry.resume()
    capture.graph.replay()
    node.count.copy_from(np.array([1], np.int32))
    capture.graph.replay()
    assert node.snapshot().rows == 4
    # The graph keeps the record that it addresses.
    node.telemetry.disarm()
    capture.graph.replay()
    gpu.synchronize()
    capture.graph.close()


def test_the_device_counts_by_itself(gpu: CudaExecutionProvider) -> None:
    node = Node(gpu, build(Recipe(leading=(5,))))
    node.telemetry.add_call(np.zeros((1, 2), int), 4)
    node.telemetry.arm(COUNTS)
    with pytest.raises(QMoEError, match="on a device"):
        node.telemetry.add_call(np.zeros((1, 2), int), 4)


def test_removing_under_capture_waits_for_its_end(gpu: CudaExecutionProvider) -> None:
    for fenced in (False, True):
        with gpu.executor_scope(int(fenced), 1):
            node = Node(gpu, build(Recipe(leading=(5,))))
        node.telemetry.arm(COUNTS)
        node.call()
        with gpu.capture() as capture:
            node.call()
            assert gpu.telemetry.remove(int(fenced), fenced) == 1
        capture.graph.replay()
        gpu.synchronize()
        capture.graph.close()
        assert node.telemetry.snapshot() is None


def test_failures_keep_what_was_armed(gpu: CudaExecutionProvider, simulated: Simulation) -> None:
    node = Node(gpu, build(Recipe(leading=(5,))))
    node.telemetry.arm(COUNTS)
    node.call()
    calls_before = len(simulated.log)
    node.telemetry.arm(COUNTS)
    calls = len(simulated.log) - calls_before
    record = node.telemetry.record
    node.call()
    for nth in range(1, calls + 1):
        simulated.fail(None, nth)
        try:
            node.telemetry.arm(TRACE)
        except CudaError:
            simulated.heal()
            if node.telemetry.record is record:
                assert node.snapshot().rows == 5
                continue
        simulated.heal()
        simulated.thread.contexts.clear()
        assert node.snapshot().mode == "trace"
        node.telemetry.arm(COUNTS)
        record = node.telemetry.record
        node.call()
    simulated.thread.contexts.clear()


def test_a_failed_drain_keeps_the_record(gpu: CudaExecutionProvider, simulated: Simulation) -> None:
    node = Node(gpu, build(Recipe(leading=(5,))))
    node.telemetry.arm(COUNTS)
    node.call()
    simulated.fail("cuStreamSynchronize")
    with pytest.raises(CudaError):
        node.telemetry.disarm()
    simulated.heal()
    assert node.snapshot().rows == 5


def test_removing_goes_on_after_a_failed_drain(gpu: CudaExecutionProvider, simulated: Simulation) -> None:
    problem = build(Recipe(leading=(5,)))
    before = gpu.memory_statistics().allocations
    with gpu.executor_scope(1, 1):
        nodes = [Node(gpu, problem, number) for number in range(2)]
    for node in nodes:
        node.telemetry.arm(COUNTS)
        node.call()
    simulated.fail("cuStreamSynchronize")
    with pytest.raises(CudaError):
        gpu.telemetry.remove(1)
    simulated.heal()
    assert len(gpu.telemetry) == 0
    assert not any(node.telemetry.armed for node in nodes)
    del node
    nodes.clear()
    gc.collect()
    gpu.synchronize()
    assert gpu.memory_statistics().allocations == before


def test_dropped_producers_give_their_record_back(gpu: CudaExecutionProvider) -> None:
    before = gpu.memory_statistics().allocations
    node = Node(gpu, build(Recipe(leading=(5,))))
    node.telemetry.arm(COUNTS)
    node.call()
    del node
    gc.collect()
    gpu.synchronize()
    assert gpu.memory_statistics().allocations == before


def test_closing_takes_armed_producers_along(simulated: Simulation) -> None:
    with CudaExecutionProvider(kernels="portable") as gpu:
        simulated.watch(gpu.runtime)
        with gpu.executor_scope(1, 1):
            shared = Node(gpu, build(Recipe(leading=(5,))))
        private = Node(gpu, build(Recipe(leading=(5,))))
        for node in (shared, private):
            node.telemetry.arm(COUNTS)
            node.call()
    assert shared.telemetry.snapshot() is None
