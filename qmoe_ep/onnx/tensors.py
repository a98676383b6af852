"""Stored tensors of ONNX files as arrays, with every size checked before memory is asked for.

Files come from anywhere: external data may not leave the model's folder, and what a tensor says of
its size has to agree with the bytes that are there.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qmoe_ep.errors import QMoEError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["external_bytes", "external_file", "is_external", "numpy_dtype", "read_tensor", "tensor_shape"]

_ML_DTYPES = {
    "BFLOAT16": "bfloat16",
    "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2": "float8_e5m2",
    "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
    "FLOAT8E8M0": "float8_e8m0fnu",
}
_SUB_BYTE_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
_MAX_BYTES = 2**63 - 1


def numpy_dtype(data_type: int) -> np.dtype[Any] | None:
    """The dtype of an ONNX element type, ``None`` for one that isn't a number of whole bytes."""
    dtype: np.dtype[Any]
    try:
        name = str(TensorProto.DataType.Name(data_type))
        if name in _ML_DTYPES:
            dtype = np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
            return dtype
        if name in _SUB_BYTE_BITS:
            return None
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(data_type))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return None if dtype.hasobject or dtype.itemsize == 0 else dtype


def is_external(tensor: TensorProto) -> bool:
    """Whether a tensor's bytes are in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def tensor_shape(tensor: TensorProto) -> tuple[int, ...]:
    """The shape of a tensor.

    Raises
    ------
    QMoEError : a dimension is negative, or their product overflows even where another one is zero.
    """
    shape = tuple(int(d) for d in tensor.dims)
    if any(d < 0 for d in shape):
        raise QMoEError(f"tensor {tensor.name!r}: negative dimension in shape {list(shape)}; export the model anew")
    if math.prod(max(d, 1) for d in shape) * 16 > _MAX_BYTES:
        raise QMoEError(f"tensor {tensor.name!r}: shape {list(shape)} is larger than any memory; export the model anew")
    return shape


def read_tensor(tensor: TensorProto, folder: Path) -> NDArray[Any]:
    """A tensor as a read-only array; external data is mapped, not read.

    Parameters
    ----------
    tensor : an initializer or the value of an attribute
    folder : of the model file, which external data may not leave

    Returns
    -------
    an array of the tensor's shape and dtype; a typed view of a ``np.memmap`` for external data that isn't empty

    Raises
    ------
    QMoEError : the bytes are missing, elsewhere, or not as many as the tensor says.
    """
    shape, dtype = tensor_shape(tensor), numpy_dtype(tensor.data_type)
    if is_external(tensor):
        stored = external_bytes(tensor, folder)
        if dtype is not None:
            return stored.view(dtype).reshape(shape)
        plain = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=shape, raw_data=stored.tobytes())
        return _to_array(plain, shape)
    if dtype is None:
        return _to_array(tensor, shape)
    if tensor.HasField("raw_data"):
        array = _from_bytes(tensor, shape, dtype)
    elif tensor.int32_data and dtype.itemsize <= 2 and dtype.kind not in "iub":
        # Half types keep their bits in the low end of 32-bit integers.
        bits = np.asarray(tensor.int32_data, np.int32).astype(f"u{dtype.itemsize}")
        _check_count(tensor, shape, bits.size)
        array = bits.view(dtype).reshape(shape)
    else:
        array = _to_array(tensor, shape)
    array.flags.writeable = False
    return array


def _from_bytes(tensor: TensorProto, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    raw = tensor.raw_data
    expected = math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise QMoEError(
            f"tensor {tensor.name!r}: {dtype} {list(shape)} takes {expected} bytes, but the file holds {len(raw)}; "
            "export the model anew"
        )
    return np.frombuffer(raw, dtype).reshape(shape)


def _check_count(tensor: TensorProto, shape: tuple[int, ...], count: int) -> None:
    if count != math.prod(shape):
        raise QMoEError(
            f"tensor {tensor.name!r}: shape {list(shape)} takes {math.prod(shape)} elements, "
            f"but the file holds {count}; export the model anew"
        )


def _to_array(tensor: TensorProto, shape: tuple[int, ...]) -> NDArray[Any]:
    try:
        array = np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:
        raise QMoEError(
            f"tensor {tensor.name!r}: can't be read as {list(shape)} of element type {tensor.data_type} "
            f"({type(error).__name__}: {error}); export the model anew"
        ) from error
    _check_count(tensor, shape, array.size)
    return array


# --- external data ---------------------------------------------------------------------------------


def external_bytes(tensor: TensorProto, folder: Path) -> NDArray[np.uint8]:
    """The bytes of a tensor of another file, read-only and mapped unless there are none.

    Raises
    ------
    QMoEError : as :func:`read_tensor`.
    """
    return _map(tensor, folder, _stored_size(tensor))


def _stored_size(tensor: TensorProto) -> int:
    shape, dtype = tensor_shape(tensor), numpy_dtype(tensor.data_type)
    if dtype is not None:
        return math.prod(shape) * dtype.itemsize
    try:
        bits = _SUB_BYTE_BITS[TensorProto.DataType.Name(tensor.data_type)]
    except (KeyError, ValueError):
        raise QMoEError(
            f"tensor {tensor.name!r}: element type {tensor.data_type} can't be stored as external data; "
            "export the model anew"
        ) from None
    return (math.prod(shape) * bits + 7) // 8


def external_file(tensor: TensorProto, folder: Path) -> Path:
    """The file of a tensor's external data, resolved, which lies in the model's folder.

    Raises
    ------
    QMoEError : the location is absolute, has a ``..``, leads out through a link, or isn't a file.
    """
    location = _entries(tensor).get("location", "")
    where = f"tensor {tensor.name!r}: external data {location!r}"
    parts = (PurePosixPath(location), PureWindowsPath(location))
    if not location or any(p.is_absolute() or p.drive or p.root or ".." in p.parts for p in parts):
        raise QMoEError(f"{where} must be a file below the model's folder, given by a relative path without '..'")
    try:
        home = folder.resolve(strict=True)
        path = (home / location).resolve(strict=True)
        regular = stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise QMoEError(f"{where} is missing in {folder}; put the file next to the model") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise QMoEError(f"{where} can't be used: {error}") from None
    if not path.is_relative_to(home):
        raise QMoEError(f"{where} is a link out of the model's folder {folder}; put a copy of the file there")
    if not regular:
        raise QMoEError(f"{where} is not a regular file")
    return path


def _entries(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _number(tensor: TensorProto, key: str, default: int) -> int:
    text = _entries(tensor).get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise QMoEError(f"tensor {tensor.name!r}: {key} of its external data must be a number of bytes, got {text!r}")
    return int(text)


def _map(tensor: TensorProto, folder: Path, size: int) -> NDArray[np.uint8]:
    """The bytes of an external tensor, mapped read-only."""
    path = external_file(tensor, folder)
    offset, length = _number(tensor, "offset", 0), _number(tensor, "length", size)
    if length != size:
        raise QMoEError(
            f"tensor {tensor.name!r} in {path}: shape {list(tensor.dims)} takes {size} bytes, "
            f"but its external data says length {length}; export the model anew"
        )
    try:
        with path.open("rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if offset + size > actual:
                raise QMoEError(
                    f"tensor {tensor.name!r} in {path}: expected at least {offset + size} bytes "
                    f"(offset {offset} + {size}), the file has {actual}; it is truncated, copy it anew"
                )
            if size == 0:
                return np.empty(0, np.uint8)
            return np.memmap(file, np.uint8, "r", offset, (size,))
    except OSError as error:
        raise QMoEError(f"tensor {tensor.name!r} in {path}: the file can't be mapped: {error}") from error
