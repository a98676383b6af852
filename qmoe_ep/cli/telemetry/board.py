"""The live view of ``qmoe-ep telemetry watch``: what was read last of each layer, drawn for a terminal of any size."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from qmoe_ep.cli.output import number_text
from qmoe_ep.route_analysis import LayerLoad, LoadFigures, layer_labels, load_figures

__all__ = ["Board", "Reading", "load_strip"]

_BARS = " ▁▂▃▄▅▆▇█"
_LEGEND = "load of an expert by the mean:  ▁ 1/8×  ▄ 1×  █ 16× or more, blank never used"
_FRAME_LINES = 7
"""Lines of the view that are no layer: title, head, rule and margins of the table, a remark, the legend."""
_FIGURE_COLUMNS = 52
"""Columns that everything but the label and the strip takes."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The load of a layer's window at a moment.

    Attributes
    ----------
    load : of the window so far
    unix_time : when it was taken, seconds since 1970
    figures : of the load, where the source tells them without the experts that they are of
    """

    load: LayerLoad
    unix_time: float
    figures: LoadFigures | None = None


@dataclass(frozen=True, slots=True)
class _Watched:
    """The last reading of a layer, and what has come since the one before."""

    reading: Reading
    recent: LayerLoad
    rows_per_second: float | None


class Board:
    """What was read last of each layer.

    Parameters
    ----------
    source : what is watched, for the title
    recent : show the load since the reading before, instead of that of the window
    """

    def __init__(self, source: str, *, recent: bool = False) -> None:
        self._source, self._recent = source, recent
        self._layers: dict[tuple[int | None, int], _Watched] = {}
        self.problem = ""

    def update(self, reading: Reading) -> None:
        """Take a reading."""
        load = reading.load
        key = (load.executor, load.node)
        before = self._layers.get(key)
        if before is None:
            self._layers[key] = _Watched(reading, load, None)
        elif reading.unix_time > before.reading.unix_time or load.epochs != before.reading.load.epochs:
            seconds = reading.unix_time - before.reading.unix_time
            recent = _since(before.reading.load, load)
            rate = recent.rows / seconds if seconds > 0 else None
            self._layers[key] = _Watched(reading, recent, rate)

    def draw(self, width: int, height: int, now: float | None = None) -> Group:
        """Draw what fits so many columns and lines; the layers with the largest max/mean, if not all do.

        Parameters
        ----------
        now : unix time, for the age of the readings; that of the clock by default
        """
        layers = [
            self._layers[key]
            for key in sorted(self._layers, key=lambda key: (-1 if key[0] is None else key[0], key[1]))
        ]
        loads = [layer.recent if self._recent else layer.reading.load for layer in layers]
        labels = layer_labels(loads)
        figures = [layer.reading.figures or load_figures(load) for layer, load in zip(layers, loads, strict=True)]
        room = max(1, height - _FRAME_LINES)
        shown = list(range(len(layers)))
        if len(shown) > room:
            shown = sorted(sorted(shown, key=lambda place: -(figures[place].max_over_mean or 0))[:room])
        widest = min(32, max((len(labels[place]) for place in shown), default=5))
        strip = max(8, width - _FIGURE_COLUMNS - widest)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=False)
        table.add_column("layer", no_wrap=True, max_width=widest)
        for column in ("window", "rows", "rows/s", "experts", "max/mean"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("load by expert", no_wrap=True)
        for place in shown:
            layer, load, figure = layers[place], loads[place], figures[place]
            table.add_row(
                Text(labels[place]),
                str(load.epochs[1]),
                f"{load.rows:,}" + ("+" if load.saturated else ""),
                "-" if layer.rows_per_second is None else f"{layer.rows_per_second:,.0f}",
                f"{figure.distinct}/{load.num_experts}",
                number_text(figure.max_over_mean),
                Text("not told") if layer.reading.figures else load_strip(load, strip),
            )
        hidden = len(layers) - len(shown)
        remark = f"{hidden} more layers with smaller max/mean" if hidden else ""
        below = (Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in (remark, _LEGEND))
        return Group(self._title(layers, now), table, *below)

    def _title(self, layers: list[_Watched], now: float | None) -> Text:
        title = Text(self._source, style="bold", no_wrap=True, overflow="ellipsis")
        if self.problem:
            return title.append(f"  {self.problem}", style="red")
        if not layers:
            return title.append("  waiting for the first record", style="not bold")
        newest = max(layer.reading.unix_time for layer in layers)
        age = (time.time() if now is None else now) - newest
        what = "since the record before" if self._recent else "of the window so far"
        return title.append(f"  {len(layers)} layers, {what}, last record {_age_text(age)}", style="not bold")


def load_strip(load: LayerLoad, width: int) -> Text:
    """Draw the load of all experts in so many columns; a column of several experts shows the largest."""
    strip = Text()
    shares = load.shares
    # Without counts, only which experts were used is known.
    relative = load.seen.astype(np.float64) if shares is None else shares * shares.size
    columns = min(width, relative.size)
    starts = np.arange(columns) * relative.size // max(1, columns)
    for value in np.maximum.reduceat(relative, starts):
        level = 0 if value <= 0 else int(np.clip(round(float(np.log2(value))) + 4, 1, 8))
        strip.append(_BARS[level], style="red" if level >= 7 else "yellow" if level == 6 else "green")
    return strip


def _since(before: LayerLoad, after: LayerLoad) -> LayerLoad:
    """What a window got between two readings; all of it, if it is another window or a new record."""
    if before.epochs != after.epochs or before.num_experts != after.num_experts or before.rows > after.rows:
        return after
    counts: NDArray[np.uint64] | None = None
    seen = after.seen
    if before.counts is not None and after.counts is not None:
        if (before.counts > after.counts).any():
            return after
        counts = after.counts - before.counts
        seen = counts > 0
    return replace(after, rows=after.rows - before.rows, routes=after.routes - before.routes, seen=seen, counts=counts)


def _age_text(seconds: float) -> str:
    """``"3 s ago"``; readings of another machine's clock may lie ahead."""
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
