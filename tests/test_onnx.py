"""Whole models on the CPU provider, with QMoE nodes wherever a graph can have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import OPSETS, STORED, moe_graph, stored_arrays, value
from problems import DTYPES, Recipe

import qmoe_ep
from qmoe_ep import QMoEError
from qmoe_ep.onnx import LoadedModel, Session, graph_inputs, graph_outputs, load_model, reference_ops, run_model


@pytest.mark.parametrize("name", sorted(STORED))
def test_stored_models_match(name: str, provider: qmoe_ep.CpuExecutionProvider) -> None:
    path = STORED[name]
    session = Session(path, provider)
    for _ in range(2):
        (actual,) = session.run(stored_arrays(path, "inputs")).values()
        (expected,) = stored_arrays(path, "expected").values()
        assert actual.dtype == expected.dtype
        exact = expected.astype(np.float64)
        error = np.linalg.norm(actual - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        assert error.max() < (2e-6 if expected.dtype == np.float32 else 1e-3)


def test_values_of_the_graph() -> None:
    model = load_model(STORED["m3"])
    assert graph_inputs(model) == [
        ("input", np.dtype(np.float32), ["tokens", 64]),
        ("router_probs", np.dtype(np.float32), ["tokens", 16]),
        ("router_weights", np.dtype(np.float32), ["tokens", 16]),
    ]
    assert [name for name, _, _ in graph_outputs(model)] == ["output"]
    (entry,) = model.qmoe_nodes()
    assert (entry.node_id, entry.node.k, entry.proto.name) == (0, 4, "qmoe")


def test_inputs_that_dont_fit(provider: qmoe_ep.CpuExecutionProvider) -> None:
    session = Session(STORED["m1"], provider)
    good = stored_arrays(STORED["m1"], "inputs")
    x = good["input"]
    for change, words in (
        ({"other": x}, "unknown inputs 'other'"),
        ({"input": x.astype(np.float64)}, "input 'input': expected float32, got float64"),
        ({"input": x[:, :-1]}, r"input 'input': expected shape \[tokens, 96\], got \[6, 95\]"),
        ({"input": x[0]}, "got \\[96\\]"),
        ({"input": x.tolist()}, "got list"),
    ):
        with pytest.raises(QMoEError, match=words):
            session.run({**good, **change})
    with pytest.raises(QMoEError, match="missing inputs 'router_probs'"):
        session.run({"input": x})
    with pytest.raises(QMoEError, match="unknown outputs 'y'"):
        session.run(good, ["y"])


def test_model_without_qmoe(tmp_path: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    bias = numpy_helper.from_array(np.ones(3, np.float32), "b")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "b"], ["y"])], "g", [value("x", x), value("b", x[0])], [value("y", x)], [bias]
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=OPSETS), path)
    onnx.save(onnx.load(path), tmp_path / "external.onnx", save_as_external_data=True, size_threshold=0)
    assert load_model(path).qmoe_nodes() == []
    assert [name for name, _, _ in graph_inputs(load_model(path))] == ["x"]
    for file in (path, tmp_path / "external.onnx"):
        np.testing.assert_array_equal(run_model(file, {"x": x}, provider)["y"], x + 1)
    # An initializer that is an input as well is a default.
    np.testing.assert_array_equal(run_model(path, {"x": x, "b": x[0]}, provider)["y"], x + x[0])


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("constant", [True, False])
def test_weights_as_initializers_or_inputs(dtype: str, constant: bool, provider: qmoe_ep.CpuExecutionProvider) -> None:
    problem, node, tensors = moe_graph(Recipe(dtype=dtype))
    arrays = {n: a for n, a in zip(node.input, problem.inputs, strict=False) if n and a is not None}
    constants = {t.name for t in tensors} if constant else set()
    inputs = [value(n, a) for n, a in arrays.items() if n not in constants]
    graph = helper.make_graph([node], "g", inputs, [value("output", problem.inputs[0])], tensors if constant else [])
    proto = helper.make_model(graph, opset_imports=OPSETS)
    fed = {n: np.ascontiguousarray(a) for n, a in arrays.items() if n not in constants}
    session = Session(LoadedModel(Path("model.onnx"), proto), provider)
    problem.check(session.run(fed)["output"])
    operator = reference_ops(provider)
    for new_ops in ([operator], operator):
        evaluator = ReferenceEvaluator(proto, new_ops=new_ops)
        for _ in range(2):
            problem.check(evaluator.run(None, fed)[0])
    if constant:
        with pytest.raises(QMoEError, match="unknown inputs"):
            session.run({**fed, node.input[2]: arrays[node.input[2]]})


def test_node_in_a_subgraph_shares_weights(provider: qmoe_ep.CpuExecutionProvider) -> None:
    problem, node, tensors = moe_graph(Recipe())
    x, logits = (np.ascontiguousarray(problem.inputs[i]) for i in (0, 1))
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.output[0] = "inner"
    then = helper.make_graph([inner], "then", [], [value("inner", x)], tensors[:1])
    other = helper.make_graph([helper.make_node("Identity", ["output"], ["same"])], "else", [], [value("same", x)])
    choose = helper.make_node("If", ["which"], ["chosen"], then_branch=then, else_branch=other)
    graph = helper.make_graph(
        [node, choose],
        "g",
        [value(node.input[0], x), value(node.input[1], logits), helper.make_tensor_value_info("which", 9, [])],
        [value("output", x), value("chosen", x)],
        tensors,
    )
    model = LoadedModel(Path("model.onnx"), helper.make_model(graph, opset_imports=OPSETS))
    assert [entry.node_id for entry in model.qmoe_nodes()] == [0, 1]
    session = Session(model, provider)
    for which in (True, False):
        results = session.run({node.input[0]: x, node.input[1]: logits, "which": np.array(which)})
        problem.check(results["chosen"])
        np.testing.assert_array_equal(results["chosen"], results["output"])


def test_node_in_a_function_takes_the_attributes_of_the_call(
    tmp_path: Path, provider: qmoe_ep.CpuExecutionProvider
) -> None:
    problem, node, tensors = moe_graph(Recipe())
    (k,) = (a for a in node.attribute if a.name == "k")
    node.attribute.remove(k)
    node.attribute.append(onnx.AttributeProto(name="k", type=onnx.AttributeProto.INT, ref_attr_name="top"))
    names = [name for name in node.input if name]
    function = helper.make_function("local", "Experts", names, ["output"], [node], OPSETS, attributes=["top"])
    call = helper.make_node("Experts", names, ["y"], domain="local", top=k.i)
    x, logits = (np.ascontiguousarray(problem.inputs[i]) for i in (0, 1))
    graph = helper.make_graph([call], "g", [value(names[0], x), value(names[1], logits)], [value("y", x)], tensors)
    proto = helper.make_model(graph, opset_imports=[*OPSETS, helper.make_opsetid("local", 1)], functions=[function])
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    session = Session(path, provider)
    for _ in range(2):
        problem.check(session.run({names[0]: x, names[1]: logits})["y"])


class DeviceProvider:
    """A provider whose kernels take only what it made itself, as those of a device do; counts the copies."""

    name = "device"

    class Tensor:
        def __init__(self, array: Any) -> None:
            self.array = array

        def numpy(self) -> Any:
            return self.array.copy()

    def __init__(self, host: qmoe_ep.CpuExecutionProvider) -> None:
        self.host = host
        self.copies = 0

    def to_device(self, array: Any) -> DeviceProvider.Tensor:
        assert array.flags.c_contiguous
        self.copies += 1
        return self.Tensor(array.copy())

    def synchronize(self) -> None:
        pass

    def create_kernel(self, node: Any, **more: Any) -> Any:
        kernel = self.host.create_kernel(node, **more)
        return lambda *inputs: self.Tensor(kernel(*(i if i is None else i.array for i in inputs)))


def test_weights_go_to_a_device_once(provider: qmoe_ep.CpuExecutionProvider) -> None:
    path, device = STORED["m1"], DeviceProvider(provider)
    inputs = stored_arrays(path, "inputs")
    expected = run_model(path, inputs, provider)["output"]
    session = Session(path, device)
    evaluator = ReferenceEvaluator(onnx.load(path), new_ops=[reference_ops(device)])
    copies = []
    for _ in range(3):
        np.testing.assert_array_equal(session.run(inputs)["output"], expected)
        np.testing.assert_array_equal(evaluator.run(None, inputs)[0], expected)
        copies.append(device.copies)
    assert np.diff(copies).tolist() == [4, 4]
