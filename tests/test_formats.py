"""Every number format, activation and way to route beyond plain integers, on everything that executes the operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated import machine
from hypothesis import given
from hypothesis import strategies as st
from problems import Array, Problem
from simulated import kernels_decode, kernels_grouped, kernels_portable, kernels_prefill
from special_problems import FORMS, FUNCTIONS, naive, special
from test_cuda_provider import run as run_on_gpu
from test_kernels_portable import _emulate

from qmoe_ep import (
    CpuExecutionProvider,
    CudaExecutionProvider,
    QMoEError,
    QMoENode,
    quantize_float_experts,
    unsupported_reason,
)
from qmoe_ep.formats import E4M3, E8M0, FORMATS, WeightFormat, element_values
from qmoe_ep.operator import INPUT_NAMES, MATRIX_INPUTS
from qmoe_ep.quantization import columns_to_raw, raw_to_columns

# Importing them is what registers the simulated kernels.
assert kernels_decode
assert kernels_grouped
assert kernels_prefill
assert kernels_portable

MIXED = [(form, name) for n, form in enumerate(FORMS) for m, name in enumerate(FUNCTIONS) if (n + m) % 3 == 0]


# --- what is right -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_against_scalar_loops(form: str) -> None:
    problem = special(form, "swiglu with fc3", rows=2)
    np.testing.assert_allclose(problem.expected, naive(problem), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_activations_against_scalar_loops(function: str) -> None:
    problem = special("int", function, rows=2)
    np.testing.assert_allclose(problem.expected, naive(problem), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seed", range(5))
def test_the_sparse_mixer_against_scalar_loops(seed: int) -> None:
    problem = special("int", "relu2", seed, rows=3, sparse=True)
    np.testing.assert_allclose(problem.expected, naive(problem), rtol=1e-12, atol=1e-13)


def test_elements() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(element_values(codes, "e4m3", np.float64), codes.view(E4M3).astype(np.float64))
    values = element_values(np.arange(16, dtype=np.uint8), "e2m1", np.float32)
    assert values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(values[8:], -values[:8])
    assert np.signbit(values[8])


# --- everything that executes ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("form", "function"), MIXED)
def test_on_the_cpu(form: str, function: str, dtype: str) -> None:
    problem = special(form, function, 1, dtype=dtype)
    for kernels in ("portable", "auto"):
        provider = CpuExecutionProvider(kernels=kernels)
        output = problem.poisoned_output()
        constants = {i: a for i, a in enumerate(problem.inputs) if i >= 2 and a is not None}
        provider.create_kernel(problem.node, 1, constants).execute(problem.inputs[:2], [output])
        problem.check_closely(output)


@pytest.fixture(params=["simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[CudaExecutionProvider]:
    if request.param == "simulated":
        request.getfixturevalue("simulated")
    with CudaExecutionProvider() as provider:
        yield provider


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("form", "function"), MIXED)
def test_on_a_gpu(gpu: CudaExecutionProvider, form: str, function: str, rows: int) -> None:
    dtype = ("float32", "float16", "bfloat16")[(len(form) + rows) % 3]
    problem = special(form, function, 2, rows=rows, dtype=dtype, sparse=rows == 5)
    problem.check_closely(run_on_gpu(gpu, problem))


@pytest.mark.skipif(machine.COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("form", ["fp4", "nvfp4", "fp8 blocks", "fp8 global", *FORMS[7:9]])
def test_device_code_emulated(form: str) -> None:
    """The device's own decode rules, activations and routing, executed on the host."""
    functions = list(FUNCTIONS)
    for number, kind in enumerate(("few", "many")):
        function = functions[(FORMS.index(form) + 3 * number) % len(functions)]
        problem = special(form, function, 3, rows=3, sparse=bool(number))
        problem.check_closely(_emulate(problem, kind))  # type: ignore[arg-type]


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_columns_and_rows(seed: int, experts: int) -> None:
    packed = np.random.default_rng(seed).integers(0, 256, (experts, 6, 5), np.uint8)
    assert raw_to_columns(packed).shape == (experts, 10, 3)
    np.testing.assert_array_equal(columns_to_raw(raw_to_columns(packed)), packed)


@pytest.mark.parametrize("function", ["swiglu with fc3", "geglu", "relu2"])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_further_format_is_one_entry(
    gpu: CudaExecutionProvider, monkeypatch: pytest.MonkeyPatch, function: str, rows: int
) -> None:
    """4-bit floats in blocks of 64 with float16 scales and none per expert, which no file has."""
    monkeypatch.setitem(FORMATS, "fp4 in 64", WeightFormat("fp4 in 64", "e2m1", 4, 64, (np.dtype(np.float16),)))
    problem = special("fp4", function, 8, rows=rows)
    attributes = {**problem.attributes, "quant_type": "fp4 in 64", "block_size": 64}
    random, inputs = np.random.default_rng(8), [*problem.inputs[:15]]
    fused = 2 if problem.node.swiglu_fusion else 1
    for (weights, scales, bias, _), out, inner in (
        (MATRIX_INPUTS["fc1"], fused * 128, 64),
        (MATRIX_INPUTS["fc2"], 64, 128),
        (MATRIX_INPUTS["fc3"], 128, 64),
    ):
        if weights < len(inputs) and inputs[weights] is not None:
            quantized = quantize_float_experts(random.standard_normal((5, out, inner)), quant_type="fp4 in 64")
            inputs[weights], inputs[scales], inputs[bias] = quantized.packed, quantized.scales, None
            assert quantized.global_scale is None
            assert quantized.scales is not None
            assert quantized.scales.dtype == np.float16
    problem = replace(problem, attributes=attributes, inputs=inputs)
    problem.check_closely(run_on_gpu(gpu, problem))
    for kernels in ("portable", "auto"):
        problem.check_closely(CpuExecutionProvider(kernels=kernels).create_kernel(problem.node, 1)(*inputs))


# --- what doesn't fit --------------------------------------------------------------------------------


def without(problem: Problem, index: int) -> list[Array | None]:
    return [None if i == index else a for i, a in enumerate(problem.inputs)]


def with_operand(problem: Problem, index: int, value: Any) -> list[Array | None]:
    inputs = [*problem.inputs, *[None] * (index + 1 - len(problem.inputs))]
    inputs[index] = value
    return inputs


def refused(problem: Problem, inputs: list[Array | None], *words: str) -> None:
    provider = CpuExecutionProvider(kernels="portable")
    with pytest.raises(QMoEError) as caught:
        provider.create_kernel(problem.node, 1)(*inputs)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("form", "index", "words"),
    [
        ("fp4", 3, ("fc1_scales", "required")),
        ("fp4", 15, ("fc1_global_scale", "required", "fp4")),
        ("nvfp4", 16, ("fc2_global_scale", "required", "nvfp4")),
        ("fp8 blocks", 6, ("fc2_scales", "required")),
        ("fp8 global", 15, ("fc1_global_scale", "required", "fp8")),
    ],
)
def test_missing_operands(form: str, index: int, words: tuple[str, ...]) -> None:
    problem = special(form, "relu2")
    refused(problem, without(problem, index), *words)


@pytest.mark.parametrize(
    ("form", "index", "value", "words"),
    [
        ("int", 15, np.ones(5, np.float32), ("fc1_global_scale", "int")),
        ("int", 17, np.ones(5, np.float32), ("fc1_act_scale", "wfp4afp8")),
        ("fp4", 17, np.ones(5, np.float32), ("fc1_act_scale", "wfp4afp8")),
        ("fp4", 11, np.zeros((5, 96, 2), np.uint8), ("fc1_zero_points", "no zero points")),
        ("fp8 blocks", 15, np.ones(5, np.float32), ("fc1_global_scale", "fp8")),
        ("fp8 global", 3, np.ones((5, 96, 2), np.float32), ("fc1_scales", "global")),
        ("fp4", 15, np.ones(4, np.float32), ("fc1_global_scale", "[5]", "[4]")),
        ("fp4", 15, np.ones(5, np.float16), ("fc1_global_scale", "float32", "float16")),
        ("fp4", 3, np.zeros((5, 96, 2), np.float32), ("fc1_scales", "float8_e8m0fnu", "float32")),
        ("nvfp4", 3, np.zeros((5, 96, 4), E8M0), ("fc1_scales", "float8_e4m3fn", "float8_e8m0fnu")),
        ("fp4", 3, np.zeros((5, 96, 4), np.uint8), ("fc1_scales", "[5, 96, 2]")),
        ("fp8 blocks", 3, np.ones((5, 96, 3), np.float32), ("fc1_scales", "[5, 3, 3]")),
        ("fp8 blocks", 2, np.zeros((5, 96, 72), ml_dtypes.float8_e5m2), ("fc1_experts_weights", "float8_e5m2")),
        ("int", 11, np.zeros((5, 96, 3), np.float32), ("fc1_zero_points", "[5, 96, 2]")),
        ("int", 14, np.ones((3, 5), np.float32), ("router_weights", "use_sparse_mixer")),
        ("wfp4afp8", 18, np.ones(3, np.float32), ("fc2_act_scale", "[5]")),
    ],
)
def test_operands_that_do_not_fit(form: str, index: int, value: Any, words: tuple[str, ...]) -> None:
    problem = special(form, "relu2", sparse=index == 14)
    refused(problem, with_operand(problem, index, value), *words)


def test_an_odd_number_of_features_in_columns() -> None:
    problem = special("fp4 in columns", "relu2")
    inputs = list(problem.inputs)
    inputs[2], inputs[3] = np.zeros((5, 64, 48), np.uint8), np.full((5, 95, 2), 127, np.uint8)
    refused(replace(problem, inputs=inputs), inputs, "fc")


def test_the_sm80_layout_is_for_integers() -> None:
    node = QMoENode(quant_type="fp4")
    assert "SM80" in (unsupported_reason(node, "sm80") or "")
    assert unsupported_reason(node, "raw") is None
    assert all(name in FORMATS for name in ("int", "fp4", "nvfp4", "fp8", "wfp4afp8"))
    assert len(INPUT_NAMES) == 21
