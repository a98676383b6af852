"""Who shares a telemetry producer, and the generations of executors: against a plain model, and between threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from qmoe_ep import QMoEError, RouteTelemetryConfig
from qmoe_ep.telemetry import RouteTelemetry, TelemetryRegistry, host_memory

EXECUTORS, GENERATIONS, NODES = st.integers(0, 2), st.integers(1, 2), st.integers(0, 2)
PATIENCE = 10.0


class Boom(Exception):
    """What a caller's code raises."""


def _never(_: bool) -> None:
    pytest.fail("cleanup was called")


class RegistryMachine(RuleBasedStateMachine):
    """The registry beside dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = TelemetryRegistry(host_memory())
        self.generation: dict[int, int] = {}
        self.retired: set[int] = set()
        self.shared: dict[tuple[int, int], RouteTelemetry] = {}

    @rule(executor=EXECUTORS, generation=GENERATIONS, nodes=st.lists(NODES, max_size=3), fail=st.booleans())
    def scope(self, executor: int, generation: int, nodes: list[int], fail: bool) -> None:
        allowed = executor not in self.retired and self.generation.get(executor, generation) == generation
        try:
            with self.registry.executor_scope(executor, generation):
                assert allowed
                self.generation[executor] = generation
                for node in nodes:
                    producer = self.registry.producer(node, 2)
                    assert producer is not None
                    assert (producer.executor, producer.node) == (executor, node)
                    assert self.shared.setdefault((executor, node), producer) is producer
                self.refused_inside(executor)
                if fail:
                    raise Boom
        except QMoEError:
            assert not allowed
        except Boom:
            assert fail

    def refused_inside(self, executor: int) -> None:
        """Entering and retiring inside of a scope or a retirement raise instead of deadlocking."""
        for other in (executor, executor + 1):
            with pytest.raises(QMoEError, match="inside another"), self.registry.executor_scope(other, 1):
                pass
            with pytest.raises(QMoEError, match="inside another"):
                self.registry.retire_scope(other, 1, _never)

    @rule(executor=EXECUTORS, generation=GENERATIONS, fail=st.booleans())
    def retire(self, executor: int, generation: int, fail: bool) -> None:
        seen: list[bool] = []

        def cleanup(newly_retired: bool) -> None:
            seen.append(newly_retired)
            self.refused_inside(executor)
            if fail:
                raise Boom

        known = self.generation.get(executor)
        if known is not None and known != generation:
            with pytest.raises(QMoEError, match="stale"):
                self.registry.retire_scope(executor, generation, cleanup)
            assert seen == []
            return
        try:
            self.registry.retire_scope(executor, generation, cleanup)
        except Boom:
            assert fail
        assert seen == [known is not None and executor not in self.retired]
        if known is not None:
            self.retired.add(executor)

    @rule(executor=EXECUTORS, fenced=st.booleans())
    def remove(self, executor: int, fenced: bool) -> None:
        mine = [key for key in self.shared if key[0] == executor]
        for key in mine:
            self.shared[key].arm(RouteTelemetryConfig(4, 2))
        assert self.registry.remove(executor, fenced) == len(mine)
        assert not any(self.shared.pop(key).armed for key in mine)

    @rule()
    def clear(self) -> None:
        self.registry.clear()
        self.generation.clear()
        self.retired.clear()
        self.shared.clear()

    @rule(node=NODES)
    def private(self, node: int) -> None:
        one, other = self.registry.producer(node, 2), self.registry.producer(node, 2)
        assert one is not None
        assert other is not None
        assert one is not other
        assert one.executor is None
        assert one not in self.shared.values()

    @invariant()
    def same_producers(self) -> None:
        assert len(self.registry) == len(self.shared)
        assert self.registry.executors() == tuple(sorted({executor for executor, _ in self.shared}))
        for executor in range(3):
            expected = {node: producer for (owner, node), producer in self.shared.items() if owner == executor}
            assert dict(self.registry.sources(executor)) == expected
            for node in range(3):
                assert self.registry.source(executor, node) is expected.get(node)


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def in_thread(function: Any) -> threading.Thread:
    """Start it."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_retirement_waits_for_the_scope_in_flight() -> None:
    registry, order = TelemetryRegistry(host_memory()), list[str]()
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with registry.executor_scope(1, 1):
            entered.set()
            assert leave.wait(PATIENCE)
            order.append("scope")

    worker = in_thread(work)
    assert entered.wait(PATIENCE)
    retirer = in_thread(lambda: registry.retire_scope(1, 1, lambda newly: order.append(f"retired {newly}")))
    retirer.join(0.05)
    assert retirer.is_alive()
    # Another thread is outside of the scope, and tables stay readable meanwhile.
    outside = registry.producer(0, 1)
    assert outside is not None
    assert outside.executor is None
    assert len(registry) == 0
    leave.set()
    worker.join(PATIENCE)
    retirer.join(PATIENCE)
    assert order == ["scope", "retired True"]
    with pytest.raises(QMoEError, match="retired"), registry.executor_scope(1, 1):
        pass


def test_scopes_of_threads_exclude_each_other() -> None:
    registry, inside, most = TelemetryRegistry(host_memory()), [0], [0]

    def work(executor: int) -> None:
        for _ in range(50):
            with registry.executor_scope(executor, 1):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                producer = registry.producer(0, 1)
                assert producer is not None
                assert producer.executor == executor
                inside[0] -= 1

    threads = [in_thread(lambda number=number: work(number)) for number in range(4)]
    for thread in threads:
        thread.join(PATIENCE)
    assert most == [1]
    assert len(registry) == 4


def test_clear_does_not_wait_for_a_scope() -> None:
    registry = TelemetryRegistry(host_memory())
    with registry.executor_scope(1, 1):
        producer = registry.producer(0, 1)
        assert producer is not None
        producer.arm(RouteTelemetryConfig(2, 1))
        registry.clear()
        assert not producer.armed
        later = registry.producer(0, 1)
        assert later is not None
        assert later.executor is None
    with registry.executor_scope(1, 2):
        assert len(registry) == 0


def test_disabled() -> None:
    registry, seen = TelemetryRegistry(host_memory(), enabled=False), list[bool]()
    with registry.executor_scope(1, 1), registry.executor_scope(1, 2):
        assert registry.producer(0, 1) is None
        registry.retire_scope(1, 3, seen.append)
        registry.retire_scope(1, 3, seen.append)
    assert seen == [False, False]
    assert len(registry) == 0
    assert registry.sources(1) == {}
    assert registry.source(1, 0) is None
    assert registry.remove(1) == 0
    registry.clear()
