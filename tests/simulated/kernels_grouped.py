"""What the grouped kernels compute, in NumPy. Types and formats are read from the generated source."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from qmoe_ep import routing
from qmoe_ep.activation import activate
from qmoe_ep.kernels.grouped import DownArguments, GateUpArguments, RouteArguments
from qmoe_ep.kernels.portable import CombineArguments

from .kernels import KernelLaunch, simulated_kernel
from .kernels_portable import _DTYPES, Array, DeviceFormat, combine_rows, dtype_named, linear, record_call

_ROUTE = re.compile(r"route_and_group<([\w:]+), ([\w:]+), (true|false), \d+>")
_FORMAT = re.compile(r"RunFormat<(\d+), (\d+), (true|false), ([\w:]+), \d+, \d+, (\d+), (\d+)>")
_GATE_UP = re.compile(
    r"GateUp<([\w:]+), \d+, [\w:]+, \d+, .*>, ([\w:]+), ([\w:]+), "
    r"qmoe::Gating::k(\w+), qmoe::Activation::k(\w+), (\d+),"
)
_DOWN = re.compile(r"Down<[\w:]+, \d+, .*>, ([\w:]+), (\d+), \d+, \d+>")


def _search(pattern: re.Pattern[str], launch: KernelLaunch) -> re.Match[str]:
    found = pattern.search(launch.source)
    if found is None:
        raise LookupError(f"no {pattern.pattern} in the source of {launch.entry}")
    return found


@simulated_kernel("grouped_route", arguments=RouteArguments)
def _route(launch: KernelLaunch) -> None:
    found, a, view = _search(_ROUTE, launch), launch.arguments, launch.memory.view
    logits = view(a.router_probs, (a.rows, a.experts), dtype_named(found[1]))
    given = None if found[2] == "void" else view(a.router_weights, (a.rows, a.experts), dtype_named(found[2]))
    experts = view(a.route_experts, (a.rows, a.top_k), np.int32)
    weights = view(a.route_weights, (a.rows, a.top_k), np.float32)
    valid = a.rows if not a.valid_rows else max(0, min(a.rows, int(view(a.valid_rows, (1,), np.int32)[0])))
    experts[valid:], weights[valid:] = -1, 0
    if valid:
        own = None if given is None else given[:valid]
        experts[:valid], weights[:valid] = routing.route(
            logits[:valid], own, top_k=a.top_k, normalize=found[3] == "true"
        )
    record_call(launch, a.telemetry, experts[:valid], a.experts, logits[:valid])
    routes = experts.reshape(-1)
    order = np.argsort(routes, kind="stable")[np.count_nonzero(routes < 0) :]
    view(a.grouped_routes, (routes.size,), np.int32)[: order.size] = order
    offsets = np.concatenate([[0], np.cumsum(np.bincount(routes[routes >= 0], minlength=a.experts))])
    tiles = [
        (expert, first, min(a.tile_routes, offsets[expert + 1] - first), 0)
        for expert in range(a.experts)
        for first in range(int(offsets[expert]), int(offsets[expert + 1]), a.tile_routes)
    ]
    view(a.tile_count, (1,), np.int32)[0] = len(tiles)
    if tiles:
        view(a.tiles, (len(tiles), 4), np.int32)[:] = tiles


def _tiles(launch: KernelLaunch) -> list[tuple[int, Array]]:
    """(expert, its routes) of every tile."""
    a, view = launch.arguments, launch.memory.view
    count = int(view(a.tile_count, (1,), np.int32)[0])
    tiles = view(a.tiles, (count, 4), np.int32).tolist() if count else []
    return [(e, view(a.grouped_routes + 4 * first, (size,), np.int32).copy()) for e, first, size, _ in tiles]


def _format(launch: KernelLaunch, bias: str) -> tuple[DeviceFormat, int, int]:
    bits, block, points, scale, out, inner = _search(_FORMAT, launch).groups()
    fmt = DeviceFormat(int(bits), int(block), points == "true", dtype_named(scale), _DTYPES[bias])
    return fmt, int(out), int(inner)


@simulated_kernel("grouped_gate_up", arguments=GateUpArguments)
def _gate_up(launch: KernelLaunch) -> None:
    found, a, view = _search(_GATE_UP, launch), launch.arguments, launch.memory.view
    gating, pitch = found[4], int(found[6])
    first, out, hidden = _format(launch, found[2])
    second, _, _ = _format(launch, found[3])
    inter = out // 2 if gating in ("Interleaved", "Halves") else out
    node: Any = SimpleNamespace(
        activation_type=found[5].lower(),
        activation_alpha=np.float32(a.scalars.alpha),
        activation_beta=np.float32(a.scalars.beta),
        swiglu_limit=np.float32(a.scalars.limit),
        swiglu_limit_after_activation=0,
    )
    input_dtype = dtype_named(found[1])
    with np.errstate(all="ignore"):
        for expert, routes in _tiles(launch):
            starts = [a.input + int(r) // a.top_k * hidden * input_dtype.itemsize for r in routes]
            x = np.stack([view(start, (hidden,), input_dtype) for start in starts]).astype(np.float32)
            fc1 = linear(launch, "fc1", first, expert, out, hidden, x)
            up = None
            if gating == "Interleaved":
                fc1, up = fc1[:, 0::2], fc1[:, 1::2]
            elif gating == "Halves":
                fc1, up = fc1[:, :inter], fc1[:, inter:]
            elif gating == "Third":
                up = linear(launch, "fc3", second, expert, inter, hidden, x)
            for route, values in zip(routes, activate(node, fc1, up), strict=True):
                view(a.activated + 4 * int(route) * pitch, (inter,), np.float32)[:] = values


@simulated_kernel("grouped_down", arguments=DownArguments)
def _down(launch: KernelLaunch) -> None:
    found, a, view = _search(_DOWN, launch), launch.arguments, launch.memory.view
    fmt, hidden, inter = _format(launch, found[1])
    pitch = int(found[2])
    with np.errstate(all="ignore"):
        for expert, routes in _tiles(launch):
            activated = np.stack([view(a.activated + 4 * int(r) * pitch, (inter,), np.float32) for r in routes])
            results = linear(launch, "fc2", fmt, expert, hidden, inter, activated)
            for route, values in zip(routes, results, strict=True):
                view(a.contributions + 4 * int(route) * hidden, (hidden,), np.float32)[:] = values


@simulated_kernel("grouped_combine", arguments=CombineArguments)
def _combine(launch: KernelLaunch) -> None:
    combine_rows(launch)
