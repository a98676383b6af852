"""Selection of experts and their weights, exactly as the operator defines them.

Used by the reference and by the CPU provider; the device has its own implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["logit_margins", "order_keys", "route", "select_experts"]

SPARSE_MIXER_MARGIN = 0.02
"""How far below the best, relative to the larger magnitude, a logit still counts."""


def order_keys(logits: NDArray[Any]) -> NDArray[np.int64]:
    """Integers that sort like the logits under IEEE 754 total order, from their own bits at their own width.

    No conversion takes place, which could change a NaN. −NaN < −inf < … < −0 < +0 < … < +inf < +NaN.
    """
    width = logits.dtype.itemsize * 8
    bits = np.ascontiguousarray(logits).view(f"u{logits.dtype.itemsize}").astype(np.int64)
    sign = 1 << (width - 1)
    return np.where(bits & sign, sign - 1 - (bits ^ sign), bits | sign)


def select_experts(logits: NDArray[Any], top_k: int) -> NDArray[np.int32]:
    """The ``top_k`` experts of each row in descending order, the lowest index first among equal keys.

    Parameters
    ----------
    logits : float32, float16 or bfloat16 [rows, E]

    Returns
    -------
    int32 [rows, top_k]
    """
    order = np.argsort(-order_keys(logits), axis=1, kind="stable")
    return order[:, :top_k].astype(np.int32)


def logit_margins(logits: NDArray[Any], selected: NDArray[Any]) -> NDArray[np.float32]:
    """By how much each row's choice was decided: the smallest selected logit less the largest rejected one.

    Parameters
    ----------
    logits : float32, float16 or bfloat16 [rows, E]
    selected : integers [rows, k], as :func:`select_experts` has them

    Returns
    -------
    float32 [rows], infinite where no expert is rejected
    """
    k = selected.shape[1]
    if k == logits.shape[1]:
        return np.full(len(logits), np.inf, np.float32)
    pair = np.stack([selected[:, -1], select_experts(logits, k + 1)[:, k]], axis=1).astype(np.int64)
    values = np.take_along_axis(logits, pair, axis=1).astype(np.float32)
    with np.errstate(all="ignore"):
        margins: NDArray[np.float32] = values[:, 0] - values[:, 1]
    return margins


def route(
    logits: NDArray[Any],
    router_weights: NDArray[Any] | None,
    *,
    top_k: int,
    normalize: bool,
    sparse_mixer: bool = False,
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Route each row: experts int32 [rows, top_k] and their weights float64 [rows, top_k].

    Without ``router_weights`` [rows, E]: softmax over all experts, or over the selected ones with
    ``normalize``. With them: their values at the selected experts, with ``normalize`` divided by
    their float32 sum in slot order (all zero if that is 0). A NaN or +inf among the logits of the
    softmax, or nothing but −inf, makes the row's weights NaN, as the arithmetic says. With ``sparse_mixer`` (two
    experts), see :func:`_sparse_mixer`.
    """
    experts = select_experts(logits, top_k)
    if sparse_mixer:
        return experts, _sparse_mixer(logits, experts)
    with np.errstate(all="ignore"):
        if router_weights is not None:
            picked = np.take_along_axis(router_weights, experts.astype(np.int64), axis=1)
            weights = picked.astype(np.float64)
            return experts, _by_float32_sum(weights) if normalize else weights
        values = logits.astype(np.float64)
        chosen = np.take_along_axis(values, experts.astype(np.int64), axis=1)
        summed = chosen if normalize else values
        peak = summed.max(axis=1, keepdims=True)
        return experts, np.exp(chosen - peak) / np.exp(summed - peak).sum(axis=1, keepdims=True)


def _by_float32_sum(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    total = np.zeros(weights.shape[0], np.float32)
    for slot in range(weights.shape[1]):
        total += weights[:, slot].astype(np.float32)
    divisor = np.where(total == 0, 1, total).astype(np.float64)[:, None]
    return np.where(total[:, None] == 0, 0.0, weights / divisor)


def _sparse_mixer(logits: NDArray[Any], experts: NDArray[np.int32]) -> NDArray[np.float64]:
    """Weights of the two selected experts, each 1/Σ exp(x_e − m) over the experts near it.

    m is the expert's own logit; near are those with m − x_e ≤ 0.02·max(|x_e|, m), in float32. For the second, the
    first expert is left out.
    """
    values = logits.astype(np.float32)
    weights = np.empty(experts.shape, np.float64)
    left = np.ones(values.shape, np.bool_)
    with np.errstate(all="ignore"):
        for slot in range(experts.shape[1]):
            own = experts[:, slot, None].astype(np.int64)
            peak = np.take_along_axis(values, own, axis=1)
            reach = np.float32(SPARSE_MIXER_MARGIN) * np.maximum(np.abs(values), peak)
            near = left & ~(peak - values > reach)
            terms = np.exp(values.astype(np.float64) - peak.astype(np.float64))
            weights[:, slot] = 1 / np.where(near, terms, 0).sum(axis=1)
            np.put_along_axis(left, own, False, axis=1)
    return weights
