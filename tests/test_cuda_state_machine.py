"""Any order of creating, calling, capturing, replaying, arming, retiring, failing and dropping keeps the promises.

The same machine runs on the simulated driver, with faults injected and every rule of the driver checked, and on a
real GPU under the mark ``gpu``.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import simulated.kernels_portable
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from problems import Problem, Recipe, build
from simulated.plugin import Simulation, simulation
from test_cuda_provider import activations_of, on_device, weights_of, with_rows

from qmoe_ep import CaptureError, CudaError, CudaExecutionProvider, NvrtcError, QMoEError
from qmoe_ep.routing import select_experts
from qmoe_ep.telemetry import RouteTelemetryConfig

assert simulated.kernels_portable

ROWS = (1, 2, 5, 40)
FAULTS = (CudaError, NvrtcError, CaptureError)


@cache
def problem_of(rows: int) -> Problem:
    """Problems that differ in their rows only."""
    return with_rows(build(Recipe(leading=(1,), experts=5, k=2)), rows)


@cache
def routes_of(rows: int) -> tuple[int, ...]:
    """Routes per expert of one call."""
    chosen = select_experts(problem_of(rows).inputs[1], 2)
    return tuple(np.bincount(chosen.reshape(-1), minlength=5).tolist())


@dataclass
class Graph:
    """A captured graph and what a replay of it does."""

    captured: Any
    rows: int
    output: Any
    counts_in: Any


class OnThread:
    """An action under way on a thread of its own; what it raises comes out of :meth:`finish`."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(action,))
        self._thread.start()

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as failure:  # handed on
            self._failure = failure

    def finish(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure


class ProviderMachine(RuleBasedStateMachine):
    """One provider with up to four kernels of the same node: outside any executor each has a producer of its own,
    inside one those of a node share it."""

    simulation: Simulation | None = None  # None on a real GPU

    def __init__(self) -> None:
        super().__init__()
        self.gpu = CudaExecutionProvider(kernels="portable" if self.simulation else None)
        if self.simulation:
            self.simulation.watch(self.gpu.runtime)
        self.kernels: list[Any] = []
        self.graphs: list[Graph] = []
        # The record that is armed, by producer: what it counted in its window.
        self.windows: dict[int, list[int]] = {}
        self.generations: dict[int, int] = {}
        self.retired: set[int] = set()

    def forget_dropped_producers(self) -> None:
        held = {id(kernel.telemetry) for kernel in self.kernels}
        for executor in self.gpu.telemetry.executors():
            held |= {id(producer) for producer in self.gpu.telemetry.sources(executor).values()}
        self.windows = {key: window for key, window in self.windows.items() if key in held}

    def may_enter(self, executor: int, generation: int) -> bool:
        return executor not in self.retired and self.generations.get(executor, generation) == generation

    def pick(self, number: int) -> Any:
        return self.kernels[number % len(self.kernels)]

    @rule()
    def create(self) -> None:
        if len(self.kernels) < 4:
            problem = problem_of(1)
            self.kernels.append(self.gpu.create_kernel(problem.node, 7, weights_of(problem)))

    @rule(executor=st.integers(1, 2), generation=st.integers(1, 2), node=st.integers(0, 1), other_thread=st.booleans())
    def create_in_scope(self, executor: int, generation: int, node: int, other_thread: bool) -> None:
        def work() -> None:
            problem = problem_of(1)
            with self.gpu.executor_scope(executor, generation):
                kernel = self.gpu.create_kernel(problem.node, node, weights_of(problem))
                with pytest.raises(QMoEError, match="inside another scope"):
                    self.gpu.retire_executor(executor, generation)
            if len(self.kernels) < 4:
                self.kernels.append(kernel)

        def refused() -> None:
            with pytest.raises(QMoEError, match=r"retired|generation"), self.gpu.executor_scope(executor, generation):
                pass

        allowed = self.may_enter(executor, generation)
        action = work if allowed else refused
        OnThread(action).finish() if other_thread else action()
        if allowed:
            self.generations[executor] = generation
            of_node = [k for k in self.kernels if k.telemetry.executor == executor and k.node_id == node]
            shared = self.gpu.telemetry.source(executor, node)
            assert all(kernel.telemetry is shared for kernel in of_node)

    @rule(executor=st.integers(1, 2), generation=st.integers(1, 2), inside=st.integers(1, 2))
    def retire(self, executor: int, generation: int, inside: int) -> None:
        """Retire while another thread is in a scope (where it may enter): that one is waited for."""
        entered, leave, left, cleaned = threading.Event(), threading.Event(), threading.Event(), list[bool]()

        def stay() -> None:
            try:
                with self.gpu.executor_scope(inside, 1):
                    entered.set()
                    assert leave.wait(60)
                    left.set()
            finally:
                entered.set()

        def cleanup(newly_retired: bool) -> None:
            cleaned.append(newly_retired)
            assert left.is_set() or not waits
            self.gpu.telemetry.remove(executor)

        waits = self.may_enter(inside, 1)
        resident = OnThread(stay) if waits else None
        if waits:
            assert entered.wait(60)
            self.generations[inside] = 1
        fits = self.generations.get(executor, generation) == generation
        new = executor in self.generations and executor not in self.retired
        retirement = OnThread(lambda: self.gpu.retire_executor(executor, generation, cleanup))
        assert not (waits and cleaned)
        leave.set()
        if resident is not None:
            resident.finish()
        if not fits:
            with pytest.raises(QMoEError, match="generation"):
                retirement.finish()
            assert not cleaned
            return
        retirement.finish()
        assert cleaned == [new]
        if not new:
            return
        self.retired.add(executor)
        for kernel in self.kernels:
            # A kernel of a removed producer still runs; it counts no more until it is armed again.
            if kernel.telemetry.executor == executor:
                assert not kernel.telemetry.armed
                self.windows.pop(id(kernel.telemetry), None)
        self.forget_dropped_producers()

    @precondition(lambda self: self.kernels)
    @rule(number=st.integers(0, 3), rows=st.sampled_from(ROWS))
    def call(self, number: int, rows: int) -> None:
        kernel, problem = self.pick(number), problem_of(rows)
        output = self.gpu.to_device(problem.poisoned_output())
        kernel.execute(on_device(self.gpu, activations_of(problem)), [output])
        problem.check_closely(output.numpy())
        self.count(kernel, rows)

    def count(self, kernel: Any, rows: int) -> None:
        window = self.windows.get(id(kernel.telemetry))
        if window is not None:
            for expert, routes in enumerate(routes_of(rows)):
                window[expert] += routes

    @precondition(lambda self: self.kernels and len(self.graphs) < 4)
    @rule(number=st.integers(0, 3), rows=st.sampled_from(ROWS))
    def capture(self, number: int, rows: int) -> None:
        kernel, problem = self.pick(number), problem_of(rows)
        operands = on_device(self.gpu, activations_of(problem))
        output = self.gpu.to_device(problem.poisoned_output())
        supported = kernel.capture_support(operands, [output]).supported
        try:
            with self.gpu.capture() as capture:
                kernel.execute(operands, [output])
        except CaptureError:
            assert not supported
            return
        assert supported
        self.graphs.append(Graph(capture.graph, rows, output, self.windows.get(id(kernel.telemetry))))

    @precondition(lambda self: self.graphs)
    @rule(number=st.integers(0, 3))
    def replay(self, number: int) -> None:
        graph = self.graphs[number % len(self.graphs)]
        problem = problem_of(graph.rows)
        graph.output.copy_from(problem.poisoned_output())
        graph.captured.replay()
        problem.check_closely(graph.output.numpy())
        if graph.counts_in is not None:
            for expert, routes in enumerate(routes_of(graph.rows)):
                graph.counts_in[expert] += routes

    @precondition(lambda self: self.graphs)
    @rule(number=st.integers(0, 3))
    def close_graph(self, number: int) -> None:
        graph = self.graphs.pop(number % len(self.graphs))
        graph.captured.close()
        with pytest.raises(CaptureError):
            graph.captured.replay()

    @precondition(lambda self: self.kernels)
    @rule(number=st.integers(0, 3), close=st.booleans())
    def drop_kernel(self, number: int, close: bool) -> None:
        kernel = self.kernels.pop(number % len(self.kernels))
        if close:
            kernel.close()
        del kernel
        gc.collect()
        self.forget_dropped_producers()

    @precondition(lambda self: self.kernels)
    @rule(number=st.integers(0, 3))
    def arm(self, number: int) -> None:
        kernel = self.pick(number)
        kernel.telemetry.arm(RouteTelemetryConfig(5, 2, mode="counts"))
        self.windows[id(kernel.telemetry)] = [0] * 5

    @precondition(lambda self: self.kernels)
    @rule(number=st.integers(0, 3))
    def disarm(self, number: int) -> None:
        kernel = self.pick(number)
        kernel.telemetry.disarm()
        self.windows.pop(id(kernel.telemetry), None)
        assert kernel.telemetry.snapshot() is None

    @precondition(lambda self: self.windows and self.kernels)
    @rule(number=st.integers(0, 3), reset=st.booleans())
    def look(self, number: int, reset: bool) -> None:
        kernel = self.pick(number)
        window = self.windows.get(id(kernel.telemetry))
        if window is None:
            return
        snapshot = kernel.telemetry.snapshot()
        assert list(snapshot.counts) == window
        assert snapshot.routes == sum(window)
        if reset:
            kernel.telemetry.reset_boundary()
            window[:] = [0] * 5

    @precondition(lambda self: self.simulation and self.kernels)
    @rule(number=st.integers(0, 3), rows=st.sampled_from(ROWS), nth=st.integers(1, 30))
    def fail(self, number: int, rows: int, nth: int) -> None:
        """A call in which some driver call fails: right, or a clean error; the next call works."""
        assert self.simulation is not None
        kernel, problem = self.pick(number), problem_of(rows)
        if id(kernel.telemetry) in self.windows:
            return  # A call that fails half way may have counted.
        operands, output = on_device(self.gpu, activations_of(problem)), self.gpu.to_device(problem.poisoned_output())
        self.gpu.synchronize()
        self.simulation.fail(None, nth)
        try:
            kernel.execute(operands, [output])
        except FAULTS:
            self.simulation.heal()
            self.simulation.thread.contexts.clear()
            kernel.execute(operands, [output])
        self.simulation.heal()
        problem.check_closely(output.numpy())

    def teardown(self) -> None:
        for graph in self.graphs:
            graph.captured.close()
        self.kernels.clear()
        self.graphs.clear()
        self.gpu.close()
        self.gpu.close()


def test_on_the_simulated_driver() -> None:
    with simulation() as machine:
        ProviderMachine.simulation = machine
        try:
            run_state_machine_as_test(
                ProviderMachine,
                settings=settings(
                    max_examples=50, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
                ),
            )
        finally:
            ProviderMachine.simulation = None
        machine.check_end()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    run_state_machine_as_test(
        ProviderMachine,
        settings=settings(
            max_examples=15, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )
