"""The driver calls that the package makes, carried out on a :class:`~.machine.Machine`.

Types come from the real bindings; a function that is not here is an error, so that the package can't start to
use one unnoticed.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as real

from .calls import call
from .graphs import GraphCalls
from .kernels import KernelLaunch, find_kernel
from .machine import (
    PRIMARY_CONTEXT,
    Code,
    Event,
    Machine,
    Module,
    Operation,
    Pool,
    Refused,
    Stream,
)
from .memory import Buffer, SimulatedFault
from .nvrtc import parse_image

__all__ = ["SimulatedDriver"]


class SimulatedDriver(GraphCalls):
    """Stands in for ``cuda.bindings.driver``."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU") or name == "cuuint64_t":
            return getattr(real, name)
        raise AttributeError(f"the simulated driver has no {name}")

    def on_injected(self, name: str, arguments: tuple[Any, ...], destroys: bool) -> None:
        """Note what a call that was made to fail leaves behind."""
        if destroys:
            self.machine.refused_destroys.add(int(arguments[0]))
        if name == "cuMemFreeAsync":
            self.machine.refused_destroys.add(int(arguments[0]))
        if name == "cuStreamSynchronize":
            # The caller was told of a failure and may free the memory that a copy would still write to.
            queue = self.machine.stream(arguments[0]).queue
            kept = [operation for operation in queue if not operation.cancellable]
            queue.clear()
            queue.extend(kept)
        if name == "cuDevicePrimaryCtxRelease":
            self.machine.retained -= 1

    def check_context(self) -> None:
        """Refuse without a current context that is alive."""
        contexts = self.machine.thread.contexts
        if not contexts or not contexts[-1]:
            raise Refused(Code.CUDA_ERROR_INVALID_CONTEXT)
        if contexts[-1] == PRIMARY_CONTEXT and self.machine.retained == 0:
            raise Refused(Code.CUDA_ERROR_CONTEXT_IS_DESTROYED)

    # Device and context

    @call(context=False)
    def cuInit(self, flags: int) -> None:
        return None

    @call(context=False)
    def cuDriverGetVersion(self) -> Any:
        return 13000

    @call(context=False)
    def cuDeviceGetCount(self) -> Any:
        return 1

    @call(context=False)
    def cuDeviceGet(self, ordinal: int) -> Any:
        if ordinal != 0:
            raise Refused(Code.CUDA_ERROR_INVALID_DEVICE)
        return real.CUdevice(ordinal)

    @call(context=False)
    def cuDeviceGetName(self, length: int, device: Any) -> Any:
        return b"Simulated GPU".ljust(length, b"\0")

    @call(context=False)
    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> Any:
        return self.machine.attributes[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    @call(context=False)
    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        self.machine.retained += 1
        return real.CUcontext(PRIMARY_CONTEXT)

    @call(context=False)
    def cuDevicePrimaryCtxRelease(self, device: Any) -> None:
        if self.machine.retained == 0:
            self.machine.violate("the primary context was released more often than retained")
            raise Refused(Code.CUDA_ERROR_INVALID_CONTEXT)
        self.machine.retained -= 1

    @call(context=False)
    def cuCtxGetCurrent(self) -> Any:
        contexts = self.machine.thread.contexts
        return real.CUcontext(contexts[-1] if contexts else 0)

    @call(context=False)
    def cuCtxSetCurrent(self, context: Any) -> None:
        contexts = self.machine.thread.contexts
        if contexts:
            contexts.pop()
        contexts.append(int(context))

    @call(context=False)
    def cuCtxPushCurrent(self, context: Any) -> None:
        self.machine.thread.contexts.append(int(context))

    @call(context=False)
    def cuCtxPopCurrent(self) -> Any:
        contexts = self.machine.thread.contexts
        if not contexts:
            raise Refused(Code.CUDA_ERROR_INVALID_CONTEXT)
        return real.CUcontext(contexts.pop())

    # Streams and events

    @call()
    def cuStreamCreate(self, flags: Any) -> Any:
        handle = self.machine.add(None)
        stream = Stream(handle, self.machine.thread.contexts[-1])
        self.machine.live[handle] = self.machine.streams[handle] = stream
        return real.CUstream(handle)

    @call(destroys=True)
    def cuStreamDestroy(self, stream: Any) -> None:
        state = self.machine.stream(stream)
        if state.capture is not None:
            self.machine.violate("a capturing stream was destroyed")
        # The driver lets enqueued work end first.
        while state.queue:
            self.machine.step(state)
        del self.machine.streams[state.handle], self.machine.live[state.handle]

    @call()
    def cuStreamGetCtx(self, stream: Any) -> Any:
        return real.CUcontext(self.machine.stream(stream).context)

    @call()
    def cuStreamSynchronize(self, stream: Any) -> None:
        state = self.machine.stream(stream)
        if state.capture is not None:
            self.machine.refuse_in_capture(state.capture, "cuStreamSynchronize")
        self.machine.check_thread_capture("cuStreamSynchronize")
        self.machine.drain(state)

    @call()
    def cuEventCreate(self, flags: Any) -> Any:
        return real.CUevent(self.machine.add(Event()))

    @call(destroys=True)
    def cuEventDestroy(self, event: Any) -> None:
        self.machine.get(event, Event)
        del self.machine.live[int(event)]

    @call()
    def cuEventRecord(self, event: Any, stream: Any) -> None:
        self.machine.get(event, Event)
        state = self.machine.stream(stream)
        # A wait refers to the point recorded when it was made, so every record is an object of its own.
        point = Event(done=False, stream=state.handle, capture=state.capture)
        embedder = int(event) in self.machine.embedders
        self.machine.live[int(event)] = point
        if embedder:
            self.machine.embedders.add(int(event))
        if state.capture is None:
            self.machine.enqueue(state, Operation("event", "cuEventRecord", lambda: setattr(point, "done", True)))
        else:
            point.done = True

    @call()
    def cuEventElapsedTime(self, start: Any, end: Any) -> Any:
        """Nothing takes time here; a constant of one millisecond."""
        for event in (start, end):
            if not self.machine.get(event, Event).done:
                raise Refused(Code.CUDA_ERROR_NOT_READY)
        return 1.0

    @call()
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> None:
        point = self.machine.get(event, Event)
        state = self.machine.stream(stream)
        if point.capture is not None and point.capture.graph is not None:
            if state.capture is None:
                state.capture = point.capture
            elif state.capture is not point.capture:
                self.machine.refuse_in_capture(state.capture, "cuStreamWaitEvent on another capture")
            return
        if state.capture is not None:
            self.machine.refuse_in_capture(state.capture, "cuStreamWaitEvent on uncaptured work")
        self.machine.enqueue(state, Operation("event", "cuStreamWaitEvent", lambda: self.machine.finish_event(point)))

    @call(may_wait=True)
    def cuEventSynchronize(self, event: Any) -> None:
        self.machine.finish_event(self.machine.get(event, Event))

    # Memory

    @call()
    def cuMemPoolCreate(self, properties: Any) -> Any:
        return real.CUmemoryPool(self.machine.add(Pool({})))

    @call()
    def cuMemPoolSetAttribute(self, pool: Any, attribute: Any, value: Any) -> None:
        self.machine.get(pool, Pool).attributes[attribute] = int(value)

    @call()
    def cuMemPoolGetAttribute(self, pool: Any, attribute: Any) -> Any:
        state = self.machine.get(pool, Pool)
        used = sum(b.nbytes for b in self.machine.memory.live() if b.pool == int(pool) and not b.free_enqueued)
        if attribute.name.endswith("CURRENT"):
            return real.cuuint64_t(used)
        return real.cuuint64_t(state.attributes.get("peak", used))

    @call(may_wait=True)
    def cuMemPoolTrimTo(self, pool: Any, keep: int) -> None:
        self.machine.get(pool, Pool)

    @call(destroys=True)
    def cuMemPoolDestroy(self, pool: Any) -> None:
        self.machine.get(pool, Pool)
        refused = self.machine.refused_destroys
        live = self.machine.memory.live()
        if any(b.pool == int(pool) and not b.free_enqueued and b.address not in refused for b in live):
            self.machine.violate("a memory pool was destroyed before its allocations were freed")
        del self.machine.live[int(pool)]

    @call()
    def cuMemAllocFromPoolAsync(self, nbytes: int, pool: Any, stream: Any) -> Any:
        state, machine = self.machine.get(pool, Pool), self.machine
        target = machine.stream(stream)
        if target.capture is not None:
            machine.refuse_in_capture(target.capture, "cuMemAllocFromPoolAsync")
        if nbytes == 0:
            raise Refused(Code.CUDA_ERROR_INVALID_VALUE)
        used = sum(buffer.nbytes for buffer in machine.memory.live() if buffer.pool is not None)
        if used + nbytes > machine.memory_limit:
            raise Refused(Code.CUDA_ERROR_OUT_OF_MEMORY)
        state.attributes["peak"] = max(state.attributes.get("peak", 0), used + nbytes)
        return real.CUdeviceptr(machine.memory.allocate(nbytes, int(pool)).address)

    @call()
    def cuMemFreeAsync(self, pointer: Any, stream: Any) -> None:
        machine, address = self.machine, int(pointer)
        target = machine.stream(stream)
        if target.capture is not None:
            machine.refuse_in_capture(target.capture, "cuMemFreeAsync")
        buffer = machine.memory.find(address)
        if buffer is None or buffer.address != address or buffer.free_enqueued:
            machine.violate(f"free of {address:#x}, which is not an allocation or was freed before")
            raise Refused(Code.CUDA_ERROR_INVALID_VALUE)
        buffer.free_enqueued = True
        machine.enqueue(target, Operation("free", "cuMemFreeAsync", lambda: setattr(buffer, "data", None)))

    @call(may_wait=True)
    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        data = ctypes.create_string_buffer(b"\xff" * nbytes, nbytes)
        self.machine.pinned[ctypes.addressof(data)] = data
        return ctypes.addressof(data)

    @call(may_wait=True, destroys=True)
    def cuMemFreeHost(self, address: int) -> None:
        self.machine.pinned.pop(address)

    @call()
    def cuMemcpyHtoDAsync(self, destination: Any, source: int, nbytes: int, stream: Any) -> None:
        target, pinned = int(destination), self.machine.is_pinned(source)
        # Pageable memory is staged at once; pinned memory is read when the copy's turn comes.
        staged = b"" if pinned else ctypes.string_at(source, nbytes)

        def copy() -> None:
            if pinned and not self.machine.is_pinned(source):
                raise SimulatedFault(f"pinned host memory {source:#x} was freed before a copy read it")
            data = ctypes.string_at(source, nbytes) if pinned else staged
            self.machine.memory.view(target, nbytes, "uint8")[:] = memoryview(data)

        operation = Operation("copy", "cuMemcpyHtoDAsync", copy)
        self.machine.enqueue(self.machine.stream(stream), operation, capturable=False)

    @call()
    def cuMemcpyDtoHAsync(self, destination: int, source: Any, nbytes: int, stream: Any) -> None:
        address, pinned = int(source), self.machine.is_pinned(destination)

        def copy() -> None:
            if pinned and not self.machine.is_pinned(destination):
                raise SimulatedFault(f"pinned host memory {destination:#x} was freed before a copy filled it")
            ctypes.memmove(destination, self.machine.memory.view(address, nbytes, "uint8").tobytes(), nbytes)

        operation = Operation("copy", "cuMemcpyDtoHAsync", copy, cancellable=not pinned)
        self.machine.enqueue(self.machine.stream(stream), operation, capturable=False)

    @call()
    def cuMemcpyDtoDAsync(self, destination: Any, source: Any, nbytes: int, stream: Any) -> None:
        to, of = int(destination), int(source)

        def copy() -> None:
            memory = self.machine.memory
            memory.view(to, nbytes, "uint8")[:] = memory.view(of, nbytes, "uint8").copy()

        self.enqueue_device(stream, Operation("copy", "cuMemcpyDtoDAsync", copy, key=nbytes), (to, of))

    @call()
    def cuPointerGetAttribute(self, attribute: Any, pointer: Any) -> Any:
        if self.machine.memory.find(int(pointer)) is None:
            raise Refused(Code.CUDA_ERROR_INVALID_VALUE)
        return 0

    @call()
    def cuMemsetD8Async(self, destination: Any, value: int, nbytes: int, stream: Any) -> None:
        to = int(destination)

        def fill() -> None:
            self.machine.memory.view(to, nbytes, "uint8")[:] = value

        self.enqueue_device(stream, Operation("memset", "cuMemsetD8Async", fill, key=nbytes), (to,))

    def enqueue_device(self, stream: Any, operation: Operation, addresses: tuple[int, ...]) -> None:
        """Enqueue what touches device memory; under capture its addresses must be owned by the capture."""
        machine, state = self.machine, self.machine.stream(stream)
        for address in addresses:
            buffer = machine.memory.find(address)
            if buffer is None or buffer.data is None or buffer.free_enqueued:
                machine.violate(f"{operation.what} was given {address:#x}, where nothing is live: {buffer!r}")
            elif state.capture is not None and not self._owned(state, buffer):
                machine.violate(f"{operation.what} captures {address:#x}, which the capture does not own")
        machine.enqueue(state, operation)

    def _owned(self, stream: Stream, buffer: Buffer) -> bool:
        registered = self.machine.registered
        return buffer.pool is None or registered is None or registered(stream.handle, buffer.address)

    # Modules and launches

    @call(may_wait=True)
    def cuModuleLoadData(self, image: bytes) -> Any:
        content = parse_image(image)
        if content is None:
            raise Refused(Code.CUDA_ERROR_INVALID_IMAGE)
        return real.CUmodule(self.machine.add(Module(content["module"], content["source"])))

    @call(may_wait=True, destroys=True)
    def cuModuleUnload(self, module: Any) -> None:
        self.machine.get(module, Module)
        if any(operation.kind == "kernel" for state in self.machine.streams.values() for operation in state.queue):
            self.machine.violate("a module was unloaded while kernels were still enqueued")
        del self.machine.live[int(module)]

    @call()
    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        state = self.machine.get(module, Module)
        if name.decode() not in state.source:
            raise Refused(Code.CUDA_ERROR_NOT_FOUND)
        handle = self.machine.add(None)
        self.machine.embedders.add(handle)  # Functions go with their module.
        self.machine.live[handle] = _Function(int(module), state, name.decode())
        return real.CUfunction(handle)

    @call()
    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> None:
        carveout = attribute == real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        most = 100 if carveout else self.machine.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"]
        state = self.machine.get(function, _Function)
        if value > most:
            raise Refused(Code.CUDA_ERROR_INVALID_VALUE)
        if not carveout:
            state.dynamic_shared = value

    @call()
    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: Any) -> None:
        state = self.machine.get(function, _Function)
        if state.module_handle not in self.machine.live:
            self.machine.violate(f"{state.entry} was launched after its module was unloaded")
            raise Refused(Code.CUDA_ERROR_INVALID_HANDLE)
        kernel = find_kernel(state.entry)
        structure = kernel.argument_class(state.module.source, state.entry)
        address = ctypes.c_void_p.from_address(parameters).value
        raw = ctypes.string_at(address, ctypes.sizeof(structure))
        launch = KernelLaunch(
            memory=self.machine.memory,
            module=state.module.name,
            source=state.module.source,
            entry=state.entry,
            grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
            block=(config.blockDimX, config.blockDimY, config.blockDimZ),
            shared_bytes=config.sharedMemBytes,
            raw=raw,
            arguments=structure.from_buffer_copy(raw),
        )
        self._check_geometry(launch, state)
        words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw) - 7, 8)]
        addresses = tuple(word for word in words if self.machine.memory.looks_like_address(word))
        operation = Operation("kernel", f"kernel {state.entry}", lambda: kernel.function(launch), key=int(function))
        self.enqueue_device(config.hStream, operation, addresses)

    def _check_geometry(self, launch: KernelLaunch, function: _Function) -> None:
        x, y, z = launch.block
        threads = x * y * z
        grid_fits = launch.grid[0] < 2**31 and max(launch.grid[1:]) < 2**16
        if (
            not 1 <= threads <= self.machine.attributes["MAX_THREADS_PER_BLOCK"]
            or min(launch.grid) < 1
            or not grid_fits
        ):
            raise Refused(Code.CUDA_ERROR_INVALID_VALUE)
        if launch.shared_bytes > function.dynamic_shared:
            raise Refused(Code.CUDA_ERROR_INVALID_VALUE)


class _Function:
    """A kernel of a loaded module."""

    def __init__(self, module_handle: int, module: Module, entry: str) -> None:
        self.module_handle, self.module, self.entry = module_handle, module, entry
        self.dynamic_shared = 48 << 10
