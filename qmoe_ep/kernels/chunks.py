"""Calls in chunks of rows, so that scratch stays below a limit. :func:`plan_in_chunks` is where a call enters.

Chunks are calls of their own on the same scratch, one after another, whose operands begin further behind. What rows of
each chunk are valid is found on the device.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from qmoe_ep.errors import QMoEError
from qmoe_ep.kernels.plan import AddressSource, ModuleSource, Plan, Step
from qmoe_ep.kernels.translation_unit import Entry, module_name, translation_unit
from qmoe_ep.operator import ROUTER_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from qmoe_ep.call import CallDescription

__all__ = ["DEFAULT_SCRATCH_LIMIT", "ChunkArguments", "plan_in_chunks"]

DEFAULT_SCRATCH_LIMIT = 4 << 30
VERSION = 1
_THREADS = 128
# Rows of chunks are multiples of this where they can be, which keeps operands aligned as they were.
_ROUND_ROWS = 8


class ChunkArguments(ctypes.Structure):
    """``qmoe::ChunkArguments``."""

    _fields_ = (
        ("valid_rows", ctypes.c_void_p),
        ("chunk_rows", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("rows_each", ctypes.c_int),
        ("chunks", ctypes.c_int),
    )


def plan_in_chunks(
    call: CallDescription,
    make: Callable[[CallDescription, Mapping[AddressSource, int]], Plan],
    alignment: Mapping[AddressSource, int],
    limit: int,
) -> Plan:
    """Plan a call at once, or in as few chunks of rows as keep scratch within a limit.

    Parameters
    ----------
    make : plans a call of any number of rows, given the alignment of its operands
    alignment : bytes to which an operand's address is known to be aligned, by operand index; 16 where it says nothing
    limit : bytes of scratch

    Raises
    ------
    QMoEError
        If one row alone needs more.
    """
    plan, rows = make(call, alignment), call.rows
    while (needed := _scratch_bytes(plan)) > limit:
        if rows <= 1:
            raise QMoEError(
                f"one row needs {needed} bytes of scratch, expected at most scratch_limit = {limit}; raise the limit"
            )
        rows = _fewer_rows(call, rows, limit / needed)
        plan = _repeat(call, rows, make, alignment)
    return plan


def _fewer_rows(call: CallDescription, rows: int, share: float) -> int:
    """Rows of chunks of nearly one size, fewer than before."""
    fitting = max(1, min(rows - 1, int(rows * share)))
    fitting = fitting // _ROUND_ROWS * _ROUND_ROWS or fitting
    even = -(-call.rows // -(-call.rows // fitting))
    return min(fitting, -(-even // _ROUND_ROWS) * _ROUND_ROWS)


def _scratch_bytes(plan: Plan) -> int:
    return sum(nbytes for _, nbytes in plan.scratch)


def _part(call: CallDescription, rows: int) -> CallDescription:
    return replace(call, rows=rows, input_shape=(rows, call.experts.hidden_size))


def _row_bytes(call: CallDescription) -> dict[AddressSource, int]:
    """Bytes of a row of each operand that has rows."""
    experts = call.experts.num_experts
    vector = call.experts.hidden_size * call.dtype.itemsize
    sizes: dict[AddressSource, int] = {0: vector, 1: experts * call.router_dtype.itemsize, "output": vector}
    if call.router_weights_dtype is not None:
        sizes[ROUTER_WEIGHTS] = experts * call.router_weights_dtype.itemsize
    return sizes


def _part_alignment(
    call: CallDescription, rows: int, alignment: Mapping[AddressSource, int]
) -> dict[AddressSource, int]:
    """What is known of operands that begin any number of chunks of ``rows`` rows further behind."""
    known = dict(alignment)
    known.update({source: math.gcd(alignment.get(source, 16), rows * n) for source, n in _row_bytes(call).items()})
    return known


def _repeat(
    call: CallDescription,
    rows: int,
    make: Callable[[CallDescription, Mapping[AddressSource, int]], Plan],
    alignment: Mapping[AddressSource, int],
) -> Plan:
    """The plan of a chunk for each of them; the last one may be another."""
    chunks = -(-call.rows // rows)
    plan = make(_part(call, rows), _part_alignment(call, rows, alignment))
    last_rows = call.rows - (chunks - 1) * rows
    last = plan if last_rows == rows else make(_part(call, last_rows), _part_alignment(call, rows, alignment))
    sizes = dict(plan.scratch)
    for slot, nbytes in last.scratch:
        sizes[slot] = max(nbytes, sizes.get(slot, 0))
    steps = [_count_step(call, rows, chunks)]
    for chunk in range(chunks):
        own = last if chunk == chunks - 1 else plan
        steps += [_moved(step, call, chunk, rows) for step in own.steps]
    reason = f"{plan.reason}, in {chunks} chunks of {rows} rows"
    return Plan(plan.variant, reason, (*sizes.items(), ("chunk_rows", 4 * chunks)), tuple(steps))


def _moved(step: Step, call: CallDescription, chunk: int, rows: int) -> Step:
    """A step of a chunk's plan, on its rows."""
    behind: dict[AddressSource, int] = {source: chunk * rows * n for source, n in _row_bytes(call).items()}
    behind["valid_rows"] = 4 * chunk
    renamed: dict[AddressSource, AddressSource] = {"valid_rows": "chunk_rows"}
    return replace(
        step,
        pointers=tuple((field, renamed.get(source, source)) for field, source in step.pointers),
        offsets=tuple((field, behind[source]) for field, source in step.pointers if behind.get(source)),
    )


def _module() -> ModuleSource:
    entry = Entry("count_chunk_rows", ChunkArguments, "qmoe::ChunkArguments", "qmoe::count_chunk_rows", _THREADS)
    return translation_unit(module_name("chunks", VERSION), ("chunks.cuh",), (), (entry,))


def _count_step(call: CallDescription, rows: int, chunks: int) -> Step:
    return Step(
        "count_chunk_rows",
        _module(),
        "count_chunk_rows",
        (1, 1, 1),
        (_THREADS, 1, 1),
        0,
        ChunkArguments(rows=call.rows, rows_each=rows, chunks=chunks),
        (("valid_rows", "valid_rows"), ("chunk_rows", "chunk_rows")),
    )
