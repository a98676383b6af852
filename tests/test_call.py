"""Operand checks: what a call is described as, and what is said about the one operand that doesn't fit.

Operands are mostly given as types without data, which shows that nothing reads or allocates any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import MATRICES, Problem, Recipe, Space, build, node_proto, problems

from qmoe_ep import CpuExecutionProvider, QMoEError, QMoENode
from qmoe_ep.call import (
    OperandType,
    check_constants,
    describe_call,
    describe_experts,
    merge_operands,
    packed_bytes,
)
from qmoe_ep.operator import INPUT_NAMES, MATRIX_INPUTS

Types = list[OperandType | None]
SOME_ROWS = Space(leading=((3,), (1,), (2, 3), (7,)))


def types_of(problem: Problem) -> Types:
    return [None if a is None else OperandType(a.shape, a.dtype) for a in problem.inputs]


def refused(problem: Problem, types: Types) -> str:
    with pytest.raises(QMoEError) as raised:
        describe_call(problem.node, types, weights_layout=problem.weights_layout)
    return str(raised.value)


def changed(types: Types, index: int, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Types:
    old = types[index]
    assert old is not None
    new = OperandType(old.shape if shape is None else shape, old.dtype if dtype is None else np.dtype(dtype))
    return [*types[:index], new, *types[index + 1 :]]


def pick_operand(data: st.DataObject, types: Types, among: Callable[[int], bool] = lambda _: True) -> int:
    return data.draw(st.sampled_from([i for i, t in enumerate(types) if t is not None and among(i)]))


# --- descriptions ----------------------------------------------------------------------------------


@given(problems())
@settings(max_examples=150)
def test_a_call_is_described_completely(problem: Problem) -> None:
    recipe, inputs = problem.recipe, problem.inputs
    call = describe_call(problem.node, types_of(problem), weights_layout=problem.weights_layout)
    assert (call.rows, call.top_k, call.routes) == (recipe.rows, recipe.k, recipe.rows * recipe.k)
    assert call.input_shape == (*recipe.leading, recipe.hidden)
    assert (call.dtype, call.router_dtype) == (inputs[0].dtype, inputs[1].dtype)  # type: ignore[union-attr]
    assert call.router_weights_dtype == (inputs[14].dtype if recipe.router_weights else None)  # type: ignore[union-attr]
    experts = call.experts
    assert (experts.num_experts, experts.hidden_size, experts.inter_size) == (
        recipe.experts,
        recipe.hidden,
        recipe.inter,
    )
    assert experts.gating == ("fc3" if recipe.has_fc3 else ("none", "interleaved", "halves")[recipe.fusion])
    assert [m.name for m in experts.matrices] == list(MATRICES[: 3 if recipe.has_fc3 else 2])
    for index, matrix in enumerate(experts.matrices):
        weights, scales, bias, points = (inputs[i] if i < len(inputs) else None for i in MATRIX_INPUTS[matrix.name])
        assert weights is not None
        assert scales is not None
        assert (matrix.out_features, matrix.in_features) == recipe.features(matrix.name)
        assert (matrix.bits, matrix.block_size) == (recipe.bits[index], recipe.block_size or 0)
        assert (matrix.layout, matrix.scale_dtype) == (recipe.layout, scales.dtype)
        assert matrix.bias_dtype == (None if bias is None else bias.dtype)
        assert matrix.zero_points == (points is not None)
        assert weights.shape[2] == matrix.row_bytes
        assert scales.size == recipe.experts * matrix.out_features * matrix.blocks
        sizes = [weights.nbytes, scales.nbytes]
        if points is not None:
            assert points.shape[1:] == matrix.zero_point_shape
            sizes.append(points.nbytes)
        assert matrix.expert_bytes * recipe.experts == sum(sizes)


def test_sizes_are_plain_integers() -> None:
    recipe = Recipe(block_size=32)
    problem = build(recipe)
    attributes: dict[str, Any] = {n: np.int64(v) if isinstance(v, int) else v for n, v in problem.attributes.items()}
    node = QMoENode(**attributes)
    call = describe_call(node, problem.inputs)
    for size in (call.rows, call.top_k, call.experts.hidden_size, call.experts.fc1.bits, call.experts.fc1.block_size):
        assert type(size) is int


@given(st.integers(0, 2**40), st.sampled_from([1, 2, 3, 4, 8]))
def test_packed_bytes(count: int, bits: int) -> None:
    assert packed_bytes(count, bits) == math.ceil(count * bits / 8)


def test_inter_size_with_padded_rows_comes_from_fc1() -> None:
    recipe = Recipe(block_size=None, hidden=17, inter=13, bits=(3, 3, 3), fusion=2)
    call = describe_call(build(recipe).node, types_of(build(recipe)))
    assert (call.experts.hidden_size, call.experts.inter_size) == (17, 13)


# --- one thing broken --------------------------------------------------------------------------------


@given(problems(), st.data())
@settings(max_examples=200)
def test_a_wrong_dtype_names_its_operand(problem: Problem, data: st.DataObject) -> None:
    types = types_of(problem)
    index = pick_operand(data, types)
    packed = types[index].dtype == np.uint8  # type: ignore[union-attr]
    wrong = ("i1", "u2", "f8", "?", "O") if packed else ("f8", "u1", "i4", "u2", "?", "c8", "O", ">f4")
    others = [np.dtype(w) for w in wrong] + [np.dtype(ml_dtypes.float8_e4m3fn)]
    dtype = data.draw(st.sampled_from(others))
    reason = refused(problem, changed(types, index, dtype=dtype))
    assert reason.startswith(f"{INPUT_NAMES[index]}: expected dtype ")
    assert str(dtype) in reason


@given(problems(), st.data(), st.booleans())
@settings(max_examples=200)
def test_a_wrong_rank_names_its_operand(problem: Problem, data: st.DataObject, more: bool) -> None:
    types = types_of(problem)
    index = pick_operand(data, types, lambda i: i != 1)
    shape = types[index].shape  # type: ignore[union-attr]
    if index == 0:
        shape = (1, *shape[-2:], 1) if more else shape[-1:]
    else:
        row_wise_column = index in (3, 6, 9) and problem.recipe.block_size is None
        shape = (*shape[:2], 1, 1)[: 4 if row_wise_column or len(shape) == 3 else 3] if more else shape[:1]
    reason = refused(problem, changed(types, index, shape))
    assert reason.startswith(f"{INPUT_NAMES[index]}: expected ")
    assert str(list(shape)) in reason


def test_scalars_are_refused() -> None:
    problem = build(Recipe(leading=(1,)))
    types = types_of(problem)
    for index, operand in enumerate(types):
        if operand is not None:
            reason = refused(problem, changed(types, index, ()))
            assert reason.startswith(f"{INPUT_NAMES[index]}: expected ")
            assert "rank" in reason


@given(problems(SOME_ROWS), st.data())
@settings(max_examples=500)
def test_a_wrong_dimension_names_its_operand(problem: Problem, data: st.DataObject) -> None:
    types = types_of(problem)
    index = pick_operand(data, types)
    old = types[index].shape  # type: ignore[union-attr]
    axis = data.draw(st.integers(0, len(old) - 1)) if old else 0
    assume(old)
    size = data.draw(st.sampled_from([s for s in (old[axis] + 1, old[axis] - 1, old[axis] * 2, 0) if s >= 0]))
    assume(size != old[axis])
    shape = (*old[:axis], size, *old[axis + 1 :])
    reason = refused(problem, changed(types, index, shape))
    if index == 0 and axis < len(old) - 1:
        # Which rows are right can't be told: the router's are compared with those of input.
        assert "as in input" in reason
    elif decides_alone(problem, index, axis):
        assert reason.startswith(f"{INPUT_NAMES[index]}: ")
        assert str(list(shape)) in reason
    else:
        assert reason.startswith(("fc1_experts_weights: ", "fc1_scales: "))


def decides_alone(problem: Problem, index: int, axis: int) -> bool:
    """Whether the other operands say together what a dimension must be.

    I with padded FC2 rows follows from the rows of FC1 and its scales alone: if these disagree and
    nothing else tells, either may be meant.
    """
    padded = problem.recipe.inter * problem.recipe.bits[1] % 8 != 0
    return not (index in (2, 3) and axis == 1 and padded)


@given(problems(SOME_ROWS), st.data())
@settings(max_examples=100)
def test_a_zero_dimension_does_not_hide_an_overflow(problem: Problem, data: st.DataObject) -> None:
    types = types_of(problem)
    index = pick_operand(data, types)
    rank = len(types[index].shape)  # type: ignore[union-attr]
    assume(rank >= 2)
    shape = [2**62] * rank
    shape[data.draw(st.integers(0, rank - 1))] = 0
    if rank == 2:
        shape[shape.index(2**62)] = 2**63
    reason = refused(problem, changed(types, index, tuple(shape)))
    assert reason.startswith(f"{INPUT_NAMES[index]}: ")
    assert "2^63-1" in reason


def test_negative_dimensions_are_refused() -> None:
    problem = build(Recipe())
    assert refused(problem, changed(types_of(problem), 0, (-3, 64))).startswith("input: negative dimension")


@pytest.mark.parametrize("zero", ["experts", "hidden", "inter"])
def test_sizes_of_zero(zero: str) -> None:
    sizes = {"experts": 4, "hidden": 64, "inter": 64, zero: 0}
    e, h, i = sizes["experts"], sizes["hidden"], sizes["inter"]
    f4, u1 = np.dtype("f4"), np.dtype("u1")
    shapes = {
        0: (3, h),
        1: (3, e),
        2: (e, 2 * i, h // 2),
        3: (e, 2 * i, h // 32),
        5: (e, h, i // 2),
        6: (e, h, i // 32),
    }
    types: Types = [OperandType(shapes[n], u1 if n in (2, 5) else f4) if n in shapes else None for n in range(7)]
    with pytest.raises(QMoEError, match=r"size is 0, expected at least 1") as raised:
        describe_call(build(Recipe()).node, types)
    assert str(raised.value).startswith("fc1_experts_weights" if zero == "experts" else "fc2_experts_weights")
    with pytest.raises(QMoEError, match="size is 0"):
        CpuExecutionProvider().create_kernel(
            build(Recipe()).node,
            initializers={n: np.zeros(s, u1 if n in (2, 5) else f4) for n, s in shapes.items() if n > 1},
        )


def test_k_is_at_most_the_number_of_experts() -> None:
    problem = build(Recipe(experts=4, k=4))
    assert describe_call(problem.node, problem.inputs).top_k == 4
    for k in (5, 2**62):
        node = QMoENode(**{**problem.attributes, "k": k})
        with pytest.raises(QMoEError, match=f"attribute k = {k} is larger than the number of experts, 4"):
            describe_call(node, problem.inputs)
        with pytest.raises(QMoEError, match="attribute k"):
            describe_experts(node, {i: t for i, t in enumerate(problem.inputs) if t is not None and i > 1})


def test_the_block_size_divides_both_sizes() -> None:
    for hidden, inter, block in ((96, 64, 64), (64, 96, 64), (32, 128, 128)):
        attributes = {**build(Recipe()).attributes, "block_size": block, "activation_type": "relu", "swiglu_fusion": 0}
        shapes = {0: (3, hidden), 1: (3, 4), 2: (4, inter, hidden // 2), 3: (4, inter, hidden // block)}
        shapes |= {5: (4, hidden, inter // 2), 6: (4, hidden, inter // block)}
        types: Types = [
            OperandType(shapes[n], np.dtype("u1" if n in (2, 5) else "f4")) if n in shapes else None for n in range(7)
        ]
        with pytest.raises(QMoEError, match=f"attribute block_size = {block}"):
            describe_call(QMoENode(**attributes), types)


@given(problems(Space(block_sizes=(32, 64, None), bits=(4, 8, 2), logits=("normal",))))
@settings(max_examples=60)
def test_older_packed_dimensions_are_refused_with_the_expected_shape(problem: Problem) -> None:
    types = types_of(problem)
    # With row-wise scales and both tensors old, nothing but two scales would speak for the newer reading.
    for indices in ((2,), (5,), (2, 5)) if problem.recipe.block_size else ((2,), (5,)):
        older = types
        for index in indices:
            _, out, row_bytes = types[index].shape  # type: ignore[union-attr]
            bits = problem.node.bits("fc1" if index == 2 else "fc2")
            assume(row_bytes * 8 // bits * bits % 8 == 0 and out * bits % 8 == 0 and row_bytes * 8 // bits != out)
            older = changed(older, index, (problem.recipe.experts, row_bytes * 8 // bits, out * bits // 8))
        first = indices[0]
        reason = refused(problem, older)
        assert reason.startswith(f"{INPUT_NAMES[first]}: expected shape {list(types[first].shape)}")  # type: ignore[union-attr]
        assert str(list(older[first].shape)) in reason  # type: ignore[union-attr]
        assert "older" in reason


def test_sm80_dimensions() -> None:
    for bits, hidden, inter in ((4, 96, 64), (4, 64, 96), (2, 64, 32)):
        recipe = Recipe(hidden=hidden, inter=inter, bits=(bits,) * 3, layout="sm80")
        problem = build(recipe)
        with pytest.raises(QMoEError, match=r"fc[12]_experts_weights: the SM80 layout needs"):
            describe_call(problem.node, problem.inputs)
        assert describe_call(problem.node, problem.inputs, weights_layout="raw").experts.fc1.layout == "raw"


def test_sm80_width_of_an_fc3_that_only_the_call_shows() -> None:
    problem = build(Recipe(activation="silu", fusion=0, fc3=True, bits=(4, 4, 8), layout="sm80"))
    with pytest.raises(QMoEError, match="fc3_expert_weight_bits is 8"):
        describe_call(problem.node, problem.inputs)


@given(problems(), st.sampled_from((0, 1, 2, 3, 5, 6)))
@settings(max_examples=40)
def test_a_missing_operand_is_named(problem: Problem, index: int) -> None:
    types = types_of(problem)
    types[index] = None
    assert refused(problem, types) == f"{INPUT_NAMES[index]} (input {index}) is required but absent"


@pytest.mark.parametrize("count", range(7))
def test_too_few_operands(count: int) -> None:
    problem = build(Recipe())
    assert "is required but absent" in refused(problem, types_of(problem)[:count])


def test_too_many_operands() -> None:
    problem = build(Recipe())
    types = types_of(problem)
    padded = [*types, *[None] * (21 - len(types))]
    assert describe_call(problem.node, padded).rows == 3
    assert "22 operands, expected at most 21" in refused(problem, [*padded, None])


@pytest.mark.parametrize("index", range(15, 21))
def test_operands_of_float_weights_are_refused(index: int) -> None:
    problem = build(Recipe())
    types = types_of(problem)
    types += [None] * (index - len(types))
    assert refused(problem, [*types, OperandType((4,), np.dtype("f4"))]).startswith(INPUT_NAMES[index])


@given(
    problems(Space(activations=("swiglu", "relu", "gelu", "identity"), fusions=(1, 2))), st.sampled_from((8, 9, 10, 13))
)
@settings(max_examples=30)
def test_fc3_operands_where_nothing_uses_them(problem: Problem, index: int) -> None:
    types = types_of(problem)
    types += [None] * (14 - len(types))
    types[index] = OperandType((4, 64, 32), np.dtype("u1"))
    assert refused(problem, types).startswith(f"{INPUT_NAMES[index]} (input {index}) is present")


def test_incomplete_fc3_operands() -> None:
    for activation in ("swiglu", "silu"):
        problem = build(Recipe(activation=activation, fusion=0, fc3=True, biases=(True,) * 3, zero_points=(True,) * 3))
        types = types_of(problem)
        for index in (8, 9):
            broken = [*types]
            broken[index] = None
            assert INPUT_NAMES[index] in refused(problem, broken)
        alone = [t if i not in (8, 9) else None for i, t in enumerate(types)]
        assert "fc3_" in refused(problem, alone)


def test_what_is_not_an_array_is_named() -> None:
    problem = build(Recipe())
    for index in (0, 1, 2, 3, 5, 6):
        operands: list[Any] = list(problem.inputs)
        operands[index] = [[1.0]]
        with pytest.raises(QMoEError, match=f"{INPUT_NAMES[index]}: expected an array, got list"):
            describe_call(problem.node, operands)

        class Foreign:
            shape = problem.inputs[index].shape  # type: ignore[union-attr]
            dtype = "a type of another library"

        operands[index] = Foreign()
        with pytest.raises(QMoEError, match=f"{INPUT_NAMES[index]}: expected dtype .* got a type of another library"):
            describe_call(problem.node, operands)


def test_a_call_has_the_operands_that_its_node_names() -> None:
    problem = build(Recipe(biases=(True, True, False)))
    node = QMoENode.from_onnx(problem.node_proto())
    describe_call(node, problem.inputs)
    dropped = [None if i == 4 else t for i, t in enumerate(problem.inputs)]
    with pytest.raises(QMoEError, match=r"fc1_experts_bias \(input 4\): the node has it, but the call lacks it"):
        describe_call(node, dropped)
    bare = QMoENode.from_onnx(node_proto(problem.attributes, dropped))
    with pytest.raises(QMoEError, match=r"fc1_experts_bias \(input 4\): the node lacks it, but the call brings it"):
        describe_call(bare, problem.inputs)


def test_sizes_that_no_memory_could_hold() -> None:
    problem = build(Recipe())
    types = types_of(problem)
    rows = 2**54
    types = changed(changed(types, 0, (rows, 64)), 1, (rows, 4))
    assert "split the call" in refused(problem, types)

    huge = 2**31
    node = QMoENode(k=1, expert_weight_bits=1, activation_type="relu")
    shapes = {0: (1, huge), 1: (1, 1), 2: (1, huge, huge // 8), 3: (1, huge), 5: (1, huge, huge // 8), 6: (1, huge)}
    experts: Types = [
        OperandType(shapes[n], np.dtype("u1" if n in (2, 5) else "f4")) if n in shapes else None for n in range(7)
    ]
    with pytest.raises(QMoEError, match=r"fc1_experts_weights: one expert .* more than 2\^63-1 bytes"):
        describe_call(node, experts)


# --- constants and calls -----------------------------------------------------------------------------


@given(problems(SOME_ROWS), st.data())
@settings(max_examples=100)
def test_creation_and_call_say_the_same_of_a_wrong_initializer(problem: Problem, data: st.DataObject) -> None:
    weights = {i: a for i, a in enumerate(problem.inputs) if a is not None and 2 <= i < 14}
    index = data.draw(st.sampled_from(sorted(weights)))
    axis = data.draw(st.integers(0, 1))
    broken = {**weights, index: np.concatenate([weights[index]] * 2, axis=axis)}
    with pytest.raises(QMoEError) as created:
        CpuExecutionProvider().create_kernel(problem.node, initializers=broken, weights_layout=problem.weights_layout)
    assert any(str(created.value).startswith(f"{INPUT_NAMES[i]}: ") for i in weights)
    operands = [broken.get(i, a) for i, a in enumerate(problem.inputs)]
    with pytest.raises(QMoEError) as called:
        describe_call(problem.node, operands, weights_layout=problem.weights_layout)
    assert str(called.value).startswith(f"{INPUT_NAMES[index]}: ") or not decides_alone(problem, index, axis)


def test_constants_describe_the_experts() -> None:
    problem = build(Recipe(activation="swiglu", fusion=0, biases=(True,) * 3))
    weights = {i: a for i, a in enumerate(problem.inputs) if a is not None and i >= 2}
    assert check_constants(problem.node, weights) == describe_call(problem.node, problem.inputs).experts
    for missing in (2, 3, 5, 6, 8, 9):
        partial = {i: a for i, a in weights.items() if i != missing}
        assert check_constants(problem.node, partial) is None
    assert check_constants(problem.node, {}) is None


def test_constants_that_do_not_belong_there() -> None:
    problem = build(Recipe(router_weights=True))
    array = np.zeros((4, 4), np.float32)
    index: Any
    for index in (0, 1, 14):
        with pytest.raises(QMoEError, match=f"{INPUT_NAMES[index]} .* changes with each call"):
            check_constants(problem.node, {index: array})
    for index in (-1, 21, "fc1_scales"):
        with pytest.raises(QMoEError, match="initializers: expected input indices 0 to 20"):
            check_constants(problem.node, {index: array})
    node = QMoENode.from_onnx(problem.node_proto())
    with pytest.raises(QMoEError, match=r"fc1_experts_bias .* absent from the node"):
        check_constants(node, {4: array})
    weights = {i: a for i, a in enumerate(problem.inputs) if a is not None and 2 <= i < 14}
    with pytest.raises(QMoEError, match="fc3_experts_bias"):
        check_constants(problem.node, weights | {10: array})


def test_a_constant_that_is_wrong_by_itself_is_named_at_creation() -> None:
    problem = build(Recipe())
    for array in (np.zeros((4, 4, 4), np.int8), np.zeros((4, 4), np.uint8)):
        with pytest.raises(QMoEError, match="fc1_experts_weights: expected"):
            check_constants(problem.node, {2: array})


def test_operands_come_from_creation_or_from_the_call() -> None:
    assert merge_operands({2: "w", 3: "s"}, ["x", "r"]) == ["x", "r", "w", "s", *[None] * 17]
    assert merge_operands({2: "w"}, ["x", "r", None, "s"])[:4] == ["x", "r", "w", "s"]
    with pytest.raises(QMoEError, match=r"fc1_experts_weights \(input 2\) was given as an initializer"):
        merge_operands({2: "w"}, ["x", "r", "again"])
    with pytest.raises(QMoEError, match="22 operands"):
        merge_operands({}, [None] * 22)
