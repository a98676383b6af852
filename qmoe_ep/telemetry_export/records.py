"""Files of records: one JSON object a line, appended whole, rotated, and read while they grow."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from qmoe_ep.errors import QMoEError
from qmoe_ep.telemetry_export.schema import NamedSnapshot, record_to_snapshot, snapshot_to_record

__all__ = ["RecordFollower", "RecordWriter", "read_records"]

_TAIL_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class RecordWriter:
    """Appends records to a file, which it has to itself; a context manager that closes.

    A record is written by one system call, so that a process that dies leaves at most one line cut short. The next
    writer removes such a line; readers wait for its end.

    Parameters
    ----------
    path : of the file; made if it is missing, in a folder that exists
    max_bytes : size at which the file is renamed to ``path.1`` (that to ``path.2``, and so on) and a new one begun
    keep : how many renamed files are kept

    Raises
    ------
    QMoEError : the file can't be opened, or another writer has it.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 64 << 20, keep: int = 4) -> None:
        if max_bytes < 1 or keep < 0:
            raise QMoEError(f"max_bytes, keep: expected at least 1 byte and 0 files, got {max_bytes} and {keep}")
        self.path, self._max_bytes, self._keep = Path(path), max_bytes, keep
        self._descriptor = self._open()

    def _open(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _cut_partial_line(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except BlockingIOError as error:
            raise QMoEError(f"{self.path}: another exporter writes to it; give each a file of its own") from error
        except OSError as error:
            raise QMoEError(f"{self.path}: can't be written: {error.strerror or error}") from error
        return descriptor

    def write(self, records: Iterable[NamedSnapshot]) -> None:
        """Append records, rotating before the one that would make the file too large.

        Raises
        ------
        QMoEError : the disk is full, say; what was written completely stays.
        """
        for record in records:
            line = _encode(snapshot_to_record(record)).encode() + b"\n"
            try:
                size = os.fstat(self._descriptor).st_size
                if size and size + len(line) > self._max_bytes:
                    self._rotate()
                    size = 0
                if os.write(self._descriptor, line) != len(line):
                    os.ftruncate(self._descriptor, size)
                    raise QMoEError(f"{self.path}: the disk is full; a record was left out")
            except OSError as error:
                raise QMoEError(f"{self.path}: can't be written: {error.strerror or error}") from error

    def _rotate(self) -> None:
        places = [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, self._keep + 1))]
        for source, target in reversed(list(itertools.pairwise(places))):
            with contextlib.suppress(FileNotFoundError):
                os.replace(source, target)
        if not self._keep:
            self.path.unlink(missing_ok=True)
        descriptor = self._open()
        os.close(self._descriptor)
        self._descriptor = descriptor

    def close(self) -> None:
        """Let go of the file. Repeating it does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_partial_line(descriptor: int) -> None:
    """Remove what follows the last newline."""
    end = size = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)


def read_records(path: str | os.PathLike[str]) -> Iterator[NamedSnapshot]:
    """Yield the records of a file, in order; a last line without its end is left out.

    Raises
    ------
    QMoEError : the file can't be read, or a line of it is no record; the message says which.
    """
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _parse(line, f"{path}, line {number}")
    except OSError as error:
        raise QMoEError(f"{path}: can't be read: {error.strerror or error}") from error


class RecordFollower:
    """Reads a file as it grows, over its rotation; a context manager that closes.

    A reader so slow that the file is rotated twice between two polls misses what was between.

    Parameters
    ----------
    path : of the file, which may not be there yet
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = -1
        self._offset = self._number = 0
        self._lines: deque[tuple[bytes, str]] = deque()

    def poll(self) -> list[NamedSnapshot]:
        """Return the records that have been completed since the last poll; none of a file that isn't there.

        Raises
        ------
        QMoEError : the file can't be read, or the next line is no record; the next poll goes on behind it.
        """
        try:
            self._collect()
        except OSError as error:
            raise QMoEError(f"{self.path}: can't be read: {error.strerror or error}") from error
        records: list[NamedSnapshot] = []
        while self._lines:
            try:
                records.append(_parse(*self._lines[0]))
            except QMoEError:
                if records:
                    return records
                self._lines.popleft()
                raise
            self._lines.popleft()
        return records

    def _collect(self) -> None:
        """Take complete lines. The offset is never inside one, so a writer may remove what was cut short."""
        while self._descriptor >= 0 or self._open():
            self._read()
            if self._is_current():
                return
            # Renamed: what was written between the read and the rename.
            self._read()
            self.close()

    def _open(self) -> bool:
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        self._offset = self._number = 0
        return True

    def _read(self) -> None:
        rest, offset = b"", self._offset
        while chunk := os.pread(self._descriptor, _CHUNK_BYTES, offset):
            offset += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._number += 1
                self._lines.append((line, f"{self.path}, line {self._number}"))
        self._offset = offset - len(rest)

    def _is_current(self) -> bool:
        """Whether the path still names the file that is open."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True  # between the two steps of a rotation, or gone for good: nothing else to read

    def close(self) -> None:
        """Let go of the file; the next poll begins anew."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RecordFollower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parse(line: bytes, where: str) -> NamedSnapshot:
    try:
        return record_to_snapshot(json.loads(line))
    except QMoEError as error:
        raise QMoEError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise QMoEError(f"{where}: not a record: {error}") from error
