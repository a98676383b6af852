"""The route telemetry record: its bytes, seen from the host, and what a call adds to them.

The layout is that of ``qmoe::RouteRecord`` in ``kernels/route_record.cuh``: a header, the bitmap (uint32 words, an
even number), the counts (uint64 [E]; not in mode bitmap) and, only in mode trace, a ring of rows (int32 [trace_rows,
k]) and that of their logit margins (float32 [trace_rows]; only if they are kept). :func:`record_routes` does to it what
the device code does, for the CPU provider.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from qmoe_ep.errors import QMoEError
from qmoe_ep.routing import logit_margins

__all__ = [
    "HEADER_BYTES",
    "MAX_COUNT",
    "RecordView",
    "RouteRecordHeader",
    "RouteTelemetryConfig",
    "TelemetryMode",
    "record_routes",
]

TelemetryMode: TypeAlias = Literal["bitmap", "counts", "trace"]
_MODES: tuple[TelemetryMode, ...] = get_args(TelemetryMode)

MAX_COUNT = 2**63 - 1
"""Where counters stop; half of their range, so that what a call adds on the device can't wrap one."""


class RouteRecordHeader(ctypes.Structure):
    """``qmoe::RouteRecord``."""

    _fields_ = (
        ("recording", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("num_experts", ctypes.c_int32),
        ("routes_per_row", ctypes.c_int32),
        ("epoch", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("routes", ctypes.c_uint64),
        ("saturated", ctypes.c_uint32),
        ("ticket", ctypes.c_uint32),
        ("trace_rows", ctypes.c_uint32),
        ("trace_next", ctypes.c_uint32),
        ("trace_held", ctypes.c_uint32),
        ("trace_margins", ctypes.c_uint32),
        ("trace_lost", ctypes.c_uint64),
    )


HEADER_BYTES = ctypes.sizeof(RouteRecordHeader)


@dataclass(frozen=True, slots=True)
class RouteTelemetryConfig:
    """What a record counts.

    Parameters
    ----------
    num_experts : experts of the node; calls with another number are not recorded
    routes_per_row : the node's k
    mode : ``"bitmap"`` (experts seen), ``"counts"`` (and how often) or ``"trace"`` (and the last rows)
    trace_rows : rows that the ring of mode trace holds
    margins : keep the logit margin of each row as well, the smallest selected logit less the largest rejected one; in
        mode trace

    Raises
    ------
    QMoEError : a number out of range, another mode, or margins without a trace.
    """

    num_experts: int
    routes_per_row: int
    mode: TelemetryMode = "bitmap"
    trace_rows: int = 1024
    margins: bool = False

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise QMoEError(f"telemetry mode: expected one of {', '.join(_MODES)}, got {self.mode!r}")
        ranges = (("num_experts", 2**30), ("routes_per_row", self.num_experts), ("trace_rows", 2**31 - 1))
        for name, most in ranges:
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise QMoEError(f"telemetry {name}: expected an integer from 1 to {most}, got {value!r}")
        if self.margins and self.mode != "trace":
            raise QMoEError(f"telemetry margins: expected mode 'trace', whose rows they belong to, got {self.mode!r}")

    @property
    def bitmap_bytes(self) -> int:
        """Size of the bitmap, in whole 64-bit words."""
        return -(-self.num_experts // 64) * 8

    @property
    def counters_bytes(self) -> int:
        """Size of everything but the rings."""
        return HEADER_BYTES + self.bitmap_bytes + (0 if self.mode == "bitmap" else 8 * self.num_experts)

    @property
    def record_bytes(self) -> int:
        """Size of the record."""
        row = 4 * (self.routes_per_row + self.margins)
        return self.counters_bytes + (row * self.trace_rows if self.mode == "trace" else 0)

    def empty_record(self, epoch: int, recording: bool) -> NDArray[np.uint8]:
        """The header and zero counters of a window that begins: uint8 [counters_bytes]. The ring needs no value."""
        record = np.zeros(self.counters_bytes, np.uint8)
        header = RouteRecordHeader.from_buffer(record.data)
        header.recording, header.mode, header.epoch = recording, _MODES.index(self.mode), epoch
        header.num_experts, header.routes_per_row = self.num_experts, self.routes_per_row
        header.trace_rows = self.trace_rows if self.mode == "trace" else 0
        header.trace_margins = self.margins
        return record

    def new_record(self, epoch: int, recording: bool) -> NDArray[np.uint8]:
        """:meth:`empty_record` with a ring of zeros: what new memory is filled with, uint8 [record_bytes]."""
        record = np.zeros(self.record_bytes, np.uint8)
        record[: self.counters_bytes] = self.empty_record(epoch, recording)
        return record


class RecordView:
    """A record's parts as views of its bytes.

    Attributes
    ----------
    header : changes are changes of the bytes
    config : what the record was made for
    bitmap : uint32 words
    counts : uint64 [E], empty in mode bitmap
    ring : int32 [trace_rows, k], empty unless in mode trace or where the bytes end before it
    margins : float32 [trace_rows], empty unless they are kept or where the bytes end before them
    """

    def __init__(self, record: NDArray[np.uint8]) -> None:
        self.header = RouteRecordHeader.from_buffer(record.data)
        header = self.header
        self.config = RouteTelemetryConfig(
            header.num_experts,
            header.routes_per_row,
            _MODES[header.mode],
            max(header.trace_rows, 1),
            bool(header.trace_margins),
        )
        start, stop = HEADER_BYTES + self.config.bitmap_bytes, self.config.counters_bytes
        self.bitmap = record[HEADER_BYTES:start].view(np.uint32)
        self.counts = record[start:stop].view(np.uint64)
        end = stop + 4 * header.trace_rows * self.config.routes_per_row
        self.ring = record[stop:end].view(np.int32).reshape(-1, self.config.routes_per_row)
        self.margins = record[end : self.config.record_bytes].view(np.float32)

    @staticmethod
    def nbytes_of(header: NDArray[np.uint8]) -> int:
        """Size of the record whose header is given, uint8 [HEADER_BYTES]."""
        return RecordView(header.copy()).config.record_bytes

    def seen(self) -> NDArray[np.bool_]:
        """Which experts were selected: bool [E]."""
        bits = np.unpackbits(self.bitmap.astype("<u4").view(np.uint8), bitorder="little")
        return bits[: self.config.num_experts].astype(np.bool_)

    def trace(self) -> NDArray[np.int32]:
        """The rows that the ring holds, oldest first: int32 [n, k]."""
        rows: NDArray[np.int32] = self.ring[self._places()]
        return rows

    def trace_margins(self) -> NDArray[np.float32]:
        """The margins of these rows, where they are kept: float32 [n]."""
        margins: NDArray[np.float32] = self.margins[self._places()]
        return margins

    def _places(self) -> NDArray[np.int64]:
        header = self.header
        oldest = header.trace_next - header.trace_held
        places: NDArray[np.int64] = np.arange(oldest, header.trace_next) % max(header.trace_rows, 1)
        return places


def record_routes(
    record: NDArray[np.uint8], selected: NDArray[Any], num_experts: int, logits: NDArray[Any] | None = None
) -> None:
    """Add one call to a record; a paused one, or one of other sizes, is left alone.

    Parameters
    ----------
    record : uint8 [record_bytes], changed in place
    selected : integers [valid rows, k], the experts of each row
    num_experts : of the call
    logits : float32, float16 or bfloat16 [valid rows, E], which margins are made from; without them they are NaN
    """
    view = RecordView(record)
    header, rows = view.header, selected.shape[0]
    if not header.recording or (header.num_experts, header.routes_per_row) != (num_experts, selected.shape[1]):
        return
    experts, times = np.unique(selected, return_counts=True)
    np.bitwise_or.at(view.bitmap, experts // 32, np.uint32(1) << (experts % 32).astype(np.uint32))
    header.rows = _add(header, header.rows, rows)
    header.routes = _add(header, header.routes, selected.size)
    if view.counts.size:
        # Both at most 2^63-1, so that the sum fits before it is cut.
        view.counts[experts] = np.minimum(view.counts[experts] + times.astype(np.uint64), np.uint64(MAX_COUNT))
    if view.ring.size:
        capacity = header.trace_rows
        kept = np.arange(max(0, rows - capacity), rows)
        places = (header.trace_next + kept) % capacity
        view.ring[places] = selected[kept]
        if view.margins.size:
            view.margins[places] = np.nan if logits is None else logit_margins(logits[kept], selected[kept])
        held = header.trace_held + rows
        header.trace_next = (header.trace_next + rows) % capacity
        header.trace_held = min(held, capacity)
        header.trace_lost = _add(header, header.trace_lost, max(0, held - capacity))


def _add(header: RouteRecordHeader, count: int, more: int) -> int:
    """The sum, cut at MAX_COUNT, which the header then says."""
    if count + more > MAX_COUNT:
        header.saturated = 1
    return min(count + more, MAX_COUNT)
