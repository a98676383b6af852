"""Figures of expert paging: what was read, which experts were used, what the host cache holds.

Every provider that pages experts keeps its own figures; :func:`offload_stats` sums over those that are alive.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["CacheFigures", "LayerFigures", "OffloadStats", "UseCounters", "offload_stats", "reset_offload_stats"]


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """What one layer's paged calls used.

    Attributes
    ----------
    executions : calls with at least one row
    active_experts : selected (row, expert) pairs
    unique_experts : distinct experts of each call, summed over the calls
    bytes_read : packed bytes read from the mapped files
    """

    executions: int = 0
    active_experts: int = 0
    unique_experts: int = 0
    bytes_read: int = 0

    @property
    def tokens_per_expert(self) -> float:
        """Rows that one expert serves per call, on average; 0 before the first call."""
        return self.active_experts / self.unique_experts if self.unique_experts else 0.0

    def __add__(self, other: LayerFigures) -> LayerFigures:
        return LayerFigures(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What a cache of expanded experts did and holds; bytes are those of float32.

    Attributes
    ----------
    hits, misses, evictions : of requests and entries; a request that isn't cached is a miss
    bytes_owned, peak_bytes_owned, budget : of cached experts, loads in progress included
    entries : cached experts
    peak_dequantized_experts : most expanded experts alive at one moment, cached or in use
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_owned: int = 0
    peak_bytes_owned: int = 0
    budget: int = 0
    entries: int = 0
    peak_dequantized_experts: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per request; 0 before the first."""
        requests = self.hits + self.misses
        return self.hits / requests if requests else 0.0

    def __add__(self, other: CacheFigures) -> CacheFigures:
        return CacheFigures(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Figures of one provider, or their sums over several (peaks too, so that a sum is an upper bound).

    Attributes
    ----------
    total : over all layers
    layers : by the embedder's number of the node
    cache : of the host cache
    """

    total: LayerFigures
    layers: Mapping[int, LayerFigures]
    cache: CacheFigures

    @property
    def bytes_read(self) -> int:
        """Packed bytes read from the mapped files."""
        return self.total.bytes_read

    @property
    def layer_executions(self) -> int:
        """Paged calls with at least one row."""
        return self.total.executions

    @property
    def active_experts(self) -> int:
        """Selected experts, with repeats across rows."""
        return self.total.active_experts

    @property
    def unique_experts(self) -> int:
        """Distinct experts of each call, summed over the calls."""
        return self.total.unique_experts

    @property
    def tokens_per_expert(self) -> float:
        """Rows that one expert serves per call, on average."""
        return self.total.tokens_per_expert

    @property
    def peak_dequantized_experts(self) -> int:
        """Most expanded experts alive at one moment."""
        return self.cache.peak_dequantized_experts

    @property
    def cache_hits(self) -> int:
        """Requests that the host cache served."""
        return self.cache.hits

    @property
    def cache_misses(self) -> int:
        """Requests that had to be read and expanded."""
        return self.cache.misses

    @property
    def cache_evictions(self) -> int:
        """Cached experts given up for others."""
        return self.cache.evictions

    @property
    def cache_bytes_owned(self) -> int:
        """Bytes of float32 that cached experts hold."""
        return self.cache.bytes_owned

    @property
    def cache_peak_bytes_owned(self) -> int:
        """Most bytes of float32 that cached experts held."""
        return self.cache.peak_bytes_owned

    @property
    def cache_budget(self) -> int:
        """Bytes of float32 that cached experts may hold."""
        return self.cache.budget

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON; layers by the decimal spelling of their number."""

        def plain(figures: LayerFigures) -> dict[str, Any]:
            values: dict[str, Any] = {f.name: getattr(figures, f.name) for f in fields(figures)}
            return {**values, "tokens_per_expert": figures.tokens_per_expert}

        cache = {f.name: getattr(self.cache, f.name) for f in fields(self.cache)}
        layers = {str(layer): plain(figures) for layer, figures in sorted(self.layers.items())}
        return {**plain(self.total), "cache": {**cache, "hit_rate": self.cache.hit_rate}, "layers": layers}

    @classmethod
    def sum(cls, parts: Iterable[OffloadStats]) -> OffloadStats:
        """Add figures up; layers of the same number become one."""
        total, cache = LayerFigures(), CacheFigures()
        layers: dict[int, LayerFigures] = {}
        for part in parts:
            total, cache = total + part.total, cache + part.cache
            for layer, figures in part.layers.items():
                layers[layer] = layers.get(layer, LayerFigures()) + figures
        return cls(total, MappingProxyType(layers), cache)


class UseCounters:
    """Counts a provider's paged calls by layer; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[int, LayerFigures] = {}

    def add(self, layer: int, figures: LayerFigures) -> None:
        """Add figures to a layer."""
        with self._lock:
            self._layers[layer] = self._layers.get(layer, LayerFigures()) + figures

    def reset(self) -> None:
        """Forget all."""
        with self._lock:
            self._layers.clear()

    def stats(self, cache: CacheFigures) -> OffloadStats:
        """What was counted, with the figures of the cache."""
        with self._lock:
            layers = dict(self._layers)
        total = LayerFigures()
        for figures in layers.values():
            total += figures
        return OffloadStats(total, MappingProxyType(layers), cache)


class Partition(Protocol):
    """Something that has figures."""

    def stats(self) -> OffloadStats: ...
    def reset_stats(self) -> None: ...


_partitions: weakref.WeakSet[Partition] = weakref.WeakSet()
_lock = threading.Lock()


def register(partition: Partition) -> None:
    """Include a partition in the process-wide figures for as long as it lives."""
    with _lock:
        _partitions.add(partition)


def unregister(partition: Partition) -> None:
    """Leave a partition out from now on."""
    with _lock:
        _partitions.discard(partition)


def _alive() -> list[Partition]:
    with _lock:
        return list(_partitions)


def offload_stats() -> OffloadStats:
    """Figures of expert paging, summed over the CPU providers that are alive and have it on."""
    return OffloadStats.sum(partition.stats() for partition in _alive())


def reset_offload_stats() -> None:
    """Set the counters of all providers to zero, and peaks to what is held now."""
    for partition in _alive():
        partition.reset_stats()
