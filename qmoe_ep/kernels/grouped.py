"""The grouped kernel family: any number of rows, an expert's weights read once for all its tokens, on 8.0 and newer.

Device code: ``grouped.cuh`` (the products and the sum over slots) on ``grouped_stream.cuh`` (weights through a warp),
``grouped_codes.cuh``, ``grouped_activations.cuh`` and ``grouped_route.cuh``, and on the decode family's copies. Weights
stay in the ONNX layout and are dequantized exactly, without their scale, to 16-bit floats, which tensor cores multiply
with eight tokens at once; sums and scales are float32. Activations that 16 bits don't hold are parts that add up.
:func:`plan` is where a call enters; what is measured is in ``docs/performance.md``.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qmoe_ep.kernels.decode_geometry import Stream, streams_of
from qmoe_ep.kernels.operands import matrix_fields, matrix_pointers
from qmoe_ep.kernels.plan import AddressSource, ModuleSource, Plan, Step
from qmoe_ep.kernels.portable import CombineArguments, GateScalars, gate_scalars
from qmoe_ep.kernels.route import (
    RECORD_LAYOUT,
    check_index_ranges,
    group_scratch,
    group_steps,
    largest_tile_count,
    route_scratch,
    route_step,
)
from qmoe_ep.kernels.translation_unit import Entry, device_type, dtype_tag, module_name, translation_unit
from qmoe_ep.operator import ROUTER_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from qmoe_ep.call import CallDescription
    from qmoe_ep.capabilities import Capabilities

__all__ = ["DownArguments", "GateUpArguments", "Geometry", "RouteArguments", "decline_reason", "plan"]

VERSION = 1
TILE_ROWS = 16
GROUP_TOKENS = 8
_OLDEST = (8, 0)
_MOST_KEYS = 8
_POINTER = ctypes.c_void_p
_ROUTE_THREADS, _COMBINE_THREADS = 1024, 256
_ROUTE_ROWS = 128  # beyond that, one block takes longer to route than the launches of several
_ROUTE_SHARED = 96 << 10
_SLOT_BYTES = 1 << 10  # of the sums of a unit of two tiles and one group of tokens
_CHUNK_UNITS = 16  # units of a segment that is gone through in chunks


class RouteArguments(ctypes.Structure):
    """``qmoe::grouped::RouteArguments``."""

    _fields_ = (
        ("router_probs", _POINTER),
        ("router_weights", _POINTER),
        ("valid_rows", _POINTER),
        ("telemetry", _POINTER),
        ("route_experts", _POINTER),
        ("route_weights", _POINTER),
        ("grouped_routes", _POINTER),
        ("tiles", _POINTER),
        ("tile_count", _POINTER),
        ("rows", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("tile_routes", ctypes.c_int),
    )


class GateUpArguments(ctypes.Structure):
    """``qmoe::grouped::GateUpArguments``."""

    _fields_ = (
        ("input", _POINTER),
        *matrix_fields("fc1", "fc3"),
        ("grouped_routes", _POINTER),
        ("tiles", _POINTER),
        ("tile_count", _POINTER),
        ("activated", _POINTER),
        ("top_k", ctypes.c_int),
        ("tokens_offset", ctypes.c_int),
        ("token_bytes", ctypes.c_int),
        ("slots_offset", ctypes.c_int),
        ("slots", ctypes.c_int),
        ("scalars", GateScalars),
    )


class DownArguments(ctypes.Structure):
    """``qmoe::grouped::DownArguments``."""

    _fields_ = (
        ("activated", _POINTER),
        *matrix_fields("fc2"),
        ("grouped_routes", _POINTER),
        ("tiles", _POINTER),
        ("tile_count", _POINTER),
        ("contributions", _POINTER),
        ("tokens_offset", ctypes.c_int),
        ("token_bytes", ctypes.c_int),
        ("slots_offset", ctypes.c_int),
        ("slots", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a product spreads over the device.

    Attributes
    ----------
    warps : of a block
    stages : steps that a warp has in flight
    groups : of eight tokens of an expert that are multiplied with one reading of its weights
    blocks : per multiprocessor, in one wave
    """

    warps: int
    stages: int
    groups: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared memory of a product's block: the ring, the activations of tokens, and sums; offsets and sizes in bytes."""

    tokens_offset: int
    token_bytes: int
    slots_offset: int
    slots: int
    size: int


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
    geometry: Geometry | None = None,
) -> Plan | None:
    """Plan a call on the grouped kernels, or return ``None`` where :func:`decline_reason` says why not.

    Parameters
    ----------
    call : of one row or more
    capabilities : of the device
    alignment : bytes to which an operand's address is known to be aligned, by operand index; 16 where it says nothing
    geometry : of both products, to force one; by :func:`choose_geometries` otherwise
    """
    made = _make(call, capabilities, alignment or {}, geometry)
    return None if isinstance(made, str) else made


def _make(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int],
    geometry: Geometry | None,
) -> Plan | str:
    if capabilities.compute_capability < _OLDEST:
        return "the device is older than compute capability 8.0"
    if not call.rows:
        return "there are no rows"
    check_index_ranges(call)
    experts = call.experts
    streams = streams_of(call, alignment)
    if isinstance(streams, str):
        return streams
    fc1, fc2 = streams
    features = max(experts.hidden_size, experts.inter_size)
    if largest_tile_count(call, GROUP_TOKENS) * features >= 1 << 31:
        return "there are more units of work than the kernels can count"
    for chosen in choose_geometries(call) if geometry is None else (geometry,):
        first = _gate_up_step(call, capabilities, alignment, fc1, chosen)
        second = _down_step(call, capabilities, fc2, chosen)
        if first is not None and second is not None:
            break
    else:
        return "the activations of a group of tokens don't fit shared memory"
    tile_routes = GROUP_TOKENS * chosen.groups
    scratch = (
        *route_scratch(call),
        *(entry for entry in group_scratch(call, tile_routes)),
        ("activated", 4 * call.routes * _pitch(call)),
        ("contributions", 4 * call.routes * experts.hidden_size),
    )
    steps = (*_route_steps(call, capabilities, tile_routes), first, second, _combine_step(call))
    used = {source for step in steps for _, source in step.pointers}
    scratch = tuple((slot, nbytes) for slot, nbytes in scratch if slot in used)
    tokens = call.routes / experts.num_experts
    return Plan("grouped", f"{call.rows} rows, {tokens:.3g} tokens per expert", scratch, steps)


def choose_geometries(call: CallDescription) -> Iterator[Geometry]:
    """Geometries from the best to the smallest: as many groups as the tokens of an expert can need, up to four."""
    groups = min(4, 1 << (-(-call.rows // GROUP_TOKENS) - 1).bit_length())
    while groups:
        yield Geometry(8, 3, groups)
        yield Geometry(8, 2, groups)
        groups //= 2


# --- steps ------------------------------------------------------------------------------------------------------------

_GATING = {"none": "kNone", "interleaved": "kInterleaved", "halves": "kHalves", "fc3": "kThird"}
_ACTIVATION = {"relu": "kRelu", "gelu": "kGelu", "silu": "kSilu", "identity": "kIdentity", "swiglu": "kIdentity"}
_GROUPS: tuple[tuple[str, AddressSource], ...] = (
    ("grouped_routes", "grouped_routes"),
    ("tiles", "group_tiles"),
    ("tile_count", "tile_count"),
)


def _pitch(call: CallDescription) -> int:
    """Floats from one row of ``activated`` to the next."""
    return -(-call.experts.inter_size // 16) * 16


def _format(stream: Stream) -> str:
    return stream.device_type().replace("qmoe::decode::StreamFormat", "qmoe::grouped::RunFormat")


def _route_steps(call: CallDescription, capabilities: Capabilities, tile_routes: int) -> tuple[Step, ...]:
    """One launch where a block does it fast enough, or one to route and two to group."""
    experts = call.experts.num_experts
    shared = 4 * (64 + call.routes + experts * (1 + -(-call.routes // 32)))
    if call.rows > _ROUTE_ROWS or shared > min(_ROUTE_SHARED, capabilities.shared_bytes_per_block_optin):
        return (route_step(call), *group_steps(call, tile_routes))
    keys = -(-experts // 32)
    keys = 1 << (keys - 1).bit_length() if keys <= _MOST_KEYS else 0
    logits, weights = call.router_dtype, call.router_weights_dtype
    normalize = bool(call.node.normalize_routing_weights)
    types = f"{device_type(logits)}, {device_type(weights)}, {str(normalize).lower()}, {keys}"
    body = f"qmoe::grouped::route_and_group<{types}>"
    entry = Entry("grouped_route", RouteArguments, "qmoe::grouped::RouteArguments", body, _ROUTE_THREADS)
    tags = (dtype_tag(logits), dtype_tag(weights), "normalized" if normalize else "raw", keys)
    name = module_name("grouped", VERSION, "route", *tags)
    module = translation_unit(name, ("grouped_route.cuh",), (), (entry,), structs=(RECORD_LAYOUT,))
    threads = 32 * min(max(call.rows, -(-experts // 32), 4), _ROUTE_THREADS // 32)
    step = Step(
        name="route",
        module=module,
        entry=entry.name,
        grid=(1, 1, 1),
        block=(threads, 1, 1),
        shared_bytes=shared,
        arguments=RouteArguments(rows=call.rows, experts=experts, top_k=call.top_k, tile_routes=tile_routes),
        pointers=(
            ("router_probs", 1),
            ("router_weights", ROUTER_WEIGHTS),
            ("valid_rows", "valid_rows"),
            ("telemetry", "telemetry"),
            ("route_experts", "route_experts"),
            ("route_weights", "route_weights"),
            *_GROUPS,
        ),
        dependent=True,
    )
    return (step,)


def _blocks(capabilities: Capabilities, geometry: Geometry, call: CallDescription, units: int) -> int:
    most = largest_tile_count(call, GROUP_TOKENS * geometry.groups) * units
    return max(1, min(most, capabilities.multiprocessor_count * geometry.blocks))


def _shared(
    call: CallDescription, capabilities: Capabilities, stream: Stream, geometry: Geometry, parts: int
) -> Shared | None:
    """Places the parts of shared memory, or None where they don't fit."""
    groups = min(geometry.groups, -(-call.rows // GROUP_TOKENS))
    step_bytes = GROUP_TOKENS * groups * parts * 2 * stream.step_codes
    ring = geometry.warps * geometry.stages * 2 * stream.stage_bytes
    budget = capabilities.shared_bytes_per_block_optin // geometry.blocks - ring
    slots, tokens = geometry.warps * groups, step_bytes * stream.row_steps
    if tokens + slots * _SLOT_BYTES > budget:
        slots = (geometry.warps + _CHUNK_UNITS) * groups
        while slots > (geometry.warps + 1) * groups and step_bytes + slots * _SLOT_BYTES > budget:
            slots -= groups
        tokens = (budget - slots * _SLOT_BYTES) // step_bytes * step_bytes
        if tokens < step_bytes:
            return None
    return Shared(ring, tokens, ring + tokens, slots, ring + tokens + slots * _SLOT_BYTES)


def _gate_up_step(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int],
    stream: Stream,
    geometry: Geometry,
) -> Step | None:
    experts = call.experts
    parts = 3 if call.dtype == np.dtype(np.float32) else 1
    shared = _shared(call, capabilities, stream, geometry, parts)
    if shared is None:
        return None
    features = 2 * TILE_ROWS if experts.gating == "none" else TILE_ROWS
    element = "Halves" if call.dtype == np.dtype(np.float16) else "BFloats"
    item = call.dtype.itemsize
    input_bytes = max(item, math.gcd(16, alignment.get(0, 16), experts.hidden_size * item))
    function = "silu" if experts.gating != "none" else call.node.activation_type
    up_bias = experts.fc3.bias_dtype if experts.fc3 else experts.fc1.bias_dtype
    declaration = (
        f"using Layout = qmoe::grouped::GateUp<{device_type(call.dtype)}, {input_bytes}, qmoe::grouped::{element}, "
        f"{parts}, {_format(stream)}, {device_type(experts.fc1.bias_dtype)}, {device_type(up_bias)}, "
        f"qmoe::Gating::{_GATING[experts.gating]}, qmoe::Activation::{_ACTIVATION[function]}, {_pitch(call)}, "
        f"{geometry.groups}, {geometry.stages}>;"
    )
    tags = (experts.gating, function, dtype_tag(call.dtype), f"x{input_bytes}", stream.tag(), dtype_tag(up_bias))
    arguments = GateUpArguments(
        top_k=call.top_k,
        tokens_offset=shared.tokens_offset,
        token_bytes=shared.token_bytes,
        slots_offset=shared.slots_offset,
        slots=shared.slots,
        scalars=gate_scalars(call.node),
    )
    pointers: tuple[tuple[str, AddressSource], ...] = (
        ("input", 0),
        *matrix_pointers("fc1", "fc3"),
        *_GROUPS,
        ("activated", "activated"),
    )
    module = _module("gate_up", GateUpArguments, geometry, declaration, *tags)
    blocks = _blocks(capabilities, geometry, call, -(-experts.inter_size // features))
    return _step("gate_up", module, blocks, geometry, shared, arguments, pointers)


def _down_step(call: CallDescription, capabilities: Capabilities, stream: Stream, geometry: Geometry) -> Step | None:
    experts = call.experts
    parts = 3 if call.dtype == np.dtype(np.float32) else 2
    shared = _shared(call, capabilities, stream, geometry, parts)
    if shared is None:
        return None
    declaration = (
        f"using Layout = qmoe::grouped::Down<qmoe::grouped::BFloats, {parts}, {_format(stream)}, "
        f"{device_type(experts.fc2.bias_dtype)}, {_pitch(call)}, {geometry.groups}, {geometry.stages}>;"
    )
    arguments = DownArguments(
        tokens_offset=shared.tokens_offset,
        token_bytes=shared.token_bytes,
        slots_offset=shared.slots_offset,
        slots=shared.slots,
    )
    pointers: tuple[tuple[str, AddressSource], ...] = (
        ("activated", "activated"),
        *matrix_pointers("fc2"),
        *_GROUPS,
        ("contributions", "contributions"),
    )
    module = _module("down", DownArguments, geometry, declaration, f"p{parts}", stream.tag())
    blocks = _blocks(capabilities, geometry, call, -(-experts.hidden_size // (2 * TILE_ROWS)))
    return _step("down", module, blocks, geometry, shared, arguments, pointers)


def _module(
    kernel: str, arguments: type[ctypes.Structure], geometry: Geometry, declaration: str, *tags: str
) -> ModuleSource:
    threads = 32 * geometry.warps
    body, struct = f"qmoe::grouped::{kernel}<Layout>", f"qmoe::grouped::{arguments.__name__}"
    entry = Entry(f"grouped_{kernel}", arguments, struct, body, threads, min_blocks=geometry.blocks)
    name = module_name(
        "grouped", VERSION, kernel, *tags, f"n{geometry.groups}t{threads}d{geometry.stages}r{geometry.blocks}"
    )
    return translation_unit(name, ("grouped.cuh",), (declaration,), (entry,))


def _step(
    name: str,
    module: ModuleSource,
    blocks: int,
    geometry: Geometry,
    shared: Shared,
    arguments: ctypes.Structure,
    pointers: tuple[tuple[str, AddressSource], ...],
) -> Step:
    grid, block = (blocks, 1, 1), (32 * geometry.warps, 1, 1)
    return Step(name, module, module.entries[0], grid, block, shared.size, arguments, pointers, dependent=True)


def _combine_step(call: CallDescription) -> Step:
    """The launch that sums ``contributions`` float32 [routes, H] over each row's slots, in order, into the output."""
    body = f"qmoe::grouped::combine<{device_type(call.dtype)}>"
    entry = Entry("grouped_combine", CombineArguments, "qmoe::grouped::CombineArguments", body, _COMBINE_THREADS)
    module = translation_unit(
        module_name("grouped", VERSION, "combine", dtype_tag(call.dtype)), ("grouped.cuh",), (), (entry,)
    )
    blocks = call.rows * -(-call.experts.hidden_size // _COMBINE_THREADS)
    return Step(
        name="combine",
        module=module,
        entry=entry.name,
        grid=(min(blocks, 2**31 - 1), 1, 1),
        block=(_COMBINE_THREADS, 1, 1),
        shared_bytes=0,
        arguments=CombineArguments(rows=call.rows, top_k=call.top_k, hidden=call.experts.hidden_size),
        pointers=(
            ("contributions", "contributions"),
            ("route_experts", "route_experts"),
            ("route_weights", "route_weights"),
            ("output", "output"),
        ),
        dependent=True,
    )
