"""The CUDA provider on the simulated driver: right results, capture and replay, lifetimes, and failures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import simulated.kernels_portable
from golden import CASES, load
from hypothesis import given, settings
from problems import Problem, Recipe, Space, build, first_seed, problems, random_problem
from simulated.plugin import simulation

import qmoe_ep
from qmoe_ep import CaptureError, CudaError, CudaExecutionProvider, QMoEError, QMoENode
from qmoe_ep.cuda.tensor import DeviceTensor
from qmoe_ep.operator import INPUT_NAMES

assert simulated.kernels_portable

SPACE = Space(strided=(False,), most_features=64, layouts=("raw",))
WEIGHTS = [*range(2, 14), *range(15, 21)]


@pytest.fixture
def gpu(simulated: Any) -> Iterator[CudaExecutionProvider]:
    """A provider on the simulated driver, which leaves nothing behind."""
    with CudaExecutionProvider(kernels="portable") as provider:
        simulated.watch(provider.runtime)
        yield provider


def weights_of(problem: Problem) -> dict[int, Any]:
    """The operands that are constant over a node's life."""
    return {i: problem.inputs[i] for i in WEIGHTS if i < len(problem.inputs) and problem.inputs[i] is not None}


def activations_of(problem: Problem) -> list[Any]:
    """The other operands, in ONNX order."""
    return [None if i in WEIGHTS else value for i, value in enumerate(problem.inputs)]


def with_rows(problem: Problem, rows: int) -> Problem:
    """The same experts with other activations."""
    other = build(replace(problem.recipe, leading=(rows,)))
    inputs = [
        mine if i in WEIGHTS else theirs
        for i, (mine, theirs) in enumerate(zip(problem.inputs, other.inputs, strict=True))
    ]
    return replace(other, inputs=inputs)


def on_device(gpu: CudaExecutionProvider, operands: list[Any]) -> list[DeviceTensor | None]:
    """Copies on the device."""
    return [None if o is None else gpu.to_device(np.ascontiguousarray(o)) for o in operands]


def run(gpu: CudaExecutionProvider, problem: Problem, *, constant: bool = True) -> np.ndarray[Any, Any]:
    """A problem's output by a fresh kernel."""
    initializers = weights_of(problem) if constant else {}
    operands = activations_of(problem) if constant else list(problem.inputs)
    kernel = gpu.create_kernel(problem.node, 7, initializers, problem.weights_layout)
    output = gpu.to_device(problem.poisoned_output())
    kernel.execute(on_device(gpu, operands), [output])
    result = output.numpy()
    kernel.close()
    return result


def check_stored_case(gpu: CudaExecutionProvider, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Check a stored case against the reference; its output and the true one."""
    problem = load(name)
    constants = {i: a for i, a in enumerate(problem.inputs) if i in WEIGHTS and a is not None}
    kernel = gpu.create_kernel(problem.node, 7, constants)
    operands = [None if i in WEIGHTS else a for i, a in enumerate(problem.inputs)]
    actual = kernel(*on_device(gpu, operands)).numpy()
    expected = qmoe_ep.reference.qmoe(problem.node, problem.inputs)
    magnitudes = qmoe_ep.reference.row_magnitudes(problem.node, problem.inputs)
    limit = 8e-3 if actual.dtype.name == "bfloat16" else 2e-6
    assert qmoe_ep.reference.row_errors(actual, expected, magnitudes).max() <= limit
    return actual, expected


# --- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_stored_cases(gpu: CudaExecutionProvider, name: str) -> None:
    check_stored_case(gpu, name)


@settings(max_examples=60)
@given(problem=problems(SPACE))
def test_random_problems(problem: Problem) -> None:
    with simulation() as machine:
        with CudaExecutionProvider(kernels="portable") as gpu:
            problem.check_closely(run(gpu, problem, constant=bool(problem.recipe.seed % 2)))
        machine.check_end()


@pytest.mark.parametrize("bits", [2, 4])
def test_sm80_weights_are_converted_once(gpu: CudaExecutionProvider, bits: int) -> None:
    problem = build(Recipe(bits=(bits, bits, bits), layout="sm80", hidden=128, inter=64))
    problem.check_closely(run(gpu, problem))
    with pytest.raises(QMoEError, match=r"fc1_experts_weights.*initializers"):
        run(gpu, problem, constant=False)


def test_valid_rows_leave_the_rest_untouched(gpu: CudaExecutionProvider) -> None:
    problem = build(Recipe(leading=(5,)))
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    output = gpu.to_device(problem.poisoned_output())
    kernel.execute(on_device(gpu, activations_of(problem)), [output], gpu.to_device(np.array([3], np.int32)))
    result = output.numpy()
    assert np.isnan(result[3:]).all()
    np.testing.assert_allclose(result[:3], problem.expected[:3], rtol=1e-4)


def test_zero_rows_launch_nothing(gpu: CudaExecutionProvider, simulated: Any) -> None:
    problem = build(Recipe(leading=(0,)))
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    operands = on_device(gpu, activations_of(problem))
    before = simulated.counts().get("cuLaunchKernelEx", 0)
    assert kernel(*operands).numpy().shape == (0, problem.recipe.hidden)
    assert simulated.counts().get("cuLaunchKernelEx", 0) == before
    support = kernel.capture_support(operands, [gpu.empty((0, problem.recipe.hidden), np.float32)])
    assert not support.supported
    assert "zero rows" in support.reason


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + 10))
def test_operands_that_lie_anywhere(gpu: CudaExecutionProvider, seed: int) -> None:
    problem = random_problem(seed, replace(SPACE, leading=((2,),)))
    operands: list[Any] = []
    for operand in problem.inputs:
        if operand is None:
            operands.append(None)
            continue
        host = np.ascontiguousarray(operand)
        larger = gpu.to_device(np.concatenate([host.reshape(-1)[:1], host.reshape(-1)]))
        operands.append(gpu.view(larger.pointer + host.itemsize, host.shape, host.dtype, owner=larger))
    output = gpu.to_device(problem.poisoned_output())
    kernel = gpu.create_kernel(problem.node)
    kernel.execute(operands, [output])
    problem.check_closely(output.numpy())


# --- tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.uint8, np.int32])
def test_tensors_keep_their_values(gpu: CudaExecutionProvider, dtype: Any) -> None:
    values = np.arange(12).reshape(3, 4).astype(dtype)
    tensor = gpu.to_device(values.T)
    assert (tensor.numpy() == values.T).all()
    other = gpu.empty((4, 3), dtype).copy_from(tensor)
    assert (other.numpy() == values.T).all()
    with pytest.raises(QMoEError, match=r"copy_from: expected .*\[4, 3\]"):
        other.copy_from(values)
    assert gpu.empty(0, dtype).numpy().shape == (0,)


def test_tensors_travel_by_dlpack_and_the_array_interface(gpu: CudaExecutionProvider) -> None:
    class Exporter:
        def __init__(self, tensor: DeviceTensor) -> None:
            self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__

    class Interface:
        def __init__(self, tensor: DeviceTensor, **change: Any) -> None:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__ | change

    problem = build(Recipe())
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    x, router = on_device(gpu, activations_of(problem)[:2])
    assert x is not None
    assert router is not None
    output = gpu.to_device(problem.poisoned_output())
    kernel.execute([Exporter(x), Interface(router)], [Interface(output)])
    problem.check_closely(output.numpy())
    for bad, words in (
        (np.zeros(3), "to_device"),
        (Interface(router, strides=(4, 4)), "contiguous"),
        (Interface(router, data=(64, False)), "not device memory"),
        (Interface(router, stream=2), "per-thread"),
        (3, "router_probs: expected a device array"),
    ):
        with pytest.raises(QMoEError, match=words):
            kernel.execute([x, bad], [output])
    with pytest.raises(QMoEError, match="read-only"):
        kernel.execute([x, router], [Interface(output, data=(output.pointer, True))])


def test_a_tensor_lives_as_long_as_a_consumer(gpu: CudaExecutionProvider) -> None:
    from qmoe_ep.cuda.dlpack import import_capsule

    before = gpu.memory_statistics().allocations
    tensor = gpu.to_device(np.ones(4, np.float32))
    lent = import_capsule(tensor.__dlpack__(max_version=(1, 0)), "x")
    pointer = tensor.pointer
    del tensor
    gc.collect()
    gpu.runtime.collect()
    assert lent.pointer == pointer
    assert gpu.memory_statistics().allocations == before + 1
    del lent
    gc.collect()
    gpu.runtime.collect()
    assert gpu.memory_statistics().allocations == before


def test_a_producers_stream_is_waited_for(gpu: CudaExecutionProvider, simulated: Any) -> None:
    problem = build(Recipe())
    with CudaExecutionProvider() as other:
        simulated.watch(other.runtime)
        kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
        operands = on_device(other, activations_of(problem))
        output = gpu.to_device(problem.poisoned_output())
        before = simulated.counts().get("cuStreamWaitEvent", 0)
        kernel.execute(operands, [output])
        assert simulated.counts()["cuStreamWaitEvent"] > before
        problem.check_closely(output.numpy())
        del operands
        gc.collect()


# --- capture ---------------------------------------------------------------------------------------


def warmed(gpu: CudaExecutionProvider, problem: Problem) -> tuple[Any, list[Any], DeviceTensor]:
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    operands, output = on_device(gpu, activations_of(problem)), gpu.to_device(problem.poisoned_output())
    kernel.execute(operands, [output])
    return kernel, operands, output


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_replay_gives_the_bits_of_the_eager_call(gpu: CudaExecutionProvider, rows: int) -> None:
    problem = build(Recipe(leading=(rows,)))
    kernel, operands, output = warmed(gpu, problem)
    eager = output.numpy()
    problem.check_closely(eager)
    with gpu.capture() as capture:
        kernel.execute(operands, [output])
    output.copy_from(problem.poisoned_output())
    capture.graph.replay()
    assert output.numpy().tobytes() == eager.tobytes()
    capture.graph.close()
    with pytest.raises(CaptureError, match="closed"):
        capture.graph.replay()


def test_a_graph_outlives_kernel_operands_and_growth(gpu: CudaExecutionProvider) -> None:
    problem = build(Recipe(leading=(2,)))
    larger = with_rows(problem, 40)
    kernel, operands, output = warmed(gpu, problem)
    with gpu.capture() as capture:
        kernel.execute(operands, [output])
    big = gpu.to_device(larger.poisoned_output())
    kernel.execute(on_device(gpu, activations_of(larger)), [big])
    kernel.close()
    del kernel, operands
    gc.collect()
    gpu.runtime.collect()
    filler = [gpu.to_device(np.full(4096, np.nan, np.float32)) for _ in range(8)]
    output.copy_from(problem.poisoned_output())
    capture.graph.replay()
    problem.check_closely(output.numpy())
    capture.graph.close()
    assert filler


def test_only_warmed_signatures_are_captured(gpu: CudaExecutionProvider) -> None:
    problem = build(Recipe(leading=(2,)))
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    operands, output = on_device(gpu, activations_of(problem)), gpu.to_device(problem.poisoned_output())
    assert not kernel.capture_support(operands, [output]).supported
    with pytest.raises(CaptureError, match="run the new signature once eagerly"), gpu.capture():
        kernel.execute(operands, [output])
    kernel.execute(operands, [output])
    assert kernel.capture_support(operands, [output]).supported
    with pytest.raises(CaptureError), gpu.capture():
        gpu.empty(4, np.float32)
    with gpu.capture() as capture:
        kernel.execute(operands, [output])
    output.copy_from(problem.poisoned_output())
    capture.graph.replay()
    problem.check_closely(output.numpy())
    capture.graph.close()


def test_zero_rows_cannot_be_captured(gpu: CudaExecutionProvider) -> None:
    problem, nothing = build(Recipe(leading=(2,))), build(Recipe(leading=(0,)))
    kernel, operands, output = warmed(gpu, problem)
    empty_operands, empty_output = on_device(gpu, activations_of(nothing)), gpu.to_device(nothing.poisoned_output())
    with pytest.raises(CaptureError, match="zero rows"), gpu.capture():
        kernel.execute(empty_operands, [empty_output])
    assert not kernel.capture_support(operands, [output]).supported


def test_every_warmed_signature_is_remembered(gpu: CudaExecutionProvider) -> None:
    shapes = [build(Recipe(leading=(rows,))) for rows in (1, 2, 3, 4)]
    kernel = gpu.create_kernel(shapes[0].node, 7, weights_of(shapes[0]))
    calls = [(on_device(gpu, activations_of(p)), [gpu.to_device(p.poisoned_output())]) for p in shapes]
    for operands, outputs in calls:
        kernel.execute(operands, outputs)
    assert all(kernel.capture_support(*call).supported for call in calls)


def test_the_embedders_own_capture(gpu: CudaExecutionProvider, simulated: Any) -> None:
    from simulated.scenarios import foreign_capture, launch_and_destroy

    problem = build(Recipe(leading=(2,)))
    kernel, operands, output = warmed(gpu, problem)
    executables: list[Any] = []
    with foreign_capture(simulated, gpu.runtime, executables):
        kernel.execute(operands, [output])
    resources = kernel.graph_resources()
    assert resources.allocations
    kernel.close()
    resources.close()
    output.copy_from(problem.poisoned_output())
    launch_and_destroy(simulated, executables)
    problem.check_closely(output.numpy())


# --- claims, errors, failures ----------------------------------------------------------------------


def test_creation_says_what_the_claim_says(gpu: CudaExecutionProvider) -> None:
    node = QMoENode(k=0)
    with pytest.raises(QMoEError) as error:
        gpu.create_kernel(node)
    assert str(error.value) == gpu.unsupported_reason(node)


def test_wrong_operands_name_themselves(gpu: CudaExecutionProvider) -> None:
    problem = build(Recipe())
    kernel, operands, output = warmed(gpu, problem)
    x, router = operands[:2]
    for inputs, outputs, words in (
        ([x, None], [output], "router_probs"),
        ([None, router], [output], "input"),
        ([x, router, x], [output], "fc1_experts_weights.*initializer"),
        ([x, router], [], "outputs"),
        ([x, router], [x, x], "outputs"),
        ([x, router], [router], "output: expected"),
        ([*[x] * 30], [output], "30 operands"),
    ):
        with pytest.raises(QMoEError, match=words):
            kernel.execute(inputs, outputs)
    with pytest.raises(QMoEError, match="valid_rows: expected one int32"):
        kernel.execute([x, router], [output], x)
    with pytest.raises(QMoEError, match="input 0"):
        kernel()
    kernel.close()
    kernel.close()
    with pytest.raises(QMoEError, match="closed"):
        kernel.execute([x, router], [output])


def test_the_portable_kernels_can_be_forced(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build(Recipe(leading=(1,), dtype="float16"))
    monkeypatch.setenv("QMOE_EP_KERNELS", "portable")
    with CudaExecutionProvider() as gpu:
        kernel, operands, output = warmed(gpu, problem)
        plan = kernel.plan(operands, [output])
        assert plan.variant == "portable"
        assert plan.reason
        del kernel, operands, output
    monkeypatch.setenv("QMOE_EP_KERNELS", "fastest")
    with pytest.raises(ValueError, match=r"QMOE_EP_KERNELS.*fastest"):
        CudaExecutionProvider()


def test_the_route_probe_logs_experts_and_margin(
    gpu: CudaExecutionProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = build(Recipe(leading=(2,)))
    monkeypatch.setenv("QMOE_EP_ROUTE_DUMP", "1")
    kernel, operands, output = warmed(gpu, problem)
    assert len(caplog.records) == 2
    assert "margin" in caplog.text
    with gpu.capture() as capture:
        kernel.execute(operands, [output])
    assert len(caplog.records) == 2
    capture.graph.close()


def test_memory_is_flat_over_many_calls(gpu: CudaExecutionProvider) -> None:
    problem = build(Recipe(leading=(1,)))
    kernel, operands, output = warmed(gpu, problem)
    before = gpu.memory_statistics()
    for _ in range(50):
        kernel.execute(operands, [output])
    assert gpu.memory_statistics() == before
    assert set(kernel.scratch_capacities())


def scenario(machine: Any) -> None:
    """Create, run, grow, capture, replay, run again: everything a call can do, with results checked."""
    small = build(Recipe(leading=(1,)))
    large = with_rows(small, 40)
    with CudaExecutionProvider(kernels="portable") as gpu:
        machine.watch(gpu.runtime)
        kernel = gpu.create_kernel(small.node, 7, weights_of(small))
        for problem in (small, large):
            output = gpu.to_device(problem.poisoned_output())
            operands = on_device(gpu, activations_of(problem))
            kernel.execute(operands, [output])
            problem.check_closely(output.numpy())
            with gpu.capture() as capture:
                kernel.execute(operands, [output])
            output.copy_from(problem.poisoned_output())
            capture.graph.replay()
            problem.check_closely(output.numpy())
            capture.graph.close()
        kernel.close()


def test_every_call_may_fail() -> None:
    """Each driver call of the scenario fails once: a clean error, or a right result, and no leak."""
    with simulation() as machine:
        scenario(machine)
        calls = len(machine.log)
        machine.check_end()
    failures = 0
    for nth in range(1, calls + 1, 3):
        with simulation() as machine:
            machine.fail(None, nth)
            try:
                scenario(machine)
            except (CudaError, qmoe_ep.NvrtcError, CaptureError):
                failures += 1
            machine.heal()
            machine.thread.contexts.clear()
            machine.check_end()
    assert failures > calls / 6


def test_a_failed_call_keeps_the_warm_state(gpu: CudaExecutionProvider, simulated: Any) -> None:
    small = build(Recipe(leading=(1,)))
    large = with_rows(small, 40)
    kernel, operands, output = warmed(gpu, small)
    capacities = kernel.scratch_capacities()
    big_operands, big_output = on_device(gpu, activations_of(large)), gpu.to_device(large.poisoned_output())
    for call in ("cuMemAllocFromPoolAsync", "cuLaunchKernelEx"):
        for nth in (1, 2, 3):
            simulated.fail(call, nth)
            with pytest.raises(CudaError, match=f"{call}.*node 7|{call}"):
                kernel.execute(big_operands, [big_output])
            simulated.heal()
            assert kernel.scratch_capacities() == capacities
            output.copy_from(small.poisoned_output())
            kernel.execute(operands, [output])
            small.check_closely(output.numpy())
    kernel.execute(big_operands, [big_output])
    large.check_closely(big_output.numpy())
    assert len(INPUT_NAMES) == 21
