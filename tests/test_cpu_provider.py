"""The CPU provider against the reference, and what its kernels promise about operands, outputs and failures."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import golden
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import DTYPES, Array, Problem, Recipe, Space, build, first_seed, problems, random_problem, strided_view

from qmoe_ep import CpuExecutionProvider, QMoEError, QMoENode, reference
from qmoe_ep.operator import INPUT_NAMES

PROVIDER = CpuExecutionProvider()
TORN = DTYPES["float32"].type(-77.5)


def weights_of(problem: Problem) -> dict[int, Array]:
    """The operands that are constant over a model's life."""
    return {i: a for i, a in enumerate(problem.inputs) if a is not None and 2 <= i < 14}


def call_inputs(problem: Problem) -> list[Array | None]:
    return [a if i < 2 or i == 14 else None for i, a in enumerate(problem.inputs)]


def run(problem: Problem) -> Array:
    """Execute into a poisoned output."""
    output = problem.poisoned_output()
    kernel = PROVIDER.create_kernel(problem.node, node_id=1, weights_layout=problem.weights_layout)
    kernel.execute(problem.inputs, [output])
    return output


# --- against the reference ---------------------------------------------------------------------------


@given(problems())
@settings(max_examples=300)
def test_random_problems(problem: Problem) -> None:
    problem.check_closely(run(problem))


@pytest.mark.parametrize("part", range(4))
def test_seeded_problems(part: int) -> None:
    first = first_seed() + 100 * part
    for seed in range(first, first + 100):
        problem = random_problem(seed)
        try:
            problem.check_closely(run(problem))
        except Exception as error:
            raise AssertionError(f"random_problem({seed})") from error


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_longer_sums(bits: int, dtype: str) -> None:
    recipe = Recipe(leading=(5,), hidden=1024, inter=512, bits=(bits,) * 3, dtype=dtype, zero_points=(True,) * 3)
    problem = build(recipe)
    problem.check_closely(run(problem))


@pytest.mark.parametrize("name", golden.CASES)
def test_stored_case(name: str) -> None:
    case = golden.load(name)
    result = PROVIDER.create_kernel(case.node)(*case.inputs)
    expected = case.exact if case.specified is None else case.specified
    if name == "route_ties_partial":  # what was stored takes the larger index among equals
        expected = reference.qmoe(case.node, case.inputs)
    x = case.inputs[0]
    assert x is not None
    assert (result.dtype, result.shape) == (x.dtype, x.shape)
    errors = reference.row_errors(result, expected, np.linalg.norm(expected.reshape(-1, x.shape[-1]), axis=1))
    assert errors.max() <= {"float32": 1e-6, "float16": 6e-4, "bfloat16": 4e-3}[str(x.dtype)]


def test_stored_ties_but_for_the_order() -> None:
    case = golden.load("route_ties_partial")
    flipped = [
        None if a is None else (a if i == 0 else np.flip(a, 1 if i == 1 else 0)) for i, a in enumerate(case.inputs)
    ]
    result = PROVIDER.create_kernel(case.node)(*flipped)
    norms = np.linalg.norm(case.exact, axis=1)
    assert reference.row_errors(result, case.exact, norms).max() <= 1e-6


# --- how operands are given --------------------------------------------------------------------------


@given(problems())
@settings(max_examples=60)
def test_every_way_of_giving_a_problem_gives_the_same_bits(problem: Problem) -> None:
    expected = run(problem).tobytes()
    layout = problem.weights_layout
    assert run(problem).tobytes() == expected
    from_model = PROVIDER.create_kernel(problem.node_proto(), node_id=7, weights_layout=layout)
    assert from_model(*problem.inputs).tobytes() == expected
    constant = PROVIDER.create_kernel(problem.node, initializers=weights_of(problem), weights_layout=layout)
    for _ in range(2):
        assert constant(*call_inputs(problem)).tobytes() == expected
    some = {i: a for i, a in weights_of(problem).items() if i % 2}
    partly = PROVIDER.create_kernel(problem.node, initializers=some, weights_layout=layout)
    assert partly(*[None if i in some else a for i, a in enumerate(problem.inputs)]).tobytes() == expected
    padded = [*problem.inputs, *[None] * (21 - len(problem.inputs))]
    assert from_model(*padded).tobytes() == expected


@given(problems(Space(strided=(False,))), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_strides_change_no_bit(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    strided = replace(problem, inputs=[None if a is None else strided_view(a, rng) for a in problem.inputs])
    output = strided_view(problem.poisoned_output(), rng)
    kernel = PROVIDER.create_kernel(problem.node, weights_layout=problem.weights_layout)
    kernel.execute(strided.inputs, [output])
    assert output.tobytes() == run(problem).tobytes()


def test_broadcast_operands() -> None:
    problem = build(Recipe(leading=(5,), experts=3, biases=(True, True, True)))
    inputs = list(problem.inputs)
    for index in (0, 2, 4):
        operand = inputs[index]
        assert operand is not None
        inputs[index] = np.broadcast_to(operand[:1], operand.shape)
    broadcast = replace(problem, inputs=inputs)
    broadcast.check_closely(run(broadcast))


def test_operands_are_left_alone() -> None:
    problem = build(Recipe(biases=(True,) * 3, zero_points=(True,) * 3, router_weights=True))
    before = [None if a is None else a.copy() for a in problem.inputs]
    for array in problem.inputs:
        if array is not None:
            array.flags.writeable = False
    run(problem)
    for array, copy in zip(problem.inputs, before, strict=True):
        if array is not None:
            np.testing.assert_array_equal(array, copy)


def test_the_output_may_be_the_input() -> None:
    problem = build(Recipe(leading=(2, 3)))
    expected = run(problem)
    x = problem.inputs[0]
    assert x is not None
    PROVIDER.create_kernel(problem.node).execute(problem.inputs, [x])
    np.testing.assert_array_equal(x, expected)


def test_one_kernel_takes_changing_shapes_and_dtypes() -> None:
    recipe = Recipe(experts=4, k=2)
    kernel = PROVIDER.create_kernel(build(recipe).node, initializers=weights_of(build(recipe)))
    shapes: list[tuple[int, ...]] = [(1,), (7,), (0,), (2, 3), (1, 1), (7,)]
    for leading in shapes:
        for dtype in DTYPES:
            problem = build(replace(recipe, leading=leading, dtype=dtype, router_dtype=dtype))
            problem = replace(problem, inputs=[*problem.inputs[:2], *build(recipe).inputs[2:]])
            problem.check_closely(kernel(*call_inputs(problem)))


def test_more_signatures_than_are_remembered() -> None:
    recipe = Recipe(hidden=32, inter=32)
    kernel = PROVIDER.create_kernel(build(recipe).node, initializers=weights_of(build(recipe)))
    for rows in [*range(1, 80), 1]:
        x, router = np.zeros((rows, 32), np.float32), np.zeros((rows, 4), np.float32)
        assert not kernel(x, router).any()


# --- strange logits and sizes ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("pattern", ["ones", "nan", "inf", "-inf"])
@pytest.mark.parametrize("routed", [False, True])
def test_logits_of_one_strange_pattern(pattern: str, dtype: str, routed: bool) -> None:
    problem = build(Recipe(leading=(3,), experts=8, k=3, router_dtype=dtype, router_weights=routed))
    logits = problem.inputs[1]
    assert logits is not None
    if pattern == "ones":
        logits.view(np.uint8)[...] = 0xFF
    else:
        logits[...] = float(pattern)
    result = run(problem)
    problem.check_closely(result)
    assert np.isfinite(result).all() if routed else np.isnan(result).all()


def test_an_infinite_logit_spoils_only_its_row() -> None:
    problem = build(Recipe(leading=(4,), experts=4, k=2))
    logits = problem.inputs[1]
    assert logits is not None
    logits[1, 2] = np.inf
    logits[2, 3] = -np.inf
    result = run(problem)
    problem.check_closely(result)
    assert np.isnan(result[1]).all()
    assert np.isfinite(result[[0, 2, 3]]).all()


@pytest.mark.parametrize("leading", [(0,), (0, 3), (2, 0), (0, 0)])
def test_no_rows(leading: tuple[int, ...]) -> None:
    problem = build(Recipe(leading=leading, router_weights=True))
    result = PROVIDER.create_kernel(problem.node)(*problem.inputs)
    assert result.shape == (*leading, 64)


def test_no_experts() -> None:
    shapes = {0: (3, 64), 1: (3, 0), 2: (0, 128, 32), 3: (0, 128, 2), 5: (0, 64, 32), 6: (0, 64, 2)}
    inputs = [np.zeros(shapes[i], np.uint8 if i in (2, 5) else np.float32) if i in shapes else None for i in range(7)]
    node = build(Recipe(k=1)).node
    with pytest.raises(QMoEError, match="fc1_experts_weights: the experts size is 0"):
        PROVIDER.create_kernel(node)(*inputs)
    with pytest.raises(QMoEError, match="fc1_experts_weights: the experts size is 0"):
        PROVIDER.create_kernel(node, initializers={i: a for i, a in enumerate(inputs) if a is not None and i > 1})


@pytest.mark.parametrize("normalize", [False, True])
def test_every_expert_selected_and_all_logits_equal(normalize: bool) -> None:
    problem = build(Recipe(leading=(3,), experts=8, k=8, normalize=normalize))
    logits = problem.inputs[1]
    assert logits is not None
    logits[...] = 0.5
    problem.check_closely(run(problem))
    fewer = replace(problem, attributes={**problem.attributes, "k": 3})
    fewer.check_closely(run(fewer))


def test_many_tokens_of_few_experts() -> None:
    problem = build(Recipe(leading=(200,), experts=3, k=2, hidden=32, inter=32))
    problem.check_closely(run(problem))


# --- numbers at the edges ----------------------------------------------------------------------------


@pytest.mark.parametrize(("x_scale", "w_scale"), [(1e-30, 1e-6), (1e30, 1e-20), (1.0, 1e-38), (1e-20, 1e20)])
@pytest.mark.parametrize("activation", ["relu", "identity", "silu", "gelu"])
def test_magnitudes_that_float32_still_holds(x_scale: float, w_scale: float, activation: str) -> None:
    problem = build(Recipe(activation=activation, fusion=0))
    inputs = list(problem.inputs)
    for index, factor in ((0, x_scale), (3, w_scale), (6, 1 / (x_scale * w_scale))):
        operand = inputs[index]
        assert operand is not None
        inputs[index] = (operand.astype(np.float64) * factor).astype(np.float32)
    scaled = replace(problem, inputs=inputs)
    scaled.check(run(scaled))


def test_halves_are_computed_in_float32() -> None:
    # Sums beyond 65504 inside, results within: an intermediate half would overflow.
    problem = build(Recipe(activation="identity", fusion=0, dtype="float16", zero_points=(True,) * 3))
    inputs = list(problem.inputs)
    for index, factor in ((3, 1e6), (6, 1e-6)):
        operand = inputs[index]
        assert operand is not None
        inputs[index] = operand * np.float32(factor)
    scaled = replace(problem, inputs=inputs)
    result = run(scaled)
    assert np.isfinite(result).all()
    scaled.check_closely(result)


def test_results_beyond_the_largest_half_are_infinite() -> None:
    problem = build(Recipe(activation="identity", fusion=0, dtype="float16"))
    scales = problem.inputs[6]
    assert scales is not None
    scales *= np.float32(1e7)
    result = run(problem)
    assert np.isinf(result).any()
    problem.check_closely(result)


@pytest.mark.parametrize("index", [0, 3, 4, 6, 7, 9, 10, 14])
@pytest.mark.parametrize(("activation", "fusion"), [("swiglu", 0), ("swiglu", 1), ("swiglu", 2), ("silu", 0)])
def test_a_nan_reaches_the_output(index: int, activation: str, fusion: int) -> None:
    recipe = Recipe(
        activation=activation, fusion=fusion, fc3=True, biases=(True,) * 3, router_weights=True, limit=7.0, k=4
    )
    problem = build(recipe)
    operand = problem.inputs[index]
    if operand is None:
        return
    operand[...] = np.nan
    x = problem.inputs[0]
    assert x is not None
    if index != 0:
        x[...] = 0  # a product with zero must not hide it either
    result = run(problem)
    assert np.isnan(result).all()
    problem.check(result)


# --- failures and outputs ----------------------------------------------------------------------------


def broken_calls(problem: Problem) -> list[tuple[str, list[Any]]]:
    """Calls with one thing wrong, and the name of that thing."""
    calls: list[tuple[str, list[Any]]] = []
    for index, operand in enumerate(problem.inputs):
        if operand is None:
            continue
        others = [("a list", operand.tolist()), ("dtype", operand.astype(np.int64))]
        others.append(("shape", np.concatenate([operand, operand], axis=-1)))
        if index in (0, 1, 2, 3, 5, 6):
            others.append(("absent", None))
        for _, other in others:
            calls.append((INPUT_NAMES[index], [*problem.inputs[:index], other, *problem.inputs[index + 1 :]]))
    calls.append(("22 operands", [*problem.inputs, *[None] * (22 - len(problem.inputs))]))
    calls.append((INPUT_NAMES[15], [*problem.inputs, *[None] * (15 - len(problem.inputs)), problem.inputs[3]]))
    return calls


def test_a_failing_call_leaves_the_output_as_it_was() -> None:
    problem = build(Recipe(fusion=0, biases=(True,) * 3, zero_points=(True,) * 3, router_weights=True))
    kernel = PROVIDER.create_kernel(problem.node)
    for name, inputs in broken_calls(problem):
        output = np.full((3, 64), TORN)
        with pytest.raises(QMoEError, match=name):
            kernel.execute(inputs, [output])
        assert (output == TORN).all()
        with pytest.raises(QMoEError, match=name):
            kernel(*inputs)
    problem.check_closely(kernel(*problem.inputs))


def test_an_operand_given_twice() -> None:
    problem = build(Recipe())
    kernel = PROVIDER.create_kernel(problem.node, initializers=weights_of(problem))
    with pytest.raises(QMoEError, match=r"fc1_experts_weights \(input 2\) was given as an initializer"):
        kernel(*problem.inputs)
    with pytest.raises(QMoEError, match=r"router_probs .* is required but absent"):
        kernel(problem.inputs[0])
    with pytest.raises(QMoEError, match=r"input .* is required but absent"):
        kernel()


def test_outputs_that_do_not_fit() -> None:
    problem = build(Recipe())
    kernel = PROVIDER.create_kernel(problem.node)
    read_only = np.zeros((3, 64), np.float32)
    read_only.flags.writeable = False
    for outputs, words in (
        ([], "exactly 1 array, got 0"),
        ([read_only, read_only], "exactly 1 array, got 2"),
        ([np.zeros((3, 64))], "output: expected float32 .* got float64"),
        ([np.zeros((4, 64), np.float32)], r"output: expected float32 \[3, 64\] .* got float32 \[4, 64\]"),
        ([np.zeros((1, 3, 64), np.float32)], r"\[1, 3, 64\]"),
        ([read_only], "output: the array is read-only"),
        ([[[0.0] * 64] * 3], "output: expected a NumPy array, got list"),
    ):
        with pytest.raises(QMoEError, match=words):
            kernel.execute(problem.inputs, outputs)  # type: ignore[arg-type]
    assert not read_only.any()


@given(problems(Space(leading=((7,), (2, 3), (4, 2), (1,), (0,)))), st.integers(-2, 10), st.booleans())
@settings(max_examples=60)
def test_rows_beyond_the_valid_ones_are_left_alone(problem: Problem, valid: int, as_array: bool) -> None:
    rows, hidden = problem.recipe.rows, problem.recipe.hidden
    output = np.full(problem.expected.shape, 3, DTYPES[problem.recipe.dtype])
    count: Any = np.array([valid], np.int32) if as_array else valid
    kernel = PROVIDER.create_kernel(problem.node, weights_layout=problem.weights_layout)
    kernel.execute(problem.inputs, [output], valid_rows=count)
    valid = min(max(valid, 0), rows)
    flat = output.reshape(rows, hidden)
    assert (flat[valid:] == 3).all()
    whole = problem.expected.reshape(rows, hidden)
    errors = reference.row_errors(flat[:valid], whole[:valid], problem.magnitudes[:valid])
    assert (errors <= problem.tolerance).all()


def test_valid_rows_of_a_wrong_type() -> None:
    problem = build(Recipe())
    output = problem.poisoned_output()
    kernel = PROVIDER.create_kernel(problem.node)
    for value in (1.5, "2", np.array([1, 2]), True, 2**70):
        with pytest.raises(QMoEError, match="valid_rows: expected one integer"):
            kernel.execute(problem.inputs, [output], valid_rows=value)  # type: ignore[arg-type]
    assert np.isnan(output).all()


def test_kernels_are_declined_as_claimed() -> None:
    node = QMoENode(use_sparse_mixer=1)
    reason = PROVIDER.unsupported_reason(node)
    with pytest.raises(QMoEError) as raised:
        PROVIDER.create_kernel(node)
    assert str(raised.value) == reason


def test_threads_share_kernels() -> None:
    made = [build(Recipe(leading=(rows,), seed=rows)) for rows in (1, 3, 5)]
    kernels = [PROVIDER.create_kernel(p.node, initializers=weights_of(p)) for p in made]
    expected = [run(p).tobytes() for p in made]
    wrong: list[int] = []

    def work(first: int) -> None:
        for step in range(20):
            i = (first + step) % 3
            if kernels[i](*call_inputs(made[i])).tobytes() != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_provider_closes_more_than_once() -> None:
    provider = CpuExecutionProvider(weight_offload=False, host_cache_bytes=0)
    provider.close()
    provider.close()


def test_a_closed_kernel_refuses_calls() -> None:
    problem = build(Recipe(leading=(2,)))
    kernel = PROVIDER.create_kernel(problem.node, 7, weights_of(problem))
    problem.check(kernel(*call_inputs(problem)))
    kernel.close()
    kernel.close()
    with pytest.raises(QMoEError, match="node 7 is closed"):
        kernel(*call_inputs(problem))
