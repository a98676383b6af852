"""Routing: the order of logits by their bits, ties, weights, and patterns that are legal but strange."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import DTYPES

from qmoe_ep.routing import order_keys, route, select_experts

Array = np.ndarray[Any, Any]
FLOATS = list(DTYPES.values())


def of_bits(patterns: Any, dtype: np.dtype[Any]) -> Array:
    """An array whose elements have the given bit patterns."""
    return np.array(patterns, f"u{dtype.itemsize}").view(dtype)


def specials(dtype: np.dtype[Any]) -> list[int]:
    """Bit patterns in ascending total order: -NaN, -inf, -1, -tiny, -0, +0, tiny, 1, inf, NaN."""
    width = 8 * dtype.itemsize
    sign = 1 << (width - 1)
    infinity = int(np.array(np.inf, dtype).view(f"u{dtype.itemsize}"))
    one = int(np.array(1, dtype).view(f"u{dtype.itemsize}"))
    ascending = [0, 1, one, infinity, infinity + 1, sign - 1]
    return [p | sign for p in reversed(ascending)] + ascending


def slow_selection(keys: list[tuple[bool, int]], k: int) -> list[int]:
    """Sign and magnitude of each logit, by repeated search for the greatest."""
    left = list(range(len(keys)))
    chosen = []
    for _ in range(k):
        best = left[0]
        for expert in left[1:]:
            if precedes(keys[best], keys[expert]):
                best = expert
        left.remove(best)
        chosen.append(best)
    return chosen


def precedes(a: tuple[bool, int], b: tuple[bool, int]) -> bool:
    """Whether a comes strictly before b in IEEE 754 total order."""
    if a[0] != b[0]:
        return a[0]
    return a[1] > b[1] if a[0] else a[1] < b[1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_total_order(dtype: np.dtype[Any]) -> None:
    keys = order_keys(of_bits(specials(dtype), dtype))
    assert (np.diff(keys) > 0).all()
    assert keys.dtype == np.int64


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_total_order_of_every_half_value(dtype: np.dtype[Any]) -> None:
    patterns = [*range(0xFFFF, 0x7FFF, -1), *range(0x8000)]
    np.testing.assert_array_equal(np.diff(order_keys(of_bits(patterns, dtype))), 1)


@given(st.data(), st.sampled_from(FLOATS), st.integers(1, 9))
@settings(max_examples=200)
def test_selection_by_bits(data: st.DataObject, dtype: np.dtype[Any], experts: int) -> None:
    width = 8 * dtype.itemsize
    pattern = st.one_of(st.sampled_from(specials(dtype)), st.integers(0, 2**width - 1))
    rows = data.draw(st.lists(st.lists(pattern, min_size=experts, max_size=experts), min_size=1, max_size=3))
    k = data.draw(st.integers(1, experts))
    chosen = select_experts(of_bits(rows, dtype), k)
    assert chosen.dtype == np.int32
    sign = 1 << (width - 1)
    for row, selected in zip(rows, chosen.tolist(), strict=True):
        assert selected == slow_selection([(bool(p & sign), p & ~sign) for p in row], k)
        assert len(set(selected)) == k


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pattern", ["ones", "NaN", "zero", "-inf"])
def test_one_pattern_everywhere_selects_the_first_experts(dtype: np.dtype[Any], pattern: str) -> None:
    width = 8 * dtype.itemsize
    bits = {
        "ones": (1 << width) - 1,
        "NaN": int(np.array(np.nan, dtype).view(f"u{dtype.itemsize}")),
        "zero": 0,
        "-inf": int(np.array(-np.inf, dtype).view(f"u{dtype.itemsize}")),
    }[pattern]
    logits = of_bits([[bits] * 200] * 3, dtype)
    for k in (1, 7, 200):
        assert select_experts(logits, k).tolist() == [list(range(k))] * 3
        experts, weights = route(logits, None, top_k=k, normalize=True)
        assert experts.tolist() == [list(range(k))] * 3
        if pattern == "zero":
            np.testing.assert_allclose(weights, 1 / k)
        else:
            assert np.isnan(weights).all()
        routed = np.ones((3, 200), dtype)
        np.testing.assert_allclose(route(logits, routed, top_k=k, normalize=True)[1], 1 / k)


def test_zeros_differ_and_equal_logits_take_the_lowest_index() -> None:
    assert select_experts(np.array([[-0.0, 0.0, -0.0, 0.0]], np.float32), 4).tolist() == [[1, 3, 0, 2]]
    assert select_experts(np.array([[1.0, 2.0, 2.0, 1.0]], np.float16), 3).tolist() == [[1, 2, 0]]


def test_logits_are_compared_at_their_own_width() -> None:
    # Signalling and quiet NaNs with payloads keep their order, which a conversion would lose.
    logits = of_bits([[0x7F81, 0x7FC0, 0x7F82, 0x7FFF]], np.dtype(ml_dtypes.bfloat16))
    assert select_experts(logits, 4).tolist() == [[3, 1, 2, 0]]
    logits = of_bits([[0x7F800001, 0x7FC00000, 0x7F800002, 0xFF800001]], np.dtype(np.float32))
    assert select_experts(logits, 4).tolist() == [[1, 2, 0, 3]]


@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from(FLOATS))
@settings(max_examples=100)
def test_softmax_weights(experts: int, rows: int, seed: int, normalize: bool, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, experts)) * rng.choice([1, 30, 3000])).astype(dtype)
    k = int(rng.integers(1, experts + 1))
    chosen, weights = route(logits, None, top_k=k, normalize=normalize)
    assert weights.shape == chosen.shape == (rows, k)
    assert weights.dtype == np.float64
    for row in range(rows):
        values = [float(v) for v in logits[row]]
        peak = max(values)
        among = chosen[row] if normalize else range(experts)
        total = math.fsum(math.exp(values[e] - peak) for e in among)
        expected = [math.exp(values[e] - peak) / total for e in chosen[row]]
        np.testing.assert_allclose(weights[row], expected, rtol=1e-12, atol=1e-300)


@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from(FLOATS))
@settings(max_examples=100)
def test_given_weights(experts: int, seed: int, normalize: bool, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((3, experts)).astype(np.float32)
    given_weights = (rng.standard_normal((3, experts)) * rng.choice([1, 1e-6, 1e4])).astype(dtype)
    k = int(rng.integers(1, experts + 1))
    chosen, weights = route(logits, given_weights, top_k=k, normalize=normalize)
    np.testing.assert_array_equal(chosen, select_experts(logits, k))
    for row in range(3):
        picked = [np.float32(given_weights[row, e]) for e in chosen[row]]
        total = np.float32(0)
        for value in picked:
            total += value
        divisor = float(total) if normalize else 1.0
        expected = [float(v) / divisor if divisor else 0.0 for v in picked]
        assert weights[row].tolist() == expected


def test_given_weights_that_sum_to_nothing() -> None:
    logits = np.array([[3.0, 2.0, 1.0]] * 5, np.float32)
    given_weights = np.array(
        [[0.5, -0.5, 9.0], [0.0, 0.0, 1.0], [-0.0, 0.0, 1.0], [1.0, np.nan, 0.0], [-3.0, 1.0, 0.0]], np.float32
    )
    weights = route(logits, given_weights, top_k=2, normalize=True)[1]
    assert weights[:3].tolist() == [[0.0, 0.0]] * 3
    assert np.isnan(weights[3]).all()
    assert weights[4].tolist() == [1.5, -0.5]


def test_the_sum_of_given_weights_is_float32_in_slot_order() -> None:
    # In float32, 1e8 swallows the ones that come after it, but not those before: 1 + 1 + 1e8 isn't 1e8 + 1 + 1.
    logits = np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]], np.float32)
    given_weights = np.array([[1e8, 3.0, 3.0]] * 2, np.float32)
    weights = route(logits, given_weights, top_k=3, normalize=True)[1]
    assert weights[0, 0] == 1e8 / 1e8
    assert weights[1, 2] == 1e8 / (1e8 + 8)


def test_infinite_logits() -> None:
    logits = np.array([[1.0, np.inf, 2.0], [-np.inf, 1.0, 1.0], [-np.inf, -np.inf, 0.0]], np.float32)
    chosen, weights = route(logits, None, top_k=2, normalize=True)
    assert chosen.tolist() == [[1, 2], [1, 2], [2, 0]]
    assert np.isnan(weights[0]).any()
    assert weights[1:].tolist() == [[0.5, 0.5], [1.0, 0.0]]
    # A negative NaN ranks below everything; only a softmax over all experts sees it.
    logits = of_bits([[0x3F800000, 0xFFC00000, 0x3F800000]], np.dtype(np.float32))
    chosen, weights = route(logits, None, top_k=2, normalize=True)
    assert chosen.tolist() == [[0, 2]]
    assert weights.tolist() == [[0.5, 0.5]]
    assert np.isnan(route(logits, None, top_k=2, normalize=False)[1]).all()


def test_strided_logits_and_no_rows() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 12)).astype(np.float32)
    for view in (logits[:, ::2], logits[::-1, 3:8], np.asfortranarray(logits)):
        np.testing.assert_array_equal(select_experts(view, 3), select_experts(view.copy(), 3))
    assert select_experts(logits[:0], 3).shape == (0, 3)
    assert route(logits[:0], None, top_k=3, normalize=False)[1].shape == (0, 3)
