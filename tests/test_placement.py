"""Placements and resident sets: what must hold for any counts, and the best there is for small ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qmoe_ep import QMoEError
from qmoe_ep.placement import Placement, choose_resident, contiguous_balance, hit_rates, place_experts
from qmoe_ep.telemetry import MAX_COUNT

COUNTS = st.lists(st.integers(0, 100) | st.integers(0, MAX_COUNT), min_size=1, max_size=24)

# --- over GPUs ----------------------------------------------------------------------------------------


def check(placement: Placement, counts: list[int], gpus: int, redundant: int) -> None:
    """What every placement must be."""
    room = -(-(len(counts) + redundant) // gpus)
    assert len(placement.gpus) == gpus
    assert all(len(held) <= room and len(set(held)) == len(held) for held in placement.gpus)
    copies = np.bincount([expert for held in placement.gpus for expert in held], minlength=len(counts))
    assert copies.tolist() == placement.replicas.tolist()
    assert copies.min() >= 1
    assert copies.sum() <= len(counts) + redundant
    loads = [sum(counts[expert] / copies[expert] for expert in held) for held in placement.gpus]
    np.testing.assert_allclose(placement.loads, loads, rtol=1e-9)
    assert 1 <= placement.bound <= placement.balance * (1 + 1e-9)


@settings(max_examples=200)
@given(COUNTS, st.integers(1, 9), st.integers(0, 12))
def test_placements(counts: list[int], gpus: int, redundant: int) -> None:
    placement = place_experts(np.array(counts, np.uint64), gpus, redundant)
    check(placement, counts, gpus, redundant)
    assert placement.balance <= 1.01 * place_experts(np.array(counts, np.uint64), gpus).balance * (1 + 1e-9) or (
        redundant == 0
    )


@settings(max_examples=60)
@given(st.lists(st.integers(0, 20), min_size=4, max_size=6), st.integers(2, 3))
def test_placements_of_few_experts_are_near_the_best(counts: list[int], gpus: int) -> None:
    assume(any(counts))
    placement = place_experts(np.array(counts), gpus)
    room = -(-len(counts) // gpus)
    best = min(
        max(np.bincount(choice, counts, gpus))
        for choice in itertools.product(range(gpus), repeat=len(counts))
        if max(np.bincount(choice, minlength=gpus)) <= room
    )
    best_balance = best / (sum(counts) / gpus)
    assert placement.bound <= best_balance * (1 + 1e-9)
    assert placement.balance <= best_balance * 4 / 3 * (1 + 1e-9)


def test_a_hot_expert_needs_copies() -> None:
    counts = np.array([90, 10, 10, 10])
    assert place_experts(counts, 4).balance == pytest.approx(3)
    placement = place_experts(counts, 4, redundant=4)
    assert placement.replicas.tolist() == [4, 2, 1, 1]
    assert placement.balance < 1.1
    assert contiguous_balance(counts, 2) == pytest.approx(100 / 60)


def test_copies_that_would_do_harm_are_left_out() -> None:
    # A copy of the hot expert would leave the cold one on the side of the other copy.
    placement = place_experts(np.array([60, 40]), 2, redundant=1)
    assert placement.replicas.tolist() == [1, 1]
    assert placement.balance == pytest.approx(1.2)


def test_more_copies_than_places() -> None:
    placement = place_experts(np.array([5, 3, 1]), 2, redundant=50)
    assert placement.gpus == ((0, 1, 2), (0, 1, 2))
    assert placement.balance == 1


def test_copies_find_room_where_there_is_none_to_spare() -> None:
    for counts in itertools.permutations([8, 8, 8, 7, 1]):
        check(place_experts(np.array(counts), 3, 4), list(counts), 3, 4)


def test_nothing_recorded() -> None:
    placement = place_experts(np.zeros(6), 3)
    assert [len(held) for held in placement.gpus] == [2, 2, 2]
    assert (placement.balance, placement.bound, contiguous_balance(np.zeros(6), 3)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("counts", "gpus", "redundant"),
    [([], 1, 0), ([1], 0, 0), ([1], 1, -1), ([[1]], 1, 0), ([-1.0], 1, 0), ([np.nan], 1, 0), ([np.inf], 1, 0)],
)
def test_what_can_not_be_placed(counts: list[float], gpus: int, redundant: int) -> None:
    with pytest.raises(QMoEError, match=r"^placement: expected"):
        place_experts(np.array(counts), gpus, redundant)


# --- resident sets ------------------------------------------------------------------------------------

LAYERS = st.lists(
    st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 9)), min_size=1, max_size=3
)


@given(LAYERS, st.integers(0, 120), st.booleans())
def test_hit_rates(layers: list[tuple[list[int], int]], budget: int, even: bool) -> None:
    counts, sizes = [np.array(c, np.uint64) for c, _ in layers], [size for _, size in layers]
    resident = choose_resident(counts, sizes, budget, even=even)
    rates = hit_rates(counts, resident, sizes, budget)
    assert rates.nbytes <= budget
    for layer, mine, load in zip(rates.layers, resident, counts, strict=True):
        assert layer.resident == mine.sum()
        assert layer.uniform == pytest.approx(mine.mean())
        if load.any():
            assert layer.hit_rate is not None
            assert layer.best is not None
            assert 0 <= layer.hit_rate <= layer.best <= 1
    if not any(load.any() for load in counts):
        assert (rates.hit_rate, rates.uniform, rates.best) == (None, None, None)
        return
    assert rates.hit_rate is not None
    assert rates.best is not None
    assert 0 <= rates.hit_rate <= rates.best <= 1
    if not even and len(set(sizes)) == 1:
        # With one size, the routes that the bound counts in part are those of one expert at most.
        hottest = max(int(load.max()) for load in counts)
        assert (rates.best - rates.hit_rate) * sum(int(load.sum()) for load in counts) <= hottest + 1e-6


@settings(max_examples=60)
@given(LAYERS, st.integers(0, 60))
def test_no_set_is_better_than_the_best(layers: list[tuple[list[int], int]], budget: int) -> None:
    flat = [(count, size) for counts, size in layers for count in counts][:10]
    counts, sizes = [np.array([c]) for c, _ in flat], [size for _, size in flat]
    total = sum(c for c, _ in flat)
    assume(total)
    best = hit_rates(counts, choose_resident(counts, sizes, budget), sizes, budget).best
    assert best is not None
    for chosen in itertools.product((False, True), repeat=len(flat)):
        pairs = [pair for pair, taken in zip(flat, chosen, strict=True) if taken]
        if sum(size for _, size in pairs) <= budget:
            assert sum(c for c, _ in pairs) / total <= best + 1e-9


def test_all_fit_or_none() -> None:
    counts = [np.array([3, 1]), np.array([0, 5])]
    all_fit = hit_rates(counts, choose_resident(counts, [10, 20], 60), [10, 20], 60)
    assert (all_fit.hit_rate, all_fit.uniform, all_fit.best, all_fit.nbytes) == (1, 1, 1, 60)
    none = hit_rates(counts, choose_resident(counts, [10, 20], 0), [10, 20], 0)
    assert (none.hit_rate, none.uniform, none.best, none.nbytes) == (0, 0, 0, 0)


def test_routes_per_byte_decide() -> None:
    counts = [np.array([6, 5]), np.array([9, 1])]
    resident = choose_resident(counts, [1, 3], 4)
    assert [mine.tolist() for mine in resident] == [[True, True], [False, False]]
    even = choose_resident(counts, [1, 3], 6, even=True)
    assert [mine.tolist() for mine in even] == [[True, True], [True, False]]


def test_a_set_chosen_from_another_load() -> None:
    yesterday, today = [np.array([9, 1, 0])], [np.array([1, 9, 0])]
    rates = hit_rates(today, choose_resident(yesterday, [1], 1), [1], 1)
    assert (rates.hit_rate, rates.best) == (0.1, 0.9)


@pytest.mark.parametrize(("layers", "sizes", "budget"), [(1, [1], -1), (0, [], 5), (2, [1], 5), (1, [0], 5)])
def test_what_has_no_resident_set(layers: int, sizes: list[int], budget: int) -> None:
    with pytest.raises(QMoEError, match=r"^resident set: expected"):
        choose_resident([np.array([1])] * layers, sizes, budget)
