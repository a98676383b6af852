"""Capture, graphs and user objects of the simulated driver."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from cuda.bindings import driver as real

from .calls import call
from .machine import CaptureState, Code, Graph, Machine, Operation, Refused, Stream, UserObject

__all__ = ["GraphCalls"]


class GraphCalls:
    """The part of the driver that deals with graphs."""

    machine: Machine

    @call(context=False)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before, self.machine.thread.mode = self.machine.thread.mode, mode
        return before

    @call()
    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> None:
        state = self.machine.stream(stream)
        if state.handle == 0 or state.capture is not None:
            raise Refused(Code.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        graph = Graph()
        handle = self.machine.add(graph)
        state.capture = CaptureState(handle, handle, graph, mode, threading.get_ident(), state.handle)

    @call()
    def cuStreamIsCapturing(self, stream: Any) -> Any:
        return self._status(self.machine.stream(stream))

    def _status(self, stream: Stream) -> Any:
        statuses = real.CUstreamCaptureStatus
        if stream.capture is None:
            return statuses.CU_STREAM_CAPTURE_STATUS_NONE
        if stream.capture.invalid:
            return statuses.CU_STREAM_CAPTURE_STATUS_INVALIDATED
        return statuses.CU_STREAM_CAPTURE_STATUS_ACTIVE

    @call()
    def cuStreamGetCaptureInfo(self, stream: Any) -> Any:
        state = self.machine.stream(stream)
        capture = state.capture
        if capture is None or capture.invalid:
            return (self._status(state), real.cuuint64_t(0), real.CUgraph(0), [], [], 0)
        return (self._status(state), real.cuuint64_t(capture.identity), real.CUgraph(capture.handle), [], [], 0)

    @call()
    def cuStreamEndCapture(self, stream: Any) -> Any:
        state = self.machine.stream(stream)
        capture = state.capture
        if capture is None:
            raise Refused(Code.CUDA_ERROR_ILLEGAL_STATE)
        modes = real.CUstreamCaptureMode
        if capture.mode != modes.CU_STREAM_CAPTURE_MODE_RELAXED and capture.thread != threading.get_ident():
            raise Refused(Code.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        for other in self.machine.streams.values():
            if other.capture is capture:
                other.capture = None
        if capture.invalid:
            self._drop_graph(capture.handle)
            raise Refused(Code.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return real.CUgraph(capture.handle)

    @call(destroys=True)
    def cuGraphDestroy(self, graph: Any) -> None:
        self.machine.get(graph, Graph)
        self._drop_graph(int(graph))

    def _drop_graph(self, handle: int) -> None:
        graph = self.machine.live.pop(handle)
        for thing in graph.objects:
            self.machine.release_object(thing)

    @call()
    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        source = self.machine.get(graph, Graph)
        for thing in source.objects:
            thing.references += 1
        return real.CUgraphExec(self.machine.add(Graph(list(source.nodes), list(source.objects))))

    @call()
    def cuGraphExecUpdate(self, executable: Any, graph: Any) -> Any:
        old, new = self.machine.get(executable, Graph), self.machine.get(graph, Graph)
        if [(node.kind, node.key) for node in old.nodes] != [(node.kind, node.key) for node in new.nodes]:
            raise Refused(Code.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
        old.nodes = list(new.nodes)
        return real.CUgraphExecUpdateResultInfo()

    @call()
    def cuGraphLaunch(self, executable: Any, stream: Any) -> None:
        nodes = tuple(self.machine.get(executable, Graph).nodes)
        state = self.machine.stream(stream)
        for node in nodes:
            operation = Operation(node.kind, f"{node.what} of a graph", node.run, node.key)
            self.machine.enqueue(state, operation, capturable=False)

    @call(destroys=True)
    def cuGraphExecDestroy(self, executable: Any) -> None:
        self.machine.get(executable, Graph)
        self._drop_graph(int(executable))

    @call(context=False)
    def cuUserObjectCreate(self, pointer: int, destroy: Any, references: int, flags: Any) -> Any:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(destroy))
        return real.CUuserObject(self.machine.add(_Shared(UserObject(int(pointer), function, references))))

    @call(context=False, destroys=True)
    def cuUserObjectRelease(self, thing: Any, count: int) -> None:
        for _ in range(count):
            self.machine.release_object(self.machine.get(thing, _Shared).user_object)
        del self.machine.live[int(thing)]

    @call(context=False)
    def cuGraphRetainUserObject(self, graph: Any, thing: Any, count: int, flags: int) -> None:
        state = self.machine.get(graph, Graph)
        state.objects.append(self.machine.get(thing, _Shared).user_object)
        if flags != real.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE:
            state.objects[-1].references += count
        else:
            del self.machine.live[int(thing)]


class _Shared:
    """The caller's own reference to a user object."""

    def __init__(self, user_object: UserObject) -> None:
        self.user_object = user_object
