"""Capture, replay and lifetimes, by the package and by an embedder."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from simulated.plugin import Simulation
from simulated.scenarios import (
    ToyKernel,
    allocated,
    embedder_stream,
    foreign_capture,
    in_embedder,
    launch_and_destroy,
    read,
)

from qmoe_ep import user_objects
from qmoe_ep.errors import CaptureError, CudaError
from qmoe_ep.graph_capture import Capture, GraphResources, WarmedCalls, registrar
from qmoe_ep.runtime import Runtime

VALUES = np.arange(10, dtype=np.float32)


def poison(runtime: Runtime, *allocations: Any) -> None:
    for allocation in allocations:
        runtime.memset(allocation.pointer, 0xFF, allocation.nbytes)


class TestSignatures:
    def test_only_warmed_signatures_are_supported(self) -> None:
        warmed: WarmedCalls[int] = WarmedCalls()
        ten, twenty = ToyKernel.signature(10), ToyKernel.signature(20)
        assert "no call has run eagerly yet" in warmed.support(ten).reason
        warmed.remember(ten, 1)
        assert warmed.support(ten).supported
        assert warmed.require(ten) == 1
        support = warmed.support(twenty)
        assert not support.supported
        assert "float32[20], absent" in support.reason
        with pytest.raises(CaptureError, match="once eagerly, capture again") as caught:
            warmed.require(twenty)
        assert str(ten) in str(caught.value)
        assert str(twenty) in str(caught.value)

    def test_telemetry_is_part_of_the_signature(self) -> None:
        warmed: WarmedCalls[int] = WarmedCalls()
        signature = ToyKernel.signature(10)
        warmed.remember(signature, 1)
        assert not warmed.support(signature._replace(telemetry=(5,))).supported
        assert "telemetry [5]" in str(signature._replace(telemetry=(5,)))

    def test_the_least_recently_used_one_is_forgotten(self) -> None:
        warmed: WarmedCalls[int] = WarmedCalls(limit=2)
        for count in (1, 2):
            warmed.remember(ToyKernel.signature(count), count)
        assert warmed.get(ToyKernel.signature(1)) == 1
        warmed.remember(ToyKernel.signature(3), 3)
        assert len(warmed) == 2
        assert [warmed.support(ToyKernel.signature(count)).supported for count in (1, 2, 3)] == [True, False, True]

    def test_clearing_says_why(self) -> None:
        warmed: WarmedCalls[int] = WarmedCalls()
        warmed.remember(ToyKernel.signature(1), 1)
        warmed.clear("the last call had zero rows")
        assert "zero rows" in warmed.support(ToyKernel.signature(1)).reason


class TestCapture:
    def test_replay_repeats_the_call_on_new_contents(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            graph = kernel.capture(source, destination)
            for factor in (1, 5):
                runtime.htod(source.pointer, factor * VALUES)
                poison(runtime, destination)
                before = simulated.counts()
                graph.replay()
                after = simulated.counts() - before
                assert set(after) == {"cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuGraphLaunch"}
                np.testing.assert_array_equal(read(runtime, destination), 6 * factor * VALUES)

    def test_a_cold_call_fails_and_the_next_eager_one_works(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            runtime.htod(source.pointer, VALUES)
            kernel = ToyKernel(runtime)
            with pytest.raises(CaptureError, match="no call has run eagerly"), Capture(runtime) as capture:
                kernel.execute(source, destination)
            with pytest.raises(CaptureError, match="there is no graph"):
                _ = capture.graph
            kernel.execute(source, destination)
            np.testing.assert_array_equal(read(runtime, destination), 6 * VALUES)

    def test_another_size_shows_both_signatures(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40, 20, 20) as (source, destination, small, smaller):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            with pytest.raises(CaptureError) as caught, Capture(runtime):
                kernel.execute(small, smaller)
            assert "float32[5]" in str(caught.value)
            assert "float32[10]" in str(caught.value)

    def test_nested_captures_are_refused(self, simulated: Simulation) -> None:
        with Runtime() as runtime, Capture(runtime), pytest.raises(CaptureError, match="in progress already"):
            Capture(runtime).__enter__()

    def test_the_default_stream_is_refused(self, simulated: Simulation) -> None:
        with Runtime(stream=0) as runtime, pytest.raises(CaptureError, match="default stream"), Capture(runtime):
            pass

    def test_a_module_is_not_loaded_during_capture(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            fresh = ToyKernel(runtime)
            fresh.warmed, fresh.scratch = kernel.warmed, kernel.scratch
            with pytest.raises(CaptureError, match="load module toy_scale_v1"):
                fresh.capture(source, destination)

    @pytest.mark.parametrize(
        "call",
        ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy", "cuLaunchKernelEx"],
    )
    def test_a_failed_capture_leaves_the_runtime_usable(self, simulated: Simulation, call: str) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            runtime.htod(source.pointer, VALUES)
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            simulated.fail(call)
            if call == "cuGraphDestroy":
                kernel.capture(source, destination).close()
            else:
                with pytest.raises(CudaError, match=call):
                    kernel.capture(source, destination)
            poison(runtime, destination)
            kernel.execute(source, destination)
            np.testing.assert_array_equal(read(runtime, destination), 6 * VALUES)
            kernel.capture(source, destination).close()
            kernel.scratch.close()
            assert runtime.memory_statistics().allocations == 2

    def test_an_invalidated_capture_ends(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)

            def invalidate() -> None:
                with simulated.embedder(), runtime.current():
                    simulated.driver.cuStreamSynchronize(runtime.stream)
                simulated.violations.clear()

            def invalidate_and_call() -> None:
                invalidate()
                kernel.execute(source, destination)

            with pytest.raises(CaptureError, match="invalidated"), Capture(runtime):
                invalidate_and_call()
            kernel.execute(source, destination)
            with pytest.raises(CudaError, match="INVALIDATED"), Capture(runtime):
                invalidate()
            kernel.execute(source, destination)

    def test_a_capture_ended_by_somebody_else(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)

            def end_and_call() -> None:
                with simulated.embedder(), runtime.current():
                    simulated.driver.cuGraphDestroy(simulated.driver.cuStreamEndCapture(runtime.stream)[1])
                kernel.execute(source, destination)

            with pytest.raises(CaptureError, match="ended by somebody else"), Capture(runtime):
                end_and_call()
            kernel.execute(source, destination)

    def test_closing_the_runtime_inside_a_capture(self, simulated: Simulation) -> None:
        runtime = Runtime()
        with pytest.raises(CaptureError, match="abandoned"), Capture(runtime):
            runtime.close()
        assert runtime.closed

    def test_dropping_the_runtime_inside_a_capture(self, simulated: Simulation) -> None:
        capture: Any = Capture(Runtime())
        capture.__enter__()
        del capture
        gc.collect()
        assert simulated.counts()["cuStreamEndCapture"] == 1

    def test_other_threads_are_refused_meanwhile(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            errors: list[str] = []

            def intrude() -> None:
                for action in (lambda: kernel.execute(source, destination), runtime.close, capture.abandon):
                    with pytest.raises(CaptureError) as caught:
                        action()
                    errors.append(str(caught.value))

            with Capture(runtime) as capture:
                kernel.execute(source, destination)
                thread = threading.Thread(target=intrude)
                thread.start()
                thread.join()
            assert "another thread is capturing" in errors[0]
            assert "the thread that began it" in errors[1]
            assert "the thread that began it" in errors[2]
            capture.graph.replay()


class TestLifetimes:
    def test_a_graph_outlives_kernel_growth_and_operands(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            with allocated(runtime, 40, 40, 400, 400) as (source, destination, large, larger):
                runtime.htod(source.pointer, VALUES)
                kernel = ToyKernel(runtime)
                kernel.execute(source, destination)
                graph = kernel.capture(source, destination)
                kernel.execute(large, larger)
            del kernel
            gc.collect()
            # Were the old scratch free, this would be handed its memory and lose what it holds.
            with allocated(runtime, 40, 400) as others:
                poison(runtime, *others)
                graph.replay()
                np.testing.assert_array_equal(read(runtime, destination), 6 * VALUES)
            assert runtime.memory_statistics().requested == 120
            graph.close()
            assert runtime.memory_statistics().allocations == 0

    def test_close_drains_and_is_idempotent(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            graph = kernel.capture(source, destination)
            graph.replay()
            start = len(simulated.log)
            graph.close()
            graph.close()
            ends = [call for call in simulated.log[start:] if call in ("cuStreamSynchronize", "cuGraphExecDestroy")]
            assert ends == ["cuStreamSynchronize", "cuGraphExecDestroy"]
            assert graph.closed
            assert graph.allocations == ()
            with pytest.raises(CaptureError, match="the graph is closed"):
                graph.replay()

    def test_a_failed_drain_keeps_the_memory(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            graph = kernel.capture(source, destination)
            kernel.scratch.close()
            simulated.fail("cuStreamSynchronize")
            with pytest.raises(CudaError):
                graph.close()
            assert graph.closed
            assert source.owners == 2
            assert runtime.memory_statistics().allocations == 2
            assert source.owners == 1

    def test_a_dropped_graph_goes_with_the_next_call(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            graph = kernel.capture(source, destination)
            graph.replay()
            del graph
            gc.collect()
            assert "cuGraphExecDestroy" not in simulated.counts()
            runtime.collect()
            assert simulated.counts()["cuGraphExecDestroy"] == 1
            assert source.owners == 1

    def test_close_during_another_capture_waits_for_its_end(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            first = kernel.capture(source, destination)
            with Capture(runtime) as capture:
                first.close()
                with pytest.raises(CaptureError, match="closed"):
                    first.replay()
                kernel.execute(source, destination)
                assert "cuGraphExecDestroy" not in simulated.counts()
            assert simulated.counts()["cuGraphExecDestroy"] == 1
            capture.graph.replay()

    def test_closing_the_runtime_closes_its_graphs(self, simulated: Simulation) -> None:
        runtime = Runtime()
        kernel = ToyKernel(runtime)
        source, destination = runtime.allocate(40, "source"), runtime.allocate(40, "destination")
        kernel.execute(source, destination)
        graph = kernel.capture(source, destination)
        graph.replay()
        runtime.close()
        assert graph.closed
        graph.close()
        with pytest.raises(CudaError, match="closed"):
            graph.replay()

    def test_what_is_kept_lives_as_long_as_the_graph(self, simulated: Simulation) -> None:
        class Array:
            pass

        with Runtime() as runtime:
            array = Array()
            gone = threading.Event()
            weakref.finalize(array, gone.set)
            with Capture(runtime) as capture:
                capture.keep(array)
            del array
            gc.collect()
            assert not gone.is_set()
            capture.graph.close()
            gc.collect()
            assert gone.is_set()


class TestReplays:
    def test_other_streams_are_ordered_with_the_runtimes(self, simulated: Simulation) -> None:
        streams = [embedder_stream(simulated) for _ in range(2)]
        with Runtime() as runtime, allocated(runtime, 40, 40, 40, 40) as (a, b, c, d):
            kernel = ToyKernel(runtime)
            kernel.execute(a, b)
            first, second = kernel.capture(a, b), kernel.capture(c, d)
            runtime.htod(a.pointer, VALUES)
            runtime.htod(c.pointer, VALUES + 1)
            poison(runtime, b, d)
            # Both use the same scratch; the last stream is waited for first.
            first.replay(streams[0])
            second.replay(streams[1])
            with simulated.embedder(), runtime.current():
                simulated.driver.cuStreamSynchronize(streams[1])
            np.testing.assert_array_equal(read(runtime, b), 6 * VALUES)
            np.testing.assert_array_equal(read(runtime, d), 6 * (VALUES + 1))

    def test_a_replay_that_can_not_be_ordered_is_waited_for(self, simulated: Simulation) -> None:
        stream = embedder_stream(simulated)
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            graph = kernel.capture(source, destination)
            simulated.fail("cuEventRecord", nth=2)
            with pytest.raises(CudaError, match="cuEventRecord"):
                graph.replay(stream)
            assert not simulated.streams[stream].queue

    def test_replays_during_a_capture_are_refused(self, simulated: Simulation) -> None:
        stream = embedder_stream(simulated)
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            graph = kernel.capture(source, destination)
            with Capture(runtime), pytest.raises(CaptureError, match="replay a graph"):
                graph.replay()
            with simulated.embedder(), runtime.current():
                simulated.driver.cuStreamBeginCapture(stream, 1)
            with pytest.raises(CaptureError, match="on another stream"):
                graph.replay(stream)
            with simulated.embedder(), runtime.current():
                simulated.driver.cuGraphDestroy(simulated.driver.cuStreamEndCapture(stream)[1])


class TestUpdate:
    def test_new_pointers_update_the_executable(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40, 40, 40) as (a, b, c, d):
            kernel = ToyKernel(runtime)
            kernel.execute(a, b)
            runtime.htod(c.pointer, VALUES)
            graph = kernel.capture(a, b)
            assert kernel.capture(c, d, update=graph) is graph
            assert simulated.counts()["cuGraphInstantiate"] == 1
            assert (a.owners, c.owners) == (1, 2)
            poison(runtime, d)
            graph.replay()
            np.testing.assert_array_equal(read(runtime, d), 6 * VALUES)

    def test_another_topology_is_instantiated_anew(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40, 40, 40) as (a, b, c, d):
            kernel = ToyKernel(runtime)
            kernel.execute(a, b)
            runtime.htod(a.pointer, VALUES)
            graph = kernel.capture(a, b)
            with Capture(runtime, update=graph):
                kernel.execute(a, b)
                kernel.execute(b, d)
            assert simulated.counts()["cuGraphInstantiate"] == 2
            assert simulated.counts()["cuGraphExecDestroy"] == 1
            graph.replay()
            np.testing.assert_array_equal(read(runtime, d), 36 * VALUES)
            assert c.owners == 1

    @pytest.mark.parametrize("call", ["cuGraphExecUpdate", "cuStreamEndCapture", "cuLaunchKernelEx"])
    def test_a_failed_update_leaves_the_graph(self, simulated: Simulation, call: str) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40, 40, 40) as (a, b, c, d):
            kernel = ToyKernel(runtime)
            kernel.execute(a, b)
            runtime.htod(a.pointer, VALUES)
            graph = kernel.capture(a, b)
            simulated.fail(call)
            with pytest.raises(CudaError, match=call):
                kernel.capture(c, d, update=graph)
            poison(runtime, b)
            graph.replay()
            np.testing.assert_array_equal(read(runtime, b), 6 * VALUES)
            assert c.owners == 1

    def test_a_closed_graph_is_refused(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            graph = kernel.capture(source, destination)
            graph.close()
            with pytest.raises(CaptureError, match="closed"):
                kernel.capture(source, destination, update=graph)


class TestEmbedders:
    def test_the_embedders_graph_owns_what_it_addresses(self, simulated: Simulation) -> None:
        stream = embedder_stream(simulated)
        with Runtime(stream=stream) as runtime:
            with allocated(runtime, 40, 40, 400, 400) as (source, destination, large, larger):
                runtime.htod(source.pointer, VALUES)
                kernel = ToyKernel(runtime)
                kernel.execute(source, destination)
                executables: list[Any] = []
                with foreign_capture(simulated, runtime, executables):
                    kernel.execute(source, destination)
                    kernel.execute(source, destination)
                kernel.execute(large, larger)
            del kernel
            gc.collect()
            assert runtime.memory_statistics().requested == 120
            poison(runtime, destination)
            with in_embedder(simulated) as binding:
                assert not binding.cuGraphLaunch(*executables[0])[0]
            np.testing.assert_array_equal(read(runtime, destination), 6 * VALUES)
            assert user_objects.pending() == 1
            launch_and_destroy(simulated, executables)
            # The driver's thread only posts; the memory goes with the next call that allocates or asks.
            assert "cuGraphExecDestroy" not in simulated.counts()
            assert runtime.memory_statistics().allocations == 0
            assert user_objects.pending() == 0

    def test_it_follows_the_same_rules(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            executables: list[Any] = []
            with foreign_capture(simulated, runtime, executables):
                with pytest.raises(CaptureError, match="no call has run eagerly"):
                    kernel.execute(source, destination)
                with pytest.raises(CaptureError, match="capturing it already"):
                    Capture(runtime).__enter__()
            launch_and_destroy(simulated, executables)
            runtime.memory_statistics()

    @pytest.mark.parametrize("call", ["cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject"])
    def test_a_share_that_can_not_be_taken_fails_the_call(self, simulated: Simulation, call: str) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            executables: list[Any] = []
            with foreign_capture(simulated, runtime, executables):
                simulated.fail(call)
                before = simulated.counts()
                with pytest.raises(CudaError, match=call):
                    kernel.execute(source, destination)
                assert "cuLaunchKernelEx" not in simulated.counts() - before
            launch_and_destroy(simulated, executables)
            runtime.memory_statistics()
            assert user_objects.pending() == 0
            assert source.owners == 1

    def test_a_dropped_runtime_lives_as_long_as_the_graph(self, simulated: Simulation) -> None:
        stream = embedder_stream(simulated)
        runtime: Any = Runtime(stream=stream)
        source, destination = runtime.allocate(40, "source"), runtime.allocate(40, "destination")
        kernel: Any = ToyKernel(runtime)
        kernel.execute(source, destination)
        executables: list[Any] = []
        with foreign_capture(simulated, runtime, executables):
            kernel.execute(source, destination)
        reference = weakref.ref(runtime)
        del runtime, kernel, source, destination
        gc.collect()
        launch_and_destroy(simulated, executables)
        assert reference() is not None
        with Runtime() as another:
            another.memory_statistics()
        gc.collect()
        assert reference() is None

    def test_resources_that_the_embedder_holds_itself(self, simulated: Simulation) -> None:
        with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            resources, dropped = (GraphResources(runtime, kernel.used, [kernel]) for _ in range(2))
            assert [owned.purpose for owned in resources.allocations] == ["scratch 'between' of node 7"]
            kernel.scratch.close()
            del kernel
            resources.close()
            resources.close()
            assert runtime.memory_statistics().allocations == 3
            del dropped
            gc.collect()
            assert runtime.memory_statistics().allocations == 2


def test_outside_of_a_capture_nobody_registers(simulated: Simulation) -> None:
    with Runtime() as runtime, runtime.current():
        assert registrar(runtime) is None
