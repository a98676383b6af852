"""The contract of ``com.microsoft::QMoE`` version 1 as plain data.

:class:`QMoENode` holds the attributes of a node and :func:`unsupported_reason` decides whether they
can be executed; :mod:`qmoe_ep.call` checks operands against them.

Letters in messages and docstrings: E experts, H hidden size, I intermediate size, N1 FC1 output
features (2·I when gate and up are fused, else I), b bits, B block size.
"""

from __future__ import annotations

import numbers
import reprlib
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from qmoe_ep.errors import QMoEError
from qmoe_ep.formats import FORMATS, MatrixLayout, WeightFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

__all__ = ["INPUT_NAMES", "Layout", "QMoENode", "check_claim", "resolve_layout", "unsupported_reason"]

DOMAIN, OP_TYPE = "com.microsoft", "QMoE"

INPUT_NAMES = (
    "input",
    "router_probs",
    "fc1_experts_weights",
    "fc1_scales",
    "fc1_experts_bias",
    "fc2_experts_weights",
    "fc2_scales",
    "fc2_experts_bias",
    "fc3_experts_weights",
    "fc3_scales",
    "fc3_experts_bias",
    "fc1_zero_points",
    "fc2_zero_points",
    "fc3_zero_points",
    "router_weights",
    "fc1_global_scale",
    "fc2_global_scale",
    "fc1_act_scale",
    "fc2_act_scale",
    "fc1_act_block_scale",
    "fc2_act_block_scale",
)
REQUIRED_INPUTS = (0, 1, 2, 5)
ROUTER_WEIGHTS = 14
GLOBAL_SCALES = {"fc1": 15, "fc2": 16, "fc3": 15}
"""Operand index of the scale per expert; the operator has none of FC3's own, which shares FC1's."""
ACTIVATION_SCALES = range(17, 21)
MATRIX_INPUTS = {"fc1": (2, 3, 4, 11), "fc2": (5, 6, 7, 12), "fc3": (8, 9, 10, 13)}
"""Operand indices of (weights, scales, bias, zero points) per matrix."""

ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "identity", "geglu", "relu2")
GATED = ("swiglu", "geglu")
"""Activations whose FC1 may hold gate and up."""

BIT_WIDTHS = (1, 2, 3, 4, 8)
_DEFAULT_BITS = 4
SM80_ROW_TILE = {4: 4, 2: 8}
LARGEST_FLOAT32, SMALLEST_FLOAT32 = 2.0**128 - 2.0**104, 2.0**-149

Layout: TypeAlias = Literal["raw", "sm80"]


@dataclass(frozen=True, slots=True)
class QMoENode:
    """One QMoE node: its attributes as given, checked by :func:`unsupported_reason`, not here.

    ``None`` stands for an attribute that is absent and has no default. ``input_names`` and
    ``output_names`` are those of an ONNX node (an empty name is an absent operand) or ``None`` when
    the node was made from keyword arguments. ``malformed`` holds one sentence for each attribute of
    an ONNX node that has a wrong type or no meaning here.
    """

    k: int = 1
    activation_type: str = "relu"
    normalize_routing_weights: int = 0
    use_sparse_mixer: int = 0
    swiglu_fusion: int = 0
    activation_alpha: float = 1.0
    activation_beta: float = 0.0
    swiglu_limit: float | None = None
    swiglu_limit_after_activation: int = 0
    expert_weight_bits: int = 4
    fc1_expert_weight_bits: int | None = None
    fc2_expert_weight_bits: int | None = None
    fc3_expert_weight_bits: int | None = None
    block_size: int | None = None
    quant_type: str = "int"
    weights_prepacked: int = -1
    accuracy_level: int = 0
    prefill_min_tokens: int = 2
    name: str = ""
    input_names: tuple[str, ...] | None = field(default=None, repr=False)
    output_names: tuple[str, ...] | None = field(default=None, repr=False)
    malformed: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def from_onnx(cls, proto: onnx.NodeProto) -> QMoENode:
        """Read a node of an ONNX model.

        Bad attributes don't raise here: they make the node one that :func:`unsupported_reason`
        declines, so that a claim and a creation say the same.

        Raises
        ------
        QMoEError
            If the node isn't a ``com.microsoft::QMoE`` at all.
        """
        if (reason := _foreign_operator(proto)) is not None:
            raise QMoEError(reason)
        values: dict[str, Any] = {}
        malformed: list[str] = []
        for attribute in proto.attribute:
            kind = _ATTRIBUTE_KINDS.get(attribute.name)
            if kind is None:
                malformed.append(
                    f"attribute {attribute.name} is not an attribute of QMoE version 1 that this package knows; "
                    "remove it, or use a newer version of the package"
                )
            elif attribute.name in values:
                malformed.append(f"attribute {attribute.name} is given twice; keep one")
            elif attribute.ref_attr_name or attribute.type != kind[0]:
                malformed.append(_wrong_type(attribute, kind[1]))
            else:
                values[attribute.name] = _attribute_value(attribute)
        return cls(
            **values,
            name=proto.name,
            input_names=tuple(proto.input),
            output_names=tuple(proto.output),
            malformed=tuple(malformed),
        )

    @property
    def form(self) -> WeightFormat:
        """The number format of the weights; of a known ``quant_type``."""
        return FORMATS[self.quant_type]

    @property
    def blocks(self) -> int:
        """The block size, 0 for row-wise scales (8-bit floats: for one global scale per expert)."""
        if self.quant_type in FORMATS and self.form.block_size:
            return self.form.block_size
        return int(self.block_size) if self.block_size is not None and self.block_size > 0 else 0

    def bits(self, matrix: str) -> int:
        """Bits per weight of ``"fc1"``, ``"fc2"`` or ``"fc3"`` (FC3 follows FC1 unless it says otherwise)."""
        if self.quant_type in FORMATS and self.form.bits:
            return self.form.bits
        own: int | None = getattr(self, f"{matrix}_expert_weight_bits")
        if own is None and matrix == "fc3":
            own = self.fc1_expert_weight_bits
        return int(self.expert_weight_bits if own is None else own)

    def has_input(self, index: int) -> bool | None:
        """Whether the ONNX node names operand ``index``; ``None`` if the node isn't from a model."""
        if self.input_names is None:
            return None
        return index < len(self.input_names) and self.input_names[index] != ""


_KIND_INT, _KIND_FLOAT, _KIND_STRING = (2, "an integer"), (1, "a float"), (3, "a string")
_ATTRIBUTE_KINDS = {
    f.name: {"i": _KIND_INT, "f": _KIND_FLOAT, "s": _KIND_STRING}[str(f.type)[0]]
    for f in fields(QMoENode)
    if f.name not in ("name", "input_names", "output_names", "malformed")
}
"""ONNX attribute type (AttributeProto.INT, FLOAT or STRING) and its words, per attribute."""


def _attribute_value(attribute: onnx.AttributeProto) -> int | float | str:
    if attribute.type == _KIND_INT[0]:
        return attribute.i
    if attribute.type == _KIND_FLOAT[0]:
        return attribute.f
    return attribute.s.decode("utf-8", "replace")


def _wrong_type(attribute: onnx.AttributeProto, expected: str) -> str:
    if attribute.ref_attr_name:
        got = f"a reference to {attribute.ref_attr_name}; inline the function it belongs to"
    else:
        import onnx

        kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
        got = f"{reprlib.repr(onnx.helper.get_attribute_value(attribute))} of type {kind}"
    return f"attribute {attribute.name} must be {expected}, got {got}"


def _foreign_operator(proto: onnx.NodeProto) -> str | None:
    if (proto.domain, proto.op_type) == (DOMAIN, OP_TYPE):
        return None
    return f"node {proto.name!r} is {proto.domain or 'ai.onnx'}::{proto.op_type}, expected {DOMAIN}::{OP_TYPE}"


# --- claim -----------------------------------------------------------------------------------------


def unsupported_reason(node: QMoENode | onnx.NodeProto, weights_layout: Layout | None = None) -> str | None:
    """Say why a node can't be executed and what to do, or ``None`` if it can.

    This one function decides claims and creations alike: a provider raises :class:`QMoEError` with
    this very sentence when a declined node is created all the same.

    Parameters
    ----------
    node : a :class:`QMoENode` or a node of an ONNX model
    weights_layout : the caller's override of what ``weights_prepacked`` says, see :func:`resolve_layout`
    """
    if not isinstance(node, QMoENode):
        if (foreign := _foreign_operator(node)) is not None:
            return foreign
        node = QMoENode.from_onnx(node)
    for rule in (_attribute_reason, _width_reason, _activation_reason, _presence_reason):
        if (reason := rule(node)) is not None:
            return reason
    return _layout_reason(node, weights_layout)


def check_claim(node: QMoENode, weights_layout: Layout | None = None) -> None:
    """Raise :class:`QMoEError` with the sentence of :func:`unsupported_reason` if there is one."""
    if (reason := unsupported_reason(node, weights_layout)) is not None:
        raise QMoEError(reason)


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool_))


def _attribute_reason(node: QMoENode) -> str | None:
    if node.malformed:
        return node.malformed[0]
    for name in ("k", "weights_prepacked", "accuracy_level", "prefill_min_tokens", "swiglu_fusion"):
        if not _is_int(value := getattr(node, name)):
            return f"attribute {name} must be an integer, got {value!r}"
    for name in ("normalize_routing_weights", "use_sparse_mixer", "swiglu_limit_after_activation"):
        value = getattr(node, name)
        if not isinstance(value, (numbers.Integral, np.bool_)) or value not in (0, 1):
            return f"attribute {name} must be 0 or 1, got {value!r}"
    for name in ("activation_type", "quant_type"):
        if not isinstance(value := getattr(node, name), str):
            return f"attribute {name} must be a string, got {value!r}"
    for name in ("activation_alpha", "activation_beta"):
        if not _is_finite(value := getattr(node, name)):
            return f"attribute {name} must be a finite number, got {value!r}"
    if node.k < 1:
        return f"attribute k must be at least 1 (experts per row), got {node.k}"
    if node.prefill_min_tokens < 2:
        return f"attribute prefill_min_tokens must be at least 2, got {node.prefill_min_tokens}"
    if node.use_sparse_mixer and node.k != 2:
        return f"attribute use_sparse_mixer = 1 is defined for k = 2, got k = {node.k}; set use_sparse_mixer to 0"
    if node.use_sparse_mixer and node.normalize_routing_weights:
        return (
            "attribute use_sparse_mixer = 1 gives each expert a weight of its own; set normalize_routing_weights to 0, "
            "or use_sparse_mixer to 0"
        )
    if node.weights_prepacked not in (-1, 0, 1):
        return f"attribute weights_prepacked must be -1, 0 (raw) or 1 (SM80 layout), got {node.weights_prepacked}"
    return None


def _is_finite(value: object) -> bool:
    """A number that is finite as float32, which is what an ONNX attribute and every kernel hold."""
    if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
        return False
    try:
        return abs(float(value)) <= LARGEST_FLOAT32
    except OverflowError:
        return False


def _width_reason(node: QMoENode) -> str | None:
    if node.quant_type not in FORMATS:
        return f"attribute quant_type must be one of {', '.join(FORMATS)}, got {node.quant_type!r}"
    for name in ("expert_weight_bits", "fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits"):
        value = getattr(node, name)
        if value is None and name != "expert_weight_bits":
            continue
        if not _is_int(value) or value not in BIT_WIDTHS:
            return f"attribute {name} must be one of {', '.join(map(str, BIT_WIDTHS))}, got {value!r}"
        if node.form.bits and value not in (node.form.bits, _DEFAULT_BITS):
            return (
                f"attribute {name} must be {node.form.bits} with quant_type {node.quant_type!r}, got {value}; "
                "leave it out"
            )
    size, own = node.block_size, node.form.block_size
    if size is None:
        return None
    if own and size not in (0, -1, own):
        return f"attribute block_size must be {own} with quant_type {node.quant_type!r}, got {size!r}; leave it out"
    if not _is_int(size) or (size not in (0, -1) and not is_block_size(size)):
        return (
            "attribute block_size must be a power of two of at least 16, "
            f"or 0, -1 or absent for row-wise scales, got {size!r}"
        )
    return None


def _activation_reason(node: QMoENode) -> str | None:
    if node.activation_type not in ACTIVATIONS:
        return f"attribute activation_type must be one of {', '.join(ACTIVATIONS)}, got {node.activation_type!r}"
    if node.swiglu_fusion not in (0, 1, 2):
        return (
            "attribute swiglu_fusion must be 0 (FC3 holds up), 1 (interleaved) or 2 (two halves), "
            f"got {node.swiglu_fusion}"
        )
    if node.swiglu_fusion and node.activation_type not in GATED:
        return (
            f"attribute swiglu_fusion = {node.swiglu_fusion} needs activation_type 'swiglu' or 'geglu', "
            f"got {node.activation_type!r}; set swiglu_fusion to 0"
        )
    if node.activation_type == "geglu" and not node.swiglu_fusion:
        return (
            "attribute activation_type = 'geglu' needs gate and up in FC1: set swiglu_fusion to 1 (interleaved) or "
            "2 (two halves), got 0"
        )
    limit = node.swiglu_limit
    if limit is not None and (not _is_finite(limit) or limit < SMALLEST_FLOAT32):
        return (
            f"attribute swiglu_limit must be finite and greater than 0, got {limit!r}; "
            "leave it out for no limit (an explicit infinity is declined)"
        )
    return None


def _presence_reason(node: QMoENode) -> str | None:
    if node.input_names is None:
        return None
    if len(node.input_names) > len(INPUT_NAMES):
        return f"the node has {len(node.input_names)} inputs, expected at most {len(INPUT_NAMES)}"
    if node.output_names is not None and len(node.output_names) != 1:
        return f"the node has {len(node.output_names)} outputs, expected exactly 1 (output)"
    return operands_reason(node, [bool(node.has_input(i)) for i in range(len(INPUT_NAMES))])


def operands_reason(node: QMoENode, present: Sequence[bool]) -> str | None:
    """Which operands must and must not be there; the same rule for node inputs and for a call's operands."""
    for index in REQUIRED_INPUTS:
        if not present[index]:
            return f"{INPUT_NAMES[index]} (input {index}) is required but absent"
    if (reason := _format_operands_reason(node, present)) is not None:
        return reason
    if node.use_sparse_mixer and present[ROUTER_WEIGHTS]:
        return (
            f"{INPUT_NAMES[ROUTER_WEIGHTS]} (input {ROUTER_WEIGHTS}) is present, but use_sparse_mixer = 1 makes the "
            "weights from the logits; leave it out, or set use_sparse_mixer to 0"
        )
    weights, scales, bias, zero_points = MATRIX_INPUTS["fc3"]
    wanted = node.activation_type == "swiglu" and node.swiglu_fusion == 0
    if any(present[i] for i in MATRIX_INPUTS["fc3"]) and not wanted and node.activation_type != "silu":
        first = next(i for i in MATRIX_INPUTS["fc3"] if present[i])
        return (
            f"{INPUT_NAMES[first]} (input {first}) is present, but FC3 is used only by swiglu with swiglu_fusion = 0 "
            f"and by silu (this node: {node.activation_type}, swiglu_fusion = {node.swiglu_fusion}); leave it out"
        )
    scaled = is_scaled(node)
    if wanted and not (present[weights] and (present[scales] or not scaled)):
        missing = INPUT_NAMES[scales if present[weights] else weights]
        return (
            f"{missing} is required by swiglu with swiglu_fusion = 0 but absent; "
            "give FC3, or set swiglu_fusion to 1 or 2 if FC1 holds gate and up"
        )
    for index in (scales, bias, zero_points):
        if present[index] and not present[weights]:
            return f"{INPUT_NAMES[index]} is present without fc3_experts_weights; give both or neither"
    if present[weights] and scaled and not present[scales]:
        return "fc3_scales is required with fc3_experts_weights but absent"
    return None


def is_scaled(node: QMoENode) -> bool:
    """Whether each matrix has a tensor of scales."""
    return not (node.form.square_blocks and not node.blocks)


def _format_operands_reason(node: QMoENode, present: Sequence[bool]) -> str | None:
    """Which scales and zero points the number format asks for."""
    form, kind = node.form, f"quant_type {node.quant_type!r}"
    for matrix in ("fc1", "fc2"):
        index = MATRIX_INPUTS[matrix][1]
        if is_scaled(node) and not present[index]:
            return f"{INPUT_NAMES[index]} (input {index}) is required but absent"
    for _, scales, _, zero_points in MATRIX_INPUTS.values():
        if present[scales] and not is_scaled(node):
            return (
                f"{INPUT_NAMES[scales]} (input {scales}) is present, but {kind} without block_size has one global "
                "scale per expert (inputs 15 and 16); leave it out, or give block_size"
            )
        if present[zero_points] and form.element != "integer":
            return f"{INPUT_NAMES[zero_points]} (input {zero_points}): {kind} has no zero points; leave it out"
    wants_global = form.global_scale == "always" or (form.global_scale == "without blocks" and not node.blocks)
    for index in sorted(set(GLOBAL_SCALES.values())):
        if present[index] and not wants_global:
            return f"{INPUT_NAMES[index]} (input {index}) has no meaning with {kind} and this block_size; leave it out"
        if wants_global and not present[index]:
            return f"{INPUT_NAMES[index]} (input {index}) is required by {kind} but absent"
    for index in ACTIVATION_SCALES:
        if present[index] and node.quant_type != "wfp4afp8":
            return f"{INPUT_NAMES[index]} (input {index}) belongs to quant_type 'wfp4afp8', got {kind}; leave it out"
    return None


def is_block_size(size: int) -> bool:
    """Whether weights can share a scale in blocks of this many: a power of two of at least 16."""
    return size >= 16 and size & (size - 1) == 0


def resolve_layout(node: QMoENode, weights_layout: Layout | None = None) -> MatrixLayout:
    """How the packed weights are stored: the caller's word, else ``weights_prepacked``.

    Integers: 1 means SM80, 0 and -1 raw; a file that says -1 doesn't tell, one provider of ONNX Runtime reads it as
    raw, another as SM80. 4-bit floats: 1 means raw, 0 and -1 two neighbouring output features a byte. 8-bit floats are
    raw.
    """
    if weights_layout is not None:
        return weights_layout
    if node.form.element == "e2m1":
        return "raw" if node.weights_prepacked == 1 else "columns"
    return "sm80" if node.weights_prepacked == 1 and node.form.element == "integer" else "raw"


def _layout_reason(node: QMoENode, weights_layout: Layout | None) -> str | None:
    if weights_layout not in (None, "raw", "sm80"):
        return f"weights_layout must be 'raw', 'sm80' or None, got {weights_layout!r}"
    if resolve_layout(node, weights_layout) != "sm80":
        return None
    for matrix in MATRIX_INPUTS:
        if matrix == "fc3" and not (node.has_input(8) or (node.activation_type == "swiglu" and not node.swiglu_fusion)):
            continue
        if (reason := sm80_width_reason(node, matrix)) is not None:
            return reason
    return None


def sm80_width_reason(node: QMoENode, matrix: str) -> str | None:
    """Why a matrix that is to be in the SM80 layout can't be, by its width."""
    if node.form.element != "integer":
        return (
            f"the SM80 layout exists for integers, but quant_type is {node.quant_type!r}; leave weights_layout out, or "
            "pass 'raw' if rows hold input features"
        )
    if (bits := node.bits(matrix)) in SM80_ROW_TILE:
        return None
    return (
        f"the SM80 layout (weights_prepacked = 1) exists for 2 and 4 bits, but {matrix}_expert_weight_bits is {bits}; "
        "store the weights raw (weights_prepacked = 0) or pass weights_layout='raw' if they are"
    )
