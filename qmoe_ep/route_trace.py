"""Traces of route telemetry: the experts of each row, put together from snapshots, and where two of them part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qmoe_ep.errors import QMoEError
from qmoe_ep.route_record import MAX_COUNT
from qmoe_ep.route_telemetry import TelemetrySnapshot

__all__ = ["RouteTrace", "TraceDifference", "first_difference", "join_traces"]


@dataclass(frozen=True, slots=True, eq=False)
class RouteTrace:
    """The experts of the rows of one window.

    Attributes
    ----------
    rows : int64 [n], their numbers in the window, ascending; rows that left the ring unseen are missing
    experts : int32 [n, k], in order of selection
    margins : float32 [n], the smallest selected logit less the largest rejected one; None where they weren't kept
    """

    rows: NDArray[np.int64]
    experts: NDArray[np.int32]
    margins: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """How two traces differ in the rows that both have.

    Attributes
    ----------
    compared : rows that both have
    differing : rows among them with other experts, or the same ones in another order
    row : the first of those; None where there is none
    before, after : the experts of that row
    same_set : whether that row has the same experts in another order
    margins : of that row on both sides, each None where it wasn't kept
    """

    compared: int
    differing: int
    row: int | None
    before: tuple[int, ...]
    after: tuple[int, ...]
    same_set: bool
    margins: tuple[float | None, float | None]


def join_traces(snapshots: Sequence[TelemetrySnapshot]) -> RouteTrace | None:
    """Put the rings of one window's snapshots together, each row once; None where no ring was kept.

    Parameters
    ----------
    snapshots : of one window, in order

    Raises
    ------
    QMoEError : they aren't of one window, or have different numbers of routes per row.
    """
    rings = [(snapshot.lost_rows, snapshot.trace) for snapshot in snapshots if snapshot.trace is not None]
    margins = [snapshot.margins for snapshot in snapshots if snapshot.trace is not None]
    if not rings:
        return None
    if len({snapshot.epoch for snapshot in snapshots}) != 1 or len({ring.shape[1] for _, ring in rings}) != 1:
        raise QMoEError("trace: expected snapshots of one window with one number of routes per row")
    numbers, experts, kept, next_row = [], [], [], 0
    for (lost, ring), given in zip(rings, margins, strict=True):
        if lost + len(ring) > MAX_COUNT:
            raise QMoEError(f"trace: lost_rows is {lost}, past which rows can't be numbered; begin another window")
        held = lost + np.arange(len(ring), dtype=np.int64)
        fresh = held >= next_row
        numbers.append(held[fresh])
        experts.append(ring[fresh])
        kept.append(np.full(len(ring), np.nan, np.float32)[fresh] if given is None else given[fresh])
        next_row = max(next_row, lost + len(ring))
    none = all(given is None for given in margins)
    return RouteTrace(np.concatenate(numbers), np.concatenate(experts), None if none else np.concatenate(kept))


def first_difference(before: RouteTrace, after: RouteTrace, *, ordered: bool = True) -> TraceDifference:
    """Find the first row where two traces part.

    Parameters
    ----------
    ordered : whether the same experts in another order are a difference

    Raises
    ------
    QMoEError : they have different numbers of routes per row.
    """
    if before.experts.shape[1] != after.experts.shape[1]:
        raise QMoEError(
            f"trace: expected {before.experts.shape[1]} routes per row on both sides, got {after.experts.shape[1]}; "
            "compare recordings of one model"
        )
    rows, mine, theirs = np.intersect1d(before.rows, after.rows, assume_unique=True, return_indices=True)
    first, second = before.experts[mine], after.experts[theirs]
    sets = (np.sort(first, axis=1) != np.sort(second, axis=1)).any(axis=1)
    different = (first != second).any(axis=1) if ordered else sets
    places = np.flatnonzero(different)
    if not places.size:
        return TraceDifference(rows.size, 0, None, (), (), True, (None, None))
    at = places[0]
    return TraceDifference(
        compared=rows.size,
        differing=places.size,
        row=int(rows[at]),
        before=tuple(first[at].tolist()),
        after=tuple(second[at].tolist()),
        same_set=not sets[at],
        margins=(_margin(before, mine[at]), _margin(after, theirs[at])),
    )


def _margin(trace: RouteTrace, place: int) -> float | None:
    return None if trace.margins is None else float(trace.margins[place])
