"""One QMoE node on the CPU.

Routes of all rows are computed first. Tokens are grouped by expert; each selected expert is expanded
once per call, its tokens run as one matrix product, and the results land in a table with one line per
route, which is summed per row in slot order. So the result doesn't depend on how tokens are grouped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from qmoe_ep.activation import activate
from qmoe_ep.call import CallDescription, check_constants, describe_call, merge_operands
from qmoe_ep.cpu.experts import ExpertWeights, ResidentExperts
from qmoe_ep.errors import QMoEError
from qmoe_ep.operator import INPUT_NAMES, ROUTER_WEIGHTS, Layout, QMoENode, check_claim
from qmoe_ep.routing import route

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from qmoe_ep.telemetry import RouteTelemetry

__all__ = ["CpuKernel"]

Signature: TypeAlias = tuple[tuple[tuple[int, ...], Any] | None, ...]
_MAX_SIGNATURES = 64


class CpuKernel:
    """Executes one node; made by :meth:`CpuExecutionProvider.create_kernel`.

    Calls of one kernel are serialised by its lock; different kernels run at the same time.

    Attributes
    ----------
    node, node_id : what it executes, and the embedder's number for it
    telemetry : the route telemetry producer, which successful calls are counted by; None without
    """

    def __init__(
        self,
        node: QMoENode,
        node_id: int,
        initializers: Mapping[int, NDArray[Any]],
        weights_layout: Layout | None,
    ) -> None:
        check_claim(node, weights_layout)
        check_constants(node, initializers, weights_layout=weights_layout)
        self.node = node
        self.node_id = node_id
        self.weights_layout = weights_layout
        self.telemetry: RouteTelemetry | None = None
        self._constants = dict(initializers)
        self._calls: OrderedDict[Signature, CallDescription] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *inputs: NDArray[Any] | None) -> NDArray[Any]:
        """Execute and return a new output array; operands as in :meth:`execute`."""
        if not inputs or inputs[0] is None:
            raise QMoEError(f"{INPUT_NAMES[0]} (input 0) is required but absent")
        _check_arrays(inputs)
        output = np.empty(inputs[0].shape, inputs[0].dtype)
        self.execute(inputs, [output])
        return output

    def execute(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        valid_rows: int | NDArray[Any] | None = None,
    ) -> None:
        """Execute the node; ``outputs[0]`` is written only if everything succeeded.

        Parameters
        ----------
        inputs : arrays in ONNX order, strided ones welcome; ``None`` for absent ones and for those
            given as initializers
        outputs : one array of the shape and dtype of input 0
        valid_rows : rows from this one on are neither computed nor counted, and their output is left
            as it is

        Raises
        ------
        QMoEError
            Naming the operand, what was expected and what came.
        """
        _check_arrays(inputs)
        operands = merge_operands(self._constants, inputs)
        with self._lock:
            call = self._describe(operands)
            output = _checked_output(call, outputs)
            rows = _valid_rows(call, valid_rows)
            if rows:
                computed, chosen = self._compute(call, operands, rows)
                _write_rows(output, computed)
                if self.telemetry is not None:
                    self.telemetry.add_call(chosen, call.experts.num_experts)

    def _describe(self, operands: Sequence[NDArray[Any] | None]) -> CallDescription:
        signature = tuple(None if o is None else (o.shape, o.dtype) for o in operands)
        if (call := self._calls.get(signature)) is not None:
            self._calls.move_to_end(signature)
            return call
        call = describe_call(self.node, operands, weights_layout=self.weights_layout)
        self._calls[signature] = call
        if len(self._calls) > _MAX_SIGNATURES:
            self._calls.popitem(last=False)
        return call

    def _compute(
        self, call: CallDescription, operands: Sequence[Any], rows: int
    ) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Of the first ``rows`` rows: the output, float32 [rows, H], and the selected experts, integers [rows, k]."""
        experts = call.experts
        x = operands[0].reshape(call.rows, experts.hidden_size)[:rows].astype(np.float32)
        router_weights = operands[ROUTER_WEIGHTS]
        chosen, weights = route(
            operands[1].reshape(call.rows, experts.num_experts)[:rows],
            None if router_weights is None else router_weights[:rows],
            top_k=call.top_k,
            normalize=bool(self.node.normalize_routing_weights),
        )
        source = ResidentExperts(call, operands)
        contributions = np.empty((rows, call.top_k, experts.hidden_size), np.float32)
        with np.errstate(all="ignore"):
            for expert in np.unique(chosen):
                tokens, slots = np.nonzero(chosen == expert)
                contributions[tokens, slots] = _run_expert(call, source.load(int(expert)), x[tokens])
            output = np.zeros((rows, experts.hidden_size), np.float32)
            for slot in range(call.top_k):
                output += weights[:, slot, None].astype(np.float32) * contributions[:, slot]
        return output, chosen


def _run_expert(call: CallDescription, expert: ExpertWeights, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """W2·activation(W1·x + b1) + b2 of one expert for its tokens, float32 [tokens, H]."""
    fc1 = expert.fc1(x)
    gate, up = fc1, None
    if call.experts.gating == "interleaved":
        gate, up = fc1[:, 0::2], fc1[:, 1::2]
    elif call.experts.gating == "halves":
        gate, up = fc1[:, : call.experts.inter_size], fc1[:, call.experts.inter_size :]
    elif expert.fc3 is not None:
        up = expert.fc3(x)
    return expert.fc2(activate(call.node, gate, up))


def _check_arrays(inputs: Sequence[object]) -> None:
    for index, operand in enumerate(inputs):
        if operand is not None and not isinstance(operand, np.ndarray):
            name = INPUT_NAMES[index] if index < len(INPUT_NAMES) else f"input {index}"
            raise QMoEError(f"{name}: expected a NumPy array, got {type(operand).__name__}; convert it")


def _checked_output(call: CallDescription, outputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if len(outputs) != 1:
        raise QMoEError(f"outputs: expected exactly 1 array, got {len(outputs)}")
    output = outputs[0]
    if not isinstance(output, np.ndarray):
        raise QMoEError(f"output: expected a NumPy array, got {type(output).__name__}; allocate it like the input")
    if output.shape != call.input_shape or output.dtype != call.dtype:
        raise QMoEError(
            f"output: expected {call.dtype} {list(call.input_shape)} as input 0, "
            f"got {output.dtype} {list(output.shape)}; allocate it like the input"
        )
    if not output.flags.writeable:
        raise QMoEError("output: the array is read-only; give a writable one")
    return output


def _valid_rows(call: CallDescription, valid_rows: int | NDArray[Any] | None) -> int:
    if valid_rows is None:
        return call.rows
    array = np.asarray(valid_rows)
    if array.size != 1 or array.dtype.kind not in "iu":
        raise QMoEError(f"valid_rows: expected one integer, got {array.dtype} of shape {list(array.shape)}")
    return min(max(int(array.reshape(())), 0), call.rows)


def _write_rows(output: NDArray[Any], computed: NDArray[np.float32]) -> None:
    """Round the leading rows to the output's dtype, which may be strided and of rank 2 or 3."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = computed.astype(output.dtype)
    if output.ndim == 2:
        output[: rounded.shape[0]] = rounded
        return
    sequence = output.shape[1]
    for batch in range(-(-rounded.shape[0] // sequence)):
        part = rounded[batch * sequence : (batch + 1) * sequence]
        output[batch, : part.shape[0]] = part
