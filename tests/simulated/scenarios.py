"""Small programs on the runtime layer, shared by its tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qmoe_ep.nvrtc_cache import ModuleCache
from qmoe_ep.runtime import Runtime

from .toys import scale_step

__all__ = ["run_scale"]


def run_scale(runtime: Runtime, count: int = 100) -> npt.NDArray[Any]:
    """Return 3 * (0, 1, …, count - 1), computed on the device; nothing stays allocated, even on failure."""
    step = scale_step(count, 3.0)
    launch = runtime.prepare(step, ModuleCache(runtime).function(step.module, step.entry), "node 7")
    host = np.full(count, np.nan, np.float32)
    source, destination = runtime.allocate(4 * count, "source"), runtime.allocate(4 * count, "destination")
    try:
        runtime.htod(source.pointer, np.arange(count, dtype=np.float32))
        with runtime.lock, runtime.current():
            launch.bind(step.pointers, {"source": source.pointer, "destination": destination.pointer})
            launch.enqueue()
        runtime.dtoh(host, destination.pointer)
    finally:
        source.release()
        destination.release()
    return host
