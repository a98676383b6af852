"""What the prefill kernels compute, in NumPy. Types and formats are read from the generated source.

Rows of halves lie in the workspace one after the other here, not in the order of the tensor cores.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from qmoe_ep.activation import activate
from qmoe_ep.kernels.portable import CombineArguments
from qmoe_ep.kernels.prefill_abi import DownArguments, GateUpArguments, GatherArguments, SortArguments

from .kernels import KernelLaunch, simulated_kernel
from .kernels_portable import Array, DeviceFormat, combine_rows, dtype_named, linear

_GATE_UP = re.compile(r"GateUp<([\w:]+), .*Gating::k(\w+), qmoe::Activation::k(\w+)>")
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
    """Expert, first grouped route and routes of every tile."""
    a, view = launch.arguments, launch.memory.view
    count = int(view(a.tile_count, (1,), np.int32)[0])
    return [row[:3] for row in view(a.tiles, (count, 4), np.int32).tolist()] if count else []


def _rows(launch: KernelLaunch, offset: int, tile: list[int], features: int) -> Array:
    """The rows of a tile in the workspace, uint16 [routes, features]."""
    steps = -(-features // _STEP)
    expert, first, count = tile
    row = -(-first // 8) * 8 + 8 * expert
    start = launch.arguments.workspace + offset + row * steps * 2 * _STEP
    return launch.memory.view(start, (count, steps * _STEP), np.uint16)[:, :features]


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
    view(a.tile_count, (1,), np.int32)[0] = len(tiles)
    if tiles:
        view(a.tiles, (len(tiles), 4), np.int32)[:] = tiles


@simulated_kernel("prefill_gather", arguments=GatherArguments)
def _gather(launch: KernelLaunch) -> None:
    a, view = launch.arguments, launch.memory.view
    tiles = _tiles(launch)
    for tile in tiles:
        _, first, count = tile
        rows = _rows(launch, a.tokens_offset, tile, a.hidden)
        for row, route in zip(rows, view(a.grouped_routes + 4 * first, (count,), np.int32), strict=True):
            row[:] = view(a.input + 2 * a.hidden * (int(route) // a.top_k), (a.hidden,), np.uint16)
    if a.exact_tile_count:
        view(a.exact_tile_count, (1,), np.int32)[0] = 0
        piece = _STEP // a.exact_split
        pieces = [
            (expert, first + i * piece, min(max(count - i * piece, 0), piece), 0)
            for expert, first, count in tiles
            for i in range(a.exact_split)
        ]
        if pieces:
            view(a.exact_tiles, (len(pieces), 4), np.int32)[:] = pieces


def _compute_exactly(launch: KernelLaunch) -> None:
    a = launch.arguments
    launch.memory.view(a.exact_tile_count, (1,), np.int32)[0] = len(_tiles(launch)) * a.exact_split


@simulated_kernel("prefill_gate_up", arguments=GateUpArguments)
def _gate_up(launch: KernelLaunch) -> None:
    half, gating, function = _search(_GATE_UP, launch).groups()
    a, dtype = launch.arguments, dtype_named(half)
    first, second = DeviceFormat.all_in(launch.source)
    fused = gating in ("Interleaved", "Halves")
    node: Any = SimpleNamespace(
        activation_type=function.lower(),
        activation_alpha=np.float32(a.scalars.alpha),
        activation_beta=np.float32(a.scalars.beta),
        swiglu_limit=np.float32(a.scalars.limit),
        swiglu_limit_after_activation=0,
    )
    with np.errstate(all="ignore"):
        for tile in _tiles(launch):
            x = _rows(launch, a.tokens_offset, tile, a.hidden).view(dtype).astype(np.float32)
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
            _rows(launch, 0, tile, a.inter)[:] = values.astype(dtype).view(np.uint16)


@simulated_kernel("prefill_down", arguments=DownArguments)
def _down(launch: KernelLaunch) -> None:
    a, dtype = launch.arguments, dtype_named(_search(_DOWN, launch)[1])
    (fmt,) = DeviceFormat.all_in(launch.source)
    with np.errstate(all="ignore"):
        for tile in _tiles(launch):
            x = _rows(launch, 0, tile, a.inter).view(dtype).astype(np.float32)
            results = linear(launch, "fc2", fmt, tile[0], a.hidden, a.inter, x)
            routes = launch.memory.view(a.grouped_routes + 4 * tile[1], (tile[2],), np.int32)
            for route, values in zip(routes, results, strict=True):
                launch.memory.view(a.contributions + 4 * int(route) * a.hidden, (a.hidden,), np.float32)[:] = values


@simulated_kernel("prefill_combine", arguments=CombineArguments)
def _combine(launch: KernelLaunch) -> None:
    combine_rows(launch)
