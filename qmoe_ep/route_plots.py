"""Pictures of route telemetry; need Matplotlib, which is in the extra ``telemetry``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qmoe_ep.errors import QMoEError
from qmoe_ep.route_analysis import LayerHistory, LayerLoad, hot_set_drift, layer_labels, load_over_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_load", "save_picture"]

_COLOURS = "viridis"
_UNUSED = "#d9d9d9"
_LEAST, _MOST = -4, 5
"""Powers of two of the mean load that the colours span at most."""


def draw_load(loads: Sequence[LayerLoad], histories: Sequence[LayerHistory]) -> Figure:
    """Draw the load of each expert of each layer, the load curves, and the drift of the hot sets.

    Parameters
    ----------
    loads : of the layers, at least one, all with counts
    histories : what the drift is taken from

    Raises
    ------
    QMoEError : Matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise QMoEError('pictures need Matplotlib; install it with pip install "qmoe-ep[telemetry]"') from error
    # An inch holds seven lines of labels.
    heatmap_height = min(40.0, max(1.6, len(loads) / 7))
    figure = Figure(figsize=(13, heatmap_height + 4.4), layout="constrained")
    parts = figure.subfigures(2, 1, squeeze=False, height_ratios=(heatmap_height + 1.0, 3.4))
    upper, lower = parts[0, 0], parts[1, 0]
    heatmap, peaks = upper.subplots(1, 2, width_ratios=(8, 1), sharey=True)
    _draw_heatmap(upper, heatmap, loads)
    _draw_peaks(peaks, loads)
    curve, drift = lower.subplots(1, 2)
    _draw_curve(curve, loads)
    _draw_drift(drift, histories)
    return figure


def save_picture(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture; the name's ending tells the format.

    Raises
    ------
    QMoEError : no such format.
    """
    ending = os.fspath(path).rpartition(".")[2].lower()
    known = figure.canvas.get_supported_filetypes()
    if ending not in known:
        raise QMoEError(f"picture {os.fspath(path)}: expected a name that ends in one of {', '.join(sorted(known))}")
    figure.savefig(path, dpi=110)


def _draw_heatmap(figure: Any, axes: Axes, loads: Sequence[LayerLoad]) -> None:
    """Layers × experts, in powers of two of each layer's mean load; what was never used is grey."""
    from matplotlib import colormaps

    colours = colormaps[_COLOURS].with_extremes(bad=_UNUSED)
    relative = np.full((len(loads), max(load.num_experts for load in loads)), np.nan)
    for place, load in enumerate(loads):
        relative[place, : load.num_experts] = _relative(load)
    with np.errstate(divide="ignore"):
        powers = np.ma.masked_invalid(np.log2(relative))
    least, most = (-1.0, 1.0)
    if powers.count():
        least, most = max(_LEAST, float(powers.min())), min(_MOST, float(powers.max()))
    image = axes.imshow(
        powers, aspect="auto", interpolation="nearest", cmap=colours, vmin=least, vmax=max(most, least + 1)
    )
    ticks = np.arange(np.ceil(least), np.floor(max(most, least + 1)) + 1)
    bar = figure.colorbar(image, ax=axes, location="top", aspect=60, pad=0.01, ticks=ticks, fraction=0.05)
    bar.ax.set_xticklabels([f"{2.0**t:g}×" if t >= 0 else f"1/{2.0**-t:g}×" for t in ticks])
    bar.set_label("load of an expert by the mean load of its layer (grey: never used)")
    axes.set_xlabel("expert")
    axes.set_xticks(_steps(relative.shape[1], 33))
    labels = layer_labels(loads)
    rows = _steps(len(loads), 200)
    axes.set_yticks(rows, [_short(labels[row]) for row in rows], fontsize=7)
    axes.set_ylabel("layer")


def _draw_peaks(axes: Axes, loads: Sequence[LayerLoad]) -> None:
    """Bars beside the heatmap: the most used expert of each layer by the mean."""
    axes.barh(range(len(loads)), [_relative(load).max() for load in loads], height=0.8, color="#33638d")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.tick_params(left=False, labelleft=False)
    axes.set_xlim(left=0)
    axes.set_xlabel("max/mean")


def _draw_curve(axes: Axes, loads: Sequence[LayerLoad]) -> None:
    """The share of the routes that the most used experts take together."""
    curves = []
    for load in loads:
        taken = np.concatenate([[0.0], np.cumsum(np.sort(_relative(load))[::-1]) / load.num_experts])
        part = np.linspace(0, 1, taken.size)
        axes.plot(part, taken, color="#33638d", alpha=max(0.12, 1 / len(loads)), linewidth=0.8)
        curves.append(np.interp(np.linspace(0, 1, 101), part, taken))
    axes.plot(np.linspace(0, 1, 101), np.mean(curves, axis=0), color="#33638d", linewidth=2, label="mean of layers")
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--", label="even load")
    _percent(axes.xaxis, axes.yaxis)
    axes.set(xlabel="most used experts, share of all", ylabel="their share of the routes", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title("Load curve", fontsize=11)
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.3)


def _draw_drift(axes: Axes, histories: Sequence[LayerHistory]) -> None:
    """What hot sets of now, of the window before and of the first one take of each window's routes."""
    axes.set_title("Drift of the hot set (most used eighth of the experts)", fontsize=11)
    ends, counts = load_over_time(histories)
    drifts = [hot_set_drift(layer) for layer in counts if layer.size]
    if len(ends) < 2 or not drifts:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "needs at least two records of a layer", ha="center", va="center", transform=axes.transAxes)
        return
    lines = (("own", "its own hot set", "#35b779"), ("previous", "that of the window before", "#33638d"))
    for name, label, colour in (*lines, ("first", "that of the first window", "#c2410c")):
        layers = np.ma.masked_invalid([getattr(drift, name) for drift in drifts])
        axes.plot(ends - ends[0], layers.mean(axis=0), color=colour, linewidth=2, marker=".", label=label)
    even = float(np.mean([max(1, layer.shape[1] // 8) / layer.shape[1] for layer in counts if layer.size]))
    axes.axhline(even, color="black", linewidth=0.8, linestyle="--", label="even load")
    _percent(axes.yaxis)
    axes.set(xlabel="seconds since the first record", ylabel="share of the window's routes", ylim=(0, None))
    # Below the axes, where it hides no line.
    title = "taken by (mean of layers)"
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=4, fontsize=8, title=title, title_fontsize=8)
    axes.grid(alpha=0.3)


def _relative(load: LayerLoad) -> NDArray[np.float64]:
    """The load of each expert by the mean load, [E]."""
    shares = load.shares
    return np.zeros(load.num_experts) if shares is None else shares * load.num_experts


def _steps(length: int, most: int) -> list[int]:
    """At most so many places from 0 to ``length - 1``, a round number apart."""
    step = 1
    while length > most * step:
        step *= 2
    return list(range(0, length, step))


def _short(label: str, most: int = 28) -> str:
    """The end of a long label, which tells layers apart; without what Matplotlib takes for formulas."""
    label = label.replace("$", r"\$")
    return label if len(label) <= most else "…" + label[1 - most :]


def _percent(*axes: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    for axis in axes:
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
