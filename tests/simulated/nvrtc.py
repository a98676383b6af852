"""The simulated compiler: its binary is the source, so that a launch can find its way back."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from typing import Any

from cuda.bindings import nvrtc as real

__all__ = ["SimulatedNvrtc", "parse_image"]


class SimulatedNvrtc:
    """Stands in for ``cuda.bindings.nvrtc``.

    A source fails to compile where it has an ``#error`` line.

    Attributes
    ----------
    compilations : names of the programs compiled, in order
    delay_seconds : how long a compilation takes
    """

    nvrtcResult = real.nvrtcResult

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self._programs: dict[int, tuple[str, str]] = {}
        self._handles = itertools.count(1)
        self._logs: dict[int, bytes] = {}
        self._images: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self.compilations: list[str] = []
        self.delay_seconds = 0.0

    def live_programs(self) -> int:
        """Return how many programs have not been destroyed."""
        return len(self._programs)

    def _enter(self, name: str) -> Any:
        return self._machine.injected(name, real.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR)

    def nvrtcVersion(self) -> tuple[Any, ...]:
        code = self._enter("nvrtcVersion")
        return (code, None) if code else (real.nvrtcResult.NVRTC_SUCCESS, 13, 0)

    def nvrtcGetSupportedArchs(self) -> tuple[Any, ...]:
        code = self._enter("nvrtcGetSupportedArchs")
        return (code, None) if code else (real.nvrtcResult.NVRTC_SUCCESS, [75, 80, 86, 89, 90, 100, 103, 120])

    def nvrtcCreateProgram(
        self, source: bytes, name: bytes, count: int, headers: list[bytes], names: list[bytes]
    ) -> tuple[Any, ...]:
        code = self._enter("nvrtcCreateProgram")
        if code:
            return (code, None)
        if not count == len(headers) == len(names):
            return (real.nvrtcResult.NVRTC_ERROR_INVALID_INPUT, None)
        with self._lock:
            handle = next(self._handles)
            self._programs[handle] = (name.decode().removesuffix(".cu"), source.decode())
        return (real.nvrtcResult.NVRTC_SUCCESS, handle)

    def nvrtcCompileProgram(self, program: int, count: int, options: list[bytes]) -> tuple[Any, ...]:
        code = self._enter("nvrtcCompileProgram")
        if code:
            return (code,)
        name, source = self._programs[program]
        time.sleep(self.delay_seconds)
        failure = re.search(r"^#error (.*)", source, re.MULTILINE)
        with self._lock:
            self.compilations.append(name)
            self._logs[program] = f"{name}.cu: error: {failure[1]}".encode() if failure else b""
            arch = options[0].decode().rpartition("=")[2]
            self._images[program] = json.dumps({"module": name, "arch": arch, "source": source}).encode()
        return (real.nvrtcResult.NVRTC_ERROR_COMPILATION if failure else real.nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcGetProgramLogSize(self, program: int) -> tuple[Any, ...]:
        code = self._enter("nvrtcGetProgramLogSize")
        return (code, None) if code else (real.nvrtcResult.NVRTC_SUCCESS, len(self._logs.get(program, b"")) + 1)

    def nvrtcGetProgramLog(self, program: int, log: bytearray) -> tuple[Any, ...]:
        code = self._enter("nvrtcGetProgramLog")
        if not code:
            log[:] = self._logs.get(program, b"") + b"\0"
        return (code or real.nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcGetCUBINSize(self, program: int) -> tuple[Any, ...]:
        code = self._enter("nvrtcGetCUBINSize")
        return (code, None) if code else (real.nvrtcResult.NVRTC_SUCCESS, len(self._images[program]))

    def nvrtcGetCUBIN(self, program: int, cubin: bytearray) -> tuple[Any, ...]:
        code = self._enter("nvrtcGetCUBIN")
        if not code:
            cubin[:] = self._images[program]
        return (code or real.nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcDestroyProgram(self, program: int) -> tuple[Any, ...]:
        code = self._enter("nvrtcDestroyProgram")
        with self._lock:
            # A refused destruction is the compiler's leak, not the package's.
            del self._programs[program]
        return (code or real.nvrtcResult.NVRTC_SUCCESS,)


def parse_image(image: bytes) -> dict[str, str] | None:
    """Return module, arch and source of a binary, or None where it isn't one."""
    try:
        content = json.loads(image)
    except ValueError:
        return None
    return content if isinstance(content, dict) and {"module", "arch", "source"} <= content.keys() else None
