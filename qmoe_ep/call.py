"""Checked operands: what a call computes, with every size and type, as plain data.

:func:`describe_call` checks the operands of a call against the node's attributes and gives the
:class:`CallDescription` from which every provider works. Nothing here reads a tensor's values or
allocates memory; sizes are exact integers. Letters as in :mod:`qmoe_ep.operator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from qmoe_ep.errors import QMoEError
from qmoe_ep.formats import FLOAT_DTYPES, FORMATS, UINT8, ExpertMatrix, Experts, Gating, MatrixLayout, packed_bytes
from qmoe_ep.operator import (
    ACTIVATION_SCALES,
    GLOBAL_SCALES,
    INPUT_NAMES,
    MATRIX_INPUTS,
    REQUIRED_INPUTS,
    ROUTER_WEIGHTS,
    SM80_ROW_TILE,
    Layout,
    QMoENode,
    check_claim,
    is_scaled,
    operands_reason,
    resolve_layout,
    sm80_width_reason,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "FLOAT_DTYPES",
    "CallDescription",
    "ExpertMatrix",
    "Experts",
    "Operand",
    "OperandType",
    "check_constants",
    "check_output",
    "describe_call",
    "describe_experts",
    "merge_operands",
    "packed_bytes",
]

T = TypeVar("T")

MAX_BYTES = 2**63 - 1


class Operand(Protocol):
    """Anything with a shape and a dtype: an array, a device tensor, an :class:`OperandType`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class OperandType:
    """Shape and dtype of an operand, without its data."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class CallDescription:
    """A checked call: every size and type that a provider needs, as exact integers and dtypes."""

    node: QMoENode
    experts: Experts
    rows: int
    top_k: int
    input_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    router_dtype: np.dtype[Any]
    router_weights_dtype: np.dtype[Any] | None

    @property
    def routes(self) -> int:
        """Selected (row, expert) pairs."""
        return self.rows * self.top_k


def _type(index: int, operand: Operand, allowed: Sequence[np.dtype[Any]]) -> OperandType:
    """Dtype and sane sizes of one operand."""
    name = INPUT_NAMES[index]
    if not hasattr(operand, "shape") or not hasattr(operand, "dtype"):
        raise QMoEError(f"{name}: expected an array, got {type(operand).__name__}; convert it")
    shape = tuple(int(d) for d in operand.shape)
    try:
        dtype = np.dtype(operand.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if dtype not in allowed:
        expected = ", ".join(str(d) for d in allowed)
        raise QMoEError(f"{name}: expected dtype {expected}, got {operand.dtype}; convert it or fix the export")
    if any(d < 0 for d in shape):
        raise QMoEError(f"{name}: negative dimension in shape {list(shape)}")
    # A zero elsewhere must not hide a dimension product that no memory could hold.
    if math.prod(max(d, 1) for d in shape) * dtype.itemsize > MAX_BYTES:
        raise QMoEError(f"{name}: shape {list(shape)} is larger than 2^63-1 bytes; check the dimensions")
    return OperandType(shape, dtype)


def _ranked(index: int, operand: OperandType, ranks: tuple[int, ...], dims: str) -> None:
    if len(operand.shape) not in ranks:
        expected = " or ".join(map(str, ranks))
        raise QMoEError(
            f"{INPUT_NAMES[index]}: expected rank {expected} {dims}, got rank {len(operand.shape)} "
            f"with shape {list(operand.shape)}; reshape it"
        )


def _shaped(index: int, operand: OperandType, expected: Sequence[tuple[int, ...]], dims: str) -> None:
    if operand.shape in expected:
        return
    hint = "fix the export"
    if operand.dtype == np.uint8 and math.prod(operand.shape) == math.prod(expected[0]):
        hint = "the byte count fits: the file carries other (older) dimensions for the same bytes; export it anew"
    words = " or ".join(str(list(s)) for s in expected)
    raise QMoEError(f"{INPUT_NAMES[index]}: expected shape {words} {dims}, got {list(operand.shape)}; {hint}")


def _majority(votes: Sequence[int], packed: Sequence[tuple[int, int]] = ()) -> int:
    """The value that most operands imply, so that a message names the one that differs (the first wins a tie).

    ``packed`` are (row bytes, bits) of packed operands; padding makes them agree with several values.
    """
    candidates = [*votes, *(row_bytes * 8 // bits for row_bytes, bits in packed)]

    def support(size: int) -> int:
        return votes.count(size) + sum(packed_bytes(size, bits) == row_bytes for row_bytes, bits in packed)

    return max(candidates, key=lambda size: (support(size), -candidates.index(size)))


def operand_types(node: QMoENode, operands: Mapping[int, Operand]) -> dict[int, OperandType]:
    """Dtypes and ranks of the operands that hold weights."""
    float32 = (np.dtype(np.float32),)
    allowed: dict[int, tuple[np.dtype[Any], ...]] = dict.fromkeys(operands, FLOAT_DTYPES)
    for weights, scales, _, zero_points in MATRIX_INPUTS.values():
        allowed |= {weights: node.form.weight_dtypes, scales: node.form.scale_dtypes}
        allowed |= {zero_points: (UINT8, *FLOAT_DTYPES)}
    allowed |= dict.fromkeys(GLOBAL_SCALES.values(), float32)
    allowed |= {17: float32, 18: float32, 19: FORMATS["fp4"].scale_dtypes, 20: FORMATS["fp4"].scale_dtypes}
    types = {index: _type(index, operand, allowed[index]) for index, operand in sorted(operands.items())}
    for weights, scales, bias, zero_points in MATRIX_INPUTS.values():
        ranks: list[tuple[int, tuple[int, ...], str]] = []
        ranks += [(weights, (3,), "[E, out, packed row bytes]"), (bias, (2,), "[E, out]")]
        if node.blocks:
            ranks.append((scales, (3,), "[E, out, blocks]"))
        else:
            ranks.append((scales, (2, 3), "[E, out]"))
        if zero_points in types and types[zero_points].dtype != UINT8:
            ranks.append((zero_points, ranks[-1][1], ranks[-1][2]))
        elif node.blocks:
            ranks.append((zero_points, (3,), "[E, out, bytes]"))
        else:
            ranks.append((zero_points, (2,), "[E, bytes]"))
        for index, rank, dims in ranks:
            if index in types:
                _ranked(index, types[index], rank, dims)
    return types


def _sizes(
    node: QMoENode, types: Mapping[int, OperandType], hidden: list[int], experts: list[int], columns: bool
) -> tuple[int, ...]:
    """E, H and I by the majority of the operands that imply them."""
    fused = 2 if node.swiglu_fusion else 1
    inter: list[int] = []
    # Scales and biases first: older dimensions of packed weights must not win a tie. Those of square blocks don't tell.
    telling = [3, 4, 9, 10, 2, 8], [6, 7, 5]
    if node.form.square_blocks:
        telling = [4, 10, 2, 8], [7, 5]
    if columns:
        telling = [3, 4, 9, 10], [6, 7]
    for index in telling[0]:
        if index in types:
            inter.append(types[index].shape[1] // (fused if index < 8 else 1))
    for index in telling[1]:
        if index in types:
            hidden.append(types[index].shape[1])
    if node.blocks and not node.form.square_blocks:
        inter.append(types[6].shape[2] * node.blocks)
        hidden.append(types[3].shape[2] * node.blocks)
    experts.extend(t.shape[0] for i, t in types.items() if 2 <= i < ROUTER_WEIGHTS)
    if columns:
        inter.append(types[5].shape[1])
        hidden.append(types[2].shape[1])
        return _majority(experts), _majority(hidden), _majority(inter)
    packed = {m: (types[i[0]].shape[2], node.bits(m)) for m, i in MATRIX_INPUTS.items() if i[0] in types}
    inter_bytes = [packed.pop("fc2")]
    return _majority(experts), _majority(hidden, list(packed.values())), _majority(inter, inter_bytes)


def _check_sizes(node: QMoENode, num_experts: int, hidden_size: int, inter_size: int) -> None:
    for size, what, index in ((num_experts, "experts", 2), (hidden_size, "hidden", 5), (inter_size, "intermediate", 5)):
        if size < 1:
            shape = "[E, N1, ...]" if index == 2 else "[E, H, I·b/8]"
            raise QMoEError(f"{INPUT_NAMES[index]}: the {what} size is {size}, expected at least 1 ({shape})")
    if 2 * hidden_size * inter_size * 8 > MAX_BYTES:
        raise QMoEError(
            f"fc1_experts_weights: one expert of {hidden_size} × {inter_size} expands to more than 2^63-1 bytes; "
            "check the dimensions"
        )
    if node.k > num_experts:
        raise QMoEError(f"attribute k = {node.k} is larger than the number of experts, {num_experts}; lower k")
    for size, what in ((hidden_size, "hidden size H"), (inter_size, "intermediate size I")):
        if node.blocks and size % node.blocks and not node.form.square_blocks:
            raise QMoEError(
                f"attribute block_size = {node.blocks} doesn't divide the {what} = {size}; "
                "use a block size that divides both H and I, or row-wise scales"
            )


def describe_experts(
    node: QMoENode,
    operands: Mapping[int, Operand],
    *,
    weights_layout: Layout | None = None,
    hidden_size: int | None = None,
    num_experts: int | None = None,
) -> Experts:
    """Check the operands that hold weights (by input index, absent ones left out) and describe them.

    ``hidden_size`` and ``num_experts``, where the caller knows them from other operands, take part in
    finding which operand is the odd one out.

    Raises
    ------
    QMoEError
        Naming the operand or attribute, what was expected and what came.
    """
    present = [i in operands or i < 2 for i in range(len(INPUT_NAMES))]
    if (reason := operands_reason(node, present)) is not None:
        raise QMoEError(reason)
    types = operand_types(node, {i: t for i, t in operands.items() if i >= 2 and i != ROUTER_WEIGHTS})
    votes_h = [] if hidden_size is None else [hidden_size]
    votes_e = [] if num_experts is None else [num_experts]
    layout = resolve_layout(node, weights_layout)
    experts, hidden, inter = _sizes(node, types, votes_h, votes_e, layout == "columns")
    _check_sizes(node, experts, hidden, inter)
    fusions: tuple[Gating, ...] = ("none", "interleaved", "halves")
    gating = "fc3" if 8 in types else fusions[node.swiglu_fusion]
    n1 = 2 * inter if node.swiglu_fusion else inter
    _check_global_scales(types, experts)

    def matrix(name: str, out: int, inner: int) -> ExpertMatrix:
        described = _describe_matrix(name, node, types, layout, out, inner)
        _check_matrix(node, described, types, experts)
        return described

    return Experts(
        num_experts=experts,
        hidden_size=hidden,
        inter_size=inter,
        gating=gating,
        fc1=matrix("fc1", n1, hidden),
        fc2=matrix("fc2", hidden, inter),
        fc3=matrix("fc3", inter, hidden) if 8 in types else None,
    )


def _describe_matrix(
    name: str, node: QMoENode, types: Mapping[int, OperandType], layout: MatrixLayout, out: int, inner: int
) -> ExpertMatrix:
    _, scales, bias, zero_points = MATRIX_INPUTS[name]
    return ExpertMatrix(
        name=name,
        bits=node.bits(name),
        block_size=node.blocks,
        out_features=out,
        in_features=inner,
        layout=layout,
        scale_dtype=types[scales].dtype if scales in types else np.dtype(np.float32),
        zero_points=zero_points in types,
        bias_dtype=types[bias].dtype if bias in types else None,
        form=node.form,
        zero_point_dtype=types[zero_points].dtype if zero_points in types else UINT8,
    )


def _check_matrix(node: QMoENode, m: ExpertMatrix, types: Mapping[int, OperandType], experts: int) -> None:
    weights, scales, bias, zero_points = MATRIX_INPUTS[m.name]
    rows = {"fc1": "2·I" if node.swiglu_fusion else "I", "fc2": "H", "fc3": "I"}[m.name]
    inner = "I" if m.name == "fc2" else "H"
    packed = f"[E, {inner}, {rows}·{m.bits}/8]" if m.layout == "columns" else f"[E, {rows}, {inner}·{m.bits}/8]"
    _shaped(weights, types[weights], [(experts, *m.weight_shape)], packed)
    row_wise = [(experts, m.out_features), (experts, m.out_features, 1)]
    blocks = f"[E, {rows}, {inner}/{m.block_size}]"
    if m.block_rows > 1:
        blocks = f"[E, ceil({rows}/{m.block_size}), ceil({inner}/{m.block_size})]"
    floats = ([(experts, *m.scale_shape)], blocks) if m.block_size else (row_wise, f"[E, {rows}] (row-wise)")
    if m.scaled:
        _shaped(scales, types[scales], *floats)
    if bias in types:
        _shaped(bias, types[bias], [(experts, m.out_features)], f"[E, {rows}]")
    if zero_points in types and m.zero_point_dtype != UINT8:
        _shaped(zero_points, types[zero_points], *floats)
    elif zero_points in types:
        dims = f"[E, {rows}, ceil(blocks·{m.bits}/8)]" if m.block_size else f"[E, ceil({rows}·{m.bits}/8)] (row-wise)"
        _shaped(zero_points, types[zero_points], [(experts, *m.zero_point_shape)], dims)
    if m.layout == "columns" and m.out_features % 2:
        raise QMoEError(
            f"{INPUT_NAMES[weights]}: two output features share a byte, so there must be an even number of them, got "
            f"{m.out_features}; store rows of input features (weights_prepacked = 1)"
        )
    if m.layout != "sm80":
        return
    if (reason := sm80_width_reason(node, m.name)) is not None:
        raise QMoEError(reason)
    if m.out_features % SM80_ROW_TILE[m.bits] or m.in_features % 64:
        raise QMoEError(
            f"{INPUT_NAMES[weights]}: the SM80 layout needs output features in multiples of "
            f"{SM80_ROW_TILE[m.bits]} and input features in multiples of 64, got {m.out_features} × {m.in_features}; "
            "store the weights raw"
        )


def _check_global_scales(types: Mapping[int, OperandType], experts: int) -> None:
    for index in sorted(set(GLOBAL_SCALES.values())):
        if index in types:
            _shaped(index, types[index], [(experts,)], "[E]")
    for index in ACTIVATION_SCALES[:2]:
        if index in types:
            _shaped(index, types[index], [(experts,), (1,)], "[E] or [1]")


def describe_call(
    node: QMoENode, operands: Sequence[Operand | None], *, weights_layout: Layout | None = None
) -> CallDescription:
    """Check the operands of a call, in ONNX order with ``None`` for absent ones, and describe it.

    Raises
    ------
    QMoEError
        If the node is declined (see :func:`unsupported_reason`) or an operand doesn't fit: which one,
        what was expected, what came, what to do. Nothing has been allocated by then.
    """
    check_claim(node, weights_layout)
    if len(operands) > len(INPUT_NAMES):
        raise QMoEError(f"got {len(operands)} operands, expected at most {len(INPUT_NAMES)}")
    given = {i: o for i, o in enumerate(operands) if o is not None}
    for index, name in enumerate(INPUT_NAMES):
        if node.has_input(index) not in (None, index in given):
            had, gets = ("has", "lacks") if node.has_input(index) else ("lacks", "brings")
            raise QMoEError(f"{name} (input {index}): the node {had} it, but the call {gets} it; make them agree")
    if (reason := operands_reason(node, [i in given for i in range(len(INPUT_NAMES))])) is not None:
        raise QMoEError(reason)
    x, router = _type(0, given[0], FLOAT_DTYPES), _type(1, given[1], FLOAT_DTYPES)
    _ranked(0, x, (2, 3), "[rows, H] or [batch, sequence, H]")
    if not router.shape:
        raise QMoEError("router_probs: expected rank 1 or more with last dimension E, got a scalar; reshape it")
    routing = _type(ROUTER_WEIGHTS, given[ROUTER_WEIGHTS], FLOAT_DTYPES) if ROUTER_WEIGHTS in given else None
    experts = describe_experts(
        node, given, weights_layout=weights_layout, hidden_size=x.shape[-1], num_experts=router.shape[-1]
    )
    rows = math.prod(x.shape[:-1])
    _check_rows(node, experts, rows, x, router, routing)
    return CallDescription(
        node=node,
        experts=experts,
        rows=rows,
        top_k=int(node.k),
        input_shape=x.shape,
        dtype=x.dtype,
        router_dtype=router.dtype,
        router_weights_dtype=None if routing is None else routing.dtype,
    )


def _check_rows(
    node: QMoENode, experts: Experts, rows: int, x: OperandType, router: OperandType, routing: OperandType | None
) -> None:
    if x.shape[-1] != experts.hidden_size:
        raise QMoEError(
            f"input: expected last dimension H = {experts.hidden_size} as in fc2_experts_weights, "
            f"got shape {list(x.shape)}; reshape it or use the weights that belong to it"
        )
    if router.shape[-1] != experts.num_experts:
        raise QMoEError(
            f"router_probs: expected last dimension E = {experts.num_experts} as in fc1_experts_weights, "
            f"got shape {list(router.shape)}"
        )
    if math.prod(router.shape[:-1]) != rows:
        raise QMoEError(
            f"router_probs: expected {rows} rows as in input {list(x.shape)}, got {math.prod(router.shape[:-1])} "
            f"with shape {list(router.shape)}; its leading dimensions must multiply to the rows of input"
        )
    if routing is not None:
        _shaped(ROUTER_WEIGHTS, routing, [(rows, experts.num_experts)], "[rows, E]")
    # Routes and features are what providers index and allocate by.
    widest = max(experts.fc1.out_features, experts.hidden_size)
    if max(rows, 1) * int(node.k) * widest * 8 > MAX_BYTES:
        raise QMoEError(
            f"input: {rows} rows with k = {node.k} need more than 2^63-1 bytes of intermediate results; split the call"
        )


def check_output(call: CallDescription, output: Operand) -> None:
    """Check that an output is like input 0.

    Raises
    ------
    QMoEError
        If its dtype or shape differ.
    """
    if output.shape != call.input_shape or output.dtype != call.dtype:
        raise QMoEError(
            f"output: expected {call.dtype} {list(call.input_shape)} as input 0, "
            f"got {output.dtype} {list(output.shape)}; allocate it like the input"
        )


def merge_operands(constants: Mapping[int, T], inputs: Sequence[T | None]) -> list[T | None]:
    """A call's operands in ONNX order: what the kernel holds since its creation, and what the call brings.

    Raises
    ------
    QMoEError
        If a call brings an operand that the kernel holds already.
    """
    if len(inputs) > len(INPUT_NAMES):
        raise QMoEError(f"got {len(inputs)} operands, expected at most {len(INPUT_NAMES)}")
    operands: list[T | None] = [*inputs, *[None] * (len(INPUT_NAMES) - len(inputs))]
    for index, constant in constants.items():
        if operands[index] is not None:
            raise QMoEError(
                f"{INPUT_NAMES[index]} (input {index}) was given as an initializer when the kernel was created; "
                "pass None for it"
            )
        operands[index] = constant
    return operands


def check_constants(
    node: QMoENode, constants: Mapping[int, Operand], *, weights_layout: Layout | None = None
) -> Experts | None:
    """Check a node's initializers when its kernel is created, as far as they tell.

    Returns the description of the experts if all their required operands are there, else ``None``:
    then the first call that brings the rest finds what doesn't fit.
    """
    for index in constants:
        if index not in range(len(INPUT_NAMES)):
            raise QMoEError(f"initializers: expected input indices 0 to {len(INPUT_NAMES) - 1}, got {index!r}")
        if index < 2 or index == ROUTER_WEIGHTS:
            raise QMoEError(f"{INPUT_NAMES[index]} (input {index}) changes with each call; don't give it at creation")
        if node.has_input(index) is False:
            raise QMoEError(f"{INPUT_NAMES[index]} (input {index}) is absent from the node; don't give it at creation")
    required = {i for i in REQUIRED_INPUTS if i >= 2}
    has_fc3 = any(i in constants for i in MATRIX_INPUTS["fc3"])
    if not node.swiglu_fusion and (node.activation_type == "swiglu" or (node.activation_type == "silu" and has_fc3)):
        required.add(MATRIX_INPUTS["fc3"][0])
    for matrix in MATRIX_INPUTS.values():
        if matrix[0] in required and is_scaled(node):
            required.add(matrix[1])
    if not required <= constants.keys():
        operand_types(node, constants)
        return None
    return describe_experts(node, constants, weights_layout=weights_layout)
