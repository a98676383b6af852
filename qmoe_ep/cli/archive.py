"""Arrays in ``.npz`` files that may come from anywhere: nothing is unpickled, and sizes are checked before memory is
asked for.

NumPy has no bfloat16 of its own, so such arrays are stored as their uint16 bits under the same name.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qmoe_ep.cli.files import whole_file
from qmoe_ep.errors import QMoEError

__all__ = ["ArrayArchive", "StoredArray", "write_archive"]

_LARGEST_DEFLATE_RATIO = 1032
_READ_BYTES = 1 << 24
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OverflowError, NotImplementedError, RuntimeError)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """What an archive says about one array: checked against the bytes that are there.

    Attributes
    ----------
    member : file name inside the archive
    offset : where its data begin, bytes
    """

    member: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int


class ArrayArchive:
    """The arrays of an ``.npz`` file, described at once and read one by one.

    Raises
    ------
    QMoEError : it isn't such a file, or an array in it is pickled, truncated or larger than its bytes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise QMoEError(f"{self.path}: not a file, so no .npz archive; give the path of one")
        with self._open() as archive:
            self.arrays = self._describe(archive)

    def read(self, name: str, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
        """Read an array.

        Parameters
        ----------
        dtype : what it must be; bfloat16 is read from uint16 bits. Anything, if None

        Raises
        ------
        QMoEError : another type, or damaged data.
        """
        stored = self.arrays[name]
        wanted = np.dtype(np.uint16) if dtype == _BFLOAT16 else dtype
        if wanted is not None and stored.dtype != wanted:
            words = "uint16 (the bits of bfloat16)" if dtype == _BFLOAT16 else str(wanted)
            raise QMoEError(f"{self.path}: array {name!r}: expected {words}, got {stored.dtype}; convert it")
        with self._open() as archive, archive.open(stored.member) as member:
            data = self._read_data(member, stored, name)
        return data.view(_BFLOAT16) if dtype == _BFLOAT16 else data

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        except (*_DAMAGE, ValueError, OSError) as error:
            # An OSError without a name is a seek to where the damaged archive said.
            if isinstance(error, QMoEError) or (isinstance(error, OSError) and error.filename):
                raise
            raise QMoEError(
                f"{self.path}: expected an .npz archive ({error or 'truncated'}); make it with numpy.savez"
            ) from error

    def _describe(self, archive: zipfile.ZipFile) -> dict[str, StoredArray]:
        arrays: dict[str, StoredArray] = {}
        archive_bytes = self.path.stat().st_size
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                raise QMoEError(f"{self.path}: {info.filename!r} is not an array (.npy); make it with numpy.savez")
            if name in arrays:
                raise QMoEError(f"{self.path}: array {name!r} is there twice; keep one")
            ratio = 1 if info.compress_type == zipfile.ZIP_STORED else _LARGEST_DEFLATE_RATIO
            if info.compress_size > archive_bytes or info.file_size > info.compress_size * ratio:
                raise QMoEError(f"{self.path}: array {name!r} claims more bytes than the archive has; it is damaged")
            with archive.open(info) as member:
                arrays[name] = self._describe_array(member, info, name)
        return arrays

    def _describe_array(self, member: Any, info: zipfile.ZipInfo, name: str) -> StoredArray:
        where = f"{self.path}: array {name!r}"
        try:
            version = np.lib.format.read_magic(member)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran_order, dtype = read_header(member)
        except (ValueError, KeyError, TypeError, SyntaxError) as error:
            raise QMoEError(f"{where}: its header can't be read; make it with numpy.savez") from error
        if dtype.hasobject:
            raise QMoEError(f"{where} is pickled (dtype object), which is never read; save it as numbers")
        if dtype.kind not in "?biufc":
            raise QMoEError(f"{where}: expected numbers, got {dtype}; store bfloat16 as array.view(numpy.uint16)")
        if any(size < 0 for size in shape):
            raise QMoEError(f"{where}: negative dimension in shape {list(shape)}")
        offset = member.tell()
        expected, present = math.prod(shape) * dtype.itemsize, info.file_size - offset
        if expected != present:
            raise QMoEError(f"{where}: shape {list(shape)} of {dtype} needs {expected} bytes, the file has {present}")
        return StoredArray(info.filename, dtype, tuple(shape), fortran_order, offset)

    def _read_data(self, member: Any, stored: StoredArray, name: str) -> NDArray[Any]:
        member.seek(stored.offset)
        try:
            data = np.empty(stored.shape[::-1] if stored.fortran_order else stored.shape, stored.dtype)
        except ValueError as error:
            # A zero among dimensions whose product no memory could hold.
            raise QMoEError(f"{self.path}: array {name!r}: shape {list(stored.shape)} is too large") from error
        target = data.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(target):
            count = member.readinto(target[done : done + _READ_BYTES])
            if not count:
                raise QMoEError(f"{self.path}: array {name!r} is truncated; copy or make the file again")
            done += count
        if member.read(1):
            raise QMoEError(f"{self.path}: array {name!r} has more data than its shape says; it is damaged")
        native = data.astype(stored.dtype.newbyteorder("="), copy=False)
        return native.T if stored.fortran_order else native


def write_archive(path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays as an ``.npz`` file, completely or not at all; types that NumPy lacks go as their bits."""
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _storable(array), allow_pickle=False)


def _storable(array: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(array)
    if array.dtype.isbuiltin == 1:
        return array
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
