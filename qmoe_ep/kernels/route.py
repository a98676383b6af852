"""Routing and grouping steps, shared by the kernel families: device code in ``route.cuh`` and ``group.cuh``.

Scratch slots written here: ``route_experts`` int32 [routes], −1 in rows past ``valid_rows``; ``route_weights``
float32 [routes]; and by grouping ``grouped_routes`` int32 [routes], ``expert_counts`` int32 [E], ``expert_offsets``
int32 [E + 1], ``group_tiles`` int32 [tiles, 4] (expert, first entry of grouped_routes, entries, unused) and
``tile_count`` int32 [1].
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from qmoe_ep.errors import QMoEError
from qmoe_ep.kernels.plan import ModuleSource, Step
from qmoe_ep.kernels.translation_unit import Entry, device_type, dtype_tag, module_name, translation_unit
from qmoe_ep.operator import ROUTER_WEIGHTS
from qmoe_ep.route_record import RouteRecordHeader

if TYPE_CHECKING:
    from qmoe_ep.call import CallDescription

__all__ = [
    "RECORD_LAYOUT",
    "GroupArguments",
    "RouteArguments",
    "check_index_ranges",
    "group_scratch",
    "group_steps",
    "largest_tile_count",
    "route_scratch",
    "route_step",
]

VERSION = 3
MAX_GRID_X = 2**31 - 1
_ROUTE_THREADS = 128
_GROUP_THREADS = 1024
# Loop counters are 32-bit and step by at most one block beyond the end.
_MAX_ROUTES = 2**31 - 1 - 4096
_MAX_SIZE = 2**30

_POINTER = ctypes.c_void_p

RECORD_LAYOUT = (RouteRecordHeader, "qmoe::RouteRecord")
"""What ``telemetry`` points to, for the layout checks of every module that routes."""


class RouteArguments(ctypes.Structure):
    """``qmoe::RouteArguments``."""

    _fields_ = (
        ("router_probs", _POINTER),
        ("router_weights", _POINTER),
        ("valid_rows", _POINTER),
        ("telemetry", _POINTER),
        ("route_experts", _POINTER),
        ("route_weights", _POINTER),
        ("rows", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("top_k", ctypes.c_int),
    )


class GroupArguments(ctypes.Structure):
    """``qmoe::GroupArguments``."""

    _fields_ = (
        ("route_experts", _POINTER),
        ("expert_counts", _POINTER),
        ("expert_offsets", _POINTER),
        ("grouped_routes", _POINTER),
        ("tiles", _POINTER),
        ("tile_count", _POINTER),
        ("routes", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("tile_rows", ctypes.c_int),
    )


def check_index_ranges(call: CallDescription) -> None:
    """Refuse a call whose routes, experts or features the kernels' index types can't count.

    Raises
    ------
    QMoEError
        Naming the size, the largest that is possible, and what to do.
    """
    if call.routes > _MAX_ROUTES:
        raise QMoEError(
            f"input: {call.rows} rows with k = {call.top_k} make {call.routes} routes, expected at most {_MAX_ROUTES} "
            "in one call; split the rows over several calls"
        )
    experts = call.experts
    sizes = (
        ("router_probs", "experts E", experts.num_experts),
        ("input", "hidden size H", experts.hidden_size),
        ("fc1_experts_weights", "output features", experts.fc1.out_features),
    )
    for operand, what, size in sizes:
        if size > _MAX_SIZE:
            raise QMoEError(
                f"{operand}: {what} = {size}, expected at most {_MAX_SIZE} on the GPU; use the CPU provider"
            )


def route_module(call: CallDescription) -> ModuleSource:
    """The module of :func:`route_step`."""
    logits, weights = call.router_dtype, call.router_weights_dtype
    normalize = bool(call.node.normalize_routing_weights)
    sparse = bool(call.node.use_sparse_mixer)
    how = "sparse" if sparse else "normalized" if normalize else "raw"
    name = module_name("route", VERSION, dtype_tag(logits), dtype_tag(weights), how)
    flags = f"{str(normalize).lower()}, {str(sparse).lower()}"
    body = f"qmoe::route_rows<{device_type(logits)}, {device_type(weights)}, {flags}>"
    entry = Entry("route", RouteArguments, "qmoe::RouteArguments", body, _ROUTE_THREADS)
    return translation_unit(name, ("route.cuh",), (), (entry,), structs=(RECORD_LAYOUT,))


def route_step(call: CallDescription) -> Step:
    """The launch that selects and weighs the experts of every row."""
    arguments = RouteArguments(rows=call.rows, experts=call.experts.num_experts, top_k=call.top_k)
    blocks = -(-call.rows // (_ROUTE_THREADS // 32))
    return Step(
        name="route",
        module=route_module(call),
        entry="route",
        grid=(min(blocks, MAX_GRID_X), 1, 1),
        block=(_ROUTE_THREADS, 1, 1),
        shared_bytes=0,
        arguments=arguments,
        pointers=(
            ("router_probs", 1),
            ("router_weights", ROUTER_WEIGHTS),
            ("valid_rows", "valid_rows"),
            ("telemetry", "telemetry"),
            ("route_experts", "route_experts"),
            ("route_weights", "route_weights"),
        ),
    )


def route_scratch(call: CallDescription) -> tuple[tuple[str, int], ...]:
    """Scratch that :func:`route_step` writes: (slot, bytes)."""
    return (("route_experts", 4 * call.routes), ("route_weights", 4 * call.routes))


def group_module() -> ModuleSource:
    """The module of :func:`group_steps`; it depends on no type."""
    entries = tuple(
        Entry(name, GroupArguments, "qmoe::GroupArguments", f"qmoe::{name}", _GROUP_THREADS)
        for name in ("group_count", "group_assign")
    )
    return translation_unit(module_name("group", VERSION), ("group.cuh",), (), entries)


def largest_tile_count(call: CallDescription, tile_rows: int) -> int:
    """Tiles of up to ``tile_rows`` routes of one expert that any routing of the call can make."""
    return call.routes // tile_rows + min(call.experts.num_experts, call.routes)


def group_steps(call: CallDescription, tile_rows: int) -> tuple[Step, Step]:
    """The launches that sort routes by expert (stable, by route index) and list tiles of up to ``tile_rows``."""
    experts = call.experts.num_experts
    threads = min(_GROUP_THREADS, -(-call.routes // 32) * 32)
    module = group_module()

    def step(entry: str) -> Step:
        return Step(
            name=entry,
            module=module,
            entry=entry,
            grid=(min(experts, 65536), 1, 1),
            block=(threads, 1, 1),
            shared_bytes=0,
            arguments=GroupArguments(routes=call.routes, experts=experts, tile_rows=tile_rows),
            pointers=(
                ("route_experts", "route_experts"),
                ("expert_counts", "expert_counts"),
                ("expert_offsets", "expert_offsets"),
                ("grouped_routes", "grouped_routes"),
                ("tiles", "group_tiles"),
                ("tile_count", "tile_count"),
            ),
        )

    return step("group_count"), step("group_assign")


def group_scratch(call: CallDescription, tile_rows: int) -> tuple[tuple[str, int], ...]:
    """Scratch that :func:`group_steps` writes: (slot, bytes)."""
    experts = call.experts.num_experts
    return (
        ("expert_counts", 4 * experts),
        ("expert_offsets", 4 * (experts + 1)),
        ("grouped_routes", 4 * call.routes),
        ("group_tiles", 16 * largest_tile_count(call, tile_rows)),
        ("tile_count", 4),
    )
