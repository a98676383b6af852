"""The prefill kernel family: grouped products on Hopper's tensor cores (compute capability 9.0) for many rows.

Device code: ``prefill_permute.cuh`` (input vectors in the order of the products), ``prefill.cuh`` (FC1 with activation,
FC2) on ``prefill_stages.cuh`` (copies into shared memory), ``prefill_multiply.cuh`` (the inner loop) and
``prefill_fragments.cuh`` (codes to tensor-core operands), ``prefill_group.cuh`` (routes sorted by expert) and
``prefill_combine.cuh``; routing is that of all families.

Numbers: codes minus zero points are exact in half precision. With blocks they are multiplied by the scale in half
precision, which rounds the scale (unless it has the input's type) and the weight once each; row-wise scales multiply
the float32 sums instead. Sums, bias, activation and the combination are float32. The activated features are rounded
once to the input's type. In float16 that could overflow or flush to zero where float32 does not, and so could a scale:
the kernels notice, and then, in the same call and without the host, the portable kernels compute it again. When nothing
is noticed those are two empty launches. bfloat16 has the range of float32 and needs none of this.

:func:`plan` is where a call enters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from ml_dtypes import bfloat16

from qmoe_ep.call import packed_bytes
from qmoe_ep.kernels import portable
from qmoe_ep.kernels.operands import matrix_pointers
from qmoe_ep.kernels.plan import AddressSource, ModuleSource, Plan, Step
from qmoe_ep.kernels.portable import GateScalars, format_type, guaranteed_load_bytes
from qmoe_ep.kernels.prefill_abi import (
    CombineArguments,
    DownArguments,
    GateUpArguments,
    LaneRowsApart,
    PermuteArguments,
    RowsApart,
    SortArguments,
)
from qmoe_ep.kernels.route import MAX_GRID_X, largest_tile_count, route_scratch, route_step
from qmoe_ep.kernels.translation_unit import Entry, device_type, dtype_tag, module_name, translation_unit
from qmoe_ep.operator import MATRIX_INPUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qmoe_ep.call import CallDescription, ExpertMatrix
    from qmoe_ep.capabilities import Capabilities

__all__ = ["plan", "unserved_reason", "worthwhile"]

VERSION = 2
_TILE_TOKENS, _TILE_ROWS, _STEP_INNER, _LANE_CODES = 128, 256, 128, 32
_CLASS_TOKENS = (128, 64, 32)
_THREADS, _PERMUTE_THREADS = 384, 256
# kSharedBytes of the device code, and room to align it.
_SHARED_BYTES = (224 + 1) << 10
_STATIC_SHARED_BYTES = 1024
_SORT_THREADS, _MAX_CHUNKS, _MAX_SORTED_EXPERTS, _COMBINE_THREADS = 512, 64, 2048, 256
_MAX_INT = 2**31 - 1
# Where these kernels pass the grouped ones on an H200, int4: at 4 tokens per expert they take 0.7 times as long
# (Qwen3-30B-A3B, 64 rows; docs/performance.md). With few rows the number of launches counts instead.
_LEAST_ROWS, _LEAST_TOKENS = 32, 4
_HALVES = (np.dtype(np.float16), np.dtype(bfloat16))


def worthwhile(call: CallDescription) -> bool:
    """Whether experts have so many tokens on average that tensor-core tiles of them are faster than other kernels."""
    least = max(_LEAST_TOKENS, call.node.prefill_min_tokens)
    return call.rows >= _LEAST_ROWS and call.routes >= least * call.experts.num_experts


def unserved_reason(call: CallDescription, capabilities: Capabilities) -> str | None:
    """Why these kernels can't compute a call, as a clause; ``None`` if they can."""
    experts = call.experts
    if capabilities.compute_capability != (9, 0):
        major, minor = capabilities.compute_capability
        return f"prefill kernels are for compute capability 9.0, the device has {major}.{minor}"
    if capabilities.shared_bytes_per_block_optin < _SHARED_BYTES + _STATIC_SHARED_BYTES:
        return f"{_SHARED_BYTES + _STATIC_SHARED_BYTES} bytes of shared memory per block are not to be had"
    if call.dtype not in _HALVES:
        return f"the input is {call.dtype}, not float16 or bfloat16"
    if experts.hidden_size % 16 or experts.inter_size % 16:
        return f"H = {experts.hidden_size} and I = {experts.inter_size} are not both multiples of 16"
    if experts.fc3 is not None and _format_key(experts.fc1) != _format_key(experts.fc3):
        return "FC1 and FC3 differ in width, scale type or zero points"
    if experts.num_experts > _MAX_SORTED_EXPERTS:
        return f"{experts.num_experts} experts are more than {_MAX_SORTED_EXPERTS}"
    row_tiles = max(_row_tiles(call), -(-experts.hidden_size // _TILE_ROWS))
    vectors = (call.rows * _tokens_row(call), call.routes * _activated_row(call))
    # Vectors are addressed in units of 16 bytes.
    if call.routes > _MAX_INT // 16 or max(vectors) >= 16 * 2**32:
        return "there are more routes, or vectors of more bytes, than 32 bits count"
    if largest_tile_count(call, _TILE_TOKENS) * row_tiles > _MAX_INT // 2:
        return "there are more tiles than 32 bits count"
    return None


def plan(
    call: CallDescription, capabilities: Capabilities, alignment: Mapping[AddressSource, int] | None = None
) -> Plan | None:
    """Plan a call on the tensor cores, or return ``None`` where :func:`unserved_reason` has a reason.

    Parameters
    ----------
    call : any number of rows; worth it from a few tokens per expert on
    alignment : bytes to which an operand's address is known to be aligned, by operand index; 16 where it
        says nothing, never less than the operand's element
    """
    if not call.rows or unserved_reason(call, capabilities) is not None:
        return None
    known = alignment or {}
    portable_steps = {step.name: step for step in portable.plan(call, capabilities, known, form="many").steps}
    pieces = _TILE_TOKENS // portable_steps["group_count"].arguments.tile_rows
    tokens = f"{call.routes / call.experts.num_experts:.3g} tokens per expert"
    steps = (
        route_step(call),
        *_sort_steps(call),
        _permute_step(call, capabilities, known, pieces),
        *_gate_up_steps(call, capabilities, known, pieces, portable_steps["gate_up_many"].arguments.scalars),
        *_down_steps(call, capabilities, known, pieces),
        *(_exact_steps(portable_steps) if _checked(call) else ()),
        _combine_step(call, known),
    )
    return Plan("prefill", f"{tokens}, on the tensor cores", _scratch(call, pieces), steps)


# --- sizes ------------------------------------------------------------------------------------------------------------


def _checked(call: CallDescription) -> bool:
    """Whether values can leave the range of the input's type, so that the kernels look out for them."""
    return call.dtype == np.float16


def _row_tiles(call: CallDescription) -> int:
    """Tiles of 256 weight rows of FC1."""
    features = _STEP_INNER if call.experts.gating != "none" else 2 * _STEP_INNER
    return -(-call.experts.inter_size // features)


def _tokens_row(call: CallDescription) -> int:
    """Bytes of an input vector, padded to whole steps."""
    return -(-call.experts.hidden_size // _STEP_INNER) * 2 * _STEP_INNER


def _activated_row(call: CallDescription) -> int:
    """Bytes of an activated vector, padded to whole tiles of features."""
    return _row_tiles(call) * (1 if call.experts.gating != "none" else 2) * 2 * _STEP_INNER


def _activated_bytes(call: CallDescription) -> int:
    return call.routes * _activated_row(call)


def _scratch(call: CallDescription, pieces: int) -> tuple[tuple[str, int], ...]:
    vectors = _activated_bytes(call) + call.rows * _tokens_row(call)
    scratch = (
        *route_scratch(call),
        *_sort_scratch(call),
        ("contributions", 4 * call.routes * call.experts.hidden_size),
    )
    if not _checked(call):
        return (*scratch, ("workspace", vectors))
    # The portable kernels come after both products and may overwrite the vectors.
    activated = 4 * call.routes * portable.activated_stride(call)
    return (
        *scratch,
        ("workspace", max(vectors, activated)),
        ("zero_rows", call.rows),
        ("route_state", 2 * call.routes),
        ("exact_tiles", 16 * pieces * largest_tile_count(call, _TILE_TOKENS)),
        ("exact_tile_count", 4),
    )


def _rows_apart(matrix: ExpertMatrix, upper: int, band: int, lane: int) -> LaneRowsApart:
    """Bytes between a lane's rows, and to those of the lane fed with it; all given in rows."""
    zero_points = packed_bytes(matrix.blocks, matrix.bits)
    scales = matrix.blocks * matrix.scale_dtype.itemsize
    return LaneRowsApart(
        *(RowsApart(rows * matrix.row_bytes, rows * scales, rows * zero_points) for rows in (upper, band, lane))
    )


# --- modules ----------------------------------------------------------------------------------------------------------


def _format_key(matrix: ExpertMatrix) -> tuple[object, ...]:
    return matrix.bits, matrix.block_size, matrix.scale_dtype, matrix.zero_points


def _weights_type(matrices: tuple[ExpertMatrix, ...], alignment: Mapping[AddressSource, int]) -> tuple[str, str]:
    """C++ type ``qmoe::prefill::Weights<…>`` of matrices of one format, and its part of a module's name."""
    first = matrices[0]
    known = [alignment.get(MATRIX_INPUTS[matrix.name][0], 16) for matrix in matrices]
    load_bytes = guaranteed_load_bytes(*known, first.row_bytes, _LANE_CODES * first.bits // 8)
    text, tag = _format(first)
    return f"qmoe::prefill::Weights<{text}, {load_bytes}>", f"{tag}_p{load_bytes}"


def _format(matrix: ExpertMatrix) -> tuple[str, str]:
    """The format as such; how wide its codes are read is said by ``Weights``."""
    return format_type(matrix, 1)


def _permute_module(call: CallDescription, alignment: Mapping[AddressSource, int]) -> ModuleSource:
    load_bytes = 16 if alignment.get(0, 16) >= 16 else 2
    checked = _checked(call)
    body = f"qmoe::prefill::permute<{load_bytes}, {str(checked).lower()}>"
    entry = Entry("prefill_permute", PermuteArguments, "qmoe::prefill::PermuteArguments", body, _PERMUTE_THREADS, 3)
    name = module_name("prefill", VERSION, "permute", f"x{load_bytes}", "checked" if checked else "plain")
    return translation_unit(name, ("prefill_permute.cuh",), (), (entry,))


_GATING = {"none": "kNone", "interleaved": "kInterleaved", "halves": "kHalves", "fc3": "kThird"}
_ACTIVATION = {"relu": "kRelu", "gelu": "kGelu", "silu": "kSilu", "identity": "kIdentity", "swiglu": "kIdentity"}


def _gate_up_module(call: CallDescription, alignment: Mapping[AddressSource, int], tile_class: int) -> ModuleSource:
    experts = call.experts
    upper = experts.fc1 if experts.fc3 is None else experts.fc3
    weights, tag = _weights_type((experts.fc1, upper), alignment)
    upper_format, _ = _format(upper)
    function = "silu" if experts.gating != "none" else call.node.activation_type
    layout = (
        f"using Layout = qmoe::prefill::GateUp<{device_type(call.dtype)}, {weights}, {upper_format}, "
        f"qmoe::Gating::{_GATING[experts.gating]}, qmoe::Activation::{_ACTIVATION[function]}, {tile_class}>;"
    )
    tags = [f"n{_CLASS_TOKENS[tile_class]}", experts.gating, function, dtype_tag(call.dtype), tag]
    if experts.fc3 is not None:
        tags.append(f"b{dtype_tag(upper.bias_dtype)}")
    entry = Entry(
        "prefill_gate_up",
        GateUpArguments,
        "qmoe::prefill::GateUpArguments",
        "qmoe::prefill::gate_up<Layout>",
        _THREADS,
    )
    return translation_unit(module_name("prefill", VERSION, "gate_up", *tags), ("prefill.cuh",), (layout,), (entry,))


def _down_module(call: CallDescription, alignment: Mapping[AddressSource, int], tile_class: int) -> ModuleSource:
    weights, tag = _weights_type((call.experts.fc2,), alignment)
    layout = f"using Layout = qmoe::prefill::Down<{device_type(call.dtype)}, {weights}, {tile_class}>;"
    entry = Entry(
        "prefill_down", DownArguments, "qmoe::prefill::DownArguments", "qmoe::prefill::down<Layout>", _THREADS
    )
    name = module_name("prefill", VERSION, "down", f"n{_CLASS_TOKENS[tile_class]}", dtype_tag(call.dtype), tag)
    return translation_unit(name, ("prefill.cuh",), (layout,), (entry,))


def _sort_module() -> ModuleSource:
    entries = tuple(
        Entry(f"prefill_{name}", SortArguments, "qmoe::prefill::SortArguments", f"qmoe::prefill::{name}", _SORT_THREADS)
        for name in ("count_chunk", "sort_chunk")
    )
    return translation_unit(module_name("prefill", VERSION, "sort"), ("prefill_group.cuh",), (), entries)


def _combine_module(call: CallDescription, alignment: Mapping[AddressSource, int]) -> ModuleSource:
    store_bytes = 8 if alignment.get("output", 16) >= 8 else 2
    entry = Entry(
        "prefill_combine",
        CombineArguments,
        "qmoe::prefill::CombineArguments",
        f"qmoe::prefill::combine<{device_type(call.dtype)}, {store_bytes}>",
        _COMBINE_THREADS,
        4,
    )
    name = module_name("prefill", VERSION, "combine", dtype_tag(call.dtype), f"y{store_bytes}")
    return translation_unit(name, ("prefill_combine.cuh",), (), (entry,))


# --- steps ------------------------------------------------------------------------------------------------------------

_GROUPED: tuple[tuple[str, AddressSource], ...] = (("tiles", "group_tiles"), ("tile_ends", "tile_ends"))
_SORTED: tuple[tuple[str, AddressSource], ...] = (("grouped_routes", "grouped_routes"), *_GROUPED)
_VECTORS: tuple[tuple[str, AddressSource], ...] = (("workspace", "workspace"),)
_WATCHED: tuple[tuple[str, AddressSource], ...] = (
    ("route_state", "route_state"),
    ("exact_tile_count", "exact_tile_count"),
)


def _watched(call: CallDescription) -> tuple[tuple[str, AddressSource], ...]:
    return _WATCHED if _checked(call) else ()


def _chunks(call: CallDescription) -> tuple[int, int]:
    """Chunks that routes are sorted in, and routes per chunk: enough blocks, and few counts to add up."""
    per_chunk = _SORT_THREADS * -(-call.routes // (_SORT_THREADS * _MAX_CHUNKS))
    return -(-call.routes // per_chunk), per_chunk


def _sort_scratch(call: CallDescription) -> tuple[tuple[str, int], ...]:
    return (
        ("chunk_counts", 4 * _chunks(call)[0] * call.experts.num_experts),
        ("grouped_routes", 4 * call.routes),
        ("group_tiles", 16 * largest_tile_count(call, _TILE_TOKENS)),
        ("tile_ends", 4 * len(_CLASS_TOKENS)),
    )


def _sort_steps(call: CallDescription) -> tuple[Step, ...]:
    """The launches that sort routes by expert and list tiles, as ``route.group_steps`` but for many routes."""
    chunks, per_chunk = _chunks(call)
    module = _sort_module()

    def step(name: str) -> Step:
        arguments = SortArguments(
            routes=call.routes,
            experts=call.experts.num_experts,
            chunks=chunks,
            chunk_routes=per_chunk,
            tile_rows=_TILE_TOKENS,
        )
        pointers: tuple[tuple[str, AddressSource], ...] = (
            ("route_experts", "route_experts"),
            ("chunk_counts", "chunk_counts"),
            *_SORTED,
        )
        grid, block = (chunks, 1, 1), (_SORT_THREADS, 1, 1)
        return Step(name, module, f"prefill_{name}", grid, block, 0, arguments, pointers, dependent=True)

    return step("count_chunk"), step("sort_chunk")


def _combine_step(call: CallDescription, alignment: Mapping[AddressSource, int]) -> Step:
    hidden = call.experts.hidden_size
    blocks = call.rows * -(-hidden // (4 * _COMBINE_THREADS))
    pointers: tuple[tuple[str, AddressSource], ...] = (
        ("contributions", "contributions"),
        ("route_experts", "route_experts"),
        ("route_weights", "route_weights"),
        ("output", "output"),
    )
    return Step(
        "combine",
        _combine_module(call, alignment),
        "prefill_combine",
        (min(blocks, MAX_GRID_X), 1, 1),
        (_COMBINE_THREADS, 1, 1),
        0,
        CombineArguments(rows=call.rows, top_k=call.top_k, hidden=hidden),
        pointers,
        dependent=True,
    )


def _permute_step(
    call: CallDescription, capabilities: Capabilities, alignment: Mapping[AddressSource, int], pieces: int
) -> Step:
    arguments = PermuteArguments(
        tokens_offset=_activated_bytes(call),
        rows=call.rows,
        routes=call.routes,
        hidden=call.experts.hidden_size,
        exact_split=pieces,
    )
    pointers: tuple[tuple[str, AddressSource], ...] = (("input", 0), *_GROUPED, *_VECTORS)
    if _checked(call):
        pointers = (*pointers, *_watched(call), ("zero_rows", "zero_rows"), ("exact_tiles", "exact_tiles"))
    return Step(
        "permute",
        _permute_module(call, alignment),
        "prefill_permute",
        (min(-(-call.rows * 32 // _PERMUTE_THREADS), 8 * capabilities.multiprocessor_count), 1, 1),
        (_PERMUTE_THREADS, 1, 1),
        0,
        arguments,
        pointers,
        dependent=True,
    )


def _gate_up_steps(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int],
    pieces: int,
    scalars: GateScalars,
) -> tuple[Step, ...]:
    apart = {"none": _STEP_INNER, "interleaved": 1, "halves": call.experts.inter_size, "fc3": 0}
    feature_rows = 2 if call.experts.gating == "interleaved" else 1
    arguments = GateUpArguments(
        apart=_rows_apart(call.experts.fc1, apart[call.experts.gating], feature_rows, 16 * feature_rows),
        tokens_offset=_activated_bytes(call),
        routes=call.routes,
        top_k=call.top_k,
        hidden=call.experts.hidden_size,
        inter=call.experts.inter_size,
        exact_split=pieces,
        scalars=scalars,
    )
    items = largest_tile_count(call, _TILE_TOKENS) * _row_tiles(call)
    return tuple(
        Step(
            f"gate_up_{tokens}",
            _gate_up_module(call, alignment, tile_class),
            "prefill_gate_up",
            (min(items, capabilities.multiprocessor_count), 1, 1),
            (_THREADS, 1, 1),
            _SHARED_BYTES,
            arguments,
            (*matrix_pointers("fc1", "fc3"), *_SORTED, *_VECTORS, *_watched(call)),
            dependent=True,
        )
        for tile_class, tokens in enumerate(_CLASS_TOKENS)
    )


def _down_steps(
    call: CallDescription, capabilities: Capabilities, alignment: Mapping[AddressSource, int], pieces: int
) -> tuple[Step, ...]:
    arguments = DownArguments(
        apart=_rows_apart(call.experts.fc2, 8, 16, 128),
        routes=call.routes,
        top_k=call.top_k,
        row_bytes=_activated_row(call),
        hidden=call.experts.hidden_size,
        inter=call.experts.inter_size,
        exact_split=pieces,
    )
    items = largest_tile_count(call, _TILE_TOKENS) * -(-call.experts.hidden_size // _TILE_ROWS)
    return tuple(
        Step(
            f"down_{tokens}",
            _down_module(call, alignment, tile_class),
            "prefill_down",
            (min(items, capabilities.multiprocessor_count), 1, 1),
            (_THREADS, 1, 1),
            _SHARED_BYTES,
            arguments,
            (
                *matrix_pointers("fc2"),
                *_SORTED,
                *_VECTORS,
                *_watched(call),
                *((("zero_rows", "zero_rows"),) if _checked(call) else ()),
                ("contributions", "contributions"),
            ),
            dependent=True,
        )
        for tile_class, tokens in enumerate(_CLASS_TOKENS)
    )


def _exact_steps(steps: Mapping[str, Step]) -> tuple[Step, ...]:
    """The portable products, on a list of tiles that is empty unless a half could not hold a value."""
    renamed: dict[AddressSource, AddressSource] = {
        "group_tiles": "exact_tiles",
        "tile_count": "exact_tile_count",
        "activated": "workspace",
    }
    return tuple(
        replace(
            steps[name],
            name=f"exact_{name}",
            pointers=tuple((field, renamed.get(source, source)) for field, source in steps[name].pointers),
        )
        for name in ("gate_up_many", "down_many")
    )
