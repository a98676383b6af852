"""The warm pool of one kernel object: named slots of device memory that only grow.

A call opens a :class:`ScratchCall` on its kernel's pool, asks it for every slot before its first launch, and
publishes it after its last. Until then the pool is as it was: a call that fails half way gives back what it
had newly allocated, after a drain.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Protocol

from qmoe_ep.errors import CaptureError, CudaError
from qmoe_ep.memory import Allocation
from qmoe_ep.runtime import Runtime

__all__ = ["Registrar", "ScratchCall", "ScratchPool"]


class Registrar(Protocol):
    """A capture that takes an owner's share in what its nodes address; see ``graph_capture``."""

    def register(self, allocation: Allocation) -> None:
        """Own the allocation until the captured graph is gone. Repeating it does nothing more."""


class ScratchPool:
    """Named slots, each one allocation that only grows.

    Belongs to one kernel object, whose lock guards it. Freed by :meth:`close` after a drain, or queued for
    after a drain when the garbage collector drops it; what a graph still owns stays.

    Parameters
    ----------
    runtime : where the memory comes from
    owner : for messages, such as ``"node 7"``

    Attributes
    ----------
    generation : changes whenever a slot's address may have changed
    """

    def __init__(self, runtime: Runtime, owner: str = "") -> None:
        self._runtime, self._owner = runtime, owner
        self._slots: dict[str, Allocation] = {}
        self.generation = 0
        self._finalizer = weakref.finalize(self, _release_later, runtime, self._slots)

    def call(self, capturing: Registrar | None = None) -> ScratchCall:
        """Open a working copy for one call.

        Parameters
        ----------
        capturing : the capture in progress, or None
        """
        return ScratchCall(self, self._runtime, self._owner, self._slots, capturing)

    def capacities(self) -> dict[str, int]:
        """Return slot -> bytes."""
        return {slot: allocation.nbytes for slot, allocation in self._slots.items()}

    def close(self) -> None:
        """Drain, then give up every slot. While the stream is capturing both are queued for after it.

        Raises
        ------
        CudaError : the drain failed; the slots are queued for another try.
        """
        self._finalizer.detach()
        slots = tuple(self._slots.values())
        self._slots.clear()
        self.generation += 1
        if slots:
            doing = f"drain before the scratch of {self._owner or 'a kernel'} goes"
            self._runtime.drain_and_release(slots, doing)

    def publish(self, slots: dict[str, Allocation]) -> None:
        """Replace the table by that of a call that went through. :class:`ScratchCall` calls it."""
        self._slots.clear()
        self._slots.update(slots)
        self.generation += 1


class ScratchCall:
    """The slots of one call: a working copy of the pool's table.

    Use as a context manager; leaving it without :meth:`publish` abandons the call.

    Attributes
    ----------
    used : slot -> allocation, of the slots that this call asked for: what a graph must keep alive
    """

    def __init__(
        self, pool: ScratchPool, runtime: Runtime, owner: str, slots: dict[str, Allocation], capturing: Registrar | None
    ) -> None:
        self._pool, self._runtime, self._owner = pool, runtime, owner
        self._slots = dict(slots)
        self._capturing = capturing
        self._new: list[Allocation] = []
        self._replaced: list[Allocation] = []
        self.used: dict[str, Allocation] = {}

    def ensure(self, slot: str, nbytes: int) -> int:
        """Return the address of at least `nbytes` bytes; zero counts as one.

        Raises
        ------
        CaptureError : capturing, and the warmed slot is too small or can't be registered.
        CudaError : the drain or the allocation failed; the slot is still what it was.
        """
        nbytes = max(nbytes, 1)
        allocation = self._slots.get(slot)
        if allocation is None or allocation.nbytes < nbytes:
            if self._capturing is not None:
                raise self._too_small(slot, nbytes, allocation)
            allocation = self._grow(slot, nbytes, allocation)
        elif self._capturing is not None:
            self._capturing.register(allocation)
        self.used[slot] = allocation
        return allocation.pointer

    def reserve(self, slots: Iterable[tuple[str, int]]) -> dict[str, int]:
        """Ensure every (slot, bytes) of a plan; return slot -> address."""
        return {slot: self.ensure(slot, nbytes) for slot, nbytes in slots}

    def _grow(self, slot: str, nbytes: int, old: Allocation | None) -> Allocation:
        if old is not None:
            self._runtime.drain_for_unmap(f"drain before scratch {slot!r} grows to {nbytes} bytes")
        purpose = f"scratch {slot!r}" + (f" of {self._owner}" if self._owner else "")
        allocation = self._runtime.allocate(nbytes, purpose)
        self._new.append(allocation)
        if old is not None:
            self._replaced.append(old)
        self._slots[slot] = allocation
        return allocation

    def _too_small(self, slot: str, nbytes: int, allocation: Allocation | None) -> CaptureError:
        warmed = allocation.nbytes if allocation is not None else 0
        return CaptureError(
            f"scratch slot {slot!r}" + (f" of {self._owner}" if self._owner else "") + f": needs {nbytes} bytes, the "
            f"warmed capacity is {warmed}, and nothing is allocated during capture. End the capture, run the call once "
            "eagerly, capture again"
        )

    def publish(self) -> None:
        """Make the call's slots the pool's: every launch has been enqueued."""
        replaced, changed = self._replaced, bool(self._new)
        self._new, self._replaced = [], []
        if changed:
            self._pool.publish(self._slots)
        for allocation in replaced:
            allocation.release()

    def abandon(self) -> None:
        """Give back what the call had newly allocated, after a drain: launches may be using it.

        Never raises: when the drain fails, the release is queued for another try.
        """
        fresh = self._new
        self._new, self._replaced = [], []
        if fresh:
            with contextlib.suppress(CudaError):
                self._runtime.drain_and_release(fresh, "drain what a failed call allocated")

    def __enter__(self) -> ScratchCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


def _release_later(runtime: Runtime, slots: dict[str, Allocation]) -> None:
    for allocation in slots.values():
        runtime.release_later(allocation)
