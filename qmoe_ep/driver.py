"""The only door to ``cuda.bindings``: lazily imported modules and the one check of result codes.

Every driver and compiler call of the package reads ``check(driver().cuSomething(...), "cuSomething",
"what was being attempted")``. :func:`install` replaces both modules, which is how the whole package
runs without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from qmoe_ep.errors import CudaError, NvrtcError

__all__ = ["check", "driver", "initialise", "install", "nvrtc", "relaxed_capture_mode"]

_driver: Any = None
_nvrtc: Any = None

_HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "Free device memory, use a smaller batch or trim the pool",
    "CUDA_ERROR_NO_DEVICE": "No GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "The process lost its context; QMOE_EP_SYNC=1 shows the call that did it",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "Another stream is capturing; give the provider a stream of its own",
}


def install(driver_module: Any, nvrtc_module: Any) -> None:
    """Use these modules in place of ``cuda.bindings.driver`` and ``cuda.bindings.nvrtc``.

    ``None`` goes back to the real one at its next use. Runtimes that exist keep working only with
    the module that made them, so install before the first runtime and after the last close.
    """
    global _driver, _nvrtc
    _driver, _nvrtc = driver_module, nvrtc_module


def driver() -> Any:
    """Return the driver module.

    Raises
    ------
    CudaError : ``cuda.bindings`` is not installed.
    """
    global _driver
    if _driver is None:
        try:
            from cuda.bindings import driver as module
        except ImportError as error:
            raise CudaError("NOT_INSTALLED", "import cuda.bindings", "use a GPU", "pip install cuda-python") from error
        _driver = module
    return _driver


def nvrtc() -> Any:
    """Return the runtime compiler's module, its library loaded.

    Raises
    ------
    NvrtcError : the bindings or the compiler's library are missing.
    """
    global _nvrtc
    if _nvrtc is None:
        try:
            from cuda.bindings import nvrtc as module

            module.nvrtcVersion()
        except (ImportError, RuntimeError, OSError) as error:
            raise NvrtcError(f"NVRTC can't be used ({error}): pip install cuda-python nvidia-cuda-nvrtc") from error
        _nvrtc = module
    return _nvrtc


def initialise() -> Any:
    """Return the driver module after ``cuInit``.

    Raises
    ------
    CudaError : there is no driver library, no device, or the driver refuses.
    """
    module = driver()
    try:
        result = module.cuInit(0)
    except (RuntimeError, OSError) as error:
        # The bindings raise instead of returning a code when the library itself is absent.
        raise CudaError("NOT_FOUND", "cuInit", "load the NVIDIA driver library", str(error)) from error
    check(result, "cuInit", "initialise the NVIDIA driver")
    return module


@contextlib.contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Let this thread wait and free while some other stream of the process is capturing."""
    binding = driver()
    relaxed = binding.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    call, doing = "cuThreadExchangeStreamCaptureMode", "wait beside another capture"
    before = check(binding.cuThreadExchangeStreamCaptureMode(relaxed), call, doing)
    try:
        yield
    finally:
        check(binding.cuThreadExchangeStreamCaptureMode(before), call, doing)


def check(result: tuple[Any, ...], call: str, doing: str) -> Any:
    """Turn what a binding returned into its values, or into an exception.

    Parameters
    ----------
    result : (code, values...), as every function of ``cuda.bindings`` returns it
    call : the function's name
    doing : what was being attempted, such as ``"launch gate_up for node 7"``

    Returns
    -------
    None, the value, or a tuple of values.

    Raises
    ------
    CudaError, NvrtcError : the code is not success; which one, by the kind of the code.
    """
    code = result[0]
    if code:
        name = getattr(code, "name", str(code))
        if name.startswith("NVRTC"):
            raise NvrtcError(f"{call} failed with {name} while trying to {doing}")
        raise CudaError(name, call, doing, _HINTS.get(name, ""))
    count = len(result)
    if count == 1:
        return None
    return result[1] if count == 2 else result[1:]
