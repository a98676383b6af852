"""What the prefill kernels compute, in NumPy. Types and formats are read from the generated source.

Vectors of halves keep their order here.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from qmoe_ep.activation import activate
from qmoe_ep.kernels.portable import CombineArguments
from qmoe_ep.kernels.prefill_abi import DownArguments, GateUpArguments, PermuteArguments, SortArguments

from .kernels import KernelLaunch, simulated_kernel
from .kernels_portable import Array, DeviceFormat, combine_rows, dtype_named, linear

_GATE_UP = re.compile(r"GateUp<([\w:]+), .*Gating::k(\w+), qmoe::Activation::k(\w+), ")
_DOWN = re.compile(r"Down<([\w:]+), ")
_STEP = 128
# What the kernels take for values that a float16 may flush or overflow.
_SMALL, _LARGE = 2.0**-12, 65504.0


def _search(pattern: re.Pattern[str], launch: KernelLaunch) -> re.Match[str]:
    found = pattern.search(launch.source)
    if found is None:
        raise LookupError(f"no {pattern.pattern} in the source of {launch.entry}")
    return found


def _tiles(launch: KernelLaunch) -> list[list[int]]:
    """Expert, first grouped route and routes of every tile of the launch's class, or of all."""
    a, view = launch.arguments, launch.memory.view
    ends = [0, *view(a.tile_ends, (3,), np.int32).tolist()]
    own = re.search(r", (\d)>;", launch.source)
    begin, end = (ends[int(own[1])], ends[int(own[1]) + 1]) if own else (0, ends[-1])
    return [row[:3] for row in view(a.tiles + 16 * begin, (end - begin, 4), np.int32).tolist()] if end > begin else []


def _vectors(launch: KernelLaunch, row_bytes: int, tile: list[int], features: int) -> Array:
    """The activated vectors of a tile, uint16 [routes, features]."""
    start = launch.arguments.workspace + tile[1] * row_bytes
    return launch.memory.view(start, (tile[2], row_bytes // 2), np.uint16)[:, :features]


def _tokens_view(launch: KernelLaunch, rows: int, hidden: int) -> Array:
    """The input's vectors, uint16 [rows, features padded to whole steps]."""
    a = launch.arguments
    return launch.memory.view(a.workspace + a.tokens_offset, (rows, -(-hidden // _STEP) * _STEP), np.uint16)


@simulated_kernel("prefill_count_chunk", arguments=SortArguments)
def _count_chunk(launch: KernelLaunch) -> None:
    """Sorting is all done by the next kernel."""


@simulated_kernel("prefill_sort_chunk", arguments=SortArguments)
def _sort_chunk(launch: KernelLaunch) -> None:
    a, view = launch.arguments, launch.memory.view
    routes = view(a.route_experts, (a.routes,), np.int32)
    order = np.argsort(routes, kind="stable")[np.count_nonzero(routes < 0) :]
    view(a.grouped_routes, (a.routes,), np.int32)[: order.size] = order
    ends = np.cumsum(np.bincount(routes[routes >= 0], minlength=a.experts)).tolist()
    tiles = [
        (expert, first, min(a.tile_rows, end - first), 0)
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        for first in range(begin, end, a.tile_rows)
    ]
    tiles.sort(key=lambda tile: (tile[2] <= 64) + (tile[2] <= 32))
    view(a.tile_ends, (3,), np.int32)[:] = np.cumsum(
        [
            sum(tile[2] > 64 for tile in tiles),
            *(sum(low < tile[2] <= high for tile in tiles) for low, high in ((32, 64), (0, 32))),
        ]
    )
    if tiles:
        view(a.tiles, (len(tiles), 4), np.int32)[:] = tiles


@simulated_kernel("prefill_permute", arguments=PermuteArguments)
def _permute(launch: KernelLaunch) -> None:
    a, view = launch.arguments, launch.memory.view
    _tokens_view(launch, a.rows, a.hidden)[:, : a.hidden] = view(a.input, (a.rows, a.hidden), np.uint16)
    if a.exact_tile_count:
        view(a.exact_tile_count, (1,), np.int32)[0] = 0
        piece = _STEP // a.exact_split
        pieces = [
            (expert, first + i * piece, min(max(count - i * piece, 0), piece), 0)
            for expert, first, count in _tiles(launch)
            for i in range(a.exact_split)
        ]
        if pieces:
            view(a.exact_tiles, (len(pieces), 4), np.int32)[:] = pieces


def _compute_exactly(launch: KernelLaunch) -> None:
    a = launch.arguments
    tiles = int(launch.memory.view(a.tile_ends, (3,), np.int32)[-1])
    launch.memory.view(a.exact_tile_count, (1,), np.int32)[0] = tiles * a.exact_split


@simulated_kernel("prefill_gate_up", arguments=GateUpArguments)
def _gate_up(launch: KernelLaunch) -> None:
    half, gating, function = _search(_GATE_UP, launch).groups()
    a, dtype = launch.arguments, dtype_named(half)
    first, second = DeviceFormat.all_in(launch.source)
    fused = gating in ("Interleaved", "Halves")
    per_tile = _STEP if gating != "None" else 2 * _STEP
    row_bytes = -(-a.inter // per_tile) * per_tile * 2
    inputs = _tokens_view(launch, a.routes // a.top_k, a.hidden)[:, : a.hidden]
    node: Any = SimpleNamespace(
        activation_type=function.lower(),
        activation_alpha=np.float32(a.scalars.alpha),
        activation_beta=np.float32(a.scalars.beta),
        swiglu_limit=np.float32(a.scalars.limit),
        swiglu_limit_after_activation=0,
    )
    with np.errstate(all="ignore"):
        for tile in _tiles(launch):
            routes = launch.memory.view(a.grouped_routes + 4 * tile[1], (tile[2],), np.int32)
            x = inputs[routes // a.top_k].view(dtype).astype(np.float32)
            fc1 = linear(launch, "fc1", first, tile[0], a.inter * (2 if fused else 1), a.hidden, x)
            up = None
            if gating == "Interleaved":
                fc1, up = fc1[:, 0::2], fc1[:, 1::2]
            elif gating == "Halves":
                fc1, up = fc1[:, : a.inter], fc1[:, a.inter :]
            elif gating == "Third":
                up = linear(launch, "fc3", second, tile[0], a.inter, a.hidden, x)
            values = activate(node, fc1, up)
            if a.exact_tile_count:
                largest = np.nanmax(np.abs(values), axis=1)
                if np.any((largest > _LARGE) | ((largest < _SMALL) & (largest > 0))):
                    _compute_exactly(launch)
            _vectors(launch, row_bytes, tile, a.inter)[:] = values.astype(dtype).view(np.uint16)


@simulated_kernel("prefill_down", arguments=DownArguments)
def _down(launch: KernelLaunch) -> None:
    a, dtype = launch.arguments, dtype_named(_search(_DOWN, launch)[1])
    (fmt,) = DeviceFormat.all_in(launch.source)
    with np.errstate(all="ignore"):
        for tile in _tiles(launch):
            x = _vectors(launch, a.row_bytes, tile, a.inter).copy().view(dtype).astype(np.float32)
            results = linear(launch, "fc2", fmt, tile[0], a.hidden, a.inter, x)
            routes = launch.memory.view(a.grouped_routes + 4 * tile[1], (tile[2],), np.int32)
            for route, values in zip(routes, results, strict=True):
                launch.memory.view(a.contributions + 4 * int(route) * a.hidden, (a.hidden,), np.float32)[:] = values


@simulated_kernel("prefill_combine", arguments=CombineArguments)
def _combine(launch: KernelLaunch) -> None:
    combine_rows(launch)
