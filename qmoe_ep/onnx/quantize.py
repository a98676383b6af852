"""Float ``com.microsoft::MoE`` nodes of a model file to QMoE nodes.

Weights are read, quantized and written one tensor after the other, so the largest float tensor bounds
the memory; a file appears under its name only when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import onnx
from numpy.typing import NDArray

from qmoe_ep.call import FLOAT_DTYPES
from qmoe_ep.errors import QMoEError
from qmoe_ep.float_quantization import quantize_float_experts
from qmoe_ep.formats import FORMATS, WeightFormat
from qmoe_ep.onnx.model import (
    FLOAT_OP_TYPE,
    LoadedModel,
    load_model,
    names_used,
    stored_tensors,
    walk_graphs,
    walk_nodes,
)
from qmoe_ep.onnx.output import ModelWriter, check_target, keep_external
from qmoe_ep.onnx.tensors import is_external, numpy_dtype, tensor_shape
from qmoe_ep.operator import DOMAIN, GLOBAL_SCALES, MATRIX_INPUTS, OP_TYPE, unsupported_reason
from qmoe_ep.quantization import quantize_experts

__all__ = ["ConvertedNode", "quantize_model"]

Progress: TypeAlias = Callable[[int, int, str], Any]

_FLOAT_INPUTS = {"fc1": (2, 3), "fc2": (4, 5), "fc3": (6, 7)}
"""Operand indices of (weights, bias) per matrix of the float operator."""
_ATTRIBUTES = frozenset(
    {
        "activation_alpha",
        "activation_beta",
        "activation_type",
        "k",
        "normalize_routing_weights",
        "swiglu_fusion",
        "swiglu_limit",
        "use_sparse_mixer",
    }
)


@dataclass(frozen=True, slots=True)
class ConvertedNode:
    """A node that was quantized: its name and the names of its float weights."""

    name: str
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Format:
    quant_type: str
    bits: int
    block_size: int
    symmetric: bool

    @property
    def form(self) -> WeightFormat:
        return FORMATS[self.quant_type]

    @property
    def scaled(self) -> bool:
        return bool(not self.form.square_blocks or self.block_size)

    @property
    def has_zero_points(self) -> bool:
        return self.quant_type == "int" and not self.symmetric

    @property
    def has_global_scale(self) -> bool:
        return self.form.global_scale == "always" or not self.scaled


_Names: TypeAlias = "tuple[str, str, str, str]"
"""Of packed weights, scales, zero points and global scales."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One float node and the weights that it reads, by matrix."""

    proto: onnx.NodeProto
    weights: dict[str, onnx.TensorProto]


def quantize_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    bits: int = 4,
    block_size: int = 32,
    symmetric: bool = True,
    quant_type: str = "int",
    progress: Progress | None = None,
) -> list[ConvertedNode]:
    """Write a copy of a model whose float MoE nodes are QMoE nodes.

    Parameters
    ----------
    source : model file
    target : file to write; external data goes to one file next to it, named like it with ``.data`` added
    bits, block_size, symmetric : of integers, as for :func:`qmoe_ep.quantize_experts`; block size 0 is row-wise
    quant_type : "int", or a format of :func:`qmoe_ep.quantize_float_experts`, of which only fp8 heeds block_size
    progress : called with (tensors done, tensors in all, name of the one just done)

    Returns
    -------
    the converted nodes, in the order of the file

    Raises
    ------
    QMoEError : there is nothing to convert, a node can't be converted, or the target can't be written. Nothing is
        left of the target then, and a target that was there before is as it was.
    """
    source, target = Path(source), Path(target)
    loaded = load_model(source)
    check_target(loaded, source, target)
    if quant_type not in FORMATS:
        raise QMoEError(f"quant_type must be one of {', '.join(FORMATS)}, got {quant_type!r}")
    fmt = _Format(quant_type, bits, max(block_size, 0), symmetric)
    plans = _plans(loaded)
    if not plans:
        raise QMoEError(f"{source}: no {DOMAIN}::{FLOAT_OP_TYPE} node to quantize")
    replaced = {id(t): t for plan in plans for t in plan.weights.values()}
    names = _new_names(loaded.proto.graph, replaced.values())
    converted = [ConvertedNode(plan.proto.name, tuple(t.name for t in plan.weights.values())) for plan in plans]
    for plan in plans:
        if "fc3" in plan.weights and fmt.has_global_scale and quant_type in ("nvfp4", "fp8"):
            raise QMoEError(
                f"{source}: node {plan.proto.name!r}: FC1 and FC3 share a global scale, but {quant_type} makes one for "
                "each matrix; use fp4, or fp8 with a block size"
            )
        _convert_node(plan, names, fmt)
    dropped = set(replaced) & _unused(loaded.proto.graph)
    with ModelWriter(target) as writer:
        _write_tensors(loaded, replaced, names, dropped, fmt, writer, progress or (lambda *_: None))
        writer.commit(loaded.proto)
    return converted


# --- nodes -----------------------------------------------------------------------------------------


def _plans(loaded: LoadedModel) -> list[_Plan]:
    plans = []
    for proto, scope in walk_nodes(loaded.proto.graph):
        if (proto.domain, proto.op_type) != (DOMAIN, FLOAT_OP_TYPE):
            continue
        where = f"{loaded.path}: node {proto.name or proto.output[:1]!r}"
        if unknown := [a.name for a in proto.attribute if a.name not in _ATTRIBUTES]:
            raise QMoEError(f"{where}: attribute {unknown[0]} is not one of MoE that this package knows; remove it")
        weights: dict[str, onnx.TensorProto] = {}
        for matrix, (index, _) in _FLOAT_INPUTS.items():
            name = proto.input[index] if index < len(proto.input) else ""
            if name in scope:
                weights[matrix] = scope[name]
            elif name or matrix != "fc3":
                raise QMoEError(f"{where}: {matrix}_experts_weights ({name!r}) must be an initializer to be quantized")
        _check_weights(where, proto, weights)
        plans.append(_Plan(proto, weights))
    return plans


def _check_weights(where: str, proto: onnx.NodeProto, weights: dict[str, onnx.TensorProto]) -> None:
    """Dtypes and shapes: FC1 [E, N1, H], FC2 [E, H, I], FC3 [E, I, H]."""
    for matrix, tensor in weights.items():
        if numpy_dtype(tensor.data_type) not in FLOAT_DTYPES:
            raise QMoEError(f"{where}: {matrix}_experts_weights must be float32, float16 or bfloat16")
        if len(tensor_shape(tensor)) != 3:
            raise QMoEError(f"{where}: {matrix}_experts_weights: expected rank 3, got shape {list(tensor.dims)}")
    experts, hidden, inter = tensor_shape(weights["fc2"])
    fused = any(a.name == "swiglu_fusion" and a.i for a in proto.attribute)
    expected = {"fc1": (experts, inter * (2 if fused else 1), hidden), "fc3": (experts, inter, hidden)}
    for matrix, shape in expected.items():
        if matrix in weights and tensor_shape(weights[matrix]) != shape:
            raise QMoEError(
                f"{where}: {matrix}_experts_weights: expected shape {list(shape)} next to fc2_experts_weights "
                f"{[experts, hidden, inter]}, got {list(weights[matrix].dims)}; export it with rows of input features"
            )


def _convert_node(plan: _Plan, names: dict[int, _Names], fmt: _Format) -> None:
    proto, old = plan.proto, list(plan.proto.input)
    new = [*old[:2], *[""] * 15]
    for matrix, (weights, scales, bias, zero_points) in MATRIX_INPUTS.items():
        float_bias = _FLOAT_INPUTS[matrix][1]
        if float_bias < len(old):
            new[bias] = old[float_bias]
        if matrix in plan.weights:
            new[weights], scale, points, given = names[id(plan.weights[matrix])]
            new[scales] = scale if fmt.scaled else ""
            new[zero_points] = points if fmt.has_zero_points else ""
            if fmt.has_global_scale and matrix != "fc3":
                new[GLOBAL_SCALES[matrix]] = given
    while not new[-1]:
        new.pop()
    del proto.input[:]
    proto.input.extend(new)
    proto.op_type = OP_TYPE
    proto.attribute.append(onnx.helper.make_attribute("expert_weight_bits", fmt.form.bits or fmt.bits))
    if size := fmt.form.block_size or fmt.block_size:
        proto.attribute.append(onnx.helper.make_attribute("block_size", size))
    if fmt.quant_type != "int":
        proto.attribute.append(onnx.helper.make_attribute("quant_type", fmt.quant_type))
    # Rows of input features: what integers call 0, 4-bit floats call 1.
    raw = int(fmt.form.element == "e2m1")
    proto.attribute.append(onnx.helper.make_attribute("weights_prepacked", raw))
    if (reason := unsupported_reason(proto)) is not None:
        raise QMoEError(f"node {proto.name!r} would not run as QMoE: {reason}")


# --- tensors ---------------------------------------------------------------------------------------


def _new_names(graph: onnx.GraphProto, tensors: Iterable[onnx.TensorProto]) -> dict[int, _Names]:
    """Unused names of what replaces each tensor, by its id."""
    taken = names_used(graph)
    for inner in walk_graphs(graph):
        taken.update(tensor.name for tensor in inner.initializer)
        taken.update(value.name for value in inner.input)
        taken.update(name for node in inner.node for name in node.output)

    def fresh(name: str) -> str:
        candidate, count = name, 1
        while candidate in taken:
            candidate, count = f"{name}_{count}", count + 1
        taken.add(candidate)
        return candidate

    def names(name: str) -> _Names:
        return (
            fresh(f"{name}_quantized"),
            fresh(f"{name}_scales"),
            fresh(f"{name}_zero_points"),
            fresh(f"{name}_global"),
        )

    return {id(tensor): names(tensor.name) for tensor in tensors}


def _unused(graph: onnx.GraphProto) -> set[int]:
    """Ids of initializers that nothing refers to any more."""
    used = names_used(graph)
    return {id(t) for inner in walk_graphs(graph) for t in inner.initializer if t.name not in used}


def _write_tensors(
    loaded: LoadedModel,
    replaced: dict[int, onnx.TensorProto],
    names: dict[int, _Names],
    dropped: set[int],
    fmt: _Format,
    writer: ModelWriter,
    progress: Progress,
) -> None:
    """Quantized weights join the graph of the float ones; all external data moves to the target's data file."""
    done, added = 0, []
    for graph in walk_graphs(loaded.proto.graph):
        fresh: list[onnx.TensorProto] = []
        for tensor in graph.initializer:
            if id(tensor) in replaced:
                fresh += _quantized(loaded, tensor, names[id(tensor)], fmt, writer)
                done += 1
                progress(done, len(replaced), tensor.name)
        added.append((graph, fresh))
    for graph, _ in added:
        gone = {t.name for t in graph.initializer if id(t) in dropped}
        for part in (graph.initializer, graph.input):
            for index in reversed([i for i, item in enumerate(part) if item.name in gone]):
                del part[index]
    for tensor in stored_tensors(loaded.proto):
        if is_external(tensor):
            keep_external(loaded, tensor, writer)
    for graph, fresh in added:
        graph.initializer.extend(fresh)


def _quantize(weights: NDArray[Any], fmt: _Format) -> tuple[NDArray[Any] | None, ...]:
    """Packed weights, scales, zero points and global scales."""
    if fmt.quant_type == "int":
        integers = quantize_experts(
            weights, bits=fmt.bits, block_size=fmt.block_size, symmetric=fmt.symmetric, scale_dtype=weights.dtype
        )
        return integers.packed, integers.scales, integers.zero_points, None
    # The block size is one of fp8's, which has a choice, or the default of integers, which is none of theirs.
    size = fmt.block_size if fmt.form.square_blocks else None
    floats = quantize_float_experts(weights, quant_type=fmt.quant_type, block_size=size, scale_dtype=weights.dtype)
    return floats.packed, floats.scales, None, floats.global_scale


def _quantized(
    loaded: LoadedModel, tensor: onnx.TensorProto, names: _Names, fmt: _Format, writer: ModelWriter
) -> list[onnx.TensorProto]:
    weights = loaded.read(tensor)
    try:
        arrays = _quantize(weights, fmt)
    except QMoEError as error:
        raise QMoEError(f"{loaded.path}: tensor {tensor.name!r}: {error}") from error
    stored = []
    for name, array in zip(names, arrays, strict=True):
        if array is None:
            continue
        element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        new = onnx.TensorProto(name=name, data_type=element, dims=array.shape)
        if is_external(tensor):
            writer.store(new, array)
        else:
            new.raw_data = array.tobytes()
        stored.append(new)
    return stored
