"""Plans of the portable kernels, and their device code executed on the CPU and by the simulated driver."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from emulated import machine
from hypothesis import given, settings
from plan_runner import PlanRunner
from problems import DTYPES, Problem, Recipe, Space, build, problems, random_problem
from simulated import kernels_portable  # noqa: F401  registers the kernels
from simulated.plugin import Simulation

from qmoe_ep import reference
from qmoe_ep.call import CallDescription, describe_call
from qmoe_ep.capabilities import Capabilities
from qmoe_ep.errors import QMoEError
from qmoe_ep.kernels import portable, route
from qmoe_ep.kernels.portable import Form, plan
from qmoe_ep.routing import route as reference_route
from qmoe_ep.runtime import Runtime

RAW = Space(layouts=("raw",), strided=(False,), leading=((3,), (1,), (2, 3), (1, 4), (40,)))
H200 = Capabilities.for_arch("sm_90a")
FORMS: tuple[Form, ...] = ("few", "many")
Array = np.ndarray[Any, Any]

emulated = pytest.mark.skipif(machine.COMPILER is None, reason="g++ is not installed")


def _call(problem: Problem) -> CallDescription:
    return describe_call(problem.node, problem.inputs)


# --- plans ---------------------------------------------------------------------------------------


@given(problems(replace(RAW, leading=((1,), (3,), (0,), (40,)))))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_plans_are_complete(problem: Problem) -> None:
    call = _call(problem)
    made = plan(call, H200)
    if not call.rows:
        assert made.steps == ()
        return
    slots = {slot for slot, nbytes in made.scratch if nbytes > 0}
    assert len(slots) == len(made.scratch)
    operands = {i for i, operand in enumerate(problem.inputs) if operand is not None}
    used: set[object] = set()
    for step in made.steps:
        fields = {field for field, *_ in step.arguments._fields_}
        for field, source in step.pointers:
            assert field in fields
            assert getattr(step.arguments, field) is None
            assert isinstance(source, int) or source in slots | {"output", "valid_rows", "telemetry"}
            used.add(source)
        assert step.entry in step.module.entries
        assert 1 <= step.grid[0] < 2**31
        assert step.block[0] % 32 == 0
    assert operands | slots | {"output", "valid_rows", "telemetry"} <= used


def test_modules_with_one_name_are_one_module() -> None:
    seen: dict[str, str] = {}
    for seed in range(150):
        call = _call(random_problem(seed, RAW))
        for form in FORMS:
            for alignment in ({}, dict.fromkeys(range(15), 4)):
                for step in plan(call, H200, alignment, form=form).steps:
                    assert seen.setdefault(step.module.name, step.module.source) == step.module.source
    assert len(set(seen.values())) == len(seen)


def test_scratch_is_linear_in_routes() -> None:
    sizes = []
    for rows in (1000, 2000, 3000):
        made = plan(_call(build(Recipe(leading=(rows,), k=3))), H200, form="many")
        sizes.append(sum(nbytes for _, nbytes in made.scratch))
    assert abs((sizes[2] - sizes[1]) - (sizes[1] - sizes[0])) <= 64


def test_form_follows_the_tokens_per_expert() -> None:
    one, many = _call(build(Recipe(leading=(1,)))), _call(build(Recipe(leading=(40,))))
    assert portable.choose_form(one)[0] == "few"
    assert portable.choose_form(many)[0] == "many"
    later = replace(many, node=replace(many.node, prefill_min_tokens=21))
    assert portable.choose_form(later)[0] == "few"
    assert "tokens per expert" in plan(many, H200).reason


@pytest.mark.parametrize(
    ("hidden", "bits", "alignment", "expected"),
    [(64, 4, 16, 8), (64, 8, 16, 16), (64, 8, 4, 4), (16, 1, 16, 2), (63, 4, 16, 8), (63, 3, 16, 2), (62, 4, 16, 1)],
)
def test_loads_are_no_wider_than_rows_are_aligned(hidden: int, bits: int, alignment: int, expected: int) -> None:
    block = 16 if hidden % 16 == 0 else None
    recipe = Recipe(leading=(1,), hidden=hidden, inter=64, bits=(bits, 4, 4), block_size=block)
    made = plan(_call(build(recipe)), H200, {2: alignment})
    assert f"_l{expected}" in made.steps[1].module.name


def test_old_devices_are_refused() -> None:
    with pytest.raises(QMoEError, match=r"compute capability 7\.0, expected 7\.5"):
        plan(_call(build(Recipe())), replace(H200, compute_capability=(7, 0)))


def test_sizes_beyond_the_index_types_are_refused() -> None:
    call = _call(build(Recipe()))
    with pytest.raises(QMoEError, match="split the rows"):
        plan(replace(call, rows=2**31), H200)
    wide = replace(call.experts, hidden_size=2**30 + 1)
    with pytest.raises(QMoEError, match="hidden size H"):
        plan(replace(call, experts=wide), H200)


def test_grids_stay_within_the_device_for_any_call() -> None:
    call = replace(_call(build(Recipe())), rows=2**29, top_k=3)
    for form in FORMS:
        assert all(1 <= step.grid[0] < 2**31 for step in plan(call, H200, form=form).steps)


# --- by the simulated driver ---------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_simulated_driver(simulated: Simulation, form: Form) -> None:
    with Runtime() as runtime:
        runner = PlanRunner(runtime)
        for seed in range(12):
            problem = random_problem(seed, RAW)
            problem.check(runner.run(problem, partial(_plan_with, _call(problem), form)))


def test_simulated_driver_leaves_invalid_rows(simulated: Simulation) -> None:
    problem = build(Recipe(leading=(5,)))
    with Runtime() as runtime:
        for form in FORMS:
            output = PlanRunner(runtime).run(problem, partial(_plan_with, _call(problem), form), valid_rows=2)
            assert np.isnan(output[2:]).all()
            assert not np.isnan(output[:2]).any()


def _plan_with(call: CallDescription, form: Form, alignment: dict[int | str, int]) -> Any:
    return plan(call, H200, alignment, form=form)


# --- the device code, emulated -------------------------------------------------------------------


def _emulate(problem: Problem, form: Form, **options: Any) -> Array:
    call = _call(problem)
    output, _ = machine.run_call(call, problem.inputs, partial(_plan_with, call, form), **options)
    return output


@emulated
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(6))
def test_emulated(seed: int, form: Form) -> None:
    problem = random_problem(100 + seed, replace(RAW, most_features=96, leading=((3,), (1,), (2, 3), (20,))))
    forward, backward = (_emulate(problem, form, backwards=order) for order in (False, True))
    problem.check(forward)
    assert forward.tobytes() == backward.tobytes()


@emulated
@pytest.mark.parametrize("form", FORMS)
def test_emulated_tiles_of_both_sizes_and_many_slots(form: Form) -> None:
    shape = Recipe(hidden=144, inter=80, block_size=16, biases=(True,) * 3, zero_points=(True,) * 3)
    one_expert = build(replace(shape, leading=(70,), experts=1, k=1, dtype="float16", bits=(4, 3, 4)))
    one_expert.check(_emulate(one_expert, form))
    many_slots = build(replace(shape, leading=(2,), experts=20, k=17, inter=16, bits=(8, 1, 4)))
    many_slots.check(_emulate(many_slots, form))


@emulated
@pytest.mark.parametrize("form", FORMS)
def test_emulated_non_finite_values_come_out_as_in_the_reference(form: Form) -> None:
    for activation, fusion in (("relu", 0), ("swiglu", 1)):
        recipe = Recipe(leading=(6,), activation=activation, fusion=fusion, limit=2.0, router_weights=True)
        problem = build(replace(recipe, normalize=False, biases=(True,) * 3))
        problem.inputs[0][0, 3], problem.inputs[0][1, 5], problem.inputs[0][2, 7] = np.nan, np.inf, -np.inf  # type: ignore[index]
        problem.inputs[14][3:5] = [[0.0], [np.nan]]  # type: ignore[index]
        problem.inputs[7][:, 9] = np.inf  # type: ignore[index]
        problem.check(_emulate(problem, form))


@emulated
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("magnitude", [1e-30, 1e36])
def test_emulated_magnitudes_that_float32_holds(form: Form, magnitude: float) -> None:
    problem = build(Recipe(leading=(5,), activation="identity", fusion=0, bits=(8, 8, 8)))
    problem.inputs[0][:] *= np.float32(magnitude)  # type: ignore[index]
    problem.check(_emulate(problem, form))


@emulated
@pytest.mark.parametrize("form", FORMS)
def test_emulated_rows_past_valid_rows_are_left_alone(form: Form) -> None:
    problem = build(Recipe(leading=(5,)))
    for valid in (-3, 0, 2, 9):
        output = _emulate(problem, form, valid_rows=valid)
        count = min(max(valid, 0), 5)
        assert np.isnan(output[count:]).all()
        if count:
            errors = reference.row_errors(output[:count], problem.expected[:count], problem.magnitudes[:count])
            assert errors.max() <= problem.tolerance


def _emulate_routing(problem: Problem, arch: int) -> tuple[Array, Array]:
    """Experts and weights that the route kernel writes."""
    call = _call(problem)
    whole = plan(call, H200, form="few")
    routing = replace(whole, scratch=route.route_scratch(call), steps=whole.steps[:1])
    _, scratch = machine.run_call(call, problem.inputs, lambda alignment: routing, arch=arch)
    tables = (scratch["route_experts"].array.view(np.int32), scratch["route_weights"].array.view(np.float32))
    experts, weights = (table[: call.routes].reshape(call.rows, call.top_k) for table in tables)
    return experts, weights


@emulated
@pytest.mark.parametrize("arch", [750, 900])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_emulated_selection_of_any_bit_pattern(dtype: str, arch: int) -> None:
    rng = np.random.default_rng(3)
    for experts, k in ((70, 1), (70, 33), (70, 70), (1500, 40), (1, 1)):
        problem = build(
            Recipe(leading=(6,), hidden=16, inter=16, block_size=16, experts=experts, k=k, router_dtype=dtype)
        )
        unsigned = np.dtype(f"u{DTYPES[dtype].itemsize}")
        bits = rng.integers(0, np.iinfo(unsigned).max, (6, experts), unsigned, endpoint=True)
        bits[0] = np.iinfo(unsigned).max  # negative NaN everywhere
        bits[1, : experts // 2] = np.iinfo(unsigned).max
        bits[2] = 0
        bits[3] %= 4
        problem.inputs[1] = bits.view(DTYPES[dtype])
        selected, weights = _emulate_routing(problem, arch)
        expected, expected_weights = reference_route(problem.inputs[1], None, top_k=k, normalize=True)
        np.testing.assert_array_equal(selected, expected)
        np.testing.assert_array_equal(np.isnan(weights), np.isnan(expected_weights))


@emulated
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("routing", ["none", "float32", "bfloat16"])
def test_emulated_weights(routing: str, normalize: bool) -> None:
    recipe = Recipe(leading=(7,), hidden=16, inter=16, block_size=16, experts=50, k=37, normalize=normalize)
    if routing != "none":
        recipe = replace(recipe, router_weights=True, routing_dtype=routing)
    problem = build(recipe)
    logits = problem.inputs[1]
    assert logits is not None
    logits[1], logits[2, 7], logits[3, 9], logits[4, 11] = -np.inf, np.inf, np.nan, -np.inf
    logits[5] *= 30
    if routing != "none":
        problem.inputs[14][6] = 0  # type: ignore[index]
    _, weights = _emulate_routing(problem, 900)
    _, expected = reference_route(
        logits, problem.inputs[14] if routing != "none" else None, top_k=37, normalize=normalize
    )
    np.testing.assert_allclose(weights, expected, rtol=3e-6, atol=1e-38)
