"""What the portable kernels compute, in NumPy: routing, grouping, products, combination.

Types and formats are read from the generated source, as the compiler reads them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from qmoe_ep import routing
from qmoe_ep.activation import activate
from qmoe_ep.formats import FORMATS, UINT8, ExpertMatrix, WeightFormat
from qmoe_ep.kernels.chunks import ChunkArguments
from qmoe_ep.kernels.portable import CombineArguments, DownArguments, GateUpArguments
from qmoe_ep.kernels.route import GroupArguments, RouteArguments
from qmoe_ep.quantization import expand_matrix
from qmoe_ep.route_record import HEADER_BYTES, RecordView, record_routes

from .kernels import KernelLaunch, simulated_kernel

Array = np.ndarray[Any, Any]

_DTYPES: dict[str, np.dtype[Any] | None] = {
    "float": np.dtype(np.float32),
    "qmoe::Float16": np.dtype(np.float16),
    "qmoe::BFloat16": np.dtype(ml_dtypes.bfloat16),
    "qmoe::E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "qmoe::E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "void": None,
}
_FORMAT = re.compile(
    r"qmoe::Format<(\d+), (\d+), (true|false), ([\w:]+), ([\w:]+), \d+"
    r"(?:, qmoe::Element::k(\w+), ([\w:]+), (true|false), (\d+))?>"
)


def dtype_named(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a C++ type."""
    dtype = _DTYPES[name]
    if dtype is None:
        raise LookupError("void has no dtype")
    return dtype


@dataclass(frozen=True)
class DeviceFormat:
    """A ``qmoe::Format`` as the source spells it."""

    bits: int
    block_size: int
    zero_points: bool
    scale: np.dtype[Any] | None
    bias: np.dtype[Any] | None
    element: str = "integer"
    zero: np.dtype[Any] | None = None
    global_scale: bool = False
    block_rows: int = 1

    @classmethod
    def all_in(cls, source: str) -> list[DeviceFormat]:
        """Return the formats in a source, in order."""
        return [
            cls(
                int(bits),
                int(block),
                points == "true",
                _DTYPES[scale],
                _DTYPES[bias],
                element.lower() or "integer",
                _DTYPES[zero or "void"],
                given == "true",
                int(rows or 1),
            )
            for bits, block, points, scale, bias, element, zero, given, rows in _FORMAT.findall(source)
        ]

    def matrix(self, name: str, out: int, inner: int) -> ExpertMatrix:
        """One matrix of this format."""
        form = FORMATS["int"]
        if self.element != "integer":
            square = self.block_rows > 1 or self.scale is None
            element: Any = self.element
            form = WeightFormat("device", element, self.bits, scale_dtypes=(self.scale or UINT8,), square_blocks=square)
        return ExpertMatrix(
            name=name,
            bits=self.bits,
            block_size=self.block_size,
            out_features=out,
            in_features=inner,
            layout="raw",
            scale_dtype=self.scale or np.dtype(np.float32),
            zero_points=self.zero_points,
            bias_dtype=self.bias,
            form=form,
            zero_point_dtype=self.zero or UINT8,
        )


def linear(launch: KernelLaunch, name: str, fmt: DeviceFormat, expert: int, out: int, inner: int, x: Array) -> Array:
    """One expert's product and bias: x float32 [m, inner] to float32 [m, out]."""
    arguments, matrix = launch.arguments, fmt.matrix(name, out, inner)

    def own(operand: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return launch.memory.view(getattr(arguments, f"{name}_{operand}") + expert * nbytes, shape, dtype)

    scales = None if fmt.scale is None else own("scales", matrix.scale_shape, fmt.scale)
    points = own("zero_points", matrix.zero_point_shape, matrix.zero_point_dtype) if fmt.zero_points else None
    given = launch.memory.view(arguments.global_scales + 4 * expert, (1,), np.float32) if fmt.global_scale else None
    codes = own("weights", matrix.weight_shape, UINT8)
    weights = expand_matrix(matrix, codes, scales, points, None if given is None else float(given[0]))
    y = (x.astype(np.float64) @ weights.T.astype(np.float64)).astype(np.float32)
    if fmt.bias is not None:
        y += own("bias", (out,), fmt.bias).astype(np.float32)
    return y


@simulated_kernel("route", arguments=RouteArguments)
def _route(launch: KernelLaunch) -> None:
    found = re.search(r"route_rows<([\w:]+), ([\w:]+), (true|false), (true|false)>", launch.source)
    if found is None:
        raise LookupError("no route_rows in the source")
    a, view = launch.arguments, launch.memory.view
    logits = view(a.router_probs, (a.rows, a.experts), dtype_named(found[1]))
    given = None if found[2] == "void" else view(a.router_weights, (a.rows, a.experts), dtype_named(found[2]))
    experts = view(a.route_experts, (a.rows, a.top_k), np.int32)
    weights = view(a.route_weights, (a.rows, a.top_k), np.float32)
    valid = a.rows if not a.valid_rows else max(0, min(a.rows, int(view(a.valid_rows, (1,), np.int32)[0])))
    experts[valid:], weights[valid:] = -1, 0
    if valid:
        own = None if given is None else given[:valid]
        experts[:valid], weights[:valid] = routing.route(
            logits[:valid], own, top_k=a.top_k, normalize=found[3] == "true", sparse_mixer=found[4] == "true"
        )
    record_call(launch, a.telemetry, experts[:valid], a.experts, logits[:valid])


def record_call(launch: KernelLaunch, telemetry: int | None, selected: Array, num_experts: int, logits: Array) -> None:
    """Add one call to the telemetry record at an address, if there is one."""
    if telemetry:
        header = launch.memory.view(telemetry, (HEADER_BYTES,), np.uint8)
        record = launch.memory.view(telemetry, (RecordView.nbytes_of(header),), np.uint8)
        record_routes(record, selected, num_experts, logits)


@simulated_kernel("count_chunk_rows", arguments=ChunkArguments)
def _count_chunk_rows(launch: KernelLaunch) -> None:
    a, view = launch.arguments, launch.memory.view
    valid = a.rows if not a.valid_rows else min(a.rows, int(view(a.valid_rows, (1,), np.int32)[0]))
    starts = np.arange(a.chunks) * a.rows_each
    view(a.chunk_rows, (a.chunks,), np.int32)[:] = np.clip(valid - starts, 0, a.rows_each)


@simulated_kernel("group_count", arguments=GroupArguments)
def _group_count(launch: KernelLaunch) -> None:
    a, view = launch.arguments, launch.memory.view
    routes = view(a.route_experts, (a.routes,), np.int32)
    view(a.expert_counts, (a.experts,), np.int32)[:] = np.bincount(routes[routes >= 0], minlength=a.experts)


@simulated_kernel("group_assign", arguments=GroupArguments)
def _group_assign(launch: KernelLaunch) -> None:
    a, view = launch.arguments, launch.memory.view
    routes = view(a.route_experts, (a.routes,), np.int32)
    counts = view(a.expert_counts, (a.experts,), np.int32)
    offsets = view(a.expert_offsets, (a.experts + 1,), np.int32)
    offsets[0], offsets[1:] = 0, np.cumsum(counts)
    order = np.argsort(routes, kind="stable")[np.count_nonzero(routes < 0) :]
    view(a.grouped_routes, (a.routes,), np.int32)[: order.size] = order
    tiles = [
        (expert, first, min(a.tile_rows, offsets[expert + 1] - first), 0)
        for expert in range(a.experts)
        for first in range(int(offsets[expert]), int(offsets[expert + 1]), a.tile_rows)
    ]
    view(a.tile_count, (1,), np.int32)[0] = len(tiles)
    if tiles:
        view(a.tiles, (len(tiles), 4), np.int32)[:] = tiles


def _routes_by_expert(launch: KernelLaunch, routes: int) -> list[tuple[int, Array]]:
    """(expert, its routes), from the route table or from the list of tiles, whichever the kernel is given."""
    a, view = launch.arguments, launch.memory.view
    if launch.entry.endswith("few"):
        experts = view(a.route_experts, (routes,), np.int32)
        return [(int(e), np.nonzero(experts == e)[0]) for e in np.unique(experts) if e >= 0]
    count = int(view(a.tile_count, (1,), np.int32)[0])
    tiles = view(a.tiles, (count, 4), np.int32) if count else ()
    order = view(a.grouped_routes, (routes,), np.int32)
    return [(int(expert), order[first : first + size].copy()) for expert, first, size, _ in tiles]


@simulated_kernel("portable_gate_up", arguments=GateUpArguments)
def _gate_up(launch: KernelLaunch) -> None:
    found = re.search(r"GateUp<([\w:]+), .*Gating::k(\w+), qmoe::Activation::k(\w+)>", launch.source)
    if found is None:
        raise LookupError("no GateUp in the source")
    gating, a, view = found[2], launch.arguments, launch.memory.view
    first, second = DeviceFormat.all_in(launch.source)
    fused = gating in ("Interleaved", "Halves")
    node: Any = SimpleNamespace(
        activation_type={"SiluLimited": "swiglu"}.get(found[3], found[3].lower()),
        swiglu_limit_after_activation=found[3] == "SiluLimited",
        activation_alpha=np.float32(a.scalars.alpha),
        activation_beta=np.float32(a.scalars.beta),
        swiglu_limit=np.float32(a.scalars.limit),
    )
    x = view(a.input, (a.routes // a.top_k, a.hidden), dtype_named(found[1]))
    activated = view(a.activated, (a.routes, a.activated_stride), np.float32)
    with np.errstate(all="ignore"):
        for expert, routes in _routes_by_expert(launch, a.routes):
            rows = x[routes // a.top_k].astype(np.float32)
            fc1 = linear(launch, "fc1", first, expert, a.inter * (2 if fused else 1), a.hidden, rows)
            up = None
            if gating == "Interleaved":
                fc1, up = fc1[:, 0::2], fc1[:, 1::2]
            elif gating == "Halves":
                fc1, up = fc1[:, : a.inter], fc1[:, a.inter :]
            elif gating == "Third":
                up = linear(launch, "fc3", second, expert, a.inter, a.hidden, rows)
            activated[routes, : a.inter] = activate(node, fc1, up)


@simulated_kernel("portable_down", arguments=DownArguments)
def _down(launch: KernelLaunch) -> None:
    a, view = launch.arguments, launch.memory.view
    (fmt,) = DeviceFormat.all_in(launch.source)
    routes = a.rows * a.top_k
    activated = view(a.activated, (routes, a.activated_stride), np.float32)[:, : a.inter]
    few = launch.entry.endswith("few")
    if few:
        contributions = np.zeros((routes, a.hidden), np.float32)
    else:
        contributions = view(a.contributions, (routes, a.hidden), np.float32)
    with np.errstate(all="ignore"):
        for expert, own in _routes_by_expert(launch, routes):
            contributions[own] = linear(launch, "fc2", fmt, expert, a.hidden, a.inter, activated[own])
    if few:
        output = re.search(r"down_few<Layout, ([\w:]+)>", launch.source)
        _combine_rows(launch, contributions, dtype_named(output[1] if output else ""))


@simulated_kernel("portable_combine", arguments=CombineArguments)
def _combine(launch: KernelLaunch) -> None:
    combine_rows(launch)


def combine_rows(launch: KernelLaunch) -> None:
    """Carry out a combine kernel: contributions of the slots to output rows."""
    a = launch.arguments
    output = re.search(r"combine<([\w:]+)[,>]", launch.source)
    contributions = launch.memory.view(a.contributions, (a.rows * a.top_k, a.hidden), np.float32)
    _combine_rows(launch, contributions, dtype_named(output[1] if output else ""))


def _combine_rows(launch: KernelLaunch, contributions: Array, dtype: np.dtype[Any]) -> None:
    """Sum each row's slots in order; rows without experts are left as they are."""
    a, view = launch.arguments, launch.memory.view
    experts = view(a.route_experts, (a.rows, a.top_k), np.int32)
    weights = view(a.route_weights, (a.rows, a.top_k), np.float32)
    output = view(a.output, (a.rows, a.hidden), dtype)
    present = experts[:, 0] >= 0
    total = np.zeros((a.rows, a.hidden), np.float32)
    with np.errstate(all="ignore"):
        for slot in range(a.top_k):
            total += weights[:, slot, None] * contributions.reshape(a.rows, a.top_k, a.hidden)[:, slot]
        output[present] = total[present].astype(dtype)
