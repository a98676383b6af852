"""Translation units of the kernel families: text made from typed descriptions.

A family keeps its device code as templates in ``.cuh`` files and its argument structs twice: as a
``ctypes.Structure`` beside the plan and as a struct beside the kernel. :func:`translation_unit` joins the two. It
includes the device code, checks size and offset of every field against the ctypes layout at compile time, and
defines one ``extern "C"`` entry per instantiation. Module names are made by :func:`module_name` from every
compile-time choice, so that two layouts can't share a binary.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e8m0fnu

from qmoe_ep.kernels.plan import ModuleSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Entry", "device_type", "dtype_tag", "module_name", "translation_unit"]

_DTYPES = {
    np.dtype(np.float32): ("float", "f32"),
    np.dtype(np.float16): ("qmoe::Float16", "f16"),
    np.dtype(bfloat16): ("qmoe::BFloat16", "bf16"),
    np.dtype(float8_e8m0fnu): ("qmoe::E8M0", "e8m0"),
    np.dtype(float8_e4m3fn): ("qmoe::E4M3", "e4m3"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One ``extern "C"`` kernel of a module.

    Attributes
    ----------
    name : of the entry
    arguments : the host's layout of its only parameter
    device_struct : the C++ type of that parameter, such as ``"qmoe::portable::GateUpArguments"``
    body : the C++ function called with it, such as ``"qmoe::portable::gate_up_few<Layout>"``
    threads : largest block it is launched with
    min_blocks : blocks that must fit one multiprocessor; bounds the registers
    """

    name: str
    arguments: type[ctypes.Structure]
    device_struct: str
    body: str
    threads: int
    min_blocks: int = 1


def device_type(dtype: np.dtype[Any] | None) -> str:
    """The C++ type of a float operand; ``void`` for an absent one."""
    return "void" if dtype is None else _DTYPES[np.dtype(dtype)][0]


def dtype_tag(dtype: np.dtype[Any] | None) -> str:
    """The dtype in a module's name: ``"f32"``, ``"f16"``, ``"bf16"``, ``"none"`` for an absent operand."""
    return "none" if dtype is None else _DTYPES[np.dtype(dtype)][1]


def module_name(family: str, version: int, *choices: str | int) -> str:
    """Name of a module, made of letters, digits and underscores: ``portable3_gate_up_f16_b4g32…``.

    Raises
    ------
    ValueError : a choice that would not be readable back (empty, or with other characters).
    """
    parts = [f"{family}{version}", *map(str, choices)]
    if bad := [part for part in parts if not re.fullmatch(r"\w+", part, re.ASCII)]:
        raise ValueError(f"module name: expected letters, digits and underscores in every part, got {bad[0]!r}")
    return "_".join(parts)


def translation_unit(
    name: str,
    includes: Iterable[str],
    declarations: Sequence[str],
    entries: Sequence[Entry],
    options: Sequence[str] = (),
    structs: Sequence[tuple[type[ctypes.Structure], str]] = (),
) -> ModuleSource:
    """Generate a module.

    Parameters
    ----------
    name : from :func:`module_name`
    includes : files of the kernels folder, or ``<cuda_fp16.h>`` with its brackets
    declarations : C++ that fixes the compile-time layout, such as ``using Layout = …;``
    entries : kernels; structs used by several are checked once
    options : compiler options beside those the module cache always gives
    structs : (host layout, C++ type) of structs in memory that arguments point to, checked like the arguments
    """
    lines = [f"// {name}: generated; the device code is in the files it includes."]
    lines += [f"#include {file}" if file.startswith("<") else f'#include "{file}"' for file in includes]
    lines += declarations
    for struct, device_struct in dict.fromkeys(
        [*((entry.arguments, entry.device_struct) for entry in entries), *structs]
    ):
        lines += _layout_checks(struct, device_struct)
    for entry in entries:
        bounds = f"__launch_bounds__({entry.threads}, {entry.min_blocks})"
        parameter = f"const __grid_constant__ {entry.device_struct} arguments"
        lines.append(
            f'extern "C" __global__ void {bounds} {entry.name}({parameter}) {{\n    {entry.body}(arguments);\n}}'
        )
    return ModuleSource(name, "\n".join(lines) + "\n", tuple(entry.name for entry in entries), tuple(options))


def _layout_checks(struct: type[ctypes.Structure], device_struct: str) -> list[str]:
    """Assertions that the compiler sees the struct as ctypes does."""
    advice = f"{device_struct} and {struct.__name__} differ"
    checks = [f'static_assert(sizeof({device_struct}) == {ctypes.sizeof(struct)}, "{advice}");']
    for field in struct._fields_:
        name = field[0]
        place = getattr(struct, name)
        checks.append(
            # The form of offsetof that every release of the run-time compiler knows without a header.
            f"static_assert(__INTADDR__(&(({device_struct}*)0)->{name}) == {place.offset} && "
            f'sizeof({device_struct}::{name}) == {place.size}, "{advice}: {name}");'
        )
    return checks
