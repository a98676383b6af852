"""Argument structs of the prefill kernels, as in ``prefill_arguments.cuh``, ``prefill_group.cuh`` and
``prefill_combine.cuh``; every generated module asserts that the compiler sees them alike. Combining takes the
arguments of the portable family.
"""

from __future__ import annotations

import ctypes

from qmoe_ep.kernels.operands import matrix_fields
from qmoe_ep.kernels.portable import CombineArguments, GateScalars

__all__ = [
    "CombineArguments",
    "DownArguments",
    "GateUpArguments",
    "LaneRowsApart",
    "PermuteArguments",
    "RowsApart",
    "SortArguments",
]

_POINTER = ctypes.c_void_p


class PermuteArguments(ctypes.Structure):
    """``qmoe::prefill::PermuteArguments``."""

    _fields_ = (
        ("input", _POINTER),
        ("tiles", _POINTER),
        ("tile_ends", _POINTER),
        ("workspace", _POINTER),
        ("zero_rows", _POINTER),
        ("route_state", _POINTER),
        ("exact_tiles", _POINTER),
        ("exact_tile_count", _POINTER),
        ("tokens_offset", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("routes", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("exact_split", ctypes.c_int),
    )


class SortArguments(ctypes.Structure):
    """``qmoe::prefill::SortArguments``."""

    _fields_ = (
        ("route_experts", _POINTER),
        ("chunk_counts", _POINTER),
        ("grouped_routes", _POINTER),
        ("tiles", _POINTER),
        ("tile_ends", _POINTER),
        ("routes", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("chunks", ctypes.c_int),
        ("chunk_routes", ctypes.c_int),
        ("tile_rows", ctypes.c_int),
    )


class RowsApart(ctypes.Structure):
    """``qmoe::prefill::RowsApart``."""

    _fields_ = (
        ("codes", ctypes.c_longlong),
        ("scales", ctypes.c_longlong),
        ("zero_points", ctypes.c_longlong),
    )


class LaneRowsApart(ctypes.Structure):
    """``qmoe::prefill::LaneRowsApart``."""

    _fields_ = (("upper", RowsApart), ("band", RowsApart), ("lane", RowsApart))


class GateUpArguments(ctypes.Structure):
    """``qmoe::prefill::GateUpArguments``."""

    _fields_ = (
        *matrix_fields("fc1", "fc3"),
        ("grouped_routes", _POINTER),
        ("tiles", _POINTER),
        ("tile_ends", _POINTER),
        ("workspace", _POINTER),
        ("route_state", _POINTER),
        ("exact_tile_count", _POINTER),
        ("tokens_offset", ctypes.c_longlong),
        ("apart", LaneRowsApart),
        ("routes", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("inter", ctypes.c_int),
        ("exact_split", ctypes.c_int),
        ("scalars", GateScalars),
    )


class DownArguments(ctypes.Structure):
    """``qmoe::prefill::DownArguments``."""

    _fields_ = (
        *matrix_fields("fc2"),
        ("grouped_routes", _POINTER),
        ("tiles", _POINTER),
        ("tile_ends", _POINTER),
        ("workspace", _POINTER),
        ("zero_rows", _POINTER),
        ("route_state", _POINTER),
        ("exact_tile_count", _POINTER),
        ("contributions", _POINTER),
        ("apart", LaneRowsApart),
        ("routes", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("row_bytes", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("inter", ctypes.c_int),
        ("exact_split", ctypes.c_int),
    )
