"""Model files: loading, external data, whole models on the CPU provider, quantizing float experts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from problems import DTYPES, Recipe, build

import qmoe_ep
from qmoe_ep import QMoEError
from qmoe_ep.onnx import (
    LoadedModel,
    Session,
    graph_inputs,
    graph_outputs,
    load_model,
    quantize_model,
    reference_ops,
    run_model,
)

MODELS = Path(__file__).parent / "data" / "models"
STORED = {path.stem[:2]: path for path in MODELS.rglob("*.onnx")}
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def provider() -> qmoe_ep.CpuExecutionProvider:
    return qmoe_ep.CpuExecutionProvider()


def stored_arrays(path: Path, kind: str) -> Arrays:
    with np.load(path.with_suffix(f".{kind}.npz"), allow_pickle=False) as data:
        return dict(data)


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A copy of the model with external data."""
    folder = tmp_path / "model"
    shutil.copytree(STORED["m5"].parent, folder)
    return folder / STORED["m5"].name


def with_location(path: Path, change: Callable[[TensorProto], None]) -> LoadedModel:
    """The model after ``change`` to its first initializer."""
    proto = onnx.load(path, load_external_data=False)
    change(proto.graph.initializer[0])
    path.write_bytes(proto.SerializeToString())
    return load_model(path)


def set_entry(key: str, value: str) -> Callable[[TensorProto], None]:
    def change(tensor: TensorProto) -> None:
        kept = {e.key: e.value for e in tensor.external_data} | {key: value}
        del tensor.external_data[:]
        for name, text in kept.items():
            tensor.external_data.add(key=name, value=text)

    return change


# --- stored models ---------------------------------------------------------------------------------


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


def test_external_data_is_mapped_and_read_only(external: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    model = load_model(external)
    for name in model.initializer_names:
        array = model.tensor(name)
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable
        assert model.tensor(name) is array
    assert model.tensor("fc1_scales").dtype == np.float16
    given: dict[int, Any] = {}

    class Spy:
        name = "spy"

        def create_kernel(self, node: Any, initializers: Any = None, **more: Any) -> Any:
            given.update(initializers)
            return provider.create_kernel(node, initializers=initializers, **more)

    Session(model, Spy())
    assert sorted(given) == [2, 3, 4, 5, 6, 7]
    assert all(isinstance(array, np.memmap) for array in given.values())


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


# --- bad external data -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("location", "../outside", "without '..'"),
        ("location", "sub/../../outside", "without '..'"),
        ("location", "..\\outside", "without '..'"),
        ("location", "/etc/hostname", "relative path"),
        ("location", "C:\\outside", "relative path"),
        ("location", "", "relative path"),
        ("location", "a\0b", "can't be used"),
        ("location", ".", "not a regular file"),
        ("location", "absent", "missing"),
        ("offset", "-1", "offset"),
        ("offset", "x", "offset"),
        ("offset", "1", "expected at least 32769 bytes"),
        ("offset", "9" * 30, "offset"),
        ("length", "32767", "takes 32768 bytes"),
    ],
)
def test_bad_external_data(external: Path, key: str, value: str, words: str) -> None:
    (external.parent.parent / "outside").write_bytes(bytes(32768))
    model = with_location(external, set_entry(key, value))
    with pytest.raises(QMoEError, match="fc1_experts_weights") as error:
        model.tensor("fc1_experts_weights")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_link_out_of_the_folder(external: Path) -> None:
    data = external.parent / "fc1_experts_weights"
    outside = external.parent.parent / "outside"
    data.rename(outside)
    data.symlink_to(outside)
    with pytest.raises(QMoEError, match="link out of the model's folder"):
        load_model(external).tensor("fc1_experts_weights")


def test_link_inside_the_folder(external: Path) -> None:
    data = external.parent / "fc1_experts_weights"
    data.rename(data.with_name("inside"))
    data.symlink_to("inside")
    assert load_model(external).tensor("fc1_experts_weights").shape == (8, 128, 32)


def test_external_file_shorter_than_its_tensor(external: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    with (external.parent / "fc1_experts_weights").open("r+b") as file:
        file.truncate(32767)
    with pytest.raises(QMoEError, match=r"expected at least 32768 bytes .* the file has 32767"):
        Session(external, provider)


@pytest.mark.parametrize("dims", [[-1, 2], [0, 2**62, 8], [2**40, 2**20]])
def test_impossible_dimensions_ask_for_no_memory(external: Path, dims: list[int]) -> None:
    def change(tensor: TensorProto) -> None:
        tensor.dims[:] = dims

    with pytest.raises(QMoEError, match="fc1_experts_weights"):
        with_location(external, change).tensor("fc1_experts_weights")


def test_embedded_tensor_of_another_size() -> None:
    tensor = numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")
    tensor.dims[0] = 3
    graph = helper.make_graph([], "g", [], [helper.make_tensor_value_info("w", 1, [2, 3])], [tensor])
    model = LoadedModel(Path("model.onnx"), helper.make_model(graph))
    with pytest.raises(QMoEError, match="takes 36 bytes, but the file holds 24"):
        model.tensor("w")


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.dtype(np.uint8), np.dtype(np.int64), np.dtype(np.bool_)])
@pytest.mark.parametrize("raw", [True, False])
def test_storages(dtype: np.dtype[Any], raw: bool) -> None:
    values = np.array([[0, 1, 2], [3, 5, 7]]).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    data: Any = values.tobytes() if raw else values.ravel().tolist()
    tensor = helper.make_tensor("w", kind, values.shape, data, raw=raw)
    graph = helper.make_graph([], "g", [], [helper.make_tensor_value_info("w", kind, [2, 3])], [tensor])
    actual = LoadedModel(Path("model.onnx"), helper.make_model(graph)).tensor("w")
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, values)


def one_tensor(path: Path, tensor: TensorProto) -> LoadedModel:
    graph = helper.make_graph([], "g", [], [helper.make_tensor_value_info("w", 1, None)], [tensor])
    return LoadedModel(path, helper.make_model(graph))


@pytest.mark.parametrize("external", [True, False])
def test_four_bit_integers(tmp_path: Path, external: bool) -> None:
    tensor = helper.make_tensor("w", TensorProto.UINT4, [5], bytes([0x21, 0x43, 0x05]), raw=True)
    if external:
        (tmp_path / "w.bin").write_bytes(bytes(4) + tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (("location", "w.bin"), ("offset", "4")):
            tensor.external_data.add(key=key, value=text)
    actual = one_tensor(tmp_path / "model.onnx", tensor).tensor("w")
    assert actual.astype(np.int64).tolist() == [1, 2, 3, 4, 5]


def test_empty_external_tensor(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0, 4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    (tmp_path / "w.bin").write_bytes(b"")
    assert one_tensor(tmp_path / "model.onnx", tensor).tensor("w").shape == (0, 4)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (TensorProto(name="w", data_type=TensorProto.STRING, dims=[1], data_location=TensorProto.EXTERNAL), "external"),
        (TensorProto(name="w", data_type=99, dims=[1], raw_data=b"1"), "element type 99"),
        (TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], float_data=[1, 2]), "can't be read"),
        (TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[3], int32_data=[1, 2]), "takes 3 elements"),
    ],
)
def test_tensors_that_cant_be_read(tmp_path: Path, tensor: TensorProto, words: str) -> None:
    model = one_tensor(tmp_path / "model.onnx", tensor)
    with pytest.raises(QMoEError, match=words):
        model.tensor("w")
    with pytest.raises(QMoEError, match="no initializer is named 'v'"):
        model.tensor("v")


# --- bad files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"no model", b"\x00" * 100, b"PK\x03\x04" + bytes(30)])
def test_not_a_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(QMoEError, match="ONNX model"):
        load_model(path)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.7, 0.999])
def test_truncated_model(tmp_path: Path, share: float) -> None:
    data = STORED["m1"].read_bytes()
    path = tmp_path / "model.onnx"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(QMoEError, match=r"model\.onnx.*ONNX model"):
        load_model(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.onnx", tmp_path):
        with pytest.raises(QMoEError, match="can't be read"):
            load_model(path)


def test_unknown_attribute(tmp_path: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    proto = onnx.load(STORED["m1"])
    proto.graph.node[0].attribute.append(helper.make_attribute("colour", 1))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    with pytest.raises(QMoEError, match=r"node 'qmoe': attribute colour"):
        Session(path, provider)


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


# --- whole models ----------------------------------------------------------------------------------


def moe_graph(recipe: Recipe) -> tuple[Any, onnx.NodeProto, list[TensorProto]]:
    """A problem, its node, and its weights as initializers."""
    problem = build(recipe)
    node = problem.node_proto()
    tensors = [
        numpy_helper.from_array(np.ascontiguousarray(array), node.input[index])
        for index, array in enumerate(problem.inputs)
        if index >= 2 and array is not None and index != 14
    ]
    return problem, node, tensors


def value(name: str, array: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


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
    evaluator = ReferenceEvaluator(proto, new_ops=[reference_ops(provider)])
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


def test_external_values_in_nodes_and_subgraphs(tmp_path: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    def external(name: str, number: float) -> TensorProto:
        (tmp_path / name).write_bytes(np.float32(number).tobytes())
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=name)
        return tensor

    x = np.ones(1, np.float32)
    branches = {
        branch: helper.make_graph(
            [helper.make_node("Mul", ["x", "c"], [branch])], branch, [], [value(branch, x)], [external("c", 2)]
        )
        for branch in ("then_branch", "else_branch")
    }
    nodes = [
        helper.make_node("If", ["which"], ["chosen"], **branches),
        helper.make_node("Constant", [], ["d"], value=external("d", 5)),
        helper.make_node("Add", ["chosen", "d"], ["y"]),
    ]
    inputs = [value("x", x), helper.make_tensor_value_info("which", TensorProto.BOOL, [])]
    graph = helper.make_graph(nodes, "g", inputs, [value("y", x)])
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=OPSETS).SerializeToString())
    assert run_model(path, {"x": x, "which": np.array(True)}, provider)["y"].tolist() == [7]


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


# --- quantizing ------------------------------------------------------------------------------------

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

    import os

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
        (lambda g: g.node[0].attribute.append(helper.make_attribute("use_sparse_mixer", 1)), "use_sparse_mixer"),
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
