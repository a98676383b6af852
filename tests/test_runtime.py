"""The runtime on the simulated driver: memory, launches, barriers, threads, failures and the end."""

from __future__ import annotations

import numpy as np
from simulated.plugin import Simulation
from simulated.toys import scale_step

from qmoe_ep.nvrtc_cache import ModuleCache
from qmoe_ep.runtime import Runtime


def run_scale(runtime: Runtime, count: int = 100) -> np.ndarray:
    """Scale an array by three on the device and return it."""
    step = scale_step(count, 3.0)
    cache = ModuleCache(runtime)
    launch = runtime.prepare(step, cache.function(step.module, step.entry), "node 7")
    source, destination = runtime.allocate(4 * count, "source"), runtime.allocate(4 * count, "destination")
    host = np.full(count, np.nan, np.float32)
    runtime.htod(source.pointer, np.arange(count, dtype=np.float32))
    with runtime.lock, runtime.current():
        launch.bind(step.pointers, {"source": source.pointer, "destination": destination.pointer})
        launch.enqueue()
    runtime.dtoh(host, destination.pointer)
    source.release()
    destination.release()
    return host


def test_launch(simulated: Simulation) -> None:
    with Runtime() as runtime:
        np.testing.assert_array_equal(run_scale(runtime), 3 * np.arange(100, dtype=np.float32))
