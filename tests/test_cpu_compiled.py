"""Compiled products: the same values and bits from every source, for every format and vector width."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Array, Recipe, Space, build, problems

from qmoe_ep import CpuExecutionProvider, QMoEError
from qmoe_ep.call import ExpertMatrix
from qmoe_ep.cpu.products import Expanded, NumpyProducts, Packed, Product, aligned_rows
from qmoe_ep.cpu.provider import _hint_once
from qmoe_ep.formats import FORMATS, UINT8

pytest.importorskip("llvmlite", reason="the extra jit isn't installed")

from qmoe_ep.cpu.compiled import CompiledProducts
from qmoe_ep.cpu.values import Lanes

HOST = CompiledProducts(2)
NUMPY = NumpyProducts()
WIDTHS = {
    "16": HOST,
    "8": CompiledProducts(1, Lanes(8, fused=True, lookup=False, fused_tokens=2, tile_tokens=2)),
    "4": CompiledProducts(1, Lanes(4, fused=False, lookup=False, fused_tokens=2, tile_tokens=2)),
}
SCALES = [np.float32, np.float16, ml_dtypes.bfloat16]
UNDEFINED = math.nan


def packed(
    bits: int, block: int, out: int, depth: int, *, scales: Any = np.float32, points: bool = False, bias: bool = False
) -> Packed:
    """Two experts of random codes."""
    rng = np.random.default_rng(bits * 1000 + depth)
    matrix = ExpertMatrix("fc1", bits, block, out, depth, "raw", np.dtype(scales), points, None)
    shape = (2, out, matrix.blocks) if block else (2, out)
    return Packed(
        matrix,
        rng.integers(0, 256, (2, out, matrix.row_bytes), np.uint8),
        rng.standard_normal(shape).astype(scales),
        rng.integers(0, 256, (2, *matrix.zero_point_shape), np.uint8) if points else None,
        rng.standard_normal((2, out)).astype(np.float32) if bias else None,
    )


def expanded(products: CompiledProducts | NumpyProducts, weights: Packed) -> Expanded:
    values = np.full((2, weights.matrix.out_features, weights.matrix.in_features), UNDEFINED, np.float32)
    for expert in range(2):
        products.expand(weights, expert, values[expert])
    return Expanded(values, weights.bias)


def multiply(products: Any, weights: Packed | Expanded, x: Array, bounds: list[int]) -> Array:
    out = weights.bias.shape[1] if isinstance(weights, Expanded) and weights.bias is not None else 0
    out = weights.matrix.out_features if isinstance(weights, Packed) else out or weights.weights.shape[1]
    y = np.full((x.shape[0], out), UNDEFINED, np.float32)
    products.run([Product(weights, x, y)], [1, 0], bounds)
    return y


def check(products: CompiledProducts, weights: Packed, tokens: int) -> None:
    """Values are NumPy's, bits don't depend on the source, and sums are as near as float32 gives."""
    values, exact = expanded(products, weights), expanded(NUMPY, weights)
    assert values.weights.tobytes() == exact.weights.tobytes()
    rng = np.random.default_rng(tokens)
    depth = weights.matrix.in_features
    x = rng.standard_normal((tokens + 3, depth)).astype(np.float32)
    bounds = [0, tokens, tokens + 3]
    results = [multiply(products, source, x, bounds) for source in (weights, values)]
    assert results[0].tobytes() == results[1].tobytes()
    for expert, rows in ((1, slice(0, tokens)), (0, slice(tokens, tokens + 3))):
        terms = exact.weights[expert].astype(np.float64)
        want, scale = x[rows].astype(np.float64) @ terms.T, np.abs(x[rows]) @ np.abs(terms.T) + 1
        if weights.bias is not None:
            want = want + weights.bias[expert]
        assert (np.abs(results[0][rows] - want) <= 2e-6 * scale).all()


@pytest.mark.parametrize("width", list(WIDTHS))
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_formats(width: str, bits: int) -> None:
    shapes = [(16, 37, 640), (32, 6, 1152), (64, 4, 128), (128, 17, 256), (0, 5, 96), (0, 9, 80)]
    for number, (block, out, depth) in enumerate(shapes):
        scales, points, bias = SCALES[number % 3], number % 2 == 0, number % 3 == 0
        weights = packed(bits, block, out, depth, scales=scales, points=points, bias=bias)
        check(WIDTHS[width], weights, 1 + 2 * number)


def small_floats(name: str, out: int, depth: int, *, as_bytes: bool, bias: bool) -> Packed:
    """Two experts of random 4-bit floats; among the scales are the smallest of their type and negative ones."""
    rng = np.random.default_rng(depth)
    form = FORMATS[name]
    kind = form.scale_dtypes[0]
    scales = rng.integers(0, 256, (2, out, depth // form.block_size), np.uint8).view(kind)
    scales[~np.isfinite(scales.astype(np.float32))] = 1
    scales[np.abs(scales.astype(np.float32)) > 256] = 1
    matrix = ExpertMatrix(
        "fc1", 4, form.block_size, out, depth, "raw", UINT8 if as_bytes else kind, False, None, form=form
    )
    return Packed(
        matrix,
        rng.integers(0, 256, (2, out, matrix.row_bytes), np.uint8),
        scales.view(np.uint8) if as_bytes else scales,
        None,
        rng.standard_normal((2, out)).astype(np.float32) if bias else None,
        np.array([0.37, -1.9], np.float32),
    )


@pytest.mark.parametrize("width", list(WIDTHS))
@pytest.mark.parametrize("name", ["fp4", "nvfp4"])
def test_small_floats(width: str, name: str) -> None:
    for number, (out, depth) in enumerate([(37, 640), (6, 1152), (4, 96)]):
        weights = small_floats(name, out, depth, as_bytes=number == 1, bias=number != 1)
        check(WIDTHS[width], weights, 1 + 2 * number)
        check(WIDTHS[width], weights, 20)


@pytest.mark.parametrize("width", list(WIDTHS))
@pytest.mark.parametrize("depth", [1, 15, 37, 1031, 2051])
def test_rows_that_are_no_whole_vectors(width: str, depth: int) -> None:
    for tokens in (1, 9):
        check(WIDTHS[width], packed(4, 0, 7, depth, points=True, bias=True), tokens)


@pytest.mark.parametrize("tokens", [*range(1, 15), 50, 200])
def test_every_number_of_tokens(tokens: int) -> None:
    check(HOST, packed(4, 32, 22, 1120, points=True), tokens)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    weights = packed(4, 32, 24, 2112)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 2112)).astype(np.float32)
    whole = multiply(HOST, weights, x, [0, 117, 120])
    for row in (0, 3, 60, 116):
        alone = np.concatenate([x[row : row + 1], x[117:]])
        assert multiply(HOST, weights, alone, [0, 1, 4])[0].tobytes() == whole[row].tobytes()


def test_more_tokens_than_a_task_takes() -> None:
    check(HOST, packed(4, 32, 8, 4096), 130)


@pytest.mark.parametrize("scales", SCALES)
def test_every_scale_is_exact(scales: Any) -> None:
    every = np.arange(65536, dtype=np.uint16).view(scales) if scales is not np.float32 else None
    if every is None:
        every = np.array([0, -0.0, 2**-149, 2**-126, 1e38, np.inf, -np.inf, np.nan] * 8192, np.float32)
    matrix = ExpertMatrix("fc1", 8, 16, 1024, 1024, "raw", np.dtype(scales), False, None)
    codes = np.full((1, 1024, 1024), 129, np.uint8)
    weights = Packed(matrix, codes, every.reshape(1, 1024, 64), None, None)
    out = np.empty((1024, 1024), np.float32)
    HOST.expand(weights, 0, out)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out.reshape(1024, 64, 16)[:, :, 3], every.astype(np.float32).reshape(1024, 64))


@pytest.mark.parametrize("what", ["weights", "scales", "zero_points", "bias", "x"])
def test_strides(what: str) -> None:
    weights = packed(4, 32, 16, 128, points=True, bias=True)
    x = np.random.default_rng(1).standard_normal((7, 128)).astype(np.float32)
    bounds = [0, 4, 7]
    expected = multiply(HOST, weights, x, bounds)
    if what == "x":
        wide = np.zeros((7, 256), np.float32)[:, ::2]
        wide[...] = x
        assert multiply(HOST, weights, wide, bounds).tobytes() == expected.tobytes()
        return
    array = getattr(weights, what)
    changes: dict[str, Any] = {what: np.asfortranarray(array)}
    assert multiply(HOST, replace(weights, **changes), x, bounds).tobytes() == expected.tobytes()


def test_a_bad_number_of_threads() -> None:
    for threads in (0, -1):
        with pytest.raises(QMoEError, match="threads: expected at least 1"):
            CpuExecutionProvider(threads=threads)


# --- in the provider ---------------------------------------------------------------------------------------


@given(problems(Space(logits=("normal",))), st.integers(1, 3))
@settings(max_examples=80)
def test_random_problems_on_any_number_of_threads(problem: Any, threads: int) -> None:
    one, many, numpy = (
        CpuExecutionProvider(threads=1),
        CpuExecutionProvider(threads=threads),
        CpuExecutionProvider(kernels="portable"),
    )
    results = [
        p.create_kernel(problem.node, weights_layout=problem.weights_layout)(*problem.inputs) for p in (one, many)
    ]
    assert results[0].tobytes() == results[1].tobytes()
    problem.check_closely(results[0])
    problem.check_closely(numpy.create_kernel(problem.node, weights_layout=problem.weights_layout)(*problem.inputs))


def test_portable_kernels_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build(Recipe())
    monkeypatch.setenv("QMOE_EP_KERNELS", "portable")
    kernel = CpuExecutionProvider().create_kernel(problem.node)
    problem.check_closely(kernel(*problem.inputs))
    monkeypatch.setenv("QMOE_EP_KERNELS", "fast")
    with pytest.raises(QMoEError, match="'auto' or 'portable'"):
        CpuExecutionProvider()


def test_without_llvmlite_there_is_one_hint(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    problem = build(Recipe())
    monkeypatch.setattr("qmoe_ep.cpu.compiled._compiler", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    _hint_once.cache_clear()
    with caplog.at_level(logging.WARNING, "qmoe_ep"):
        for _ in range(2):
            problem.check_closely(CpuExecutionProvider().create_kernel(problem.node)(*problem.inputs))
    assert [r.message for r in caplog.records if "qmoe-ep[jit]" in r.message] != []
    assert len(caplog.records) == 1


def test_a_forked_child_computes() -> None:
    code = """
import os, sys, warnings
import numpy as np
import qmoe_ep
warnings.simplefilter("ignore")
rng = np.random.default_rng(0)
q = qmoe_ep.quantize_experts(rng.standard_normal((4, 256, 256), np.float32))
node = qmoe_ep.QMoENode(k=2, activation_type="silu", block_size=32)
weights = {2: q.packed, 3: q.scales, 5: q.packed, 6: q.scales}
kernel = qmoe_ep.CpuExecutionProvider(threads=2).create_kernel(node, 0, weights)
call = rng.standard_normal((40, 256), np.float32), rng.standard_normal((40, 4), np.float32)
expected = kernel(*call).tobytes()
child = os.fork()
if child == 0:
    os._exit(0 if kernel(*call).tobytes() == expected else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0


def test_importing_the_package_loads_no_compiler() -> None:
    code = "import sys, qmoe_ep; qmoe_ep.CpuExecutionProvider; assert 'llvmlite' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_rows_are_aligned() -> None:
    for rows in (1, 3):
        assert aligned_rows(rows, 5).ctypes.data % 64 == 0
