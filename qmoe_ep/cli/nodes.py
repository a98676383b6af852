"""A model's QMoE nodes as commands see them: attributes, constant operands, and what a call would be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.call import FLOAT_DTYPES, CallDescription, Experts, OperandType, describe_experts
from qmoe_ep.errors import QMoEError
from qmoe_ep.operator import ROUTER_WEIGHTS, Layout, QMoENode, unsupported_reason

if TYPE_CHECKING:
    import onnx

    from qmoe_ep.formats import ExpertMatrix
    from qmoe_ep.onnx import LoadedModel, QMoENodeEntry

__all__ = ["ModelNode", "model_nodes"]


@dataclass(frozen=True, slots=True)
class ModelNode:
    """One QMoE node.

    Attributes
    ----------
    node_id : its number among the QMoE nodes of the model
    dtypes : of input, router_probs and router_weights, by input index, as far as the graph tells
    experts : None where ``reason`` says why there is no description
    """

    node_id: int
    node: QMoENode
    dtypes: dict[int, np.dtype[Any]]
    experts: Experts | None
    reason: str | None

    def call(self, rows: int, dtype: np.dtype[Any] | None = None) -> CallDescription:
        """Describe a call of so many rows as the CUDA provider plans it, with weights converted to the raw layout.

        An unknown type of the input is that of FC1's scales, or of its bias where no scales are of such a type.

        Raises
        ------
        QMoEError : the node is declined, or nothing tells the type of the input.
        """
        if self.experts is None:
            raise QMoEError(f"node {self.node.name or self.node_id!r}: {self.reason}")
        known = dtype or self.dtypes.get(0) or self._likely_dtype(self.experts.fc1)
        routing = self.dtypes.get(ROUTER_WEIGHTS, known) if self.node.has_input(ROUTER_WEIGHTS) else None
        return CallDescription(
            node=self.node,
            experts=self.experts.with_raw_layout(),
            rows=rows,
            top_k=int(self.node.k),
            input_shape=(rows, self.experts.hidden_size),
            dtype=known,
            router_dtype=self.dtypes.get(1, known),
            router_weights_dtype=routing,
        )

    def _likely_dtype(self, fc1: ExpertMatrix) -> np.dtype[Any]:
        if fc1.scaled and fc1.scale_dtype in FLOAT_DTYPES:
            return fc1.scale_dtype
        if fc1.bias_dtype is None:
            raise QMoEError(
                f"node {self.node.name or self.node_id!r}: neither the graph nor scales or biases tell the type of "
                "its input; pass it as --dtype"
            )
        return fc1.bias_dtype


def model_nodes(loaded: LoadedModel, weights_layout: Layout | None = None) -> Iterator[ModelNode]:
    """Describe each QMoE node of a model; weights stay on the disk."""
    types = _value_types(loaded.proto.graph)
    for entry in loaded.qmoe_nodes():
        dtypes = {
            index: types[name].dtype
            for index, name in enumerate(entry.proto.input)
            if index in (0, 1, ROUTER_WEIGHTS) and name in types and types[name].dtype in FLOAT_DTYPES
        }
        plain = ModelNode(entry.node_id, entry.node, dtypes, None, None)
        if (reason := unsupported_reason(entry.node, weights_layout)) is not None:
            yield replace(plain, reason=reason)
            continue
        try:
            operands = _operand_types(loaded, entry, types)
            experts = describe_experts(entry.node, operands, weights_layout=weights_layout)
        except QMoEError as error:
            yield replace(plain, reason=str(error))
        else:
            yield replace(plain, experts=experts)


def _value_types(graph: onnx.GraphProto) -> dict[str, OperandType]:
    """Types that a graph tells, by name; dimensions that aren't fixed are -1."""
    from onnx.helper import tensor_dtype_to_np_dtype

    types: dict[str, OperandType] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        try:
            dtype = np.dtype(tensor_dtype_to_np_dtype(tensor.elem_type))
        except (KeyError, TypeError, ValueError):
            continue
        dims = (d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
        types[value.name] = OperandType(tuple(dims), dtype)
    return types


def _operand_types(loaded: LoadedModel, entry: QMoENodeEntry, types: dict[str, OperandType]) -> dict[int, OperandType]:
    """Types of the operands that hold weights: of initializers, or of values with a fixed shape."""
    operands: dict[int, OperandType] = {}
    for index, name in enumerate(entry.proto.input):
        if index < 2 or index == ROUTER_WEIGHTS or not name:
            continue
        if index in entry.constants:
            array = loaded.read(entry.constants[index])
            operands[index] = OperandType(array.shape, array.dtype)
        elif name in types and -1 not in types[name].shape:
            operands[index] = types[name]
        else:
            raise QMoEError(f"{name!r} is computed by the graph, so its shape is known only at a call")
    return operands
