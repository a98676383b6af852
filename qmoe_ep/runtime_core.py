"""What the driver gave a runtime, and how all of it goes back.

:class:`Core` belongs to one ``Runtime`` and refers to nothing above it, so that the runtime's finalizer can
hold it. Its methods expect the lock held and the context current, unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from qmoe_ep.capabilities import Capabilities
from qmoe_ep.driver import check, driver, relaxed_capture_mode
from qmoe_ep.errors import CaptureError, CudaError, QMoEError
from qmoe_ep.memory import MemoryStatistics
from qmoe_ep.staging import STAGED_BYTES, Staging

__all__ = ["Core", "Current"]

_log = logging.getLogger("qmoe_ep")

_EXIT_PATIENCE_SECONDS = 5.0
"""How long a finalizer waits for a thread that holds the lock; afterwards the process's end frees the memory."""


class Current:
    """Context manager: the primary context is current inside, the caller's own is back afterwards."""

    __slots__ = ("_core", "_pushed")

    def __init__(self, core: Core) -> None:
        self._core, self._pushed = core, False

    def __enter__(self) -> None:
        core = self._core
        if core.closed:
            hint = "It is closed, or this is a forked child: create a new one"
            raise CudaError("CUDA_ERROR_DEINITIALIZED", "Runtime", "use the runtime", hint)
        result = core.get_current()
        if result[0] or int(result[1]) != core.context_handle:
            check(result, "cuCtxGetCurrent", "read the current context")
            check(driver().cuCtxPushCurrent(core.context), "cuCtxPushCurrent", "make the primary context current")
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            self._pushed = False
            check(driver().cuCtxPopCurrent(), "cuCtxPopCurrent", "restore the caller's context")


class Core:
    """Primary context, stream, pool and event of one runtime.

    Attributes
    ----------
    lock : the runtime's lock
    capabilities : the device's limits
    staging : pinned buffers for small copies
    pending_free : device pointers released during a capture, or whose free the driver refused
    live : device pointer -> bytes, of everything not freed yet
    own_capture : the package itself began the capture that is in progress
    """

    def __init__(self, device: int, stream: Any) -> None:
        self.lock = threading.RLock()
        self.closed = False
        self.own_capture = False
        self.pending_free: deque[int] = deque()
        self.live: dict[int, int] = {}
        self._closers: dict[int, Callable[[], None]] = {}
        self._closer_keys = itertools.count()
        # An object that only names a stream may own it.
        self._stream_owner = stream
        self._event: Any = None
        self.staging = Staging()
        self._undo = contextlib.ExitStack()
        binding = driver()
        self.get_current = binding.cuCtxGetCurrent
        self._is_capturing = binding.cuStreamIsCapturing
        self._idle = binding.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self._open(device, stream_handle(stream))

    def _open(self, device: int, stream_handle: int | None) -> None:
        binding = driver()
        self.device = check(binding.cuDeviceGet(device), "cuDeviceGet", f"open device {device}")
        self.capabilities = self._query_capabilities()
        doing = f"retain the primary context of device {device}"
        self.context = check(binding.cuDevicePrimaryCtxRetain(self.device), "cuDevicePrimaryCtxRetain", doing)
        self.context_handle = int(self.context)
        try:
            with self.current(), contextlib.ExitStack() as undo:
                self._create(stream_handle, undo)
                self._undo = undo.pop_all()
        except BaseException:
            # Not empty where only the caller's context could not be restored.
            self._undo.close()
            self._give_back("cuDevicePrimaryCtxRelease", self.device)
            raise

    def _create(self, stream_handle: int | None, undo: contextlib.ExitStack) -> None:
        binding = driver()
        self.owns_stream = stream_handle is None
        if self.owns_stream:
            flag = binding.CUstream_flags.CU_STREAM_NON_BLOCKING
            self.stream = check(binding.cuStreamCreate(flag), "cuStreamCreate", "create the runtime's stream")
            undo.callback(self._give_back, "cuStreamDestroy", self.stream)
        else:
            self.stream = binding.CUstream(stream_handle)
            self._check_stream()
        self.stream_handle = int(self.stream)
        self.pool = self._create_pool()
        undo.callback(self._give_back, "cuMemPoolDestroy", self.pool)
        threshold = binding.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        result = binding.cuMemPoolSetAttribute(self.pool, threshold, binding.cuuint64_t(2**64 - 1))
        check(result, "cuMemPoolSetAttribute", "keep freed memory for reuse")

    def _check_stream(self) -> None:
        if int(self.stream) == 0:
            return
        context = check(driver().cuStreamGetCtx(self.stream), "cuStreamGetCtx", "find the context of the stream given")
        handle = int(context[0] if isinstance(context, tuple) else context)
        if handle != self.context_handle:
            raise QMoEError(
                f"stream: expected a stream of the primary context of device {int(self.device)}, got one of another "
                "context or device"
            )

    def _create_pool(self) -> Any:
        binding = driver()
        properties = binding.CUmemPoolProps()
        properties.allocType = binding.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = binding.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self.device)
        return check(binding.cuMemPoolCreate(properties), "cuMemPoolCreate", "create the memory pool")

    def _give_back(self, call: str, *arguments: Any) -> None:
        check(getattr(driver(), call)(*arguments), call, "close the runtime")

    def current(self) -> Current:
        """Return the context manager; needs neither lock nor context."""
        return Current(self)

    def _query_capabilities(self) -> Capabilities:
        binding = driver()

        def query(name: str) -> int:
            attribute = getattr(binding.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(
                check(binding.cuDeviceGetAttribute(attribute, self.device), "cuDeviceGetAttribute", f"read {name}")
            )

        name = check(binding.cuDeviceGetName(256, self.device), "cuDeviceGetName", "read the device's name")
        return Capabilities(
            device=int(self.device),
            name=name.split(b"\0")[0].decode(errors="replace"),
            compute_capability=(query("COMPUTE_CAPABILITY_MAJOR"), query("COMPUTE_CAPABILITY_MINOR")),
            multiprocessor_count=query("MULTIPROCESSOR_COUNT"),
            max_threads_per_block=query("MAX_THREADS_PER_BLOCK"),
            shared_bytes_per_block_optin=query("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            l2_bytes=query("L2_CACHE_SIZE"),
            shared_bytes_per_multiprocessor=query("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            max_threads_per_multiprocessor=query("MAX_THREADS_PER_MULTIPROCESSOR"),
            registers_per_multiprocessor=query("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        )

    # Memory

    def allocate(self, nbytes: int, purpose: str) -> int:
        """Allocate from the pool in stream order and return the address."""
        result = driver().cuMemAllocFromPoolAsync(nbytes, self.pool, self.stream)
        pointer = int(check(result, "cuMemAllocFromPoolAsync", f"allocate {nbytes} bytes for {purpose}"))
        self.live[pointer] = nbytes
        return pointer

    def release(self, pointer: int) -> None:
        """Free in stream order, or after the capture that is in progress. Needs no context; never raises.

        What the driver refuses is logged and tried again by :meth:`free_pending`: the owner is gone already.
        """
        try:
            with self.current():
                if self.capture_status() == 0:
                    check(driver().cuMemFreeAsync(pointer, self.stream), "cuMemFreeAsync", "free device memory")
                    self.live.pop(pointer, None)
        except CudaError as error:
            _log.warning("%s; it will be tried again", error)
        if pointer in self.live:
            self.pending_free.append(pointer)

    def htod(self, destination: int, source: int, nbytes: int, doing: str) -> None:
        """Copy host memory to the device; it was read when this returns."""
        if nbytes <= STAGED_BYTES:
            self.staging.to_device(destination, source, nbytes, self.stream, doing)
            return
        check(driver().cuMemcpyHtoDAsync(destination, source, nbytes, self.stream), "cuMemcpyHtoDAsync", doing)
        # Whether the driver staged the source is its own affair (it does not for pinned memory), so wait.
        self.drain(doing)

    def dtoh(self, destination: int, source: int, nbytes: int, doing: str) -> None:
        """Copy device memory to the host after the stream's work, and wait."""
        check(driver().cuMemcpyDtoHAsync(destination, source, nbytes, self.stream), "cuMemcpyDtoHAsync", doing)
        self.drain(doing)

    def memory_statistics(self) -> MemoryStatistics:
        """Read the pool's counters."""
        binding = driver()

        def query(name: str) -> int:
            attribute = getattr(binding.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
            result = binding.cuMemPoolGetAttribute(self.pool, attribute)
            return int(check(result, "cuMemPoolGetAttribute", f"read {name} of the memory pool"))

        return MemoryStatistics(
            used=query("USED_MEM_CURRENT"),
            used_peak=query("USED_MEM_HIGH"),
            reserved=query("RESERVED_MEM_CURRENT"),
            reserved_peak=query("RESERVED_MEM_HIGH"),
            allocations=len(self.live),
            requested=sum(self.live.values()),
        )

    def trim(self, keep_bytes: int) -> None:
        """Give unused memory of the pool back to the device."""
        check(driver().cuMemPoolTrimTo(self.pool, keep_bytes), "cuMemPoolTrimTo", "trim the memory pool")

    # Barriers, order and capture

    def drain(self, doing: str) -> None:
        """Wait for the stream, which must not be capturing."""
        with relaxed_capture_mode():
            check(driver().cuStreamSynchronize(self.stream), "cuStreamSynchronize", doing)

    def capture_status(self, stream: Any = None) -> int:
        """Return the number of the driver's capture status: 0 none, 1 active, 2 invalidated."""
        result = self._is_capturing(self.stream if stream is None else stream)
        return int(check(result, "cuStreamIsCapturing", "ask whether the stream is capturing"))

    def capturing(self, stream: int | None = None) -> bool:
        """Whether the stream, or another one, is capturing, validly or not."""
        with self.current():
            return self.capture_status(None if stream is None else driver().CUstream(stream)) != 0

    def order(self, before: int, after: int) -> None:
        """Order the work enqueued on stream `before` ahead of what comes next on stream `after`."""
        binding = driver()
        # Handles 0 and 1 both name the legacy default stream.
        if before == after or {before, after} == {0, 1}:
            return
        producer, consumer = binding.CUstream(before), binding.CUstream(after)
        producing, consuming = self.capture_status(producer) != 0, self.capture_status(consumer) != 0
        if producing and not consuming:
            raise CaptureError(
                f"can't order stream {after:#x} after stream {before:#x}, which is capturing: it would be drawn into "
                "the capture. End the capture first, or use the capturing stream"
            )
        if consuming and not producing:
            return
        doing = f"order stream {after:#x} after stream {before:#x}"
        if self._event is None:
            flag = binding.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._event = check(binding.cuEventCreate(flag), "cuEventCreate", doing)
        check(binding.cuEventRecord(self._event, producer), "cuEventRecord", doing)
        check(binding.cuStreamWaitEvent(consumer, self._event, 0), "cuStreamWaitEvent", doing)

    def begin_capture(self) -> None:
        """Start a capture of the stream in thread-local mode."""
        mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver().cuStreamBeginCapture(self.stream, mode), "cuStreamBeginCapture", "begin a graph capture")
        self.own_capture = True

    def end_capture(self) -> Any:
        """End the capture that :meth:`begin_capture` started and return the ``CUgraph``, which the caller destroys."""
        try:
            return check(driver().cuStreamEndCapture(self.stream), "cuStreamEndCapture", "end the graph capture")
        except CudaError:
            # An invalid capture is over now. Anything else must be ended too, or the stream stays unusable.
            self.abandon_capture()
            raise
        finally:
            self.own_capture = False

    def abandon_capture(self) -> None:
        """End the capture and drop the graph; failures are logged."""
        self.own_capture = False
        doing = "drop an abandoned capture"
        # Ending an invalid capture reports what made it invalid, which the caller has seen by now; a second
        # round finds the stream idle, or ends what the first one could not.
        for _ in range(2):
            try:
                if self.capture_status() == 0:
                    return
                graph = check(driver().cuStreamEndCapture(self.stream), "cuStreamEndCapture", doing)
                check(driver().cuGraphDestroy(graph), "cuGraphDestroy", doing)
            except CudaError as error:
                _log.info("%s", error)

    # The end

    def free_pending(self) -> None:
        """Free what was released during a capture that is over."""
        for _ in range(len(self.pending_free)):
            self.release(self.pending_free.popleft())

    def on_close(self, action: Callable[[], None]) -> Callable[[], None]:
        """Register what shut_down calls, newest first; returns a function that forgets it."""
        key = next(self._closer_keys)
        self._closers[key] = action
        return lambda: (self._closers.pop(key, None), None)[1]

    def shut_down(self, final: bool) -> None:
        """Give everything back. Needs neither lock nor context.

        Parameters
        ----------
        final : called by a finalizer: failures are logged, nothing is raised, and no lock is waited for long
        """
        if self.closed or not self.lock.acquire(timeout=_EXIT_PATIENCE_SECONDS if final else -1):
            return
        errors: list[Exception] = []
        try:
            if self.closed or not self._end_any_capture(final, errors):
                return
            with _keep(errors), self.current(), contextlib.ExitStack() as guard:
                with _keep(errors):
                    guard.enter_context(relaxed_capture_mode())
                self._empty(errors)
                with _keep(errors):
                    self._undo.close()
                self.closed = True
            if self.closed:
                with _keep(errors):
                    self._give_back("cuDevicePrimaryCtxRelease", self.device)
        finally:
            self.lock.release()
        if errors and final:
            _log.warning("closing the CUDA runtime: %s", errors[0])
        elif errors:
            raise errors[0]

    def _end_any_capture(self, final: bool, errors: list[Exception]) -> bool:
        capturing = False
        with _keep(errors):
            capturing = self.capturing()
        if capturing and self.own_capture:
            with _keep(errors), self.current():
                self.abandon_capture()
        elif capturing and final:
            # Somebody else's capture is in progress: any free would break it, so the memory stays.
            self.closed = True
            return False
        elif capturing:
            raise CaptureError("can't close the runtime while its stream is capturing: end the capture, then close")
        return True

    def _empty(self, errors: list[Exception]) -> None:
        with _keep(errors):
            self.drain("drain before the runtime closes")
        while self._closers:
            with _keep(errors):
                self._closers.popitem()[1]()
        for pointer in list(self.live):
            with _keep(errors):
                check(driver().cuMemFreeAsync(pointer, self.stream), "cuMemFreeAsync", "close the runtime")
        self.live.clear()
        self.pending_free.clear()
        for buffer in self.staging.buffers:
            with _keep(errors):
                buffer.destroy()
        if self._event is not None:
            with _keep(errors):
                self._give_back("cuEventDestroy", self._event)


@contextlib.contextmanager
def _keep(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except (CudaError, CaptureError) as error:
        errors.append(error)


def stream_handle(stream: Any) -> int | None:
    """Return the handle of what a caller gave as a stream, or None for a stream to be made.

    Raises
    ------
    QMoEError : not a stream, or the per-thread default stream.
    """
    if stream is None:
        return None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        handle = int(answer[1])
    else:
        try:
            handle = int(stream)
        except (TypeError, ValueError):
            kind = type(stream).__name__
            raise QMoEError(f"stream: expected an int handle or an object with __cuda_stream__, got {kind}") from None
    if handle == 2:
        raise QMoEError("stream: the per-thread default stream is not one stream; give a stream of your own or 0")
    return 0 if handle == 1 else handle
