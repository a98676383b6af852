"""A cache of expanded experts with a byte budget: frequency decides what is admitted and what goes.

Time is a clock that ticks once per request. A key has to be asked for twice before it is cached, and it only takes
the place of entries that were asked for less often, so that one-off experts never push hot ones out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from qmoe_ep.errors import QMoEError
from qmoe_ep.offload import CacheFigures

__all__ = ["AGEING_TICKS", "ExpertCache", "Lease"]

T = TypeVar("T")

PIN_FROM_FREQUENCY, PIN_TICKS = 3, 8
AGEING_TICKS = 64
HISTORY_TICKS, HISTORY_ENTRIES = 64 * 256, 4096
ADMIT_FROM_FREQUENCY = 2


@dataclass(slots=True)
class _Entry(Generic[T]):
    """Expanded weights that are cached, leased, or both."""

    weights: T
    nbytes: int
    frequency: int
    last_use: int
    pinned_until: int = -1
    leases: int = 1
    cached: bool = True


class Lease(Generic[T]):
    """Keeps an expert's weights alive while in use; a context manager that gives the weights.

    Release it when done (releasing again does nothing): the cache can't make room with what is leased.
    """

    def __init__(self, cache: ExpertCache[T], entry: _Entry[T]) -> None:
        self._cache = cache
        self._entry: _Entry[T] | None = entry
        self.weights = entry.weights

    def release(self) -> None:
        """Give the weights back."""
        entry, self._entry = self._entry, None
        if entry is not None:
            del self.weights
            self._cache._release(entry)

    def __enter__(self) -> T:
        return self.weights

    def __exit__(self, *_: object) -> None:
        self.release()


class ExpertCache(Generic[T]):
    """Cached experts of one partition; thread-safe.

    Parameters
    ----------
    budget : bytes that cached experts may hold; 0 caches nothing
    ageing_ticks : requests after which what is known of an uncached key is halved. A key that is asked for less often
        than that is never cached, so a model with more requests per token needs more

    Attributes
    ----------
    budget : may be set at any time; the next request brings the cache down to it, as far as leases allow.
        :meth:`resize` does so at once, or refuses
    """

    def __init__(self, budget: int = 0, ageing_ticks: int = AGEING_TICKS) -> None:
        self.budget = budget
        self._ageing_ticks = ageing_ticks
        self._lock = threading.Lock()
        self._clock = 0
        self._entries: dict[Hashable, _Entry[T]] = {}
        self._loading: set[Hashable] = set()
        # (frequency, last request), in order of the last request.
        self._history: dict[Hashable, tuple[int, int]] = {}
        self._owned = self._peak_owned = 0
        self._alive = self._peak_alive = 0
        self._hits = self._misses = self._evictions = 0

    # --- requests ----------------------------------------------------------------------------------

    def lease(self, key: Hashable, nbytes: int, load: Callable[[bool], T]) -> Lease[T]:
        """Get an expert, from the cache or by loading it.

        Parameters
        ----------
        key : what identifies its weights
        nbytes : what they hold when expanded
        load : called without any lock on a miss, with whether the result will be cached; what isn't cached may
            live in memory that is reused once the lease is released

        Raises
        ------
        whatever ``load`` raises; the reservation is given back then.
        """
        with self._lock:
            self._clock += 1
            self._trim(self.budget)
            entry = self._entries.get(key)
            if entry is not None:
                self._hits += 1
                entry.leases += 1
                entry.frequency += 1
                entry.last_use = self._clock
                if entry.frequency >= PIN_FROM_FREQUENCY:
                    entry.pinned_until = self._clock + PIN_TICKS
                return Lease(self, entry)
            self._misses += 1
            frequency = self._admit(key, nbytes)
            entered = self._clock
            self._alive += 1
            self._peak_alive = max(self._peak_alive, self._alive)
        try:
            weights = load(frequency > 0)
        except BaseException:
            with self._lock:
                self._alive -= 1
                if frequency:
                    self._loading.discard(key)
                    self._owned -= nbytes
            raise
        entry = _Entry(weights, nbytes, frequency, entered, cached=frequency > 0)
        if frequency:
            with self._lock:
                self._loading.discard(key)
                self._history.pop(key, None)
                self._entries[key] = entry
        return Lease(self, entry)

    def _admit(self, key: Hashable, nbytes: int) -> int:
        """Make room and reserve it: the frequency to enter with, or 0 for a load that isn't to be cached."""
        if not 0 < nbytes <= self.budget or key in self._loading:
            return 0
        frequency = self._count_request(key)
        if frequency < ADMIT_FROM_FREQUENCY or not self._make_room(nbytes, frequency):
            return 0
        self._loading.add(key)
        self._owned += nbytes
        self._peak_owned = max(self._peak_owned, self._owned)
        return frequency

    def _count_request(self, key: Hashable) -> int:
        """The key's frequency in the history, this request included."""
        now, history = self._clock, self._history
        while history and now - history[first := next(iter(history))][1] > HISTORY_TICKS:
            del history[first]
        frequency, last = history.pop(key, (0, now))
        if len(history) >= HISTORY_ENTRIES:
            del history[min(history, key=history.__getitem__)]
        if now - last > self._ageing_ticks:
            frequency //= 2
        history[key] = (frequency + 1, now)
        return frequency + 1

    def _make_room(self, nbytes: int, frequency: int) -> bool:
        """Evict less frequent entries so that ``nbytes`` fit, or nothing if they can't."""
        missing = self._owned + nbytes - self.budget
        candidates = [
            (entry.frequency, entry.last_use, key)
            for key, entry in self._entries.items()
            if not entry.leases and entry.pinned_until < self._clock and entry.frequency < frequency
        ]
        return self._evict(sorted(candidates, key=lambda c: c[:2]), missing)

    def _evict(self, candidates: list[tuple[int, int, Hashable]], missing: int) -> bool:
        """Evict the first candidates until ``missing`` bytes are free, or nothing if all of them hold less."""
        victims = []
        for _, _, key in candidates:
            if missing <= 0:
                break
            victims.append(key)
            missing -= self._entries[key].nbytes
        if missing > 0:
            return False
        for key in victims:
            entry = self._entries.pop(key)
            entry.cached = False
            self._owned -= entry.nbytes
            self._alive -= 1
            self._evictions += 1
        return True

    def _release(self, entry: _Entry[T]) -> None:
        with self._lock:
            entry.leases -= 1
            if not entry.leases and not entry.cached:
                self._alive -= 1

    # --- the budget --------------------------------------------------------------------------------

    def _trim(self, budget: int) -> bool:
        """Evict what isn't leased, longest unused first, until the budget holds; nothing if leases prevent it."""
        missing = self._owned - budget
        if missing <= 0:
            return True
        unleased = [(e.last_use, e.frequency, key) for key, e in self._entries.items() if not e.leases]
        return self._evict(sorted(unleased, key=lambda c: c[:2]), missing)

    def resize(self, budget: int) -> None:
        """Set the budget and bring the cache down to it at once.

        Raises
        ------
        QMoEError
            If what is leased or being loaded holds more than that; nothing is evicted and the budget stays.
        """
        if budget < 0:
            raise QMoEError(f"host cache: expected a budget of at least 0 bytes, got {budget}")
        with self._lock:
            if not self._trim(budget):
                leased = self._owned - sum(e.nbytes for e in self._entries.values() if not e.leases)
                raise QMoEError(
                    f"host cache: can't shrink to {budget} bytes while {leased} bytes are leased; "
                    "try again when the calls that use them are done"
                )
            self.budget = budget

    def clear(self) -> None:
        """Forget everything that isn't leased, the history too, without counting evictions; figures stay."""
        with self._lock:
            self._history.clear()
            for key in [key for key, entry in self._entries.items() if not entry.leases]:
                entry = self._entries.pop(key)
                entry.cached = False
                self._owned -= entry.nbytes
                self._alive -= 1

    # --- figures -----------------------------------------------------------------------------------

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._entries

    @property
    def history_entries(self) -> int:
        """Keys whose requests are remembered without being cached."""
        return len(self._history)

    def figures(self) -> CacheFigures:
        """What happened and what is held."""
        with self._lock:
            return CacheFigures(
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                bytes_owned=self._owned,
                peak_bytes_owned=self._peak_owned,
                budget=self.budget,
                entries=len(self._entries),
                peak_dequantized_experts=self._peak_alive,
            )

    def reset_figures(self) -> None:
        """Set counters to zero, and peaks to what is held now."""
        with self._lock:
            self._hits = self._misses = self._evictions = 0
            self._peak_owned, self._peak_alive = self._owned, self._alive
