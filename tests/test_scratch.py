"""The warm pool: growth, publishing, capture, failures."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated.plugin import Simulation

from qmoe_ep.errors import CaptureError, CudaError
from qmoe_ep.memory import Allocation
from qmoe_ep.runtime import Runtime
from qmoe_ep.scratch import ScratchPool


class Register:
    """A capture that only takes notes."""

    def __init__(self) -> None:
        self.owned: list[Allocation] = []

    def register(self, allocation: Allocation) -> None:
        if allocation not in self.owned:
            self.owned.append(allocation.retain())


def ensure(pool: ScratchPool, slot: str, nbytes: int) -> int:
    with pool.call() as call:
        pointer = call.ensure(slot, nbytes)
        call.publish()
    return pointer


def test_a_slot_keeps_its_address_while_it_is_large_enough(simulated: Simulation) -> None:
    with Runtime() as runtime:
        pool = ScratchPool(runtime, "node 7")
        first = ensure(pool, "activated", 100)
        generation = pool.generation
        assert ensure(pool, "activated", 100) == ensure(pool, "activated", 1) == first
        assert pool.generation == generation
        assert ensure(pool, "activated", 101) != first
        assert pool.generation != generation
        assert pool.capacities() == {"activated": 101}
        assert runtime.memory_statistics().allocations == 1


def test_zero_bytes_count_as_one(simulated: Simulation) -> None:
    with Runtime() as runtime:
        pool = ScratchPool(runtime)
        ensure(pool, "routes", 0)
        assert pool.capacities() == {"routes": 1}


def test_growth_drains_then_allocates_then_frees(simulated: Simulation) -> None:
    with Runtime() as runtime:
        pool = ScratchPool(runtime)
        ensure(pool, "activated", 100)
        start = len(simulated.log)
        ensure(pool, "activated", 200)
        steps = ["cuStreamSynchronize", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"]
        assert [call for call in simulated.log[start:] if call in steps] == steps


def test_the_first_allocation_needs_no_drain(simulated: Simulation) -> None:
    with Runtime() as runtime:
        ensure(ScratchPool(runtime), "activated", 100)
        assert "cuStreamSynchronize" not in simulated.counts()


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuMemAllocFromPoolAsync"])
def test_a_failed_growth_leaves_the_slot_whole(simulated: Simulation, call: str) -> None:
    with Runtime() as runtime:
        pool = ScratchPool(runtime)
        pointer = ensure(pool, "activated", 100)
        simulated.fail(call)
        with pytest.raises(CudaError, match="activated"):
            ensure(pool, "activated", 200)
        assert pool.capacities() == {"activated": 100}
        assert ensure(pool, "activated", 100) == pointer
        assert runtime.memory_statistics().allocations == 1


def test_a_call_that_fails_leaves_the_pool_as_it_was(simulated: Simulation) -> None:
    with Runtime() as runtime:
        pool = ScratchPool(runtime)
        pointer = ensure(pool, "activated", 100)
        with pool.call() as call:
            call.reserve((("activated", 200), ("routes", 50)))
            call.ensure("activated", 300)
            start = len(simulated.log)
        # One drain, then the three that this call had allocated.
        ends = [name for name in simulated.log[start:] if name in ("cuStreamSynchronize", "cuMemFreeAsync")]
        assert ends == ["cuStreamSynchronize"] + ["cuMemFreeAsync"] * 3
        assert pool.capacities() == {"activated": 100}
        assert ensure(pool, "activated", 100) == pointer


def test_a_failed_call_whose_drain_fails_too_releases_later(simulated: Simulation) -> None:
    with Runtime() as runtime:
        pool = ScratchPool(runtime)
        with pool.call() as call:
            call.ensure("activated", 200)
            simulated.fail("cuStreamSynchronize")
        assert "cuMemFreeAsync" not in simulated.counts()
        assert runtime.memory_statistics().allocations == 0


def test_growing_twice_in_one_call(simulated: Simulation) -> None:
    with Runtime() as runtime:
        pool = ScratchPool(runtime)
        with pool.call() as call:
            call.ensure("activated", 100)
            pointer = call.ensure("activated", 200)
            call.publish()
            call.publish()
        assert ensure(pool, "activated", 150) == pointer
        assert runtime.memory_statistics().requested == 200


def test_an_exception_abandons_the_call(simulated: Simulation) -> None:
    def fail(pool: ScratchPool) -> None:
        with pool.call() as call:
            call.ensure("activated", 200)
            raise ZeroDivisionError

    with Runtime() as runtime:
        pool = ScratchPool(runtime)
        with pytest.raises(ZeroDivisionError):
            fail(pool)
        assert pool.capacities() == {}
        assert runtime.memory_statistics().allocations == 0


def test_a_call_knows_what_it_used(simulated: Simulation) -> None:
    with Runtime() as runtime:
        pool = ScratchPool(runtime)
        ensure(pool, "routes", 10)
        ensure(pool, "activated", 10)
        with pool.call() as call:
            pointer = call.ensure("activated", 5)
            assert {slot: used.pointer for slot, used in call.used.items()} == {"activated": pointer}


class TestCapture:
    def test_warm_slots_are_registered(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            pool, register = ScratchPool(runtime), Register()
            pointer = ensure(pool, "activated", 100)
            with pool.call(register) as call:
                assert call.ensure("activated", 100) == call.ensure("activated", 50) == pointer
                call.publish()
            assert [owned.pointer for owned in register.owned] == [pointer]

    @pytest.mark.parametrize("warmed", [0, 100])
    def test_nothing_is_allocated(self, simulated: Simulation, warmed: int) -> None:
        with Runtime() as runtime:
            pool = ScratchPool(runtime, "node 7")
            if warmed:
                ensure(pool, "activated", warmed)
            before = simulated.counts()
            with (
                pool.call(Register()) as call,
                pytest.raises(CaptureError, match=rf"'activated' of node 7: needs 200 bytes, .* capacity is {warmed},"),
            ):
                call.ensure("activated", 200)
            assert simulated.counts() == before

    def test_a_graphs_memory_survives_growth_and_close(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            pool, register = ScratchPool(runtime), Register()
            ensure(pool, "activated", 100)
            with pool.call(register) as call:
                call.ensure("activated", 100)
            ensure(pool, "activated", 200)
            pool.close()
            assert runtime.memory_statistics().requested == 100
            register.owned[0].release()


class TestClose:
    def test_close_drains_first(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            pool = ScratchPool(runtime)
            ensure(pool, "activated", 100)
            pool.close()
            pool.close()
            ends = [call for call in simulated.log if call in ("cuStreamSynchronize", "cuMemFreeAsync")]
            assert ends == ["cuStreamSynchronize", "cuMemFreeAsync"]

    def test_a_graph_that_owns_everything_spares_the_drain(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            pool, register = ScratchPool(runtime), Register()
            ensure(pool, "activated", 100)
            with pool.call(register) as call:
                call.ensure("activated", 100)
            pool.close()
            assert "cuStreamSynchronize" not in simulated.counts()

    def test_a_failed_drain_keeps_the_memory_for_another_try(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            pool = ScratchPool(runtime, "node 7")
            ensure(pool, "activated", 100)
            simulated.fail("cuStreamSynchronize")
            with pytest.raises(CudaError, match="node 7"):
                pool.close()
            assert "cuMemFreeAsync" not in simulated.counts()
            assert runtime.memory_statistics().allocations == 0

    def test_close_and_drop_during_a_capture_wait_for_its_end(self, simulated: Simulation) -> None:
        with Runtime() as runtime, runtime.current():
            closed, dropped = ScratchPool(runtime), ScratchPool(runtime)
            ensure(closed, "activated", 100)
            ensure(dropped, "activated", 100)
            runtime.begin_capture()
            closed.close()
            del dropped
            gc.collect()
            runtime.collect()
            assert "cuMemFreeAsync" not in simulated.counts()
            runtime.abandon_capture()
            runtime.collect()
            ends = [call for call in simulated.log if call in ("cuStreamSynchronize", "cuMemFreeAsync")]
            assert ends == ["cuStreamSynchronize", "cuMemFreeAsync", "cuMemFreeAsync"]

    def test_after_the_runtime(self, simulated: Simulation) -> None:
        runtime = Runtime()
        pool = ScratchPool(runtime)
        ensure(pool, "activated", 100)
        runtime.close()
        pool.close()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300)), min_size=1, max_size=4),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_capacities_are_the_largest_published_requests(
    simulated: Simulation, calls: list[tuple[list[tuple[str, int]], bool]]
) -> None:
    expected: dict[str, int] = {}
    with Runtime() as runtime:
        pool = ScratchPool(runtime)
        for requests, succeeds in calls:
            with pool.call() as call:
                call.reserve(requests)
                if succeeds:
                    call.publish()
            if succeeds:
                for slot, nbytes in requests:
                    expected[slot] = max(expected.get(slot, 0), nbytes, 1)
            assert pool.capacities() == expected
            statistics = runtime.memory_statistics()
            assert (statistics.allocations, statistics.requested) == (len(expected), sum(expected.values()))
