"""What one call will launch, as plain data: modules, geometry, arguments and scratch.

A kernel family (one ``.py`` beside its device code) turns a call description and the device's
capabilities into a :class:`Plan`. Nothing here touches a driver: plans are made, compared and
tested without a GPU. The provider compiles the modules, reserves the scratch, fills in the
addresses and enqueues the steps in order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["AddressSource", "ModuleSource", "Plan", "Step"]

AddressSource: TypeAlias = int | str
"""Where a pointer argument comes from: an ``int`` is the index of an operand of the operator;
``"output"``, ``"valid_rows"`` and ``"telemetry"`` are what they say (the last two may be null);
any other string names a scratch slot of the plan."""


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """One translation unit, complete: what the module cache compiles and keys.

    Attributes
    ----------
    name : unique per binary; spells the family, its version and every compile-time choice
    source : CUDA C++ text; it may include files of the kernels folder and the half headers
    entries : the ``extern "C"`` kernels that it defines
    options : compiler options beside those the cache always gives (architecture, standard, includes)
    """

    name: str
    source: str
    entries: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One launch. The kernel takes a single by-value struct.

    Attributes
    ----------
    name : for errors, logs and profiles, such as ``"gate_up"``
    arguments : the struct with every scalar filled in; pointers are null until bound
    pointers : (field of the struct, where its address comes from)
    offsets : (field of the struct, bytes to add to its address unless that is null)
    dependent : launched with programmatic stream serialization; the kernel itself waits for its
        predecessor (``griddepcontrol.wait``) before it reads what that one wrote
    """

    name: str
    module: ModuleSource
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: ctypes.Structure
    pointers: tuple[tuple[str, AddressSource], ...]
    dependent: bool = False
    offsets: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a call does on the device.

    Attributes
    ----------
    variant : ``"portable"``, ``"decode"``, ``"grouped"`` or ``"prefill"``
    reason : one clause that says why this variant was taken, for logs and ``kernel.plan()``
    scratch : (slot, bytes), exact integers
    steps : launches in stream order
    """

    variant: Literal["portable", "decode", "grouped", "prefill"]
    reason: str
    scratch: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
