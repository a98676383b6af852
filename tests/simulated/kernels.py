"""Which NumPy function carries out which kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .memory import Memory

__all__ = ["KernelLaunch", "find_kernel", "simulated_kernel"]

ArgumentClass = type[ctypes.Structure] | Callable[[str, str], type[ctypes.Structure]]


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """Everything one launch of a simulated kernel may look at.

    Attributes
    ----------
    memory : device memory; ``memory.view(address, shape, dtype)`` is a writable view
    module, source, entry : what was compiled, and which kernel of it
    grid, block : geometry
    shared_bytes : dynamic shared memory
    raw : the by-value argument struct, bytes
    arguments : the same as the registered ctypes structure
    """

    memory: Memory
    module: str
    source: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    raw: bytes
    arguments: Any


@dataclass(frozen=True, slots=True)
class RegisteredKernel:
    """A NumPy function and the class of the struct that its kernel takes."""

    prefix: str
    structure: ArgumentClass
    function: Callable[[KernelLaunch], None]

    def argument_class(self, source: str, entry: str) -> type[ctypes.Structure]:
        """Return the struct's class for one entry."""
        if isinstance(self.structure, type):
            return self.structure
        return self.structure(source, entry)


_registry: dict[str, RegisteredKernel] = {}


def simulated_kernel(
    prefix: str, arguments: ArgumentClass
) -> Callable[[Callable[[KernelLaunch], None]], Callable[[KernelLaunch], None]]:
    """Register the function that carries out every entry whose name starts with `prefix`.

    The longest matching prefix wins. Writes go through the views that ``launch.memory`` gives.

    Parameters
    ----------
    prefix : of entry names
    arguments : ctypes class of the kernel's by-value struct, or a function of (source, entry) that returns it
    """

    def register(function: Callable[[KernelLaunch], None]) -> Callable[[KernelLaunch], None]:
        _registry[prefix] = RegisteredKernel(prefix, arguments, function)
        return function

    return register


def find_kernel(entry: str) -> RegisteredKernel:
    """Return what carries out an entry.

    Raises
    ------
    LookupError : nothing is registered for it.
    """
    matches = [prefix for prefix in _registry if entry.startswith(prefix)]
    if not matches:
        raise LookupError(f"no simulated kernel is registered for entry {entry!r}: use @simulated_kernel")
    return _registry[max(matches, key=len)]
