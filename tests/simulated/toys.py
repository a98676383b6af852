"""Small kernels that exercise the runtime layer by itself."""

from __future__ import annotations

import ctypes

import numpy as np

from qmoe_ep.kernels.plan import ModuleSource, Step

from .kernels import KernelLaunch, simulated_kernel

__all__ = ["ToyArguments", "accumulate_step", "fill_step", "scale_step"]


class ToyArguments(ctypes.Structure):
    """The struct of every toy: two buffers of f32, a factor and a count."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("factor", ctypes.c_float),
    )


@simulated_kernel("toy_scale", arguments=ToyArguments)
def _scale(launch: KernelLaunch) -> None:
    """destination = factor * source."""
    arguments = launch.arguments
    source = launch.memory.view(arguments.source, arguments.count, np.float32)
    launch.memory.view(arguments.destination, arguments.count, np.float32)[:] = source * np.float32(arguments.factor)


@simulated_kernel("toy_fill", arguments=ToyArguments)
def _fill(launch: KernelLaunch) -> None:
    """destination = factor."""
    arguments = launch.arguments
    launch.memory.view(arguments.destination, arguments.count, np.float32)[:] = arguments.factor


@simulated_kernel("toy_accumulate", arguments=ToyArguments)
def _accumulate(launch: KernelLaunch) -> None:
    """destination += factor."""
    arguments = launch.arguments
    launch.memory.view(arguments.destination, arguments.count, np.float32)[:] += np.float32(arguments.factor)


# Real device code, so that the same programs run on a GPU.
_SOURCE = """struct ToyArguments {
    const float* source;
    float* destination;
    long long count;
    float factor;
};
extern "C" __global__ void %s(const __grid_constant__ ToyArguments arguments) {
    const long long index = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (index >= arguments.count) return;
    float& element = arguments.destination[index];
    %s
}
"""

_BODIES = {
    "toy_scale": "element = arguments.source[index] * arguments.factor;",
    "toy_fill": "element = arguments.factor;",
    "toy_accumulate": "element += arguments.factor;",
}


def _step(entry: str, count: int, factor: float, pointers: tuple[tuple[str, str], ...], shared_bytes: int) -> Step:
    module = ModuleSource(f"{entry}_v1", _SOURCE % (entry, _BODIES[entry]), (entry,))
    return Step(
        name=entry,
        module=module,
        entry=entry,
        grid=(-(-count // 256), 1, 1),
        block=(256, 1, 1),
        shared_bytes=shared_bytes,
        arguments=ToyArguments(count=count, factor=factor),
        pointers=pointers,
    )


def scale_step(count: int, factor: float, shared_bytes: int = 0) -> Step:
    """destination = factor * source, `count` elements of f32."""
    return _step("toy_scale", count, factor, (("source", "source"), ("destination", "destination")), shared_bytes)


def fill_step(count: int, factor: float) -> Step:
    """destination = factor."""
    return _step("toy_fill", count, factor, (("destination", "destination"),), 0)


def accumulate_step(count: int, factor: float) -> Step:
    """destination += factor."""
    return _step("toy_accumulate", count, factor, (("destination", "destination"),), 0)
