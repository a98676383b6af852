"""Where the live view reads from: a file that grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qmoe_ep.cli.telemetry.board import Reading
from qmoe_ep.cli.telemetry.records import parse_line
from qmoe_ep.cli.telemetry.source import printable
from qmoe_ep.route_analysis import LayerHistory, merge_windows

__all__ = ["open_feed"]


@contextmanager
def open_feed(path: str) -> Iterator[Callable[[], Iterator[Reading]]]:
    """Open a file of records; the function that comes reads what is new at each call, whole lines only."""
    with Path(path).open("rb") as file:

        def poll() -> Iterator[Reading]:
            while True:
                start = file.tell()
                line = file.readline()
                if not line.endswith(b"\n"):
                    file.seek(start)
                    return
                name, snapshot = parse_line(line, path)
                history = LayerHistory(snapshot.executor, snapshot.node, printable(name), (snapshot,))
                yield Reading(merge_windows(history), snapshot.unix_time)

        yield poll
