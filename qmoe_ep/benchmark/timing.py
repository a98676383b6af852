"""Timing on a CUDA stream: graph replays between events, and the time that the bytes alone would take."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from typing import Any

from qmoe_ep.driver import check, driver
from qmoe_ep.graph_capture import Capture
from qmoe_ep.kernels.plan import ModuleSource, Step
from qmoe_ep.nvrtc_cache import ModuleCache
from qmoe_ep.runtime import Runtime

__all__ = ["ReadLimit", "median_microseconds"]

READ_BUFFER_BYTES = 2 << 30


def median_microseconds(runtime: Runtime, run: Callable[[], None], repeats: int = 15, warm: int = 3) -> float:
    """Median time of ``run`` (which only enqueues, such as a replay) between events on the stream, µs."""
    binding = driver()
    times = []
    with runtime.lock, runtime.current():
        events = [check(binding.cuEventCreate(0), "cuEventCreate", "time") for _ in range(2)]
        for number in range(warm + repeats):
            check(binding.cuEventRecord(events[0], runtime.stream), "cuEventRecord", "time")
            run()
            check(binding.cuEventRecord(events[1], runtime.stream), "cuEventRecord", "time")
            check(binding.cuEventSynchronize(events[1]), "cuEventSynchronize", "time")
            elapsed = check(binding.cuEventElapsedTime(*events), "cuEventElapsedTime", "time")
            if number >= warm:
                times.append(1e3 * float(elapsed))
        for event in events:
            check(binding.cuEventDestroy(event), "cuEventDestroy", "time")
    return statistics.median(times)


class ReadArguments(ctypes.Structure):
    _fields_ = (("source", ctypes.c_void_p), ("sink", ctypes.c_void_p), ("vectors", ctypes.c_int64))


_READ = """
struct ReadArguments { const uint4* source; unsigned* sink; long long vectors; };
// One block streams a contiguous piece: eight 16-byte loads in flight per thread, nothing written.
extern "C" __global__ void __launch_bounds__(512) read_stream(const __grid_constant__ ReadArguments a) {
  unsigned mix = 0;
  const long long step = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * step < a.vectors; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldg(a.source + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) mix ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < a.vectors; i += step) { uint4 v = __ldg(a.source + i); mix ^= v.x ^ v.y ^ v.z ^ v.w; }
  if (mix == 0x9e3779b9u) *a.sink = mix;
}
"""


class ReadLimit:
    """Time of one plain kernel that reads the bytes of a layer, launched in a graph, from memory and not the L2."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[int, float] = {}
        self._module = ModuleSource("benchmark_read", _READ, ("read_stream",))
        self._function = ModuleCache(runtime).function(self._module, "read_stream")
        self._buffer = runtime.allocate(READ_BUFFER_BYTES, "read benchmark")
        runtime.memset(self._buffer.pointer, 0x5A, self._buffer.nbytes)

    def microseconds(self, nbytes: int) -> float:
        """Best time over grid sizes to read ``nbytes``, µs per kernel of a chain over disjoint pieces."""
        nbytes = max(nbytes // 16 * 16, 16)
        if nbytes not in self._known:
            grids = [m * self._runtime.capabilities().multiprocessor_count for m in (1, 2, 4)]
            self._known[nbytes] = min(self._time(nbytes, grid) for grid in grids)
        return self._known[nbytes]

    def _time(self, nbytes: int, grid: int) -> float:
        pieces = max(1, min(16, self._buffer.nbytes // nbytes))
        arguments = ReadArguments(0, 0, min(nbytes, self._buffer.nbytes) // 16)
        pointers = (("source", "source"), ("sink", "sink"))
        step = Step("read", self._module, "read_stream", (grid, 1, 1), (512, 1, 1), 0, arguments, pointers)
        launch: Any = self._runtime.prepare(step, self._function, "benchmark")
        with Capture(self._runtime) as capture, self._runtime.lock, self._runtime.current():
            capture.register(self._buffer)
            for piece in range(pieces):
                source = self._buffer.pointer + piece * (min(nbytes, self._buffer.nbytes) // 16 * 16)
                launch.bind(pointers, {"source": source, "sink": self._buffer.pointer})
                launch.enqueue()
        with capture.graph as graph:
            return median_microseconds(self._runtime, graph.replay) / pieces

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer.release()
