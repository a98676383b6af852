"""Traces: rings put together, and the first row where two part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_records import snapshot

from qmoe_ep import QMoEError, TelemetrySnapshot
from qmoe_ep.route_trace import RouteTrace, first_difference, join_traces
from qmoe_ep.telemetry import MAX_COUNT


def ring(rows: list[list[int]], lost: int, epoch: int = 0) -> TelemetrySnapshot:
    k = len(rows[0]) if rows else 2
    return snapshot([9] * 8, mode="trace", trace=rows, lost_rows=lost, routes_per_row=k, epoch=epoch)


def trace(rows: list[list[int]], start: int = 0) -> RouteTrace:
    experts = np.array(rows, np.int32).reshape(len(rows), -1)
    return RouteTrace(np.arange(start, start + len(rows)), experts)


@given(st.integers(1, 7), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_rings_are_joined(capacity: int, steps: list[int]) -> None:
    total, snapshots, known = 0, [], set()
    for step in steps:
        total += step
        first = max(0, total - capacity)
        snapshots.append(ring([[row % 8, (row + 1) % 8] for row in range(first, total)], first))
        known |= set(range(first, total))
    joined = join_traces(snapshots)
    assert joined is not None
    assert joined.rows.tolist() == sorted(known)
    assert joined.experts.tolist() == [[row % 8, (row + 1) % 8] for row in sorted(known)]


def test_margins_are_joined() -> None:
    values = {"mode": "trace", "routes_per_row": 1}
    first = snapshot([9] * 4, **values, trace=[[0], [1]], margins=[0.5, 0.25])
    second = snapshot([9] * 4, **values, trace=[[1], [2]], margins=[0.25, 2], lost_rows=1)
    joined = join_traces([first, second])
    assert joined is not None
    assert joined.margins is not None
    assert joined.margins.tolist() == [0.5, 0.25, 2]


def test_rings_that_do_not_fit() -> None:
    assert join_traces([snapshot([1, 2])]) is None
    with pytest.raises(QMoEError, match="one window"):
        join_traces([ring([[1, 2]], 0), ring([[1, 2]], 0, epoch=1)])
    with pytest.raises(QMoEError, match="one number of routes"):
        join_traces([ring([[1, 2]], 0), ring([[1]], 0)])
    with pytest.raises(QMoEError, match="can't be numbered"):
        join_traces([ring([[1, 2]], MAX_COUNT)])


def test_where_traces_part() -> None:
    before = trace([[1, 2], [3, 4], [5, 6], [0, 1]], start=10)
    after = trace([[4, 3], [5, 7], [0, 1], [2, 2]], start=11)
    difference = first_difference(before, after)
    assert (difference.compared, difference.differing, difference.row) == (3, 2, 11)
    assert (difference.before, difference.after, difference.same_set) == ((3, 4), (4, 3), True)
    unordered = first_difference(before, after, ordered=False)
    assert (unordered.differing, unordered.row, unordered.same_set) == (1, 12, False)
    assert unordered.margins == (None, None)


def test_margins_of_the_row() -> None:
    before = RouteTrace(np.arange(2), np.array([[0], [1]], np.int32), np.array([0.5, 0.25], np.float32))
    difference = first_difference(before, trace([[0], [2]]))
    assert difference.margins == (0.25, None)


@given(st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), max_size=9))
def test_a_trace_agrees_with_itself(rows: list[list[int]]) -> None:
    mine = RouteTrace(np.arange(len(rows)), np.array(rows, np.int32).reshape(-1, 2))
    difference = first_difference(mine, mine)
    assert (difference.compared, difference.differing, difference.row) == (len(rows), 0, None)


def test_traces_of_other_widths() -> None:
    with pytest.raises(QMoEError, match="2 routes per row on both sides, got 1"):
        first_difference(trace([[1, 2]]), trace([[1]]))
