"""Arrays and streams shared with PyTorch and CuPy on a GPU, with nothing waiting in between."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import Recipe, build
from test_cuda_provider import activations_of, on_device, run, weights_of

from qmoe_ep import CudaExecutionProvider, QMoEError, driver

pytestmark = pytest.mark.gpu

DELAY = 20_000_000
"""Cycles that a producer is late by: some 10 ms."""


@pytest.fixture
def gpu() -> Iterator[CudaExecutionProvider]:
    with CudaExecutionProvider() as provider:
        yield provider


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="needs PyTorch")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="needs CuPy")


class Named:
    """Any object that names a stream."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class Interface:
    """Any object with the CUDA array interface and nothing else."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__cuda_array_interface__ = interface
        self.owner = owner


# --- PyTorch ---------------------------------------------------------------------------------------


def test_a_late_torch_producer_is_waited_for(gpu: CudaExecutionProvider, torch: Any) -> None:
    problem = build(Recipe(leading=(3,), dtype="float16", router_dtype="float16"))
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    output = gpu.to_device(problem.poisoned_output())
    x, logits = (torch.from_numpy(np.ascontiguousarray(problem.inputs[i])).cuda() for i in (0, 1))
    late = torch.zeros_like(x)
    kernel.execute([late, logits], [output])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(DELAY)
        late.copy_(x)
        kernel.execute([late, logits], [output])
    problem.check_closely(output.numpy())


def test_a_torch_consumer_waits_for_late_work(gpu: CudaExecutionProvider, torch: Any) -> None:
    sleeper = torch.cuda.ExternalStream(gpu.runtime.stream)
    source = gpu.to_device(np.arange(1 << 20, dtype=np.float32))
    target = gpu.to_device(np.full(1 << 20, np.nan, np.float32))
    gpu.synchronize()
    with torch.cuda.stream(sleeper):
        torch.cuda._sleep(DELAY)
    target.copy_from(source)
    with torch.cuda.stream(torch.cuda.Stream()):
        # Read on the same stream: another one would have to wait for it.
        total = float(torch.from_dlpack(target).double().sum())
    assert total == (1 << 20) * ((1 << 20) - 1) / 2


def test_memory_is_shared_both_ways_and_outlives_its_owner(gpu: CudaExecutionProvider, torch: Any) -> None:
    mine = gpu.to_device(np.arange(12, dtype=np.float32).reshape(3, 4))
    theirs = torch.from_dlpack(mine)
    assert theirs.data_ptr() == mine.pointer
    theirs.mul_(2)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(mine.numpy(), 2 * np.arange(12).reshape(3, 4))
    del mine
    gc.collect()
    other = gpu.to_device(np.zeros(12, np.float32))
    assert other.pointer != theirs.data_ptr()
    assert float(theirs.sum()) == 132
    del theirs
    gc.collect()
    half = torch.full((2, 8), 1.5, dtype=torch.bfloat16, device="cuda")
    copy = gpu.empty((2, 8), "bfloat16").copy_from(half)
    assert copy.numpy().astype(np.float32).tolist() == [[1.5] * 8] * 2
    assert torch.from_dlpack(copy).dtype is torch.bfloat16


def test_misfits_of_torch_arrays_are_named(gpu: CudaExecutionProvider, torch: Any) -> None:
    target = gpu.empty((4, 4), np.float32)
    with pytest.raises(QMoEError, match="contiguous"):
        target.copy_from(torch.zeros((4, 8), device="cuda")[:, ::2])
    with pytest.raises(QMoEError, match="expected memory of CUDA device"):
        target.copy_from(torch.zeros((4, 4)))
    with pytest.raises(QMoEError, match="expected float32"):
        target.copy_from(torch.zeros((4, 4), device="cuda", dtype=torch.float64))


# --- CuPy and the array interface ------------------------------------------------------------------


def test_cupy_both_ways(gpu: CudaExecutionProvider, cupy: Any) -> None:
    problem = build(Recipe(leading=(3,)))
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        operands = [cupy.asarray(problem.inputs[0]), cupy.asarray(problem.inputs[1])]
        output = cupy.full_like(operands[0], np.nan)
        for again in range(2):
            output.fill(np.nan)
            kernel.execute(operands, [output])
            # CuPy knows of no order behind its back: the provider gives it.
            gpu.runtime.order_stream_after(stream.ptr)
            problem.check_closely(output.get())
            assert again or float(cupy.isnan(output).sum()) == 0
        mine = gpu.to_device(problem.inputs[0])
        by_interface, by_dlpack = cupy.asarray(mine), cupy.from_dlpack(mine)
        assert by_interface.data.ptr == by_dlpack.data.ptr == mine.pointer
        np.testing.assert_array_equal(by_interface.get(), problem.inputs[0])
        del mine
        gc.collect()
        np.testing.assert_array_equal(by_dlpack.get(), problem.inputs[0])


def test_the_interfaces_stream_and_read_only_flag(gpu: CudaExecutionProvider, cupy: Any) -> None:
    late, stream = cupy.zeros(1 << 22, np.float32), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(50):
            late += 1
    interface = {**late.__cuda_array_interface__, "stream": stream.ptr}
    got = gpu.empty(1 << 22, np.float32).copy_from(Interface(interface, late)).numpy()
    assert (got == 50).all()
    pointer = interface["data"][0]
    problem = build(Recipe())
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    x = problem.inputs[0]
    assert x is not None
    frozen = {
        "shape": x.shape,
        "typestr": "<f4",
        "data": (pointer, True),
        "version": 3,
        "strides": None,
        "stream": None,
    }
    with pytest.raises(QMoEError, match="output: the array is read-only"):
        kernel.execute(on_device(gpu, activations_of(problem)), [Interface(frozen, late)])


# --- streams and contexts --------------------------------------------------------------------------


def test_anything_that_names_a_stream_is_one(torch: Any, cupy: Any) -> None:
    problem = build(Recipe())
    theirs = torch.cuda.Stream()
    for stream in (theirs, cupy.cuda.Stream(non_blocking=True), Named(theirs.cuda_stream), theirs.cuda_stream):
        if not (isinstance(stream, int) or hasattr(stream, "__cuda_stream__")):
            continue
        with CudaExecutionProvider(stream=stream) as gpu:
            assert not gpu.runtime.owns_stream
            kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
            output = kernel(*on_device(gpu, activations_of(problem)))
            problem.check_closely(output.numpy())
            kernel.close()
    with CudaExecutionProvider() as first, CudaExecutionProvider(stream=first.runtime) as second:
        assert first.runtime.stream == second.runtime.stream


def test_two_providers_hand_over_between_their_streams() -> None:
    problem = build(Recipe(leading=(64,), hidden=256, inter=256, dtype="float16", router_dtype="float16"))
    with CudaExecutionProvider() as first, CudaExecutionProvider() as second:
        assert first.runtime.stream != second.runtime.stream
        kernels = [gpu.create_kernel(problem.node, 7, weights_of(problem)) for gpu in (first, second)]
        operands = on_device(first, activations_of(problem))
        alone = kernels[0](*operands)
        chained = kernels[0](alone, *operands[1:]).numpy()
        for _ in range(20):
            between = first.to_device(problem.poisoned_output())
            kernels[0].execute(operands, [between])
            # Read on the second stream as it is written on the first.
            result = kernels[1](between, *operands[1:])
            assert result.numpy().tobytes() == chained.tobytes()
            # What the second one reads may go at any time.
            del between
        problem.check_closely(alone.numpy())


def test_two_devices() -> None:
    binding = driver.initialise()
    if driver.check(binding.cuDeviceGetCount(), "cuDeviceGetCount", "count the GPUs") < 2:
        pytest.skip("needs two GPUs")
    problem = build(Recipe())
    with CudaExecutionProvider(device=0) as first, CudaExecutionProvider(device=1) as second:
        for gpu in (first, second):
            problem.check_closely(run(gpu, problem))
        kernel = second.create_kernel(problem.node, 7, weights_of(problem))
        with pytest.raises(QMoEError, match="is on device 0, expected device 1"):
            kernel(*on_device(first, activations_of(problem)))


CONTEXTS = {
    "torch": """
import torch
x = torch.ones(1000, device="cuda")
check = lambda: float((x + 1).sum()) == 2000
""",
    "cupy": """
import cupy
x = cupy.ones(1000)
check = lambda: float((x + 1).sum()) == 2000
""",
}


@pytest.mark.parametrize("library", CONTEXTS)
def test_a_context_that_another_library_made(library: str) -> None:
    pytest.importorskip(library, reason=f"needs {library}")
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]"
        + CONTEXTS[library]
        + """
from problems import Recipe, build
from test_cuda_provider import run
from qmoe_ep import CudaExecutionProvider, driver
binding = driver.initialise()
current = lambda: int(driver.check(binding.cuCtxGetCurrent(), "cuCtxGetCurrent", "compare"))
before = current()
assert before and check()
problem = build(Recipe())
for _ in range(2):
    with CudaExecutionProvider() as gpu:
        problem.check_closely(run(gpu, problem))
        assert current() == before and check()
    assert current() == before and check()
print("OK")
"""
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", program, str(here), str(here.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "OK"), done.stderr
