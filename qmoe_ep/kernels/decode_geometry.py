"""How the decode kernels stream a matrix, and how they spread over a device: pure functions of shape and device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from qmoe_ep.kernels.translation_unit import device_type, dtype_tag
from qmoe_ep.operator import MATRIX_INPUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qmoe_ep.call import CallDescription, ExpertMatrix
    from qmoe_ep.capabilities import Capabilities
    from qmoe_ep.kernels.plan import AddressSource

__all__ = [
    "REGISTERS",
    "TILE_ROWS",
    "DownShape",
    "GateUpShape",
    "Geometry",
    "Stream",
    "choose_geometry",
    "fits",
    "stream_of",
    "streams_of",
]

TILE_ROWS = 16
REGISTERS = 1 << 16
"""Of a multiprocessor."""
_RESERVED_SHARED = 1 << 10  # that the system takes of every block
_MOST_STAGES = 8
_MOST_WARPS = 16
_TUNED = (9, 0)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one kernel spreads over the device.

    Attributes
    ----------
    warps : of a block
    stages : steps that a warp has in flight
    registers : most that a thread may use
    shared_bytes : least that a block takes, to keep others off the multiprocessor
    ahead : stages of gate/up that are begun before the row's activations are staged
    """

    warps: int
    stages: int
    registers: int
    shared_bytes: int = 0
    ahead: int = 2


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
        return _lane_codes(self.matrix)

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


def _lane_codes(matrix: ExpertMatrix) -> int:
    """``StreamFormat::kLaneCodes``."""
    if matrix.bits == 8:
        return 32
    return 128 if matrix.bits == 1 and matrix.block_size != 16 else 64


def stream_of(matrix: ExpertMatrix, alignment: Mapping[AddressSource, int]) -> Stream | str:
    """How a matrix is streamed, or why it can't be."""
    weights, scales, _, zero_points = MATRIX_INPUTS[matrix.name]
    if matrix.in_features * matrix.bits % 32:
        return f"rows of {matrix.name} are not whole words of 4 bytes"
    span = _lane_codes(matrix) * matrix.bits // 2
    codes_copy = math.gcd(16, alignment.get(weights, 16), matrix.row_bytes, span)
    if codes_copy < 4:
        return f"the weights of {matrix.name} are aligned to {codes_copy} bytes only"
    if matrix.zero_points and alignment.get(zero_points, 16) % 4:
        return f"the zero points of {matrix.name} are not aligned to 4 bytes"
    if alignment.get(scales, 16) % 4:
        return f"the scales of {matrix.name} are not aligned to 4 bytes"
    blocks = max(4 * _lane_codes(matrix) // matrix.block_size, 1) if matrix.block_size else 1
    item = matrix.scale_dtype.itemsize
    scales_copy = math.gcd(16, alignment.get(scales, 16), matrix.blocks * item, blocks * item)
    return Stream(matrix, codes_copy, scales_copy)


def streams_of(call: CallDescription, alignment: Mapping[AddressSource, int]) -> tuple[Stream, Stream] | str:
    """How FC1 (with FC3) and FC2 are read; or why one of them can't be, in a clause."""
    streams: list[Stream] = []
    for matrix in call.experts.matrices:
        stream = stream_of(matrix, alignment)
        if isinstance(stream, str):
            return stream
        streams.append(stream)
    fc1, fc2, *rest = streams
    if not rest:
        return fc1, fc2
    merged = _merged_stream(fc1, rest[0])
    return "FC1 and FC3 differ in width, zero points or scale type" if merged is None else (merged, fc2)


def _merged_stream(gate: Stream, up: Stream) -> Stream | None:
    """One stream for gate and up rows that come from two matrices."""
    same = ("bits", "block_size", "zero_points", "scale_dtype")
    if any(getattr(gate.matrix, name) != getattr(up.matrix, name) for name in same):
        return None
    return Stream(gate.matrix, min(gate.codes_copy, up.codes_copy), min(gate.scales_copy, up.scales_copy))


class _Layout:
    """Places the parts of a block's shared memory one after another, each aligned to 16 bytes."""

    def __init__(self) -> None:
        self.size = 0

    def place(self, nbytes: int) -> int:
        offset = self.size
        self.size += -(-nbytes // 16) * 16
        return offset


@dataclass(frozen=True, slots=True)
class GateUpShape:
    """What the gate/up kernel of a call has to do, whatever its geometry.

    Attributes
    ----------
    split : whether activations are two halves
    wide_logits : whether logits have 32 bits
    units : (slot, tile) pairs
    blocks : of the grid, each of which owns an equal share of the units
    """

    stream: Stream
    top_k: int
    split: bool
    wide_logits: bool
    units: int
    blocks: int

    @classmethod
    def of(cls, call: CallDescription, capabilities: Capabilities, stream: Stream) -> GateUpShape:
        """Of a call."""
        features = TILE_ROWS if call.experts.gating == "none" else TILE_ROWS // 2
        units = call.top_k * -(-call.experts.inter_size // features)
        split = call.dtype != np.dtype(np.float16)
        wide = call.router_dtype.itemsize == 4
        return cls(stream, call.top_k, split, wide, units, min(units, capabilities.multiprocessor_count))

    @property
    def largest_product(self) -> int:
        """The largest product that the kernel forms when it divides its work."""
        return max(self.units * self.blocks, (self.steps + 1) * _MOST_WARPS)

    @property
    def steps(self) -> int:
        """Most steps of a block."""
        return -(-self.units // self.blocks) * self.stream.row_steps

    def layout(self, geometry: Geometry) -> tuple[dict[str, int], int]:
        """Offsets of the parts of shared memory, and its size."""
        layout = _Layout()
        layout.place(geometry.warps * geometry.stages * self.stream.stage_bytes)
        offsets = {
            "pieces_offset": layout.place(self.stream.row_piece_bytes(self.split)),
            "factors_offset": layout.place(self.stream.row_factor_bytes(self.split)),
            "partials_offset": layout.place(64 * (-(-self.units // self.blocks) + geometry.warps)),
            "selected_offset": layout.place(4 * self.top_k * geometry.warps),
        }
        return offsets, max(layout.size, geometry.shared_bytes)


@dataclass(frozen=True, slots=True)
class DownShape:
    """What the down kernel of a call has to do, whatever its geometry.

    Attributes
    ----------
    share_rows : 16, or 8 where blocks then come out more even
    shares : of so many output features
    blocks : of the grid, each of which owns an equal number of shares
    """

    stream: Stream
    top_k: int
    share_rows: int
    shares: int
    blocks: int

    @classmethod
    def of(cls, call: CallDescription, capabilities: Capabilities, stream: Stream) -> DownShape:
        """Of a call."""
        hidden, most = call.experts.hidden_size, capabilities.multiprocessor_count

        def largest(rows: int) -> int:
            shares = -(-hidden // rows)
            return rows * -(-shares // min(shares, most))

        rows = (
            TILE_ROWS // 2 if largest(TILE_ROWS // 2) < largest(TILE_ROWS) and hidden > TILE_ROWS * most else TILE_ROWS
        )
        shares = -(-hidden // rows)
        return cls(stream, call.top_k, rows, shares, min(shares, most))

    @property
    def largest_product(self) -> int:
        """The largest product that the kernel forms when it divides its work."""
        return max(self.shares * self.blocks, (self.steps + 1) * _MOST_WARPS)

    @property
    def steps(self) -> int:
        """Steps of a block for each of its tiles."""
        return self.top_k * self.stream.row_steps

    def layout(self, geometry: Geometry) -> tuple[dict[str, int], int]:
        """Offsets of the parts of shared memory, and its size."""
        repeats = -(-self.share_rows * -(-self.shares // self.blocks) // TILE_ROWS)
        layout = _Layout()
        layout.place(geometry.warps * geometry.stages * self.stream.stage_bytes)
        offsets = {
            "pieces_offset": layout.place(self.top_k * self.stream.row_piece_bytes(True)),
            "factors_offset": layout.place(self.top_k * self.stream.row_factor_bytes(True)),
            "partials_offset": layout.place(64 * repeats * (self.top_k + geometry.warps - 1)),
            "selected_offset": layout.place(4 * self.top_k),
            "weights_offset": layout.place(4 * self.top_k),
            "results_offset": layout.place(64 * repeats * self.top_k),
        }
        return offsets, max(layout.size, geometry.shared_bytes)


def fits(
    gate_up: GateUpShape, down: DownShape, geometry: tuple[Geometry, Geometry], capabilities: Capabilities
) -> bool:
    most = capabilities.shared_bytes_per_block_optin
    return gate_up.layout(geometry[0])[1] <= most and down.layout(geometry[1])[1] <= most


def _registers(stream: Stream, kernel: Literal["gate_up", "down"]) -> int:
    """Registers of a thread with which the compiler doesn't spill on compute capability 9.0, by its reports.

    Where a block's warps come in fours, 72, 80, 96 and 128 are what a bound on threads can ask for.
    """
    matrix = stream.matrix
    small = matrix.block_size == 16
    if matrix.bits not in (4, 8):
        return 96 if kernel == "gate_up" and matrix.bits == 3 and not small else 128
    if kernel == "down":
        return 96
    if matrix.bits == 4 and matrix.zero_points:
        return 96
    whole_steps = matrix.in_features % stream.step_codes == 0
    return 72 if matrix.bits == 4 and whole_steps and not small else 80


def choose_geometry(
    gate_up: GateUpShape, down: DownShape, capabilities: Capabilities
) -> tuple[Geometry, Geometry] | None:
    """Geometry of both kernels; ``None`` where a row's activations leave no room for a ring.

    Two blocks of one kernel must not land on one multiprocessor while another has none, which a dependent launch
    would do wherever they fit: gate/up takes more than half of its shared memory. Down takes what is left, if that
    holds a ring of two stages, so that its first loads are in flight while gate/up ends; else more than half too.
    Measured on an H200 (``docs/performance.md``): twelve warps where both fit, else sixteen.
    """
    most = capabilities.shared_bytes_per_block_optin
    half = min(capabilities.shared_bytes_per_multiprocessor // 2 - _RESERVED_SHARED + 16, most)
    if capabilities.compute_capability == _TUNED:
        side_by_side = _side_by_side(gate_up, down, capabilities, half)
        if side_by_side is not None:
            return side_by_side
    warps, registers = (16, 128) if capabilities.compute_capability == _TUNED else (12, 168)
    chosen: list[Geometry] = []
    for shape in (gate_up, down):
        alone = Geometry(warps, 2, registers, half)
        while alone.warps > 1 and shape.layout(alone)[1] > most:
            alone = replace(alone, warps=alone.warps - 1)
        if shape.layout(alone)[1] > most:
            return None
        chosen.append(_deepen(shape, _deepen(shape, alone, most, 3), half, _MOST_STAGES))
    return chosen[0], chosen[1]


def _side_by_side(
    gate_up: GateUpShape, down: DownShape, capabilities: Capabilities, half: int
) -> tuple[Geometry, Geometry] | None:
    """Geometry with which a multiprocessor holds a block of either kernel, if there is one."""
    first, second = _registers(gate_up.stream, "gate_up"), _registers(down.stream, "down")
    first = max(first, 80) if gate_up.wide_logits else first
    warps = {72: 12, 80: 11}.get(first, 10)
    gate = Geometry(warps, 2, first, half)
    # Copies of a warp beyond half of what it has to do, or beyond four stages, only hold the first ones up.
    gate = replace(gate, stages=min(max(-(-gate_up.steps // (2 * warps)), 2), 4))
    left = capabilities.shared_bytes_per_multiprocessor - 2 * _RESERVED_SHARED - gate_up.layout(gate)[1]
    beside = Geometry(min(12, (REGISTERS // 32 - warps * first) // second), 2, second)
    if gate_up.layout(gate)[1] > capabilities.shared_bytes_per_block_optin or down.layout(beside)[1] > left:
        return None
    return gate, _deepen(down, beside, left, _MOST_STAGES)


def _deepen(shape: GateUpShape | DownShape, geometry: Geometry, most: int, stages: int) -> Geometry:
    """Up to `stages` stages, as long as the block's own needs stay within `most` bytes."""
    deeper = replace(geometry, stages=geometry.stages + 1)
    while deeper.stages <= stages and shape.layout(replace(deeper, shared_bytes=0))[1] <= most:
        geometry, deeper = deeper, replace(deeper, stages=deeper.stages + 1)
    return geometry
