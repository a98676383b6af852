"""The state of a simulated device: contexts, streams, events, captures, graphs, and what went wrong.

Work is *deferred*: an enqueued operation runs when somebody waits for its stream, or for an event behind it.
Streams have no order among each other except by events, so a missing dependency shows as a wrong result or as
a fault. What no correct caller does is recorded in :attr:`Machine.violations`; the fixture fails the test then.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as real

from .memory import Memory, SimulatedFault

__all__ = [
    "CaptureState",
    "Event",
    "Graph",
    "Machine",
    "Module",
    "Operation",
    "Pool",
    "Refused",
    "Stream",
    "UserObject",
]

Code = real.CUresult


class Refused(Exception):
    """A simulated call that returns a result code instead of a value."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class Operation:
    """Something enqueued, or a node of a graph.

    Attributes
    ----------
    kind : such as ``"kernel"``
    what : for messages
    run : carries it out
    key : what must be equal for an executable's node to be updated in place
    cancellable : a copy to the host, which must not happen once its caller was told of a failure
    """

    kind: str
    what: str
    run: Callable[[], None]
    key: object = None
    cancellable: bool = False


@dataclass(slots=True)
class UserObject:
    pointer: int
    destroy: Callable[[int], None]
    references: int


@dataclass(slots=True)
class Graph:
    nodes: list[Operation] = field(default_factory=list)
    objects: list[UserObject] = field(default_factory=list)


@dataclass(slots=True)
class CaptureState:
    identity: int
    handle: int
    graph: Graph
    mode: Any
    thread: int
    origin: int
    invalid: bool = False


@dataclass(slots=True)
class Stream:
    handle: int
    context: int
    queue: deque[Operation] = field(default_factory=deque)
    capture: CaptureState | None = None
    failure: Any = None


@dataclass(slots=True)
class Event:
    """A point in a stream, or inside a capture."""

    done: bool = True
    stream: int = 0
    capture: CaptureState | None = None


@dataclass(slots=True)
class Pool:
    attributes: dict[Any, int]
    destroyed: bool = False


@dataclass(slots=True)
class Module:
    name: str
    source: str


@dataclass(slots=True)
class _Failure:
    name: str | None
    countdown: int
    code: Any


class _Thread(threading.local):
    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.mode = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.embedder = False


class Machine:
    """One simulated process with one device (compute capability 9.0 unless changed).

    Attributes
    ----------
    memory : the device's memory
    violations : what no correct caller does; a test that provokes one clears it
    log : names of the calls made by the package, in order
    attributes : the device's limits, by the driver's attribute name without its prefix
    memory_limit : bytes that pools may hand out
    registered : set by the fixture: address -> whether the capture in progress owns it
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self.lock = threading.RLock()
        self.violations: list[str] = []
        self.log: list[str] = []
        self.attributes = dict(_H200)
        self.memory_limit = 1 << 40
        self.registered: Callable[[int, int], bool] | None = None
        self.thread = _Thread()
        self.retained = 0
        self.pinned: dict[int, Any] = {}
        self.live: dict[int, Any] = {}
        self.embedders: set[int] = set()
        self.streams: dict[int, Stream] = {}
        self.refused_destroys: set[int] = set()
        self._failures: list[_Failure] = []
        self._handles = itertools.count(0x5500_0000_0000, 0x100)
        self.streams[0] = Stream(0, PRIMARY_CONTEXT)

    # Switches for tests

    def fail(self, call: str | None, nth: int = 1, code: Any = None) -> None:
        """Make the `nth` call from now on fail without any effect.

        Parameters
        ----------
        call : its name, or None to count every call
        code : what it returns; by default CUDA_ERROR_UNKNOWN or the compiler's internal error
        """
        self._failures.append(_Failure(call, nth, code))

    def heal(self) -> None:
        """Forget failures that have not happened yet."""
        self._failures.clear()

    def counts(self) -> Counter[str]:
        """Return how often the package made each call."""
        return Counter(self.log)

    @contextlib.contextmanager
    def embedder(self) -> Iterator[None]:
        """Calls inside are another library's: not logged, never failed, what they make isn't a leak."""
        before, self.thread.embedder = self.thread.embedder, True
        try:
            yield
        finally:
            self.thread.embedder = before

    # What every call goes through

    def injected(self, name: str, default: Any = Code.CUDA_ERROR_UNKNOWN) -> Any:
        """Log a call; return the code that it must fail with, or None."""
        if self.thread.embedder:
            return None
        with self.lock:
            self.log.append(name)
            for failure in self._failures:
                if failure.name in (None, name):
                    failure.countdown -= 1
                    if failure.countdown == 0:
                        self._failures.remove(failure)
                        return default if failure.code is None else failure.code
        return None

    def violate(self, message: str) -> None:
        """Record what no correct caller does."""
        self.violations.append(message)

    def check_thread_capture(self, name: str) -> None:
        """Apply the rule for calls that may wait or free while some capture is in progress."""
        modes = real.CUstreamCaptureMode
        if self.thread.mode == modes.CU_STREAM_CAPTURE_MODE_RELAXED:
            return
        for stream in self.streams.values():
            capture = stream.capture
            if capture is None or capture.mode == modes.CU_STREAM_CAPTURE_MODE_RELAXED:
                continue
            mine = capture.thread == threading.get_ident()
            if mine or capture.mode == modes.CU_STREAM_CAPTURE_MODE_GLOBAL:
                self.refuse_in_capture(capture, name)

    def refuse_in_capture(self, capture: CaptureState, name: str) -> None:
        """Record a call that breaks a capture, invalidate that, and refuse."""
        capture.invalid = True
        self.violate(f"{name} during a stream capture")
        raise Refused(Code.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    # Handles

    def add(self, thing: Any) -> int:
        """Give a driver object a handle."""
        handle = next(self._handles)
        self.live[handle] = thing
        if self.thread.embedder:
            self.embedders.add(handle)
        return handle

    def get(self, handle: Any, kind: type) -> Any:
        """Return the driver object of a handle, or refuse."""
        thing = self.live.get(int(handle))
        if not isinstance(thing, kind):
            self.violate(f"{kind.__name__} handle {int(handle):#x} is not valid")
            raise Refused(Code.CUDA_ERROR_INVALID_HANDLE)
        return thing

    def stream(self, handle: Any) -> Stream:
        """Return a stream, or refuse; 1 is the legacy default stream too."""
        number = int(handle)
        stream = self.streams.get(0 if number == 1 else number)
        if stream is None:
            self.violate(f"stream {number:#x} is not valid")
            raise Refused(Code.CUDA_ERROR_INVALID_HANDLE)
        return stream

    def is_pinned(self, address: int) -> bool:
        """Whether a host address lies in pinned memory."""
        return any(start <= address < start + len(data) for start, data in self.pinned.items())

    # Execution

    def enqueue(self, stream: Stream, operation: Operation, capturable: bool = True) -> None:
        """Append to a stream, or to the graph that it is being captured into."""
        if stream.failure is not None:
            raise Refused(stream.failure)
        if stream.capture is None:
            stream.queue.append(operation)
            return
        if stream.capture.invalid:
            raise Refused(Code.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        if not capturable:
            self.refuse_in_capture(stream.capture, operation.what)
        stream.capture.graph.nodes.append(operation)

    def drain(self, stream: Stream) -> None:
        """Carry out everything enqueued on a stream, and what it depends on."""
        while stream.queue:
            self.step(stream)
        if stream.failure is not None:
            raise Refused(stream.failure)

    def step(self, stream: Stream) -> None:
        """Carry out the oldest operation of a stream."""
        operation = stream.queue.popleft()
        if stream.failure is not None and operation.kind not in ("event", "free"):
            return
        try:
            operation.run()
        except SimulatedFault as fault:
            self.violate(f"{operation.what}: {fault}")
            stream.failure = Code.CUDA_ERROR_ILLEGAL_ADDRESS
        except Refused as refused:
            stream.failure = refused.code
        except Exception:
            self.violate(f"{operation.what} raised:\n{traceback.format_exc()}")
            stream.failure = Code.CUDA_ERROR_LAUNCH_FAILED

    def finish_event(self, event: Event) -> None:
        """Run an event's stream until the event is done."""
        while not event.done:
            stream = self.streams[event.stream]
            if not stream.queue:
                raise RuntimeError("an event is pending on an empty stream")
            self.step(stream)

    def settle(self) -> None:
        """Carry out everything everywhere."""
        for stream in list(self.streams.values()):
            while stream.queue:
                self.step(stream)

    def release_object(self, thing: UserObject) -> None:
        """Drop one reference to a user object; the last one calls its destructor."""
        thing.references -= 1
        if thing.references == 0:
            thing.destroy(thing.pointer)

    # The end

    def leaks(self) -> list[str]:
        """Say what the package made and did not give back, after carrying out all work."""
        self.settle()
        buffers = [buffer for buffer in self.memory.live() if buffer.pool is not None]
        found = [repr(buffer) for buffer in buffers if buffer.address not in self.refused_destroys]
        for handle, thing in self.live.items():
            if handle not in self.embedders and handle not in self.refused_destroys:
                found.append(f"{type(thing).__name__} {handle:#x}")
        found += [f"pinned host memory {address:#x}" for address in self.pinned if address not in self.refused_destroys]
        if self.retained:
            found.append(f"the primary context, retained {self.retained} times")
        return found


PRIMARY_CONTEXT = 0x5400_0000_0000

_H200 = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "L2_CACHE_SIZE": 62914560,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
}
