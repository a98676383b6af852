"""What route telemetry says: the load of each layer, how it changes, and where two recordings part.

Everything here is plain NumPy on :class:`~qmoe_ep.route_telemetry.TelemetrySnapshot` objects, whatever they come from:
a producer, a file, a dictionary. A :class:`LayerHistory` is what one producer recorded, :func:`merge_windows` makes a
:class:`LayerLoad` of it, :func:`load_figures` and :func:`compare_loads` are about such loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmoe_ep.errors import QMoEError
from qmoe_ep.route_record import MAX_COUNT
from qmoe_ep.route_telemetry import TelemetrySnapshot

__all__ = [
    "HotSetDrift",
    "LayerHistory",
    "LayerLoad",
    "LoadDifference",
    "LoadFigures",
    "Movement",
    "compare_loads",
    "continues",
    "hot_set",
    "hot_set_drift",
    "intervals",
    "layer_labels",
    "load_figures",
    "load_over_time",
    "merge_executors",
    "merge_windows",
    "split_windows",
]

HOT_FRACTION = 8
"""The hot set is the most used eighth of the experts."""


@dataclass(frozen=True, slots=True)
class LayerHistory:
    """What one producer recorded.

    Attributes
    ----------
    executor : None for a private producer
    node : the embedder's number
    name : of the layer; may be empty
    snapshots : at least one, in the order in which they were taken
    """

    executor: int | None
    node: int
    name: str
    snapshots: tuple[TelemetrySnapshot, ...]

    @property
    def label(self) -> str:
        """The name, or the number of a layer without one."""
        return self.name or f"node {self.node}"

    @property
    def key(self) -> str:
        """A word for names of arrays: ``"e1_n7"``, or ``"n7"`` for a private producer."""
        return f"n{self.node}" if self.executor is None else f"e{self.executor}_n{self.node}"


@dataclass(frozen=True, slots=True, eq=False)
class LayerLoad:
    """The load of one layer over one or more windows.

    Attributes
    ----------
    executor : None for a private producer, and for several executors together
    node, name : as in :class:`LayerHistory`
    epochs : the first and the last window
    rows, routes : recorded, up to 2^63-1
    seen : bool [E], experts that were selected
    counts : uint64 [E], how often, up to 2^63-1 each; None where only the experts seen were recorded
    saturated : a figure has reached its end, so that the true one is at least that
    """

    executor: int | None
    node: int
    name: str
    epochs: tuple[int, int]
    rows: int
    routes: int
    seen: NDArray[np.bool_]
    counts: NDArray[np.uint64] | None
    saturated: bool

    @property
    def num_experts(self) -> int:
        """E."""
        return self.seen.size

    @property
    def label(self) -> str:
        """The name, or the number of a layer without one."""
        return self.name or f"node {self.node}"

    @property
    def shares(self) -> NDArray[np.float64] | None:
        """Each expert's share of the routes, [E]; zeros without a route, None without counts."""
        return None if self.counts is None else _shares(self.counts)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of one layer's load; those that need counts or routes are None where there are none.

    Attributes
    ----------
    distinct : experts that were selected
    dead : experts that were not, ascending
    top : the most used experts and their shares of the routes, most used first, ties in order of number
    entropy : of the shares, bits; log2(E) is an even load
    max_over_mean : load of the most used expert by the mean load; 1 is an even load
    variation : coefficient of variation, the standard deviation of the load by its mean; 0 is an even load
    """

    distinct: int
    dead: tuple[int, ...]
    top: tuple[tuple[int, float], ...]
    entropy: float | None
    max_over_mean: float | None
    variation: float | None


@dataclass(frozen=True, slots=True)
class Movement:
    """One expert's share of the routes before and after."""

    expert: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class LoadDifference:
    """What moved between two loads of a layer.

    Attributes
    ----------
    appeared, vanished : experts selected only after, only before; ascending
    moved : share of the routes that went to another expert, 0 to 1; None without counts on both sides
    noise : what ``moved`` would be on average if nothing had changed and every route was drawn on its own
    hot_kept : share of the hot set of before that is hot after, 0 to 1; None like ``moved``
    experts : those whose share changed, largest change first
    """

    appeared: tuple[int, ...]
    vanished: tuple[int, ...]
    moved: float | None
    noise: float | None
    hot_kept: float | None
    experts: tuple[Movement, ...]

    @property
    def empty(self) -> bool:
        """Whether nothing moved at all."""
        return not (self.appeared or self.vanished or self.experts)


@dataclass(frozen=True, slots=True, eq=False)
class HotSetDrift:
    """Share of each window's routes that a hot set takes, float64 [W]; NaN in windows without routes.

    Attributes
    ----------
    own : the hot set of the window itself, which is the most that a set of this size can take
    previous : that of the window with routes before it
    first : that of the first window with routes
    """

    own: NDArray[np.float64]
    previous: NDArray[np.float64]
    first: NDArray[np.float64]


def layer_labels(layers: Sequence[LayerHistory | LayerLoad]) -> list[str]:
    """A label of each layer, with the executor's number where several executors are among them."""
    several = len({layer.executor for layer in layers}) > 1
    return [
        f"{layer.executor}/{layer.label}" if several and layer.executor is not None else layer.label for layer in layers
    ]


# --- windows ------------------------------------------------------------------------------------------


def continues(before: TelemetrySnapshot, after: TelemetrySnapshot) -> bool:
    """Whether a snapshot is of the same window as the one before it, and so holds all that one held.

    A process that began anew may have a window of the same number; it holds less, sooner or later.
    """
    same = (before.epoch, before.num_experts, before.mode) == (after.epoch, after.num_experts, after.mode)
    if not same or before.rows > after.rows:
        return False
    return before.counts is None or after.counts is None or bool((before.counts <= after.counts).all())


def split_windows(snapshots: Sequence[TelemetrySnapshot]) -> list[list[TelemetrySnapshot]]:
    """Group snapshots, which are in order, by window."""
    windows: list[list[TelemetrySnapshot]] = []
    for snapshot in snapshots:
        if windows and continues(windows[-1][-1], snapshot):
            windows[-1].append(snapshot)
        else:
            windows.append([snapshot])
    return windows


def merge_windows(history: LayerHistory, epoch: int | None = None, *, last: bool = False) -> LayerLoad:
    """Add up the windows of a layer.

    Snapshots of one window hold all that came before them in it, so that each window counts with its last one.

    Parameters
    ----------
    epoch : only this window; the last one, if several processes had one of this number
    last : only the last window

    Raises
    ------
    QMoEError : no such window, or windows of different numbers of experts.
    """
    chosen = [window[-1] for window in split_windows(history.snapshots)]
    if last:
        chosen = chosen[-1:]
    elif epoch is not None:
        epochs = [snapshot.epoch for snapshot in chosen]
        chosen = [snapshot for snapshot in chosen if snapshot.epoch == epoch][-1:]
        if not chosen:
            known = f"{min(epochs)} to {max(epochs)}"
            raise QMoEError(f"window {epoch} of node {history.node}: not recorded; expected one of {known}")
    sizes = {snapshot.num_experts for snapshot in chosen}
    if len(sizes) != 1:
        raise QMoEError(
            f"windows of node {history.node}: expected one number of experts, got {sorted(sizes)}; choose one window"
        )
    loads = [_load_of(history, snapshot) for snapshot in chosen]
    return _add_loads(loads)


def merge_executors(loads: Sequence[LayerLoad]) -> list[LayerLoad]:
    """Add up loads of the same node and name in different executors.

    Raises
    ------
    QMoEError : they have different numbers of experts.
    """
    groups: dict[tuple[int, str], list[LayerLoad]] = {}
    for load in loads:
        groups.setdefault((load.node, load.name), []).append(replace(load, executor=None))
    for (node, _), group in groups.items():
        if len({load.num_experts for load in group}) != 1:
            raise QMoEError(f"node {node}: executors differ in the number of experts, so they are not one layer")
    return [_add_loads(group) for group in groups.values()]


def _load_of(history: LayerHistory, snapshot: TelemetrySnapshot) -> LayerLoad:
    return LayerLoad(
        executor=history.executor,
        node=history.node,
        name=history.name,
        epochs=(snapshot.epoch, snapshot.epoch),
        rows=snapshot.rows,
        routes=snapshot.routes,
        seen=snapshot.bitmap,
        counts=snapshot.counts,
        saturated=snapshot.saturated,
    )


def _add_loads(loads: Sequence[LayerLoad]) -> LayerLoad:
    """The sum of loads of one layer; without counts where one has none."""
    total = loads[0]
    for load in loads[1:]:
        rows, routes = total.rows + load.rows, total.routes + load.routes
        counts = None
        if total.counts is not None and load.counts is not None:
            # Both at most 2^63-1, so that the sum fits before it is cut.
            counts = np.minimum(total.counts + load.counts, np.uint64(MAX_COUNT))
        total = replace(
            total,
            epochs=(min(total.epochs[0], load.epochs[0]), max(total.epochs[1], load.epochs[1])),
            rows=min(rows, MAX_COUNT),
            routes=min(routes, MAX_COUNT),
            seen=total.seen | load.seen,
            counts=counts,
            saturated=total.saturated or load.saturated or max(rows, routes) > MAX_COUNT,
        )
    return total


def intervals(history: LayerHistory) -> list[tuple[float, NDArray[np.uint64]]]:
    """What came between one snapshot and the next: its unix time and the counts [E], in order.

    A snapshot that begins a window, or that holds less than the one before (the process began anew), counts in
    full. Snapshots without counts are left out.
    """
    found: list[tuple[float, NDArray[np.uint64]]] = []
    before: TelemetrySnapshot | None = None
    for snapshot in history.snapshots:
        if snapshot.counts is None:
            continue
        counts = snapshot.counts
        if before is not None and before.counts is not None and continues(before, snapshot):
            counts = counts - before.counts
        found.append((snapshot.unix_time, counts))
        before = snapshot
    return found


# --- figures ------------------------------------------------------------------------------------------


def load_figures(load: LayerLoad, top: int = 4) -> LoadFigures:
    """Compute the figures of a load.

    Parameters
    ----------
    top : how many of the most used experts to name
    """
    distinct = int(load.seen.sum())
    dead = tuple(np.flatnonzero(~load.seen).tolist())
    shares = load.shares
    if shares is None or not shares.any():
        return LoadFigures(distinct, dead, (), None, None, None)
    used = shares[shares > 0]
    order = np.argsort(-shares, kind="stable")[:top]
    return LoadFigures(
        distinct=distinct,
        dead=dead,
        top=tuple((int(expert), float(shares[expert])) for expert in order if shares[expert] > 0),
        # A sum of one share of 1 is -0.0.
        entropy=abs(float(-(used * np.log2(used)).sum())),
        max_over_mean=float(shares.max() * shares.size),
        variation=float(shares.std() * shares.size),
    )


def hot_set(counts: NDArray[Any]) -> NDArray[np.intp]:
    """The most used eighth of the experts, at least one, most used first, ties in order of number."""
    return np.argsort(-counts.astype(np.float64), kind="stable")[: max(1, counts.size // HOT_FRACTION)]


def compare_loads(before: LayerLoad, after: LayerLoad) -> LoadDifference:
    """Say what moved between two loads of one layer.

    Raises
    ------
    QMoEError : they have different numbers of experts.
    """
    if before.num_experts != after.num_experts:
        raise QMoEError(
            f"layer {after.label}: expected {before.num_experts} experts on both sides, got {after.num_experts}; "
            "compare recordings of one model"
        )
    appeared = tuple(np.flatnonzero(after.seen & ~before.seen).tolist())
    vanished = tuple(np.flatnonzero(before.seen & ~after.seen).tolist())
    old, new = before.shares, after.shares
    if before.counts is None or after.counts is None or old is None or new is None or not (old.any() and new.any()):
        return LoadDifference(appeared, vanished, None, None, None, ())
    change = new - old
    order = np.argsort(-np.abs(change), kind="stable")
    hot = hot_set(before.counts)
    return LoadDifference(
        appeared=appeared,
        vanished=vanished,
        moved=min(1.0, float(np.abs(change).sum() / 2)),
        noise=_sampling_noise(before.counts, after.counts),
        hot_kept=float(np.isin(hot, hot_set(after.counts)).mean()),
        experts=tuple(Movement(int(e), float(old[e]), float(new[e])) for e in order if change[e] != 0),
    )


def _sampling_noise(before: NDArray[np.uint64], after: NDArray[np.uint64]) -> float:
    """Mean of half the sum of |differences| of two samples of the pooled shares, by the normal approximation."""
    first, second = before.astype(np.float64), after.astype(np.float64)
    n, m = first.sum(), second.sum()
    pooled = (first + second) / (n + m)
    deviations = np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return min(1.0, float(deviations.sum() * math.sqrt(2 / math.pi) / 2))


# --- over time ----------------------------------------------------------------------------------------


def load_over_time(
    histories: Sequence[LayerHistory], most: int = 48
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Sum what was recorded into stretches of time, the same for every layer.

    A stretch is an interval of the layer that has the most of them, or a few of those; layers whose records were
    written together count together.

    Parameters
    ----------
    most : stretches at most

    Returns
    -------
    ends : unix times of the stretches' ends, ascending [W]
    counts : for each layer float64 [W, E]; [W, 0] without counts or with a number of experts that changes
    """
    parts = [intervals(history) for history in histories]
    times = np.sort([time for time, _ in max(parts, key=len, default=[])])
    stretches = min(most, times.size)
    last = np.arange(1, stretches + 1) * times.size // max(1, stretches) - 1
    borders = (times[last[:-1]] + times[last[:-1] + 1]) / 2
    sums = []
    for layer in parts:
        sizes = {counts.size for _, counts in layer}
        total = np.zeros((stretches, sizes.pop() if len(sizes) == 1 else 0))
        for time, counts in layer if total.size else ():
            total[np.searchsorted(borders, time)] += counts
        sums.append(total)
    return times[last], sums


def hot_set_drift(counts: NDArray[np.float64]) -> HotSetDrift:
    """Say how much of each window's routes go to its own hot set, to that before it, and to the first.

    Parameters
    ----------
    counts : [W, E]
    """
    own, previous, first = np.full((3, counts.shape[0]), np.nan)
    initial: NDArray[np.intp] | None = None
    before: NDArray[np.intp] | None = None
    for window, load in enumerate(counts):
        if not load.any():
            continue
        shares, hot = _shares(load), hot_set(load)
        initial = hot if initial is None else initial
        own[window] = shares[hot].sum()
        previous[window] = shares[hot if before is None else before].sum()
        first[window] = shares[initial].sum()
        before = hot
    return HotSetDrift(own, previous, first)


def _shares(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Each expert's share of the total, which may not fit an integer of 64 bits."""
    load = counts.astype(np.float64)
    total = load.sum()
    return load / total if total else load
