"""``qmoe-ep doctor``: what of this machine can be used."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

import click

from qmoe_ep.cli.main import debug_option, json_option

__all__ = ["Finding", "command", "examine"]

_COMPILED = "compiled CPU kernels"
_PACKAGES = ("numpy", "ml_dtypes", "onnx", "cuda-python")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: whether it works, what it is, and how to get it if it doesn't."""

    what: str
    works: bool
    details: str
    remedy: str = ""


@click.command("doctor")
@json_option
@debug_option
def command(as_json: bool) -> None:
    """Look at Python, driver, GPU, NVRTC, headers and the cache folder, and say how to get what is missing.

    The CPU provider needs no driver, GPU, NVRTC, headers or cache folder, so what is missing is no error.
    """
    from qmoe_ep.cli.output import print_json, print_table

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
        return
    print_table(
        ("", "works", "details", "how to get it"),
        [(f.what, "yes" if f.works else "no", f.details, f.remedy) for f in findings],
    )
    cuda = all(f.works for f in findings if f.what != _COMPILED)
    click.echo("CPU and CUDA can be used" if cuda else "The CPU can be used; CUDA needs what is missing above")


def examine() -> list[Finding]:
    """Look at everything; each look is on its own, so that one that fails doesn't hide the rest."""
    findings: list[Finding] = []
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _compiled,
        _driver,
        _nvrtc,
        _headers,
        _cache,
    )
    for look in looks:
        findings += look()
    return findings


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("Python", sys.version_info >= (3, 11), f"{version} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding(name, True, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, False, "not installed", f"pip install {name}")


def _compiled() -> Iterator[Finding]:
    try:
        yield Finding(_COMPILED, True, f"llvmlite {metadata.version('llvmlite')}")
    except metadata.PackageNotFoundError:
        yield Finding(_COMPILED, False, "llvmlite is not installed; NumPy is slower", 'pip install "qmoe-ep[jit]"')


def _driver() -> Iterator[Finding]:
    from qmoe_ep import driver
    from qmoe_ep.errors import CudaError

    try:
        binding = driver.initialise()
        version = driver.check(binding.cuDriverGetVersion(), "cuDriverGetVersion", "ask for the driver's version")
        count = driver.check(binding.cuDeviceGetCount(), "cuDeviceGetCount", "count the GPUs")
    except CudaError as error:
        remedy = "install the NVIDIA driver for your distribution; nvidia-smi must list a GPU"
        yield Finding("NVIDIA driver", False, str(error).splitlines()[0], remedy)
        yield Finding("GPU", False, "unknown without a driver", "the CPU provider needs none: --provider cpu")
        return
    yield Finding("NVIDIA driver", True, f"for CUDA {version // 1000}.{version % 1000 // 10}")
    if not count:
        yield Finding("GPU", False, "none is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    for ordinal in range(count):
        yield _gpu(ordinal)


def _gpu(ordinal: int) -> Finding:
    from qmoe_ep import driver
    from qmoe_ep.errors import CudaError

    binding = driver.driver()
    attribute = binding.CUdevice_attribute
    doing = f"look at GPU {ordinal}"
    try:
        device = driver.check(binding.cuDeviceGet(ordinal), "cuDeviceGet", doing)
        name = driver.check(binding.cuDeviceGetName(128, device), "cuDeviceGetName", doing)
        major, minor = (
            driver.check(binding.cuDeviceGetAttribute(a, device), "cuDeviceGetAttribute", doing)
            for a in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
    except CudaError as error:
        return Finding(f"GPU {ordinal}", False, str(error).splitlines()[0])
    words = name.split(b"\0")[0].decode(errors="replace") if isinstance(name, bytes) else str(name)
    details = f"{words}, compute capability {major}.{minor}"
    works = (major, minor) >= (7, 5)
    return Finding(f"GPU {ordinal}", works, details, "" if works else "7.5 or newer is needed; use --provider cpu")


def _nvrtc() -> Iterator[Finding]:
    from qmoe_ep import driver
    from qmoe_ep.errors import CudaError, NvrtcError

    try:
        major, minor = driver.check(driver.nvrtc().nvrtcVersion(), "nvrtcVersion", "ask for NVRTC's version")
    except (CudaError, NvrtcError) as error:
        details = str(error).splitlines()[0]
        yield Finding("NVRTC", False, details, 'pip install "qmoe-ep[cuda]" (or nvidia-cuda-nvrtc)')
    else:
        yield Finding("NVRTC", True, f"{major}.{minor}")


def _headers() -> Iterator[Finding]:
    from qmoe_ep.includes import find_cuda_headers

    folder = find_cuda_headers()
    if folder is None:
        remedy = 'pip install "qmoe-ep[cuda]" (or nvidia-cuda-runtime), or set CUDA_HOME'
        yield Finding("CUDA headers", False, "cuda_fp16.h and cuda_bf16.h were not found", remedy)
    else:
        yield Finding("CUDA headers", True, str(folder))


def _cache() -> Iterator[Finding]:
    from qmoe_ep.module_store import ModuleStore

    store = ModuleStore.default()
    if store is None:
        yield Finding("cache folder", True, "switched off by QMOE_EP_CACHE_DISABLE=1")
        return
    sizes = [path.stat().st_size for path in store.folder.glob("*.module")] if store.folder.is_dir() else []
    parent = store.folder
    while not parent.exists():
        parent = parent.parent
    works = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    remedy = "" if works else "make it writable, or set QMOE_EP_CACHE_DIR to a folder that is"
    yield Finding("cache folder", works, f"{store.folder}: {len(sizes)} modules, {sum(sizes)} bytes", remedy)
