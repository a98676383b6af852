"""Integer weight formats: packing, layouts, quantizing and dequantizing experts.

A format is a value, :class:`IntegerFormat`; everything that depends on the width of a code follows
from it. A row's codes form a bit stream, least-significant bits first, padded to a byte:
value = (code − zero point)·scale, where the zero point is 2^(bits−1) unless one is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from qmoe_ep.call import MAX_BYTES
from qmoe_ep.errors import QMoEError
from qmoe_ep.formats import FLOAT_DTYPES, element_values, packed_bytes, scale_values
from qmoe_ep.operator import SM80_ROW_TILE, is_block_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from qmoe_ep.formats import ExpertMatrix, MatrixLayout

__all__ = [
    "INTEGER_FORMATS",
    "IntegerFormat",
    "QuantizedExperts",
    "columns_to_raw",
    "dequantize_experts",
    "dequantize_matrix",
    "expand_matrix",
    "pack_codes",
    "quantize_experts",
    "raw_to_columns",
    "raw_to_sm80",
    "raw_weights",
    "sm80_to_raw",
    "unpack_codes",
]

Bytes: TypeAlias = "NDArray[np.uint8]"
Floats: TypeAlias = "NDArray[Any]"
_CHUNK_BYTES = 1 << 20  # temporaries of pack and unpack stay in the second-level cache


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Codes of ``bits`` bits; ``group_codes`` of them fill ``group_bytes`` whole bytes."""

    bits: int
    group_codes: int
    group_bytes: int

    @property
    def levels(self) -> int:
        """Number of distinct codes."""
        return 1 << self.bits

    @property
    def default_zero_point(self) -> int:
        """The zero point where none is stored."""
        return 1 << (self.bits - 1)

    @property
    def word(self) -> np.dtype[Any]:
        """A little-endian unsigned type that holds one group."""
        return np.dtype("<u1") if self.group_bytes == 1 else np.dtype("<u4")


INTEGER_FORMATS = {
    1: IntegerFormat(1, 8, 1),
    2: IntegerFormat(2, 4, 1),
    3: IntegerFormat(3, 8, 3),
    4: IntegerFormat(4, 2, 1),
    8: IntegerFormat(8, 1, 1),
}


def _format(bits: int) -> IntegerFormat:
    if bits not in INTEGER_FORMATS:
        raise QMoEError(f"bits must be one of {', '.join(map(str, INTEGER_FORMATS))}, got {bits!r}")
    return INTEGER_FORMATS[bits]


def _row_chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    return (slice(first, first + step) for first in range(0, rows, step))


def pack_codes(codes: NDArray[Any], *, bits: int) -> Bytes:
    """Pack codes along the last axis.

    Parameters
    ----------
    codes : integers [..., K], each in [0, 2^bits)
    bits : 1, 2, 3, 4 or 8

    Returns
    -------
    uint8 [..., ceil(K·bits/8)], padding bits zero

    Raises
    ------
    QMoEError
        If a code doesn't fit into ``bits`` bits.
    """
    fmt = _format(bits)
    if codes.ndim == 0 or codes.dtype.kind not in "iu":
        raise QMoEError(f"codes: expected integers [..., K], got {codes.dtype} {list(codes.shape)}")
    if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < fmt.levels:
        raise QMoEError(f"codes must be in [0, {fmt.levels}) for {bits} bits, got [{codes.min()}, {codes.max()}]")
    count = codes.shape[-1]
    groups = -(-count // fmt.group_codes)
    flat = codes.reshape(math.prod(codes.shape[:-1]), count)
    packed = np.empty((flat.shape[0], packed_bytes(count, bits)), np.uint8)
    for rows in _row_chunks(flat.shape[0], count):
        chunk = flat[rows]
        word = np.zeros((chunk.shape[0], groups), fmt.word)
        for j in range(fmt.group_codes):
            part = chunk[:, j :: fmt.group_codes].astype(fmt.word)
            word[:, : part.shape[1]] |= part << np.array(bits * j, fmt.word)
        grouped = word.view(np.uint8).reshape(word.shape[0], groups, word.itemsize)[:, :, : fmt.group_bytes]
        packed[rows] = grouped.reshape(word.shape[0], -1)[:, : packed.shape[1]]
    return packed.reshape(*codes.shape[:-1], packed.shape[1])


def unpack_codes(packed: Bytes, *, bits: int, count: int) -> Bytes:
    """The inverse of :func:`pack_codes`: uint8 [..., ceil(count·bits/8)] to uint8 codes [..., count].

    Padding bits are ignored, whatever they hold.
    """
    fmt = _format(bits)
    row_bytes = packed_bytes(count, bits)
    if packed.dtype != np.uint8 or packed.shape[-1:] != (row_bytes,):
        raise QMoEError(
            f"packed: expected uint8 with last dimension {row_bytes} for {count} codes of {bits} bits, "
            f"got {packed.dtype} {list(packed.shape)}"
        )
    groups = -(-count // fmt.group_codes)
    flat = packed.reshape(math.prod(packed.shape[:-1]), row_bytes)
    codes = np.empty((flat.shape[0], groups * fmt.group_codes), np.uint8)
    for rows in _row_chunks(flat.shape[0], row_bytes):
        word = _words(flat[rows], fmt, groups)
        for j in range(fmt.group_codes):
            shifted = word >> np.array(bits * j, fmt.word)
            np.bitwise_and(shifted, fmt.levels - 1, out=codes[rows, j :: fmt.group_codes], casting="unsafe")
    return codes[:, :count].reshape(*packed.shape[:-1], count)


def _words(packed: Bytes, fmt: IntegerFormat, groups: int) -> NDArray[Any]:
    """One word per group of a 2-D chunk."""
    if fmt.group_bytes == 1:
        return packed
    padded = np.zeros((packed.shape[0], groups, fmt.group_bytes), np.uint8)
    padded.reshape(packed.shape[0], -1)[:, : packed.shape[1]] = packed
    word = np.zeros((packed.shape[0], groups), fmt.word)
    for byte in range(fmt.group_bytes):
        word |= padded[:, :, byte].astype(fmt.word) << np.array(8 * byte, fmt.word)
    return word


# --- layouts ---------------------------------------------------------------------------------------


def raw_to_sm80(packed: Bytes, *, bits: int) -> Bytes:
    """Convert raw packed weights to the layout that ONNX Runtime's CUDA provider stores ("SM80").

    Parameters
    ----------
    packed : uint8 [E, out, K·bits/8] (or without E), raw
    bits : 4 (out % 4 = 0, K % 64 = 0) or 2 (out % 8 = 0, K % 64 = 0)

    Returns
    -------
    uint8 of the same shape. The codes are ordered [out/4][K/64][4 rows][2 s][8 r][4 c] with
    k = 64·tile + 32·s + 8·c + r for 4 bits, [out/8][K/64][8 rows][8 r][8 c] with
    k = 64·tile + 8·c + r for 2 bits.

    Raises
    ------
    QMoEError
        For a width or dimensions that the layout doesn't have.
    """
    return _convert_layout(packed, bits, to_sm80=True)


def sm80_to_raw(packed: Bytes, *, bits: int) -> Bytes:
    """The inverse of :func:`raw_to_sm80`, with the same shapes and rules."""
    return _convert_layout(packed, bits, to_sm80=False)


def _convert_layout(packed: Bytes, bits: int, *, to_sm80: bool) -> Bytes:
    if bits not in SM80_ROW_TILE:
        raise QMoEError(f"the SM80 layout exists for 2 and 4 bits, got {bits}; keep these weights raw")
    if packed.dtype != np.uint8 or packed.ndim not in (2, 3):
        raise QMoEError(f"packed: expected uint8 [E, out, K·{bits}/8], got {packed.dtype} {list(packed.shape)}")
    out, k, tile = packed.shape[-2], packed.shape[-1] * 8 // bits, SM80_ROW_TILE[bits]
    if out % tile or k % 64:
        raise QMoEError(
            f"packed: the SM80 layout needs output features in multiples of {tile} and input features in "
            f"multiples of 64, got {out} × {k}; keep these weights raw"
        )
    # Raw k splits into (tile, s, c, r); SM80 stores (tile, row, s, r, c). Two bits have a single s.
    s, c = (2, 4) if bits == 4 else (1, 8)
    raw_dims, sm80_dims = (out // tile, tile, k // 64, s, c, 8), (out // tile, k // 64, tile, s, 8, c)
    converted = np.empty_like(packed, order="C")
    experts = converted if converted.ndim == 3 else converted[None]
    for target, source in zip(experts, packed if packed.ndim == 3 else packed[None], strict=True):
        codes = unpack_codes(source, bits=bits, count=k)
        if to_sm80:
            moved = codes.reshape(raw_dims).transpose(0, 2, 1, 3, 5, 4)
        else:
            moved = codes.reshape(sm80_dims).transpose(0, 2, 1, 3, 5, 4)
        target[:] = pack_codes(moved.reshape(out, k), bits=bits)
    return converted


def raw_to_columns(packed: Bytes) -> Bytes:
    """Rows of 4-bit codes, uint8 [..., out, K/2], to columns, uint8 [..., K, out/2], even features in low nibbles."""
    return _transposed(packed)


def columns_to_raw(packed: Bytes) -> Bytes:
    """The inverse of :func:`raw_to_columns`."""
    return _transposed(packed)


def _transposed(packed: Bytes) -> Bytes:
    if packed.dtype != np.uint8 or packed.ndim not in (2, 3) or packed.shape[-2] % 2:
        raise QMoEError(
            f"packed: expected uint8 [E, rows, bytes] with an even number of rows, got {packed.dtype} "
            f"{list(packed.shape)}"
        )
    codes = unpack_codes(packed, bits=4, count=2 * packed.shape[-1])
    return pack_codes(np.swapaxes(codes, -1, -2), bits=4)


def raw_weights(packed: Bytes, layout: MatrixLayout, *, bits: int) -> Bytes:
    """Packed weights of any layout in the raw one; what is raw is given back as it is."""
    if layout == "columns":
        return columns_to_raw(packed)
    return sm80_to_raw(packed, bits=bits) if layout == "sm80" else packed


# --- values ----------------------------------------------------------------------------------------


def dequantize_matrix(
    packed: Bytes,
    scales: Floats,
    zero_points: Bytes | None,
    *,
    bits: int,
    block_size: int,
    in_features: int,
    layout: Literal["raw", "sm80"] = "raw",
    dtype: np.dtype[Any] | type[np.floating[Any]] = np.float32,
) -> Floats:
    """Expand one expert's matrix: the decode rule of the integer formats.

    Parameters
    ----------
    packed : uint8 [out, ceil(K·bits/8)]
    scales : float [out, K/block_size]; row-wise [out] or [out, 1]
    zero_points : packed uint8 [out, ceil(blocks·bits/8)]; row-wise [ceil(out·bits/8)]; or None
    bits, block_size, in_features : the format; block_size 0 is row-wise
    layout : how ``packed`` is ordered
    dtype : of the result, float32 (each value rounded once) or float64 (exact)

    Returns
    -------
    ``dtype`` [out, in_features], (code − zero point)·scale
    """
    fmt = _format(bits)
    out = packed.shape[0]
    if layout == "sm80":
        packed = sm80_to_raw(packed, bits=bits)
    blocks = in_features // block_size if block_size else 1
    values = unpack_codes(packed, bits=bits, count=in_features).astype(dtype).reshape(out, blocks, -1)
    if zero_points is None:
        values -= np.array(fmt.default_zero_point, dtype)
    elif block_size:
        values -= unpack_codes(zero_points, bits=bits, count=blocks).astype(dtype)[:, :, None]
    else:
        values -= unpack_codes(zero_points, bits=bits, count=out).astype(dtype)[:, None, None]
    values *= scales.astype(dtype).reshape(out, blocks, 1)
    return values.reshape(out, in_features)


def expand_matrix(
    matrix: ExpertMatrix,
    packed: NDArray[Any],
    scales: Floats | None,
    zero_points: NDArray[Any] | None,
    global_scale: float | None,
    *,
    dtype: np.dtype[Any] | type[np.floating[Any]] = np.float32,
) -> Floats:
    """Expand one expert's matrix of any format: ``dtype`` [out, in], element(code)·scale·global scale.

    Parameters
    ----------
    packed, scales, zero_points : of one expert, shaped as `matrix` says; None for what it hasn't
    global_scale : its float32 scale, or None
    dtype : of the result, float32 (each factor and the result rounded) or float64 (exact)
    """
    packed = raw_weights(packed.view(np.uint8), matrix.layout, bits=matrix.bits)
    if matrix.plain and scales is not None:
        return dequantize_matrix(
            packed,
            scales,
            zero_points,
            bits=matrix.bits,
            block_size=matrix.block_size,
            in_features=matrix.in_features,
            dtype=dtype,
        )
    codes = unpack_codes(packed, bits=matrix.bits, count=matrix.in_features)
    if matrix.form.element != "integer":
        values = element_values(codes, matrix.form.element, dtype)
    else:
        values = codes.astype(dtype)
        if zero_points is not None:
            values -= _spread(matrix, zero_points.astype(dtype))
    factor = np.array(1 if global_scale is None else global_scale, dtype)
    if scales is not None:
        factor = _spread(matrix, scale_values(scales, matrix.form, dtype) * factor)
    values *= factor
    return values


def _spread(matrix: ExpertMatrix, values: Floats) -> Floats:
    """One number per block as one per weight, [out, in] or what broadcasts to it."""
    if not matrix.block_size:
        return values.reshape(matrix.out_features, 1)
    spread = np.repeat(values, matrix.block_size, axis=1)[:, : matrix.in_features]
    return np.repeat(spread, matrix.block_rows, axis=0)[: matrix.out_features]


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """Experts as the operator takes them.

    Attributes
    ----------
    packed : uint8 [E, N, ceil(K·bits/8)], raw layout
    scales : float [E, N, K/block_size], row-wise [E, N]
    zero_points : packed uint8 [E, N, ceil(blocks·bits/8)], row-wise [E, ceil(N·bits/8)]; None if symmetric
    bits, block_size : the format; block_size 0 is row-wise
    """

    packed: Bytes
    scales: Floats
    zero_points: Bytes | None
    bits: int
    block_size: int


def _block(block_size: int | None, in_features: int) -> int:
    size = block_size if block_size is not None and block_size > 0 else 0
    if size and not is_block_size(size):
        raise QMoEError(f"block_size must be a power of two of at least 16, or 0 for row-wise, got {size}")
    if size and in_features % size:
        raise QMoEError(f"block_size = {size} doesn't divide the input features K = {in_features}; use one that does")
    return size


def quantize_experts(
    weights: Floats,
    *,
    bits: int = 4,
    block_size: int | None = 32,
    symmetric: bool = True,
    scale_dtype: np.dtype[Any] | type[np.generic] = np.float32,
) -> QuantizedExperts:
    """Quantize float experts by rounding to nearest.

    Symmetric: one signed scale per block, the smallest in magnitude with which every value lies between
    the lowest and the highest code, so within half a step of one (with 1 bit, whose codes mean −scale
    and 0, the value of largest magnitude is kept). Asymmetric: the block's range, widened to contain 0,
    is spread over all codes.

    Parameters
    ----------
    weights : float [E, N, K], finite
    bits : 1, 2, 3, 4 or 8
    block_size : power of two ≥ 16 that divides K; 0, −1 or None for one scale per row
    symmetric : without stored zero points
    scale_dtype : float32, float16 or bfloat16; codes are chosen for the rounded scale

    Raises
    ------
    QMoEError
        If an argument is out of range or a weight isn't finite.
    """
    fmt = _format(bits)
    if np.dtype(scale_dtype) not in FLOAT_DTYPES:
        raise QMoEError(f"scale_dtype must be float32, float16 or bfloat16, got {np.dtype(scale_dtype)}")
    if weights.ndim != 3 or 0 in weights.shape:
        raise QMoEError(f"weights: expected non-empty [E, N, K], got shape {list(weights.shape)}")
    experts, out, k = weights.shape
    size = _block(block_size, k)
    blocks = k // size if size else 1
    packed = np.empty((experts, out, packed_bytes(k, bits)), np.uint8)
    scales = np.empty((experts, out, blocks), scale_dtype)
    points = np.empty((experts, out, blocks), np.uint8)
    for e in range(experts):
        with np.errstate(over="ignore"):
            values = np.asarray(weights[e], np.float32).reshape(out, blocks, -1)
        if not np.isfinite(values).all():
            raise QMoEError(
                f"weights: expert {e} holds a NaN or infinity in float32; only finite weights can be quantized"
            )
        with np.errstate(over="ignore"):
            scale, zero = _block_scales(values, fmt, symmetric=symmetric)
            scales[e] = scale.astype(scale_dtype)
        if not np.isfinite(scales[e].astype(np.float32)).all():
            raise QMoEError(
                f"weights: a scale of expert {e} overflows {np.dtype(scale_dtype)}; use a wider one or smaller weights"
            )
        points[e] = zero
        packed[e] = pack_codes(_nearest(values, scales[e], zero, fmt).reshape(out, k), bits=bits)
    zero_points = None
    if not symmetric:
        zero_points = pack_codes(points if size else points[:, :, 0], bits=bits)
    return QuantizedExperts(packed, scales if size else scales[:, :, 0], zero_points, bits, size)


def _block_scales(values: Floats, fmt: IntegerFormat, *, symmetric: bool) -> tuple[Floats, NDArray[np.uint8]]:
    """Scale f32 and zero point uint8 [out, blocks] of f32 values [out, blocks, B]."""
    low = np.minimum(values.min(axis=2), 0).astype(np.float64)
    high = np.maximum(values.max(axis=2), 0).astype(np.float64)
    zero = np.full(low.shape, fmt.default_zero_point, np.uint8)
    below, above = fmt.default_zero_point, fmt.levels - 1 - fmt.default_zero_point
    if not symmetric:
        scale = (high - low) / (fmt.levels - 1)
        safe = np.where(scale == 0, 1, scale)
        zero = np.clip(np.rint(-low / safe), 0, fmt.levels - 1).astype(np.uint8)
    elif above == 0:
        scale = np.where(-low >= high, -low, -high)
    else:
        upright, flipped = np.maximum(high / above, -low / below), np.maximum(-low / above, high / below)
        scale = np.where(upright <= flipped, upright, -flipped)
    return np.where(scale == 0, 1, scale).astype(np.float32), zero


def _nearest(values: Floats, scales: Floats, zero: NDArray[np.uint8], fmt: IntegerFormat) -> Bytes:
    steps = scales.astype(np.float32)[:, :, None]
    # A scale that underflowed in its dtype stands for a block of (nearly) zeros.
    codes = np.rint(np.divide(values, steps, out=np.zeros_like(values), where=steps != 0))
    codes += zero[:, :, None]
    return np.clip(codes, 0, fmt.levels - 1, out=codes).astype(np.uint8)


def dequantize_experts(
    packed: Bytes,
    scales: Floats,
    zero_points: Bytes | None = None,
    *,
    bits: int = 4,
    block_size: int | None = 32,
    in_features: int | None = None,
    layout: Literal["raw", "sm80"] = "raw",
) -> NDArray[np.float32]:
    """Expand experts to float32 [E, N, K]; shapes as in :class:`QuantizedExperts`.

    ``in_features`` is needed only when rows are padded, so that K doesn't follow from the bytes.

    Raises
    ------
    QMoEError
        If shapes don't belong together.
    """
    _format(bits)
    if packed.dtype != np.uint8 or packed.ndim != 3 or 0 in packed.shape:
        raise QMoEError(f"packed: expected non-empty uint8 [E, N, K·{bits}/8], got {packed.dtype} {list(packed.shape)}")
    experts, out, row_bytes = packed.shape
    k = in_features if in_features is not None else row_bytes * 8 // bits
    size = _block(block_size, k)
    blocks = k // size if size else 1
    if packed_bytes(k, bits) != row_bytes:
        raise QMoEError(f"packed: rows of {row_bytes} bytes don't hold K = {k} codes of {bits} bits; check in_features")
    if experts * out * k * 4 > MAX_BYTES:
        raise QMoEError(f"packed: {experts} × {out} × {k} float32 values exceed 2^63-1 bytes")
    if scales.shape != (experts, out, blocks) and (size or scales.shape != (experts, out)):
        expected = [experts, out, blocks] if size else [experts, out]
        raise QMoEError(f"scales: expected shape {expected}, got {list(scales.shape)}")
    points = (out, packed_bytes(blocks, bits)) if size else (packed_bytes(out, bits),)
    if zero_points is not None and zero_points.shape != (experts, *points):
        raise QMoEError(f"zero_points: expected shape {[experts, *points]}, got {list(zero_points.shape)}")
    values = np.empty((experts, out, k), np.float32)
    for e in range(experts):
        values[e] = dequantize_matrix(
            packed[e],
            scales[e],
            None if zero_points is None else zero_points[e],
            bits=bits,
            block_size=size,
            in_features=k,
            layout=layout,
        )
    return values
