"""The grouped family: plans, compilation without spills, its device code on the CPU, the simulated driver, a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from covering import pairwise
from emulated import machine
from kernel_variants import FACTORS
from plan_runner import Alignment, PlanRunner
from problems import Problem, Recipe, Space, build, first_seed, random_problem
from test_cuda_provider import run

from qmoe_ep import CudaExecutionProvider
from qmoe_ep.call import describe_call
from qmoe_ep.capabilities import Capabilities
from qmoe_ep.kernels import grouped
from qmoe_ep.kernels.plan import Plan
from qmoe_ep.nvrtc_cache import compile_module, compile_modules
from qmoe_ep.runtime import Runtime

HOPPER = Capabilities.for_arch("sm_90a")
# Few multiprocessors, so that a block's share spans experts.
SMALL = replace(HOPPER, multiprocessor_count=5)
SPACE = Space(strided=(False,), most_features=128, layouts=("raw",), leading=((2,), (3,), (2, 3), (19,)))
Array = np.ndarray[Any, Any]

emulated = pytest.mark.skipif(machine.COMPILER is None, reason="g++ is not installed")

VARIANTS = {
    "int4 blocks of 32": Recipe(hidden=256, inter=128, dtype="float16", fusion=0, scale_dtypes=("float16",) * 3),
    "int4 with zero points": Recipe(
        hidden=256, inter=128, dtype="bfloat16", zero_points=(True,) * 3, block_size=16, scale_dtypes=("bfloat16",) * 3
    ),
    "int4 in float32": Recipe(hidden=256, inter=128, block_size=128, biases=(True,) * 3, zero_points=(True,) * 3),
    "int8 by rows": Recipe(hidden=256, inter=128, bits=(8,) * 3, block_size=None, dtype="float16", fusion=2),
    "int3": Recipe(hidden=256, inter=128, bits=(3,) * 3, block_size=16, dtype="bfloat16", zero_points=(True,) * 3),
    "int2, ungated": Recipe(hidden=256, inter=128, bits=(2,) * 3, activation="gelu", fusion=0, dtype="float16"),
    "int1": Recipe(hidden=256, inter=128, bits=(1,) * 3, block_size=64, zero_points=(True,) * 3),
}


def _plan(problem: Problem, capabilities: Capabilities, alignment: Alignment | None = None) -> Plan:
    made = grouped.plan(describe_call(problem.node, problem.inputs), capabilities, alignment)
    assert made is not None
    return made


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_compile_without_spills(name: str, arch: str, rows: int) -> None:
    number = sorted(VARIANTS).index(name)
    if arch != ("sm_80", "sm_90a", "sm_100")[(number + rows // 40) % 3]:
        pytest.skip("another architecture stands for these rows")
    plan = _plan(build(replace(VARIANTS[name], leading=(rows,))), Capabilities.for_arch(arch))
    for step in plan.steps:
        for report in compile_module(step.module, arch).report():
            assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0), step.module.name


def test_what_is_declined_says_why() -> None:
    call = describe_call((problem := build(Recipe(leading=(2,)))).node, problem.inputs)
    assert grouped.decline_reason(call, HOPPER) is None
    assert "older than compute capability 8.0" in str(grouped.decline_reason(call, Capabilities.for_arch("sm_75")))
    assert "no rows" in str(grouped.decline_reason(replace(call, rows=0), HOPPER))
    assert "units of work" in str(grouped.decline_reason(replace(call, rows=2**27, top_k=8), HOPPER))
    for operand in (2, 3):
        assert "aligned" in str(grouped.decline_reason(call, HOPPER, {operand: 2}))
    tight = replace(HOPPER, shared_bytes_per_block_optin=48 << 10)
    assert "don't fit" in str(grouped.decline_reason(call, tight))


def test_many_rows_are_routed_by_many_blocks() -> None:
    few, many = (_plan(build(Recipe(leading=(rows,))), HOPPER) for rows in (128, 129))
    assert [step.entry for step in few.steps[:-3]] == ["grouped_route"]
    assert [step.entry for step in many.steps[:-3]] == ["route", "group_count", "group_assign"]


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + 30))
def test_rows_through_the_provider(simulated: Any, seed: int) -> None:
    problem = random_problem(seed, SPACE)
    with CudaExecutionProvider() as gpu:
        problem.check_closely(run(gpu, problem))


# --- the device code, emulated -------------------------------------------------------------------


def _emulate(problem: Problem, capabilities: Capabilities = SMALL, **options: Any) -> Array:
    call = describe_call(problem.node, problem.inputs)
    output, _ = machine.run_call(
        call, problem.inputs, lambda alignment: _plan(problem, capabilities, alignment), **options
    )
    return output


BASE = Recipe(leading=(11,), hidden=256, inter=96, experts=3, fusion=0, dtype="float16", biases=(True,) * 3)
EMULATED = {
    "int4": BASE,
    "int4, one expert of many tokens": replace(BASE, leading=(70,), experts=1, k=1, dtype="bfloat16"),
    "blocks of 16 in float32": replace(BASE, hidden=144, inter=80, block_size=16, dtype="float32"),
    "rows of int8, ragged": replace(BASE, hidden=104, inter=72, block_size=None, fusion=2, bits=(8, 4, 4)),
    "int3 in float32": replace(BASE, bits=(3, 3, 3), zero_points=(True,) * 3, dtype="float32", fusion=1),
    "int1 and int2": replace(BASE, bits=(1, 2, 1), activation="gelu", block_size=16, zero_points=(True,) * 3),
    "many slots": replace(BASE, leading=(2,), experts=20, k=17, inter=32, bits=(8, 1, 8), fusion=1),
}


@emulated
@pytest.mark.parametrize("name", EMULATED)
def test_emulated(name: str) -> None:
    problem = build(EMULATED[name])
    forward, backward = (_emulate(problem, backwards=order) for order in (False, True))
    problem.check_closely(forward)
    assert forward.tobytes() == backward.tobytes()


@emulated
@pytest.mark.parametrize("kilobytes", [140, 190])
def test_emulated_rows_that_do_not_fit_shared_memory(kilobytes: int) -> None:
    problem = build(replace(BASE, leading=(20,), hidden=768, inter=544, experts=2, dtype="float32"))
    capabilities = replace(SMALL, shared_bytes_per_block_optin=kilobytes << 10)
    problem.check_closely(_emulate(problem, capabilities))


@emulated
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_emulated_non_finite_values_come_out_as_in_the_reference() -> None:
    recipe = replace(BASE, leading=(6,), limit=2.0, router_weights=True, normalize=False, dtype="float32")
    problem = build(recipe)
    x, weights, bias = (problem.inputs[i] for i in (0, 14, 7))
    assert x is not None
    assert weights is not None
    assert bias is not None
    x[0, 3], x[1, 5], x[2, 7] = np.nan, np.inf, -np.inf
    x.view(np.uint32)[5, 3] = 0x7F800001  # a NaN whose upper half is an infinity's
    weights[3:5] = [[0.0], [np.nan]]
    bias[:, 9] = np.inf
    problem.check(_emulate(problem))


@emulated
@pytest.mark.parametrize("magnitude", [1e-30, 1e36])
def test_emulated_magnitudes_that_float32_holds(magnitude: float) -> None:
    problem = build(replace(BASE, activation="identity", bits=(8, 8, 8), biases=(False,) * 3, dtype="float32"))
    assert problem.inputs[0] is not None
    problem.inputs[0][:] *= np.float32(magnitude)
    problem.check(_emulate(problem))


@emulated
def test_emulated_rows_past_valid_rows_are_left_alone() -> None:
    problem = build(BASE)
    whole = _emulate(problem)
    for valid in (-3, 0, 2, 99):
        output, count = _emulate(problem, valid_rows=valid), min(max(valid, 0), 11)
        assert np.isnan(output[count:]).all()
        assert output[:count].tobytes() == whole[:count].tobytes()


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner() -> Iterator[PlanRunner]:
    """One runtime for all, which leaves nothing behind."""
    with Runtime() as runtime:
        yield PlanRunner(runtime)


def _problems() -> list[Problem]:
    """Every pair of compile-time choices that the family serves, and numbers of rows, with several tiles and ends."""
    problems = []
    for seed, row in enumerate(pairwise(FACTORS | {"rows": (2, 5, 9, 33, 130)})):
        activation, fusion, fc3 = row["function"]
        block = row["block_size"]
        biased, routed = row["bias_dtype"] != "none", row["routing_dtype"] != "none"
        gates = (row["bits1"], row["bits2"], row["bits1"])
        points = (row["zero_points1"], row["zero_points2"], row["zero_points1"])
        recipe = Recipe(
            leading=(row["rows"],),
            hidden=6 * max(block, 32) if block else 192,
            inter=5 * max(block, 32) if block else 288,
            experts=5,
            k=1 + seed % 4,
            activation=activation,
            fusion=fusion,
            fc3=fc3,
            bits=gates,
            block_size=block,
            zero_points=points,
            biases=(biased,) * 3,
            dtype=row["dtype"],
            router_dtype=row["router_dtype"],
            scale_dtypes=(row["scale_dtype"],) * 3,
            bias_dtypes=(row["bias_dtype"] if biased else "float32",) * 3,
            router_weights=routed,
            routing_dtype=row["routing_dtype"] if routed else "float32",
            normalize=row["normalize"],
            limit=(None, 1.5)[seed % 2],
            seed=seed,
        )
        problems.append(build(recipe))
    return problems


def _check(runner: PlanRunner, problem: Problem) -> None:
    def make(alignment: Alignment) -> Plan:
        return _plan(problem, runner.runtime.capabilities(), alignment)

    first = runner.run(problem, make)
    problem.check_closely(first)
    assert first.tobytes() == runner.run(problem, make).tobytes()


@pytest.mark.gpu
def test_every_pair_of_choices(runner: PlanRunner) -> None:
    problems = _problems()
    known: Alignment = dict.fromkeys(range(15), 256)
    plans = [_plan(problem, runner.runtime.capabilities(), known) for problem in problems]
    compile_modules(dict.fromkeys(step.module for made in plans for step in made.steps), runner.modules.arch, 16)
    for problem in problems:
        _check(runner, problem)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 7, 16, 60, 300])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_layers_of_real_size(runner: PlanRunner, dtype: str, rows: int) -> None:
    recipe = Recipe(
        leading=(rows,),
        hidden=2880,
        inter=3104,
        experts=6,
        k=3,
        dtype=dtype,
        router_dtype=dtype,
        scale_dtypes=(dtype,) * 3,
        fusion=0,
    )
    _check(runner, build(recipe))
