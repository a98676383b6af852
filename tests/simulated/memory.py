"""Simulated device memory: one address range per allocation, guard gaps between, no address used twice."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Buffer", "Memory", "SimulatedFault"]

_FIRST_ADDRESS = 0x7E00_0000_0000
_LAST_ADDRESS = 0x7F00_0000_0000
_GUARD_BYTES = 1 << 16
_ALIGNMENT = 512
_POISON = 0xFF
"""Every float made of it is a NaN, every signed integer is -1."""


class SimulatedFault(Exception):
    """An access outside of live memory: what a device reports as an illegal address."""


class Buffer:
    """One allocation.

    Attributes
    ----------
    address, nbytes : its range
    data : bytes, or None once the free has been carried out
    free_enqueued : a free is on its way; work enqueued from now on may not use it
    pool : handle of the pool it comes from, or None for an embedder's memory
    """

    def __init__(self, address: int, nbytes: int, pool: int | None) -> None:
        self.address, self.nbytes, self.pool = address, nbytes, pool
        self.data: npt.NDArray[np.uint8] | None = np.full(nbytes, _POISON, np.uint8)
        self.free_enqueued = False

    def __repr__(self) -> str:
        state = "freed" if self.data is None else "live"
        return f"{state} buffer {self.address:#x} of {self.nbytes} bytes"


class Memory:
    """The address space of a simulated device."""

    def __init__(self) -> None:
        self._next = _FIRST_ADDRESS
        self._starts: list[int] = []
        self._buffers: list[Buffer] = []

    def allocate(self, nbytes: int, pool: int | None = None) -> Buffer:
        """Return a new poisoned buffer at an address never used before."""
        buffer = Buffer(self._next, nbytes, pool)
        self._starts.append(buffer.address)
        self._buffers.append(buffer)
        span = nbytes + _GUARD_BYTES
        self._next += -(-span // _ALIGNMENT) * _ALIGNMENT
        return buffer

    def find(self, address: int) -> Buffer | None:
        """Return the buffer whose range has the address, freed or not."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        buffer = self._buffers[index]
        return buffer if address < buffer.address + buffer.nbytes else None

    def live(self) -> list[Buffer]:
        """Return what has not been freed."""
        return [buffer for buffer in self._buffers if buffer.data is not None]

    @staticmethod
    def looks_like_address(value: int) -> bool:
        """Whether a number lies in the range that addresses come from."""
        return _FIRST_ADDRESS <= value < _LAST_ADDRESS

    def bytes_at(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a view of device bytes.

        Raises
        ------
        SimulatedFault : any of them is not live.
        """
        buffer = self.find(address)
        if buffer is None:
            raise SimulatedFault(f"{nbytes} bytes at {address:#x}: no allocation is there")
        if buffer.data is None:
            raise SimulatedFault(f"{nbytes} bytes at {address:#x}: {buffer!r}")
        start = address - buffer.address
        if start + nbytes > buffer.nbytes:
            raise SimulatedFault(f"{nbytes} bytes at {address:#x}: {start + nbytes - buffer.nbytes} past {buffer!r}")
        return buffer.data[start : start + nbytes]

    def view(self, address: int, shape: int | Sequence[int], dtype: Any) -> npt.NDArray[Any]:
        """Return a writable view of device memory as an array.

        Raises
        ------
        SimulatedFault : not live, or not aligned to an element.
        """
        kind = np.dtype(dtype)
        dimensions = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
        count = int(np.prod(dimensions, dtype=np.int64))
        if count == 0:
            return np.empty(dimensions, kind)
        if address % kind.alignment:
            raise SimulatedFault(f"{address:#x} is not aligned to an element of {kind}")
        return self.bytes_at(address, count * kind.itemsize).view(kind).reshape(dimensions)
