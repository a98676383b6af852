"""Compiled modules on disk.

One file per key, written under a temporary name and renamed, with a checksum: a reader sees a whole entry or
none. The files are code that the device runs, so a folder that others may write to is not used. Nothing here
ever fails a caller: what can't be read is compiled again, what can't be written is said once in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import platformdirs

__all__ = ["ModuleStore", "StoredModule"]

_log = logging.getLogger("qmoe_ep")

_MAGIC = b"qmoe_ep module 1\n"
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8
_STALE_SECONDS = 24 * 3600
"""A temporary file of this age belongs to a writer that was killed."""

_TEMPORARY_PREFIX, _TEMPORARY_SUFFIX = "qmoe_ep-", ".partial"


@dataclass(frozen=True, slots=True)
class StoredModule:
    """An entry: the binary and what the compiler said."""

    cubin: bytes
    log: str


class ModuleStore:
    """A folder of compiled modules.

    Parameters
    ----------
    folder : created with mode 0700 at the first save
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def default(cls) -> ModuleStore | None:
        """Return the store of the user's cache folder, or None when ``QMOE_EP_CACHE_DISABLE=1``.

        ``QMOE_EP_CACHE_DIR`` overrides the folder.
        """
        if os.environ.get("QMOE_EP_CACHE_DISABLE", "") == "1":
            return None
        chosen = os.environ.get("QMOE_EP_CACHE_DIR")
        return cls(Path(chosen) if chosen else Path(platformdirs.user_cache_dir("qmoe_ep")) / "modules")

    def path(self, key: str) -> Path:
        """Return where the entry of a key is or would be."""
        return self.folder / f"{key}.module"

    def load(self, key: str) -> StoredModule | None:
        """Return a whole, trusted entry, or None."""
        try:
            if not self._trusted():
                return None
            with open(self.path(key), "rb") as file:
                if not _only_ours(os.fstat(file.fileno())):
                    _warn_once(self.folder, f"{file.name} belongs to or is writable by others; it is not used")
                    return None
                return _decode(file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(self.folder, f"the module cache can't be read ({error}); modules are compiled again")
            return None

    def save(self, key: str, cubin: bytes, log: str) -> None:
        """Write an entry; other processes see all of it or nothing."""
        temporary = ""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._trusted():
                return
            self._remove_stale()
            # mkstemp opens with mode 0600 whatever the umask is.
            handle, temporary = tempfile.mkstemp(_TEMPORARY_SUFFIX, _TEMPORARY_PREFIX, self.folder)
            with open(handle, "wb") as file:
                file.write(_encode(cubin, log))
            os.replace(temporary, self.path(key))
        except OSError as error:
            _warn_once(self.folder, f"the module cache can't be written ({error}); each process compiles anew")
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _trusted(self) -> bool:
        if _only_ours(os.stat(self.folder)):
            return True
        _warn_once(
            self.folder,
            "the module cache folder belongs to or is writable by others and its files are code, so it is not used: "
            "chmod 700 it, or set QMOE_EP_CACHE_DIR",
        )
        return False

    def _remove_stale(self) -> None:
        for path in self.folder.glob(f"{_TEMPORARY_PREFIX}*{_TEMPORARY_SUFFIX}"):
            # Another process may be removing the same file.
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()


def _only_ours(status: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _encode(cubin: bytes, log: str) -> bytes:
    text = log.encode()
    body = len(text).to_bytes(_LENGTH_BYTES, "little") + text + cubin
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes) -> StoredModule | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    length = int.from_bytes(body[:_LENGTH_BYTES], "little")
    text, cubin = body[_LENGTH_BYTES : _LENGTH_BYTES + length], body[_LENGTH_BYTES + length :]
    return StoredModule(cubin, text.decode(errors="replace"))


_warned: set[str] = set()
_warned_lock = threading.Lock()


def _warn_once(folder: Path, message: str) -> None:
    with _warned_lock:
        if str(folder) in _warned:
            return
        _warned.add(str(folder))
    _log.warning("%s: %s", folder, message)
