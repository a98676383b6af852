"""Stream capture, and captured graphs that own what they address.

A call asks :func:`registrar` first. Outside of a capture it answers None. Inside one it answers who takes an
owner's share in every allocation that the call's nodes will address: the package's own :class:`Capture`, or
the graph of an embedder that captures the stream by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from qmoe_ep import user_objects
from qmoe_ep.capture_state import STATUS_BY_NUMBER
from qmoe_ep.driver import check, driver
from qmoe_ep.errors import CaptureError, CudaError
from qmoe_ep.memory import Allocation
from qmoe_ep.runtime import CaptureStatus, Runtime
from qmoe_ep.warm_calls import CallSignature, CaptureSupport, OperandSignature, WarmedCalls

__all__ = [
    "CallSignature",
    "Capture",
    "CaptureSupport",
    "CapturedGraph",
    "GraphResources",
    "OperandSignature",
    "Registrar",
    "WarmedCalls",
    "embedders_graph",
    "registrar",
]


_OTHER_CONTEXT = (201, 400)
"""``CUDA_ERROR_INVALID_CONTEXT`` and ``CUDA_ERROR_INVALID_HANDLE``: what a launch says that didn't find its context."""


class Registrar(Protocol):
    """Whoever owns what a captured call addresses."""

    def register(self, allocation: Allocation) -> None:
        """Own an allocation until the graph is gone. Repeating it does nothing more."""

    def keep(self, thing: object) -> None:
        """Keep a Python object, such as a caller's array, alive as long as the graph."""


def registrar(runtime: Runtime) -> Registrar | None:
    """Return who owns what the present call addresses, or None when the stream is not capturing.

    Call it with the runtime's lock held and its context current; one driver query outside of captures.

    Raises
    ------
    CaptureError : another thread captures the stream, or the capture is no longer valid.
    """
    status = runtime.capture_status()
    own = runtime.capture
    if status is CaptureStatus.NONE:
        if own is not None:
            raise CaptureError(
                "the stream's capture was ended by somebody else: leave the capture block and start again"
            )
        return None
    if status is CaptureStatus.INVALIDATED:
        raise CaptureError("the capture was invalidated by an earlier error: leave the capture block and start again")
    if own is not None:
        if own.thread != threading.get_ident():
            raise CaptureError(
                "another thread is capturing the stream: wait for it, or use a provider with its own stream"
            )
        return own
    return _foreign(runtime, runtime.stream)


def embedders_graph(runtime: Runtime, stream: int) -> Registrar | None:
    """Return who owns what a call on an embedder's stream addresses, or None when that isn't capturing.

    Call it with the runtime's lock held and its context current; one driver query outside of captures.

    Raises
    ------
    CaptureError : the capture is no longer valid.
    """
    handle, doing = driver().CUstream(stream), "ask whether an embedder's stream is capturing"
    status = STATUS_BY_NUMBER[int(check(driver().cuStreamIsCapturing(handle), "cuStreamIsCapturing", doing))]
    if status is CaptureStatus.INVALIDATED:
        raise CaptureError("the capture was invalidated by an earlier error: end it and start again")
    return None if status is CaptureStatus.NONE else _foreign(runtime, stream)


class _Held:
    """Owner's shares that one graph has taken."""

    def __init__(self) -> None:
        self.allocations: dict[int, Allocation] = {}
        self.things: dict[int, object] = {}

    def register(self, allocation: Allocation) -> None:
        if allocation.identity not in self.allocations:
            self.allocations[allocation.identity] = allocation.retain()

    def keep(self, thing: object) -> None:
        self.things[id(thing)] = thing

    def release(self) -> None:
        """Give the shares back. The caller has seen to the drain."""
        allocations = tuple(self.allocations.values())
        self.allocations.clear()
        self.things.clear()
        for allocation in allocations:
            allocation.release()


class _ForeignCapture:
    """The shares of a graph that an embedder is capturing."""

    def __init__(self, capture_id: int) -> None:
        self.capture_id = capture_id
        self._held = _Held()
        self.register, self.keep, self.release = self._held.register, self._held.keep, self._held.release

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """What is owned so far."""
        return tuple(self._held.allocations.values())


def _foreign(runtime: Runtime, stream: int) -> Registrar:
    doing = "read the embedder's capture"
    info = check(driver().cuStreamGetCaptureInfo(stream), "cuStreamGetCaptureInfo", doing)
    capture_id, graph = int(info[1]), info[2]
    known = runtime.foreign_capture
    if isinstance(known, _ForeignCapture) and known.capture_id == capture_id:
        return known
    capture = _ForeignCapture(capture_id)
    # One user object per graph: what later calls of the same capture register joins the same share.
    user_objects.attach(graph, lambda: runtime.defer(capture.release))
    runtime.foreign_capture = capture
    return capture


class Capture:
    """Captures what is enqueued inside its ``with`` block, on the runtime's stream, in thread-local mode.

    Leaving the block normally instantiates the graph; leaving it by an exception ends the capture and drops
    what was captured. Either way the next eager call works.

    Parameters
    ----------
    runtime : whose stream is captured
    update : a graph whose executable is to be updated in place with what is captured; when the topology
        differs it is instantiated anew. It takes over the new resources and gives the old ones back after a drain.
    """

    def __init__(self, runtime: Runtime, update: CapturedGraph | None = None) -> None:
        self._runtime, self._update = runtime, update
        self._held = _Held()
        self._graph: CapturedGraph | None = None
        self.thread = 0

    @property
    def graph(self) -> CapturedGraph:
        """The graph, once the block has been left.

        Raises
        ------
        CaptureError : the block is still open, or the capture failed.
        """
        if self._graph is None:
            raise CaptureError("there is no graph: the capture block is still open, or it failed")
        return self._graph

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """What is owned so far."""
        return tuple(self._held.allocations.values())

    def register(self, allocation: Allocation) -> None:
        """Own an allocation until the graph is closed."""
        self._held.register(allocation)

    def keep(self, thing: object) -> None:
        """Keep a Python object alive until the graph is closed."""
        self._held.keep(thing)

    def __enter__(self) -> Capture:
        try:
            with self._runtime.lock, self._runtime.current():
                self._begin()
        except BaseException:
            # No block was entered, so no exit will end what was begun.
            if self._runtime.capture is self:
                self.abandon()
            raise
        return self

    def _begin(self) -> None:
        runtime = self._runtime
        if runtime.capture is not None:
            raise CaptureError("a capture of this provider is in progress already: end it first")
        if runtime.stream == 0:
            raise CaptureError("the default stream can't be captured: make the provider with a stream of its own")
        if self._update is not None and self._update.closed:
            raise CaptureError("the graph to be updated is closed: capture without it")
        if self._update is not None and self._update._runtime is not runtime:
            raise CaptureError("the graph to be updated is of another provider: capture with that one, or without it")
        if runtime.capture_status() is not CaptureStatus.NONE:
            raise CaptureError(
                "the stream's owner is capturing it already: call the kernels inside that capture; the graph takes "
                "its share in the memory by itself"
            )
        runtime.collect()
        self.thread = threading.get_ident()
        # A former graph of this object keeps what it owns.
        self._graph, self._held = None, _Held()
        runtime.begin_capture()
        runtime.capture = self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.abandon()
        else:
            self._finish()

    def abandon(self) -> None:
        """End the stream's capture, drop what was captured, and give back what it held.

        Raises
        ------
        CaptureError : called from a thread that did not begin the capture.
        """
        runtime = self._runtime
        with runtime.lock:
            if runtime.capture is not self:
                return
            self._check_thread()
            runtime.capture = None
            try:
                with runtime.current():
                    runtime.abandon_capture()
            finally:
                # A graph that exists owns them; only restoring the caller's context failed then.
                if self._graph is None:
                    self._held.release()
            _collect_quietly(runtime)

    def _finish(self) -> None:
        runtime = self._runtime
        with runtime.lock:
            if runtime.capture is not self:
                raise CaptureError("the capture was abandoned: the provider was closed inside of it")
            self._check_thread()
            try:
                with runtime.current():
                    self._graph = self._instantiate(runtime.end_capture())
            except BaseException:
                self.abandon()
                raise
            runtime.capture = None
            _collect_quietly(runtime)

    def _check_thread(self) -> None:
        if self.thread != threading.get_ident():
            raise CaptureError("a capture can only be ended by the thread that began it")

    def _instantiate(self, graph: Any) -> CapturedGraph:
        binding = driver()
        try:
            if self._update is not None:
                self._update.update(graph, self._held)
                return self._update
            executable = check(binding.cuGraphInstantiate(graph, 0), "cuGraphInstantiate", "instantiate the graph")
            return CapturedGraph(self._runtime, executable, self._held)
        finally:
            _destroy_quietly(self._runtime, "cuGraphDestroy", graph)


def _collect_quietly(runtime: Runtime) -> None:
    try:
        runtime.collect()
    except CudaError as error:
        # The queue is kept; the outcome of the capture matters more here.
        runtime.log_failure(error)


def _destroy_quietly(runtime: Runtime, call: str, handle: Any) -> None:
    """Destroy a driver object; what the driver refuses is logged and tried again later."""
    try:
        check(getattr(driver(), call)(handle), call, "drop a graph")
    except CudaError as error:
        runtime.log_failure(error)
        runtime.defer(lambda: _destroy_quietly(runtime, call, handle), drain=False)


class _Executable:
    """Holder of a ``CUgraphExec`` that the runtime can destroy at its close without knowing the graph."""

    def __init__(self, handle: Any) -> None:
        self.handle: Any = handle

    def destroy(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            check(driver().cuGraphExecDestroy(handle), "cuGraphExecDestroy", "drop a graph")


class CapturedGraph:
    """An executable graph and everything that its nodes address.

    Replays of it stay valid whatever happens to the kernels, their scratch or telemetry. Its memory goes when it
    is closed, or dropped, *and* the stream has drained. Made by :class:`Capture`.
    """

    def __init__(self, runtime: Runtime, executable: Any, held: _Held) -> None:
        self._runtime = runtime
        self._executable = _Executable(executable)
        self._held = held
        self._lock = runtime.lock
        self._launch = driver().cuGraphLaunch
        self._stream = driver().CUstream(runtime.stream)
        self._forget = runtime.on_close(self._executable.destroy)
        self._finalizer = weakref.finalize(self, _drop_later, runtime, self._executable, held, self._forget)
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether the graph, or its runtime, was closed."""
        return self._executable.handle is None

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """What the graph owns."""
        return tuple(self._held.allocations.values())

    def replay(self, stream: int | None = None) -> None:
        """Launch the graph: one driver launch, and no wait.

        Replays of one runtime's graphs share scratch. On another stream the replay is ordered by events after
        everything enqueued on the runtime's stream, and before what comes next there, so they never overlap.

        Parameters
        ----------
        stream : handle of another stream of the context; None for the runtime's

        Raises
        ------
        CaptureError : the graph is closed, or one of the streams is capturing.
        CudaError : the driver refused.
        """
        runtime = self._runtime
        with self._lock:
            handle = self._executable.handle
            # Only an embedder's stream can be captured without the runtime knowing. Where nothing has to be asked, the
            # launch itself tells whether the context is current, which saves a query.
            if (
                stream is None
                and handle is not None
                and runtime.capture is None
                and runtime.owns_stream
                and not runtime.closed
            ):
                result = self._launch(handle, self._stream)
                if not result[0]:
                    return
                if int(result[0]) not in _OTHER_CONTEXT:
                    check(result, "cuGraphLaunch", "replay a graph")
            with runtime.current():
                if handle is None:
                    raise CaptureError("the graph is closed: capture again")
                if runtime.capture is not None or not runtime.owns_stream:
                    runtime.refuse_while_capturing("replay a graph")
                if stream is None or stream == runtime.stream:
                    check(self._launch(handle, self._stream), "cuGraphLaunch", "replay a graph")
                else:
                    self._replay_on(handle, stream)

    def _replay_on(self, handle: Any, stream: int) -> None:
        runtime, target = self._runtime, driver().CUstream(stream)
        runtime.refuse_while_capturing("replay a graph on another stream", stream)
        runtime.order_stream_after(stream)
        check(self._launch(handle, target), "cuGraphLaunch", f"replay a graph on stream {stream:#x}")
        try:
            runtime.wait_for_stream(stream)
        except CudaError:
            # Unordered work must not be left running beside what the runtime's stream does next.
            check(driver().cuStreamSynchronize(target), "cuStreamSynchronize", "wait for a replay on another stream")
            raise

    def update(self, graph: Any, held: _Held) -> None:
        """Take over a newly captured ``CUgraph`` and its shares; ``Capture(update=...)`` calls it.

        Raises
        ------
        CudaError : the driver refused; the graph is what it was.
        """
        binding, runtime = driver(), self._runtime
        doing = "update the graph"
        if self.closed:
            raise CaptureError("the graph to be updated is closed: capture without it")
        try:
            check(binding.cuGraphExecUpdate(self._executable.handle, graph), "cuGraphExecUpdate", doing)
        except CudaError as error:
            if error.name != "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE":
                raise
            new = check(binding.cuGraphInstantiate(graph, 0), "cuGraphInstantiate", doing)
            old, self._executable.handle = self._executable.handle, new
            runtime.defer(lambda: _destroy_quietly(runtime, "cuGraphExecDestroy", old))
        # The same holder stays with the finalizer; what it held goes after the drain.
        before = _Held()
        before.allocations, before.things = self._held.allocations, self._held.things
        self._held.allocations, self._held.things = held.allocations, held.things
        held.allocations, held.things = {}, {}
        runtime.defer(before.release)

    def close(self) -> None:
        """Drain, destroy the executable and give up what it owns. Repeating it does nothing.

        While the stream is capturing this is queued for after the capture.

        Raises
        ------
        CudaError : the drain failed; the rest is queued for another try.
        """
        runtime = self._runtime
        with runtime.lock:
            if self._finalizer.detach() is None or runtime.closed:
                return
            handle, self._executable.handle = self._executable.handle, None
            self._forget()
            private = _Executable(handle)
            forget = runtime.on_close(private.destroy)
            runtime.after_drain(lambda: _drop(runtime, private, self._held, forget), "drain before a graph goes")

    def __enter__(self) -> CapturedGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop(runtime: Runtime, executable: _Executable, held: _Held, forget: Callable[[], None]) -> None:
    handle = executable.handle
    forget()
    if handle is not None:
        executable.handle = None
        _destroy_quietly(runtime, "cuGraphExecDestroy", handle)
    held.release()


def _drop_later(runtime: Runtime, executable: _Executable, held: _Held, forget: Callable[[], None]) -> None:
    runtime.defer(lambda: _drop(runtime, executable, held, forget))


class GraphResources:
    """Owner's shares for an embedder that captures by itself and wants to hold them itself.

    Parameters
    ----------
    runtime : of the allocations
    allocations : what a call addresses
    things : Python objects to keep alive

    Close it after the embedder's graph is gone; the garbage collector does the same, later.
    """

    def __init__(self, runtime: Runtime, allocations: Iterable[Allocation], things: Iterable[object] = ()) -> None:
        self._runtime = runtime
        self._held = _Held()
        for allocation in allocations:
            self._held.register(allocation)
        for thing in things:
            self._held.keep(thing)
        self._finalizer = weakref.finalize(self, runtime.defer, self._held.release)
        self._finalizer.atexit = False

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """What is kept alive."""
        return tuple(self._held.allocations.values())

    def close(self) -> None:
        """Drain where memory goes with it, and give the shares up. Repeating it does nothing."""
        if self._finalizer.detach() is not None:
            self._runtime.after_drain(self._held.release, "drain before a graph's resources go")
