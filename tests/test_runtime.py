"""The runtime on the simulated driver: memory, launches, barriers, threads, failures and the end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from simulated.plugin import Simulation
from simulated.scenarios import embedder_stream, run_scale
from simulated.toys import fill_step, scale_step

from qmoe_ep.capabilities import Capabilities
from qmoe_ep.errors import CaptureError, CudaError, QMoEError
from qmoe_ep.nvrtc_cache import ModuleCache
from qmoe_ep.runtime import CaptureStatus, Runtime

EXPECTED = 3 * np.arange(100, dtype=np.float32)


class CudaStream:
    """An object that only speaks the stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class TestStreamsAndContexts:
    def test_own_stream(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            assert runtime.owns_stream
            assert runtime.__cuda_stream__() == (0, runtime.stream)
            np.testing.assert_array_equal(run_scale(runtime), EXPECTED)

    def test_stream_given_as_handle_or_object(self, simulated: Simulation) -> None:
        handle = embedder_stream(simulated)
        for stream in (handle, CudaStream(handle)):
            with Runtime(stream=stream) as runtime:
                assert runtime.stream == handle
                assert not runtime.owns_stream
                np.testing.assert_array_equal(run_scale(runtime), EXPECTED)
        assert "cuStreamDestroy" not in simulated.counts()

    @pytest.mark.parametrize("stream", [0, 1])
    def test_default_stream(self, simulated: Simulation, stream: int) -> None:
        with Runtime(stream=stream) as runtime:
            assert runtime.stream == 0
            np.testing.assert_array_equal(run_scale(runtime), EXPECTED)

    @pytest.mark.parametrize("stream", [2, "cuda:0", object()])
    def test_what_is_no_stream_is_refused(self, simulated: Simulation, stream: object) -> None:
        with pytest.raises(QMoEError, match="stream"):
            Runtime(stream=stream)

    def test_stream_of_another_context_is_refused(self, simulated: Simulation) -> None:
        with simulated.embedder():
            simulated.driver.cuCtxPushCurrent(0x1234)
            stream = int(simulated.driver.cuStreamCreate(0)[1])
            simulated.driver.cuCtxPopCurrent()
        with pytest.raises(QMoEError, match="primary context"):
            Runtime(stream=stream)

    @pytest.mark.parametrize("caller", [0, 0x1234])
    def test_the_callers_context_is_restored(self, simulated: Simulation, caller: int) -> None:
        with simulated.embedder():
            simulated.driver.cuCtxPushCurrent(caller)
        with Runtime() as runtime:
            run_scale(runtime)
            assert int(simulated.driver.cuCtxGetCurrent()[1]) == caller
            with pytest.raises(ZeroDivisionError), runtime.current():
                raise ZeroDivisionError
            assert int(simulated.driver.cuCtxGetCurrent()[1]) == caller
        simulated.driver.cuCtxPopCurrent()

    def test_a_current_context_is_neither_pushed_nor_popped(self, simulated: Simulation) -> None:
        with Runtime() as runtime, runtime.current():
            before = simulated.counts()
            with runtime.current():
                pass
            after = simulated.counts()
        assert after - before == {"cuCtxGetCurrent": 1}

    def test_wrong_device(self, simulated: Simulation) -> None:
        with pytest.raises(CudaError, match="open device 3") as caught:
            Runtime(device=3)
        assert (caught.value.name, caught.value.call) == ("CUDA_ERROR_INVALID_DEVICE", "cuDeviceGet")

    def test_capabilities(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            capabilities = runtime.capabilities()
        assert capabilities.compute_capability == (9, 0)
        assert capabilities.multiprocessor_count == 132
        assert capabilities.arch == "sm_90a"
        assert capabilities.name == "Simulated GPU"


def test_typical_capabilities_need_no_gpu() -> None:
    assert Capabilities.for_arch("sm_90a").shared_bytes_per_block_optin == 232448
    assert Capabilities.for_arch("sm_75").compute_capability == (7, 5)
    assert Capabilities.for_arch("sm_103a").name == Capabilities.for_arch("sm_100").name
    for arch in ("sm_70", "gfx90a", "90"):
        with pytest.raises(QMoEError, match="sm_75 or newer"):
            Capabilities.for_arch(arch)


class TestMemory:
    def test_owners(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            allocation = runtime.allocate(100, "table").retain()
            allocation.release()
            assert runtime.memory_statistics().allocations == 1
            allocation.release()
            assert runtime.memory_statistics().allocations == 0
            with pytest.raises(RuntimeError, match="gone already"):
                allocation.release()
            with pytest.raises(RuntimeError, match="gone already"):
                allocation.retain()

    def test_identities_are_never_reused(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            seen = set()
            for _ in range(5):
                allocation = runtime.allocate(8, "table")
                seen.add(allocation.identity)
                allocation.release()
        assert len(seen) == 5

    def test_zero_bytes_count_as_one(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            assert runtime.allocate(0, "nothing").nbytes == 1

    @pytest.mark.parametrize("nbytes", [-1, 2**63])
    def test_impossible_sizes_are_refused(self, simulated: Simulation, nbytes: int) -> None:
        with Runtime() as runtime, pytest.raises(QMoEError, match="table"):
            runtime.allocate(nbytes, "table")

    def test_out_of_memory_leaves_the_runtime_usable(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            simulated.memory_limit = 1000
            with pytest.raises(CudaError, match="2000 bytes for table") as caught:
                runtime.allocate(2000, "table")
            assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
            np.testing.assert_array_equal(run_scale(runtime), EXPECTED)

    def test_memory_freed_in_stream_order_serves_work_enqueued_before(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            cache, step = ModuleCache(runtime), fill_step(4, 1.5)
            launch = runtime.prepare(step, cache.function(step.module, step.entry))
            allocation = runtime.allocate(16, "table")
            with runtime.current():
                launch.bind(step.pointers, {"destination": allocation.pointer})
                launch.enqueue()
            allocation.release()

    def test_use_after_free_is_caught_by_the_simulation(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            allocation = runtime.allocate(16, "table")
            allocation.release()
            runtime.memset(allocation.pointer, 0, 16)
            assert simulated.violations
            simulated.violations.clear()
            with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
                runtime.wait()
            with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
                runtime.close()
        simulated.violations.clear()

    def test_copies(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            source, destination = runtime.allocate(40, "source"), runtime.allocate(40, "destination")
            values = np.arange(10, dtype=np.float32)
            runtime.htod(source.pointer, values)
            runtime.dtod(destination.pointer, source.pointer, 40)
            runtime.memset(destination.pointer, 0, 8)
            host = np.full(10, np.nan, np.float32)
            runtime.dtoh(host, destination.pointer)
        np.testing.assert_array_equal(host, [0, 0, *range(2, 10)])

    def test_strided_host_arrays_are_refused(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            pointer = runtime.allocate(40, "table").pointer
            with pytest.raises(QMoEError, match="C-contiguous"):
                runtime.htod(pointer, np.zeros((4, 4), np.float32)[:, 1])
            with pytest.raises(QMoEError, match="C-contiguous"):
                runtime.dtoh(np.zeros((4, 4), np.float32)[:, 1], pointer)

    def test_statistics_and_trim(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            allocations = [runtime.allocate(100, "table") for _ in range(3)]
            allocations.pop().release()
            statistics = runtime.memory_statistics()
            assert (statistics.allocations, statistics.requested, statistics.used) == (2, 200, 200)
            assert statistics.used_peak == 300
            runtime.trim()
        assert simulated.counts()["cuMemPoolTrimTo"] == 1

    def test_release_later_waits_for_the_next_call(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            runtime.release_later(runtime.allocate(8, "table"))
            before = simulated.counts()
            assert "cuMemFreeAsync" not in before
            runtime.collect()
            after = simulated.counts() - before
            assert (after["cuStreamSynchronize"], after["cuMemFreeAsync"]) == (1, 1)

    def test_release_later_without_a_drain(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            runtime.release_later(runtime.allocate(8, "table"), drain=False)
            runtime.collect()
            assert "cuStreamSynchronize" not in simulated.counts()
            assert runtime.memory_statistics().allocations == 0

    def test_a_refused_free_is_tried_again(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            allocation = runtime.allocate(8, "table")
            simulated.fail("cuMemFreeAsync")
            allocation.release()
            assert runtime.memory_statistics().allocations == 0
            assert simulated.counts()["cuMemFreeAsync"] == 2


class TestStaging:
    def test_small_uploads_do_not_wait(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            tables = [runtime.allocate(40, "table") for _ in range(20)]
            source = np.empty(10, np.float32)
            for number, table in enumerate(tables):
                source[:] = number
                runtime.htod(table.pointer, source)
            counts = simulated.counts()
            assert "cuStreamSynchronize" not in counts
            assert counts["cuMemHostAlloc"] == 8
            host = np.full(10, np.nan, np.float32)
            for number, table in enumerate(tables):
                runtime.dtoh(host, table.pointer)
                np.testing.assert_array_equal(host, np.full(10, number))

    def test_large_copies_go_without(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            values = np.arange(20_000, dtype=np.float32)
            host = np.full_like(values, np.nan)
            table = runtime.allocate(values.nbytes, "table")
            runtime.htod(table.pointer, values)
            runtime.dtoh(host, table.pointer)
            np.testing.assert_array_equal(host, values)
            assert "cuMemHostAlloc" not in simulated.counts()

    def test_others_enqueue_while_a_small_read_waits(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            table = runtime.allocate(40, "table")
            waiting, enqueued = threading.Event(), threading.Event()
            wait = simulated.driver.cuEventSynchronize

            def slow(event: object) -> object:
                waiting.set()
                assert enqueued.wait(10)
                return wait(event)

            def enqueue() -> None:
                assert waiting.wait(10)
                runtime.memset(table.pointer, 0, 40)
                enqueued.set()

            simulated.driver.cuEventSynchronize = slow
            thread = threading.Thread(target=enqueue)
            thread.start()
            runtime.dtoh(np.zeros(10, np.float32), table.pointer)
            thread.join()

    def test_pieces_read_together_share_a_buffer(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            sizes = (5, 70_000, 1, 64)
            tables = [runtime.allocate(nbytes, "table") for nbytes in sizes]
            for number, table in enumerate(tables, 1):
                runtime.memset(table.pointer, number, table.nbytes)
            sources = [(table.pointer, table.nbytes) for table in tables]
            for wanted in (sources, sources[::-1], sources[:1]):
                for piece, source in zip(runtime.dtoh_together(wanted), wanted, strict=True):
                    number = sources.index(source) + 1
                    assert (piece.size, set(piece.tolist())) == (source[1], {number})
                    assert piece.ctypes.data % 8 == 0
            assert runtime.dtoh_together([]) == []
            assert simulated.counts()["cuMemHostAlloc"] == 1
            runtime.dtoh_together([*sources, *sources])
            assert simulated.counts()["cuMemHostAlloc"] == 2

    def test_a_failed_wait_leaves_the_callers_array_alone(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            table = runtime.allocate(40, "table")
            host = np.full(10, 5.0, np.float32)
            simulated.fail("cuEventSynchronize")
            with pytest.raises(CudaError, match="cuEventSynchronize"):
                runtime.dtoh(host, table.pointer)
            runtime.wait()
            np.testing.assert_array_equal(host, np.full(10, 5.0))
            runtime.memset(table.pointer, 0, 40)
            runtime.dtoh(host, table.pointer)
            np.testing.assert_array_equal(host, np.zeros(10))


class TestLaunches:
    def test_a_launch_is_one_driver_call(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            cache, step = ModuleCache(runtime), fill_step(4, 1.5)
            launch = runtime.prepare(step, cache.function(step.module, step.entry))
            launch.arguments.destination = runtime.allocate(16, "table").pointer
            with runtime.current():
                before = simulated.counts()
                launch.enqueue()
                assert simulated.counts() - before == {"cuLaunchKernelEx": 1}

    def test_arguments_may_be_patched_between_launches(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            cache, step = ModuleCache(runtime), fill_step(4, 1.0)
            launch = runtime.prepare(step, cache.function(step.module, step.entry))
            tables = [runtime.allocate(16, "table") for _ in range(3)]
            with runtime.current():
                for number, table in enumerate(tables):
                    launch.arguments.destination, launch.arguments.factor = table.pointer, number
                    launch.enqueue()
            for number, table in enumerate(tables):
                host = np.full(4, np.nan, np.float32)
                runtime.dtoh(host, table.pointer)
                np.testing.assert_array_equal(host, np.full(4, number))
            assert not step.arguments.destination

    def test_an_absent_pointer_becomes_null_again(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            cache, step = ModuleCache(runtime), fill_step(4, 1.0)
            launch = runtime.prepare(step, cache.function(step.module, step.entry))
            launch.bind(step.pointers, {"destination": 64})
            launch.bind(step.pointers, {})
            assert launch.arguments.destination is None

    def test_shared_memory_is_opted_into_once(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            cache = ModuleCache(runtime)
            for shared_bytes in (1000, 200_000, 100_000, 200_000):
                step = scale_step(4, 1.0, shared_bytes)
                runtime.prepare(step, cache.function(step.module, step.entry))
            # The size, and the part of the cache.
            assert simulated.counts()["cuFuncSetAttribute"] == 2

    def test_impossible_geometry_is_refused(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            cache, step = ModuleCache(runtime), scale_step(4, 1.0, shared_bytes=300_000)
            function = cache.function(step.module, step.entry)
            with pytest.raises(QMoEError, match="232448 bytes of shared memory"):
                runtime.prepare(step, function)
            launch = runtime.prepare(scale_step(4, 1.0), function, "node 7")
            with pytest.raises(QMoEError, match="launch toy_scale for node 7"):
                launch.set_geometry((0, 1, 1))

    def test_errors_name_the_launch(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            simulated.fail("cuLaunchKernelEx")
            with pytest.raises(CudaError, match="launch toy_scale for node 7") as caught:
                run_scale(runtime)
            assert caught.value.call == "cuLaunchKernelEx"


class TestBarriers:
    def test_synchronize_does_nothing_by_default(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            before = simulated.counts()
            runtime.synchronize()
            assert simulated.counts() == before

    @pytest.mark.parametrize("by_environment", [False, True])
    def test_synchronous_mode_waits(
        self, simulated: Simulation, monkeypatch: pytest.MonkeyPatch, by_environment: bool
    ) -> None:
        if by_environment:
            monkeypatch.setenv("QMOE_EP_SYNC", "1")
        with Runtime(synchronous=not by_environment) as runtime:
            runtime.synchronize()
            assert simulated.counts()["cuStreamSynchronize"] == 1
            with runtime.current():
                runtime.begin_capture()
                runtime.synchronize()
                runtime.abandon_capture()
        assert not simulated.violations

    def test_everything_that_waits_or_allocates_is_refused_while_capturing(self, simulated: Simulation) -> None:
        with Runtime() as runtime, runtime.current():
            allocation = runtime.allocate(16, "table")
            host = np.zeros(4, np.float32)
            runtime.begin_capture()
            assert runtime.capture_status() is CaptureStatus.ACTIVE
            before = simulated.counts()
            for refused in (
                lambda: runtime.allocate(8, "table"),
                lambda: runtime.htod(allocation.pointer, host),
                lambda: runtime.dtoh(host, allocation.pointer),
                runtime.wait,
                runtime.drain_for_unmap,
                runtime.trim,
            ):
                with pytest.raises(CaptureError, match="while the stream is capturing"):
                    refused()
            # Dropped memory only queues.
            allocation.release()
            runtime.drain_and_release([], "drain")
            assert set(simulated.counts() - before) <= {"cuStreamIsCapturing", "cuCtxGetCurrent"}
            runtime.abandon_capture()
            assert runtime.memory_statistics().allocations == 0

    def test_an_embedders_capture_keeps_the_runtime_open(self, simulated: Simulation) -> None:
        stream = embedder_stream(simulated)
        runtime = Runtime(stream=stream)
        with simulated.embedder(), runtime.current():
            simulated.driver.cuStreamBeginCapture(stream, 0)
        with pytest.raises(CaptureError, match="end the capture, then close"):
            runtime.close()
        assert not runtime.closed
        with simulated.embedder(), runtime.current():
            simulated.driver.cuGraphDestroy(simulated.driver.cuStreamEndCapture(stream)[1])
        runtime.close()

    def test_streams_are_ordered_by_events(self, simulated: Simulation) -> None:
        producer, consumer = embedder_stream(simulated), embedder_stream(simulated)
        source = simulated.memory.allocate(16).address
        copy = simulated.memory.allocate(16).address
        with Runtime() as runtime:
            with simulated.embedder(), runtime.current():
                simulated.driver.cuMemsetD8Async(source, 7, 16, producer)
            runtime.wait_for_stream(producer)
            runtime.dtod(copy, source, 16)
            runtime.order_stream_after(consumer)
            with simulated.embedder(), runtime.current():
                simulated.driver.cuMemcpyDtoDAsync(source, copy, 16, consumer)
                simulated.driver.cuMemsetD8Async(copy, 0, 16, consumer)
                simulated.driver.cuStreamSynchronize(consumer)
            runtime.wait_for_stream(runtime.stream)
            assert simulated.counts()["cuEventRecord"] == 2
            assert simulated.counts()["cuEventCreate"] == 1
        assert simulated.memory.view(source, 16, np.uint8).tolist() == [7] * 16

    def test_a_capturing_producer_is_refused(self, simulated: Simulation) -> None:
        producer = embedder_stream(simulated)
        with Runtime() as runtime, runtime.current():
            with simulated.embedder():
                simulated.driver.cuStreamBeginCapture(producer, 2)
            with pytest.raises(CaptureError, match="which is capturing"):
                runtime.wait_for_stream(producer)
            # The other way round nothing is drawn into the capture.
            runtime.order_stream_after(producer)
            with simulated.embedder():
                simulated.driver.cuGraphDestroy(simulated.driver.cuStreamEndCapture(producer)[1])


class TestTheEnd:
    def test_close_is_idempotent_and_final(self, simulated: Simulation) -> None:
        runtime = Runtime()
        allocation = runtime.allocate(8, "table")
        runtime.close()
        runtime.close()
        allocation.release()
        assert runtime.closed
        for use in (lambda: runtime.allocate(8, "table"), runtime.wait, lambda: run_scale(runtime)):
            with pytest.raises(CudaError, match="closed"):
                use()

    def test_the_garbage_collector_closes(self, simulated: Simulation) -> None:
        runtime = Runtime()
        run_scale(runtime)
        runtime.allocate(8, "forgotten")
        runtime.release_later(runtime.allocate(8, "queued"))
        reference = weakref.ref(runtime)
        del runtime
        gc.collect()
        assert reference() is None
        assert simulated.counts()["cuDevicePrimaryCtxRelease"] == 1

    def test_an_allocation_keeps_its_runtime(self, simulated: Simulation) -> None:
        allocation = Runtime().allocate(8, "table")
        gc.collect()
        assert "cuDevicePrimaryCtxRelease" not in simulated.counts()
        allocation.release()

    @pytest.mark.parametrize(
        "call",
        [
            "cuCtxPushCurrent",
            "cuStreamCreate",
            "cuMemPoolCreate",
            "cuMemPoolSetAttribute",
            "cuCtxPopCurrent",
            "cuDeviceGetName",
        ],
    )
    def test_a_runtime_that_could_not_be_made_leaves_nothing(self, simulated: Simulation, call: str) -> None:
        simulated.fail(call)
        with pytest.raises(CudaError, match=call):
            Runtime()
        simulated.thread.contexts.clear()

    @pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuModuleUnload", "cuMemPoolDestroy", "cuStreamDestroy"])
    def test_a_failing_close_gives_the_rest_back(self, simulated: Simulation, call: str) -> None:
        runtime = Runtime()
        run_scale(runtime)
        runtime.allocate(8, "forgotten")
        simulated.fail(call)
        with pytest.raises(CudaError, match=call):
            runtime.close()
        assert runtime.closed

    def test_a_forked_child_neither_hangs_nor_touches_the_driver(self, simulated: Simulation) -> None:
        runtime = Runtime()
        allocation = runtime.allocate(8, "table")
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            with runtime.lock:
                held.set()
                go.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(10)
        calls = len(simulated.log)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                allocation.release()
                runtime.close()
                try:
                    runtime.wait()
                except CudaError:
                    code = 0 if len(simulated.log) == calls else 2
            finally:
                os._exit(code)
        go.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        runtime.close()

    def test_interpreter_exit_closes(self) -> None:
        program = """
import sys
sys.path[:0] = sys.argv[1:]
from simulated.plugin import Simulation
from qmoe_ep import driver
from qmoe_ep.runtime import Runtime
import atexit
simulation = Simulation()
atexit.register(lambda: print(simulation.leaks(), simulation.violations))
driver.install(simulation.driver, simulation.nvrtc)
runtime = Runtime()
kept = runtime.allocate(8, "table")
"""
        here = os.path.dirname(__file__)
        command = [sys.executable, "-c", program, here, os.path.dirname(here)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert result.stdout.strip() == "[] []", result.stderr


class TestThreads:
    def test_two_threads_share_a_runtime(self, simulated: Simulation) -> None:
        results: list[np.ndarray] = []

        def work(runtime: Runtime) -> None:
            for _ in range(10):
                results.append(run_scale(runtime))

        with Runtime() as runtime:
            threads = [threading.Thread(target=work, args=(runtime,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(results) == 20
        for result in results:
            np.testing.assert_array_equal(result, EXPECTED)
