"""Which telemetry producer belongs to whom: producers by executor and node, and the executors' generations."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmoe_ep.errors import QMoEError
from qmoe_ep.route_telemetry import RouteTelemetry

if TYPE_CHECKING:
    from qmoe_ep.telemetry_memory import RecordMemory

__all__ = ["TelemetryRegistry"]


@dataclass(slots=True)
class _Claim:
    """The one generation of an executor's life."""

    generation: int
    retired: bool = False


class TelemetryRegistry:
    """Producers by (executor, node), and the executors' generations.

    Parameters
    ----------
    memory : where records live
    enabled : False for a registry that hands out nothing, takes no lock and claims nothing

    Notes
    -----
    Two locks, taken in this order: the turn, held for as long as a scope or a retirement lasts, and the table's,
    held for single steps. Only the turn is held while callers' code runs.
    """

    def __init__(self, memory: RecordMemory, enabled: bool = True) -> None:
        self.enabled = enabled
        self._memory = memory
        self._turn = threading.Lock()
        self._turn_of: int | None = None
        self._table = threading.Lock()
        self._executor: int | None = None
        self._claims: dict[int, _Claim] = {}
        self._producers: dict[tuple[int, int], RouteTelemetry] = {}
        self._private: weakref.WeakSet[RouteTelemetry] = weakref.WeakSet()

    # --- scopes ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def executor_scope(self, executor: int, generation: int) -> Iterator[None]:
        """Work as an executor: kernels created inside by this thread share the executor's producers.

        Exclusive with every other scope and with retirement. The first use claims the generation for good.

        Raises
        ------
        QMoEError : another generation is the executor's, or it is retired; or this thread is inside a scope or a
            retirement already.
        """
        if not self.enabled:
            yield
            return
        with self._take_turn(f"enter the scope of executor {executor}"):
            with self._table:
                claim = self._claims.get(executor)
                if claim is not None:
                    _check_generation(executor, generation, claim)
                    if claim.retired:
                        raise QMoEError(
                            f"executor {executor}: generation {generation} is retired and can't be revived; "
                            "give the new executor an id of its own"
                        )
                else:
                    self._claims[executor] = _Claim(generation)
                self._executor = executor
            try:
                yield
            finally:
                with self._table:
                    self._executor = None

    def retire_scope(self, executor: int, generation: int, cleanup: Callable[[bool], object]) -> None:
        """Wait for a scope in flight, mark the generation retired, and call ``cleanup(newly_retired)``.

        Repeating it, or an unknown executor, calls ``cleanup(False)``. The producers stay until :meth:`remove`.

        Raises
        ------
        QMoEError : another generation is the executor's, or this thread is inside a scope; `cleanup` is not called.
        """
        if not self.enabled:
            cleanup(False)
            return
        with self._take_turn(f"retire executor {executor}"):
            with self._table:
                claim = self._claims.get(executor)
                newly_retired = False
                if claim is not None:
                    _check_generation(executor, generation, claim)
                    newly_retired, claim.retired = not claim.retired, True
            cleanup(newly_retired)

    @contextlib.contextmanager
    def _take_turn(self, doing: str) -> Iterator[None]:
        # Only this thread itself can have set it to its own number, so reading it unlocked is enough.
        if self._turn_of == threading.get_ident():
            raise QMoEError(f"can't {doing} inside another scope or retirement of the same thread; leave that first")
        with self._turn:
            self._turn_of = threading.get_ident()
            try:
                yield
            finally:
                self._turn_of = None

    # --- producers ---------------------------------------------------------------------------------

    def producer(self, node: int, top_k: int) -> RouteTelemetry | None:
        """Return a kernel's producer: inside a scope of this thread the one of (executor, node), else a private one.

        Parameters
        ----------
        node : the embedder's number for it
        top_k : routes per row of the node

        Returns
        -------
        None from a disabled registry
        """
        if not self.enabled:
            return None
        with self._table:
            if self._executor is None or self._turn_of != threading.get_ident():
                private = RouteTelemetry(self._memory, top_k, None, node)
                self._private.add(private)
                return private
            key = (self._executor, node)
            if key not in self._producers:
                self._producers[key] = RouteTelemetry(self._memory, top_k, *key)
            return self._producers[key]

    def sources(self, executor: int) -> Mapping[int, RouteTelemetry]:
        """Return the producers of an executor by node, as they are now."""
        with self._table:
            return {node: producer for (owner, node), producer in self._producers.items() if owner == executor}

    def source(self, executor: int, node: int) -> RouteTelemetry | None:
        """Return one producer, or None."""
        with self._table:
            return self._producers.get((executor, node))

    def executors(self) -> tuple[int, ...]:
        """Return the executors that have producers, in ascending order."""
        with self._table:
            return tuple(sorted({executor for executor, _ in self._producers}))

    def producers(self) -> tuple[RouteTelemetry, ...]:
        """Return all that are alive: those outside any executor first, then by executor and node."""
        with self._table:
            private = sorted(self._private, key=lambda producer: producer.node)
            return (*private, *(self._producers[key] for key in sorted(self._producers)))

    def __len__(self) -> int:
        with self._table:
            return len(self._producers)

    # --- ends --------------------------------------------------------------------------------------

    def remove(self, executor: int, fenced: bool = False) -> int:
        """Drop and disarm the producers of an executor; its generation stays known.

        Parameters
        ----------
        fenced : the caller has waited for every stream that used them, so that no drain is needed

        Returns
        -------
        how many there were

        Raises
        ------
        CudaError : a drain failed. The producers are dropped; their memory goes at the next drain.
        """
        with self._table:
            keys = [key for key in self._producers if key[0] == executor]
            dropped = [self._producers.pop(key) for key in keys]
        failures: list[Exception] = []
        for producer in dropped:
            try:
                producer.detach(fenced=fenced)
            except Exception as failure:  # the others must go as well
                failures.append(failure)
        if failures:
            raise failures[0]
        return len(dropped)

    def clear(self) -> None:
        """Drop all producers and forget all generations, for the provider's shutdown; never waits."""
        with self._table:
            dropped = list(self._producers.values())
            self._producers.clear()
            self._claims.clear()
            self._executor = None
        for producer in dropped:
            producer.abandon()


def _check_generation(executor: int, generation: int, claim: _Claim) -> None:
    if claim.generation != generation:
        raise QMoEError(
            f"executor {executor}: expected generation {claim.generation}, got {generation}, which is stale or of "
            "somebody else; a rebuilt executor takes a new id"
        )
