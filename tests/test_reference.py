"""The reference against independent results: ONNX Runtime live where it is right, stored cases, a scalar model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import golden
import numpy as np
import ort
import pytest
from hypothesis import given, settings
from problems import DTYPES, Array, Problem, Recipe, Space, build, first_seed, problems, random_problem

from qmoe_ep import QMoENode, dequantize_experts, describe_call, reference
from qmoe_ep.operator import INPUT_NAMES, MATRIX_INPUTS
from qmoe_ep.quantization import pack_codes

# --- the stored cases --------------------------------------------------------------------------------


def test_every_stored_case_is_there() -> None:
    assert len(golden.CASES) == 20


def flipped(inputs: list[Array | None]) -> list[Array | None]:
    """The same experts in reverse order, so that ties go to the one that was last."""
    return [
        None if a is None else (a if i == 0 else np.flip(a, -1 if i in (1, 14) else 0)) for i, a in enumerate(inputs)
    ]


@pytest.mark.parametrize("name", golden.CASES)
def test_stored_case(name: str) -> None:
    case = golden.load(name)
    inputs = case.inputs
    if name == "route_ties_partial":
        inputs = flipped(inputs)  # what was stored takes the larger index among equals
        untied = reference.qmoe(case.node, case.inputs)
        assert not np.allclose(untied, case.exact, rtol=1e-9)
    result = reference.qmoe(case.node, inputs)
    expected = case.exact if case.specified is None else case.specified
    scale = np.linalg.norm(expected, axis=-1)
    assert result.dtype == np.float64
    # The sum of given weights is float32 here and float64 there.
    limit = 1e-7 if name == "router_weights_norm1" else 1e-12
    assert (np.linalg.norm(result - expected, axis=-1) <= limit * scale).all()
    if case.specified is None and name != "int8_b32":  # where activations were quantized to 8 bits
        allowed = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[str(case.inputs[0].dtype)]  # type: ignore[union-attr]
        assert (np.linalg.norm(case.onnxruntime - result, axis=-1) <= allowed * scale).all()


# --- ONNX Runtime live -------------------------------------------------------------------------------

DEFAULT_PATH = Space(
    leading=((3,), (1,), (7,), (2, 3), (1, 4)),
    bits=(4, 8, 2),
    mixed_bits=(False,),
    fusions=(1,),
    fc3=(False,),
    dtypes=("float32", "float16"),
    mixed_dtypes=(False,),
    normalize=(True,),
    logits=("normal", "big"),
    layouts=("raw",),
    strided=(False,),
)


def oracle_problem(seed: int) -> Problem | None:
    """A random problem within what ONNX Runtime's default path gets right, or None."""
    recipe = random_problem(seed, DEFAULT_PATH).recipe
    n1, bits = recipe.features("fc1")[0], recipe.bits[0]
    if recipe.hidden * bits % 8 or recipe.inter * bits % 8:
        return None  # it has no padded rows
    if bits == 2 and recipe.block_size and (n1 % 128 == 0 or recipe.hidden % 128 == 0):
        return None  # it quantizes activations to 8 bits
    problem = build(replace(recipe, router_leading=None))
    inputs = list(problem.inputs)
    attributes = problem.attributes
    if recipe.router_weights:
        weights = inputs[14]
        assert weights is not None
        inputs[14] = np.abs(weights)
        attributes = {**attributes, "normalize_routing_weights": seed % 2}
    if bits == 4 and recipe.zero_points[0] != recipe.zero_points[1]:
        inputs = with_default_zero_points(problem, inputs)  # it is wrong with those of one matrix alone
    return replace(problem, inputs=inputs, attributes=attributes)


def with_default_zero_points(problem: Problem, inputs: list[Array | None]) -> list[Array | None]:
    """The same values with both zero points stored."""
    experts = describe_call(problem.node, problem.inputs, weights_layout=problem.weights_layout).experts
    full = [*inputs, *[None] * (13 - len(inputs))]
    for matrix in (experts.fc1, experts.fc2):
        index = MATRIX_INPUTS[matrix.name][3]
        if full[index] is None:
            shape = (matrix.out_features, matrix.blocks) if matrix.block_size else (matrix.out_features,)
            codes = np.full((experts.num_experts, *shape), 1 << (matrix.bits - 1), np.uint8)
            full[index] = pack_codes(codes, bits=matrix.bits)
    return full


def assert_agrees(problem: Problem, result: Array) -> None:
    """Within the error of the oracle, relative to the row itself, but for cancellation."""
    rows = problem.recipe.rows
    error = np.linalg.norm((result - problem.expected).reshape(rows, -1), axis=1)
    norm = np.linalg.norm(problem.expected.reshape(rows, -1), axis=1)
    relative, cancelled = {
        "float32": (2e-6, 2**-22),
        "float16": (1e-3, 2**-12),
        "bfloat16": (8e-3, 2**-9),
    }[problem.recipe.dtype]
    assert (error <= relative * norm + cancelled * problem.magnitudes).all(), (error / norm, problem.recipe)


@pytest.mark.parametrize("part", range(4))
def test_onnxruntime_default_path(part: int) -> None:
    compared = 0
    for seed in range(first_seed() + 100 * part, first_seed() + 100 * (part + 1)):
        if (problem := oracle_problem(seed)) is not None:
            assert_agrees(problem, ort.execute(problem).astype(np.float64))
            compared += 1
    assert compared >= 25


@pytest.mark.parametrize("bits", [3, 4, 2])
def test_onnxruntime_shared_path(bits: int) -> None:
    """Raw 3-bit and SM80 weights: softmax over all experts and the lowest index on ties, as specified."""
    space = Space(
        leading=((3,), (7,), (2, 3)),
        bits=(bits,),
        mixed_bits=(False,),
        block_sizes=(32, 64, 128),
        activations=("swiglu",),
        fusions=(1,),
        dtypes=("float16", "bfloat16"),
        mixed_dtypes=(False,),
        router_weights=(False,),
        logits=("normal", "ties", "big"),
        layouts=("raw",) if bits == 3 else ("sm80",),
        strided=(False,),
    )
    for seed in range(first_seed(), first_seed() + 30):
        recipe = random_problem(seed, space).recipe
        recipe = replace(recipe, zero_points=(False,) * 3, router_leading=None, explicit_layout=True)
        problem = build(recipe)
        assert_agrees(problem, ort.execute(problem).astype(np.float64))


# --- a model of one number at a time -----------------------------------------------------------------


def scalar_model(problem: Problem) -> Array:
    """The operator in loops over numbers, from its text, with none of the package's maths but dequantizing."""
    recipe, node = problem.recipe, problem.node
    operands = [*problem.inputs, *[None] * (len(INPUT_NAMES) - len(problem.inputs))]

    def numbers(index: int) -> Any:
        operand = operands[index]
        return None if operand is None else operand.astype(np.float64)

    x = numbers(0).reshape(recipe.rows, recipe.hidden)
    logits = numbers(1).reshape(recipe.rows, recipe.experts).tolist()
    weights = {m: dense(problem, operands, m) for m in ("fc1", "fc2", *(("fc3",) if recipe.has_fc3 else ()))}
    biases = {m: numbers(MATRIX_INPUTS[m][2]) for m in weights}

    def linear(matrix: str, e: int, vector: list[float]) -> list[float]:
        bias = biases[matrix]
        return [
            math.fsum(w * v for w, v in zip(row, vector, strict=True)) + (0 if bias is None else bias[e][n])
            for n, row in enumerate(weights[matrix][e].tolist())
        ]

    output = np.zeros((recipe.rows, recipe.hidden))
    for r in range(recipe.rows):
        order = sorted(range(recipe.experts), key=lambda e: (-logits[r][e], e))[: recipe.k]
        if operands[14] is not None:
            chosen = [float(operands[14][r, e]) for e in order]
            total = float(sum((np.float32(c) for c in chosen), np.float32(0))) if recipe.normalize else 1.0
        else:
            peak = max(logits[r])
            among = order if recipe.normalize else range(recipe.experts)
            chosen = [math.exp(logits[r][e] - peak) for e in order]
            total = math.fsum(math.exp(logits[r][e] - peak) for e in among)
        for e, weight in zip(order, chosen, strict=True):
            fc1 = linear("fc1", e, x[r].tolist())
            fc3 = linear("fc3", e, x[r].tolist()) if recipe.has_fc3 else None
            activated = scalar_activation(node, fc1, fc3)
            output[r] += (weight / total if total else 0.0) * np.array(linear("fc2", e, activated))
    return output.reshape(problem.expected.shape)


def dense(problem: Problem, operands: list[Any], matrix: str) -> Array:
    weights, scales, _, points = (operands[i] for i in MATRIX_INPUTS[matrix])
    return dequantize_experts(
        weights,
        scales.astype(np.float32),
        points,
        bits=problem.node.bits(matrix),
        block_size=problem.recipe.block_size,
        in_features=problem.recipe.features(matrix)[1],
        layout=problem.recipe.layout,
    )


def scalar_activation(node: QMoENode, fc1: list[float], fc3: list[float] | None) -> list[float]:
    def sigmoid(v: float) -> float:
        return 1 / (1 + math.exp(-v)) if v > -700 else 0.0

    if node.activation_type == "swiglu" or fc3 is not None:
        half = len(fc1) // 2
        gate, up = {
            0: (fc1, fc3 or []),
            1: (fc1[0::2], fc1[1::2]),
            2: (fc1[:half], fc1[half:]),
        }[node.swiglu_fusion]
        limit = math.inf if node.swiglu_limit is None else node.swiglu_limit
        alpha, beta = node.activation_alpha, node.activation_beta
        gate = [min(g, limit) for g in gate]
        up = [max(-limit, min(u, limit)) for u in up]
        return [g * sigmoid(alpha * g) * (u + beta) for g, u in zip(gate, up, strict=True)]
    if node.activation_type == "relu":
        return [max(v, 0.0) for v in fc1]
    if node.activation_type == "gelu":
        return [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in fc1]
    if node.activation_type == "silu":
        return [v * sigmoid(v) for v in fc1]
    return fc1


SMALL = Space(
    leading=((2,), (1,), (1, 2)),
    experts=(3, 1, 2),
    most_features=32,
    logits=("normal", "ties", "big"),
    layouts=("raw",),
)


@given(problems(SMALL))
@settings(max_examples=60)
def test_the_reference_is_the_operator_written_out(problem: Problem) -> None:
    # Weights rounded to float32, a few units of which is all that may differ.
    error = np.abs(scalar_model(problem) - problem.expected).reshape(problem.recipe.rows, -1).max(axis=1)
    norms = np.maximum(problem.magnitudes, np.linalg.norm(problem.expected.reshape(problem.recipe.rows, -1), axis=1))
    assert (error <= 2e-7 * norms + 1e-300).all()


# --- activations and values that aren't finite -------------------------------------------------------


def one_by_one(activation: str, value: float, **attributes: Any) -> float:
    """One row, one expert, one feature: the output is the activation of ``value``."""
    node = QMoENode(activation_type=activation, normalize_routing_weights=1, expert_weight_bits=8, **attributes)
    gated = activation == "swiglu"
    one = np.full((1, 1, 1), 129, np.uint8)
    fc1 = np.array([[[129], [128]]], np.uint8) if gated else one
    scale = np.ones((1, 2 if gated else 1), np.float32)
    bias = np.array([[0, 1]], np.float32) if gated else None
    x = np.array([[value]], np.float32)
    inputs: list[Array | None] = [x, np.zeros((1, 1), np.float32), fc1, scale, bias, one, np.ones((1, 1), np.float32)]
    return float(reference.qmoe(node, inputs)[0, 0])


@pytest.mark.parametrize("value", [-3.0, -1e-6, 0.0, 0.5, 2.0, 40.0, -40.0])
def test_activations(value: float) -> None:
    v = float(np.float32(value))
    sigmoid = 1 / (1 + math.exp(-v))
    assert one_by_one("relu", value) == max(v, 0)
    assert one_by_one("identity", value) == v
    assert one_by_one("silu", value) == pytest.approx(v * sigmoid, rel=1e-14)
    tanh = math.tanh(0.7978845608028654 * (v + 0.044715 * v**3))
    assert one_by_one("gelu", value) == pytest.approx(0.5 * v * (1 + tanh), rel=1e-14, abs=1e-300)
    assert one_by_one("swiglu", value, swiglu_fusion=1) == pytest.approx(v * sigmoid, rel=1e-14)
    limited = one_by_one("swiglu", value, swiglu_fusion=2, swiglu_limit=0.75, activation_beta=0.5)
    gate = min(v, 0.75)
    assert limited == pytest.approx(gate / (1 + math.exp(-gate)) * 1.25, rel=1e-14)


@pytest.mark.parametrize(
    ("activation", "attributes"),
    [
        *((name, {}) for name in ("relu", "gelu", "silu", "identity")),
        ("swiglu", {"swiglu_fusion": 1}),
        ("swiglu", {"swiglu_fusion": 2, "swiglu_limit": 7.0}),
    ],
)
def test_a_nan_is_never_swallowed(activation: str, attributes: dict[str, Any]) -> None:
    assert math.isnan(one_by_one(activation, math.nan, **attributes))
    if not attributes:
        assert one_by_one(activation, math.inf) == math.inf


@pytest.mark.parametrize("where", [0, 3, 4, 6, 7, 9, 10, 14])
@pytest.mark.parametrize("fusion", [0, 1])
def test_a_nan_in_any_operand_reaches_the_output(where: int, fusion: int) -> None:
    recipe = Recipe(fusion=fusion, experts=2, k=2, biases=(True,) * 3, router_weights=True, limit=7.0, beta=1.0)
    problem = build(recipe)
    if where >= len(problem.inputs) or problem.inputs[where] is None:
        return
    operand = problem.inputs[where]
    assert operand is not None
    operand[...] = np.nan
    assert np.isnan(problem.expected).all()


# --- how errors are measured -------------------------------------------------------------------------


def test_row_errors_are_relative_to_the_magnitudes() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 0.0]])
    actual = np.array([[3.0, 4.5], [0.0, 0.25]], np.float32)
    np.testing.assert_allclose(reference.row_errors(actual, expected, np.array([10.0, 0.0])), [0.05, 0.25])


def test_row_errors_compare_what_is_not_finite_by_class() -> None:
    nan, inf = np.nan, np.inf
    expected = np.array([[nan, 1.0], [inf, 1.0], [-inf, 1.0], [1.0, 1.0], [nan, 1.0], [inf, 1.0], [1e6, 1.0]])
    good = np.array([[nan, 1.0], [inf, 1.0], [-inf, 1.0], [1.0, 1.0], [nan, 1.0], [inf, 1.0], [inf, 1.0]], np.float16)
    assert reference.row_errors(good, expected, np.ones(7)).tolist() == [0.0] * 7
    bad = np.array([[1.0, 1], [-inf, 1], [nan, 1], [nan, 1], [inf, 1], [1.0, 1], [65504, 1]], np.float16)
    assert reference.row_errors(bad, expected, np.ones(7)).tolist() == [inf] * 7


def test_no_rows_have_no_errors() -> None:
    problem = build(Recipe(leading=(2, 0)))
    assert problem.expected.shape == (2, 0, 64)
    assert problem.magnitudes.shape == (0,)
    assert reference.row_errors(problem.poisoned_output(), problem.expected, problem.magnitudes).shape == (0,)


@given(problems(Space(logits=("normal", "ties", "big"), leading=((2,), (1, 3)))))
@settings(max_examples=40)
def test_magnitudes_bound_what_has_no_limit(problem: Problem) -> None:
    """Absolute values everywhere give at least the row itself, unless a clamp or a negative alpha intervenes."""
    if problem.recipe.limit is not None or problem.recipe.alpha < 0:
        return
    norms = np.linalg.norm(problem.expected.reshape(problem.recipe.rows, -1), axis=1)
    assert (problem.magnitudes >= norms * (1 - 1e-9)).all()


def test_rows_do_not_depend_on_each_other() -> None:
    problem = build(Recipe(leading=(7,), experts=8, k=3, dtype="float16", router_dtype="bfloat16"))
    x, router = problem.inputs[:2]
    assert x is not None
    assert router is not None
    for row in range(7):
        alone = [x[row : row + 1], router[row : row + 1], *problem.inputs[2:]]
        np.testing.assert_allclose(reference.qmoe(problem.node, alone)[0], problem.expected[row], rtol=1e-9, atol=1e-12)
    assert x.dtype == DTYPES["float16"]
