"""Stored models and pieces of models, for tests of model files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from problems import Recipe, build

from qmoe_ep.onnx import LoadedModel, load_model

__all__ = [
    "OPSETS",
    "STORED",
    "Arrays",
    "external_tensor",
    "moe_graph",
    "one_tensor",
    "set_entry",
    "stored_arrays",
    "value",
    "with_location",
]

MODELS = Path(__file__).parent / "data" / "models"
STORED = {path.stem[:2]: path for path in MODELS.rglob("*.onnx")}
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
Arrays = dict[str, np.ndarray[Any, Any]]


def stored_arrays(path: Path, kind: str) -> Arrays:
    with np.load(path.with_suffix(f".{kind}.npz"), allow_pickle=False) as data:
        return dict(data)


def with_location(path: Path, change: Callable[[TensorProto], None]) -> LoadedModel:
    """The model after ``change`` to its first initializer."""
    proto = onnx.load(path, load_external_data=False)
    change(proto.graph.initializer[0])
    path.write_bytes(proto.SerializeToString())
    return load_model(path)


def set_entry(key: str, value: str) -> Callable[[TensorProto], None]:
    def change(tensor: TensorProto) -> None:
        kept = {e.key: e.value for e in tensor.external_data} | {key: value}
        del tensor.external_data[:]
        for name, text in kept.items():
            tensor.external_data.add(key=name, value=text)

    return change


def external_tensor(path: Path, array: np.ndarray[Any, Any], **entries: object) -> TensorProto:
    """Write an array to a file and refer to it as a tensor of the same name."""
    path.write_bytes(array.tobytes())
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=path.stem, data_type=kind, dims=array.shape, data_location=TensorProto.EXTERNAL)
    for key, entry in {"location": path.name, **entries}.items():
        tensor.external_data.add(key=key, value=str(entry))
    return tensor


def one_tensor(path: Path, tensor: TensorProto) -> LoadedModel:
    graph = helper.make_graph([], "g", [], [helper.make_tensor_value_info("w", 1, None)], [tensor])
    return LoadedModel(path, helper.make_model(graph))


def moe_graph(recipe: Recipe) -> tuple[Any, onnx.NodeProto, list[TensorProto]]:
    """A problem, its node, and its weights as initializers."""
    problem = build(recipe)
    node = problem.node_proto()
    tensors = [
        numpy_helper.from_array(np.ascontiguousarray(array), node.input[index])
        for index, array in enumerate(problem.inputs)
        if index >= 2 and array is not None and index != 14
    ]
    return problem, node, tensors


def value(name: str, array: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
