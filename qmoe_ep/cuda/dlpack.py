"""DLPack in both directions, by the C structures of its version 1 (and the older, unversioned capsule).

Only what an array of plain numbers on a CUDA device needs. The layout of the structures follows
``dlpack.h`` of the DLPack project.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from qmoe_ep.errors import QMoEError

__all__ = ["DEVICE_CUDA", "ImportedTensor", "export_capsule", "import_capsule"]

DEVICE_CUDA = 2
_READ_ONLY = 1
_CODES = {"i": 0, "u": 1, "f": 2}
_BFLOAT_CODE, _FLOAT8_E4M3FN_CODE, _FLOAT8_E8M0_CODE = 4, 10, 14
_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (_CODES[kind], bits): np.dtype(f"{kind}{bits // 8}")
    for kind, widths in (("i", (8, 16, 32, 64)), ("u", (8, 16, 32, 64)), ("f", (16, 32, 64)))
    for bits in widths
}
_DTYPES[_BFLOAT_CODE, 16] = np.dtype(ml_dtypes.bfloat16)
_DTYPES[_FLOAT8_E4M3FN_CODE, 8] = np.dtype(ml_dtypes.float8_e4m3fn)
_DTYPES[_FLOAT8_E8M0_CODE, 8] = np.dtype(ml_dtypes.float8_e8m0fnu)
_TYPE_CODES = {dtype: key for key, dtype in _DTYPES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_python = ctypes.PyDLL(None)
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_python.PyCapsule_IsValid.restype = ctypes.c_int
_python.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_python.PyCapsule_SetName.argtypes = (ctypes.c_void_p, ctypes.c_char_p)

_CAPSULES: tuple[tuple[bytes, bytes, type[_Managed | _ManagedVersioned]], ...] = (
    (b"dltensor_versioned", b"used_dltensor_versioned", _ManagedVersioned),
    (b"dltensor", b"used_dltensor", _Managed),
)
_exported: dict[int, tuple[Any, ...]] = {}
"""What each exported structure needs alive, by its address, until the consumer calls its deleter."""


def _delete(address: int) -> None:
    _exported.pop(address, None)


def _destroy_capsule(capsule: int) -> None:
    # A consumer renames the capsule and takes over; one that still has its name was never consumed.
    for name, _, _ in _CAPSULES:
        if _python.PyCapsule_IsValid(capsule, name):
            _delete(_python.PyCapsule_GetPointer(capsule, name))


_DELETE, _DESTROY_CAPSULE = _Deleter(_delete), _Destructor(_destroy_capsule)


def export_capsule(
    pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object, *, versioned: bool
) -> object:
    """A capsule over contiguous device memory; ``owner`` stays alive until the consumer lets go."""
    if dtype not in _TYPE_CODES:
        raise BufferError(f"DLPack has no type for {dtype}")
    dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    steps = (ctypes.c_int64 * max(len(shape), 1))(*_contiguous_strides(shape))
    code, bits = _TYPE_CODES[dtype]
    tensor = _Tensor(pointer, DEVICE_CUDA, device, len(shape), code, bits, 1, dims, steps, 0)
    deleter = ctypes.cast(_DELETE, ctypes.c_void_p).value
    managed = _ManagedVersioned(1, 0, None, deleter, 0, tensor) if versioned else _Managed(tensor, None, deleter)
    address = ctypes.addressof(managed)
    _exported[address] = (managed, dims, steps, owner)
    capsule: object = _python.PyCapsule_New(address, _CAPSULES[0 if versioned else 1][0], _DESTROY_CAPSULE)
    return capsule


@dataclass(frozen=True, slots=True)
class ImportedTensor:
    """Memory that another library lends; ``lease`` gives it back when dropped."""

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device_type: int
    device: int
    contiguous: bool
    read_only: bool
    lease: object


class _Lease:
    """Calls the producer's deleter once, when the last reference goes."""

    def __init__(self, managed: _Managed | _ManagedVersioned) -> None:
        self._managed = managed

    def __del__(self) -> None:
        if self._managed.deleter:
            _Deleter(self._managed.deleter)(ctypes.addressof(self._managed))


def import_capsule(capsule: object, name: str) -> ImportedTensor:
    """Take over a capsule that ``__dlpack__`` returned; ``name`` is the operand, for errors."""
    for fresh, used, structure in _CAPSULES:
        if _python.PyCapsule_IsValid(id(capsule), fresh):
            managed = structure.from_address(_python.PyCapsule_GetPointer(id(capsule), fresh))
            _python.PyCapsule_SetName(id(capsule), used)
            return _describe(managed, name)
    raise QMoEError(f"{name}: expected a fresh DLPack capsule from __dlpack__, got {capsule!r}")


def _describe(managed: _Managed | _ManagedVersioned, name: str) -> ImportedTensor:
    lease = _Lease(managed)
    tensor = managed.tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise QMoEError(
            f"{name}: the DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) is not one that "
            "the operator takes; convert the array"
        )
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else _contiguous_strides(shape)
    expected = _contiguous_strides(shape)
    contiguous = 0 in shape or all(s == e for s, e, d in zip(strides, expected, shape, strict=True) if d > 1)
    flags = managed.flags if isinstance(managed, _ManagedVersioned) else 0
    return ImportedTensor(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        dtype=dtype,
        device_type=tensor.device_type,
        device=tensor.device_id,
        contiguous=contiguous,
        read_only=bool(flags & _READ_ONLY),
        lease=lease,
    )


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)
