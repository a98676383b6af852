"""The activations of the operator, in the precision of their argument (float32 or float64 arrays)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from qmoe_ep.formats import Gating
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

    Gated: gate' = min(gate, limit), up' = clamp(up, ±limit), activated = gate'·σ(alpha·gate')·(up' + beta); with
    ``swiglu_limit_after_activation``, min(gate·σ(alpha·gate), limit)·(up' + beta). geglu: gelu(gate)·up, without any
    of these scalars. A NaN stays a NaN.
    """
    if node.activation_type == "geglu" and up is not None:
        return gelu(fc1) * up
    if up is not None:
        limit = np.inf if node.swiglu_limit is None else node.swiglu_limit
        up = np.clip(up, -limit, limit) + node.activation_beta
        if node.swiglu_limit_after_activation:
            limited: Floats = np.minimum(fc1 * sigmoid(node.activation_alpha * fc1), limit) * up
            return limited
        fc1 = np.minimum(fc1, limit)
        return fc1 * sigmoid(node.activation_alpha * fc1) * up
    ungated: dict[str, Callable[[Floats], Floats]] = {
        "relu": lambda x: np.maximum(x, 0),
        "gelu": gelu,
        "silu": lambda x: x * sigmoid(x),
        "identity": lambda x: x,
        "relu2": lambda x: np.square(np.maximum(x, 0)),
    }
    return ungated[node.activation_type](fc1)
