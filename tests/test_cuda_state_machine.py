"""Any order of creating, calling, growing, capturing, replaying, arming, failing and dropping keeps the promises.

The same machine runs on the simulated driver, with faults injected and every rule of the driver checked, and on a
real GPU under the mark ``gpu``.
"""

from __future__ import annotations

import gc
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

from qmoe_ep import CaptureError, CudaError, CudaExecutionProvider, NvrtcError
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


class ProviderMachine(RuleBasedStateMachine):
    """One provider with up to three kernels of the same node, each with a producer of its own."""

    simulation: Simulation | None = None  # None on a real GPU

    def __init__(self) -> None:
        super().__init__()
        self.gpu = CudaExecutionProvider(kernels="portable" if self.simulation else None)
        if self.simulation:
            self.simulation.watch(self.gpu.runtime)
        self.kernels: list[Any] = []
        self.graphs: list[Graph] = []
        # The record that is armed, by kernel: what it counted in its window.
        self.windows: dict[int, list[int]] = {}

    def pick(self, number: int) -> Any:
        return self.kernels[number % len(self.kernels)]

    @rule()
    def create(self) -> None:
        if len(self.kernels) < 3:
            problem = problem_of(1)
            self.kernels.append(self.gpu.create_kernel(problem.node, len(self.kernels), weights_of(problem)))

    @precondition(lambda self: self.kernels)
    @rule(number=st.integers(0, 2), rows=st.sampled_from(ROWS))
    def call(self, number: int, rows: int) -> None:
        kernel, problem = self.pick(number), problem_of(rows)
        output = self.gpu.to_device(problem.poisoned_output())
        kernel.execute(on_device(self.gpu, activations_of(problem)), [output])
        problem.check_closely(output.numpy())
        self.count(kernel, rows)

    def count(self, kernel: Any, rows: int) -> None:
        if id(kernel) in self.windows:
            window = self.windows[id(kernel)]
            for expert, routes in enumerate(routes_of(rows)):
                window[expert] += routes

    @precondition(lambda self: self.kernels and len(self.graphs) < 4)
    @rule(number=st.integers(0, 2), rows=st.sampled_from(ROWS))
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
        self.graphs.append(Graph(capture.graph, rows, output, self.windows.get(id(kernel))))

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
    @rule(number=st.integers(0, 2), close=st.booleans())
    def drop_kernel(self, number: int, close: bool) -> None:
        kernel = self.kernels.pop(number % len(self.kernels))
        self.windows.pop(id(kernel), None)
        if close:
            kernel.close()
        del kernel
        gc.collect()

    @precondition(lambda self: self.kernels)
    @rule(number=st.integers(0, 2))
    def arm(self, number: int) -> None:
        kernel = self.pick(number)
        kernel.telemetry.arm(RouteTelemetryConfig(5, 2, mode="counts"))
        self.windows[id(kernel)] = [0] * 5

    @precondition(lambda self: self.kernels)
    @rule(number=st.integers(0, 2))
    def disarm(self, number: int) -> None:
        kernel = self.pick(number)
        kernel.telemetry.disarm()
        self.windows.pop(id(kernel), None)
        assert kernel.telemetry.snapshot() is None

    @precondition(lambda self: self.windows)
    @rule(number=st.integers(0, 2), reset=st.booleans())
    def look(self, number: int, reset: bool) -> None:
        kernel = self.pick(number)
        window = self.windows.get(id(kernel))
        if window is None:
            return
        snapshot = kernel.telemetry.snapshot()
        assert list(snapshot.counts) == window
        assert snapshot.routes == sum(window)
        if reset:
            kernel.telemetry.reset_boundary()
            window[:] = [0] * 5

    @precondition(lambda self: self.simulation and self.kernels)
    @rule(number=st.integers(0, 2), rows=st.sampled_from(ROWS), nth=st.integers(1, 30))
    def fail(self, number: int, rows: int, nth: int) -> None:
        """A call in which some driver call fails: right, or a clean error; the next call works."""
        assert self.simulation is not None
        kernel, problem = self.pick(number), problem_of(rows)
        if id(kernel) in self.windows:
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
                    max_examples=25, stateful_step_count=25, suppress_health_check=list(HealthCheck), deadline=None
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
