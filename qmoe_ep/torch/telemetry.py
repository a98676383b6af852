"""Route telemetry of PyTorch layers: producers that act in the order of the current stream.

The operator finds a layer's producer by a handle, an integer among its arguments, so that what it counts is no
operand of the computation.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from qmoe_ep.telemetry import RouteTelemetry, host_memory, runtime_memory
from qmoe_ep.torch.device import borrowed_calls

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qmoe_ep.memory import Allocation
    from qmoe_ep.runtime import Runtime

__all__ = ["create_producer", "producer"]

_handles = itertools.count(1)
_producers: weakref.WeakValueDictionary[int, RouteTelemetry] = weakref.WeakValueDictionary()


def producer(handle: int) -> RouteTelemetry | None:
    """The producer with a handle, None if it is gone (or belongs to another process)."""
    return _producers.get(handle)


def create_producer(device: torch.device, top_k: int) -> tuple[int, RouteTelemetry]:
    """A producer for calls on a device, and its handle.

    Raises
    ------
    CudaError : the driver refuses.
    """
    handle = next(_handles)
    if device.type == "cuda":
        memory: Any = _CurrentStreamMemory(borrowed_calls(device.index).runtime)
    else:
        memory = host_memory()
    made = RouteTelemetry(memory, top_k, executor=None, node=handle)
    _producers[handle] = made
    return handle, made


class _CurrentStreamMemory:
    """Device memory of a runtime, in the order of whatever PyTorch stream is current."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._memory = runtime, runtime_memory(runtime)
        self.exclusive, self.allocate = self._memory.exclusive, self._memory.allocate
        self.release_later = self._memory.release_later

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        return self._memory.lock

    def _current(self) -> int:
        return int(torch.cuda.current_stream(self._runtime.device).cuda_stream)

    def _after_current(self) -> None:
        self._runtime.wait_for_stream(self._current())

    def refuse_while_capturing(self, doing: str) -> None:
        self._runtime.refuse_while_capturing(doing, self._current())

    def write(self, record: Allocation, data: NDArray[np.uint8], doing: str) -> None:
        self.refuse_while_capturing(doing)
        self._after_current()
        self._memory.write(record, data, doing)
        self._runtime.order_stream_after(self._current())

    def read(self, records: Sequence[Allocation], doing: str) -> list[NDArray[np.uint8]]:
        self._after_current()
        return self._memory.read(records, doing)

    def drain(self, doing: str) -> None:
        self._after_current()
        self._memory.drain(doing)

    def drain_and_release(self, records: Sequence[Allocation], doing: str) -> None:
        self._after_current()
        self._memory.drain_and_release(records, doing)
