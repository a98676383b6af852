"""Quantizing the float experts of model files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPSETS, Arrays, external_tensor, value

import qmoe_ep
from qmoe_ep import QMoEError
from qmoe_ep.onnx import load_model, quantize_model, run_model

EXPERTS, HIDDEN, INTER, ROWS = 4, 32, 64, 5


def float_model(activation: str = "swiglu", dtype: Any = np.float32, **attributes: Any) -> tuple[Any, Arrays]:
    """A float MoE node whose output adds the first bias, which another node shares, and inputs for it."""
    random = np.random.default_rng(7)
    fused = 2 if attributes.get("swiglu_fusion") else 1
    shapes = {
        "w1": (EXPERTS, fused * INTER, HIDDEN),
        "b1": (EXPERTS, fused * INTER),
        "w2": (EXPERTS, HIDDEN, INTER),
        "b2": (EXPERTS, HIDDEN),
    }
    tensors = [
        numpy_helper.from_array((0.2 * random.standard_normal(shape)).astype(dtype), name)
        for name, shape in shapes.items()
    ]
    node = helper.make_node(
        "MoE",
        ["x", "r", "w1", "b1", "w2", "b2"],
        ["mixed"],
        name="experts",
        domain="com.microsoft",
        k=2,
        activation_type=activation,
        **attributes,
    )
    pick = helper.make_node("Slice", ["b2", "zero", "one"], ["row"])
    add = helper.make_node("Add", ["mixed", "row"], ["y"])
    tensors += [numpy_helper.from_array(np.array([i]), name) for i, name in enumerate(("zero", "one"))]
    x, r = (random.standard_normal((ROWS, n)).astype(dtype) for n in (HIDDEN, EXPERTS))
    graph = helper.make_graph([node, pick, add], "g", [value("x", x), value("r", r)], [value("y", x)], tensors)
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10), {"x": x, "r": r}


SWIGLU = {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 7.0}


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize(("bits", "symmetric", "block_size"), [(8, True, 32), (8, False, 0), (4, True, 16)])
@pytest.mark.parametrize(
    ("activation", "attributes"), [("swiglu", SWIGLU), ("gelu", {"normalize_routing_weights": 1}), ("silu", {})]
)
def test_quantized_model_is_near_the_float_one(
    tmp_path: Path,
    provider: qmoe_ep.CpuExecutionProvider,
    external: bool,
    bits: int,
    symmetric: bool,
    block_size: int,
    activation: str,
    attributes: dict[str, Any],
) -> None:
    proto, inputs = float_model(activation, **attributes)
    source, target = tmp_path / "float.onnx", tmp_path / "out.onnx"
    onnx.save(proto, source, save_as_external_data=external, location="weights.bin", size_threshold=100)
    seen: list[tuple[int, int, str]] = []
    (converted,) = quantize_model(
        source, target, bits=bits, block_size=block_size, symmetric=symmetric, progress=lambda *a: seen.append(a)
    )
    assert (converted.name, converted.weights) == ("experts", ("w1", "w2"))
    assert seen == [(1, 2, "w1"), (2, 2, "w2")]
    expected = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, inputs)[0]
    actual = run_model(target, inputs, provider)["y"]
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < {8: 0.02, 4: 0.25}[bits]
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"float.onnx", "out.onnx"} | ({"weights.bin", "out.onnx.data"} if external else set())
    model = load_model(target)
    assert not {"w1", "w2"} & set(model.initializer_names)
    np.testing.assert_array_equal(model.tensor("b1"), load_model(source).tensor("b1"))
    assert isinstance(model.tensor("w1_quantized"), np.memmap) is external
    onnx.checker.check_model(str(target), full_check=False)


def test_weights_that_others_use_stay(tmp_path: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    proto, inputs = float_model("relu", np.float16)
    twin = onnx.NodeProto()
    twin.CopyFrom(proto.graph.node[0])
    twin.output[0] = "again"
    proto.graph.node.extend([twin, helper.make_node("Identity", ["w1"], ["copy"])])
    proto.graph.output.extend(
        [value("again", inputs["x"]), helper.make_tensor_value_info("copy", 10, [EXPERTS, INTER, HIDDEN])]
    )
    source, target = tmp_path / "float.onnx", tmp_path / "out.onnx"
    onnx.save(proto, source, save_as_external_data=True, size_threshold=0)
    assert len(quantize_model(source, target)) == 2
    model = load_model(target)
    assert sorted(n for n in model.initializer_names if n.startswith("w")) == [
        "w1", "w1_quantized", "w1_scales", "w2_quantized", "w2_scales"
    ]  # fmt: skip
    assert model.tensor("w1_scales").dtype == np.float16
    results = run_model(model, inputs, provider)
    np.testing.assert_array_equal(results["copy"], load_model(source).tensor("w1"))
    assert results["again"].shape == results["y"].shape


def test_external_data_of_others_is_copied_as_it_is(tmp_path: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    proto, inputs = float_model("relu")
    short = external_tensor(tmp_path / "short.bin", np.float32([5, 6]))
    long = external_tensor(tmp_path / "long.bin", np.float32([5, 6, 7, 8]), location="short.bin")
    (tmp_path / "long.bin").replace(tmp_path / "short.bin")
    codes = external_tensor(tmp_path / "codes.bin", np.uint8([0x21, 0x43, 0x05]))
    codes.data_type, codes.dims[:] = TensorProto.UINT4, [5]
    proto.graph.initializer.extend([short, long, codes])
    function = helper.make_function(
        "local",
        "Value",
        [],
        ["c"],
        [helper.make_node("Constant", [], ["c"], value=external_tensor(tmp_path / "value.bin", np.float32([9])))],
        OPSETS[:1],
    )
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.graph.node.append(helper.make_node("Value", [], ["v"], domain="local"))
    for name in ("short", "long", "codes"):
        proto.graph.node.append(helper.make_node("Identity", [name], [f"{name}_out"]))
        proto.graph.output.append(helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None))
    proto.graph.output.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, [1]))
    (tmp_path / "float.onnx").write_bytes(proto.SerializeToString())
    target = tmp_path / "elsewhere" / "out.onnx"
    target.parent.mkdir()
    quantize_model(tmp_path / "float.onnx", target)
    assert {path.name for path in target.parent.iterdir()} == {"out.onnx", "out.onnx.data"}
    results = run_model(target, inputs, provider)
    assert results["short_out"].tolist() == [5, 6]
    assert results["long_out"].tolist() == [5, 6, 7, 8]
    assert results["codes_out"].astype(np.int64).tolist() == [1, 2, 3, 4, 5]
    assert results["v"].tolist() == [9]


def test_failures_leave_the_target_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto, _ = float_model("relu")
    source, target = tmp_path / "float.onnx", tmp_path / "out.onnx"
    onnx.save(proto, source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    target.write_bytes(b"old model")
    (tmp_path / "out.onnx.data").write_bytes(b"old data")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def unchanged() -> bool:
        return before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    for arguments in ({"bits": 5}, {"block_size": 24}, {"block_size": 128}):
        with pytest.raises(QMoEError):
            quantize_model(source, target, **arguments)
        assert unchanged()
    for bad in (source, tmp_path / "absent" / "out.onnx"):
        with pytest.raises(QMoEError):
            quantize_model(source, bad)
        assert unchanged()

    replace = os.replace

    def fail(old: Any, new: Any) -> None:
        if Path(new) == target:
            raise OSError("disk gone")
        replace(old, new)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(QMoEError, match="disk gone"):
        quantize_model(source, target)
    assert unchanged()


def test_data_file_of_the_source_is_not_overwritten(tmp_path: Path) -> None:
    proto, _ = float_model("relu")
    source = tmp_path / "float.onnx"
    onnx.save(proto, source, save_as_external_data=True, location="out.onnx.data", size_threshold=0)
    with pytest.raises(QMoEError, match="belongs to the model that is read"):
        quantize_model(source, tmp_path / "out.onnx")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: g.node[0].attribute.append(helper.make_attribute("colour", 1)), "attribute colour"),
        (lambda g: g.initializer[0].dims.__setitem__(slice(None), [EXPERTS, HIDDEN, INTER]), "expected shape"),
        (lambda g: g.node[0].input.__setitem__(2, "x"), "must be an initializer"),
        (lambda g: g.node.__delitem__(0), "no com.microsoft::MoE node"),
        (lambda g: g.node[0].attribute.append(helper.make_attribute("use_sparse_mixer", 2)), "use_sparse_mixer"),
    ],
)
def test_nodes_that_cant_be_quantized(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    proto, _ = float_model("relu")
    change(proto.graph)
    source = tmp_path / "float.onnx"
    source.write_bytes(proto.SerializeToString())
    with pytest.raises(QMoEError, match=words):
        quantize_model(source, tmp_path / "out.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["float.onnx"]
