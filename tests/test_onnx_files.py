"""Model files: reading them, external data, and everything that can be wrong with either."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPSETS, STORED, external_tensor, one_tensor, set_entry, value, with_location
from problems import DTYPES

import qmoe_ep
from qmoe_ep import QMoEError
from qmoe_ep.onnx import LoadedModel, Session, load_model, run_model


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A copy of the model with external data."""
    folder = tmp_path / "model"
    shutil.copytree(STORED["m5"].parent, folder)
    return folder / STORED["m5"].name


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


def test_missing_file_and_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(QMoEError, match="can't be read"):
        load_model(tmp_path / "absent.onnx")
    for path in (tmp_path, os.devnull):
        with pytest.raises(QMoEError, match="not a file"):
            load_model(path)


def test_model_larger_than_a_model_can_be(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(QMoEError, match="less than 2 GiB; store its weights as external data"):
        load_model(path)


def test_unknown_attribute(tmp_path: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    proto = onnx.load(STORED["m1"])
    proto.graph.node[0].attribute.append(helper.make_attribute("colour", 1))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    with pytest.raises(QMoEError, match=r"node 'qmoe': attribute colour"):
        Session(path, provider)


# --- external values of nodes ----------------------------------------------------------------------


def test_external_values_in_nodes_and_subgraphs(tmp_path: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    def external(name: str, number: float) -> TensorProto:
        return external_tensor(tmp_path / name, np.float32([number]))

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


def in_function(constant: TensorProto) -> onnx.ModelProto:
    """``y = x + constant`` in a local function."""
    x = np.ones(4, np.float32)
    body = [helper.make_node("Constant", [], ["c"], value=constant), helper.make_node("Add", ["a", "c"], ["b"])]
    function = helper.make_function("local", "Shift", ["a"], ["b"], body, OPSETS[:1])
    call = helper.make_node("Shift", ["x"], ["y"], domain="local")
    graph = helper.make_graph([call], "g", [value("x", x)], [value("y", x)])
    return helper.make_model(graph, opset_imports=[*OPSETS, helper.make_opsetid("local", 1)], functions=[function])


def as_sparse(constant: TensorProto) -> onnx.ModelProto:
    """``y = x`` next to a sparse initializer and a sparse value."""
    x = np.ones(4, np.float32)
    indices = numpy_helper.from_array(np.arange(4), "indices")
    sparse = onnx.SparseTensorProto(values=constant, indices=indices, dims=[4])
    unused = helper.make_node("Constant", [], ["unused"], sparse_value=sparse)
    graph = helper.make_graph(
        [unused, helper.make_node("Identity", ["x"], ["y"])], "g", [value("x", x)], [value("y", x)]
    )
    return helper.make_model(graph, opset_imports=OPSETS)


@pytest.mark.parametrize("make", [in_function, as_sparse])
@pytest.mark.parametrize("location", ["../c", "c", "/etc/hostname"])
def test_external_values_stay_in_the_models_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: qmoe_ep.CpuExecutionProvider,
    make: Callable[[TensorProto], onnx.ModelProto],
    location: str,
) -> None:
    constant = external_tensor(tmp_path / "c", np.float32([1, 2, 3, 4]), location=location)
    path = tmp_path / "folder" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(make(constant).SerializeToString())
    # A file of that name in the working directory must not be taken for the model's.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QMoEError, match="tensor 'c'"):
        run_model(path, {"x": np.ones(4, np.float32)}, provider)


def test_external_value_in_a_function(tmp_path: Path, provider: qmoe_ep.CpuExecutionProvider) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(in_function(external_tensor(tmp_path / "c", np.float32([1, 2, 3, 4]))).SerializeToString())
    assert run_model(path, {"x": np.ones(4, np.float32)}, provider)["y"].tolist() == [2, 3, 4, 5]
