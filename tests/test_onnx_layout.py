"""Model files between raw and SM80 order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from problems import Recipe, build
from shell import MODELS, Shell, model_of, save, tensor_type
from special_problems import special

import qmoe_ep
from qmoe_ep import QMoEError
from qmoe_ep.onnx import convert_layout, load_model, run_model

EXTERNAL = next(MODELS.rglob("m5*.onnx"))


def model(tmp_path: Path, bits: int = 4, **attributes: Any) -> Path:
    """A model of one node with raw weights, embedded."""
    problem = build(Recipe(leading=(3,), hidden=64, inter=64, bits=(bits,) * 3, **attributes))
    return model_of(problem, tmp_path / "raw.onnx")


def packed(path: Path) -> dict[str, bytes]:
    loaded = load_model(path)
    return {name: loaded.tensor(name).tobytes() for name in loaded.initializer_names}


@pytest.mark.parametrize("bits", [2, 4])
def test_there_and_back(tmp_path: Path, bits: int) -> None:
    source = model(tmp_path, bits)
    changed = convert_layout(source, tmp_path / "sm80.onnx", "sm80")
    assert changed == ["fc1_experts_weights", "fc2_experts_weights"]
    assert load_model(tmp_path / "sm80.onnx").qmoe_nodes()[0].node.weights_prepacked == 1
    convert_layout(tmp_path / "sm80.onnx", tmp_path / "back.onnx", "raw")
    before, between, after = (packed(tmp_path / f"{name}.onnx") for name in ("raw", "sm80", "back"))
    assert before == after
    assert all((before[name] != between[name]) == (name in changed) for name in before)


def test_external_data_stays_external_and_the_model_computes_the_same(tmp_path: Path) -> None:
    target = tmp_path / "raw.onnx"
    assert convert_layout(EXTERNAL, target, "raw")
    assert {path.name for path in tmp_path.iterdir()} == {"raw.onnx", "raw.onnx.data"}
    inputs = dict(np.load(EXTERNAL.with_name(EXTERNAL.name.replace(".onnx", ".inputs.npz"))))
    cpu = qmoe_ep.CpuExecutionProvider()
    before, after = (run_model(load_model(path), inputs, cpu) for path in (EXTERNAL, target))
    assert {name: array.tobytes() for name, array in before.items()} == {n: a.tobytes() for n, a in after.items()}


@pytest.mark.parametrize("form", ["fp4 in columns", "nvfp4 in columns", "fp4"])
def test_small_floats(tmp_path: Path, form: str) -> None:
    """Two output features a byte become rows of input features; the SM80 order is for integers."""
    problem = special(form, "relu2")
    source = model_of(problem, tmp_path / "source.onnx")
    changed = convert_layout(source, tmp_path / "raw.onnx", "raw")
    assert changed == ([] if form == "fp4" else ["fc1_experts_weights", "fc2_experts_weights"])
    assert load_model(tmp_path / "raw.onnx").qmoe_nodes()[0].node.weights_prepacked == 1
    cpu = qmoe_ep.CpuExecutionProvider()
    inputs = {"input": problem.inputs[0], "router_probs": problem.inputs[1]}
    before, after = (run_model(path, inputs, cpu)["output"] for path in (source, tmp_path / "raw.onnx"))
    assert before.tobytes() == after.tobytes()
    problem.check_closely(after)
    refused(source, "SM80 layout exists for integers")


def test_what_is_in_order_is_only_marked(tmp_path: Path) -> None:
    source = model(tmp_path)
    assert convert_layout(source, tmp_path / "marked.onnx", "raw") == []
    assert packed(source) == packed(tmp_path / "marked.onnx")
    assert load_model(tmp_path / "marked.onnx").qmoe_nodes()[0].node.weights_prepacked == 0


def test_the_callers_word_for_the_source(tmp_path: Path) -> None:
    source = model(tmp_path)
    assert convert_layout(source, tmp_path / "sm80.onnx", "sm80", weights_layout="sm80") == []
    assert packed(source) == packed(tmp_path / "sm80.onnx")


def refused(source: Path, match: str, layout: Any = "sm80") -> None:
    target = source.parent / "target" / "out.onnx"
    target.parent.mkdir(exist_ok=True)
    with pytest.raises(QMoEError, match=match):
        convert_layout(source, target, layout)
    assert not list(target.parent.iterdir())


def test_refusals(tmp_path: Path) -> None:
    refused(model(tmp_path, 8), "fc1_expert_weight_bits is 8")
    refused(model(tmp_path), "'odd'", "odd")
    proto = onnx.load(model(tmp_path))
    node = proto.graph.node[0]
    weights = next(t for t in proto.graph.initializer if t.name == "fc1_experts_weights")
    shape = helper.make_node("Shape", [weights.name], ["shape"], name="size")
    proto.graph.node.append(shape)
    onnx.save(proto, tmp_path / "read.onnx")
    refused(tmp_path / "read.onnx", "Shape node 'size' reads 'fc1_experts_weights'")
    del proto.graph.node[1]
    other = onnx.NodeProto()
    other.CopyFrom(node)
    other.output[0], other.name = "second", "second"
    del other.attribute[:]
    prepacked = helper.make_attribute("weights_prepacked", 1)
    other.attribute.extend([*(a for a in node.attribute if a.name != prepacked.name), prepacked])
    proto.graph.node.append(other)
    onnx.save(proto, tmp_path / "both.onnx")
    refused(tmp_path / "both.onnx", "QMoE node 'second' reads 'fc1_experts_weights'")


def test_computed_weights_are_refused(tmp_path: Path) -> None:
    problem = build(Recipe(leading=(3,), hidden=64, inter=64))
    names = {name: a for name, a in zip(qmoe_ep.operator.INPUT_NAMES, problem.inputs, strict=False) if a is not None}
    values = [helper.make_tensor_value_info(name, tensor_type(a), a.shape) for name, a in names.items()]
    output = helper.make_tensor_value_info("output", tensor_type(problem.inputs[0]), problem.inputs[0].shape)
    save([problem.node_proto()], values, [output], [], tmp_path / "computed.onnx")
    refused(tmp_path / "computed.onnx", "must be an initializer")


def test_command(shell: Shell, tmp_path: Path) -> None:
    result = shell("convert", EXTERNAL, tmp_path / "raw.onnx", "--layout", "raw").succeeded()
    assert "tensors now in raw order" in result.out
    shell("convert", EXTERNAL, EXTERNAL, "--layout", "raw").failed("another name")
    shell("convert", EXTERNAL, tmp_path / "no" / "raw.onnx", "--layout", "raw").failed("folder")
