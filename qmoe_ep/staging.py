"""Pinned host buffers for copies, so that neither direction holds the runtime's lock while it waits.

A copy to the device leaves its buffer behind with an event and returns at once. A copy from the device waits for
its event only, while other threads go on enqueueing. Several pieces of device memory that are read together share a
buffer of their own kind, of the size they need, whose event is waited for asleep: nothing is in a hurry there.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any

from qmoe_ep.driver import check, driver, relaxed_capture_mode
from qmoe_ep.errors import CudaError

__all__ = ["STAGED_BYTES", "Staging", "StagingBuffer"]

STAGED_BYTES = 64 << 10
"""Larger copies go without staging; activations of a decode step and telemetry records fit."""

_BUFFERS = 8
"""How many copies to the device may be under way before one is waited for."""

_ALIGNMENT = 16
"""Of the pieces of one buffer, bytes."""


class StagingBuffer:
    """Pinned host memory and the event of its latest copy.

    Attributes
    ----------
    address : host address
    nbytes : size
    patient : whoever waits for it sleeps, which wakes later and burns no processor
    busy : a copy may still be reading or writing it
    """

    __slots__ = ("_event", "address", "busy", "nbytes", "patient")

    def __init__(self, nbytes: int = STAGED_BYTES, patient: bool = False) -> None:
        binding, doing = driver(), "make a staging buffer"
        self.busy, self.address, self.nbytes, self.patient = False, 0, nbytes, patient
        flags = int(binding.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        if patient:
            flags |= int(binding.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
        self._event = check(binding.cuEventCreate(flags), "cuEventCreate", doing)
        try:
            with relaxed_capture_mode():
                self.address = int(check(binding.cuMemHostAlloc(nbytes, 0), "cuMemHostAlloc", doing))
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
        self._free_patient: deque[StagingBuffer] = deque()
        self.buffers: list[StagingBuffer] = []

    def take(self, doing: str) -> StagingBuffer:
        """Return a buffer that nothing uses; the oldest one is waited for when there are many."""
        full = sum(not buffer.patient for buffer in self.buffers) >= _BUFFERS
        if not self._free or (self._free[0].busy and not full):
            self.buffers.append(StagingBuffer())
            return self.buffers[-1]
        buffer = self._free[0]
        if buffer.busy:
            buffer.wait(doing)
        self._free.popleft()
        return buffer

    def _take_patient(self, nbytes: int) -> StagingBuffer:
        """Return a patient buffer of at least a size that nothing uses."""
        for _ in range(len(self._free_patient)):
            buffer = self._free_patient.popleft()
            if buffer.nbytes >= nbytes:
                return buffer
            self._free_patient.append(buffer)
        # In powers of two, so that growing requests leave no more behind than they use.
        self.buffers.append(StagingBuffer(max(STAGED_BYTES, 1 << (nbytes - 1).bit_length()), patient=True))
        return self.buffers[-1]

    def give(self, buffer: StagingBuffer) -> None:
        """Take a buffer back. Needs no lock. One whose wait failed is never given back: its copy may come yet."""
        (self._free_patient if buffer.patient else self._free).append(buffer)

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

    def together(self, sources: Sequence[tuple[int, int]], stream: Any, doing: str) -> tuple[StagingBuffer, list[int]]:
        """Start to copy pieces of device memory, (address, bytes) each, into one patient buffer.

        Returns
        -------
        the buffer, for :meth:`finish`, and where in it each piece begins
        """
        offsets, end = [], 0
        for _, nbytes in sources:
            offsets.append(end)
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._take_patient(max(end, 1))
        for (source, nbytes), offset in zip(sources, offsets, strict=True):
            # Should one fail, the copies before it may still come: the buffer isn't given back.
            result = driver().cuMemcpyDtoHAsync(buffer.address + offset, source, nbytes, stream)
            check(result, "cuMemcpyDtoHAsync", doing)
        buffer.record(stream, doing)
        return buffer, offsets
