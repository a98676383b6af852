"""Model files and what is in them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx
import onnx.inliner
from google.protobuf.message import DecodeError

from qmoe_ep.errors import QMoEError
from qmoe_ep.onnx.tensors import external_bytes, numpy_dtype, read_tensor
from qmoe_ep.operator import DOMAIN, OP_TYPE, ROUTER_WEIGHTS, QMoENode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

__all__ = ["LoadedModel", "QMoENodeEntry", "Value", "graph_inputs", "graph_outputs", "load_model"]

Dims: TypeAlias = "list[int | str | None] | None"
Value: TypeAlias = "tuple[str, np.dtype[Any] | None, Dims]"
"""Name, dtype and dimensions of a graph's input or output. A symbolic dimension is its name, one that
is free is ``None``, as are the dtype of what isn't a tensor of numbers and dimensions of unknown rank."""

FLOAT_OP_TYPE = "MoE"
_PROTOBUF_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class QMoENodeEntry:
    """One QMoE node of a model.

    Attributes
    ----------
    node_id : running number of the QMoE nodes of the model
    proto, node : as stored, and its attributes
    constants : initializers by input index that a kernel can hold
    """

    node_id: int
    proto: onnx.NodeProto
    node: QMoENode
    constants: Mapping[int, onnx.TensorProto] = field(default_factory=dict, repr=False)


class LoadedModel:
    """A model file; made by :func:`load_model`.

    Attributes
    ----------
    path : of the file
    proto : the model, its external data not loaded
    """

    def __init__(self, path: Path, proto: onnx.ModelProto) -> None:
        self.path = path
        self.proto = proto
        self._stored: dict[str, onnx.TensorProto] = {}
        for graph in walk_graphs(proto.graph):
            for tensor in graph.initializer:
                self._stored.setdefault(tensor.name, tensor)
        self._arrays: dict[str, NDArray[Any]] = {}

    @property
    def initializer_names(self) -> tuple[str, ...]:
        """Names of the initializers of the graph and, after them, its subgraphs."""
        return tuple(self._stored)

    def tensor(self, name: str) -> NDArray[Any]:
        """An initializer as a read-only array; external data is a typed view of a ``np.memmap``.

        Raises
        ------
        QMoEError : no such initializer, or its data is missing, outside the model's folder or too short.
        """
        if name not in self._arrays:
            if name not in self._stored:
                raise QMoEError(f"{self.path}: no initializer is named {name!r}")
            self._arrays[name] = self.read(self._stored[name])
        return self._arrays[name]

    def read(self, tensor: onnx.TensorProto) -> NDArray[Any]:
        """The array of a tensor of this model, as :meth:`tensor`."""
        return self._located(read_tensor, tensor)

    def read_external(self, tensor: onnx.TensorProto) -> NDArray[np.uint8]:
        """The bytes of a tensor of this model that are in another file, mapped read-only."""
        return self._located(external_bytes, tensor)

    def _located(
        self, read: Callable[[onnx.TensorProto, Path], NDArray[Any]], tensor: onnx.TensorProto
    ) -> NDArray[Any]:
        try:
            return read(tensor, self.path.parent)
        except QMoEError as error:
            raise QMoEError(f"{self.path}: {error}") from error

    def qmoe_nodes(self) -> list[QMoENodeEntry]:
        """The QMoE nodes of the graph and its subgraphs, in the order of the file."""
        entries: list[QMoENodeEntry] = []
        for proto, scope in walk_nodes(self.proto.graph):
            if (proto.domain, proto.op_type) != (DOMAIN, OP_TYPE):
                continue
            constants = {
                index: scope[name]
                for index, name in enumerate(proto.input)
                if index >= 2 and index != ROUTER_WEIGHTS and name in scope
            }
            entries.append(QMoENodeEntry(len(entries), proto, QMoENode.from_onnx(proto), constants))
        return entries


def load_model(path: str | os.PathLike[str]) -> LoadedModel:
    """Read a model file without its external data.

    Raises
    ------
    QMoEError : the file is missing, not readable, larger than an ONNX file can be, or not a complete ONNX model.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise QMoEError(f"{path}: not a file, so no ONNX model; give the path of one")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _PROTOBUF_LIMIT:
                raise QMoEError(
                    f"{path}: {size} bytes, but an ONNX file has less than 2 GiB; store its weights as external data"
                )
            data = file.read()
    except OSError as error:
        raise QMoEError(f"{path}: the model can't be read: {error.strerror or error}") from error
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise QMoEError(
            f"{path}: not an ONNX model, or a truncated one ({size} bytes); copy or export it anew"
        ) from None
    if not proto.HasField("graph") or proto.ir_version < 1 or not proto.opset_import or not proto.graph.output:
        raise QMoEError(
            f"{path}: not a complete ONNX model ({size} bytes): it needs a graph with outputs, an IR version and "
            "imported operator sets; copy or export it anew"
        )
    return LoadedModel(path, _inlined(path, proto))


def _inlined(path: Path, proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without its local functions if one of them holds experts.

    Only in the graph have they attributes and weights of their own; and the evaluator of onnx knows no
    added operators inside functions.
    """
    nodes = (node for function in proto.functions for node in function_nodes(function.node))
    if not any(node.domain == DOMAIN and node.op_type in (OP_TYPE, FLOAT_OP_TYPE) for node in nodes):
        return proto
    try:
        return onnx.inliner.inline_local_functions(proto)
    except Exception as error:
        raise QMoEError(f"{path}: the local functions that hold experts can't be inlined: {error}") from error


# --- walking graphs --------------------------------------------------------------------------------


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def function_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes and all nodes in their subgraphs."""
    for node in nodes:
        yield node
        for inner in subgraphs(node):
            yield from function_nodes(inner.node)


def walk_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all graphs in it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from walk_graphs(inner)


def walk_nodes(
    graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto] | None = None
) -> Iterator[tuple[onnx.NodeProto, Mapping[str, onnx.TensorProto]]]:
    """Every node of a graph and its subgraphs, with the initializers that it sees by name."""
    scope = dict(outer or {})
    if outer is not None:
        computed = {value.name for value in graph.input} | {name for node in graph.node for name in node.output}
        scope = {name: tensor for name, tensor in scope.items() if name not in computed}
    scope.update({tensor.name: tensor for tensor in graph.initializer})
    for node in graph.node:
        yield node, scope
        for inner in subgraphs(node):
            yield from walk_nodes(inner, scope)


def names_used(graph: onnx.GraphProto) -> set[str]:
    """Names that the outputs of a graph and its subgraphs and the inputs of their nodes refer to."""
    used: set[str] = set()
    for inner in walk_graphs(graph):
        used.update(value.name for value in inner.output)
        for node in inner.node:
            used.update(node.input)
    return used


def stored_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that a model stores: initializers and values of attributes, in subgraphs and local functions too."""
    yield from _tensors_of_graph(model.graph)
    for function in model.functions:
        yield from _tensors_of_attributes(function.attribute_proto)
        for node in function.node:
            yield from _tensors_of_attributes(node.attribute)


def _tensors_of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _parts(graph.sparse_initializer)
    for node in graph.node:
        yield from _tensors_of_attributes(node.attribute)


def _tensors_of_attributes(attributes: Iterable[onnx.AttributeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in attributes:
        if attribute.type == onnx.AttributeProto.TENSOR:
            yield attribute.t
        elif attribute.type == onnx.AttributeProto.GRAPH:
            yield from _tensors_of_graph(attribute.g)
        elif attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
            yield from _parts([attribute.sparse_tensor])
        yield from attribute.tensors
        yield from _parts(attribute.sparse_tensors)
        for graph in attribute.graphs:
            yield from _tensors_of_graph(graph)


def _parts(sparse: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for tensor in sparse:
        yield tensor.values
        yield tensor.indices


# --- inputs and outputs ----------------------------------------------------------------------------


def graph_inputs(model: LoadedModel) -> list[Value]:
    """Name, dtype and dimensions of the inputs that a run has to be given."""
    constants = {tensor.name for tensor in model.proto.graph.initializer}
    return [describe(value) for value in model.proto.graph.input if value.name not in constants]


def graph_outputs(model: LoadedModel) -> list[Value]:
    """Name, dtype and dimensions of the outputs."""
    return [describe(value) for value in model.proto.graph.output]


def describe(value: onnx.ValueInfoProto) -> Value:
    """A graph's input or output."""
    if not value.type.HasField("tensor_type"):
        return value.name, None, None
    tensor = value.type.tensor_type
    dims: Dims = None
    if tensor.HasField("shape"):
        dims = [int(d.dim_value) if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim]
    return value.name, numpy_dtype(tensor.elem_type), dims
