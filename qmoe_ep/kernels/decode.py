"""The decode kernel family: a row through its experts in two launches, on compute capability 8.0 and newer.

Device code: ``decode.cuh`` (the two kernels) on ``decode_stream.cuh`` (weights through a warp),
``decode_codes.cuh``, ``decode_activations.cuh`` and ``decode_route.cuh``. Both kernels select the experts
themselves. Weights stay in the ONNX layout and are read once; their codes are multiplied exactly, on tensor cores,
with activations that are halves, or two halves where a half can't hold them; sums are float32. :func:`plan` is where
a call enters; what is measured is in ``docs/performance.md``.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

from qmoe_ep.kernels.decode_geometry import (
    REGISTERS,
    TILE_ROWS,
    DownShape,
    GateUpShape,
    Geometry,
    choose_geometry,
    fits,
    streams_of,
)
from qmoe_ep.kernels.operands import matrix_fields, matrix_pointers
from qmoe_ep.kernels.plan import AddressSource, ModuleSource, Plan, Step
from qmoe_ep.kernels.portable import GateScalars, gate_scalars
from qmoe_ep.kernels.route import RECORD_LAYOUT
from qmoe_ep.kernels.translation_unit import Entry, device_type, dtype_tag, module_name, translation_unit
from qmoe_ep.operator import ROUTER_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qmoe_ep.call import CallDescription
    from qmoe_ep.capabilities import Capabilities

__all__ = ["DownArguments", "GateUpArguments", "decline_reason", "plan"]

VERSION = 3
_OLDEST = (8, 0)
_MOST_KEYS = 8
_POINTER = ctypes.c_void_p


class GateUpArguments(ctypes.Structure):
    """``qmoe::decode::GateUpArguments``."""

    _fields_ = (
        ("router_probs", _POINTER),
        ("router_weights", _POINTER),
        ("valid_rows", _POINTER),
        ("telemetry", _POINTER),
        ("input", _POINTER),
        *matrix_fields("fc1", "fc3"),
        ("activated", _POINTER),
        ("experts", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("pieces_offset", ctypes.c_int),
        ("factors_offset", ctypes.c_int),
        ("partials_offset", ctypes.c_int),
        ("selected_offset", ctypes.c_int),
        ("activated_pitch", ctypes.c_int),
        ("scalars", GateScalars),
    )


class DownArguments(ctypes.Structure):
    """``qmoe::decode::DownArguments``."""

    _fields_ = (
        ("router_probs", _POINTER),
        ("router_weights", _POINTER),
        ("valid_rows", _POINTER),
        ("activated", _POINTER),
        *matrix_fields("fc2"),
        ("output", _POINTER),
        ("experts", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("pieces_offset", ctypes.c_int),
        ("factors_offset", ctypes.c_int),
        ("partials_offset", ctypes.c_int),
        ("selected_offset", ctypes.c_int),
        ("weights_offset", ctypes.c_int),
        ("results_offset", ctypes.c_int),
    )


def decline_reason(
    call: CallDescription, capabilities: Capabilities, alignment: Mapping[AddressSource, int] | None = None
) -> str | None:
    """Why the family doesn't serve a call, in a clause; ``None`` if it does."""
    made = _make(call, capabilities, alignment or {}, None)
    return made if isinstance(made, str) else None


def plan(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int] | None = None,
    *,
    geometry: tuple[Geometry, Geometry] | None = None,
) -> Plan | None:
    """Plan a call on the decode kernels, or return ``None`` where :func:`decline_reason` says why not.

    Parameters
    ----------
    call : of one row
    capabilities : of the device
    alignment : bytes to which an operand's address is known to be aligned, by operand index; 16 where it says nothing
    geometry : to force, of gate/up and down; by :func:`choose_geometry` otherwise
    """
    made = _make(call, capabilities, alignment or {}, geometry)
    return None if isinstance(made, str) else made


def shapes(
    call: CallDescription, capabilities: Capabilities, alignment: Mapping[AddressSource, int] | None = None
) -> tuple[GateUpShape, DownShape] | str:
    """What the two kernels of a call have to do, or why its matrices can't be streamed."""
    streams = streams_of(call, alignment or {})
    if isinstance(streams, str):
        return streams
    fc1, fc2 = streams
    return GateUpShape.of(call, capabilities, fc1), DownShape.of(call, capabilities, fc2)


def _make(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int],
    geometry: tuple[Geometry, Geometry] | None,
) -> Plan | str:
    if capabilities.compute_capability < _OLDEST:
        return "the device is older than compute capability 8.0"
    if call.rows != 1:
        return f"{call.rows} rows are not one"
    found = shapes(call, capabilities, alignment)
    if isinstance(found, str):
        return found
    gate_up, down = found
    if max(gate_up.largest_product, down.largest_product) >= 1 << 31 or max(gate_up.steps, down.steps) >= 1 << 20:
        return "the features of a row's experts are more than the kernels can count"
    chosen = geometry or choose_geometry(gate_up, down, capabilities)
    if chosen is None or not fits(gate_up, down, chosen, capabilities):
        return "the activations of a row don't fit shared memory"
    pitch = down.stream.row_steps * down.stream.step_codes
    first = _gate_up_step(call, gate_up, chosen[0], alignment, pitch)
    second = _down_step(call, down, chosen[1])
    scratch = (("activated", 4 * call.routes * pitch),)
    return Plan("decode", "one row", scratch, (first, second))


# --- steps ------------------------------------------------------------------------------------------------------------

_GATING = {"none": "kNone", "interleaved": "kInterleaved", "halves": "kHalves", "fc3": "kThird"}
_ACTIVATION = {"relu": "kRelu", "gelu": "kGelu", "silu": "kSilu", "identity": "kIdentity", "swiglu": "kIdentity"}


def _routing(call: CallDescription) -> tuple[str, str]:
    """C++ type and tag of ``qmoe::decode::Routing``."""
    keys = -(-call.experts.num_experts // 32)
    keys = 1 << (keys - 1).bit_length() if keys <= _MOST_KEYS else 0
    normalize = bool(call.node.normalize_routing_weights)
    logits, weights = call.router_dtype, call.router_weights_dtype
    text = f"qmoe::decode::Routing<{device_type(logits)}, {device_type(weights)}, {str(normalize).lower()}, {keys}>"
    return text, f"r{dtype_tag(logits)}_{dtype_tag(weights)}_{'n' if normalize else 'u'}{keys}"


def _gate_up_step(
    call: CallDescription,
    shape: GateUpShape,
    geometry: Geometry,
    alignment: Mapping[AddressSource, int],
    activated_pitch: int,
) -> Step:
    experts, stream = call.experts, shape.stream
    offsets, shared_bytes = shape.layout(geometry)
    arguments = GateUpArguments(
        experts=experts.num_experts,
        top_k=call.top_k,
        activated_pitch=activated_pitch,
        scalars=gate_scalars(call.node),
        **offsets,
    )
    routing, routing_tag = _routing(call)
    input_bytes = math.gcd(16, alignment.get(0, 16))
    function = "silu" if experts.gating != "none" else call.node.activation_type
    up_bias = experts.fc3.bias_dtype if experts.fc3 else experts.fc1.bias_dtype
    declaration = (
        f"using Layout = qmoe::decode::GateUp<{routing}, {device_type(call.dtype)}, {input_bytes}, "
        f"{stream.device_type()}, {device_type(experts.fc1.bias_dtype)}, {device_type(up_bias)}, "
        f"qmoe::Gating::{_GATING[experts.gating]}, qmoe::Activation::{_ACTIVATION[function]}, {geometry.stages}, "
        f"{min(geometry.ahead, geometry.stages)}>;"
    )
    tags = (experts.gating, function, dtype_tag(call.dtype), f"x{input_bytes}", stream.tag(), dtype_tag(up_bias))
    module = _module("gate_up", GateUpArguments, geometry, declaration, routing_tag, *tags, f"a{geometry.ahead}")
    pointers: tuple[tuple[str, AddressSource], ...] = (
        *_ROUTE_POINTERS,
        ("telemetry", "telemetry"),
        ("input", 0),
        *matrix_pointers("fc1", "fc3"),
        ("activated", "activated"),
    )
    return Step(
        "gate_up",
        module,
        module.entries[0],
        (shape.blocks, 1, 1),
        (32 * geometry.warps, 1, 1),
        shared_bytes,
        arguments,
        pointers,
        dependent=True,
    )


def _down_step(call: CallDescription, shape: DownShape, geometry: Geometry) -> Step:
    experts, stream = call.experts, shape.stream
    offsets, shared_bytes = shape.layout(geometry)
    arguments = DownArguments(experts=experts.num_experts, top_k=call.top_k, **offsets)
    routing, routing_tag = _routing(call)
    declaration = (
        f"using Layout = qmoe::decode::Down<{routing}, {device_type(call.dtype)}, "
        f"{stream.device_type()}, {device_type(experts.fc2.bias_dtype)}, {geometry.stages}, "
        f"{str(shape.share_rows < TILE_ROWS).lower()}>;"
    )
    tags = (dtype_tag(call.dtype), stream.tag(), f"n{shape.share_rows}")
    module = _module("down", DownArguments, geometry, declaration, routing_tag, *tags)
    pointers: tuple[tuple[str, AddressSource], ...] = (
        *_ROUTE_POINTERS,
        ("activated", "activated"),
        *matrix_pointers("fc2"),
        ("output", "output"),
    )
    return Step(
        "down",
        module,
        module.entries[0],
        (shape.blocks, 1, 1),
        (32 * geometry.warps, 1, 1),
        shared_bytes,
        arguments,
        pointers,
        dependent=True,
    )


def _module(
    kernel: str, arguments: type[ctypes.Structure], geometry: Geometry, declaration: str, *tags: str
) -> ModuleSource:
    threads = 32 * geometry.warps
    entry = Entry(
        f"decode_{kernel}",
        arguments,
        f"qmoe::decode::{arguments.__name__}",
        f"qmoe::decode::{kernel}<Layout>",
        # A block of as many threads is what bounds the registers of each; it is launched with fewer.
        max(REGISTERS // geometry.registers // 128 * 128, threads),
    )
    name = module_name("decode", VERSION, kernel, *tags, f"t{threads}d{geometry.stages}r{geometry.registers}")
    return translation_unit(name, ("decode.cuh",), (declaration,), (entry,), structs=(RECORD_LAYOUT,))


_ROUTE_POINTERS: tuple[tuple[str, AddressSource], ...] = (
    ("router_probs", 1),
    ("router_weights", ROUTER_WEIGHTS),
    ("valid_rows", "valid_rows"),
)
