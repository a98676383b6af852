"""Quantizing to small floats: as near as the format allows, in every corner, and through model files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shell import Shell
from test_onnx_quantize import SWIGLU, float_model

import qmoe_ep
from qmoe_ep import QMoEError, quantize_float_experts
from qmoe_ep.formats import FLOAT_DTYPES, FORMATS, ExpertMatrix
from qmoe_ep.onnx import load_model, quantize_model, run_model
from qmoe_ep.quantization import expand_matrix

FP8 = {"quant_type": "fp8", "block_size": 16}
KINDS = [("fp4", 0), ("nvfp4", 0), ("fp8", 0), ("fp8", 32), ("wfp4afp8", 0)]


def expanded(result: qmoe_ep.FloatQuantizedExperts, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The values that were stored, float64."""
    form = FORMATS[result.quant_type]
    matrix = ExpertMatrix(
        name="fc1",
        bits=form.bits,
        block_size=result.block_size,
        out_features=shape[1],
        in_features=shape[2],
        layout="raw",
        scale_dtype=FLOAT_DTYPES[0] if result.scales is None else result.scales.dtype,
        zero_points=False,
        bias_dtype=None,
        form=form,
    )
    return np.stack(
        [
            expand_matrix(
                matrix,
                result.packed[e],
                None if result.scales is None else result.scales[e],
                None,
                None if result.global_scale is None else float(result.global_scale[e]),
                dtype=np.float64,
            )
            for e in range(shape[0])
        ]
    )


def block_maxima(weights: np.ndarray[Any, Any], kind: str, size: int) -> np.ndarray[Any, Any]:
    """The largest magnitude of the block that each weight is in."""
    magnitudes = np.abs(weights).astype(np.float64)
    if kind == "fp8" and not size:
        return np.broadcast_to(magnitudes.max(axis=(1, 2), keepdims=True), weights.shape)
    columns = FORMATS[kind].block_size or size
    rows = size if kind == "fp8" else 1
    result = np.empty_like(magnitudes)
    for n in range(0, weights.shape[1], rows):
        for k in range(0, weights.shape[2], columns):
            part = np.s_[:, n : n + rows, k : k + columns]
            result[part] = magnitudes[part].max(axis=(1, 2), keepdims=True)
    return result


@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.sampled_from([1e-3, 1.0, 3e4]), st.booleans())
def test_near_in_every_block(kind: tuple[str, int], seed: int, around: float, zeros: bool) -> None:
    name, size = kind
    random = np.random.default_rng(seed)
    weights = (around * random.standard_normal((2, 40, 64)) * random.uniform(0.01, 1, (2, 40, 1))).astype(np.float32)
    if zeros:
        weights[:, :3] = 0
    result = quantize_float_experts(weights, quant_type=name, block_size=size)
    values, largest = expanded(result, weights.shape), block_maxima(weights, name, size)
    # fp4: half a step of at most 2 of 6 after rounding the scale up; nvfp4: the scale itself has 3 bits; fp8: 3 bits.
    allowed = {"fp4": 1 / 3, "wfp4afp8": 1 / 3, "nvfp4": 1 / 6 + 1 / 8, "fp8": 1 / 16}[name]
    assert (np.abs(values - weights) <= allowed * largest + 1e-30).all()
    assert (np.sign(values) * np.sign(weights) >= 0).all()


@pytest.mark.parametrize(("name", "size"), KINDS)
def test_what_is_representable_stays(name: str, size: int) -> None:
    """Values of the format times a power of two come back."""
    random = np.random.default_rng(0)
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    weights = random.choice([*levels, *(-v for v in levels)], (2, 64, 64)).astype(np.float32)
    weights[:, :, ::16] = 6  # in every block
    if name == "fp8":
        weights *= np.float32(448 / 6)
        weights = weights.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if name == "nvfp4":
        weights *= np.float32(2.0**-6)
    result = quantize_float_experts(weights, quant_type=name, block_size=size)
    np.testing.assert_allclose(expanded(result, weights.shape), weights, rtol=1e-7)


def test_ties_go_to_even_codes() -> None:
    weights = np.zeros((1, 1, 32), np.float32)
    weights[0, 0, :9] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5]
    result = quantize_float_experts(weights, quant_type="fp4")
    assert expanded(result, weights.shape)[0, 0, :9].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"quant_type": "int"}, "fp4"),
        ({"quant_type": "fp4", "block_size": 16}, "block_size must be 32"),
        ({"quant_type": "fp8", "block_size": 24}, "power of two"),
        ({"quant_type": "fp8", "scale_dtype": np.int8}, "scale_dtype"),
        ({"weights": np.zeros((2, 3, 40), np.float32)}, "no multiple of 32"),
        ({"weights": np.zeros((2, 3), np.float32)}, "non-empty"),
        ({"weights": np.full((1, 1, 32), np.inf)}, "finite"),
        (
            {"weights": np.full((1, 16, 32), 3e38), "quant_type": "fp8", "block_size": 16, "scale_dtype": np.float16},
            "wider",
        ),
    ],
)
def test_refusals(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(QMoEError, match=words):
        quantize_float_experts(**{"weights": np.zeros((2, 3, 32), np.float32), **arguments})


# --- models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("name", "size"), KINDS)
def test_models(tmp_path: Path, name: str, size: int, dtype: Any) -> None:
    proto, inputs = float_model(dtype=dtype, **SWIGLU)
    (tmp_path / "float.onnx").write_bytes(proto.SerializeToString())
    quantize_model(tmp_path / "float.onnx", tmp_path / "small.onnx", quant_type=name, block_size=size)
    model = load_model(tmp_path / "small.onnx")
    (entry,) = model.qmoe_nodes()
    assert (entry.node.quant_type, entry.node.blocks) == (name, size or FORMATS[name].block_size)
    onnx.load(tmp_path / "small.onnx")
    exact = quantize_model(tmp_path / "float.onnx", tmp_path / "int8.onnx", bits=8, block_size=16)
    assert exact
    cpu = qmoe_ep.CpuExecutionProvider()
    got, near = (run_model(tmp_path / f"{n}.onnx", inputs, cpu)["y"].astype(np.float64) for n in ("small", "int8"))
    assert np.linalg.norm(got - near) <= (0.06 if name == "fp8" else 0.3) * np.linalg.norm(near)


@pytest.mark.parametrize(("name", "size"), [("nvfp4", 0), ("fp8", 0)])
def test_fc1_and_fc3_share_a_global_scale(tmp_path: Path, name: str, size: int) -> None:
    proto, _ = float_model("silu")
    weights = next(t for t in proto.graph.initializer if t.name == "w1")
    third = onnx.TensorProto()
    third.CopyFrom(weights)
    third.name = "w3"
    proto.graph.initializer.append(third)
    proto.graph.node[0].input.append("w3")
    (tmp_path / "float.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(QMoEError, match="share a global scale"):
        quantize_model(tmp_path / "float.onnx", tmp_path / "out.onnx", quant_type=name, block_size=size)
    assert not (tmp_path / "out.onnx").exists()
    quantize_model(tmp_path / "float.onnx", tmp_path / "out.onnx", quant_type="fp4")


def test_command(shell: Shell, tmp_path: Path) -> None:
    proto, _ = float_model(**SWIGLU)
    (tmp_path / "float.onnx").write_bytes(proto.SerializeToString())
    out = shell("quantize", tmp_path / "float.onnx", tmp_path / "fp4.onnx", "--format", "fp4").succeeded().out
    assert "1 QMoE nodes of fp4" in out
    (node,) = shell.json("inspect", tmp_path / "fp4.onnx")["nodes"]
    assert (node["quant_type"], node["block_size"], node["bits"]) == ("fp4", 32, {"fc1": 4, "fc2": 4})
    assert "fp4" in shell("inspect", tmp_path / "fp4.onnx").succeeded().out
