"""Expert tensors in mapped files: where their bytes are, and reading them without ever trusting the file.

A tensor that is a slice of a ``np.memmap`` is read through a descriptor of the same file, not through the mapping: a
file that shrinks gives a short read, which is an error, where touching the mapping would end the process.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.errors import QMoEError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MappedFile", "MappedTensor", "find_mapping", "open_tensor", "read_whole"]

_SAMPLE_BYTES = 64
_READ_BYTES = 1 << 30
_AHEAD_BYTES = 128 << 10
"""What is asked for at once: Linux cuts a request down to the device's read-ahead, which is this by default."""
_serials = itertools.count(1)
_mappings: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
_files: weakref.WeakValueDictionary[tuple[Any, ...], MappedFile] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Mapping:
    """Where an array lies in a mapped file.

    Attributes
    ----------
    path : of the file when it was mapped
    offset : of the array's first element, in bytes
    serial : of the mapping; two of the same file have different ones
    """

    path: str
    offset: int
    serial: int


def find_mapping(array: NDArray[Any]) -> Mapping | None:
    """Where a view of a ``np.memmap`` lies in its file; None for every other array."""
    node: Any = array
    while isinstance(node, np.ndarray) and not isinstance(node.base, mmap.mmap):
        node = node.base
    if not isinstance(node, np.memmap) or not isinstance(node.base, mmap.mmap) or node.filename is None:
        return None
    distance = array.__array_interface__["data"][0] - node.__array_interface__["data"][0]
    with _lock:
        serial = _mappings.setdefault(node.base, next(_serials))
    return Mapping(os.fspath(node.filename), node.offset + distance, serial)


class MappedFile:
    """An open file whose size and identity are those of the moment it was opened; closed with its last user.

    Attributes
    ----------
    path, size : of the file, in bytes
    """

    def __init__(self, path: str, descriptor: int, status: os.stat_result) -> None:
        self.path = path
        self.size = status.st_size
        self._status = status
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def check(self, tensor: str) -> None:
        """Raise QMoEError if the file was changed, truncated or replaced since it was opened; removing it is fine."""
        now, then = os.fstat(self._descriptor), self._status
        where = f"{tensor} in {self.path}"
        if now.st_size != then.st_size:
            raise QMoEError(
                f"{where}: the file had {then.st_size} bytes when it was opened and has {now.st_size} now; "
                "load the model again from a complete file"
            )
        if now.st_mtime_ns != then.st_mtime_ns:
            raise QMoEError(
                f"{where}: the file ({now.st_size} bytes) was written to after it was opened; load it again"
            )
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return
        if (there.st_dev, there.st_ino) != (then.st_dev, then.st_ino):
            raise QMoEError(
                f"{where}: another file of {there.st_size} bytes took the place of the one of {then.st_size} bytes "
                "that was opened; load the model again"
            )

    def read(self, tensor: str, offset: int, target: NDArray[np.uint8]) -> None:
        """Fill ``target``, contiguous uint8, with the bytes at ``offset``.

        Raises
        ------
        QMoEError
            If the file ends before or can't be read; naming file, tensor and sizes.
        """
        view, done = target.data.cast("B"), 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done : done + _READ_BYTES]], offset + done)
            except OSError as error:
                raise QMoEError(
                    f"{tensor} in {self.path}: reading {len(view)} bytes at {offset} failed: {error.strerror}"
                ) from error
            if count == 0:
                raise QMoEError(
                    f"{tensor} in {self.path}: expected {len(view)} bytes at {offset}, the file ends after {done} "
                    f"of them ({os.fstat(self._descriptor).st_size} bytes, {self.size} when it was opened); "
                    "load the model again from a complete file"
                )
            done += count

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Ask the system to bring a range into memory, without waiting for it."""
        if not hasattr(os, "posix_fadvise"):
            return
        for first in range(offset, offset + nbytes, _AHEAD_BYTES):
            count = min(_AHEAD_BYTES, offset + nbytes - first)
            os.posix_fadvise(self._descriptor, first, count, os.POSIX_FADV_WILLNEED)


def _open(path: str) -> MappedFile | None:
    """The file at ``path``, shared by all who use it while it is the same; None if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise QMoEError(f"{path}: the file can't be opened: {error.strerror}; check its permissions") from error
    status = os.fstat(descriptor)
    identity = (path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    with _lock:
        if (known := _files.get(identity)) is not None:
            os.close(descriptor)
            return known
        _files[identity] = opened = MappedFile(path, descriptor, status)
        return opened


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor [E, ...] in a file whose experts are contiguous each.

    Attributes
    ----------
    name : for messages
    offset, stride : of the first expert, and from one to the next, in bytes
    shape, dtype : of one expert
    identity : what tells its bytes from all others
    """

    name: str
    file: MappedFile
    offset: int
    stride: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    identity: tuple[int, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, expert: int, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """One expert, of ``shape`` and ``dtype``, in the first bytes of ``buffer``."""
        target = buffer[: self.expert_bytes]
        self.file.read(self.name, self.offset + expert * self.stride, target)
        return target.view(self.dtype).reshape(self.shape)

    def read_ahead(self, expert: int) -> None:
        """Ask for one expert's bytes."""
        self.file.read_ahead(self.offset + expert * self.stride, self.expert_bytes)


def open_tensor(name: str, array: NDArray[Any]) -> MappedTensor | str:
    """Open the file behind a mapped tensor [E, ...], or say why its experts can't be paged.

    Raises
    ------
    QMoEError
        If the file is shorter than the tensor, or isn't the one that was mapped.
    """
    if not hasattr(os, "preadv"):
        return "this system can't read at an offset"
    mapping = find_mapping(array)
    if mapping is None:
        return f"{name} isn't external data in a mapped file"
    if array.shape[0] == 0 or not array[0].flags.c_contiguous or array.strides[0] < array[0].nbytes:
        return f"the experts of {name} aren't contiguous one after the other"
    file = _open(mapping.path)
    if file is None:
        return f"{mapping.path} was removed"
    stride = array.strides[0]
    extent = (array.shape[0] - 1) * stride + array[0].nbytes
    _check_range(name, file, mapping.offset, extent)
    tensor = MappedTensor(
        name,
        file,
        mapping.offset,
        stride,
        array.shape[1:],
        array.dtype,
        (mapping.serial, mapping.offset, stride),
    )
    _check_sample(tensor, array)
    return tensor


def _check_range(name: str, file: MappedFile, offset: int, nbytes: int) -> None:
    if offset + nbytes > file.size:
        raise QMoEError(
            f"{name} in {file.path}: expected at least {offset + nbytes} bytes (offset {offset} + {nbytes}), "
            f"the file has {file.size}; it is truncated, copy it anew"
        )


def _check_sample(tensor: MappedTensor, array: NDArray[Any]) -> None:
    """The file at the path may be another one than what was mapped; a few bytes tell."""
    for expert in {0, array.shape[0] - 1}:
        seen = array[expert].reshape(-1).view(np.uint8)[:_SAMPLE_BYTES]
        read = np.empty(seen.size, np.uint8)
        tensor.file.read(tensor.name, tensor.offset + expert * tensor.stride, read)
        if not np.array_equal(seen, read):
            raise QMoEError(
                f"{tensor.name} in {tensor.file.path}: the file ({tensor.file.size} bytes) isn't the one that was "
                "mapped, or was written to since; load the model again"
            )


def read_whole(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """A resident copy of a mapped tensor; any other array as it is.

    Raises
    ------
    QMoEError
        If the file is shorter than the tensor.
    """
    mapping = find_mapping(array)
    if mapping is None:
        return array
    file = _open(mapping.path)
    if file is not None and array.flags.c_contiguous and hasattr(os, "preadv"):
        _check_range(name, file, mapping.offset, array.nbytes)
        whole = np.empty(array.nbytes, np.uint8)
        file.read(name, mapping.offset, whole)
        return whole.view(array.dtype).reshape(array.shape)
    if file is not None:
        low, high = np.lib.array_utils.byte_bounds(array)
        start = mapping.offset + low - array.__array_interface__["data"][0]
        _check_range(name, file, start, high - low)
    return np.array(array)
