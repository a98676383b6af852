"""The CUDA provider on a GPU: the whole matrix of layouts against the reference, and its promises under replay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import CASES
from kernel_variants import FUNCTIONS
from problems import Problem, Recipe, build
from test_cuda_provider import WEIGHTS, activations_of, check_stored_case, on_device, run, weights_of

import qmoe_ep
from qmoe_ep import CudaExecutionProvider
from qmoe_ep.telemetry import RouteTelemetryConfig

pytestmark = pytest.mark.gpu

MODELS = Path(__file__).parent / "data" / "models"
ROWS = (1, 2, 5, 33, 130)
ROUNDED = {"float32": 8e-6, "float16": 1e-3, "bfloat16": 8e-3}


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaExecutionProvider]:
    with CudaExecutionProvider() as provider:
        yield provider


def first_rows(problem: Problem, rows: int) -> Problem:
    """The same problem with its leading rows only; the reference is computed once, for all of them."""
    inputs = [value if value is None or i in WEIGHTS else value[:rows] for i, value in enumerate(problem.inputs)]
    part = replace(problem, recipe=replace(problem.recipe, leading=(rows,)), inputs=inputs)
    part.__dict__["expected"], part.__dict__["magnitudes"] = problem.expected[:rows], problem.magnitudes[:rows]
    return part


def check(problem: Problem, actual: np.ndarray[Any, Any], variant: str) -> None:
    """At the operator's accuracy, and near the true row: prefill kernels may round dequantized weights once."""
    if variant != "prefill":
        problem.check_closely(actual)
        return
    problem.check(actual)
    got, want = actual.astype(np.float64), problem.expected
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    # Codes of one bit have values of one sign, so that twice as much of a sum cancels.
    assert error.max() <= ROUNDED[problem.recipe.dtype] * (2 if 1 in problem.recipe.bits else 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("block_size", [None, 16, 32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("part", [0, 1])
def test_every_layout(gpu: CudaExecutionProvider, part: int, bits: int, block_size: int | None, dtype: str) -> None:
    """Both parts together have every function with and without zero points; each by itself has half of that."""
    for number, (activation, fusion, fc3) in enumerate(FUNCTIONS):
        zero_points = bool((number + part + bits + len(dtype)) % 2)
        recipe = Recipe(
            leading=(max(ROWS),),
            hidden=256,
            inter=128,
            experts=8,
            k=2 + number % 3,
            activation=activation,
            fusion=fusion,
            fc3=fc3,
            bits=(bits,) * 3,
            block_size=block_size,
            zero_points=(zero_points,) * 3,
            biases=(zero_points,) * 3,
            dtype=dtype,
            router_dtype=dtype,
            scale_dtypes=(dtype if number % 2 else "float32",) * 3,
            bias_dtypes=(dtype,) * 3,
            normalize=bool(number % 2),
            alpha=1.702 if number == 1 else 1.0,
            beta=1.0 if number == 1 else 0.0,
            limit=7.0 if number == 1 else None,
            seed=number,
        )
        problem = build(recipe)
        kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
        for rows in ROWS:
            check_rows(gpu, kernel, first_rows(problem, rows))
        kernel.close()


def check_rows(gpu: CudaExecutionProvider, kernel: Any, problem: Problem) -> None:
    """Right, and the same bits eagerly, replayed, and with telemetry armed."""
    operands = on_device(gpu, activations_of(problem))
    output = gpu.to_device(problem.poisoned_output())
    kernel.execute(operands, [output])
    eager = output.numpy()
    check(problem, eager, kernel.plan(operands, [output]).variant)
    kernel.telemetry.arm(RouteTelemetryConfig(problem.recipe.experts, problem.recipe.k, mode="counts"))
    output.copy_from(problem.poisoned_output())
    kernel.execute(operands, [output])
    assert output.numpy().tobytes() == eager.tobytes()
    with gpu.capture() as capture:
        kernel.execute(operands, [output])
    kernel.telemetry.disarm()
    for _ in range(2):
        output.copy_from(problem.poisoned_output())
        capture.graph.replay()
        assert output.numpy().tobytes() == eager.tobytes()
    capture.graph.close()


@pytest.mark.parametrize("name", CASES)
def test_stored_cases(gpu: CudaExecutionProvider, name: str) -> None:
    actual, expected = check_stored_case(gpu, name)
    norms = np.linalg.norm(expected.reshape(-1, expected.shape[-1]), axis=1)
    limit = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}[actual.dtype.name]
    assert qmoe_ep.reference.row_errors(actual, expected, norms).max() <= limit


@pytest.mark.parametrize(
    ("hidden", "inter", "experts", "k", "rows"),
    [
        (2048, 768, 16, 8, 1),
        (2880, 2880, 4, 4, 1),
        (2048, 1408, 8, 6, 4),
        (2880, 544, 8, 2, 64),
        (4096, 1024, 4, 2, 300),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_layers_of_real_models(
    gpu: CudaExecutionProvider, dtype: str, hidden: int, inter: int, experts: int, k: int, rows: int
) -> None:
    recipe = Recipe(
        leading=(rows,),
        hidden=hidden,
        inter=inter,
        experts=experts,
        k=k,
        dtype=dtype,
        router_dtype=dtype,
        scale_dtypes=(dtype,) * 3,
        fusion=0,
    )
    problem = build(recipe)
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    check_rows(gpu, kernel, problem)
    kernel.close()


@pytest.mark.parametrize("pattern", [0xFFFF, 0x7E00, 0xFC00, 0x7C00, 0x8000])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_any_bit_pattern_of_logits(gpu: CudaExecutionProvider, pattern: int, rows: int) -> None:
    problem = build(Recipe(leading=(rows,), experts=40, k=10, dtype="float16", router_dtype="float16"))
    logits = np.full((rows, 40), pattern, np.uint16).view(np.float16)
    problem = replace(problem, inputs=[problem.inputs[0], logits, *problem.inputs[2:]])
    actual = run(gpu, problem)
    assert (np.isnan(actual) == np.isnan(problem.expected)).all()


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sanitizer_subset(gpu: CudaExecutionProvider, dtype: str, rows: int) -> None:
    """Every kernel of every family once, small enough to run under a memory checker."""
    for bits, block_size, fusion, odd in ((4, 32, 0, 0), (3, 16, 1, 0), (8, None, 2, 1)):
        recipe = Recipe(
            leading=(rows,),
            hidden=128 + odd,
            inter=96 + odd,
            experts=9,
            k=3,
            fusion=fusion,
            bits=(bits,) * 3,
            block_size=block_size,
            zero_points=(True, False, True),
            biases=(True, True, True),
            dtype=dtype,
            router_dtype=dtype,
            logits="special" if bits == 3 else "normal",
        )
        problem = build(recipe)
        kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
        kernel.telemetry.arm(RouteTelemetryConfig(9, 3, mode="trace", margins=True))
        operands, output = on_device(gpu, activations_of(problem)), gpu.to_device(problem.poisoned_output())
        kernel.execute(operands, [output])
        check(problem, output.numpy(), kernel.plan(operands, [output]).variant)
        snapshot, logits = kernel.telemetry.snapshot(), problem.inputs[1].reshape(rows, 9)
        chosen = qmoe_ep.routing.select_experts(logits, 3)
        assert snapshot.rows == rows
        np.testing.assert_array_equal(snapshot.trace, chosen)
        np.testing.assert_array_equal(snapshot.margins, qmoe_ep.routing.logit_margins(logits, chosen))
        kernel.close()


def test_counts_stay_exact_over_a_hundred_thousand_replays(gpu: CudaExecutionProvider) -> None:
    problem = build(Recipe(leading=(2,), dtype="float16", router_dtype="float16", experts=8, k=2))
    kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
    operands, output = on_device(gpu, activations_of(problem)), gpu.to_device(problem.poisoned_output())
    kernel.telemetry.arm(RouteTelemetryConfig(8, 2, mode="counts"))
    kernel.execute(operands, [output])
    with gpu.capture() as capture:
        kernel.execute(operands, [output])
    kernel.telemetry.reset_boundary()
    gpu.synchronize()
    before = gpu.memory_statistics()
    for _ in range(100_000):
        capture.graph.replay()
    snapshot = kernel.telemetry.snapshot()
    assert gpu.memory_statistics() == before
    chosen = qmoe_ep.routing.select_experts(problem.inputs[1], 2)
    assert snapshot.rows == 200_000
    assert snapshot.routes == 400_000
    assert np.asarray(snapshot.counts).tolist() == (np.bincount(chosen.reshape(-1), minlength=8) * 100_000).tolist()
    capture.graph.close()
    kernel.telemetry.disarm()
    kernel.close()


def test_torch_and_cupy_tensors_and_captures() -> None:
    torch = pytest.importorskip("torch")
    problem = build(Recipe(leading=(2,), dtype="bfloat16", router_dtype="float16"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), CudaExecutionProvider(stream=stream.cuda_stream) as gpu:
        kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
        x, router = (torch.from_dlpack(gpu.to_device(np.ascontiguousarray(problem.inputs[i]))) for i in (0, 1))
        output = torch.full_like(x, float("nan"))
        kernel.execute([x, router], [output])
        eager = output.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kernel.execute([x, router], [output])
        kernel.close()
        del kernel
        gc.collect()
        output.fill_(float("nan"))
        graph.replay()
        stream.synchronize()
        assert torch.equal(output, eager)
        problem.check_closely(gpu.view(output.data_ptr(), tuple(output.shape), problem.inputs[0].dtype, output).numpy())
        del graph, x, router, output
        gc.collect()


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".inputs.npz") for path in MODELS.rglob("*.inputs.npz")))
def test_models(gpu: CudaExecutionProvider, name: str) -> None:
    """Whole model files, external data and the SM80 layout included."""
    folder = next(MODELS.rglob(f"{name}.onnx")).parent
    inputs = dict(np.load(folder / f"{name}.inputs.npz"))
    expected = dict(np.load(folder / f"{name}.expected.npz"))
    results = qmoe_ep.onnx.run_model(qmoe_ep.onnx.load_model(folder / f"{name}.onnx"), inputs, gpu)
    for key, value in results.items():
        want = expected[key].astype(np.float64)
        error = np.linalg.norm(value.astype(np.float64) - want) / np.linalg.norm(want)
        assert error <= {"float32": 2e-6, "float16": 1e-3}[value.dtype.name]
