"""Formats: packing, layouts, quantizing and dequantizing, against slow models of one code at a time."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmoe_ep import QMoEError, QuantizedExperts, dequantize_experts, quantize_experts, raw_to_sm80, sm80_to_raw
from qmoe_ep.quantization import INTEGER_FORMATS, dequantize_matrix, pack_codes, unpack_codes

WIDTHS = tuple(INTEGER_FORMATS)
Array = np.ndarray[Any, Any]


def slow_pack(codes: list[int], bits: int) -> bytes:
    """One row, bit by bit: bit i of code j is bit j·bits + i of the stream."""
    stream = [code >> i & 1 for code in codes for i in range(bits)]
    stream += [0] * (-len(stream) % 8)
    return bytes(sum(bit << i for i, bit in enumerate(stream[first : first + 8])) for first in range(0, len(stream), 8))


def slow_code(row: Array, index: int, bits: int) -> int:
    """Code ``index`` of a packed row, bit by bit."""
    positions = range(index * bits, (index + 1) * bits)
    return sum((int(row[p // 8]) >> p % 8 & 1) << i for i, p in enumerate(positions))


def random_bytes(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


# --- packing -----------------------------------------------------------------------------------------


@given(st.data(), st.sampled_from(WIDTHS), st.sampled_from(["u1", "i1", "i4", "i8", "u8"]))
def test_packing_is_the_bit_stream(data: st.DataObject, bits: int, dtype: str) -> None:
    top = min((1 << bits) - 1, int(np.iinfo(dtype).max))
    codes = data.draw(st.lists(st.integers(0, top), max_size=40))
    packed = pack_codes(np.array(codes, dtype), bits=bits)
    assert packed.dtype == np.uint8
    assert packed.tobytes() == slow_pack(codes, bits)
    assert unpack_codes(packed, bits=bits, count=len(codes)).tolist() == codes


@given(
    st.sampled_from(WIDTHS),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 70),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_round_trip_in_any_shape_and_stride(
    bits: int, leading: list[int], count: int, seed: int, strided: bool
) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (*leading, count), np.uint8)
    source = np.repeat(codes, 2, axis=-1)[..., ::2] if strided else codes
    packed = pack_codes(source, bits=bits)
    assert packed.shape == (*leading, -(-count * bits // 8))
    spread = np.repeat(packed, 2, axis=-1)[..., ::2] if strided else packed
    unpacked = unpack_codes(spread, bits=bits, count=count)
    assert unpacked.dtype == np.uint8
    np.testing.assert_array_equal(unpacked, codes)


@given(st.sampled_from(WIDTHS), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_padding_bits_are_ignored(bits: int, count: int, seed: int) -> None:
    row = random_bytes(seed, -(-count * bits // 8))
    codes = unpack_codes(row, bits=bits, count=count)
    assert codes.tolist() == [slow_code(row, j, bits) for j in range(count)]
    again = pack_codes(codes, bits=bits)
    used = slow_pack([(1 << bits) - 1] * count, bits)
    np.testing.assert_array_equal(again, row & np.frombuffer(used, np.uint8))


def test_the_even_code_of_a_byte_is_its_low_nibble() -> None:
    assert pack_codes(np.array([1, 2, 3]), bits=4).tolist() == [0x21, 0x03]
    assert pack_codes(np.array([1, 0, 2, 3]), bits=2).tolist() == [0b11100001]
    assert pack_codes(np.array([1, 2, 3]), bits=3).tolist() == [0b11010001, 0]
    assert pack_codes(np.array([1, 0, 0, 0, 0, 0, 0, 0, 1]), bits=1).tolist() == [1, 1]


@pytest.mark.parametrize("rows", [1, 1000, 70_000])
@pytest.mark.parametrize("bits", WIDTHS)
def test_chunks_are_seamless(bits: int, rows: int) -> None:
    codes = np.random.default_rng(rows).integers(0, 1 << bits, (rows, 37), np.uint8)
    packed = pack_codes(codes, bits=bits)
    np.testing.assert_array_equal(unpack_codes(packed, bits=bits, count=37), codes)
    for row in (0, rows // 2, rows - 1):
        assert packed[row].tobytes() == slow_pack(codes[row].tolist(), bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_that_do_not_fit_are_refused(bits: int) -> None:
    for code in (-1, 1 << bits):
        with pytest.raises(QMoEError, match=r"codes must be in \[0, "):
            pack_codes(np.array([0, code]), bits=bits)


def test_wrong_arguments_of_packing() -> None:
    for bits in (0, 5, 16):
        with pytest.raises(QMoEError, match=f"bits must be one of 1, 2, 3, 4, 8, got {bits}"):
            pack_codes(np.zeros(8, np.uint8), bits=bits)
        with pytest.raises(QMoEError, match="bits must be one of"):
            unpack_codes(np.zeros(8, np.uint8), bits=bits, count=8)
    for codes in (np.zeros(4, np.float32), np.zeros((), np.uint8), np.zeros(4, np.bool_)):
        with pytest.raises(QMoEError, match="codes: expected integers"):
            pack_codes(codes, bits=4)
    packed: Any
    for packed in (np.zeros(3, np.uint8), np.zeros(4, np.int8), np.zeros((), np.uint8)):
        with pytest.raises(QMoEError, match=r"packed: expected uint8 with last dimension 4 for 8 codes of 4 bits"):
            unpack_codes(packed, bits=4, count=8)


def big_tensor() -> Array:
    """Codes of 128 experts of 768 × 2048, by repetition: making them is not what is measured."""
    return np.resize(np.random.default_rng(0).integers(0, 16, 1_000_003, np.uint8), (128, 768, 2048))


def test_a_model_sized_tensor_packs_quickly_and_in_little_memory() -> None:
    codes = big_tensor()
    packed_bytes = codes.size // 2
    packed, seconds, peak = measured(lambda: pack_codes(codes, bits=4))
    assert seconds < 3
    assert peak < 4 * packed_bytes
    unpacked, seconds, peak = measured(lambda: unpack_codes(packed, bits=4, count=2048))
    assert seconds < 3
    assert peak < 4 * packed_bytes
    np.testing.assert_array_equal(unpacked[::40], codes[::40])


def measured(function: Any) -> tuple[Array, float, int]:
    """Result, best processor seconds of up to three runs, and the most bytes allocated at a time."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        result = function()
        seconds.append(time.process_time() - start)
        if seconds[-1] < 1:
            break
        del result
    tracemalloc.start()
    try:
        result = function()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return result, min(seconds), peak


# --- layouts -----------------------------------------------------------------------------------------


def slow_sm80(codes: Array, bits: int) -> list[int]:
    """The codes of one matrix [out, K] in stored order, by the index formula of the layout."""
    out, k = codes.shape
    stored = []
    if bits == 4:
        for block in range(out // 4):
            for tile in range(k // 64):
                for row in range(4):
                    for s in range(2):
                        for r in range(8):
                            for c in range(4):
                                stored.append(int(codes[4 * block + row, 64 * tile + 32 * s + 8 * c + r]))
    else:
        for block in range(out // 8):
            for tile in range(k // 64):
                for row in range(8):
                    for r in range(8):
                        for c in range(8):
                            stored.append(int(codes[8 * block + row, 64 * tile + 8 * c + r]))
    return stored


@given(st.sampled_from([2, 4]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_sm80_layout(bits: int, blocks: int, tiles: int, experts: int, seed: int) -> None:
    out, k = blocks * (4 if bits == 4 else 8), 64 * tiles
    packed = random_bytes(seed, experts, out, k * bits // 8)
    converted = raw_to_sm80(packed, bits=bits)
    assert converted.shape == packed.shape
    assert converted.dtype == np.uint8
    assert converted.flags.c_contiguous
    for source, target in zip(packed, converted, strict=True):
        assert target.tobytes() == slow_pack(slow_sm80(unpack_codes(source, bits=bits, count=k), bits), bits)
        np.testing.assert_array_equal(raw_to_sm80(source, bits=bits), target)
    np.testing.assert_array_equal(sm80_to_raw(converted, bits=bits), packed)
    np.testing.assert_array_equal(raw_to_sm80(sm80_to_raw(packed, bits=bits), bits=bits), packed)
    spread = np.repeat(packed, 2, axis=2)[..., ::2]
    np.testing.assert_array_equal(raw_to_sm80(spread, bits=bits), converted)


@pytest.mark.parametrize("convert", [raw_to_sm80, sm80_to_raw])
def test_what_the_sm80_layout_does_not_have(convert: Any) -> None:
    for bits in (1, 3, 8):
        with pytest.raises(QMoEError, match=f"2 and 4 bits, got {bits}"):
            convert(np.zeros((1, 8, 64), np.uint8), bits=bits)
    for bits, shape in ((4, (1, 6, 32)), (4, (1, 4, 48)), (2, (1, 4, 16)), (2, (8, 8))):
        with pytest.raises(QMoEError, match="multiples of"):
            convert(np.zeros(shape, np.uint8), bits=bits)
    for array in (np.zeros((1, 4, 32), np.int8), np.zeros(32, np.uint8), np.zeros((1, 1, 4, 32), np.uint8)):
        with pytest.raises(QMoEError, match=r"packed: expected uint8 \[E, out"):
            convert(array, bits=4)


# --- values ------------------------------------------------------------------------------------------


@given(
    st.sampled_from(WIDTHS),
    st.sampled_from([0, 16, 32]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=150)
def test_dequantizing_one_code_at_a_time(
    bits: int, block: int, out: int, multiple: int, stored: bool, dtype: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    k = multiple * block if block else int(rng.integers(1, 40))
    blocks = k // block if block else 1
    packed = random_bytes(seed, 2, out, -(-k * bits // 8))
    scales = rng.standard_normal((2, out, blocks)).astype(dtype)
    zero_shape = (2, out, -(-blocks * bits // 8)) if block else (2, -(-out * bits // 8))
    points = random_bytes(seed + 1, *zero_shape) if stored else None
    given_scales = scales if block or seed % 2 else scales[:, :, 0]
    values = dequantize_experts(packed, given_scales, points, bits=bits, block_size=block, in_features=k)
    exact = dequantize_matrix(
        packed[1],
        given_scales[1],
        None if points is None else points[1],
        bits=bits,
        block_size=block,
        in_features=k,
        dtype=np.float64,
    )
    assert values.dtype == np.float32
    assert exact.dtype == np.float64
    for e, n, j in np.ndindex(2, out, k):
        b = j // block if block else 0
        zero = 1 << (bits - 1)
        if points is not None:
            zero = slow_code(points[e, n], b, bits) if block else slow_code(points[e], n, bits)
        value = (slow_code(packed[e, n], j, bits) - zero) * float(scales[e, n, b])
        assert values[e, n, j] == np.float32(value)
        if e == 1:
            assert exact[n, j] == value


@given(st.sampled_from([2, 4]), st.sampled_from([0, 64]), st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_dequantizing_the_sm80_layout(bits: int, block: int, seed: int) -> None:
    packed = random_bytes(seed, 2, 8, 128 * bits // 8)
    scales = np.random.default_rng(seed).standard_normal((2, 8, 2) if block else (2, 8)).astype(np.float32)
    raw = dequantize_experts(packed, scales, bits=bits, block_size=block)
    stored = dequantize_experts(raw_to_sm80(packed, bits=bits), scales, bits=bits, block_size=block, layout="sm80")
    np.testing.assert_array_equal(stored, raw)


def test_wrong_arguments_of_dequantizing() -> None:
    packed, scales = np.zeros((2, 3, 16), np.uint8), np.ones((2, 3, 1), np.float32)
    dequantize_experts(packed, scales)
    with pytest.raises(QMoEError, match=r"packed: expected non-empty uint8 \[E, N"):
        dequantize_experts(packed[0], scales)
    with pytest.raises(QMoEError, match="packed: expected non-empty uint8"):
        dequantize_experts(packed.astype(np.int8), scales)
    with pytest.raises(QMoEError, match="packed: expected non-empty uint8"):
        dequantize_experts(packed[:, :, :0], scales)
    with pytest.raises(QMoEError, match=r"scales: expected shape \[2, 3, 1\], got \[2, 3\]"):
        dequantize_experts(packed, scales[:, :, 0])
    with pytest.raises(QMoEError, match=r"scales: expected shape \[2, 3\], got \[2, 2\]"):
        dequantize_experts(packed, scales[:, :2, 0], block_size=0)
    with pytest.raises(QMoEError, match=r"zero_points: expected shape \[2, 3, 1\], got \[2, 3\]"):
        dequantize_experts(packed, scales, np.zeros((2, 3), np.uint8))
    with pytest.raises(QMoEError, match=r"zero_points: expected shape \[2, 2\], got \[2, 3\]"):
        dequantize_experts(packed, scales, np.zeros((2, 3), np.uint8), block_size=None)
    with pytest.raises(QMoEError, match=r"packed: rows of 16 bytes don't hold K = 64"):
        dequantize_experts(packed, scales, in_features=64)
    with pytest.raises(QMoEError, match=r"exceed 2\^63-1 bytes"):
        dequantize_experts(np.broadcast_to(packed[:1, :1, :1], (1, 2**31, 2**30)), scales, bits=1, block_size=0)
    with pytest.raises(QMoEError, match="block_size must be a power of two"):
        dequantize_experts(packed, scales, block_size=24)
    with pytest.raises(QMoEError, match="block_size = 64 doesn't divide"):
        dequantize_experts(packed, scales, block_size=64)
    with pytest.raises(QMoEError, match="bits must be one of"):
        dequantize_experts(packed, scales, bits=5)


# --- quantizing --------------------------------------------------------------------------------------


def restored(q: QuantizedExperts, k: int) -> Array:
    return dequantize_experts(q.packed, q.scales, q.zero_points, bits=q.bits, block_size=q.block_size, in_features=k)


@given(
    st.sampled_from(WIDTHS),
    st.sampled_from([None, 16, 32]),
    st.booleans(),
    st.sampled_from(["normal", "positive", "negative", "constant", "zero", "tiny", "large", "sparse"]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200)
def test_quantizing_is_within_half_a_step(bits: int, block: int | None, symmetric: bool, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = 64 if block else int(rng.integers(1, 70))
    weights = make_weights(rng, kind, (2, 3, k))
    q = quantize_experts(weights, bits=bits, block_size=block, symmetric=symmetric)
    blocks = k // block if block else 1
    assert (q.bits, q.block_size) == (bits, block or 0)
    assert q.packed.shape == (2, 3, -(-k * bits // 8))
    assert q.scales.shape == ((2, 3, blocks) if block else (2, 3))
    assert q.scales.dtype == np.float32
    if symmetric:
        assert q.zero_points is None
    else:
        assert q.zero_points is not None
        assert q.zero_points.shape == ((2, 3, -(-blocks * bits // 8)) if block else (2, -(-3 * bits // 8)))
    values = weights.reshape(2, 3, blocks, -1).astype(np.float64)
    steps = np.abs(q.scales.astype(np.float64)).reshape(2, 3, blocks, 1)
    error = np.abs(restored(q, k).reshape(values.shape) - values)
    if symmetric and bits == 1:
        check_one_bit(values, steps, error)
    else:
        half = 1 << (bits - 1)
        low, high = np.minimum(values.min(3, keepdims=True), 0), np.maximum(values.max(3, keepdims=True), 0)
        # A scale below the normal numbers is off by up to half of the smallest of them, for every code.
        assert (error <= 0.5 * steps * (1 + 1e-4) + 2 * half * 2.0**-149).all()
        largest = np.maximum(high, -low)
        widest = largest / max(half - 1, 1) if symmetric else (high - low) / (2 * half - 1)
        assert (steps[widest > 0] <= widest[widest > 0] * (1 + 1e-6) + 2e-45).all()


def check_one_bit(values: Array, steps: Array, error: Array) -> None:
    """Codes mean −scale and 0: the largest value survives, and each value goes to the nearer of the two."""
    largest = np.abs(values).max(axis=3, keepdims=True)
    assert (error <= np.abs(values) * (1 + 1e-6) + 1e-45).all()
    np.testing.assert_allclose(steps[largest > 0], largest[largest > 0], rtol=1e-6)
    kept = np.abs(values) == largest
    assert (error[kept].reshape(-1).min(initial=0.0)) == 0


def make_weights(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    normal = rng.standard_normal(shape)
    weights = {
        "normal": normal,
        "positive": np.abs(normal) + 0.5,
        "negative": -np.abs(normal) - 0.5,
        "constant": np.full(shape, normal.flat[0]),
        "zero": np.zeros(shape),
        "tiny": normal * 1e-40,
        "large": normal * 1e37,
        "sparse": normal * (rng.random(shape) < 0.1),
    }[kind]
    return weights.astype(np.float32)


@given(
    st.sampled_from([2, 3, 4, 8]),
    st.booleans(),
    st.sampled_from([np.float16, ml_dtypes.bfloat16]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_codes_are_chosen_for_the_rounded_scale(bits: int, symmetric: bool, dtype: Any, seed: int) -> None:
    weights = np.random.default_rng(seed).standard_normal((2, 3, 64)).astype(np.float32)
    q = quantize_experts(weights, bits=bits, block_size=32, symmetric=symmetric, scale_dtype=dtype)
    assert q.scales.dtype == dtype
    # No other code is nearer, whatever rounding did to the scale.
    steps = q.scales.astype(np.float64).repeat(32, axis=2)
    points = np.full((2, 3, 2), 1 << (bits - 1))
    if q.zero_points is not None:
        points = unpack_codes(q.zero_points, bits=bits, count=2)
    candidates = np.arange(1 << bits)[:, None, None, None] - points.repeat(32, axis=2).astype(np.int64)
    nearest = np.abs(candidates * steps - weights).min(axis=0)
    error = np.abs(restored(q, 64).astype(np.float64) - weights)
    np.testing.assert_allclose(error, nearest, atol=1e-6)


@given(st.sampled_from(WIDTHS), st.sampled_from([None, 16]), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_quantizing_again_changes_little_or_nothing(bits: int, block: int | None, symmetric: bool, seed: int) -> None:
    weights = np.random.default_rng(seed).standard_normal((1, 4, 48)).astype(np.float32)
    q = quantize_experts(weights, bits=bits, block_size=block, symmetric=symmetric)
    once = restored(q, 48)
    twice = restored(quantize_experts(once, bits=bits, block_size=block, symmetric=symmetric), 48)
    steps = np.abs(q.scales.reshape(1, 4, -1)).repeat(block or 48, axis=2)
    if symmetric:
        # The extreme code is taken, so that the same scale is found.
        np.testing.assert_allclose(twice, once, atol=1e-5)
    else:
        assert (np.abs(twice - once) <= 0.51 * steps).all()


def test_exact_grids_survive() -> None:
    for bits in (2, 3, 4, 8):
        half = 1 << (bits - 1)
        grid = np.arange(-half, half, dtype=np.float32) * 0.25
        weights = np.resize(np.random.default_rng(bits).permutation(grid), (1, 2, max(256, grid.size)))
        q = quantize_experts(weights, bits=bits, block_size=None)
        np.testing.assert_array_equal(restored(q, weights.shape[2]), weights)
        lifted = np.resize(np.arange(2 * half, dtype=np.float32) - 1, (1, 2, 256))
        q = quantize_experts(lifted, bits=bits, block_size=None, symmetric=False)
        np.testing.assert_array_equal(restored(q, 256), lifted)


def test_strided_and_half_weights() -> None:
    weights = np.random.default_rng(1).standard_normal((2, 64, 6)).astype(np.float16).transpose(0, 2, 1)
    q = quantize_experts(weights)
    plain = quantize_experts(np.ascontiguousarray(weights).astype(np.float32))
    np.testing.assert_array_equal(q.packed, plain.packed)
    np.testing.assert_array_equal(q.scales, plain.scales)


def test_a_scale_that_underflows_means_zeros() -> None:
    weights = np.full((1, 1, 32), 1e-9, np.float32)
    for symmetric in (True, False):
        q = quantize_experts(weights, symmetric=symmetric, scale_dtype=np.float16)
        assert not restored(q, 32).any()


def test_wrong_arguments_of_quantizing() -> None:
    weights = np.ones((1, 2, 64), np.float32)
    for bad in (weights[0], weights[:0], weights[:, :, :0]):
        with pytest.raises(QMoEError, match=r"weights: expected non-empty \[E, N, K\]"):
            quantize_experts(bad)
    for value in (np.nan, np.inf, -np.inf, 1e300):
        broken = np.ones((2, 2, 64))
        broken[1, 1, 7] = value
        with pytest.raises(QMoEError, match="weights: expert 1 holds a NaN or infinity"):
            quantize_experts(broken)
    with pytest.raises(QMoEError, match="bits must be one of"):
        quantize_experts(weights, bits=5)
    for size in (8, 24, 1):
        with pytest.raises(QMoEError, match=f"block_size must be a power of two .* got {size}"):
            quantize_experts(weights, block_size=size)
    with pytest.raises(QMoEError, match="block_size = 128 doesn't divide the input features K = 64"):
        quantize_experts(weights, block_size=128)
    dtype: Any
    for dtype in (np.float64, np.int8, "O"):
        with pytest.raises(QMoEError, match="scale_dtype must be"):
            quantize_experts(weights, scale_dtype=dtype)
    for magnitude, dtype in ((1e6, np.float16), (3e38, np.float32)):
        wide = weights * np.float32(magnitude)
        wide[..., ::2] *= -1
        with pytest.raises(QMoEError, match=f"a scale of expert 0 overflows {np.dtype(dtype)}"):
            quantize_experts(wide, bits=1, symmetric=False, scale_dtype=dtype)
