"""The CUDA runtime of the package: primary context, one stream, memory, launches and barriers.

A call enters through :meth:`Runtime.prepare` (once per signature) and then, for every call, takes
:attr:`Runtime.lock`, enters :meth:`Runtime.current` and enqueues its prepared launches. Everything goes to
one in-order stream, so that memory freed in stream order may be handed out again at once.

Memory comes from a driver pool that the runtime owns (``cuMemAllocFromPoolAsync``), whose release threshold
keeps freed memory for reuse: the driver's allocator already reuses in stream order, splits and merges, and
falls back to returning unused pages when another user of the device needs them, which size classes of our own
would have to repeat.

Lifetimes: whatever the driver gave is held by a :class:`_Core`, which refers to nothing above it. ``close()``,
the finalizer of the :class:`Runtime` and interpreter exit all end in :meth:`_Core.shut_down`. Finalizers of
other objects never call the driver: they queue what they want (:meth:`Runtime.defer`), and the next call that
may do so carries it out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qmoe_ep import user_objects
from qmoe_ep.capabilities import Capabilities
from qmoe_ep.capture_state import STATUS_BY_NUMBER, CaptureSession, CaptureStatus
from qmoe_ep.driver import check, driver, initialise
from qmoe_ep.errors import CaptureError, CudaError, QMoEError
from qmoe_ep.kernels.plan import Step
from qmoe_ep.launch import Function, PreparedLaunch
from qmoe_ep.memory import Allocation, MemoryStatistics
from qmoe_ep.runtime_core import Core, Current
from qmoe_ep.staging import STAGED_BYTES

__all__ = ["Allocation", "Capabilities", "CaptureStatus", "Function", "MemoryStatistics", "PreparedLaunch", "Runtime"]

_log = logging.getLogger("qmoe_ep")

_LARGEST = 2**63 - 1


class Runtime:
    """A device's primary context, one stream and a memory pool.

    Parameters
    ----------
    device : ordinal
    stream : ``None`` for a stream of the runtime's own; else a handle as ``int`` (0 is the legacy default
        stream) or an object with ``__cuda_stream__``, which is kept alive
    synchronous : make :meth:`synchronize` wait; ``QMOE_EP_SYNC=1`` does the same

    Raises
    ------
    CudaError : no driver, no such device, or the driver refuses.
    QMoEError : the stream is of another device, or per-thread.

    Notes
    -----
    Freed by :meth:`close`, by the garbage collector or at interpreter exit, after a drain. In a forked child
    nothing is freed and every use raises: a child must make a runtime of its own.

    Attributes
    ----------
    lock : re-entrant; held by a call from its first check to its last launch, and around captures' begin and
        end, drains and frees
    stream : handle of the stream that all work goes to
    owns_stream : the stream was made here, so that no other party captures on it
    capture : the package's own capture in progress, or None; guarded by `lock`
    foreign_capture : what ``graph_capture`` knows of the embedder's latest capture; guarded by `lock`
    """

    def __init__(self, device: int = 0, stream: Any = None, synchronous: bool = False) -> None:
        initialise()
        self.device = device
        self.synchronous = synchronous or os.environ.get("QMOE_EP_SYNC", "") == "1"
        self.capture: CaptureSession | None = None
        self.foreign_capture: object | None = None
        # Here and not in the core, which outlives the runtime: what is queued refers to the runtime.
        self._deferred: deque[Callable[[], None]] = deque()
        self._deferred_drain: deque[Callable[[], None]] = deque()
        self._core = Core(device, stream)
        self.lock = self._core.lock
        self.stream = self._core.stream_handle
        self.owns_stream = self._core.owns_stream
        self._finalizer = weakref.finalize(self, self._core.shut_down, final=True)
        _runtimes.add(self)

    # Identity

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the process is a forked child."""
        return self._core.closed

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.stream)

    def capabilities(self) -> Capabilities:
        """Return the limits of the device."""
        return self._core.capabilities

    def current(self) -> Any:
        """Return a context manager under which the primary context is current.

        It restores what the caller had. Where the context is current already, it costs one query. Enter it
        once per call, not per launch.

        Raises
        ------
        CudaError : on entry: the runtime is closed.
        """
        return Current(self._core)

    # Memory

    def allocate(self, nbytes: int, purpose: str) -> Allocation:
        """Allocate device memory in stream order; zero bytes count as one. The contents are undefined.

        Raises
        ------
        QMoEError : a size that is negative or more than 2^63-1.
        CaptureError : the stream is capturing.
        CudaError : such as out of memory.
        """
        if not 0 <= nbytes <= _LARGEST:
            raise QMoEError(f"{purpose}: expected a size of 0 to 2^63-1 bytes, got {nbytes}")
        with self.lock, self.current():
            self.refuse_while_capturing(f"allocate {nbytes} bytes for {purpose}")
            self._take_finished_graphs()
            self.collect()
            nbytes = max(nbytes, 1)
            return Allocation(self, self._core.allocate(nbytes, purpose), nbytes, purpose)

    def count_owner(self, allocation: Allocation, change: int) -> int:
        """Change an allocation's owner count; at zero its memory goes. ``Allocation`` calls it."""
        with self.lock:
            if allocation.owners < 1:
                if self.closed:
                    return 0
                raise RuntimeError(f"{allocation!r} is gone already: it can't be retained or released again")
            allocation.owners += change
            if allocation.owners == 0 and not self.closed:
                self._core.release(allocation.pointer)
            return allocation.owners

    def htod(self, destination: int, source: npt.NDArray[Any], doing: str = "copy to the device") -> None:
        """Copy a C-contiguous array to a device address in stream order; `source` may change afterwards.

        Raises
        ------
        CaptureError : the stream is capturing; the graph would hold a host address.
        """
        if not source.flags.c_contiguous:
            raise QMoEError(f"{doing}: expected a C-contiguous array, got strides {source.strides}")
        with self.lock, self.current():
            self.refuse_while_capturing(doing)
            self._core.htod(destination, source.ctypes.data, source.nbytes, doing)

    def dtoh(self, destination: npt.NDArray[Any], source: int, doing: str = "copy from the device") -> None:
        """Fill a C-contiguous array from a device address, after all work enqueued before; waits.

        Up to 64 KiB other threads may go on enqueueing meanwhile.

        Raises
        ------
        CaptureError : the stream is capturing.
        """
        if not (destination.flags.c_contiguous and destination.flags.writeable):
            raise QMoEError(f"{doing}: expected a writable C-contiguous array, got strides {destination.strides}")
        core, nbytes, address = self._core, destination.nbytes, destination.ctypes.data
        with self.current():
            with self.lock:
                self.refuse_while_capturing(doing)
                if nbytes > STAGED_BYTES:
                    core.dtoh(address, source, nbytes, doing)
                    return
                buffer = core.staging.from_device(source, nbytes, core.stream, doing)
            # Without the lock, so that other threads go on enqueueing.
            core.staging.finish(buffer, address, nbytes, doing)

    def dtoh_together(
        self, sources: Sequence[tuple[int, int]], doing: str = "copy from the device"
    ) -> list[npt.NDArray[np.uint8]]:
        """Read pieces of device memory, (address, bytes) each, after all work enqueued before; waits, asleep.

        Nothing comes between them on the stream. Other threads may go on enqueueing meanwhile, whatever the sizes.

        Returns
        -------
        uint8 [bytes] of each piece, writable, aligned to 16 bytes

        Raises
        ------
        CaptureError : the stream is capturing.
        """
        core = self._core
        with self.current():
            with self.lock:
                self.refuse_while_capturing(doing)
                buffer, offsets = core.staging.together(sources, core.stream, doing)
            data = np.empty(offsets[-1] + sources[-1][1] if sources else 0, np.uint8)
            core.staging.finish(buffer, data.ctypes.data, data.nbytes, doing)
        return [data[offset : offset + nbytes] for offset, (_, nbytes) in zip(offsets, sources, strict=True)]

    def dtod(self, destination: int, source: int, nbytes: int, doing: str = "copy on the device") -> None:
        """Copy device memory in stream order. May be captured."""
        with self.lock, self.current():
            result = driver().cuMemcpyDtoDAsync(destination, source, nbytes, self._core.stream)
            check(result, "cuMemcpyDtoDAsync", doing)

    def memset(self, destination: int, value: int, nbytes: int, doing: str = "fill device memory") -> None:
        """Set bytes in stream order. May be captured."""
        with self.lock, self.current():
            check(driver().cuMemsetD8Async(destination, value, nbytes, self._core.stream), "cuMemsetD8Async", doing)

    def memory_statistics(self) -> MemoryStatistics:
        """Return the pool's figures; carries out queued frees first, unless the stream is capturing."""
        with self.lock, self.current():
            self._take_finished_graphs()
            self.collect()
            return self._core.memory_statistics()

    def trim(self, keep_bytes: int = 0) -> None:
        """Drain, then give the pool's unused memory back to the device down to `keep_bytes`."""
        with self.lock, self.current():
            self.drain_for_unmap("trim the memory pool")
            self._core.trim(keep_bytes)

    # Launches

    def prepare(self, step: Step, function: Function, owner: str = "", stream: int | None = None) -> PreparedLaunch:
        """Bind a step of a plan to the stream.

        Parameters
        ----------
        step : its arguments are copied
        function : the loaded entry of the step's module
        owner : who launches, for errors: ``"node 7"``
        stream : handle of another stream of the context; None for the runtime's

        Raises
        ------
        QMoEError : a block that the device can't run.
        CudaError : the shared memory opt-in was refused.
        """
        doing = f"launch {step.name}" + (f" for {owner}" if owner else "")
        limits, (x, y, z) = self._core.capabilities, step.block
        if x * y * z > limits.max_threads_per_block:
            raise QMoEError(f"{doing}: expected at most {limits.max_threads_per_block} threads, got {step.block}")
        if step.shared_bytes > limits.shared_bytes_per_block_optin:
            most = limits.shared_bytes_per_block_optin
            raise QMoEError(f"{doing}: expected at most {most} bytes of shared memory, got {step.shared_bytes}")
        with self.lock, self.current():
            target = self._core.stream if stream is None else driver().CUstream(stream)
            return PreparedLaunch(step, function, target, doing)

    # Capture

    def capture_status(self) -> CaptureStatus:
        """Ask the driver whether the stream is capturing; costs one query. The context must be current."""
        return STATUS_BY_NUMBER[self._core.capture_status()]

    def begin_capture(self) -> None:
        """Start a capture in thread-local mode. ``Capture`` calls it, with the lock held."""
        self._core.begin_capture()

    def end_capture(self) -> Any:
        """End it and return the ``CUgraph``, which the caller destroys.

        Raises
        ------
        CudaError : the capture was invalid; the stream is usable again.
        """
        return self._core.end_capture()

    def abandon_capture(self) -> None:
        """End it and drop the graph; never raises."""
        self._core.abandon_capture()

    def refuse_while_capturing(self, doing: str, stream: int | None = None) -> None:
        """Raise where the stream, or another one of the context, is capturing.

        Raises
        ------
        CaptureError : it is; the message says what was refused.
        """
        if self._core.capturing(stream):
            raise CaptureError(
                f"can't {doing} while the stream is capturing: end the capture, run the call once "
                "eagerly, capture again"
            )

    # Barriers and order

    def synchronize(self) -> None:
        """End-of-call barrier: waits only in synchronous mode, and never under capture."""
        if self.synchronous:
            with self.lock, self.current():
                if not self._core.capturing():
                    self._core.drain("finish the call (synchronous mode)")

    def wait(self, doing: str = "wait for the stream") -> None:
        """Wait for everything enqueued, for a caller that wants its results now.

        Raises
        ------
        CaptureError : the stream is capturing.
        CudaError : including what an earlier kernel did wrong.
        """
        with self.lock, self.current():
            self.refuse_while_capturing(doing)
            self._core.drain(doing)
            self.collect()

    def drain_for_unmap(self, doing: str = "drain before memory goes") -> None:
        """Wait unconditionally, before memory is freed or replaced.

        Raises
        ------
        CaptureError : the stream is capturing; queue the release instead (:meth:`defer`).
        CudaError : the drain failed, so nothing may be freed.
        """
        with self.lock, self.current():
            self.refuse_while_capturing(doing)
            self._core.drain(doing)

    def wait_for_stream(self, producer: int) -> None:
        """Order the stream's next work after everything enqueued on another stream of the context.

        While capturing, a producer outside of the capture is left alone: its work is not part of the graph.

        Raises
        ------
        CaptureError : the producer is capturing and this stream is not.
        """
        with self.lock, self.current():
            self._core.order(producer, self.stream)

    def order_stream_after(self, consumer: int) -> None:
        """Order another stream's next work after everything enqueued here.

        Raises
        ------
        CaptureError : this stream is capturing and the consumer is not.
        """
        with self.lock, self.current():
            self._core.order(self.stream, consumer)

    # Deferred release

    def defer(self, action: Callable[[], None], drain: bool = True) -> None:
        """Queue work for the next moment the stream isn't capturing. Safe in finalizers and callbacks.

        Parameters
        ----------
        action : called with the lock held and the context current; must not raise
        drain : whether the stream must have drained first
        """
        if not self.closed:
            (self._deferred_drain if drain else self._deferred).append(action)

    def release_later(self, allocation: Allocation, drain: bool = True) -> None:
        """Queue one owner's release of an allocation. Safe in finalizers.

        The free itself is in stream order, so memory that only this stream ever used needs no drain.
        """
        self.defer(allocation.release, drain)

    def drain_and_release(self, allocations: Iterable[Allocation], doing: str) -> None:
        """Give up one owner's share of each allocation, after a drain where memory goes with it.

        While the stream is capturing both are queued for after it. Does nothing on a closed runtime.

        Raises
        ------
        CudaError : the drain failed; the releases are queued for another try.
        """
        allocations = tuple(allocations)

        def release() -> None:
            for allocation in allocations:
                allocation.release()

        with self.lock:
            if any(allocation.owners == 1 for allocation in allocations):
                self.after_drain(release, doing)
            elif not self.closed:
                release()

    def after_drain(self, action: Callable[[], None], doing: str) -> None:
        """Drain, then carry out what gives memory back; while the stream is capturing, queue it for after.

        Does nothing on a closed runtime, where everything is gone.

        Raises
        ------
        CudaError : the drain failed; the action is queued for another try.
        """
        with self.lock:
            if self.closed:
                return
            drained = False
            try:
                with self.current():
                    self.drain_for_unmap(doing)
                    drained = True
                    action()
            except CaptureError:
                self.defer(action)
            except CudaError:
                if not drained:
                    self.defer(action)
                raise

    def collect(self) -> None:
        """Carry out what is queued, unless the stream is capturing. Nearly free when nothing is.

        Raises
        ------
        CudaError : a drain that the queue needs failed; the queue is kept.
        """
        if not (self._deferred or self._deferred_drain or self._core.pending_free):
            return
        with self.lock, self.current():
            if self._core.capture_status() != 0:
                return
            # Finalizers may append while this runs; what they append may need a drain of its own.
            count, count_drain = len(self._deferred), len(self._deferred_drain)
            if count_drain:
                self._core.drain("drain before queued memory goes")
            self._core.free_pending()
            for _ in range(count_drain):
                self._deferred_drain.popleft()()
            for _ in range(count):
                self._deferred.popleft()()

    def _take_finished_graphs(self) -> None:
        for action in user_objects.take_finished():
            action()

    def log_failure(self, error: CudaError) -> None:
        """Log a failure to give something back, which will be tried again."""
        _log.warning("%s; it will be tried again", error)

    # End

    def on_close(self, action: Callable[[], None]) -> Callable[[], None]:
        """Register driver objects to be destroyed at close, after the drain and before the memory.

        The newest registration goes first. `action` must not refer to the runtime.

        Returns
        -------
        a function that forgets the registration.
        """
        return self._core.on_close(action)

    def close(self) -> None:
        """Drain, destroy and free everything. Repeating it does nothing.

        Everything is attempted even when something fails; the first failure is raised at the end.

        Raises
        ------
        CaptureError : an embedder's capture is in progress on the stream; nothing was closed.
        CudaError : something could not be given back.
        """
        with self.lock:
            if self.closed:
                return
            if self.capture is not None:
                self.capture.abandon()
            # What can't be drained now is reported by the core, which frees everything anyway.
            with contextlib.suppress(CudaError):
                self._take_finished_graphs()
                self.collect()
            self._core.shut_down(final=False)
            self._finalizer.detach()
            self._deferred.clear()
            self._deferred_drain.clear()

    def forget(self) -> None:
        """Count as closed without giving anything back; for a forked child, where the driver is unusable."""
        self._core.closed = True
        # Another thread may have held the lock when the process forked.
        self.lock = self._core.lock = threading.RLock()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# A forked child has no usable context: whatever it inherited counts as closed there, without any driver call.
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for runtime in list(_runtimes):
        runtime.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
