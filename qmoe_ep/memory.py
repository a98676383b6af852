"""Device allocations: identity, owners, and when the memory goes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Allocation", "AllocationOwner", "MemoryStatistics"]

_identities = itertools.count(1)


class AllocationOwner(Protocol):
    """What an allocation needs of the runtime that made it."""

    def count_owner(self, allocation: Allocation, change: int) -> int:
        """Change the owner count under the runtime's lock and return it; at zero the memory is freed."""


class Allocation:
    """Device memory with an identity and an owner count.

    The count starts at one, which belongs to whoever asked for it. The last :meth:`release` frees the
    memory in stream order, or after the capture when the runtime's stream is capturing. Whoever is about
    to release memory that work on *another* stream may still use drains first.

    Attributes
    ----------
    identity : unique in the process, never reused
    pointer : device address
    nbytes : size, bytes
    purpose : for errors and statistics, such as ``"scratch activated of node 7"``
    """

    __slots__ = ("__weakref__", "_runtime", "identity", "nbytes", "owners", "pointer", "purpose")

    def __init__(self, runtime: AllocationOwner, pointer: int, nbytes: int, purpose: str) -> None:
        self.identity = next(_identities)
        self.pointer, self.nbytes, self.purpose = pointer, nbytes, purpose
        self.owners = 1
        self._runtime = runtime

    def retain(self) -> Allocation:
        """Add an owner and return the allocation.

        Raises
        ------
        RuntimeError : the memory is already gone.
        """
        self._runtime.count_owner(self, +1)
        return self

    def release(self) -> None:
        """Drop one owner. Not for finalizers: those use ``Runtime.release_later``.

        Raises
        ------
        RuntimeError : released more often than owned.
        """
        self._runtime.count_owner(self, -1)

    def __repr__(self) -> str:
        return (
            f"Allocation({self.purpose!r}, identity={self.identity}, pointer={self.pointer:#x}, "
            f"nbytes={self.nbytes}, owners={self.owners})"
        )


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """The runtime's pool at one moment, bytes except for the count.

    Attributes
    ----------
    used, used_peak : handed out, as the driver counts it
    reserved, reserved_peak : held from the device, in use or kept for reuse
    allocations : live allocations of the runtime
    requested : sum of their sizes
    """

    used: int
    used_peak: int
    reserved: int
    reserved_peak: int
    allocations: int
    requested: int
