"""The decode kernel family: a row through its experts in two launches, on compute capability 8.0 and newer.

Device code: ``decode.cuh`` (the two kernels) on ``decode_stream.cuh`` (weights through a warp), ``decode_codes.cuh``,
``decode_activations.cuh`` and ``decode_route.cuh``. Both kernels select the experts themselves. Weights stay in the
ONNX layout and are read once, dequantized exactly to half integers and multiplied on tensor cores with activations
that are halves, or two halves where a half can't hold them; sums are float32. :func:`plan` is where a call enters;
what is measured is in ``docs/performance.md``.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from qmoe_ep.kernels.operands import matrix_fields, matrix_pointers
from qmoe_ep.kernels.plan import AddressSource, ModuleSource, Plan, Step
from qmoe_ep.kernels.portable import GateScalars, gate_scalars
from qmoe_ep.kernels.route import RECORD_LAYOUT
from qmoe_ep.kernels.translation_unit import Entry, device_type, dtype_tag, module_name, translation_unit
from qmoe_ep.operator import MATRIX_INPUTS, ROUTER_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qmoe_ep.call import CallDescription, ExpertMatrix
    from qmoe_ep.capabilities import Capabilities

__all__ = ["DownArguments", "GateUpArguments", "Geometry", "decline_reason", "plan"]

VERSION = 1
TILE_ROWS = 16
_OLDEST = (8, 0)
_MOST_KEYS = 8
_POINTER = ctypes.c_void_p
_RESERVED_SHARED = 1 << 10  # that the system takes of every block


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
    )


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one kernel spreads over the device.

    Attributes
    ----------
    warps : of a block
    stages : steps that a warp has in flight
    blocks : per multiprocessor, in one wave
    resident : blocks of either kernel that the registers of a multiprocessor are to hold
    """

    warps: int
    stages: int
    blocks: int = 1
    resident: int = 2


@dataclass(frozen=True, slots=True)
class Stream:
    """The host's view of ``qmoe::decode::StreamFormat``: sizes in bytes or codes of one step of a tile.

    Attributes
    ----------
    codes_copy, scales_copy : widths of copies, bytes; see the device code
    """

    matrix: ExpertMatrix
    codes_copy: int
    scales_copy: int

    @property
    def lane_codes(self) -> int:
        """Codes of a row that one lane multiplies in a step."""
        return {8: 32, 1: 128}.get(self.matrix.bits, 64)

    @property
    def step_codes(self) -> int:
        """Codes of a row in one step."""
        return 4 * self.lane_codes

    @property
    def row_steps(self) -> int:
        """Steps that cover a row."""
        return -(-self.matrix.in_features // self.step_codes)

    @property
    def fold(self) -> int:
        """Codes of a lane that are summed before they are scaled."""
        return min(self.matrix.block_size or self.lane_codes, self.lane_codes)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one step."""
        matrix = self.matrix
        blocks = max(self.step_codes // matrix.block_size, 1) if matrix.block_size else 1
        scale_bytes = blocks * matrix.scale_dtype.itemsize
        scale_pitch = (scale_bytes + 5) // 4 * 4 if self.scales_copy == 2 else scale_bytes
        zero_bits = blocks * matrix.bits
        zero_bytes = zero_bits // 8
        if zero_bits % 8:
            zero_bytes = (zero_bits + 7 + (7 if matrix.bits == 3 else 0)) // 8
        zero_pitch = (zero_bytes + 6) // 4 * 4 if matrix.zero_points else 0
        codes = self.step_codes * matrix.bits // 8
        return -(-TILE_ROWS * (codes + scale_pitch + zero_pitch) // 16) * 16

    def row_piece_bytes(self, split: bool) -> int:
        """Shared memory of one row of activations."""
        return self.row_steps * self.step_codes * (4 if split else 2)

    def row_factor_bytes(self, split: bool) -> int:
        """Shared memory of the factors that go with one row of activations."""
        return self.row_steps * self.step_codes // self.fold * (8 if split else 4)

    def device_type(self) -> str:
        """C++ type of the format."""
        matrix = self.matrix
        zero_points = str(matrix.zero_points).lower()
        scale = device_type(matrix.scale_dtype)
        return (
            f"qmoe::decode::StreamFormat<{matrix.bits}, {matrix.block_size}, {zero_points}, {scale}, "
            f"{self.codes_copy}, {self.scales_copy}, {matrix.out_features}, {matrix.in_features}>"
        )

    def tag(self) -> str:
        """Its part of a module's name."""
        matrix = self.matrix
        return (
            f"w{matrix.bits}g{matrix.block_size}{'z' if matrix.zero_points else ''}"
            f"_s{dtype_tag(matrix.scale_dtype)}_b{dtype_tag(matrix.bias_dtype)}_c{self.codes_copy}_{self.scales_copy}"
            f"_{matrix.out_features}x{matrix.in_features}"
        )


def stream_of(matrix: ExpertMatrix, alignment: Mapping[AddressSource, int]) -> Stream | str:
    """How a matrix is streamed, or why it can't be."""
    weights, scales, _, zero_points = MATRIX_INPUTS[matrix.name]
    if matrix.in_features * matrix.bits % 32:
        return f"rows of {matrix.name} are not whole words of 4 bytes"
    span = {8: 128, 1: 64}.get(matrix.bits, 32 * matrix.bits)
    codes_copy = math.gcd(16, alignment.get(weights, 16), matrix.row_bytes, span)
    if codes_copy < 4:
        return f"the weights of {matrix.name} are aligned to {codes_copy} bytes only"
    if matrix.zero_points and alignment.get(zero_points, 16) % 4:
        return f"the zero points of {matrix.name} are not aligned to 4 bytes"
    if alignment.get(scales, 16) % 4:
        return f"the scales of {matrix.name} are not aligned to 4 bytes"
    step_codes = 4 * {8: 32, 1: 128}.get(matrix.bits, 64)
    blocks = max(step_codes // matrix.block_size, 1) if matrix.block_size else 1
    item = matrix.scale_dtype.itemsize
    scales_copy = math.gcd(16, alignment.get(scales, 16), matrix.blocks * item, blocks * item)
    return Stream(matrix, codes_copy, scales_copy)


def decline_reason(
    call: CallDescription, capabilities: Capabilities, alignment: Mapping[AddressSource, int] | None = None
) -> str | None:
    """Why the family doesn't serve a call, in a clause; ``None`` if it does."""
    made = _make(call, capabilities, alignment or {}, None, None)
    return made if isinstance(made, str) else None


def plan(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int] | None = None,
    *,
    gate_up: Geometry | None = None,
    down: Geometry | None = None,
) -> Plan | None:
    """Plan a call on the decode kernels, or return ``None`` where :func:`decline_reason` says why not.

    Parameters
    ----------
    call : of one row
    capabilities : of the device
    alignment : bytes to which an operand's address is known to be aligned, by operand index; 16 where it says nothing
    gate_up, down : geometry to force; by the table otherwise
    """
    made = _make(call, capabilities, alignment or {}, gate_up, down)
    return None if isinstance(made, str) else made


def _make(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int],
    gate_up: Geometry | None,
    down: Geometry | None,
) -> Plan | str:
    if capabilities.compute_capability < _OLDEST:
        return "the device is older than compute capability 8.0"
    if call.rows != 1:
        return f"{call.rows} rows are not one"
    experts = call.experts
    streams = [stream_of(matrix, alignment) for matrix in experts.matrices]
    for stream in streams:
        if isinstance(stream, str):
            return stream
    fc1, fc2, *rest = (stream for stream in streams if isinstance(stream, Stream))
    if rest:
        merged = merged_stream(fc1, rest[0])
        if merged is None:
            return "FC1 and FC3 differ in width, zero points or scale type"
        fc1 = merged
    first = _gate_up_step(call, capabilities, alignment, fc1, gate_up)
    second = _down_step(call, capabilities, fc2, down)
    if first is None or second is None:
        return "the activations of a row don't fit shared memory"
    scratch = (("activated", 4 * call.routes * experts.inter_size),)
    return Plan("decode", "one row", scratch, (first, second))


def merged_stream(gate: Stream, up: Stream) -> Stream | None:
    """One stream for gate and up rows that come from two matrices."""
    same = ("bits", "block_size", "zero_points", "scale_dtype")
    if any(getattr(gate.matrix, name) != getattr(up.matrix, name) for name in same):
        return None
    return Stream(gate.matrix, min(gate.codes_copy, up.codes_copy), min(gate.scales_copy, up.scales_copy))


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


class _Layout:
    """Places the parts of a block's shared memory one after another, each aligned to 16 bytes."""

    def __init__(self) -> None:
        self.size = 0

    def place(self, nbytes: int) -> int:
        offset = self.size
        self.size += -(-nbytes // 16) * 16
        return offset


def _geometry(stream: Stream, kernel: Literal["gate_up", "down"]) -> Geometry:
    """The default geometry.

    With 4 bits the registers of a multiprocessor hold a block of either kernel, so that the second one starts to
    read while the first one ends: 5 to 15 % of a layer on an H200. The other widths need more registers than that
    leaves without spilling, and ten warps where twelve would spill.
    """
    stages = 4 if kernel == "gate_up" else 3
    if stream.matrix.bits != 4:
        return Geometry(10, stages, resident=1)
    return Geometry(12 if kernel == "gate_up" and not stream.matrix.zero_points else 10, stages, resident=2)


def _blocks(capabilities: Capabilities, geometry: Geometry, shares: int) -> int:
    return max(1, min(shares, capabilities.multiprocessor_count * geometry.blocks))


def _gate_up_step(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int],
    stream: Stream,
    geometry: Geometry | None,
) -> Step | None:
    experts = call.experts
    split = call.dtype != np.dtype(np.float16)
    features = TILE_ROWS if experts.gating == "none" else TILE_ROWS // 2
    units = call.top_k * -(-experts.inter_size // features)
    geometry = geometry or _geometry(stream, "gate_up")
    blocks = _blocks(capabilities, geometry, units)
    layout = _Layout()
    layout.place(geometry.warps * geometry.stages * stream.stage_bytes)
    arguments = GateUpArguments(
        experts=experts.num_experts,
        top_k=call.top_k,
        pieces_offset=layout.place(stream.row_piece_bytes(split)),
        factors_offset=layout.place(stream.row_factor_bytes(split)),
        partials_offset=layout.place(64 * (-(-units // blocks) + geometry.warps)),
        selected_offset=layout.place(4 * call.top_k),
        scalars=gate_scalars(call.node),
    )
    if layout.size > capabilities.shared_bytes_per_block_optin:
        return None
    routing, routing_tag = _routing(call)
    input_bytes = math.gcd(16, alignment.get(0, 16))
    function = "silu" if experts.gating != "none" else call.node.activation_type
    up_bias = experts.fc3.bias_dtype if experts.fc3 else experts.fc1.bias_dtype
    declaration = (
        f"using Layout = qmoe::decode::GateUp<{routing}, {device_type(call.dtype)}, {input_bytes}, "
        f"{stream.device_type()}, {device_type(experts.fc1.bias_dtype)}, {device_type(up_bias)}, "
        f"qmoe::Gating::{_GATING[experts.gating]}, qmoe::Activation::{_ACTIVATION[function]}, {geometry.stages}>;"
    )
    tags = (experts.gating, function, dtype_tag(call.dtype), f"x{input_bytes}", stream.tag(), dtype_tag(up_bias))
    module = _module("gate_up", GateUpArguments, geometry, declaration, routing_tag, *tags)
    pointers: tuple[tuple[str, AddressSource], ...] = (
        *_ROUTE_POINTERS,
        ("telemetry", "telemetry"),
        ("input", 0),
        *matrix_pointers("fc1", "fc3"),
        ("activated", "activated"),
    )
    return _step("gate_up", module, blocks, geometry, layout, arguments, pointers)


def _down_step(
    call: CallDescription, capabilities: Capabilities, stream: Stream, geometry: Geometry | None
) -> Step | None:
    experts = call.experts
    tiles = -(-experts.hidden_size // TILE_ROWS)
    geometry = geometry or _geometry(stream, "down")
    blocks = _blocks(capabilities, geometry, tiles)
    layout = _Layout()
    layout.place(geometry.warps * geometry.stages * stream.stage_bytes)
    partials = -(-tiles // blocks) * (call.top_k + geometry.warps - 1)
    arguments = DownArguments(
        experts=experts.num_experts,
        top_k=call.top_k,
        pieces_offset=layout.place(call.top_k * stream.row_piece_bytes(True)),
        factors_offset=layout.place(call.top_k * stream.row_factor_bytes(True)),
        partials_offset=layout.place(64 * partials),
        selected_offset=layout.place(4 * call.top_k),
        weights_offset=layout.place(4 * call.top_k),
    )
    if layout.size > capabilities.shared_bytes_per_block_optin:
        return None
    routing, routing_tag = _routing(call)
    declaration = (
        f"using Layout = qmoe::decode::Down<{routing}, {device_type(call.dtype)}, "
        f"{stream.device_type()}, {device_type(experts.fc2.bias_dtype)}, {geometry.stages}>;"
    )
    module = _module("down", DownArguments, geometry, declaration, routing_tag, dtype_tag(call.dtype), stream.tag())
    pointers: tuple[tuple[str, AddressSource], ...] = (
        *_ROUTE_POINTERS,
        ("activated", "activated"),
        *matrix_pointers("fc2"),
        ("output", "output"),
    )
    return _step("down", module, blocks, geometry, layout, arguments, pointers)


def _step(
    name: str,
    module: ModuleSource,
    blocks: int,
    geometry: Geometry,
    layout: _Layout,
    arguments: ctypes.Structure,
    pointers: tuple[tuple[str, AddressSource], ...],
) -> Step:
    grid, block = (blocks, 1, 1), (32 * geometry.warps, 1, 1)
    return Step(name, module, module.entries[0], grid, block, layout.size, arguments, pointers, dependent=True)


def _module(
    kernel: str, arguments: type[ctypes.Structure], geometry: Geometry, declaration: str, *tags: str
) -> ModuleSource:
    threads = 32 * geometry.warps
    entry = Entry(
        f"decode_{kernel}",
        arguments,
        f"qmoe::decode::{arguments.__name__}",
        f"qmoe::decode::{kernel}<Layout>",
        threads,
        min_blocks=geometry.resident,
    )
    name = module_name("decode", VERSION, kernel, *tags, f"t{threads}d{geometry.stages}r{geometry.resident}")
    return translation_unit(name, ("decode.cuh",), (declaration,), (entry,), structs=(RECORD_LAYOUT,))


_ROUTE_POINTERS: tuple[tuple[str, AddressSource], ...] = (
    ("router_probs", 1),
    ("router_weights", ROUTER_WEIGHTS),
    ("valid_rows", "valid_rows"),
)
