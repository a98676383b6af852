"""The portable kernels on a GPU, against the reference, at the operator's accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from covering import pairwise
from kernel_variants import FACTORS, FLOATS
from plan_runner import Alignment, PlanRunner
from problems import DTYPES, Problem, Recipe, Space, build, random_problem

from qmoe_ep.call import describe_call
from qmoe_ep.kernels.plan import Plan
from qmoe_ep.kernels.portable import Form, plan
from qmoe_ep.nvrtc_cache import compile_modules
from qmoe_ep.runtime import Runtime

pytestmark = pytest.mark.gpu

RAW = Space(layouts=("raw",), strided=(False,), leading=((3,), (1,), (2, 3), (1, 4), (40,)))
FORMS: tuple[Form, ...] = ("few", "many")


@pytest.fixture(scope="module")
def runner() -> Iterator[PlanRunner]:
    """One runtime for all, which leaves nothing behind."""
    with Runtime() as runtime:
        yield PlanRunner(runtime)


def _plan(runner: PlanRunner, problem: Problem, form: Form | None, alignment: Alignment) -> Plan:
    return plan(describe_call(problem.node, problem.inputs), runner.runtime.capabilities(), alignment, form=form)


def _preload(runner: PlanRunner, cases: Sequence[tuple[Problem, Form | None]], alignment: int = 256) -> None:
    """Compile everything that the cases need, side by side."""
    known: Alignment = dict.fromkeys(range(15), alignment)
    plans = [_plan(runner, problem, form, known) for problem, form in cases]
    compile_modules(dict.fromkeys(step.module for made in plans for step in made.steps), runner.modules.arch, 16)


def _check(runner: PlanRunner, problem: Problem, form: Form | None, offset: int = 0) -> None:
    run = partial(runner.run, problem, partial(_plan, runner, problem, form), offset=offset)
    first = run()
    problem.check(first)
    assert first.tobytes() == run().tobytes()


def _variants() -> list[Problem]:
    """Every pair of compile-time choices and numbers of rows, in sizes with several tiles and ragged ends."""
    factors = FACTORS | {"rows": (1, 2, 5, 33, 130)}
    problems = []
    for seed, row in enumerate(pairwise(factors)):
        activation, fusion, fc3 = row["function"]
        block = row["block_size"]
        biased, routed = row["bias_dtype"] != "none", row["routing_dtype"] != "none"
        recipe = Recipe(
            leading=(row["rows"],),
            hidden=3 * block if block else 193 - row["odd"],
            inter=5 * block if block else 305 - row["odd"],
            experts=5,
            k=1 + seed % 4,
            activation=activation,
            fusion=fusion,
            fc3=fc3,
            bits=(row["bits1"], row["bits2"], row["bits3"]),
            block_size=block,
            zero_points=(row["zero_points1"], row["zero_points2"], row["zero_points3"]),
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


def test_every_pair_of_choices(runner: PlanRunner) -> None:
    cases = [(problem, form) for problem in _variants() for form in FORMS]
    _preload(runner, cases)
    for problem, form in cases:
        _check(runner, problem, form)


def test_random_problems(runner: PlanRunner) -> None:
    cases = [(random_problem(seed, RAW), form) for seed in range(60) for form in FORMS]
    _preload(runner, cases)
    for problem, form in cases:
        _check(runner, problem, form)


def test_operands_aligned_to_their_element_only(runner: PlanRunner) -> None:
    cases = [
        (build(Recipe(bits=(bits, bits, bits), dtype=dtype, leading=(9,), zero_points=(True,) * 3)), form)
        for bits, dtype in ((4, "float32"), (8, "float16"), (2, "bfloat16"), (1, "float16"), (3, "float32"))
        for form in FORMS
    ]
    for problem, form in cases:
        _check(runner, problem, form, offset=1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_selection_of_any_bit_pattern(runner: PlanRunner, dtype: str) -> None:
    rng = np.random.default_rng(7)
    unsigned = np.dtype(f"u{DTYPES[dtype].itemsize}")
    for experts, k in ((70, 33), (1200, 5), (8, 8)):
        recipe = Recipe(leading=(9,), hidden=16, inter=16, block_size=16, experts=experts, k=k, router_dtype=dtype)
        problem = build(replace(recipe, router_weights=True))
        bits = rng.integers(0, np.iinfo(unsigned).max, (9, experts), unsigned, endpoint=True)
        bits[0] = np.iinfo(unsigned).max  # negative NaN everywhere
        bits[1, : experts // 2] = np.iinfo(unsigned).max
        bits[2] %= 4
        problem.inputs[1] = bits.view(DTYPES[dtype])
        for form in FORMS:
            _check(runner, problem, form)


@pytest.mark.parametrize("form", FORMS)
def test_rows_past_valid_rows_are_left_alone(runner: PlanRunner, form: Form) -> None:
    problem = build(Recipe(leading=(12,)))
    whole = runner.run(problem, partial(_plan, runner, problem, form))
    for valid in (0, 7):
        output = runner.run(problem, partial(_plan, runner, problem, form), valid_rows=valid)
        assert np.isnan(output[valid:]).all()
        assert output[:valid].tobytes() == whole[:valid].tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_non_finite_values_come_out_as_in_the_reference(runner: PlanRunner, form: Form) -> None:
    for activation, fusion in (("relu", 0), ("gelu", 0), ("silu", 0), ("swiglu", 1)):
        recipe = Recipe(leading=(6,), activation=activation, fusion=fusion, limit=2.0, router_weights=True)
        problem = build(replace(recipe, normalize=False, biases=(True,) * 3))
        inputs = [array if array is not None else np.empty(0) for array in problem.inputs]
        inputs[0][0, 3], inputs[0][1, 5], inputs[0][2, 7] = np.nan, np.inf, -np.inf
        inputs[14][3:5] = [[0.0], [np.nan]]
        inputs[7][:, 9] = np.inf
        _check(runner, problem, form)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layers_of_real_size(runner: PlanRunner, dtype: str) -> None:
    shape = Recipe(hidden=2048, inter=1408, experts=8, k=6, dtype=dtype, router_dtype=dtype, scale_dtypes=(dtype,) * 3)
    cases: list[tuple[Problem, Form | None]] = [
        (build(replace(shape, leading=(1,))), None),
        (build(replace(shape, leading=(3,), hidden=2880, inter=2880, k=4, biases=(True,) * 3, limit=7.0)), None),
        (build(replace(shape, leading=(150,))), None),
    ]
    _preload(runner, cases)
    for problem, form in cases:
        _check(runner, problem, form)
