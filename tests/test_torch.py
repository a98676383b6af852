"""PyTorch on the CPU: the custom operator, its tracing, and the module."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import special_problems
from hypothesis import given, settings
from problems import Problem, Recipe, Space, build, problems
from special_problems import FUNCTIONS

import qmoe_ep
from qmoe_ep import QMoEError, RouteTelemetryConfig
from qmoe_ep.operator import INPUT_NAMES, MATRIX_INPUTS

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'qmoe-ep[torch]'")

from qmoe_ep.torch import QMoELayer, qmoe, quantize_experts  # noqa: E402
from qmoe_ep.torch.operation import ATTRIBUTES, DTYPES, _qmoe  # noqa: E402

SPACE = Space(layouts=("raw",), most_features=64)
WEIGHTS = sorted(i for indices in MATRIX_INPUTS.values() for i in indices)
ARRAYS = {dtype: kind for kind, dtype in DTYPES.items()}


def tensor(array: np.ndarray[Any, Any]) -> Any:
    """A tensor over an array's memory, strides and all (negative ones PyTorch doesn't have)."""
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype == DTYPES[torch.bfloat16]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(value: Any) -> np.ndarray[Any, Any]:
    """The other way."""
    raw = value.view(torch.int16) if value.dtype is torch.bfloat16 else value
    return raw.numpy().view(DTYPES[value.dtype])


def attributes_of(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem.node, name) for name in ATTRIBUTES}


def operands_of(problem: Problem) -> dict[str, Any]:
    return {INPUT_NAMES[i]: tensor(o) for i, o in enumerate(problem.inputs) if o is not None}


def weights_of(problem: Problem) -> dict[int, Any]:
    return {i: problem.inputs[i] for i in WEIGHTS if i < len(problem.inputs)}


def layer_of(problem: Problem) -> Any:
    return QMoELayer(problem.node, weights_of(problem))


def activations_of(problem: Problem) -> list[Any]:
    inputs = [*problem.inputs, *[None] * 14][:15]
    return [None if inputs[i] is None else tensor(inputs[i]) for i in (0, 1, 14)]


# --- the operator ----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(problem=problems(SPACE))
def test_random_problems(problem: Problem) -> None:
    output = qmoe(**operands_of(problem), **attributes_of(problem))
    assert output.is_contiguous()
    problem.check(array(output))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_operators_registration_is_sound(dtype: str) -> None:
    problem = build(
        Recipe(dtype=dtype, router_dtype=dtype, zero_points=(True, False, True), biases=(True, False, True))
    )
    torch.library.opcheck(qmoe, (), {**operands_of(problem), **attributes_of(problem)})


def test_zero_rows_give_an_empty_output() -> None:
    problem = build(Recipe(leading=(0,)))
    assert qmoe(**operands_of(problem), **attributes_of(problem)).shape == (0, problem.recipe.hidden)


def test_misfits_name_the_operand() -> None:
    problem = build(Recipe())
    operands, attributes = operands_of(problem), attributes_of(problem)
    with pytest.raises(QMoEError, match="fc2_scales"):
        qmoe(**{**operands, "fc2_scales": torch.ones(2, 3, 4)}, **attributes)
    with pytest.raises(QMoEError, match=r"router_probs: expected float32.*float64"):
        qmoe(**{**operands, "router_probs": operands["router_probs"].double()}, **attributes)
    with pytest.raises(QMoEError, match="input: expected a tensor on a CUDA device or the CPU, got one on meta"):
        _qmoe(**{k: v.to("meta") for k, v in operands.items()}, **attributes)
    with pytest.raises(QMoEError, match="router_probs: is on meta"):
        _qmoe(**{**operands, "router_probs": operands["router_probs"].to("meta")}, **attributes)


# --- the module ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_computes_its_problem(fusion: int, dtype: str) -> None:
    problem = build(Recipe(fusion=fusion, dtype=dtype, scale_dtypes=(dtype,) * 3, router_weights=True, leading=(2, 3)))
    layer = layer_of(problem)
    problem.check(array(layer(*activations_of(problem))))
    assert (layer.num_experts, layer.hidden_size, layer.inter_size) == (4, 64, 64)
    assert "experts=4, k=2, hidden=64, inter=64, bits=4, block_size=32, activation=swiglu" in repr(layer)
    assert not list(layer.parameters())


FORMS = [form for form in special_problems.FORMS if not form.endswith("columns")]


@pytest.mark.parametrize(("form", "function"), list(zip(FORMS, [*FUNCTIONS, "swiglu"], strict=True)))
@pytest.mark.parametrize("sparse", [False, True])
def test_number_formats_and_functions(form: str, function: str, sparse: bool) -> None:
    """Weights are rows of input features whatever the node says; 8-bit floats come as such or as bytes."""
    problem = special_problems.special(form, function, 5, sparse=sparse)
    weights = {i: a for i, a in enumerate(problem.inputs) if a is not None and (2 <= i < 14 or i in (15, 16))}
    if form == "nvfp4":
        weights[3] = torch.from_numpy(weights[3].view(np.uint8)).view(torch.float8_e4m3fn)
    layer = QMoELayer(replace(problem.node, weights_prepacked=-1), weights)
    problem.check_closely(array(layer(*activations_of(problem))))
    problem.check_closely(array(copy.deepcopy(layer)(*activations_of(problem))))
    assert (f"quant_type={problem.node.quant_type}" in repr(layer)) == (problem.node.quant_type != "int")


def test_number_formats_that_do_not_fit() -> None:
    problem = special_problems.special("nvfp4", "relu2", 5)
    weights = {i: a for i, a in enumerate(problem.inputs) if a is not None and i >= 2}
    scales = torch.from_numpy(weights[3].view(np.uint8)).view(torch.float8_e5m2)
    with pytest.raises(QMoEError, match="fc1_scales"):
        QMoELayer(problem.node, {**weights, 3: scales})
    with pytest.raises(QMoEError, match="fc1_global_scale"):
        QMoELayer(problem.node, {i: a for i, a in weights.items() if i != 15})
    operands = {INPUT_NAMES[i]: tensor(a) for i, a in enumerate(problem.inputs) if a is not None and i not in (3, 6)}
    with pytest.raises(QMoEError, match=r"fc1_scales.*float8_e5m2.*uint8"):
        qmoe(**operands, fc1_scales=scales, fc2_scales=scales, k=2, quant_type="nvfp4", activation_type="relu2")


def test_weights_are_taken_without_a_copy() -> None:
    problem = build(Recipe())
    packed = problem.inputs[2]
    assert packed is not None
    layer = layer_of(problem)
    assert layer.fc1_experts_weights.data_ptr() == packed.ctypes.data
    frozen = packed.copy()
    frozen.flags.writeable = False
    other = QMoELayer(problem.node, {**weights_of(problem), 2: frozen})
    assert torch.equal(other.fc1_experts_weights, layer.fc1_experts_weights)


def test_state_dict_makes_the_round_trip() -> None:
    problem = build(Recipe(zero_points=(True, True, True), biases=(True, True, True)))
    layer = layer_of(problem)
    state = layer.state_dict()
    assert set(state) == {INPUT_NAMES[i] for i in WEIGHTS if i < len(problem.inputs) and problem.inputs[i] is not None}
    empty = QMoELayer(layer.node, {INPUT_NAMES.index(name): torch.empty_like(value) for name, value in state.items()})
    empty.load_state_dict(state)
    problem.check(array(empty(*activations_of(problem))))


def test_copies_and_pickles_compute_and_count_for_themselves() -> None:
    problem = build(Recipe())
    layer = layer_of(problem)
    layer.telemetry.arm(RouteTelemetryConfig(4, 2))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        problem.check(array(other(*activations_of(problem))))
        assert not other.telemetry.armed
    assert layer.telemetry.snapshot().rows == 0


def test_floats_may_be_converted() -> None:
    problem = build(Recipe())
    layer = layer_of(problem).to(torch.bfloat16)
    assert layer.fc1_scales.dtype is torch.bfloat16
    assert layer.fc1_experts_weights.dtype is torch.uint8
    assert torch.isfinite(layer(*activations_of(problem)[:2])).all()
    with pytest.raises(QMoEError, match=r"fc1_scales.*float64"):
        layer.double()(*activations_of(problem)[:2])


def test_a_layer_refuses_what_does_not_fit() -> None:
    problem = build(Recipe())
    weights = weights_of(problem)
    with pytest.raises(QMoEError, match="14 is not the input index of a weight"):
        QMoELayer(problem.node, {**weights, 14: torch.ones(1)})
    with pytest.raises(QMoEError, match="fc1_scales"):
        QMoELayer(problem.node, {**weights, 3: torch.ones(4, 128, 7)})
    with pytest.raises(QMoEError, match="fc1_scales: expected a tensor or an array, got list"):
        QMoELayer(problem.node, {**weights, 3: [1.0]})
    with pytest.raises(QMoEError, match="use_sparse_mixer"):
        QMoELayer(replace(problem.node, use_sparse_mixer=1), weights)


def test_telemetry_counts_the_layers_own_calls() -> None:
    problem = build(Recipe())
    layer, other = layer_of(problem), layer_of(problem)
    activations = activations_of(problem)
    plain = layer(*activations)
    layer.telemetry.arm(RouteTelemetryConfig(4, 2, mode="counts"))
    assert torch.equal(layer(*activations), plain)
    other(*activations)
    snapshot = layer.telemetry.snapshot()
    chosen = qmoe_ep.routing.select_experts(problem.inputs[1], 2)
    assert snapshot.counts.tolist() == np.bincount(chosen.reshape(-1), minlength=4).tolist()
    layer.telemetry.disarm()
    layer(*activations)


# --- tracing ---------------------------------------------------------------------------------------


class Doubled(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A layer among other operations."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any, logits: Any) -> Any:
        return self.layer(2 * x, logits) + 1


def test_compile_passes_through_in_one_graph() -> None:
    problem = build(Recipe())
    model = Doubled(layer_of(problem))
    x, logits, _ = activations_of(problem)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (3, 2):
        assert torch.equal(compiled(x[:rows], logits[:rows]), model(x[:rows], logits[:rows]))


def test_export_keeps_the_operator(tmp_path: Path) -> None:
    problem = build(Recipe())
    model = Doubled(layer_of(problem))
    x, logits, _ = activations_of(problem)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (x, logits), dynamic_shapes=({0: rows}, {0: rows}))
    assert "qmoe_ep.qmoe" in program.graph_module.code
    longer = (torch.cat([x, x]), torch.cat([logits, logits]))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert torch.equal(loaded.module()(*longer), model(*longer))


# --- quantization ----------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_size", [None, 16, 32])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_quantization_is_that_of_numpy(bits: int, block_size: int | None, symmetric: bool) -> None:
    rng = np.random.default_rng(bits)
    values = rng.standard_normal((3, 24, 96)).astype(np.float32)
    values[1] *= 1e-7
    values[2, :5, :40] = 0
    for kind in ("float32", "float16", "bfloat16"):
        want = qmoe_ep.quantize_experts(
            values,
            bits=bits,
            block_size=block_size,
            symmetric=symmetric,
            scale_dtype=DTYPES[getattr(torch, kind)],
        )
        strided = torch.from_numpy(values.transpose(0, 2, 1).copy()).transpose(1, 2)
        got = quantize_experts(
            strided, bits=bits, block_size=block_size, symmetric=symmetric, scale_dtype=getattr(torch, kind)
        )
        assert (got.bits, got.block_size) == (want.bits, want.block_size)
        np.testing.assert_array_equal(got.packed.numpy(), want.packed)
        assert array(got.scales).tobytes() == np.ascontiguousarray(want.scales).tobytes()
        if want.zero_points is None:
            assert got.zero_points is None
        else:
            np.testing.assert_array_equal(got.zero_points.numpy(), want.zero_points)


def test_quantization_refuses_what_it_can_not_do() -> None:
    values = torch.ones(2, 4, 32)
    for options, match in (
        ({"bits": 5}, "bits must be one of"),
        ({"block_size": 24}, "power of two"),
        ({"block_size": 64}, "doesn't divide"),
        ({"scale_dtype": torch.float64}, "scale_dtype"),
    ):
        with pytest.raises(QMoEError, match=match):
            quantize_experts(values, **options)
    with pytest.raises(QMoEError, match=r"non-empty float \[E, N, K\]"):
        quantize_experts(values.int())
    with pytest.raises(QMoEError, match="NaN or infinity"):
        quantize_experts(values * float("nan"))
    with pytest.raises(QMoEError, match="overflows"):
        quantize_experts(values * 1e9, scale_dtype=torch.float16)
