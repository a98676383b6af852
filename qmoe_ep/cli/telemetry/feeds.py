"""Where the live view reads from: a file that grows, or the endpoint of a running exporter."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from qmoe_ep.cli.telemetry.board import Reading
from qmoe_ep.cli.telemetry.source import printable
from qmoe_ep.errors import QMoEError
from qmoe_ep.route_analysis import LayerHistory, LoadFigures, merge_windows
from qmoe_ep.telemetry_export.prometheus import ScrapedLayer, read_metrics
from qmoe_ep.telemetry_export.records import RecordFollower
from qmoe_ep.telemetry_export.schema import NamedSnapshot

__all__ = ["open_feed"]

_TIMEOUT_SECONDS = 5
_MOST_BYTES = 64 << 20


@contextmanager
def open_feed(source: str) -> Iterator[Callable[[], list[Reading]]]:
    """Open a file of records or the URL of an endpoint; the function that comes reads what is new at each call.

    Raises
    ------
    QMoEError : neither is there.
    """
    if source.startswith(("http://", "https://")):
        yield lambda: _readings(_scrape(source))
        return
    if not Path(source).is_file():
        raise QMoEError(f"{source}: no such file, and no URL such as http://127.0.0.1:9095/metrics")
    with RecordFollower(source) as follower:
        yield lambda: _readings(follower.poll())


def _scrape(url: str) -> list[ScrapedLayer]:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            data = response.read(_MOST_BYTES + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise QMoEError(f"{url}: can't be read: {getattr(error, 'reason', error)}") from error
    if len(data) > _MOST_BYTES:
        raise QMoEError(f"{url}: expected at most {_MOST_BYTES} bytes of metrics")
    try:
        return read_metrics(data.decode(errors="replace"))
    except QMoEError as error:
        raise QMoEError(f"{url}: {error}") from error


def _readings(records: Iterable[NamedSnapshot]) -> list[Reading]:
    readings = []
    for record in records:
        snapshot = record.snapshot
        history = LayerHistory(snapshot.executor, snapshot.node, printable(record.name), (snapshot,))
        figures = None
        if isinstance(record, ScrapedLayer) and snapshot.counts is None:
            figures = LoadFigures(record.distinct_experts, (), (), None, record.max_over_mean, None)
        readings.append(Reading(merge_windows(history), snapshot.unix_time, figures))
    return readings
