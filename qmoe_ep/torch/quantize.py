"""Quantizing experts where they are: the rules of :func:`qmoe_ep.quantize_experts` on tensors of any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qmoe_ep.errors import QMoEError
from qmoe_ep.operator import is_block_size
from qmoe_ep.quantization import INTEGER_FORMATS, IntegerFormat

__all__ = ["TorchQuantizedExperts", "quantize_experts"]

_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class TorchQuantizedExperts:
    """Experts as the operator takes them; shapes as in :class:`qmoe_ep.QuantizedExperts`."""

    packed: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    bits: int
    block_size: int


def quantize_experts(
    weights: torch.Tensor,
    *,
    bits: int = 4,
    block_size: int | None = 32,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
) -> TorchQuantizedExperts:
    """Quantize float experts by rounding to nearest, with the very codes and scales of the NumPy function.

    Parameters
    ----------
    weights : float [E, N, K], finite, of any strides; one expert at a time is copied
    bits : 1, 2, 3, 4 or 8
    block_size : power of two ≥ 16 that divides K; 0, −1 or None for one scale per row
    symmetric : without stored zero points
    scale_dtype : float32, float16 or bfloat16; codes are chosen for the rounded scale

    Raises
    ------
    QMoEError
        If an argument is out of range, a weight isn't finite, or a scale overflows its dtype.
    """
    if bits not in INTEGER_FORMATS:
        raise QMoEError(f"bits must be one of {', '.join(map(str, INTEGER_FORMATS))}, got {bits!r}")
    if scale_dtype not in _SCALE_DTYPES:
        raise QMoEError(f"scale_dtype must be float32, float16 or bfloat16, got {scale_dtype}")
    if weights.ndim != 3 or 0 in weights.shape or not weights.is_floating_point():
        raise QMoEError(f"weights: expected non-empty float [E, N, K], got {weights.dtype} {list(weights.shape)}")
    fmt, size = INTEGER_FORMATS[bits], _block(block_size, weights.shape[2])
    packed, scales, points = [], [], []
    finite = torch.ones((), dtype=torch.bool, device=weights.device)
    with torch.no_grad():
        for expert in weights:
            codes, scale, zero, good = _quantize(expert.float(), fmt, size, scale_dtype, symmetric=symmetric)
            packed.append(_pack(codes, fmt))
            scales.append(scale if size else scale[:, 0])
            points.append(_pack(zero if size else zero[:, 0], fmt))
            finite &= good
        # One look at the end, so that a device isn't waited for at every expert.
        if not bool(finite):
            raise QMoEError(
                f"weights: an expert holds a NaN or infinity in float32, or a scale overflows {scale_dtype}; only "
                "finite weights can be quantized, with a scale_dtype wide enough"
            )
        zero_points = None if symmetric else torch.stack(points)
        return TorchQuantizedExperts(torch.stack(packed), torch.stack(scales), zero_points, bits, size)


def _block(block_size: int | None, in_features: int) -> int:
    size = block_size if block_size is not None and block_size > 0 else 0
    if size and not is_block_size(size):
        raise QMoEError(f"block_size must be a power of two of at least 16, or 0 for row-wise, got {size}")
    if size and in_features % size:
        raise QMoEError(f"block_size = {size} doesn't divide the input features K = {in_features}; use one that does")
    return size


def _quantize(
    weights: torch.Tensor, fmt: IntegerFormat, size: int, scale_dtype: torch.dtype, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], scales [N, blocks], zero points uint8 [N, blocks] of f32 [N, K]; whether all is finite."""
    out, k = weights.shape
    values = weights.reshape(out, k // size if size else 1, -1)
    low, high = values.amin(2).clamp(max=0).double(), values.amax(2).clamp(min=0).double()
    zero = torch.full_like(low, fmt.default_zero_point)
    below, above = fmt.default_zero_point, fmt.levels - 1 - fmt.default_zero_point
    if not symmetric:
        scale = (high - low) / (fmt.levels - 1)
        zero = torch.round(-low / torch.where(scale == 0, 1, scale)).clamp(0, fmt.levels - 1)
    elif above == 0:
        scale = torch.where(-low >= high, -low, -high)
    else:
        upright, flipped = torch.maximum(high / above, -low / below), torch.maximum(-low / above, high / below)
        scale = torch.where(upright <= flipped, upright, -flipped)
    scale = torch.where(scale == 0, 1, scale).float().to(scale_dtype)
    steps = scale.float()[:, :, None]
    # A scale that underflowed in its dtype stands for a block of (nearly) zeros.
    codes = torch.where(steps != 0, values / steps, 0).round_()
    codes = (codes + zero.float()[:, :, None]).clamp_(0, fmt.levels - 1)
    good = torch.isfinite(values).all() & torch.isfinite(scale).all()
    return codes.to(torch.uint8).reshape(out, k), scale, zero.to(torch.uint8), good


def _pack(codes: torch.Tensor, fmt: IntegerFormat) -> torch.Tensor:
    """Bit stream of uint8 codes [..., K], least-significant bits first: uint8 [..., ceil(K·bits/8)]."""
    if fmt.bits == 8:
        return codes
    count = codes.shape[-1]
    groups = -(-count // fmt.group_codes)
    padded = torch.nn.functional.pad(codes, (0, groups * fmt.group_codes - count))
    grouped = padded.reshape(*codes.shape[:-1], groups, fmt.group_codes).int()
    word = grouped[..., 0]
    for j in range(1, fmt.group_codes):
        word = word | grouped[..., j] << (fmt.bits * j)
    packed = torch.stack([word >> (8 * byte) & 255 for byte in range(fmt.group_bytes)], -1).to(torch.uint8)
    return packed.reshape(*codes.shape[:-1], -1)[..., : -(-count * fmt.bits // 8)]
