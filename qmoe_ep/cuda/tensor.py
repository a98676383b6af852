"""Device tensors: memory of the runtime with a shape and a dtype, and views of what other libraries own.

A :class:`DeviceTensor` speaks ``__cuda_array_interface__`` and DLPack, both ways. Everything that a kernel
is given becomes one, by :func:`as_device_tensor`.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.call import MAX_BYTES
from qmoe_ep.cuda.dlpack import DEVICE_CUDA, ImportedTensor, export_capsule, import_capsule
from qmoe_ep.driver import check, driver
from qmoe_ep.errors import CudaError, QMoEError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from qmoe_ep.memory import Allocation
    from qmoe_ep.runtime import Runtime
    from qmoe_ep.warm_calls import OperandSignature

__all__ = ["DeviceTensor", "as_device_tensor", "empty", "to_device"]

_LEGACY_STREAM, _PER_THREAD_STREAM, _UNORDERED = 1, 2, -1


class DeviceTensor:
    """Contiguous device memory seen as an array.

    Made by :meth:`CudaExecutionProvider.to_device`, ``empty`` and ``view``. Memory of the runtime's own goes, in
    stream order, when the last tensor, graph or DLPack consumer lets go of it; memory of others stays theirs.

    Attributes
    ----------
    pointer : device address
    shape : dimensions
    dtype : NumPy dtype (ml_dtypes for bfloat16)
    signature : (dtype name, shape), for call signatures
    allocation : the runtime's allocation, or None for memory of others
    read_only : whether its owner forbids writing
    """

    __slots__ = (
        "__weakref__",
        "_exported",
        "_owner",
        "allocation",
        "dtype",
        "pointer",
        "read_only",
        "runtime",
        "shape",
        "signature",
    )

    def __init__(
        self,
        runtime: Runtime,
        pointer: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        allocation: Allocation | None = None,
        owner: object = None,
        read_only: bool = False,
    ) -> None:
        self.runtime, self.pointer, self.shape, self.dtype = runtime, pointer, shape, dtype
        self.allocation, self._owner, self.read_only = allocation, owner, read_only
        if not dtype.isnative:
            raise QMoEError(f"dtype: expected the machine's byte order, got {dtype.str}; convert it")
        self.signature: OperandSignature = (dtype.name, shape)
        self._exported: list[bool] = []
        if allocation is not None:
            weakref.finalize(self, _release, runtime, allocation, self._exported).atexit = False

    @property
    def nbytes(self) -> int:
        """Size, bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def copy_from(self, array: Any) -> DeviceTensor:
        """Overwrite the contents, in stream order, by a host array or another device array of the same type.

        The host array may be changed as soon as this returns.

        Raises
        ------
        QMoEError : shape or dtype differ, or the tensor is read-only.
        CaptureError : a host array, while the stream is capturing.
        """
        if self.read_only:
            raise QMoEError("copy_from: the tensor is a read-only view; copy into one that is writable")
        source = array if isinstance(array, (np.ndarray, DeviceTensor)) else _adopt(self.runtime, array, "array")
        if tuple(source.shape) != self.shape or source.dtype != self.dtype:
            raise QMoEError(
                f"copy_from: expected {self.dtype} {list(self.shape)}, got {source.dtype} {list(source.shape)}"
            )
        if self.nbytes == 0:
            return self
        if isinstance(source, DeviceTensor):
            _order(self.runtime, source.runtime)
            self.runtime.dtod(self.pointer, source.pointer, self.nbytes, doing="copy a tensor")
            free_after_use(self.runtime, (source,))
        else:
            self.runtime.htod(self.pointer, np.ascontiguousarray(source), doing="copy an array to the device")
        return self

    def numpy(self) -> NDArray[Any]:
        """Copy to a new host array, after all work enqueued so far; waits.

        Raises
        ------
        CaptureError : the stream is capturing.
        """
        host = np.empty(self.shape, self.dtype)
        if self.nbytes:
            self.runtime.dtoh(host, self.pointer, doing="copy a tensor to the host")
        return host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.kind not in "iuf":
            raise AttributeError(f"the CUDA array interface has no type for {self.dtype}; use DLPack")
        self._exported.append(True)
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer if self.nbytes else 0, self.read_only),
            "version": 3,
            "strides": None,
            "stream": self.runtime.stream or _LEGACY_STREAM,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (DEVICE_CUDA, self.runtime.device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Lend the memory to a consumer whose work on `stream` is ordered after what is enqueued here."""
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError("DLPack: only zero-copy export to the tensor's own device is offered")
        if self.read_only:
            raise BufferError("DLPack: the tensor is a read-only view of another library's memory")
        self._exported.append(True)
        consumer = _LEGACY_STREAM if stream is None else stream
        if consumer != _UNORDERED:
            handle = 0 if consumer == _LEGACY_STREAM else consumer
            if handle != self.runtime.stream:
                self.runtime.order_stream_after(handle)
        versioned = max_version is not None and max_version[0] >= 1
        return export_capsule(self.pointer, self.shape, self.dtype, self.runtime.device, self, versioned=versioned)

    def __repr__(self) -> str:
        return f"DeviceTensor({self.dtype}, shape={list(self.shape)}, pointer={self.pointer:#x})"


def _release(runtime: Runtime, allocation: Allocation, exported: list[bool]) -> None:
    # A consumer may have used it on a stream of its own.
    runtime.release_later(allocation, drain=bool(exported))


def empty(runtime: Runtime, shape: tuple[int, ...] | int, dtype: Any) -> DeviceTensor:
    """Allocate a tensor whose contents are undefined.

    Raises
    ------
    QMoEError : a negative dimension or more than 2^63-1 bytes.
    CaptureError : the stream is capturing.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(int(d) for d in shape)
    kind = np.dtype(dtype)
    if any(d < 0 for d in dims) or math.prod(max(d, 1) for d in dims) * kind.itemsize > MAX_BYTES:
        raise QMoEError(f"shape {list(dims)} of {kind}: expected dimensions ≥ 0 and at most 2^63-1 bytes")
    allocation = runtime.allocate(max(math.prod(dims) * kind.itemsize, 1), "tensor")
    return DeviceTensor(runtime, allocation.pointer, dims, kind, allocation=allocation)


def to_device(runtime: Runtime, array: Any) -> DeviceTensor:
    """Copy a host array (or anything NumPy takes) to a new tensor."""
    host = np.asarray(array)
    if not host.dtype.isnative:
        host = host.astype(host.dtype.newbyteorder("="))
    return empty(runtime, host.shape, host.dtype).copy_from(host)


def as_device_tensor(runtime: Runtime, value: Any, name: str, *, writable: bool = False) -> DeviceTensor:
    """View an operand without copying it, ordered after its producer's stream.

    Parameters
    ----------
    value : a DeviceTensor, or anything with DLPack or ``__cuda_array_interface__``
    name : of the operand, for errors
    writable : refuse read-only memory

    Raises
    ------
    QMoEError : a host array, another device, a strided or read-only array, an unknown type.
    """
    if isinstance(value, DeviceTensor):
        tensor = value
        _order(runtime, value.runtime, name)
    else:
        tensor = _adopt(runtime, value, name)
    if writable and tensor.read_only:
        raise QMoEError(f"{name}: the array is read-only; give a writable one")
    return tensor


def free_after_use(runtime: Runtime, used: Iterable[object]) -> None:
    """Order the streams of other providers, whose tensors were used, behind what was enqueued on the runtime.

    Their tensors may be dropped at once, and are freed in the order of their own streams. Not to be called with the
    runtime's lock held: it takes those of others.
    """
    if runtime.capture is not None:
        return
    for value in used:
        if isinstance(value, DeviceTensor) and value.runtime is not runtime and value.runtime.capture is None:
            value.runtime.wait_for_stream(runtime.stream)


def _order(runtime: Runtime, producer: Runtime, name: str = "array") -> None:
    if producer is runtime:
        return
    if producer.device != runtime.device:
        raise QMoEError(f"{name}: is on device {producer.device}, expected device {runtime.device}; copy it there")
    if producer.stream != runtime.stream:
        runtime.wait_for_stream(producer.stream)


def _adopt(runtime: Runtime, value: Any, name: str) -> DeviceTensor:
    interface = getattr(value, "__cuda_array_interface__", None) if not hasattr(value, "__dlpack__") else None
    if interface is not None:
        return _from_interface(runtime, interface, value, name)
    if not hasattr(value, "__dlpack__") or isinstance(value, np.ndarray):
        raise QMoEError(
            f"{name}: expected a device array (DeviceTensor, DLPack or __cuda_array_interface__), "
            f"got {type(value).__name__}; copy it with provider.to_device(...)"
        )
    if (device := tuple(value.__dlpack_device__())) != (DEVICE_CUDA, runtime.device):
        raise QMoEError(
            f"{name}: expected memory of CUDA device {runtime.device}, got DLPack device {device}; copy it there"
        )
    # Under capture the caller has ordered the streams; an event of uncaptured work can't be waited for.
    stream = _UNORDERED if runtime.capture is not None else (runtime.stream or _LEGACY_STREAM)
    try:
        capsule = value.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:
        capsule = value.__dlpack__(stream=stream)
    return _from_import(runtime, import_capsule(capsule, name), name)


def _from_import(runtime: Runtime, imported: ImportedTensor, name: str) -> DeviceTensor:
    if not imported.contiguous:
        raise QMoEError(f"{name}: expected a contiguous array, got strides; make a contiguous copy")
    return DeviceTensor(
        runtime,
        imported.pointer,
        imported.shape,
        imported.dtype,
        owner=imported.lease,
        read_only=imported.read_only,
    )


def _from_interface(runtime: Runtime, interface: dict[str, Any], value: object, name: str) -> DeviceTensor:
    shape, dtype = tuple(int(d) for d in interface["shape"]), np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides is not None:
        step = dtype.itemsize
        for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
            if dim > 1 and stride != step:
                raise QMoEError(f"{name}: expected a contiguous array, got strides {tuple(strides)}; make a copy")
            step *= dim
    pointer, read_only = interface["data"]
    if math.prod(shape):
        _check_device(runtime, int(pointer), name)
    if (stream := interface.get("stream")) is not None and runtime.capture is None:
        handle = 0 if stream == _LEGACY_STREAM else int(stream)
        if handle == _PER_THREAD_STREAM:
            raise QMoEError(f"{name}: comes from the per-thread default stream; give it a stream of its own")
        if handle != runtime.stream:
            runtime.wait_for_stream(handle)
    return DeviceTensor(runtime, int(pointer), shape, dtype, owner=value, read_only=bool(read_only))


def _check_device(runtime: Runtime, pointer: int, name: str) -> None:
    binding = driver()
    attribute = binding.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    try:
        with runtime.current():
            device = check(
                binding.cuPointerGetAttribute(attribute, pointer), "cuPointerGetAttribute", f"look at operand {name}"
            )
    except CudaError as error:
        if error.name != "CUDA_ERROR_INVALID_VALUE":
            raise
        raise QMoEError(f"{name}: {pointer:#x} is not device memory; copy it with provider.to_device(...)") from error
    if int(device) != runtime.device:
        raise QMoEError(f"{name}: is on device {int(device)}, expected device {runtime.device}; copy it there")
