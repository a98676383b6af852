"""Includes of device code: the package's own files in memory, the half-precision headers in a folder."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
import re
from dataclasses import dataclass
from pathlib import Path

from qmoe_ep.errors import NvrtcError
from qmoe_ep.kernels.plan import ModuleSource

__all__ = ["IncludeSet", "find_cuda_headers", "resolve_includes"]

_OWN = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ANY = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_SYSTEM = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>]+)>", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class IncludeSet:
    """Everything that a module includes, directly or not.

    Attributes
    ----------
    texts : name as included -> text, of the package's own files
    system : names in angle brackets, sorted
    system_folder : where those are, or None when there are none or they were not found
    system_digest : hash of their contents and of what they include, or empty
    missing : names in angle brackets that were not found
    """

    texts: dict[str, str]
    system: tuple[str, ...]
    system_folder: str | None
    system_digest: str
    missing: tuple[str, ...]


def resolve_includes(module: ModuleSource) -> IncludeSet:
    """Collect a module's includes.

    Raises
    ------
    NvrtcError : a quoted name that the package doesn't have.
    """
    texts: dict[str, str] = {}
    system: set[str] = set()
    pending = [module.source]
    while pending:
        text = pending.pop()
        system.update(_SYSTEM.findall(text))
        for name in _OWN.findall(text):
            if name not in texts:
                texts[name] = _read_own(name, module.name)
                pending.append(texts[name])
    names = tuple(sorted(system))
    folder = find_cuda_headers() if names else None
    if folder is None:
        return IncludeSet(texts, names, None, "", names)
    missing = tuple(name for name in names if not (folder / name).is_file())
    return IncludeSet(texts, names, None if missing else str(folder), _system_digest(folder, names), missing)


def _read_own(name: str, module: str) -> str:
    path = importlib.resources.files("qmoe_ep.kernels")
    parts = name.split("/")
    if ".." in parts or not (path := path.joinpath(*parts)).is_file():
        raise NvrtcError(f"module {module} includes {name!r}, which is not among the package's kernels")
    return path.read_text(encoding="utf-8")


def find_cuda_headers() -> Path | None:
    """Return the folder that has ``cuda_fp16.h`` and ``cuda_bf16.h``, or None.

    The wheel nvidia-cuda-runtime comes first, then a toolkit by ``CUDA_HOME``, ``CUDA_PATH`` or /usr/local/cuda.
    """
    candidates = [_wheel_headers()]
    candidates += [os.path.join(home, "include") for home in map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")) if home]
    candidates.append("/usr/local/cuda/include")
    for candidate in candidates:
        if candidate and all((Path(candidate) / name).is_file() for name in ("cuda_fp16.h", "cuda_bf16.h")):
            return Path(candidate)
    return None


def _wheel_headers() -> str | None:
    try:
        from cuda import pathfinder
    except ImportError:
        return None
    found = pathfinder.find_nvidia_header_directory("cudart")
    return str(found) if found else None


@functools.lru_cache(maxsize=64)
def _system_digest(folder: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    seen: set[str] = set()
    pending = sorted(names, reverse=True)
    while pending:
        name = pending.pop()
        path = folder / name
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        data = path.read_bytes()
        digest.update(f"{name} {len(data)} ".encode() + data)
        pending += sorted({included.decode(errors="replace") for included in _ANY.findall(data)}, reverse=True)
    return digest.hexdigest()
