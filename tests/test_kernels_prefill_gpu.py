"""The prefill kernels on a GPU against the reference: widths, blocks, types, functions, skewed routing, size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import covering
import numpy as np
import pytest
from plan_runner import Alignment, PlanRunner
from problems import Problem, Recipe, build
from test_cuda_provider import on_device, weights_of
from test_kernels_prefill import check_rows

from qmoe_ep import CudaExecutionProvider
from qmoe_ep.call import describe_call
from qmoe_ep.kernels import prefill
from qmoe_ep.kernels.plan import Plan
from qmoe_ep.nvrtc_cache import compile_modules
from qmoe_ep.runtime import Runtime

pytestmark = pytest.mark.gpu

FACTORS = {
    "bits": (4, 8, 3, 2, 1),
    "block_size": (32, 16, 64, 128, None),
    "zero_points": (False, True),
    "dtype": ("bfloat16", "float16"),
    "scale_dtype": ("bfloat16", "float16", "float32"),
    "function": (
        ("swiglu", 1, False),
        ("swiglu", 2, False),
        ("swiglu", 0, True),
        ("silu", 0, True),
        ("silu", 0, False),
        ("relu", 0, False),
        ("gelu", 0, False),
        ("identity", 0, False),
    ),
    "rows": (130, 512),
    "routing": ("spread", "one expert", "Zipf", "one token each"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[PlanRunner]:
    """One runtime for all, on a device that the kernels are for."""
    with Runtime() as runtime:
        if runtime.capabilities().compute_capability != (9, 0):
            pytest.skip("the prefill kernels are for compute capability 9.0")
        yield PlanRunner(runtime)


def _problem(row: dict[str, object]) -> Problem:
    """One combination of factors; routing is bent by changing the logits."""
    activation, fusion, fc3 = row["function"]  # type: ignore[misc]
    each = row["routing"] == "one token each"
    rows, points = int(row["rows"]), bool(row["zero_points"])  # type: ignore[call-overload]
    recipe = Recipe(
        leading=(rows,),
        hidden=256,
        inter=384,
        experts=rows if each else 7,
        k=1 if each or row["routing"] == "one expert" else 3,
        activation=activation,
        fusion=fusion,
        fc3=fc3,
        bits=(row["bits"],) * 3,  # type: ignore[arg-type]
        block_size=row["block_size"],  # type: ignore[arg-type]
        zero_points=(points,) * 3,
        biases=(points,) * 3,
        dtype=str(row["dtype"]),
        scale_dtypes=(str(row["scale_dtype"]),) * 3,
    )
    if each:
        recipe = replace(recipe, hidden=128, inter=128)
    problem = build(recipe)
    logits = problem.inputs[1]
    assert logits is not None
    if row["routing"] == "one expert":
        logits[:, 4] = 50
    elif row["routing"] == "Zipf":
        logits -= 2 * np.log(np.arange(1, 8, dtype=np.float32))
    elif each:
        logits[np.arange(rows), (7 * np.arange(rows) + 3) % rows] = 50
    return problem


def test_every_pair_of_choices(runner: PlanRunner) -> None:
    capabilities = runner.runtime.capabilities()
    problems = [_problem(row) for row in covering.pairwise(FACTORS)]
    calls = [describe_call(problem.node, problem.inputs) for problem in problems]
    plans = [prefill.plan(call, capabilities) for call in calls]
    compile_modules(dict.fromkeys(s.module for made in plans if made for s in made.steps), runner.modules.arch, 16)
    wrong = []
    for problem, call in zip(problems, calls, strict=True):

        def make(alignment: Alignment, call: object = call) -> Plan:
            made = prefill.plan(call, capabilities, alignment)  # type: ignore[arg-type]
            assert made is not None
            return made

        first, second = (runner.run(problem, make) for _ in range(2))
        try:
            check_rows(problem, first)
            assert first.tobytes() == second.tobytes(), problem.recipe
        except AssertionError as error:
            wrong.append(str(error)[:2000])
    assert not wrong, f"{len(wrong)} of {len(problems)} problems\n" + "\n".join(wrong)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_more_than_two_to_the_31_elements(runner: PlanRunner, dtype: str) -> None:
    assert runner
    recipe = Recipe(leading=(250,), hidden=7168, inter=256, experts=8, k=8, dtype=dtype, scale_dtypes=(dtype,) * 3)
    problem, repeats = build(recipe), 224
    with CudaExecutionProvider(scratch_limit=64 << 30) as gpu:
        kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
        operands = on_device(gpu, [np.tile(array, (repeats, 1)) for array in problem.inputs[:2] if array is not None])
        output = gpu.to_device(np.full((repeats * 250, 7168), np.nan, operands[0].dtype))
        plan = kernel.plan(operands, [output])
        assert plan.variant == "prefill"
        assert dict(plan.scratch)["contributions"] > 4 * 2**31
        kernel.execute(operands, [output])
        rows = output.numpy().reshape(repeats, 250, 7168)
        kernel.close()
    check_rows(problem, rows[0])
    assert (rows.view(np.uint16) == rows[:1].view(np.uint16)).all()
