"""Model files whose packed weights change their order: raw rows to the SM80 order and back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from qmoe_ep.errors import QMoEError
from qmoe_ep.onnx.model import load_model, stored_tensors, walk_nodes
from qmoe_ep.onnx.output import ModelWriter, check_target, keep_external
from qmoe_ep.onnx.tensors import is_external
from qmoe_ep.operator import MATRIX_INPUTS, Layout, check_claim, resolve_layout
from qmoe_ep.quantization import raw_to_sm80, raw_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qmoe_ep.formats import MatrixLayout, WeightFormat
    from qmoe_ep.onnx.model import LoadedModel, QMoENodeEntry

__all__ = ["convert_layout"]


@dataclass(frozen=True, slots=True)
class _Change:
    """A packed tensor that changes its order: from which, the width of its codes, and whose it is."""

    tensor: onnx.TensorProto
    stored: MatrixLayout
    bits: int
    node: str


def convert_layout(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    layout: Layout,
    *,
    weights_layout: Layout | None = None,
) -> list[str]:
    """Write a copy of a model whose QMoE nodes hold their packed weights in one order, and say so.

    Parameters
    ----------
    source : model file
    target : file to write; external data goes to one file next to it, named like it with ``.data`` added
    layout : order in the target: "raw" or, for integers of 2 and 4 bits, "sm80"
    weights_layout : order in the source, where its attribute doesn't tell or is wrong

    Returns
    -------
    names of the tensors whose order changed, in the order of the file

    Raises
    ------
    QMoEError : a node is declined or its widths have no SM80 order, weights aren't initializers or are read by
        something else too, or the target can't be written. Nothing is left of the target then.
    """
    if layout not in ("raw", "sm80"):
        raise QMoEError(f"layout must be 'raw' or 'sm80', got {layout!r}")
    source, target = Path(source), Path(target)
    loaded = load_model(source)
    check_target(loaded, source, target)
    entries, changing = loaded.qmoe_nodes(), set[int]()
    changes: dict[int, _Change] = {}
    for entry in entries:
        for change in _changes(loaded, entry, layout, weights_layout):
            changing.add(id(entry.proto))
            known = changes.setdefault(id(change.tensor), change)
            if (known.bits, known.stored) != (change.bits, change.stored):
                raise QMoEError(f"{known.node} and {change.node} read {change.tensor.name!r} differently")
    _check_readers(loaded, changes, changing)
    for entry in entries:
        _state_layout(entry.proto, layout, entry.node.form)
    with ModelWriter(target) as writer:
        for tensor in stored_tensors(loaded.proto):
            if id(tensor) in changes:
                _replace(loaded, changes[id(tensor)], layout, writer)
            elif is_external(tensor):
                keep_external(loaded, tensor, writer)
        writer.commit(loaded.proto)
    return [change.tensor.name for change in changes.values()]


def _changes(loaded: LoadedModel, entry: QMoENodeEntry, layout: Layout, weights_layout: Layout | None) -> list[_Change]:
    """The packed tensors of a node that aren't in the wanted order."""
    where = f"{loaded.path}: node {entry.node.name or entry.node_id!r}"
    check_claim(entry.node, weights_layout)
    stored = resolve_layout(entry.node, weights_layout)
    if stored == layout:
        return []
    check_claim(entry.node, layout)
    changes = []
    for matrix, (index, *_) in MATRIX_INPUTS.items():
        name = entry.proto.input[index] if index < len(entry.proto.input) else ""
        if not name:
            continue
        if index not in entry.constants:
            raise QMoEError(f"{where}: {matrix}_experts_weights ({name!r}) must be an initializer to be converted")
        changes.append(_Change(entry.constants[index], stored, entry.node.bits(matrix), where))
    return changes


def _check_readers(loaded: LoadedModel, changes: dict[int, _Change], changing: set[int]) -> None:
    """A tensor that anything else reads as well, a node that is in the wanted order included, can't change under it."""
    weights = {indices[0] for indices in MATRIX_INPUTS.values()}
    for proto, scope in walk_nodes(loaded.proto.graph):
        for index, name in enumerate(proto.input):
            if id(scope.get(name)) in changes and not (id(proto) in changing and index in weights):
                reader = f"{proto.op_type} node {proto.name!r}"
                raise QMoEError(f"{loaded.path}: {reader} reads {name!r} as it is stored; give it a copy of its own")


def _state_layout(proto: onnx.NodeProto, layout: Layout, form: WeightFormat) -> None:
    """What 4-bit floats call 1 is what integers call 0."""
    value = int((layout == "sm80") != (form.element == "e2m1"))
    kept = [attribute for attribute in proto.attribute if attribute.name != "weights_prepacked"]
    del proto.attribute[:]
    proto.attribute.extend([*kept, onnx.helper.make_attribute("weights_prepacked", value)])


def _replace(loaded: LoadedModel, change: _Change, layout: Layout, writer: ModelWriter) -> None:
    packed: NDArray[Any] = loaded.read(change.tensor)
    try:
        converted = raw_weights(packed, change.stored, bits=change.bits)
        if layout == "sm80":
            converted = raw_to_sm80(converted, bits=change.bits)
    except QMoEError as error:
        raise QMoEError(f"{loaded.path}: tensor {change.tensor.name!r}: {error}") from error
    del change.tensor.dims[:]
    change.tensor.dims.extend(converted.shape)
    if is_external(change.tensor):
        writer.store(change.tensor, converted)
    else:
        change.tensor.ClearField("int32_data")
        change.tensor.raw_data = converted.tobytes()
