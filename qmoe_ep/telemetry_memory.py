"""Where telemetry records live: device memory of a runtime, or host memory for the CPU provider."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qmoe_ep.memory import Allocation

if TYPE_CHECKING:
    from qmoe_ep.runtime import Runtime

__all__ = ["HostMemory", "RecordMemory", "host_memory", "runtime_memory"]


class RecordMemory(Protocol):
    """Memory in the order of one stream of work."""

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps calls of kernels, and other threads' changes, out; re-entrant."""

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock, ready to enqueue."""

    def refuse_while_capturing(self, doing: str) -> None:
        """Raise CaptureError if the stream is capturing."""

    def allocate(self, nbytes: int, purpose: str) -> Allocation:
        """Allocate; the contents are undefined."""

    def write(self, record: Allocation, data: NDArray[np.uint8], doing: str) -> None:
        """Overwrite the first bytes, in order; ``data`` may change afterwards."""

    def read(self, records: Sequence[Allocation], doing: str) -> list[NDArray[np.uint8]]:
        """Copy whole records, in order and with nothing between. Not to be called under :meth:`exclusive`: it waits."""

    def drain(self, doing: str) -> None:
        """Wait for everything that was enqueued."""

    def drain_and_release(self, records: Sequence[Allocation], doing: str) -> None:
        """Give up one share of each, after a drain where memory goes; while capturing both are queued."""

    def release_later(self, record: Allocation) -> None:
        """Queue a drain and the release; for finalizers."""


class _RuntimeMemory:
    """A runtime's device memory."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        return self._runtime.lock

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._runtime.lock, self._runtime.current():
            yield

    def refuse_while_capturing(self, doing: str) -> None:
        with self._runtime.lock, self._runtime.current():
            self._runtime.refuse_while_capturing(doing)

    def allocate(self, nbytes: int, purpose: str) -> Allocation:
        return self._runtime.allocate(nbytes, purpose)

    def write(self, record: Allocation, data: NDArray[np.uint8], doing: str) -> None:
        self._runtime.htod(record.pointer, data, doing)

    def read(self, records: Sequence[Allocation], doing: str) -> list[NDArray[np.uint8]]:
        return self._runtime.dtoh_together([(record.pointer, record.nbytes) for record in records], doing)

    def drain(self, doing: str) -> None:
        self._runtime.drain_for_unmap(doing)

    def drain_and_release(self, records: Sequence[Allocation], doing: str) -> None:
        self._runtime.drain_and_release(records, doing)

    def release_later(self, record: Allocation) -> None:
        self._runtime.release_later(record)


class HostMemory:
    """NumPy memory, where everything happens at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._arrays: weakref.WeakKeyDictionary[Allocation, NDArray[np.uint8]] = weakref.WeakKeyDictionary()

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Held by a call while it counts."""
        return self._lock

    def array(self, record: Allocation) -> NDArray[np.uint8]:
        """Return the record's bytes: uint8 [nbytes], writable. Under :meth:`exclusive`."""
        return self._arrays[record]

    def count_owner(self, allocation: Allocation, change: int) -> int:
        """Change an allocation's owner count; at zero its memory goes."""
        with self._lock:
            if allocation.owners < 1:
                raise RuntimeError(f"{allocation!r} is gone already: it can't be retained or released again")
            allocation.owners += change
            if allocation.owners == 0:
                del self._arrays[allocation]
            return allocation.owners

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._lock:
            yield

    def refuse_while_capturing(self, doing: str) -> None:
        """There is no capture."""

    def allocate(self, nbytes: int, purpose: str) -> Allocation:
        array = np.zeros(nbytes, np.uint8)
        allocation = Allocation(self, array.ctypes.data, nbytes, purpose)
        with self._lock:
            self._arrays[allocation] = array
        return allocation

    def write(self, record: Allocation, data: NDArray[np.uint8], doing: str) -> None:
        with self._lock:
            self.array(record)[: data.size] = data

    def read(self, records: Sequence[Allocation], doing: str) -> list[NDArray[np.uint8]]:
        with self._lock:
            return [self.array(record).copy() for record in records]

    def drain(self, doing: str) -> None:
        """Nothing is ever pending."""

    def drain_and_release(self, records: Sequence[Allocation], doing: str) -> None:
        for record in records:
            record.release()

    def release_later(self, record: Allocation) -> None:
        """The memory goes with the last reference to the record."""


def runtime_memory(runtime: Runtime) -> RecordMemory:
    """Records in the device memory of a runtime, in the order of its stream and under its lock."""
    return _RuntimeMemory(runtime)


def host_memory() -> HostMemory:
    """Records in host memory."""
    return HostMemory()
