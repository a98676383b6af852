"""Writing a model and its external data so that either all of it appears, or nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError

from qmoe_ep.errors import QMoEError
from qmoe_ep.onnx.model import stored_tensors
from qmoe_ep.onnx.tensors import external_file, is_external

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from qmoe_ep.onnx.model import LoadedModel

__all__ = ["ModelWriter", "check_target", "keep_external"]

_ALIGNMENT = 4096  # tensors start at pages, so that a mapping of one needs no other
_CHUNK_BYTES = 1 << 24


def check_target(loaded: LoadedModel, source: Path, target: Path) -> None:
    """Refuse to write over the model that is read, or into a folder that isn't there."""
    data = target.with_name(target.name + ".data")
    sources = [source]
    sources += [external_file(t, source.parent) for t in stored_tensors(loaded.proto) if is_external(t)]
    for path in (target, data):
        if path.exists() and any(os.path.samefile(path, s) for s in set(sources)):
            raise QMoEError(f"{path} belongs to the model that is read; give another name for the result")
    if not target.absolute().parent.is_dir():
        raise QMoEError(f"{target}: its folder doesn't exist; make it first")


class ModelWriter:
    """Writes under temporary names in the target's folder; :meth:`commit` renames. A context manager.

    Parameters
    ----------
    target : the model file; external data goes to the file of the same name with ``.data`` added
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._data_target = target.with_name(target.name + ".data")
        self._data: IO[bytes] | None = None
        self._temporary: list[Path] = []
        self._places: dict[object, tuple[int, int]] = {}

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._data is not None:
            with contextlib.suppress(OSError):
                self._data.close()
        for path in self._temporary:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def store(self, tensor: onnx.TensorProto, array: NDArray[Any], key: object = None) -> None:
        """Append an array to the data file and make ``tensor`` point there; equal keys are stored once."""
        if key is None or key not in self._places:
            place = self._append(array)
            if key is not None:
                self._places[key] = place
        else:
            place = self._places[key]
        tensor.ClearField("external_data")
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for name, value in (("location", self._data_target.name), ("offset", place[0]), ("length", place[1])):
            tensor.external_data.add(key=name, value=str(value))

    def _append(self, array: NDArray[Any]) -> tuple[int, int]:
        try:
            if self._data is None:
                self._data = self._open()
            offset = -(-self._data.tell() // _ALIGNMENT) * _ALIGNMENT
            self._data.write(bytes(offset - self._data.tell()))
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for first in range(0, flat.size, _CHUNK_BYTES):
                self._data.write(flat[first : first + _CHUNK_BYTES].data)
        except OSError as error:
            raise QMoEError(f"{self._data_target}: can't be written: {error.strerror or error}") from error
        return offset, flat.size

    def _open(self) -> IO[bytes]:
        path = self._target.with_name(f".{self._target.name}.{secrets.token_hex(8)}.part")
        file = path.open("xb")
        self._temporary.append(path)
        return file

    def commit(self, proto: onnx.ModelProto) -> None:
        """Write the model and give both files their names.

        Raises
        ------
        QMoEError : the files can't be written; those that were there before are as they were.
        """
        try:
            data_name = self._temporary[0] if self._data is not None else None
            if self._data is not None:
                self._data.close()
            with self._open() as file:
                file.write(proto.SerializeToString())
            self._rename(data_name, self._temporary[-1])
        except (EncodeError, OSError, ValueError) as error:
            raise QMoEError(f"{self._target}: can't be written: {error}") from error

    def _rename(self, data: Path | None, model: Path) -> None:
        """Data first: a model never has its name before its data is in place."""
        backup: Path | None = None
        if data is not None and self._data_target.exists():
            backup = data.with_suffix(".old")
            os.replace(self._data_target, backup)
        try:
            if data is not None:
                os.replace(data, self._data_target)
            os.replace(model, self._target)
        except OSError:
            if data is not None:
                self._data_target.unlink(missing_ok=True)
            if backup is not None:
                os.replace(backup, self._data_target)
            raise
        if backup is not None:
            backup.unlink()


def keep_external(loaded: LoadedModel, tensor: onnx.TensorProto, writer: ModelWriter) -> None:
    """Move a tensor's external data to the target's data file as it is; what was shared stays shared."""
    stored = loaded.read_external(tensor)
    place = tuple(sorted((e.key, e.value) for e in tensor.external_data if e.key in ("location", "offset")))
    writer.store(tensor, stored, key=(place, stored.size))
