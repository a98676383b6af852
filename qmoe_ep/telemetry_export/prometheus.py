"""Snapshots as Prometheus metrics, by the official client, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.errors import QMoEError
from qmoe_ep.route_record import MAX_COUNT
from qmoe_ep.telemetry_export.schema import SCHEMA_VERSION, NamedSnapshot, record_to_snapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = [
    "DEFAULT_EXPERT_SERIES",
    "LABELS",
    "METRICS",
    "ScrapedLayer",
    "SnapshotCollector",
    "read_metrics",
    "serve_metrics",
]

DEFAULT_EXPERT_SERIES = 20_000
LABELS = ("executor", "node", "layer")
"""Of every metric; ``executor`` is empty for kernels outside any executor, ``layer`` where it has no name."""

METRICS = {
    "qmoe_rows": ("counter", "Rows that were routed in the present window."),
    "qmoe_routes": ("counter", "Routes (row, expert) in the present window."),
    "qmoe_expert_routes": ("counter", "Routes to one expert in the present window."),
    "qmoe_lost_rows": ("counter", "Rows that left the ring of recorded choices."),
    "qmoe_window_epoch": ("gauge", "Number of the present window."),
    "qmoe_experts": ("gauge", "Experts of the layer."),
    "qmoe_routes_per_row": ("gauge", "Experts that a row selects."),
    "qmoe_distinct_experts": ("gauge", "Experts that were selected in the present window."),
    "qmoe_load_max_over_mean": ("gauge", "Load of the busiest expert by the mean load; 1 is balanced."),
    "qmoe_saturated": ("gauge", "1 where a counter has reached its end, so that the truth is at least that."),
    "qmoe_recording": ("gauge", "1 while recording, 0 while paused."),
    "qmoe_record_bytes": ("gauge", "Memory of the layer's record."),
    "qmoe_snapshot_timestamp_seconds": ("gauge", "When the snapshot was taken, seconds since 1970."),
    "qmoe_expert_series_omitted": ("gauge", "1 where there are more series per expert than may be."),
}
"""Kind and help by name. Counters carry the suffix ``_total``, and begin anew with each window."""

_EXTRA = 'prometheus-client is not installed; pip install "qmoe-ep[telemetry]" brings it'


class SnapshotCollector:
    """What a registry of the client collects: metrics of the latest snapshots.

    Parameters
    ----------
    latest : gives the snapshots, one per layer
    expert_series : most time series of one expert each that are offered; if the layers have more experts than that
        in all, none is, and ``qmoe_expert_series_omitted`` says so. 0 offers none ever
    """

    def __init__(
        self, latest: Callable[[], Sequence[NamedSnapshot]], expert_series: int = DEFAULT_EXPERT_SERIES
    ) -> None:
        self._latest, self._expert_series = latest, expert_series

    def describe(self) -> list[Metric]:
        """Nothing, so that registering takes no snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with the values of all layers."""
        layers = self._latest()
        counted = [layer for layer in layers if layer.snapshot.counts is not None]
        omitted = sum(layer.snapshot.num_experts for layer in counted) > self._expert_series
        families = {name: _family(name) for name in METRICS}
        for layer in layers:
            labels = _labels(layer)
            for name, value in _figures(layer).items():
                families[name].add_metric(labels, value)
        for layer in () if omitted else counted:
            labels = _labels(layer)
            counts: Any = layer.snapshot.counts
            for expert, count in enumerate(counts.tolist()):
                families["qmoe_expert_routes"].add_metric([*labels, str(expert)], count)
        families["qmoe_expert_series_omitted"].add_metric([], float(omitted))
        yield from families.values()


def _family(name: str) -> Any:
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise QMoEError(_EXTRA) from error
    kind, text = METRICS[name]
    labels = {"qmoe_expert_routes": [*LABELS, "expert"], "qmoe_expert_series_omitted": []}.get(name, LABELS)
    return (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, text, labels=labels)


def _labels(layer: NamedSnapshot) -> list[str]:
    executor = layer.snapshot.executor
    return ["" if executor is None else str(executor), str(layer.snapshot.node), layer.name]


def _figures(layer: NamedSnapshot) -> dict[str, float]:
    snapshot = layer.snapshot
    figures: dict[str, float] = {
        "qmoe_rows": snapshot.rows,
        "qmoe_routes": snapshot.routes,
        "qmoe_lost_rows": snapshot.lost_rows,
        "qmoe_window_epoch": snapshot.epoch,
        "qmoe_experts": snapshot.num_experts,
        "qmoe_routes_per_row": snapshot.routes_per_row,
        "qmoe_distinct_experts": int(snapshot.bitmap.sum()),
        "qmoe_saturated": snapshot.saturated,
        "qmoe_recording": not snapshot.paused,
        "qmoe_record_bytes": layer.footprint_bytes,
        "qmoe_snapshot_timestamp_seconds": snapshot.unix_time,
    }
    if snapshot.counts is not None and (total := float(snapshot.counts.sum(dtype=np.float64))):
        figures["qmoe_load_max_over_mean"] = float(snapshot.counts.max()) * snapshot.num_experts / total
    return figures


def serve_metrics(collector: SnapshotCollector, port: int, host: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
    """Offer metrics at ``http://host:port/metrics``, from a thread.

    Parameters
    ----------
    port : 0 for any free one
    host : the loopback address unless others shall see it

    Returns
    -------
    the port, and a function that ends it

    Raises
    ------
    QMoEError : the client isn't installed, or the port can't be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise QMoEError(_EXTRA) from error
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise QMoEError(f"port {port} of {host} can't be opened: {error}; choose another, or 0 for any") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop


@dataclass(frozen=True, slots=True)
class ScrapedLayer(NamedSnapshot):
    """A layer as an endpoint tells it; without series per expert, the snapshot is in mode bitmap and has no experts.

    Attributes
    ----------
    distinct_experts : selected in the window
    max_over_mean : load of the busiest expert by the mean load; None without counts or routes
    """

    distinct_experts: int = 0
    max_over_mean: float | None = None


def read_metrics(text: str) -> list[ScrapedLayer]:
    """Read back what :class:`SnapshotCollector` offers; counts are as exact as its floats, up to 2^53.

    Raises
    ------
    QMoEError : the client isn't installed, or the text isn't metrics of route telemetry.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise QMoEError(_EXTRA) from error
    figures: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    counts: dict[tuple[str, ...], dict[int, int]] = defaultdict(dict)
    try:
        for family in text_string_to_metric_families(text):
            if family.name not in METRICS or family.name == "qmoe_expert_series_omitted":
                continue
            for sample in family.samples:
                key = tuple(sample.labels[label] for label in LABELS)
                if family.name == "qmoe_expert_routes":
                    counts[key][int(sample.labels["expert"])] = _count(sample.value)
                else:
                    figures[key][family.name] = sample.value
        layers = [_layer(key, values, counts.get(key, {})) for key, values in figures.items()]
    except (ValueError, KeyError, OverflowError, IndexError) as error:
        raise QMoEError(f"not metrics of route telemetry: {error}") from error
    if not layers:
        raise QMoEError("no metrics of route telemetry; is it an exporter of this package, and is any layer armed?")
    return layers


def _layer(key: tuple[str, ...], figures: dict[str, float], counts: dict[int, int]) -> ScrapedLayer:
    executor, node, name = key
    num_experts = int(figures["qmoe_experts"])
    if counts and (len(counts) != num_experts or sorted(counts) != list(range(num_experts))):
        raise ValueError(f"expected routes of {num_experts} experts, got those of {len(counts)}")
    given = [counts[expert] for expert in range(num_experts)] if counts else None
    peak = figures.get("qmoe_load_max_over_mean")
    if peak is not None and not 0 <= peak <= num_experts * (1 + 1e-9):
        raise ValueError(f"qmoe_load_max_over_mean: expected at most {num_experts}, got {peak}")
    record = {
        "version": SCHEMA_VERSION,
        "name": name,
        "footprint_bytes": _count(figures["qmoe_record_bytes"]),
        "executor": int(executor) if executor else None,
        "node": int(node),
        "unix_time": figures["qmoe_snapshot_timestamp_seconds"],
        "epoch": _count(figures["qmoe_window_epoch"]),
        "mode": "bitmap" if given is None else "counts",
        "num_experts": num_experts,
        "routes_per_row": int(figures["qmoe_routes_per_row"]),
        "rows": _count(figures["qmoe_rows"]),
        "routes": _count(figures["qmoe_routes"]),
        "saturated": bool(figures["qmoe_saturated"]),
        "paused": not figures["qmoe_recording"],
        "experts": np.flatnonzero(given).tolist() if given else [],
        "counts": given,
        "lost_rows": _count(figures["qmoe_lost_rows"]),
    }
    named = record_to_snapshot(record)
    distinct = int(figures["qmoe_distinct_experts"])
    if not 0 <= distinct <= num_experts:
        raise ValueError(f"qmoe_distinct_experts: expected at most {num_experts}, got {distinct}")
    return ScrapedLayer(named.snapshot, name, named.footprint_bytes, distinct, peak)


def _count(value: float) -> int:
    """A counter's value; the float nearest to its end is beyond it."""
    return min(int(value), MAX_COUNT)
