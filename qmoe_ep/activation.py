"""The activations of the operator, in the precision of their argument (float32 or float64 arrays)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from qmoe_ep.call import Gating
    from qmoe_ep.operator import QMoENode

__all__ = ["activate", "gelu", "sigmoid", "split_fused"]

Floats: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def sigmoid(x: Floats) -> Floats:
    """σ(x) = 1 / (1 + exp(−x))."""
    with np.errstate(over="ignore"):
        y: Floats = 1 / (1 + np.exp(-x))
    return y


def gelu(x: Floats) -> Floats:
    """The tanh form: 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), √(2/π) to double precision."""
    y: Floats = 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
    return y


def split_fused(gating: Gating, fc1: Floats) -> tuple[Floats, Floats | None]:
    """Gate and, where FC1 holds both, up of its features [rows, N1], as views."""
    if gating == "interleaved":
        return fc1[:, 0::2], fc1[:, 1::2]
    if gating == "halves":
        half = fc1.shape[1] // 2
        return fc1[:, :half], fc1[:, half:]
    return fc1, None


def activate(node: QMoENode, fc1: Floats, up: Floats | None) -> Floats:
    """Apply the node's activation to the gate (or only) features and, where there is one, the up half.

    Gated: gate' = min(gate, limit), up' = clamp(up, ±limit),
    activated = gate'·σ(alpha·gate')·(up' + beta). A NaN stays a NaN.
    """
    if up is not None:
        if node.swiglu_limit is not None:
            fc1 = np.minimum(fc1, node.swiglu_limit)
            up = np.clip(up, -node.swiglu_limit, node.swiglu_limit)
        return fc1 * sigmoid(node.activation_alpha * fc1) * (up + node.activation_beta)
    ungated: dict[str, Callable[[Floats], Floats]] = {
        "relu": lambda x: np.maximum(x, 0),
        "gelu": gelu,
        "silu": lambda x: x * sigmoid(x),
        "identity": lambda x: x,
    }
    return ungated[node.activation_type](fc1)
