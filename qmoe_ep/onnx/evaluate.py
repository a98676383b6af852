"""Whole models through the evaluator of onnx, with QMoE by a provider of this package."""

from __future__ import annotations

import os
from abc import ABCMeta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from qmoe_ep.errors import QMoEError
from qmoe_ep.onnx.model import (
    LoadedModel,
    QMoENodeEntry,
    describe,
    graph_inputs,
    load_model,
    names_used,
    stored_tensors,
    walk_graphs,
    walk_nodes,
)
from qmoe_ep.onnx.tensors import is_external
from qmoe_ep.operator import DOMAIN, OP_TYPE, ROUTER_WEIGHTS, Layout, QMoENode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["Provider", "Session", "reference_ops", "run_model"]

_MARK = "qmoe_ep kernel "
_Arrays: TypeAlias = "dict[int, tuple[onnx.TensorProto, NDArray[Any]]]"
"""What was read, by the id of its proto, which is kept alive with it so that the id stays its own."""


class Provider(Protocol):
    """What a session needs of a provider: a kernel per node, called with operands in ONNX order."""

    @property
    def name(self) -> str: ...

    def create_kernel(
        self,
        node: QMoENode | onnx.NodeProto,
        node_id: int = 0,
        initializers: Mapping[int, Any] | None = None,
        weights_layout: Layout | None = None,
    ) -> Any: ...


class _Runner:
    """Calls one kernel with host arrays, whatever memory its provider works in."""

    def __init__(self, provider: Any, kernel: Any) -> None:
        self._provider = provider
        self._kernel = kernel
        self._resident: dict[int, tuple[NDArray[Any], Any]] = {}

    def __call__(self, inputs: Sequence[NDArray[Any] | None]) -> NDArray[Any]:
        arrays = [None if array is None else np.asarray(array) for array in inputs]
        if not hasattr(self._provider, "to_device"):
            result: NDArray[Any] = self._kernel(*arrays)
            return result
        operands = [None if a is None else self._device(i, a) for i, a in enumerate(arrays)]
        output = self._kernel(*operands)
        self._provider.synchronize()
        host: NDArray[Any] = output.numpy()
        return host

    def _device(self, index: int, array: NDArray[Any]) -> Any:
        """A device copy; weights that nobody can write to are uploaded once."""
        known = self._resident.get(index)
        if known is not None and known[0] is array:
            return known[1]
        tensor = self._provider.to_device(np.ascontiguousarray(array))
        if index >= 2 and index != ROUTER_WEIGHTS and not array.flags.writeable:
            self._resident[index] = (array, tensor)
        return tensor


def reference_ops(provider: Provider, weights_layout: Layout | None = None) -> type[OpRun]:
    """The operator for an evaluator of onnx: ``ReferenceEvaluator(model, new_ops=[reference_ops(provider)])``.

    Weights come with each call, as the evaluator holds them; a :class:`Session` gives them to the kernels once.

    Parameters
    ----------
    provider : whose kernels execute the nodes, one kernel per node for the evaluator's life
    weights_layout : override of what ``weights_prepacked`` says, "raw" or "sm80"

    Returns
    -------
    a class, which is also an iterable of itself, so that the brackets may be left out; making an evaluator raises
    :class:`QMoEError` if a node is declined
    """
    return _operator_class(provider, weights_layout, {})


class _OnlyItself(ABCMeta):
    """Classes that can stand where a list of classes is expected."""

    def __iter__(cls) -> Iterator[type]:
        yield cls


def _operator_class(provider: Provider, layout: Layout | None, runners: Mapping[str, _Runner]) -> type[OpRun]:
    class Operator(OpRun, metaclass=_OnlyItself):
        op_domain = DOMAIN
        _count = len(runners)

        def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any], schema: Any = None) -> None:
            super().__init__(onnx_node, run_params, schema)
            known = runners.get(onnx_node.doc_string)
            self._runner = self._create() if known is None else known

        def _run(self, *inputs: NDArray[Any] | None, **_: Any) -> tuple[NDArray[Any]]:
            return (self._runner(inputs),)

        def _create(self) -> _Runner:
            node_id = type(self)._count
            type(self)._count += 1
            kernel = _create_kernel(provider, QMoENode.from_onnx(self.onnx_node), node_id, {}, layout)
            return _Runner(provider, kernel)

    # The evaluator finds an operator by the name of its class.
    Operator.__name__ = Operator.__qualname__ = OP_TYPE
    return Operator


def _create_kernel(
    provider: Provider, node: QMoENode, node_id: int, constants: Mapping[int, Any], layout: Layout | None
) -> Any:
    try:
        return provider.create_kernel(node, node_id=node_id, initializers=constants, weights_layout=layout)
    except QMoEError as error:
        raise QMoEError(f"node {node.name or node_id!r}: {error}") from error


class Session:
    """A model on a provider; kernels and the weights that they hold live as long as the session.

    Parameters
    ----------
    model : a loaded model, or the path of a file
    provider : that runs the QMoE nodes; the evaluator of onnx runs the others
    weights_layout : override of what ``weights_prepacked`` says, "raw" or "sm80"

    Raises
    ------
    QMoEError : a node is declined, or a tensor can't be read.
    """

    def __init__(
        self,
        model: LoadedModel | str | os.PathLike[str],
        provider: Provider,
        weights_layout: Layout | None = None,
    ) -> None:
        self.model = model if isinstance(model, LoadedModel) else load_model(model)
        runners: dict[str, _Runner] = {}
        self._bound: set[str] = set()
        entries = self.model.qmoe_nodes()
        arrays: _Arrays = {}
        for entry in entries:
            constants = {index: self._array(tensor, arrays) for index, tensor in entry.constants.items()}
            self._bound.update(tensor.name for tensor in entry.constants.values())
            kernel = _create_kernel(provider, entry.node, entry.node_id, constants, weights_layout)
            runners[f"{_MARK}{entry.node_id}"] = _Runner(provider, kernel)
        graph_only = self._without_weights(entries)
        used = names_used(graph_only.graph)
        # Plain arrays: what operators make of a np.memmap would be one, too.
        self._constants = {
            tensor.name: np.asarray(self._array(tensor, arrays))
            for tensor in self.model.proto.graph.initializer
            if tensor.name in used
        }
        operator = _operator_class(provider, weights_layout, runners)
        self._evaluator = ReferenceEvaluator(graph_only, new_ops=[operator])

    def run(
        self, inputs: Mapping[str, NDArray[Any]], output_names: Sequence[str] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Run the model.

        Parameters
        ----------
        inputs : arrays by the names of the graph's inputs
        output_names : which outputs; all without

        Returns
        -------
        arrays by name

        Raises
        ------
        QMoEError : names, dtypes or shapes don't fit the graph's, or operands don't fit a QMoE node.
        """
        self._check_inputs(inputs)
        known = [value.name for value in self.model.proto.graph.output]
        wanted = known if output_names is None else list(output_names)
        if unknown := [name for name in wanted if name not in known]:
            raise QMoEError(f"unknown outputs {_list(unknown)}; the model's outputs are {_list(known)}")
        results = self._evaluator.run(wanted, {**self._constants, **inputs})
        return dict(zip(wanted, results, strict=True))

    def _array(self, tensor: onnx.TensorProto, arrays: _Arrays) -> NDArray[Any]:
        """Each tensor once, whichever nodes share it."""
        if id(tensor) not in arrays:
            arrays[id(tensor)] = tensor, self.model.read(tensor)
        return arrays[id(tensor)][1]

    def _without_weights(self, entries: Sequence[QMoENodeEntry]) -> onnx.ModelProto:
        """A copy of the model that holds no initializer of the main graph and no weight of a QMoE node."""
        proto, graph = self.model.proto, self.model.proto.graph
        copy = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
        copy.graph.name = graph.name
        for part in ("node", "input", "output", "value_info", "sparse_initializer"):
            getattr(copy.graph, part).extend(getattr(graph, part))
        nodes = [n for n, _ in walk_nodes(copy.graph) if (n.domain, n.op_type) == (DOMAIN, OP_TYPE)]
        for node, entry in zip(nodes, entries, strict=True):
            node.doc_string = f"{_MARK}{entry.node_id}"
            for index in entry.constants:
                node.input[index] = ""
        used = names_used(copy.graph)
        for inner in walk_graphs(copy.graph):
            kept = [tensor for tensor in inner.initializer if tensor.name in used]
            del inner.initializer[:]
            inner.initializer.extend(kept)
        for tensor in stored_tensors(copy):
            if is_external(tensor):
                tensor.raw_data = self.model.read_external(tensor).tobytes()
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")
        return copy

    def _check_inputs(self, inputs: Mapping[str, object]) -> None:
        values = {value.name: describe(value) for value in self.model.proto.graph.input}
        required = [name for name, _, _ in graph_inputs(self.model)]
        missing = [name for name in required if name not in inputs]
        unknown = [name for name in inputs if name not in values]
        if missing or unknown:
            problems = [f"missing inputs {_list(missing)}"] * bool(missing)
            problems += [f"unknown inputs {_list(unknown)}"] * bool(unknown)
            raise QMoEError(f"{' and '.join(problems)}; the model's inputs are {_list(required)}")
        if held := [name for name in inputs if name in self._bound]:
            raise QMoEError(
                f"input {held[0]!r} is an initializer that a QMoE node holds as a constant; "
                "leave it out, or remove the initializer from the model"
            )
        for name, array in inputs.items():
            _check_value(name, array, values[name][1], values[name][2])


def _check_value(
    name: str, array: object, dtype: np.dtype[Any] | None, dims: Sequence[int | str | None] | None
) -> None:
    if dtype is None:
        return
    if not isinstance(array, np.ndarray):
        raise QMoEError(f"input {name!r}: expected a NumPy array, got {type(array).__name__}; convert it")
    if array.dtype != dtype:
        raise QMoEError(f"input {name!r}: expected {dtype}, got {array.dtype}; convert it")
    if dims is None:
        return
    fits = len(dims) == array.ndim
    if not fits or any(isinstance(d, int) and d != n for d, n in zip(dims, array.shape, strict=True)):
        words = ", ".join("?" if d is None else str(d) for d in dims)
        raise QMoEError(f"input {name!r}: expected shape [{words}], got {list(array.shape)}; reshape it")


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def run_model(
    model: LoadedModel | str | os.PathLike[str],
    inputs: Mapping[str, NDArray[Any]],
    provider: Provider,
    weights_layout: Layout | None = None,
    output_names: Sequence[str] | None = None,
) -> dict[str, NDArray[Any]]:
    """Run a model once; see :class:`Session`, which repeated runs are better done with."""
    return Session(model, provider, weights_layout).run(inputs, output_names)
