"""Where the live view reads from: a file that grows, or a Prometheus endpoint of an exporter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qmoe_ep.cli.telemetry.board import Reading
from qmoe_ep.route_analysis import LayerHistory, merge_windows
from qmoe_ep.route_telemetry import TelemetrySnapshot

__all__ = ["open_feed"]


@contextmanager
def open_feed(source: str) -> Iterator[Callable[[], Iterator[Reading]]]:
    with open(source) as f:

        def poll():
            while True:
                at = f.tell()
                line = f.readline()
                if not line.endswith("\n"):
                    f.seek(at)
                    return
                d = json.loads(line)
                name = d.pop("name", "")
                s = TelemetrySnapshot.from_dict(d)
                yield Reading(merge_windows(LayerHistory(s.executor, s.node, name, (s,))), s.unix_time)

        yield poll
