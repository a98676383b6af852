"""Runs the steps of a plan on the CPU, from the very device code, compiled with the host's C++ compiler.

Every operand and scratch slot lies at the end of its pages with an inaccessible page behind, so that a read or write
beyond it stops the process; call :func:`run_plan` in a child process where that is to be survived.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qmoe_ep.call import CallDescription
from qmoe_ep.kernels.plan import AddressSource, ModuleSource, Plan

COMPILER = shutil.which("g++")
_PAGE = mmap.PAGESIZE
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off", "-w")
_TRAPS = ("-fsanitize=alignment,shift,signed-integer-overflow", "-fsanitize-undefined-trap-on-error")
_HALF_CONVERSIONS = (
    (r'asm\("cvt\.f32\.f16 [^;]*;".*?\);', "result = half_to_float(value.bits);"),
    (r'asm\("cvt\.rn\.f16\.f32 [^;]*;".*?\);', "result.bits = float_to_half(value);"),
)

_libc = ctypes.CDLL(None, use_errno=True)


class GuardedBuffer:
    """Bytes that end where an inaccessible page begins.

    Attributes
    ----------
    address : of the first byte
    array : uint8 view
    """

    def __init__(self, nbytes: int, fill: int = 0xFF) -> None:
        pages = max(1, -(-nbytes // _PAGE))
        self._memory = mmap.mmap(-1, (pages + 1) * _PAGE)
        whole = np.frombuffer(self._memory, np.uint8)
        base = whole.ctypes.data
        offset = pages * _PAGE - nbytes
        self.address = base + offset
        self.array = whole[offset : offset + nbytes]
        self.array[:] = fill
        if _libc.mprotect(ctypes.c_void_p(base + pages * _PAGE), ctypes.c_size_t(_PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")


def alignment_of(address: int) -> int:
    """The largest power of two up to 256 that divides an address."""
    return min(address & -address, 256)


def run_plan(
    plan: Plan, addresses: Mapping[AddressSource, int], *, backwards: bool = False, arch: int = 900
) -> dict[str, GuardedBuffer]:
    """Carry out the steps; scratch is poisoned with 0xFF bytes and returned by slot.

    Parameters
    ----------
    addresses : of operands, ``"output"`` and, where wanted, ``"valid_rows"`` and ``"telemetry"``
    backwards : run threads and blocks from the last to the first
    arch : what ``__CUDA_ARCH__`` says
    """
    # Rounded up, because the scratch pool aligns every slot.
    scratch = {slot: GuardedBuffer(-(-nbytes // 256) * 256) for slot, nbytes in plan.scratch}
    known: dict[AddressSource, int] = {**addresses, **{slot: buffer.address for slot, buffer in scratch.items()}}
    for step in plan.steps:
        arguments = type(step.arguments).from_buffer_copy(step.arguments)
        for field, source in step.pointers:
            setattr(arguments, field, known.get(source))
        for field, offset in step.offsets:
            if address := getattr(arguments, field):
                setattr(arguments, field, address + offset)
        launch = getattr(_library(step.module, arch), f"launch_{step.entry}")
        launch(ctypes.byref(arguments), step.grid[0], step.block[0], backwards)
    return scratch


def run_call(
    call: CallDescription,
    operands: Sequence[np.ndarray[Any, Any] | None],
    make_plan: Any,
    *,
    valid_rows: int | None = None,
    backwards: bool = False,
    arch: int = 900,
) -> tuple[np.ndarray[Any, Any], dict[str, GuardedBuffer]]:
    """Plan with ``make_plan(alignment)`` and execute on guarded copies; the output is poisoned with NaN.

    Returns
    -------
    output in the shape and dtype of operand 0, and the scratch
    """
    buffers: dict[AddressSource, GuardedBuffer] = {}
    for index, operand in enumerate(operands):
        if operand is not None:
            buffers[index] = GuardedBuffer(operand.nbytes)
            buffers[index].array[:] = np.ascontiguousarray(operand).reshape(-1).view(np.uint8)
    output = np.full(call.input_shape, np.nan, call.dtype)
    buffers["output"] = GuardedBuffer(output.nbytes)
    buffers["output"].array[:] = output.reshape(-1).view(np.uint8)
    if valid_rows is not None:
        buffers["valid_rows"] = GuardedBuffer(4)
        buffers["valid_rows"].array.view(np.int32)[0] = valid_rows
    alignment = {source: alignment_of(buffer.address) for source, buffer in buffers.items()}
    addresses = {source: buffer.address for source, buffer in buffers.items()}
    scratch = run_plan(make_plan(alignment), addresses, backwards=backwards, arch=arch)
    return buffers["output"].array.view(call.dtype).reshape(call.input_shape).copy(), scratch


@functools.lru_cache(maxsize=512)
def _library(module: ModuleSource, arch: int) -> ctypes.CDLL:
    folder = _prepared_sources(arch)
    launches = "".join(
        f'extern "C" void launch_{entry}(const void* arguments, unsigned grid, unsigned block, bool backwards) {{\n'
        f"    emulation::launch([](const void* a) {{ ::{entry}(*static_cast<const {struct}*>(a)); }},\n"
        "                      arguments, grid, block, backwards);\n}\n"
        for entry, struct in re.findall(r"(\w+)\(const __grid_constant__ (\S+) arguments\)", module.source)
    )
    source = re.sub(r"__INTADDR__\(&\(\((\S+)\*\)0\)->(\w+)\)", r"__builtin_offsetof(\1, \2)", module.source)
    text = f'#include "cuda_on_host.h"\n{source}\n{launches}'
    stem = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    library = stem.with_suffix(".so")
    if not library.exists():
        stem.with_suffix(".cpp").write_text(text)
        command = [COMPILER or "g++", *_FLAGS, *_TRAPS, f"-D__CUDA_ARCH__={arch}", f"-I{folder}"]
        subprocess.run([*command, "-o", str(library), str(stem.with_suffix(".cpp"))], check=True)
    return ctypes.CDLL(str(library))


@functools.lru_cache(maxsize=4)
def _prepared_sources(arch: int) -> Path:
    """Copy the device code into a temporary folder, with its inline assembly replaced by host functions."""
    folder = Path(tempfile.mkdtemp(prefix=f"qmoe_ep-emulated-{arch}-"))
    kernels = Path(__file__).parents[2] / "qmoe_ep" / "kernels"
    for path in kernels.glob("*.cuh"):
        text = path.read_text()
        for pattern, replacement in _HALF_CONVERSIONS:
            text = re.sub(pattern, replacement, text, flags=re.DOTALL)
        (folder / path.name).write_text(text)
    # Also files that stand in for a file of the kernels that is all instructions.
    for path in Path(__file__).parent.glob("*.*h"):
        shutil.copy(path, folder)
    return folder
