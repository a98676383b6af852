"""Figures of recorded routing: against their definitions, and properties that hold for any counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from telemetry_records import history, load, snapshot

from qmoe_ep import QMoEError
from qmoe_ep.route_analysis import (
    compare_loads,
    hot_set,
    hot_set_drift,
    intervals,
    layer_labels,
    load_figures,
    load_over_time,
    merge_executors,
    merge_windows,
    split_windows,
)
from qmoe_ep.telemetry import MAX_COUNT

COUNTS = st.lists(st.integers(0, MAX_COUNT) | st.integers(0, 5), min_size=1, max_size=40)

# --- windows ------------------------------------------------------------------------------------------


def test_windows_count_with_their_last_snapshot() -> None:
    layer = history(snapshot([1, 0, 0]), snapshot([3, 1, 0]), snapshot([0, 0, 5], epoch=2), name="moe")
    merged = merge_windows(layer)
    assert (merged.rows, merged.routes, merged.epochs, merged.label) == (9, 9, (0, 2), "moe")
    assert merged.counts is not None
    assert merged.counts.tolist() == [3, 1, 5]
    assert merged.seen.all()
    last = merge_windows(layer, last=True)
    assert (last.rows, last.epochs) == (5, (2, 2))
    first = merge_windows(layer, 0)
    assert (first.rows, first.seen.tolist()) == (4, [True, True, False])


def test_a_process_that_began_anew_has_windows_of_its_own() -> None:
    layer = history(snapshot([3, 1]), snapshot([5, 1]), snapshot([1, 1]), snapshot([1, 4]), snapshot([0, 2], epoch=1))
    assert [len(window) for window in split_windows(layer.snapshots)] == [2, 2, 1]
    merged, first = merge_windows(layer), merge_windows(layer, 0)
    assert merged.counts is not None
    assert merged.counts.tolist() == [6, 7]
    assert (first.rows, merge_windows(layer, last=True).rows) == (5, 2)


def test_windows_that_do_not_fit() -> None:
    layer = history(snapshot([1, 0]), snapshot([1, 0, 0], epoch=1))
    with pytest.raises(QMoEError, match="one number of experts"):
        merge_windows(layer)
    with pytest.raises(QMoEError, match="window 4 of node 7: not recorded; expected one of 0 to 1"):
        merge_windows(layer, 4)


def test_sums_saturate_and_say_so() -> None:
    full = snapshot([MAX_COUNT, MAX_COUNT])
    merged = merge_windows(history(full, snapshot([MAX_COUNT, 1], epoch=1), snapshot([5, 1], epoch=2)))
    assert merged.counts is not None
    assert merged.counts.tolist() == [MAX_COUNT, MAX_COUNT]
    assert (merged.rows, merged.routes, merged.saturated) == (MAX_COUNT, MAX_COUNT, True)


def test_a_window_without_counts_leaves_a_sum_without() -> None:
    plain = snapshot([1, 0], epoch=1, mode="bitmap")
    merged = merge_windows(history(snapshot([0, 2]), plain))
    assert merged.counts is None
    assert merged.shares is None
    assert merged.seen.all()
    assert (load_figures(merged).distinct, load_figures(merged).entropy) == (2, None)


def test_executors_of_a_layer_are_added() -> None:
    prefill, decode, other = load([1, 2], executor=1), load([3, 0], executor=2), load([1, 1], executor=2, node=8)
    both, alone = merge_executors([prefill, decode, other])
    assert both.counts is not None
    assert both.counts.tolist() == [4, 2]
    assert (both.executor, both.rows, alone.node) == (None, 6, 8)
    with pytest.raises(QMoEError, match="node 7: executors differ"):
        merge_executors([prefill, load([1, 2, 3], executor=2)])


def test_labels_name_the_executor_where_there_are_several() -> None:
    assert layer_labels([load([1]), load([1], node=8)]) == ["node 7", "node 8"]
    assert layer_labels([load([1]), load([1], executor=None)]) == ["1/node 7", "node 7"]


def test_intervals_are_what_came_between() -> None:
    layer = history(
        snapshot([1, 0], unix_time=1.0),
        snapshot([3, 1], unix_time=2.0),
        snapshot([3, 1], unix_time=3.0, mode="bitmap"),
        snapshot([4, 1], unix_time=4.0),
        snapshot([9, 1], unix_time=5.0, epoch=1),
        # Less than before: another process with the same epoch.
        snapshot([2, 2], unix_time=6.0, epoch=1),
    )
    found = [(time, counts.tolist()) for time, counts in intervals(layer)]
    assert found == [(1.0, [1, 0]), (2.0, [2, 1]), (4.0, [1, 0]), (5.0, [9, 1]), (6.0, [2, 2])]


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=9))
def test_intervals_add_up_to_the_window(steps: list[list[int]]) -> None:
    sums = np.cumsum(steps, axis=0)
    layer = history(*(snapshot(total, unix_time=float(i)) for i, total in enumerate(sums)))
    assert sum(counts for _, counts in intervals(layer)).tolist() == sums[-1].tolist()  # type: ignore[union-attr]
    ends, (over_time,) = load_over_time([layer])
    assert ends.tolist() == list(range(len(steps)))
    assert over_time.tolist() == steps
    assert over_time.sum(axis=0).tolist() == sums[-1].tolist()


# --- figures ------------------------------------------------------------------------------------------


def test_figures() -> None:
    figures = load_figures(load([4, 0, 2, 2]), top=2)
    assert (figures.distinct, figures.dead, figures.top) == (3, (1,), ((0, 0.5), (2, 0.25)))
    assert (figures.entropy, figures.max_over_mean) == (1.5, 2.0)
    assert figures.variation == pytest.approx(np.sqrt(2) / 2)


def test_figures_without_routes() -> None:
    figures = load_figures(load([0, 0]))
    assert (figures.distinct, figures.dead, figures.top) == (0, (0, 1), ())
    assert (figures.entropy, figures.max_over_mean, figures.variation) == (None, None, None)


@given(COUNTS)
def test_figures_of_any_counts(counts: list[int]) -> None:
    assume(any(counts))
    figures = load_figures(load(counts), top=64)
    assert figures.entropy is not None
    assert figures.max_over_mean is not None
    assert figures.variation is not None
    assert figures.distinct + len(figures.dead) == len(counts)
    assert 0 <= figures.entropy <= np.log2(len(counts)) + 1e-9
    assert 1 - 1e-9 <= figures.max_over_mean <= len(counts) * (1 + 1e-9)
    assert figures.variation >= 0
    shares = [share for _, share in figures.top]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)


@given(st.integers(1, 300), st.integers(1, MAX_COUNT))
def test_an_even_load(experts: int, count: int) -> None:
    figures = load_figures(load([count] * experts))
    assert figures.entropy == pytest.approx(np.log2(experts))
    assert (figures.max_over_mean, figures.variation) == (pytest.approx(1), pytest.approx(0, abs=1e-9))


# --- differences --------------------------------------------------------------------------------------


@given(COUNTS, st.booleans())
def test_nothing_moves_between_a_load_and_itself(counts: list[int], bitmap: bool) -> None:
    mine = load(counts, bitmap=bitmap)
    difference = compare_loads(mine, mine)
    assert difference.empty
    assert difference.moved in (0, None)


@given(st.data())
def test_what_moves(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 20))
    sides = st.lists(st.integers(0, 10**6), min_size=size, max_size=size)
    before, after = data.draw(sides), data.draw(sides)
    assume(any(before) and any(after))
    there, back = compare_loads(load(before), load(after)), compare_loads(load(after), load(before))
    assert there.moved is not None
    assert 0 <= there.moved <= 1
    assert there.moved == back.moved
    assert (there.appeared, there.vanished) == (back.vanished, back.appeared)
    assert sum(max(0.0, m.after - m.before) for m in there.experts) == pytest.approx(there.moved)


def test_what_moved() -> None:
    difference = compare_loads(load([6, 2, 2, 0]), load([2, 2, 0, 6]))
    assert difference.moved == pytest.approx(0.6)
    assert [(m.expert, m.before, m.after) for m in difference.experts] == [(3, 0, 0.6), (0, 0.6, 0.2), (2, 0.2, 0)]
    assert (difference.appeared, difference.vanished, difference.hot_kept) == ((3,), (2,), 0)
    with pytest.raises(QMoEError, match="4 experts on both sides, got 2"):
        compare_loads(load([1, 1, 1, 1]), load([1, 1]))


def test_noise_is_what_chance_moves() -> None:
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.ones(64))
    found = [
        compare_loads(load(random.multinomial(3000, shares).tolist()), load(random.multinomial(500, shares).tolist()))
        for _ in range(40)
    ]
    moved, noise = np.mean([(d.moved, d.noise) for d in found], axis=0)
    assert moved == pytest.approx(noise, rel=0.05)


def test_loads_without_counts_compare_by_what_was_seen() -> None:
    difference = compare_loads(load([1, 1, 0], bitmap=True), load([0, 1, 1]))
    assert (difference.appeared, difference.vanished, difference.moved, difference.experts) == ((2,), (0,), None, ())
    assert not difference.empty


# --- over time ----------------------------------------------------------------------------------------


def test_hot_set() -> None:
    assert hot_set(np.array([1, 5, 5, 0] * 4)).tolist() == [1, 2]
    assert hot_set(np.array([0, 0])).tolist() == [0]


def test_drift() -> None:
    counts = np.array([[8, 1, 1], [0, 0, 0], [2, 8, 0], [0, 9, 1]], float)
    drift = hot_set_drift(counts)
    np.testing.assert_array_equal(drift.own, [0.8, np.nan, 0.8, 0.9])
    np.testing.assert_array_equal(drift.previous, [0.8, np.nan, 0.2, 0.9])
    np.testing.assert_array_equal(drift.first, [0.8, np.nan, 0.2, 0.0])


@given(st.lists(st.lists(st.integers(0, 9), min_size=9, max_size=9), min_size=1, max_size=6))
def test_no_hot_set_takes_more_than_the_own(counts: list[list[int]]) -> None:
    drift = hot_set_drift(np.array(counts, float))
    kept = ~np.isnan(drift.own)
    assert (drift.previous[kept] <= drift.own[kept] + 1e-12).all()
    assert (drift.first[kept] <= drift.own[kept] + 1e-12).all()


def test_windows_over_time_are_common() -> None:
    one = history(*(snapshot([t + 1, 0], unix_time=float(t)) for t in range(100)))
    changing = history(snapshot([1, 0], unix_time=5.0), snapshot([1, 0, 0], epoch=1, unix_time=6.0))
    ends, (mine, other) = load_over_time([one, changing], most=10)
    assert ends.tolist() == list(range(9, 100, 10))
    assert (mine[:, 0].tolist(), other.size) == ([10] * 10, 0)
    ends, (nothing,) = load_over_time([history(snapshot([1], mode="bitmap"))])
    assert (ends.size, nothing.size) == (0, 0)


def test_records_of_one_round_count_together() -> None:
    layers = [history(*(snapshot([t], node=n, unix_time=t + n / 100) for t in range(1, 5))) for n in range(20)]
    _, counts = load_over_time([*layers, history(snapshot([5], node=30, unix_time=2.4))])
    assert all(layer[:, 0].tolist() == [1, 1, 1, 1] for layer in counts[:-1])
    assert counts[-1][:, 0].tolist() == [0, 5, 0, 0]
