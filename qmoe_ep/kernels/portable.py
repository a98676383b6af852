"""The portable kernel family: every layout and type on compute capability 7.5 and newer, without tensor cores.

Device code: ``portable_few.cuh`` (one product per route) and ``portable_many.cuh`` (routes grouped by expert, tiled
products), on ``route.cuh``, ``group.cuh``, ``quantization.cuh`` and ``activation.cuh``. Every product is of a weight
dequantized in float32, element·scale rounded once, and a float32 activation, accumulated in float32 in
short partial sums. :func:`plan` is where a call enters.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from qmoe_ep.call import CallDescription, ExpertMatrix
from qmoe_ep.errors import QMoEError
from qmoe_ep.kernels.operands import matrix_fields, matrix_pointers
from qmoe_ep.kernels.plan import AddressSource, ModuleSource, Plan, Step
from qmoe_ep.kernels.route import (
    MAX_GRID_X,
    check_index_ranges,
    group_scratch,
    group_steps,
    largest_tile_count,
    route_scratch,
    route_step,
)
from qmoe_ep.kernels.translation_unit import Entry, device_type, dtype_tag, module_name, translation_unit
from qmoe_ep.operator import GLOBAL_SCALES, MATRIX_INPUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qmoe_ep.capabilities import Capabilities
    from qmoe_ep.operator import QMoENode

__all__ = [
    "CombineArguments",
    "DownArguments",
    "Form",
    "GateUpArguments",
    "activated_stride",
    "choose_form",
    "combine_step",
    "format_type",
    "gate_scalars",
    "guaranteed_load_bytes",
    "plan",
]

Form: TypeAlias = Literal["few", "many"]

VERSION = 2
CHUNK_CODES = 16
_FEW_WARPS, _ROWS_PER_WARP, _MANY_THREADS, _TILE_ROWS = 8, 4, 256, 128
_OLDEST = (7, 5)
_POINTER = ctypes.c_void_p
_FLOAT_MAX = float(np.finfo(np.float32).max)


class GateScalars(ctypes.Structure):
    """``qmoe::GateScalars``."""

    _fields_ = (("alpha", ctypes.c_float), ("beta", ctypes.c_float), ("limit", ctypes.c_float))


class GateUpArguments(ctypes.Structure):
    """``qmoe::portable::GateUpArguments``."""

    _fields_ = (
        ("input", _POINTER),
        *matrix_fields("fc1", "fc3"),
        ("global_scales", _POINTER),
        ("route_experts", _POINTER),
        ("grouped_routes", _POINTER),
        ("tiles", _POINTER),
        ("tile_count", _POINTER),
        ("activated", _POINTER),
        ("routes", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("inter", ctypes.c_int),
        ("activated_stride", ctypes.c_int),
        ("scalars", GateScalars),
    )


class DownArguments(ctypes.Structure):
    """``qmoe::portable::DownArguments``."""

    _fields_ = (
        ("activated", _POINTER),
        *matrix_fields("fc2"),
        ("global_scales", _POINTER),
        ("route_experts", _POINTER),
        ("route_weights", _POINTER),
        ("output", _POINTER),
        ("grouped_routes", _POINTER),
        ("tiles", _POINTER),
        ("tile_count", _POINTER),
        ("contributions", _POINTER),
        ("rows", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("inter", ctypes.c_int),
        ("activated_stride", ctypes.c_int),
        ("slots_at_once", ctypes.c_int),
    )


class CombineArguments(ctypes.Structure):
    """``qmoe::portable::CombineArguments``."""

    _fields_ = (
        ("contributions", _POINTER),
        ("route_experts", _POINTER),
        ("route_weights", _POINTER),
        ("output", _POINTER),
        ("rows", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("hidden", ctypes.c_int),
    )


def plan(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int] | None = None,
    *,
    form: Form | None = None,
) -> Plan:
    """Plan a call on the portable kernels.

    Parameters
    ----------
    call : rows may be 0, which makes an empty plan
    capabilities : compute capability 7.5 or newer
    alignment : bytes to which an operand's address is known to be aligned, by operand index; 16 where it
        says nothing, never less than the operand's element
    form : ``"few"`` or ``"many"`` to force one; by :func:`choose_form` otherwise

    Raises
    ------
    QMoEError
        If the device is too old or a size is beyond the kernels' index types.
    """
    if capabilities.compute_capability < _OLDEST:
        major, minor = capabilities.compute_capability
        raise QMoEError(f"the device has compute capability {major}.{minor}, expected 7.5 or newer; use the CPU")
    if not call.rows:
        return Plan("portable", "there are no rows", (), ())
    check_index_ranges(call)
    chosen, reason = choose_form(call) if form is None else (form, f"form {form} was asked for")
    steps = _few_steps(call, alignment or {}) if chosen == "few" else _many_steps(call, capabilities, alignment or {})
    scratch = (*route_scratch(call), ("activated", 4 * call.routes * activated_stride(call)))
    if chosen == "many":
        contributions = ("contributions", 4 * call.routes * call.experts.hidden_size)
        scratch = (*scratch, *group_scratch(call, _tile_routes(call)), contributions)
    return Plan("portable", reason, scratch, (route_step(call), *steps))


def choose_form(call: CallDescription) -> tuple[Form, str]:
    """One product per route, or tiled products over the routes of each expert; and the reason in a clause.

    Grouping pays once an expert has several tokens on average; ``prefill_min_tokens`` says how many.
    """
    tokens, least = call.routes / call.experts.num_experts, call.node.prefill_min_tokens
    if call.rows == 1 or tokens < least:
        return "few", f"{tokens:.3g} tokens per expert are fewer than prefill_min_tokens = {least}, or one row"
    return "many", f"{tokens:.3g} tokens per expert"


def activated_stride(call: CallDescription) -> int:
    """Floats from one row of ``activated`` to the next: I, padded so that rows are 16-byte aligned."""
    return -(-call.experts.inter_size // 4) * 4


# --- compile-time layout ----------------------------------------------------------------------------------------------


def guaranteed_load_bytes(*multiples: int) -> int:
    """The widest load, 1 to 16 bytes, to which addresses made of these multiples are aligned."""
    return math.gcd(16, *multiples)


def format_type(matrix: ExpertMatrix, weights_alignment: int) -> tuple[str, str]:
    """C++ type ``qmoe::Format<…>`` of a matrix, and its part of a module's name."""
    load_bytes = guaranteed_load_bytes(weights_alignment, matrix.row_bytes, CHUNK_CODES * matrix.bits // 8)
    scale_dtype = matrix.element_scale_dtype
    parts = [
        str(matrix.bits),
        str(matrix.block_size),
        str(matrix.zero_points).lower(),
        device_type(scale_dtype),
        device_type(matrix.bias_dtype),
        str(load_bytes),
    ]
    tag = (
        f"w{matrix.bits}g{matrix.block_size}{'z' if matrix.zero_points else ''}"
        f"_s{dtype_tag(scale_dtype)}_b{dtype_tag(matrix.bias_dtype)}_l{load_bytes}"
    )
    if not matrix.plain:
        zero_dtype = None if matrix.zero_point_dtype == np.uint8 else matrix.zero_point_dtype
        parts += [f"qmoe::Element::{_ELEMENT[matrix.form.element]}", device_type(zero_dtype)]
        parts += [str(matrix.global_scale).lower(), str(matrix.block_rows)]
        tag += f"_{matrix.form.element}{dtype_tag(zero_dtype)}{'g' if matrix.global_scale else ''}{matrix.block_rows}"
    return f"qmoe::Format<{', '.join(parts)}>", tag


def _matrix_format(matrix: ExpertMatrix, alignment: Mapping[AddressSource, int]) -> tuple[str, str]:
    return format_type(matrix, alignment.get(MATRIX_INPUTS[matrix.name][0], 16))


_GATING = {"none": "kNone", "interleaved": "kInterleaved", "halves": "kHalves", "fc3": "kThird"}
_ACTIVATION = {
    "relu": "kRelu",
    "gelu": "kGelu",
    "silu": "kSilu",
    "identity": "kIdentity",
    "swiglu": "kIdentity",
    "relu2": "kRelu2",
    "geglu": "kGeglu",
    "silu_limited": "kSiluLimited",
}
_ELEMENT = {"integer": "kInteger", "e2m1": "kE2m1", "e4m3": "kE4m3"}


def gate_up_module(call: CallDescription, alignment: Mapping[AddressSource, int], form: Form) -> ModuleSource:
    """The module of FC1, FC3 and the activation in one form."""
    experts = call.experts
    item = call.dtype.itemsize
    input_bytes = max(item, guaranteed_load_bytes(alignment.get(0, 16), experts.hidden_size * item))
    gate, gate_tag = _matrix_format(experts.fc1, alignment)
    up, up_tag = (gate, "") if experts.fc3 is None else _matrix_format(experts.fc3, alignment)
    function = _function(call)
    tags = [experts.gating, function, dtype_tag(call.dtype), f"x{input_bytes}", gate_tag, *([up_tag] if up_tag else [])]
    layout = (
        f"using Layout = qmoe::portable::GateUp<{device_type(call.dtype)}, {input_bytes}, {gate}, {up}, "
        f"qmoe::Gating::{_GATING[experts.gating]}, qmoe::Activation::{_ACTIVATION[function]}>;"
    )
    body, tile_tag = f"qmoe::portable::gate_up_{form}<Layout>", []
    if form == "many":
        per_thread = _tile_routes(call) // 16
        body, tile_tag = f"qmoe::portable::gate_up_many<Layout, {per_thread}>", [f"t{_tile_routes(call)}"]
    cut = experts.fc1.block_rows > 1
    entry = _entry(f"portable_gate_up_{form}", GateUpArguments, body, cut)
    name = module_name("portable", VERSION, f"gate_up_{form}", *tags, *tile_tag)
    return translation_unit(name, (f"portable_{form}.cuh",), (layout,), (entry,))


def _function(call: CallDescription) -> str:
    """The activation, a gated one by what its gate goes through."""
    activation = call.node.activation_type
    if call.experts.gating == "none" or activation == "geglu":
        return activation
    return "silu_limited" if call.node.swiglu_limit_after_activation else "silu"


def down_module(call: CallDescription, alignment: Mapping[AddressSource, int], form: Form) -> ModuleSource:
    """The module of FC2 in one form; for few rows it also combines the slots and rounds to the output's type."""
    layout, tag = _matrix_format(call.experts.fc2, alignment)
    if form == "few":
        output = device_type(call.dtype)
        body, rest = f"qmoe::portable::down_few<Layout, {output}>", dtype_tag(call.dtype)
    else:
        body, rest = f"qmoe::portable::down_many<Layout, {_tile_routes(call) // 16}>", f"t{_tile_routes(call)}"
    entry = _entry(f"portable_down_{form}", DownArguments, body, call.experts.fc2.block_rows > 1)
    name = module_name("portable", VERSION, f"down_{form}", tag, rest)
    return translation_unit(name, (f"portable_{form}.cuh",), (f"using Layout = {layout};",), (entry,))


def combine_module(call: CallDescription) -> ModuleSource:
    """The module of :func:`combine_step`."""
    entry = _entry("portable_combine", CombineArguments, f"qmoe::portable::combine<{device_type(call.dtype)}>")
    name = module_name("portable", VERSION, "combine", dtype_tag(call.dtype))
    return translation_unit(name, ("portable_many.cuh",), (), (entry,))


def _entry(name: str, arguments: type[ctypes.Structure], body: str, cut: bool = False) -> Entry:
    """Blocks that may be cut at a row's end (``cut``) take the registers of a second block."""
    threads = 32 * _FEW_WARPS if name.endswith("few") else _MANY_THREADS
    return Entry(name, arguments, f"qmoe::portable::{arguments.__name__}", body, threads, min_blocks=1 if cut else 2)


# --- steps ------------------------------------------------------------------------------------------------------------


def _few_steps(call: CallDescription, alignment: Mapping[AddressSource, int]) -> tuple[Step, ...]:
    experts = call.experts
    per_warp = _ROWS_PER_WARP if experts.gating == "none" else _ROWS_PER_WARP // 2
    warps = call.routes * -(-experts.inter_size // per_warp)
    arguments = _down_arguments(call)
    # Slots side by side up to the block's warps; a power of two, so that they fill it.
    arguments.slots_at_once = 1 << (min(call.top_k, _FEW_WARPS).bit_length() - 1)
    features = _FEW_WARPS // arguments.slots_at_once * _ROWS_PER_WARP
    blocks = call.rows * -(-experts.hidden_size // features)
    return (
        _step(
            gate_up_module(call, alignment, "few"),
            min(-(-warps // _FEW_WARPS), MAX_GRID_X),
            _gate_up_arguments(call),
            (*_GATE_UP_POINTERS, ("route_experts", "route_experts")),
        ),
        _step(
            down_module(call, alignment, "few"),
            min(blocks, MAX_GRID_X),
            arguments,
            (
                *_DOWN_POINTERS,
                ("route_experts", "route_experts"),
                ("route_weights", "route_weights"),
                ("output", "output"),
            ),
        ),
    )


def _tile_routes(call: CallDescription) -> int:
    """Routes per tile: 64, or 16 where experts have few, so that less of a tile is empty."""
    return 64 if call.routes >= 24 * min(call.experts.num_experts, call.routes) else 16


def _many_steps(
    call: CallDescription, capabilities: Capabilities, alignment: Mapping[AddressSource, int]
) -> tuple[Step, ...]:
    experts = call.experts
    tiles = largest_tile_count(call, _tile_routes(call))
    features = _TILE_ROWS if experts.gating == "none" else _TILE_ROWS // 2
    resident = 2 * capabilities.multiprocessor_count
    grouped: tuple[tuple[str, AddressSource], ...] = (
        ("grouped_routes", "grouped_routes"),
        ("tiles", "group_tiles"),
        ("tile_count", "tile_count"),
    )
    return (
        *group_steps(call, _tile_routes(call)),
        _step(
            gate_up_module(call, alignment, "many"),
            min(tiles * -(-experts.inter_size // features), resident),
            _gate_up_arguments(call),
            (*_GATE_UP_POINTERS, *grouped),
        ),
        _step(
            down_module(call, alignment, "many"),
            min(tiles * -(-experts.hidden_size // _TILE_ROWS), resident),
            _down_arguments(call),
            (*_DOWN_POINTERS, *grouped, ("contributions", "contributions")),
        ),
        combine_step(call),
    )


def combine_step(call: CallDescription) -> Step:
    """The launch that sums ``contributions`` float32 [routes, H] over each row's slots, in order, into the output."""
    blocks = call.rows * -(-call.experts.hidden_size // _MANY_THREADS)
    return _step(
        combine_module(call),
        min(blocks, MAX_GRID_X),
        CombineArguments(rows=call.rows, top_k=call.top_k, hidden=call.experts.hidden_size),
        (
            ("contributions", "contributions"),
            ("route_experts", "route_experts"),
            ("route_weights", "route_weights"),
            ("output", "output"),
        ),
    )


def _step(
    module: ModuleSource, blocks: int, arguments: ctypes.Structure, pointers: tuple[tuple[str, AddressSource], ...]
) -> Step:
    entry = module.entries[0]
    threads = 32 * _FEW_WARPS if entry.endswith("few") else _MANY_THREADS
    return Step(entry.removeprefix("portable_"), module, entry, (blocks, 1, 1), (threads, 1, 1), 0, arguments, pointers)


_GATE_UP_POINTERS: tuple[tuple[str, AddressSource], ...] = (
    ("input", 0),
    *matrix_pointers("fc1", "fc3"),
    ("global_scales", GLOBAL_SCALES["fc1"]),
    ("activated", "activated"),
)
_DOWN_POINTERS: tuple[tuple[str, AddressSource], ...] = (
    ("activated", "activated"),
    *matrix_pointers("fc2"),
    ("global_scales", GLOBAL_SCALES["fc2"]),
)


def _float32(value: float) -> float:
    """A finite attribute that float32 can't hold becomes its largest value, not an infinity."""
    return min(max(value, -_FLOAT_MAX), _FLOAT_MAX)


def gate_scalars(node: QMoENode) -> GateScalars:
    """The scalars of the gated activation."""
    limit = math.inf if node.swiglu_limit is None else _float32(node.swiglu_limit)
    return GateScalars(_float32(node.activation_alpha), _float32(node.activation_beta), limit)


def _gate_up_arguments(call: CallDescription) -> GateUpArguments:
    return GateUpArguments(
        routes=call.routes,
        top_k=call.top_k,
        hidden=call.experts.hidden_size,
        inter=call.experts.inter_size,
        activated_stride=activated_stride(call),
        scalars=gate_scalars(call.node),
    )


def _down_arguments(call: CallDescription) -> DownArguments:
    return DownArguments(
        rows=call.rows,
        top_k=call.top_k,
        hidden=call.experts.hidden_size,
        inter=call.experts.inter_size,
        activated_stride=activated_stride(call),
    )
