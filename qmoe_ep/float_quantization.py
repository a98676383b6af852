"""Quantizing experts to 4-bit and 8-bit floats, by rounding to the nearest value of the format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.errors import QMoEError
from qmoe_ep.formats import E4M3, E8M0, FLOAT_DTYPES, FORMATS, WeightFormat, element_values
from qmoe_ep.operator import is_block_size
from qmoe_ep.quantization import pack_codes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FloatQuantizedExperts", "quantize_float_experts"]

_LARGEST = {"e2m1": 6.0, "e4m3": 448.0}


@dataclass(frozen=True, slots=True)
class FloatQuantizedExperts:
    """Experts as the operator takes them, raw.

    Attributes
    ----------
    packed : uint8 [E, N, K/2] of 4-bit floats, float8_e4m3fn [E, N, K]
    scales : of the format's dtype, per block of a row [E, N, K/B], per square block [E, ceil(N/B), ceil(K/B)]; None
        where there is one global scale only
    global_scale : float32 [E]; None where there is none
    quant_type, block_size : the format; block_size 0 is none
    """

    packed: NDArray[Any]
    scales: NDArray[Any] | None
    global_scale: NDArray[np.float32] | None
    quant_type: str
    block_size: int


def quantize_float_experts(
    weights: NDArray[Any],
    *,
    quant_type: str = "fp4",
    block_size: int | None = None,
    scale_dtype: np.dtype[Any] | type[np.generic] = np.float32,
) -> FloatQuantizedExperts:
    """Quantize float experts to a format of small floats.

    A block's scale maps its largest magnitude to the largest value of the format; of fp4 it is the power of two next
    above, so that nothing is cut. The global scale of fp4 is 1, that of nvfp4 lets the largest block's scale be the
    largest float8_e4m3fn, that of fp8 without blocks maps the expert's largest magnitude.

    Parameters
    ----------
    weights : float [E, N, K], finite
    quant_type : "fp4", "nvfp4" or "fp8"; the weights of "wfp4afp8" are those of "fp4"
    block_size : of fp8 only: a power of two of at least 16, or 0 or None for one global scale per expert
    scale_dtype : of fp8 with blocks: float32, float16 or bfloat16

    Raises
    ------
    QMoEError : an argument is out of range, K isn't a multiple of the format's block, or a weight isn't finite.
    """
    form = FORMATS.get(quant_type)
    if form is None or form.element == "integer":
        names = ", ".join(name for name, f in FORMATS.items() if f.element != "integer")
        raise QMoEError(f"quant_type must be one of {names}, got {quant_type!r}; integers: quantize_experts")
    if weights.ndim != 3 or 0 in weights.shape:
        raise QMoEError(f"weights: expected non-empty [E, N, K], got shape {list(weights.shape)}")
    if np.dtype(scale_dtype) not in FLOAT_DTYPES:
        raise QMoEError(f"scale_dtype must be float32, float16 or bfloat16, got {np.dtype(scale_dtype)}")
    size = form.block_size or _own_block(block_size)
    if form.block_size and block_size not in (None, 0, -1, form.block_size):
        raise QMoEError(f"block_size must be {form.block_size} for {quant_type}, got {block_size}; leave it out")
    if form.block_size and weights.shape[2] % size:
        raise QMoEError(f"weights: K = {weights.shape[2]} is no multiple of {size}, the block of {quant_type}; pad it")
    with np.errstate(over="ignore"):
        values = np.asarray(weights, np.float32)
    if not np.isfinite(values).all():
        raise QMoEError("weights: a NaN or infinity in float32; only finite weights can be quantized")
    if form.square_blocks:
        return _eight_bits(values, form, size, np.dtype(scale_dtype))
    return _four_bits(values, form)


def _own_block(block_size: int | None) -> int:
    size = block_size if block_size is not None and block_size > 0 else 0
    if size and not is_block_size(size):
        raise QMoEError(f"block_size must be a power of two of at least 16, or 0 for a global scale, got {size}")
    return size


def _four_bits(values: NDArray[np.float32], form: WeightFormat) -> FloatQuantizedExperts:
    experts, out, inner = values.shape
    blocks = values.reshape(experts, out, inner // form.block_size, form.block_size)
    needed = np.abs(blocks).max(axis=3) / _LARGEST["e2m1"]
    given = np.ones(experts, np.float32)
    if form.scale_dtypes[0] == E8M0:
        exponent = np.ceil(np.log2(np.where(needed > 0, needed, 1)))
        scales = (np.clip(exponent, -127, 127) + 127).astype(np.uint8).view(E8M0)
    else:
        if form.global_scale == "always":
            largest = needed.reshape(experts, -1).max(axis=1)
            given = np.where(largest > 0, largest / np.float32(_LARGEST["e4m3"]), 1).astype(np.float32)
        scales = (needed / given[:, None, None]).astype(form.scale_dtypes[0])
    steps = scales.astype(np.float32) * given[:, None, None]
    codes = _nearest_e2m1(np.divide(blocks, steps[..., None], out=np.zeros_like(blocks), where=steps[..., None] > 0))
    packed = pack_codes(codes.reshape(values.shape), bits=4)
    shared = given if form.global_scale == "always" else None
    return FloatQuantizedExperts(packed, scales, shared, form.name, form.block_size)


def _nearest_e2m1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of the nearest values; of two as near, the one with an even code, as rounding of floats has it."""
    table = element_values(np.arange(8, dtype=np.uint8), "e2m1", np.float32)
    middles = (table[:-1] + table[1:]) / 2
    magnitudes = np.abs(values)
    below, above = np.searchsorted(middles, magnitudes, "left"), np.searchsorted(middles, magnitudes, "right")
    codes = np.where(below % 2 == 0, below, above).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(3))


def _eight_bits(
    values: NDArray[np.float32], form: WeightFormat, size: int, scale_dtype: np.dtype[Any]
) -> FloatQuantizedExperts:
    experts, out, inner = values.shape
    if not size:
        largest = np.abs(values).reshape(experts, -1).max(axis=1)
        given = np.where(largest > 0, largest / np.float32(_LARGEST["e4m3"]), 1).astype(np.float32)
        return FloatQuantizedExperts((values / given[:, None, None]).astype(E4M3), None, given, form.name, 0)
    rows, columns = -(-out // size), -(-inner // size)
    padded = np.zeros((experts, rows * size, columns * size), np.float32)
    padded[:, :out, :inner] = values
    tiles = padded.reshape(experts, rows, size, columns, size)
    largest = np.abs(tiles).max(axis=(2, 4))
    with np.errstate(over="ignore"):
        scales = np.where(largest > 0, largest / np.float32(_LARGEST["e4m3"]), 1).astype(scale_dtype)
    steps = scales.astype(np.float32)
    if not np.isfinite(steps).all():
        raise QMoEError(f"weights: a scale overflows {scale_dtype}; use a wider one or smaller weights")
    # A scale that was rounded down would let the largest weight overflow, which has no code.
    quotients = np.divide(
        tiles, steps[:, :, None, :, None], out=np.zeros_like(tiles), where=steps[:, :, None, :, None] > 0
    )
    codes = np.clip(quotients, -_LARGEST["e4m3"], _LARGEST["e4m3"]).reshape(padded.shape)[:, :out, :inner].astype(E4M3)
    return FloatQuantizedExperts(codes, scales, None, form.name, size)
