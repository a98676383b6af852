"""The operator in float64 NumPy, written to be read: the definition of a right result.

Weights are dequantized exactly, activations are exact to float64, and each row's experts are
summed in slot order. Only the sum of ``router_weights`` is float32, because the operator says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.activation import activate, split_fused
from qmoe_ep.call import CallDescription, ExpertMatrix, describe_call
from qmoe_ep.operator import GLOBAL_SCALES, INPUT_NAMES, MATRIX_INPUTS, ROUTER_WEIGHTS, Layout, QMoENode
from qmoe_ep.quantization import expand_matrix
from qmoe_ep.routing import route

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["qmoe", "row_errors", "row_magnitudes"]

Array = np.ndarray[Any, np.dtype[np.float64]]


def qmoe(
    node: QMoENode, inputs: Sequence[NDArray[Any] | None], *, weights_layout: Layout | None = None
) -> NDArray[np.float64]:
    """Execute a node.

    Parameters
    ----------
    node : the attributes
    inputs : operands in ONNX order, ``None`` for absent ones; router tensors, scales and biases may
        each be float32, float16 or bfloat16
    weights_layout : override of what ``weights_prepacked`` says, "raw" or "sm80"

    Returns
    -------
    float64, the shape of input 0, not rounded to its dtype

    Raises
    ------
    QMoEError
        As :func:`qmoe_ep.call.describe_call`.
    """
    call = describe_call(node, inputs, weights_layout=weights_layout)
    return _evaluate(call, _padded(inputs), lambda value: value)


def row_magnitudes(
    node: QMoENode, inputs: Sequence[NDArray[Any] | None], *, weights_layout: Layout | None = None
) -> NDArray[np.float64]:
    """L2 norm of each output row computed with absolute values everywhere, float64 [rows].

    Errors are judged against it, so that cancellation by signed scales or weights doesn't count.
    """
    call = describe_call(node, inputs, weights_layout=weights_layout)
    rows = _evaluate(call, _padded(inputs), np.abs)
    norms: Array = np.linalg.norm(rows.reshape(call.rows, call.experts.hidden_size), axis=1)
    return norms


def row_errors(actual: NDArray[Any], expected: NDArray[np.float64], magnitudes: NDArray[np.float64]) -> Array:
    """Relative L2 error per row, float64 [rows]; infinite where non-finite entries differ in class.

    ``actual`` has the shape of ``expected``; a value beyond the largest finite one of its dtype is
    expected to be an infinity.
    """
    shape = (magnitudes.shape[0], expected.shape[-1])
    got = actual.astype(np.float64).reshape(shape)
    with np.errstate(over="ignore"):
        want = expected.astype(actual.dtype).astype(np.float64).reshape(shape)
    infinite = np.isinf(got) | np.isinf(want)
    same_class = (np.isnan(got) == np.isnan(want)) & (~infinite | (got == want))
    finite = np.isfinite(got) & np.isfinite(want)
    difference = np.subtract(got, expected.reshape(shape), out=np.zeros_like(got), where=finite)
    scale = np.where(np.isfinite(magnitudes) & (magnitudes > 0), magnitudes, 1)
    return np.where(same_class.all(axis=1), np.linalg.norm(difference, axis=1) / scale, np.inf)


def _padded(inputs: Sequence[Any]) -> Sequence[Any]:
    return [*inputs, *[None] * (len(INPUT_NAMES) - len(inputs))]


def _evaluate(call: CallDescription, operands: Sequence[Any], signs: Callable[[Any], Any]) -> Array:
    """The operator with ``signs`` (identity or absolute value) applied to every factor."""
    experts = call.experts
    node = replace(
        call.node,
        activation_alpha=float(signs(call.node.activation_alpha)),
        activation_beta=float(signs(call.node.activation_beta)),
    )
    x = signs(operands[0].astype(np.float64)).reshape(call.rows, experts.hidden_size)
    chosen, weights = route(
        operands[1].reshape(call.rows, experts.num_experts),
        operands[ROUTER_WEIGHTS],
        top_k=call.top_k,
        normalize=bool(node.normalize_routing_weights),
        sparse_mixer=bool(node.use_sparse_mixer),
    )
    contributions = np.zeros((call.rows, call.top_k, experts.hidden_size))
    with np.errstate(all="ignore"):
        for expert in np.unique(chosen):
            rows, slots = np.nonzero(chosen == expert)
            fc1 = _linear(experts.fc1, operands, expert, x[rows], signs)
            gate, up = split_fused(experts.gating, fc1)
            if experts.fc3 is not None:
                up = _linear(experts.fc3, operands, expert, x[rows], signs)
            activated = signs(activate(node, gate, up))
            fc2 = _linear(experts.fc2, operands, expert, activated, signs)
            contributions[rows, slots] = signs(weights[rows, slots, None]) * fc2
        output = np.zeros((call.rows, experts.hidden_size))
        for slot in range(call.top_k):
            output += contributions[:, slot]
    return output.reshape(call.input_shape)


def _linear(matrix: ExpertMatrix, operands: Sequence[Any], expert: int, x: Array, signs: Callable[[Any], Any]) -> Array:
    own: list[Any] = [None if operands[i] is None else operands[i][expert] for i in MATRIX_INPUTS[matrix.name]]
    weights, scales, bias, zero_points = own
    given = operands[GLOBAL_SCALES[matrix.name]]
    global_scale = None if given is None else float(given[expert])
    expanded = expand_matrix(matrix, weights, scales, zero_points, global_scale, dtype=np.float64)
    y: Array = x @ signs(expanded).T
    return y if bias is None else y + signs(bias.astype(np.float64))
