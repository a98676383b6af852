"""Source to loaded module: compiled once per process, kept on disk, loaded once per runtime.

:func:`compile_module` needs no GPU: it resolves includes, builds the key, looks into the folder of
:mod:`qmoe_ep.module_store`, and asks NVRTC for a CUBIN of the very architecture. (A CUBIN made by a newer
compiler loads on an older driver of the same major version, which PTX would not.) :class:`ModuleCache` loads
what it returns into a runtime's context.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from qmoe_ep.driver import check, driver, nvrtc
from qmoe_ep.errors import NvrtcError
from qmoe_ep.includes import IncludeSet, resolve_includes
from qmoe_ep.kernels.plan import ModuleSource
from qmoe_ep.launch import Function
from qmoe_ep.module_store import ModuleStore
from qmoe_ep.runtime import Runtime

__all__ = ["CompiledModule", "KernelReport", "ModuleCache", "clear_compiled", "compile_module", "compile_modules"]

CACHE_VERSION = 1
"""Part of every key: raise it when options or the stored form change their meaning."""

OPTIONS = ("--std=c++20", "--device-as-default-execution-space", "--ptxas-options=-v", "--generate-line-info")


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What the assembler says about one kernel.

    Attributes
    ----------
    entry : the kernel
    registers : per thread
    spill_store_bytes, spill_load_bytes, stack_bytes : local memory per thread, bytes
    shared_bytes : static shared memory per block, bytes
    """

    entry: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """A module's binary for one architecture.

    Attributes
    ----------
    name : the module's
    arch : such as ``"sm_90a"``
    cubin : the binary
    log : what the compiler said, warnings and the assembler's resource usage
    origin : ``"compiled"`` or ``"disk"``
    """

    name: str
    arch: str
    cubin: bytes
    log: str
    origin: str

    def report(self) -> tuple[KernelReport, ...]:
        """Return the resource usage of each kernel, sorted by entry."""
        return _parse_report(self.log)


def compile_module(module: ModuleSource, arch: str) -> CompiledModule:
    """Return the binary of a module, from this process, from the disk or from the compiler.

    Threads that ask for the same module at one moment share one compilation; a failure reaches all of them
    and is forgotten.

    Parameters
    ----------
    module : its includes come from the package's kernels and from the half-precision headers
    arch : ``"sm_75"``, ``"sm_90a"``, …

    Raises
    ------
    NvrtcError : it doesn't compile (with log and options), an include or the compiler is missing.
    """
    key = (module, arch)
    with _lock:
        future = _compiled.get(key)
        mine = future is None
        if future is None:
            future = _compiled[key] = Future()
    if mine:
        try:
            future.set_result(_compile(module, arch))
        except BaseException as error:
            with _lock:
                _compiled.pop(key, None)
            future.set_exception(error)
    return future.result()


def compile_modules(modules: Iterable[ModuleSource], arch: str, workers: int = 8) -> tuple[CompiledModule, ...]:
    """Compile several modules at the same time; the compiler runs without the interpreter's lock.

    Raises
    ------
    NvrtcError : the first failure, after all have ended.
    """
    modules = tuple(modules)
    if len(modules) < 2:
        return tuple(compile_module(module, arch) for module in modules)
    with ThreadPoolExecutor(min(workers, len(modules)), thread_name_prefix="qmoe_ep-nvrtc") as pool:
        return tuple(pool.map(lambda module: compile_module(module, arch), modules))


def clear_compiled() -> None:
    """Forget what this process has compiled or read; the disk keeps its entries."""
    with _lock:
        _compiled.clear()


_lock = threading.Lock()
_compiled: dict[tuple[ModuleSource, str], Future[CompiledModule]] = {}


def _compile(module: ModuleSource, arch: str) -> CompiledModule:
    includes = resolve_includes(module)
    options = (f"--gpu-architecture={arch}", *OPTIONS, *module.options)
    key = _key(module, includes, options)
    store = ModuleStore.default()
    if store is not None and (stored := store.load(key)) is not None:
        return CompiledModule(module.name, arch, stored.cubin, stored.log, "disk")
    cubin, log = _run_nvrtc(module, includes, options)
    if store is not None:
        store.save(key, cubin, log)
    return CompiledModule(module.name, arch, cubin, log, "compiled")


def _key(module: ModuleSource, includes: IncludeSet, options: tuple[str, ...]) -> str:
    major, minor = check(nvrtc().nvrtcVersion(), "nvrtcVersion", "read the compiler's version")
    digest = hashlib.sha256()
    fields = [f"cache {CACHE_VERSION}", f"nvrtc {major}.{minor}", module.name, module.source, *module.entries, *options]
    for name, text in sorted(includes.texts.items()):
        fields += [name, text]
    fields.append(includes.system_digest)
    for field in fields:
        data = field.encode()
        # With its length in front, no field can pass for the end of another.
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _run_nvrtc(module: ModuleSource, includes: IncludeSet, options: tuple[str, ...]) -> tuple[bytes, str]:
    compiler = nvrtc()
    doing = f"compile module {module.name}"
    if includes.system_folder is not None:
        options = (*options, f"--include-path={includes.system_folder}")
    elif includes.missing:
        raise NvrtcError(
            f"module {module.name} includes {', '.join(includes.missing)}, which was not found: "
            "pip install nvidia-cuda-runtime, or install the CUDA toolkit and set CUDA_HOME"
        )
    names = [name.encode() for name in includes.texts]
    texts = [text.encode() for text in includes.texts.values()]
    result = compiler.nvrtcCreateProgram(module.source.encode(), f"{module.name}.cu".encode(), len(names), texts, names)
    program = check(result, "nvrtcCreateProgram", doing)
    try:
        result = compiler.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _program_log(program, doing)
        if result[0]:
            name = getattr(result[0], "name", str(result[0]))
            raise NvrtcError(f"nvrtcCompileProgram failed with {name} while trying to {doing}", log, options)
        size = check(compiler.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize", doing)
        cubin = bytearray(size)
        check(compiler.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN", doing)
        return bytes(cubin), log
    finally:
        check(compiler.nvrtcDestroyProgram(program), "nvrtcDestroyProgram", doing)


def _program_log(program: Any, doing: str) -> str:
    size = check(nvrtc().nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize", doing)
    log = bytearray(size)
    check(nvrtc().nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog", doing)
    return bytes(log).rstrip(b"\0 \n").decode(errors="replace")


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_LOCAL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def _parse_report(log: str) -> tuple[KernelReport, ...]:
    reports = []
    # One section per kernel: its name first, then its local memory, then its registers and shared memory.
    for section in re.split(r"(?=ptxas info\s*: Compiling entry function)", log):
        entry, registers = _ENTRY.search(section), _REGISTERS.search(section)
        if entry is None or registers is None:
            continue
        local, shared = _LOCAL.search(section), _SHARED.search(section)
        stack, stores, loads = (int(value) for value in local.groups()) if local else (0, 0, 0)
        reports.append(KernelReport(entry[1], int(registers[1]), stores, loads, stack, int(shared[1]) if shared else 0))
    return tuple(sorted(reports, key=lambda report: report.entry))


class ModuleCache:
    """The loaded modules of one runtime, each loaded once. Thread safe.

    They are unloaded when the runtime closes, after its drain: captured graphs may launch them until then.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._functions: dict[tuple[ModuleSource, str], Function] = {}
        self._loaded: dict[ModuleSource, Any] = {}
        self.arch = device_arch(runtime.capabilities().compute_capability)

    def function(self, module: ModuleSource, entry: str) -> Function:
        """Return a loaded kernel, compiling and loading its module where that is still to be done.

        Raises
        ------
        NvrtcError : the module doesn't compile.
        CaptureError : the module isn't loaded and the stream is capturing.
        CudaError : the driver refused the binary, or it has no such entry.
        """
        function = self._functions.get((module, entry))
        if function is not None:
            return function
        handle = self._module(module)
        doing = f"find kernel {entry} in module {module.name}"
        with self._runtime.lock, self._runtime.current():
            found = check(driver().cuModuleGetFunction(handle, entry.encode()), "cuModuleGetFunction", doing)
            return self._functions.setdefault((module, entry), Function(found, module.name, entry))

    def preload(self, modules: Iterable[ModuleSource]) -> None:
        """Compile modules at the same time, then load them."""
        missing = tuple(module for module in dict.fromkeys(modules) if module not in self._loaded)
        compile_modules(missing, self.arch)
        for module in missing:
            self._module(module)

    def _module(self, module: ModuleSource) -> Any:
        handle = self._loaded.get(module)
        if handle is not None:
            return handle
        doing = f"load module {module.name}"
        with self._runtime.lock, self._runtime.current():
            self._runtime.refuse_while_capturing(doing)
        compiled = compile_module(module, self.arch)
        with self._runtime.lock, self._runtime.current():
            if module not in self._loaded:
                self._runtime.refuse_while_capturing(doing)
                handle = check(driver().cuModuleLoadData(compiled.cubin), "cuModuleLoadData", doing)
                self._loaded[module] = handle
                self._runtime.on_close(
                    lambda: check(driver().cuModuleUnload(handle), "cuModuleUnload", f"unload module {module.name}")
                )
            return self._loaded[module]


def device_arch(compute_capability: tuple[int, int]) -> str:
    """Return the architecture to compile for on a device, given what the compiler knows.

    Raises
    ------
    NvrtcError : the compiler is too old for the device.
    """
    result = nvrtc().nvrtcGetSupportedArchs()
    supported = tuple(int(number) for number in check(result, "nvrtcGetSupportedArchs", "list the architectures"))
    return choose_arch(compute_capability, supported)


def choose_arch(compute_capability: tuple[int, int], supported: Iterable[int]) -> str:
    """Return ``sm_XY``, with ``a`` from 9.0 on, or the closest older one of the same major version.

    Raises
    ------
    NvrtcError : nothing of the same major version is supported.
    """
    major, minor = compute_capability
    own = 10 * major + minor
    usable = [number for number in supported if 10 * major <= number <= own]
    if not usable:
        raise NvrtcError(
            f"the compiler knows no architecture for compute capability {major}.{minor}: install a newer "
            "nvidia-cuda-nvrtc"
        )
    # Architecture-specific code runs on that very architecture only.
    return f"sm_{own}a" if own in usable and major >= 9 else f"sm_{max(usable)}"
