"""A model's QMoE nodes as commands see them: attributes, constant operands, and what a call would be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.call import FLOAT_DTYPES, CallDescription, Experts, OperandType, describe_experts
from qmoe_ep.cli.providers import float_types, value_type
from qmoe_ep.errors import QMoEError
from qmoe_ep.operator import ROUTER_WEIGHTS, Layout, QMoENode, unsupported_reason

if TYPE_CHECKING:
    from qmoe_ep.onnx import LoadedModel

__all__ = ["ModelNode", "model_nodes"]


@dataclass(frozen=True, slots=True)
class ModelNode:
    """One QMoE node.

    Attributes
    ----------
    node_id : its position among the nodes of the graph
    operands : types of the operands that hold weights, by input index
    dtypes : of input, router_probs and router_weights, by input index, as far as the graph tells
    experts : None where ``reason`` says why there is no description
    """

    node_id: int
    node: QMoENode
    operands: dict[int, OperandType]
    dtypes: dict[int, np.dtype[Any]]
    experts: Experts | None
    reason: str | None

    def call(self, rows: int, dtype: np.dtype[Any] | None = None) -> CallDescription:
        """Describe a call of so many rows as the CUDA provider plans it, with weights converted to the raw layout.

        An unknown type of the input is that of FC1's scales.

        Raises
        ------
        QMoEError : the node is declined.
        """
        if self.experts is None:
            raise QMoEError(f"node {self.node.name or self.node_id!r}: {self.reason}")
        known = dtype or self.dtypes.get(0) or self.experts.fc1.scale_dtype
        routing = self.dtypes.get(ROUTER_WEIGHTS, known) if self.node.has_input(ROUTER_WEIGHTS) else None
        return CallDescription(
            node=self.node,
            experts=_as_raw(self.experts),
            rows=rows,
            top_k=int(self.node.k),
            input_shape=(rows, self.experts.hidden_size),
            dtype=known,
            router_dtype=self.dtypes.get(1, known),
            router_weights_dtype=routing,
        )


def _as_raw(experts: Experts) -> Experts:
    fc1, fc2 = replace(experts.fc1, layout="raw"), replace(experts.fc2, layout="raw")
    return replace(experts, fc1=fc1, fc2=fc2, fc3=experts.fc3 and replace(experts.fc3, layout="raw"))


def model_nodes(loaded: LoadedModel, weights_layout: Layout | None = None) -> Iterator[ModelNode]:
    """Describe each QMoE node of a model; weights stay on the disk."""
    types = float_types(loaded.proto.graph)
    values = {value.name: value for value in (*loaded.proto.graph.input, *loaded.proto.graph.value_info)}
    for entry in loaded.qmoe_nodes():
        node = QMoENode.from_onnx(entry.proto)
        dtypes = {
            index: types[name]
            for index, name in enumerate(entry.proto.input)
            if index in (0, 1, ROUTER_WEIGHTS) and types.get(name) in FLOAT_DTYPES
        }
        plain = ModelNode(entry.node_id, node, {}, dtypes, None, None)
        if (reason := unsupported_reason(node, weights_layout)) is not None:
            yield replace(plain, reason=reason)
            continue
        try:
            operands = _operand_types(loaded, entry.proto.input, values)
            experts = describe_experts(node, operands, weights_layout=weights_layout)
        except QMoEError as error:
            yield replace(plain, reason=str(error))
        else:
            yield replace(plain, operands=operands, experts=experts)


def _operand_types(loaded: LoadedModel, names: Any, values: dict[str, Any]) -> dict[int, OperandType]:
    """Types of the operands that hold weights: of initializers, or of inputs with a fixed shape."""
    constants, operands = set(loaded.initializer_names), {}
    for index, name in enumerate(names):
        if index < 2 or index == ROUTER_WEIGHTS or not name:
            continue
        if name in constants:
            array = loaded.tensor(name)
            operands[index] = OperandType(tuple(array.shape), array.dtype)
            continue
        dtype, shape = value_type(values[name]) if name in values else (np.dtype(object), None)
        if shape is None or None in shape:
            raise QMoEError(f"{name!r} is computed by the graph, so its shape is known only at a call")
        operands[index] = OperandType(tuple(size or 0 for size in shape), dtype)
    return operands
