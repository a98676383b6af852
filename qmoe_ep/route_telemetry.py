"""The producer of route telemetry of one node in one executor, and the snapshots it gives."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qmoe_ep.errors import QMoEError, TelemetryUnsupported
from qmoe_ep.route_record import MAX_COUNT, RecordView, RouteTelemetryConfig, TelemetryMode, record_routes
from qmoe_ep.telemetry_memory import HostMemory

if TYPE_CHECKING:
    from qmoe_ep.memory import Allocation
    from qmoe_ep.telemetry_memory import RecordMemory

__all__ = ["RouteTelemetry", "TelemetrySnapshot", "give_way", "take_snapshots"]


_GIVE_WAY_SECONDS = 1e-4
"""Longer than it takes to wake a thread."""


@dataclass(frozen=True, slots=True, eq=False)
class TelemetrySnapshot:
    """What a window held at one moment. Its arrays are read-only.

    Attributes
    ----------
    epoch : number of the window; grows over the producer's life
    rows, routes : recorded in the window, up to 2^63-1
    num_experts, routes_per_row, mode : as armed
    bitmap : bool [E], experts that were selected
    counts : uint64 [E], how often, up to 2^63-1 each; None in mode bitmap
    trace : int32 [n, k], the experts of the last n rows in order of selection, oldest row first; None unless in
        mode trace
    lost_rows : rows that left the ring of mode trace
    saturated : a counter has reached its end, so that the true figure is at least that
    paused : recording was off
    executor : None for a private producer
    node : the embedder's number
    unix_time : wall-clock time, seconds since 1970
    margins : float32 [n], of the rows of the trace, the smallest selected logit less the largest rejected one (infinite
        where none was rejected); None unless they are kept
    """

    epoch: int
    rows: int
    routes: int
    num_experts: int
    routes_per_row: int
    mode: TelemetryMode
    bitmap: NDArray[np.bool_]
    counts: NDArray[np.uint64] | None
    trace: NDArray[np.int32] | None
    lost_rows: int
    saturated: bool
    paused: bool
    executor: int | None
    node: int
    unix_time: float
    margins: NDArray[np.float32] | None = None

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts that were selected, ascending."""
        return tuple(np.flatnonzero(self.bitmap).tolist())

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for JSON; the bitmap is given as the list of ``experts``.

        Margins that aren't finite, which JSON can't say, are None.
        """
        margins = None if self.margins is None else self.margins.tolist()
        return {
            "executor": self.executor,
            "node": self.node,
            "unix_time": self.unix_time,
            "epoch": self.epoch,
            "mode": self.mode,
            "num_experts": self.num_experts,
            "routes_per_row": self.routes_per_row,
            "rows": self.rows,
            "routes": self.routes,
            "saturated": self.saturated,
            "paused": self.paused,
            "experts": list(self.experts),
            "counts": None if self.counts is None else self.counts.tolist(),
            "trace": None if self.trace is None else self.trace.tolist(),
            "margins": margins and [margin if math.isfinite(margin) else None for margin in margins],
            "lost_rows": self.lost_rows,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TelemetrySnapshot:
        """Return the snapshot that :meth:`to_dict` described; margins that are None there become NaN."""
        fields = dict(values)
        bitmap = np.zeros(fields["num_experts"], np.bool_)
        bitmap[fields.pop("experts")] = True
        counts, trace, margins = fields.pop("counts"), fields.pop("trace"), fields.pop("margins", None)
        return cls(
            bitmap=_frozen(bitmap),
            counts=None if counts is None else _frozen(np.array(counts, np.uint64)),
            trace=None if trace is None else _frozen(np.array(trace, np.int32).reshape(-1, fields["routes_per_row"])),
            # NumPy reads None as NaN.
            margins=None if margins is None else _frozen(np.array(margins, np.float32)),
            **fields,
        )


@dataclass(slots=True)
class _Armed:
    """The record in use; replaced as a whole, under the memory's lock."""

    config: RouteTelemetryConfig
    record: Allocation
    epoch: int
    recording: bool


@dataclass(slots=True)
class _State:
    """What outlives the producer until its record is given back."""

    memory: RecordMemory
    armed: _Armed | None = None
    next_epoch: int = 0

    def abandon(self) -> None:
        """Queue the release; safe in finalizers."""
        armed, self.armed = self.armed, None
        if armed is not None:
            self.memory.release_later(armed.record)


class RouteTelemetry:
    """Counts which experts one node routes to. Disarmed until :meth:`arm`; safe to use from any thread.

    A call counts into the record that is armed when it is enqueued (or was, when its graph was captured). All
    changes act in the order of the stream. Owns its record together with the graphs that address it; the share is
    given back, after a drain, by :meth:`disarm`, arming again, or when the producer is dropped.

    Parameters
    ----------
    memory : where records live
    top_k : the node's k
    executor, node : whose it is; executor None for a private one
    """

    def __init__(self, memory: RecordMemory, top_k: int, executor: int | None, node: int) -> None:
        self.executor, self.node, self.top_k = executor, node, top_k
        self._memory = memory
        self._state = _State(memory)
        weakref.finalize(self, self._state.abandon).atexit = False

    # --- what is armed -----------------------------------------------------------------------------

    @property
    def armed(self) -> bool:
        """Whether calls are given a record."""
        return self._state.armed is not None

    @property
    def config(self) -> RouteTelemetryConfig | None:
        """What was armed."""
        armed = self._state.armed
        return None if armed is None else armed.config

    @property
    def record(self) -> Allocation | None:
        """The armed record, for a call to write to; read it under the runtime's lock."""
        armed = self._state.armed
        return None if armed is None else armed.record

    @property
    def paused(self) -> bool:
        """Whether a record is armed that doesn't record."""
        armed = self._state.armed
        return armed is not None and not armed.recording

    @property
    def footprint_bytes(self) -> int:
        """Size of the armed record; 0 when disarmed."""
        armed = self._state.armed
        return 0 if armed is None else armed.record.nbytes

    # --- arming ------------------------------------------------------------------------------------

    def arm(self, config: RouteTelemetryConfig, *, paused: bool = False) -> None:
        """Start a window in a new record; one that is armed already is replaced, after a drain.

        Parameters
        ----------
        config : what to count
        paused : begin paused, such as for a graph that is to be captured now and to record later

        Raises
        ------
        TelemetryUnsupported : ``routes_per_row`` isn't the node's k.
        CaptureError : the stream is capturing.
        CudaError : such as out of memory. Whatever the error, what was armed stays armed.
        """
        doing = f"arm route telemetry of node {self.node}"
        if config.routes_per_row != self.top_k:
            raise TelemetryUnsupported(
                f"telemetry routes_per_row: expected {self.top_k}, the k of node {self.node}, "
                f"got {config.routes_per_row}"
            )
        memory, state = self._memory, self._state
        with memory.exclusive():
            memory.refuse_while_capturing(doing)
            old = state.armed
            record = memory.allocate(config.record_bytes, f"route telemetry of node {self.node}")
            try:
                memory.write(record, config.new_record(state.next_epoch, not paused), doing)
                if old is not None:
                    memory.drain(doing)
            except BaseException:
                memory.release_later(record)
                raise
            state.armed = _Armed(config, record, state.next_epoch, not paused)
            state.next_epoch += 1
            if old is not None:
                old.record.release()

    def disarm(self) -> None:
        """Stop recording and give the record back after a drain; nothing happens when disarmed.

        Raises
        ------
        CaptureError : the stream is capturing.
        CudaError : the drain failed; the record stays armed.
        """
        memory, state = self._memory, self._state
        doing = f"disarm route telemetry of node {self.node}"
        if state.armed is None:
            return
        with memory.exclusive():
            memory.refuse_while_capturing(doing)
            if (armed := state.armed) is not None:
                memory.drain(doing)
                state.armed = None
                armed.record.release()

    def detach(self, fenced: bool) -> None:
        """Disarm for the registry: never refused, and without a drain where the caller says it has fenced."""
        memory, state = self._memory, self._state
        if state.armed is None:
            return
        with memory.exclusive():
            armed, state.armed = state.armed, None
            if armed is None:
                return
            if fenced:
                armed.record.release()
            else:
                memory.drain_and_release([armed.record], f"remove route telemetry of node {self.node}")

    def abandon(self) -> None:
        """Disarm and only queue the drain and the release; never fails."""
        with self._memory.lock:
            self._state.abandon()

    # --- windows -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Leave the record alone from here on in stream order, at the same address; nothing when disarmed.

        Raises
        ------
        CaptureError : the stream is capturing, and every replay would repeat it.
        """
        self._set_recording(False)

    def resume(self) -> None:
        """Record again from here on in stream order, also in graphs captured meanwhile; nothing when disarmed.

        Raises
        ------
        CaptureError : the stream is capturing, and every replay would repeat it.
        """
        self._set_recording(True)

    def _set_recording(self, recording: bool) -> None:
        if self._state.armed is None:
            return
        doing = f"{'resume' if recording else 'pause'} route telemetry of node {self.node}"
        with self._memory.exclusive():
            if (armed := self._state.armed) is not None:
                # The flag is the first field of the record.
                self._memory.write(armed.record, np.array([recording], np.uint32).view(np.uint8), doing)
                armed.recording = recording

    def reset_boundary(self) -> None:
        """End the window and begin the next one, in stream order; nothing happens when disarmed.

        Raises
        ------
        CaptureError : the stream is capturing, and every replay would clear the window.
        """
        doing = f"reset route telemetry of node {self.node}"
        if self._state.armed is None:
            return
        with self._memory.exclusive():
            if (armed := self._state.armed) is not None:
                # One write, so that nothing can come between the counters and the epoch.
                data = armed.config.empty_record(self._state.next_epoch, armed.recording)
                self._memory.write(armed.record, data, doing)
                armed.epoch = self._state.next_epoch
                self._state.next_epoch += 1

    def preset(self, rows: int, counts: NDArray[Any]) -> None:
        """Let the window go on from given figures, such as those of a process before; in stream order.

        Parameters
        ----------
        rows : rows seen; the routes follow from it
        counts : integers [E], at most the routes each; nonzero ones make the bitmap

        Raises
        ------
        QMoEError : disarmed, or figures that no window can hold.
        CaptureError : the stream is capturing.
        """
        doing = f"preset route telemetry of node {self.node}"
        with self._memory.exclusive():
            armed = self._state.armed
            if armed is None:
                raise QMoEError(f"can't {doing}: it is not armed")
            routes = min(rows * armed.config.routes_per_row, MAX_COUNT)
            given = [int(count) for count in counts]
            if not 0 <= rows <= MAX_COUNT or len(given) != armed.config.num_experts:
                raise QMoEError(f"can't {doing}: expected up to 2^63-1 rows and {armed.config.num_experts} counts")
            if not all(0 <= count <= routes for count in given):
                raise QMoEError(f"can't {doing}: expected counts from 0 to the {routes} routes")
            data = armed.config.empty_record(armed.epoch, armed.recording)
            view = RecordView(data)
            view.header.rows, view.header.routes = rows, routes
            view.header.saturated = rows * armed.config.routes_per_row > MAX_COUNT
            if view.counts.size:
                view.counts[:] = given
            bits = np.zeros(view.bitmap.size * 32, np.uint8)
            bits[: len(given)] = [count > 0 for count in given]
            view.bitmap[:] = np.packbits(bits, bitorder="little").view(np.uint32)
            self._memory.write(armed.record, data, doing)

    def snapshot(self) -> TelemetrySnapshot | None:
        """Copy the window, after everything enqueued before; None when disarmed.

        Raises
        ------
        CaptureError : the stream is capturing; try again after it.
        """
        return next((snapshot for _, snapshot in take_snapshots([self])), None)

    def _share(self) -> Allocation | None:
        """The record as somebody who reads it may keep it; None when disarmed. Under the memory's lock."""
        armed = self._state.armed
        return None if armed is None else armed.record.retain()

    def _decode(self, data: NDArray[np.uint8], unix_time: float) -> TelemetrySnapshot:
        view = RecordView(data)
        header, config = view.header, view.config
        return TelemetrySnapshot(
            epoch=header.epoch,
            rows=header.rows,
            routes=header.routes,
            num_experts=config.num_experts,
            routes_per_row=config.routes_per_row,
            mode=config.mode,
            bitmap=_frozen(view.seen()),
            counts=_frozen(view.counts.copy()) if config.mode != "bitmap" else None,
            trace=_frozen(view.trace()) if config.mode == "trace" else None,
            margins=_frozen(view.trace_margins()) if config.margins else None,
            lost_rows=header.trace_lost,
            saturated=bool(header.saturated),
            paused=not header.recording,
            executor=self.executor,
            node=self.node,
            unix_time=unix_time,
        )

    # --- on the host -------------------------------------------------------------------------------

    def add_call(self, selected: NDArray[Any], num_experts: int, logits: NDArray[Any] | None = None) -> None:
        """Count one call of a kernel that runs on the host.

        Parameters
        ----------
        selected : integers [valid rows, k], the experts of each row in order of selection
        num_experts : of the call
        logits : float32, float16 or bfloat16 [valid rows, E]; without them margins, where they are kept, are NaN

        Raises
        ------
        QMoEError : the record is on a device, whose kernels count by themselves.
        """
        if self._state.armed is None:
            return
        memory = self._memory
        if not isinstance(memory, HostMemory):
            raise QMoEError("add_call: the record is on a device, whose kernels count by themselves")
        with memory.exclusive():
            if (armed := self._state.armed) is not None:
                record_routes(memory.array(armed.record), selected, num_experts, logits)


def take_snapshots(producers: Sequence[RouteTelemetry]) -> list[tuple[RouteTelemetry, TelemetrySnapshot]]:
    """Copy the windows of producers at one point of the stream, after everything enqueued before.

    Calls and replays may be enqueued while the copies are waited for.

    Parameters
    ----------
    producers : of one provider; those that are disarmed are left out

    Raises
    ------
    CaptureError : the stream is capturing; try again after it.
    CudaError : the driver refuses.
    """
    if not any(producer.armed for producer in producers):
        return []
    memory = producers[0]._memory
    doing = f"read route telemetry of node {producers[0].node}" + (" and others" if len(producers) > 1 else "")
    with memory.exclusive():
        memory.refuse_while_capturing(doing)
        shares = [(producer, share) for producer in producers if (share := producer._share()) is not None]
    # Without the lock while it waits; the shares keep records that are disarmed meanwhile.
    try:
        data = memory.read([share for _, share in shares], doing)
    finally:
        memory.drain_and_release([share for _, share in shares], doing)
    now, snapshots = time.time(), list[tuple[RouteTelemetry, TelemetrySnapshot]]()
    for (producer, _), copy in zip(shares, data, strict=True):
        if snapshots:
            give_way()
        snapshots.append((producer, producer._decode(copy, now)))
    return snapshots


def give_way() -> None:
    """Let a thread that launches have the interpreter: one that only yields takes it again before the other wakes."""
    time.sleep(_GIVE_WAY_SECONDS)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array
