"""The runtime layer on the real driver: the programs that the simulated one runs."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from simulated.scenarios import (
    ToyKernel,
    allocated,
    embedder_stream,
    everything,
    foreign_capture,
    in_embedder,
    launch_and_destroy,
    read,
    run_scale,
)
from simulated.toys import accumulate_step

from qmoe_ep import driver, user_objects
from qmoe_ep.errors import CaptureError, CudaError
from qmoe_ep.graph_capture import Capture
from qmoe_ep.nvrtc_cache import ModuleCache
from qmoe_ep.runtime import Runtime

pytestmark = pytest.mark.gpu

EXPECTED = 3 * np.arange(100, dtype=np.float32)


class Real:
    """The real driver, where a program expects a simulation."""

    def __init__(self) -> None:
        self.driver = driver.initialise()

    @contextlib.contextmanager
    def embedder(self) -> Iterator[None]:
        """Nothing tells an embedder's calls from the package's."""
        yield


@pytest.fixture
def real() -> Real:
    """The real driver."""
    return Real()


def test_every_part(real: Real) -> None:
    with Runtime() as runtime:
        everything(real, runtime)
        assert runtime.memory_statistics().allocations == 0
    assert user_objects.pending() == 0


def test_capabilities(real: Real) -> None:
    with Runtime() as runtime:
        capabilities = runtime.capabilities()
    assert capabilities.compute_capability >= (7, 5)
    assert capabilities.multiprocessor_count > 0
    assert capabilities.shared_bytes_per_block_optin >= 48 << 10
    assert capabilities.l2_bytes > 0


@pytest.mark.parametrize("stream", [None, 0])
def test_eager(real: Real, stream: int | None) -> None:
    with Runtime(stream=stream, synchronous=True) as runtime:
        np.testing.assert_array_equal(run_scale(runtime), EXPECTED)
        runtime.synchronize()
    assert int(driver.check(real.driver.cuCtxGetCurrent(), "cuCtxGetCurrent", "compare")) == 0


def test_the_default_stream_is_not_captured(real: Real) -> None:
    with Runtime(stream=0) as runtime, pytest.raises(CaptureError, match="default stream"), Capture(runtime):
        pass


def test_refusals_during_a_capture_leave_it_valid(real: Real) -> None:
    with Runtime() as runtime, allocated(runtime, 40, 40) as (source, destination):
        kernel = ToyKernel(runtime)
        kernel.execute(source, destination)
        with Capture(runtime) as capture:
            for refused in (runtime.wait, runtime.drain_for_unmap, lambda: runtime.allocate(8, "table")):
                with pytest.raises(CaptureError):
                    refused()
            kernel.execute(source, destination)
        runtime.htod(source.pointer, np.arange(10, dtype=np.float32))
        capture.graph.replay()
        np.testing.assert_array_equal(read(runtime, destination), 6 * np.arange(10))


def test_an_embedders_graph_keeps_what_it_addresses(real: Real) -> None:
    with Runtime() as runtime:
        executables: list[Any] = []
        with allocated(runtime, 40, 40) as (source, destination):
            runtime.htod(source.pointer, np.arange(10, dtype=np.float32))
            kernel = ToyKernel(runtime)
            kernel.execute(source, destination)
            with foreign_capture(real, runtime, executables):
                kernel.execute(source, destination)
        del kernel
        gc.collect()
        runtime.collect()
        assert runtime.memory_statistics().allocations == 3
        with in_embedder(real) as binding:
            driver.check(binding.cuGraphLaunch(*executables[0]), "cuGraphLaunch", "replay")
        np.testing.assert_array_equal(read(runtime, destination), 6 * np.arange(10))
        launch_and_destroy(real, executables)
        # The driver calls the destructor from a thread of its own, in its own time.
        for _ in range(100):
            if runtime.memory_statistics().allocations == 0:
                break
            threading.Event().wait(0.02)
        assert runtime.memory_statistics().allocations == 0


def test_replays_on_another_stream_keep_their_order(real: Real) -> None:
    with Runtime() as runtime, allocated(runtime, 4 << 20) as (counter,):
        # Made while the runtime keeps the primary context alive, which a stream doesn't.
        stream = embedder_stream(real)
        modules, step = ModuleCache(runtime), accumulate_step(1 << 20, 1.0)
        launch = runtime.prepare(step, modules.function(step.module, step.entry))
        launch.bind(step.pointers, {"destination": counter.pointer})
        runtime.memset(counter.pointer, 0, counter.nbytes)
        with runtime.current():
            launch.enqueue()
        with Capture(runtime) as capture, runtime.current():
            capture.register(counter)
            launch.enqueue()
        for number in range(200):
            capture.graph.replay(stream if number % 2 else None)
        np.testing.assert_array_equal(read(runtime, counter), np.full(1 << 20, 201.0))


def test_memory_stays_flat(real: Real) -> None:
    with Runtime() as runtime:
        run_scale(runtime, 1 << 20)
        before = runtime.memory_statistics().reserved
        for _ in range(50):
            run_scale(runtime, 1 << 20)
        assert runtime.memory_statistics().reserved == before


PROGRAMS = {
    "an illegal address is an error and an exit": """
import numpy as np
from simulated.toys import fill_step
modules, step = ModuleCache(runtime), fill_step(4, 1.0)
launch = runtime.prepare(step, modules.function(step.module, step.entry), "node 7")
launch.arguments.destination = 64
with runtime.current():
    launch.enqueue()
try:
    runtime.wait()
except CudaError as error:
    print("OK" if error.name == "CUDA_ERROR_ILLEGAL_ADDRESS" else error)
""",
    "a forked child": """
import os
child = os.fork()
if child == 0:
    try:
        runtime.wait()
    except CudaError:
        os._exit(7)
    os._exit(1)
print("OK" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 else "child failed")
""",
    "an embedder's graph at exit": """
from simulated.scenarios import ToyKernel, foreign_capture
class Real:
    driver = driver.driver()
    embedder = contextlib.nullcontext
source, destination = runtime.allocate(40, "source"), runtime.allocate(40, "destination")
kernel = ToyKernel(runtime)
kernel.execute(source, destination)
foreign_capture_kept = []
with foreign_capture(Real(), runtime, foreign_capture_kept):
    kernel.execute(source, destination)
print("OK")
""",
    "a capture that was never ended": """
from qmoe_ep.graph_capture import Capture
Capture(runtime).__enter__()
print("OK")
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_process_ends(real: Real, name: str) -> None:
    prelude = """
import contextlib, sys
sys.path[:0] = sys.argv[1:]
from qmoe_ep import driver
from qmoe_ep.errors import CudaError
from qmoe_ep.nvrtc_cache import ModuleCache
from qmoe_ep.runtime import Runtime
runtime = Runtime()
"""
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", prelude + PROGRAMS[name], here, os.path.dirname(here)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "OK"), result.stderr


def test_out_of_memory_is_a_clean_error(real: Real) -> None:
    with Runtime() as runtime:
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            runtime.allocate(1 << 50, "table")
        np.testing.assert_array_equal(run_scale(runtime), EXPECTED)
