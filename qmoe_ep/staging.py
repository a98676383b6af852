"""Pinned host buffers for small copies, so that neither direction holds the runtime's lock while it waits.

A copy to the device leaves its buffer behind with an event and returns at once. A copy from the device waits for
its event only, while other threads go on enqueueing.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from qmoe_ep.driver import check, driver, relaxed_capture_mode
from qmoe_ep.errors import CudaError

__all__ = ["STAGED_BYTES", "Staging", "StagingBuffer"]

STAGED_BYTES = 64 << 10
"""Larger copies go without staging; activations of a decode step and telemetry records fit."""

_BUFFERS = 8
"""How many copies to the device may be under way before one is waited for."""


class StagingBuffer:
    """Pinned host memory and the event of its latest copy.

    Attributes
    ----------
    address : host address of ``STAGED_BYTES`` bytes
    busy : a copy may still be reading or writing it
    """

    __slots__ = ("_event", "address", "busy")

    def __init__(self) -> None:
        binding, doing = driver(), "make a staging buffer"
        self.busy, self.address = False, 0
        flag = binding.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._event = check(binding.cuEventCreate(flag), "cuEventCreate", doing)
        try:
            with relaxed_capture_mode():
                self.address = int(check(binding.cuMemHostAlloc(STAGED_BYTES, 0), "cuMemHostAlloc", doing))
        except BaseException:
            self.destroy()
            raise

    def record(self, stream: Any, doing: str) -> None:
        """Note that the latest work of the stream uses the buffer."""
        self.busy = True
        check(driver().cuEventRecord(self._event, stream), "cuEventRecord", doing)

    def wait(self, doing: str) -> None:
        """Wait until the noted work is done, also beside somebody else's capture."""
        with relaxed_capture_mode():
            check(driver().cuEventSynchronize(self._event), "cuEventSynchronize", doing)
        self.busy = False

    def destroy(self) -> None:
        """Give both back; nothing uses the buffer any more."""
        doing = "close the runtime"
        try:
            if self.address:
                check(driver().cuMemFreeHost(self.address), "cuMemFreeHost", doing)
        finally:
            check(driver().cuEventDestroy(self._event), "cuEventDestroy", doing)


class Staging:
    """The buffers of one runtime, made when they are needed. Guarded by the runtime's lock."""

    def __init__(self) -> None:
        self._free: deque[StagingBuffer] = deque()
        self.buffers: list[StagingBuffer] = []

    def take(self, doing: str) -> StagingBuffer:
        """Return a buffer that nothing uses; the oldest one is waited for when there are many."""
        full = len(self.buffers) >= _BUFFERS
        if not self._free or (self._free[0].busy and not full):
            self.buffers.append(StagingBuffer())
            return self.buffers[-1]
        buffer = self._free[0]
        if buffer.busy:
            buffer.wait(doing)
        self._free.popleft()
        return buffer

    def give(self, buffer: StagingBuffer) -> None:
        """Take a buffer back. Needs no lock. One whose wait failed is never given back: its copy may come yet."""
        self._free.append(buffer)

    def to_device(self, destination: int, source: int, nbytes: int, stream: Any, doing: str) -> None:
        """Copy host memory by way of a buffer; it was read when this returns."""
        buffer = self.take(doing)
        ctypes.memmove(buffer.address, source, nbytes)
        try:
            result = driver().cuMemcpyHtoDAsync(destination, buffer.address, nbytes, stream)
            check(result, "cuMemcpyHtoDAsync", doing)
        except CudaError:
            self.give(buffer)
            raise
        buffer.record(stream, doing)
        self.give(buffer)

    def from_device(self, source: int, nbytes: int, stream: Any, doing: str) -> StagingBuffer:
        """Start to copy device memory into a buffer, for :meth:`finish`."""
        buffer = self.take(doing)
        try:
            result = driver().cuMemcpyDtoHAsync(buffer.address, source, nbytes, stream)
            check(result, "cuMemcpyDtoHAsync", doing)
        except CudaError:
            self.give(buffer)
            raise
        buffer.record(stream, doing)
        return buffer

    def finish(self, buffer: StagingBuffer, destination: int, nbytes: int, doing: str) -> None:
        """Wait for a buffer, copy it to host memory and take it back. Needs no lock."""
        buffer.wait(doing)
        ctypes.memmove(destination, buffer.address, nbytes)
        self.give(buffer)
