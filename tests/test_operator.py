"""Attributes and the claim: what is declined, what it says, and that everybody says the same."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Recipe, Space, build, node_proto, problems

from qmoe_ep import CpuExecutionProvider, QMoEError, QMoENode, describe_call, reference, unsupported_reason
from qmoe_ep.operator import INPUT_NAMES, REQUIRED_INPUTS, resolve_layout

DEFAULTS = {
    "k": 1,
    "activation_type": "relu",
    "normalize_routing_weights": 0,
    "use_sparse_mixer": 0,
    "swiglu_fusion": 0,
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "swiglu_limit": None,
    "expert_weight_bits": 4,
    "fc1_expert_weight_bits": None,
    "fc2_expert_weight_bits": None,
    "fc3_expert_weight_bits": None,
    "block_size": None,
    "quant_type": "int",
    "weights_prepacked": -1,
    "accuracy_level": 0,
    "prefill_min_tokens": 2,
}

WIDTHS = ("expert_weight_bits", "fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits")
BAD_VALUES: list[tuple[str, Any]] = [
    *(("k", value) for value in (0, -1, -(2**63))),
    *(("activation_type", value) for value in ("", "SwiGLU", "geglu2", "tanh")),
    *(("normalize_routing_weights", value) for value in (2, -1)),
    *(("use_sparse_mixer", value) for value in (2, -1)),
    *(("swiglu_fusion", value) for value in (-1, 3)),
    *(("activation_alpha", value) for value in (math.nan, math.inf, -math.inf)),
    *(("activation_beta", value) for value in (math.nan, math.inf, -math.inf)),
    *(("swiglu_limit", value) for value in (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0)),
    *((name, value) for name in WIDTHS for value in (0, 5, 6, 7, 9, 16, -4)),
    *(("block_size", value) for value in (1, 2, 8, 15, 24, 33, -2, -16, 2**62 + 1)),
    *(("quant_type", value) for value in ("", "INT", "fp16", "mystery")),
    *(("weights_prepacked", value) for value in (-2, 2)),
    *(("prefill_min_tokens", value) for value in (1, 0, -5)),
]
"""Values of the right type that are out of range, whether by keyword or in a model."""

INTEGERS = ("k", "swiglu_fusion", "weights_prepacked", "accuracy_level", "prefill_min_tokens", "block_size", *WIDTHS)
FLOATS = ("activation_alpha", "activation_beta", "swiglu_limit")
STRINGS = ("activation_type", "quant_type")
BAD_TYPES: list[tuple[str, Any]] = [
    *((name, value) for name in INTEGERS for value in (2.0, "2", True, np.True_, [2], math.nan)),
    *((name, value) for name in ("normalize_routing_weights", "use_sparse_mixer") for value in (1.0, "1", [1], None)),
    *((name, value) for name in FLOATS for value in ("1", True, [1.0], 1j, 1e39, -1e39, 10**400, Fraction(10**400))),
    *((name, value) for name in STRINGS for value in (1, b"relu", None, ["int"])),
    ("k", None),
    ("expert_weight_bits", None),
    ("activation_alpha", None),
    ("swiglu_limit", 1e-60),
]
"""What only keyword arguments can carry."""

BAD_ONNX: list[tuple[str, Any]] = [
    *((name, value) for name in INTEGERS for value in (2.0, "2", [2])),
    *((name, value) for name in ("normalize_routing_weights", "use_sparse_mixer") for value in (1.0, "1", [1])),
    *((name, value) for name in FLOATS for value in (1, "1", [1.0])),
    *((name, value) for name in STRINGS for value in (1, 1.0, ["int"], onnx.TensorProto())),
    ("activation", "relu"),
    ("K", 1),
    ("group_size", 32),
]
"""Attributes of a wrong type in a model, and unknown ones."""


def assert_declined(node: QMoENode | onnx.NodeProto, *words: str) -> str:
    """The claim, the creation, the description and the reference give one sentence that holds the words."""
    provider = CpuExecutionProvider()
    reason = unsupported_reason(node)
    assert reason is not None
    assert provider.unsupported_reason(node) == reason
    for word in words:
        assert word in reason
    with pytest.raises(QMoEError) as created:
        provider.create_kernel(node, node_id=3)
    assert str(created.value) == reason
    plain = node if isinstance(node, QMoENode) else QMoENode.from_onnx(node)
    for execute in (describe_call, reference.qmoe):
        with pytest.raises(QMoEError) as called:
            execute(plain, [])
        assert str(called.value) == reason
    return reason


# --- what is accepted ------------------------------------------------------------------------------


def test_defaults() -> None:
    node = QMoENode()
    assert {name: getattr(node, name) for name in DEFAULTS} == DEFAULTS
    assert unsupported_reason(node) is None
    proto = node_proto({}, [1] * 4 + [None] + [1] * 2)
    from_model = QMoENode.from_onnx(proto)
    assert {name: getattr(from_model, name) for name in DEFAULTS} == DEFAULTS
    assert unsupported_reason(proto) is None


@given(problems())
@settings(max_examples=60)
def test_a_node_reads_the_same_from_a_model(problem: Any) -> None:
    proto = problem.node_proto("layer 3")
    assert unsupported_reason(proto, problem.weights_layout) is None
    assert unsupported_reason(problem.node, problem.weights_layout) is None
    node = QMoENode.from_onnx(onnx.NodeProto.FromString(proto.SerializeToString()))
    assert {name: getattr(node, name) for name in DEFAULTS} == {name: getattr(problem.node, name) for name in DEFAULTS}
    assert node.name == "layer 3"
    present = [operand is not None for operand in problem.inputs]
    assert [node.has_input(i) for i in range(len(INPUT_NAMES))] == present + [False] * (len(INPUT_NAMES) - len(present))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalize_routing_weights", True),
        ("normalize_routing_weights", np.False_),
        ("use_sparse_mixer", False),
        ("k", np.int64(2)),
        ("block_size", np.int32(32)),
        ("block_size", 0),
        ("block_size", -1),
        ("block_size", 2**62),
        ("activation_alpha", np.float32(1.5)),
        ("activation_alpha", 2),
        ("activation_alpha", -3.5e-46),
        ("activation_beta", float(np.finfo(np.float32).max)),
        ("swiglu_limit", np.float16(7)),
        ("swiglu_limit", 2.0**-149),
        ("expert_weight_bits", np.uint8(8)),
        ("accuracy_level", -7),
        ("prefill_min_tokens", 2**62),
    ],
)
def test_accepted_values(name: str, value: object) -> None:
    assert unsupported_reason(QMoENode(**{name: value})) is None  # type: ignore[arg-type]


def test_row_wise_has_three_spellings() -> None:
    assert [QMoENode(block_size=size).blocks for size in (None, 0, -1, 16)] == [0, 0, 0, 16]


def test_width_of_each_matrix() -> None:
    node = QMoENode(expert_weight_bits=8)
    assert [node.bits(m) for m in ("fc1", "fc2", "fc3")] == [8, 8, 8]
    node = QMoENode(expert_weight_bits=8, fc1_expert_weight_bits=2)
    assert [node.bits(m) for m in ("fc1", "fc2", "fc3")] == [2, 8, 2]
    node = QMoENode(fc1_expert_weight_bits=1, fc2_expert_weight_bits=2, fc3_expert_weight_bits=3)
    assert [node.bits(m) for m in ("fc1", "fc2", "fc3")] == [1, 2, 3]


def test_the_caller_overrides_the_layout() -> None:
    stored = {prepacked: QMoENode(weights_prepacked=prepacked) for prepacked in (-1, 0, 1)}
    assert {p: resolve_layout(node) for p, node in stored.items()} == {-1: "raw", 0: "raw", 1: "sm80"}
    for node in stored.values():
        assert resolve_layout(node, "raw") == "raw"
        assert resolve_layout(node, "sm80") == "sm80"


# --- what is declined ------------------------------------------------------------------------------


@given(problems(), st.sampled_from(BAD_VALUES))
@settings(max_examples=250)
def test_one_value_out_of_range(problem: Any, bad: tuple[str, Any]) -> None:
    name, value = bad
    attributes = {**problem.attributes, name: value}
    for node in (QMoENode(**attributes), node_proto(attributes, problem.inputs)):
        reason = assert_declined(node, name)
        shown = str(value) if isinstance(value, str) else repr(value)
        assert shown in reason


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=str)
def test_every_value_out_of_range(name: str, value: object) -> None:
    assert_declined(QMoENode(**{**build(Recipe()).attributes, name: value}), name)


@pytest.mark.parametrize(("name", "value"), BAD_TYPES, ids=str)
def test_every_wrong_type_by_keyword(name: str, value: object) -> None:
    assert_declined(QMoENode(**{**build(Recipe()).attributes, name: value}), name)


@pytest.mark.parametrize(("name", "value"), BAD_ONNX, ids=str)
def test_every_wrong_attribute_in_a_model(name: str, value: object) -> None:
    problem = build(Recipe())
    assert_declined(node_proto({**problem.attributes, name: value}, problem.inputs), name)


def test_attributes_without_a_plain_value() -> None:
    problem = build(Recipe())
    proto = problem.node_proto()
    untyped = onnx.NodeProto.FromString(proto.SerializeToString())
    untyped.attribute.add().name = "accuracy_level"
    assert_declined(untyped, "accuracy_level", "an integer")

    referring = onnx.NodeProto.FromString(proto.SerializeToString())
    referring.attribute.add(name="accuracy_level", ref_attr_name="outer", type=onnx.AttributeProto.INT)
    assert_declined(referring, "accuracy_level", "outer", "inline")

    twice = onnx.NodeProto.FromString(proto.SerializeToString())
    twice.attribute.append(onnx.helper.make_attribute("k", 1))
    assert_declined(twice, "k", "twice")

    long = onnx.NodeProto.FromString(proto.SerializeToString())
    long.attribute.append(onnx.helper.make_attribute("accuracy_level", list(range(100_000))))
    assert len(assert_declined(long, "accuracy_level")) < 300


def test_fusion_needs_swiglu() -> None:
    for activation in ("relu", "gelu", "silu", "identity"):
        for fusion in (1, 2):
            node = QMoENode(activation_type=activation, swiglu_fusion=fusion)
            assert_declined(node, "swiglu_fusion", str(fusion), activation)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"quant_type": "fp4", "block_size": 16}, ("block_size must be 32", "fp4", "16")),
        ({"quant_type": "nvfp4", "block_size": 32}, ("block_size must be 16", "nvfp4", "32")),
        ({"quant_type": "fp4", "expert_weight_bits": 8}, ("expert_weight_bits must be 4", "fp4", "8")),
        ({"quant_type": "fp8", "fc2_expert_weight_bits": 2}, ("fc2_expert_weight_bits must be 8", "fp8", "2")),
        ({"use_sparse_mixer": 1, "k": 3}, ("use_sparse_mixer", "k = 2", "k = 3")),
        ({"use_sparse_mixer": 1, "k": 2, "normalize_routing_weights": 1}, ("normalize_routing_weights",)),
        ({"activation_type": "geglu"}, ("geglu", "swiglu_fusion")),
        ({"activation_type": "relu2", "swiglu_fusion": 1}, ("swiglu_fusion = 1", "relu2")),
        ({"swiglu_limit_after_activation": 2}, ("swiglu_limit_after_activation", "2")),
    ],
)
def test_what_formats_and_activations_ask_for(attributes: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_declined(QMoENode(**attributes), *words)


@pytest.mark.parametrize("matrix", ["fc1", "fc2", "fc3"])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_the_sm80_layout_has_two_widths(matrix: str, bits: int) -> None:
    attributes: dict[str, Any] = {f"{matrix}_expert_weight_bits": bits, "activation_type": "swiglu"}
    node = QMoENode(**attributes, weights_prepacked=1)
    assert_declined(node, f"{matrix}_expert_weight_bits is {bits}", "SM80")
    assert unsupported_reason(node, "raw") is None
    raw = QMoENode(**attributes, weights_prepacked=0)
    assert unsupported_reason(raw) is None
    assert "SM80" in (unsupported_reason(raw, "sm80") or "")


def test_the_layout_override_is_checked() -> None:
    reason = unsupported_reason(QMoENode(), "cuda")  # type: ignore[arg-type]
    assert reason is not None
    assert "weights_layout" in reason
    with pytest.raises(QMoEError, match="weights_layout") as raised:
        CpuExecutionProvider().create_kernel(QMoENode(), weights_layout="cuda")  # type: ignore[arg-type]
    assert str(raised.value) == reason


@pytest.mark.parametrize(("domain", "op_type"), [("", "QMoE"), ("com.microsoft", "MoE"), ("ai.onnx", "Add")])
def test_another_operator(domain: str, op_type: str) -> None:
    proto = onnx.helper.make_node(op_type, ["x"], ["y"], domain=domain, name="stranger")
    reason = unsupported_reason(proto)
    assert reason is not None
    for word in ("stranger", op_type, "com.microsoft::QMoE"):
        assert word in reason
    with pytest.raises(QMoEError) as raised:
        CpuExecutionProvider().create_kernel(proto)
    assert str(raised.value) == reason


# --- operands that a node names ----------------------------------------------------------------------


@given(problems(), st.sampled_from((0, 1, 2, 3, 5, 6)))
@settings(max_examples=40)
def test_a_required_input_is_missing(problem: Any, index: int) -> None:
    inputs = list(problem.inputs)
    inputs[index] = None
    assert_declined(node_proto(problem.attributes, inputs), INPUT_NAMES[index], "required")


def test_too_few_and_too_many_inputs_and_outputs() -> None:
    problem = build(Recipe())
    for count in range(7):
        first = next(i for i in (*REQUIRED_INPUTS, 3, 6) if i >= count)
        assert_declined(node_proto(problem.attributes, problem.inputs[:count]), INPUT_NAMES[first], "required")
    proto = problem.node_proto()
    proto.input.extend(["surplus"] * 20)
    assert_declined(proto, "inputs", str(len(proto.input)), "21")
    for outputs in ([], ["a", "b"]):
        proto = problem.node_proto()
        del proto.output[:]
        proto.output.extend(outputs)
        assert_declined(proto, "outputs", str(len(outputs)))


@pytest.mark.parametrize("index", range(15, 21))
def test_inputs_of_float_weights(index: int) -> None:
    problem = build(Recipe())
    inputs = [*problem.inputs, *[None] * (index - len(problem.inputs)), 1]
    assert_declined(node_proto(problem.attributes, inputs), INPUT_NAMES[index])


@given(
    problems(Space(activations=("swiglu", "relu", "gelu", "identity"), fusions=(1, 2))), st.sampled_from((8, 9, 10, 13))
)
@settings(max_examples=40)
def test_fc3_where_nothing_uses_it(problem: Any, index: int) -> None:
    inputs = [*problem.inputs, *[None] * (14 - len(problem.inputs))]
    inputs[index] = np.zeros(1)
    assert_declined(node_proto(problem.attributes, inputs), INPUT_NAMES[index], problem.node.activation_type)


@given(problems(Space(activations=("swiglu", "silu"), fusions=(0,), fc3=(True,))), st.sampled_from((8, 9)))
@settings(max_examples=40)
def test_fc3_is_incomplete(problem: Any, index: int) -> None:
    inputs = list(problem.inputs)
    inputs[index] = None
    assert_declined(node_proto(problem.attributes, inputs), "fc3_experts_weights" if index == 8 else "fc3_scales")
