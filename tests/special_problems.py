"""Problems with the number formats, activations and routing beyond integers, and a result for them by scalar loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from problems import DTYPES, Array, Problem, Recipe, build

from qmoe_ep.operator import GLOBAL_SCALES, MATRIX_INPUTS
from qmoe_ep.quantization import raw_to_columns

__all__ = ["FORMS", "FUNCTIONS", "naive", "special"]

FORMS = (
    "fp4",
    "fp4 in columns",
    "nvfp4",
    "nvfp4 in columns",
    "wfp4afp8",
    "fp8 blocks",
    "fp8 global",
    "int float32 zero points",
    "int float16 zero points row-wise",
    "int",
)
FUNCTIONS: dict[str, dict[str, Any]] = {
    "swiglu": {"activation_type": "swiglu", "swiglu_fusion": 1},
    "swiglu with fc3": {"activation_type": "swiglu", "swiglu_fusion": 0},
    "limit after": {
        "activation_type": "swiglu",
        "swiglu_fusion": 2,
        "swiglu_limit": 0.5,
        "swiglu_limit_after_activation": 1,
        "activation_alpha": 1.7,
        "activation_beta": 1.0,
    },
    "limit after, none given": {"activation_type": "swiglu", "swiglu_fusion": 1, "swiglu_limit_after_activation": 1},
    "geglu": {"activation_type": "geglu", "swiglu_fusion": 1, "swiglu_limit": 0.1, "activation_beta": 3.0},
    "geglu in halves": {"activation_type": "geglu", "swiglu_fusion": 2},
    "relu2": {"activation_type": "relu2"},
}
EXPERTS, HIDDEN, INTER = 5, 64, 96


def special(
    form: str, function: str, seed: int = 0, *, rows: int = 3, dtype: str = "float32", sparse: bool = False
) -> Problem:
    """A problem of one format and activation; ``sparse`` routes by use_sparse_mixer."""
    random = np.random.default_rng(seed)
    attributes: dict[str, Any] = {"k": 2, "quant_type": form.split()[0], **FUNCTIONS[function]}
    hidden = HIDDEN + (8 if form.startswith("fp8") else 0)  # blocks of 32 are cut
    fused = 2 if attributes.get("swiglu_fusion") else 1
    logits = random.standard_normal((rows, EXPERTS)) * (3 if sparse else 1)
    if sparse:
        attributes["use_sparse_mixer"] = 1
        # Some near the best, within the margin.
        logits[:, 1] = logits.max(axis=1) * (1 - 0.03 * random.random(rows))
    inputs: list[Any] = [None] * 21
    inputs[0] = random.standard_normal((rows, hidden)).astype(DTYPES[dtype])
    inputs[1] = logits.astype(DTYPES[dtype])
    shapes = {"fc1": (fused * INTER, hidden), "fc2": (hidden, INTER), "fc3": (INTER, hidden)}
    if function != "swiglu with fc3":
        del shapes["fc3"]
    attributes |= _FORM_ATTRIBUTES[form]
    for matrix, (out, inner) in shapes.items():
        operands = _matrix(form, random, out, inner)
        weights, scales, bias, zero_points = MATRIX_INPUTS[matrix]
        inputs[weights], inputs[scales], inputs[zero_points], given = operands
        inputs[bias] = random.standard_normal((EXPERTS, out)).astype(DTYPES[dtype])
        if given is not None:
            inputs[GLOBAL_SCALES[matrix]] = given
    if form == "wfp4afp8":
        inputs[17] = np.ones(EXPERTS, np.float32)
    while inputs[-1] is None:
        inputs.pop()
    base = build(
        Recipe(leading=(rows,), hidden=hidden, inter=INTER, experts=EXPERTS, k=2, dtype=dtype, router_dtype=dtype)
    )
    return replace(base, attributes=attributes, inputs=inputs, weights_layout=None)


_FORM_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "fp4": {"weights_prepacked": 1, "block_size": 32},
    "fp4 in columns": {"weights_prepacked": 0},
    "nvfp4": {"weights_prepacked": 1},
    "nvfp4 in columns": {"block_size": 16},
    "wfp4afp8": {"weights_prepacked": 1},
    "fp8 blocks": {"block_size": 32, "expert_weight_bits": 8},
    "fp8 global": {"expert_weight_bits": 8},
    "int float32 zero points": {"block_size": 32},
    "int float16 zero points row-wise": {"expert_weight_bits": 3},
    "int": {"block_size": 32},
}


def _matrix(form: str, random: np.random.Generator, out: int, inner: int) -> tuple[Any, Any, Any, Any]:
    """Weights, scales, zero points and global scales of all experts."""

    def codes(*shape: int) -> Array:
        return random.integers(0, 256, (EXPERTS, *shape), np.uint8)

    def near(*shape: int, around: float) -> Array:
        return (around * random.uniform(0.5, 1.5, (EXPERTS, *shape))).astype(np.float32)

    kind = form.split()[0]
    size = 1 / math.sqrt(inner)
    if kind in ("fp4", "wfp4afp8", "nvfp4"):
        packed = codes(out, inner // 2)
        scales = random.integers(120, 128, (EXPERTS, out, inner // 32), np.uint8)
        if kind == "nvfp4":
            scales = near(out, inner // 16, around=0.1).astype(ml_dtypes.float8_e4m3fn)
        if form.endswith("columns"):
            packed = raw_to_columns(packed)
            scales = scales if kind == "nvfp4" else scales.view(ml_dtypes.float8_e8m0fnu)
        return packed, scales, None, near(around=size)
    if kind == "fp8":
        weights = codes(out, inner)
        weights[weights & 0x7F >= 0x60] &= 0x9F  # neither NaN nor so large that it is all that counts
        if form == "fp8 global":
            return weights.view(ml_dtypes.float8_e4m3fn), None, None, near(around=size)
        return weights, near(-(-out // 32), -(-inner // 32), around=size), None, None
    if form == "int":
        return codes(out, inner // 2), near(out, inner // 32, around=size / 8), None, None
    if form.endswith("row-wise"):
        points = random.uniform(2, 5, (EXPERTS, out)).astype(np.float16)
        return codes(out, -(-inner * 3 // 8)), near(out, around=size / 4), points, None
    points = random.uniform(6, 9, (EXPERTS, out, inner // 32)).astype(np.float32)
    return codes(out, inner // 2), near(out, inner // 32, around=size / 8), points, None


# --- by scalar loops -----------------------------------------------------------------------------------


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _value(problem: Problem, matrix: str, expert: int, row: int, column: int, inner: int) -> float:
    """One weight, from the definition of its format."""
    weights, scales, _, zero_points = (
        problem.inputs[i] if i < len(problem.inputs) else None for i in MATRIX_INPUTS[matrix]
    )
    kind, node = problem.attributes["quant_type"], problem.node
    assert weights is not None
    index = GLOBAL_SCALES[matrix]
    given = problem.inputs[index] if index < len(problem.inputs) else None
    factor = 1.0 if given is None else float(given[expert])
    packed = weights.view(np.uint8)[expert]
    if kind == "fp8":
        if scales is not None:
            factor *= float(scales[expert, row // 32, column // 32])
        return _e4m3(int(packed[row, column])) * factor
    if kind != "int":
        if node.weights_prepacked == 1:
            code = int(packed[row, column // 2]) >> 4 * (column % 2) & 15
        else:
            code = int(packed[column, row // 2]) >> 4 * (row % 2) & 15
        assert scales is not None
        byte = int(scales.view(np.uint8)[expert, row, column // (16 if kind == "nvfp4" else 32)])
        scale = _e4m3(byte) if kind == "nvfp4" else 2.0 ** (byte - 127)
        return [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] * (-1 if code & 8 else 1) * scale * factor
    bits = node.bits(matrix)
    stream = int.from_bytes(packed[row].tobytes(), "little")
    code = stream >> bits * column & (1 << bits) - 1
    assert scales is not None
    block = (expert, row, column // 32) if scales.ndim == 3 else (expert, row)
    zero = 2.0 ** (bits - 1) if zero_points is None else float(zero_points[block])
    return (code - zero) * float(scales[block])


def naive(problem: Problem) -> Array:
    """The output, float64 [rows, H]."""
    node = problem.node
    x, logits = (np.asarray(problem.inputs[i]).astype(np.float64) for i in (0, 1))
    return np.array([_row(problem, node, x[row], logits[row]) for row in range(len(x))])


def _row(problem: Problem, node: Any, x: Array, logits: Array) -> Array:
    order = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:2]
    total = sum(math.exp(v - max(logits)) for v in logits)
    weights = [math.exp(logits[e] - max(logits)) / total for e in order]
    if node.use_sparse_mixer:
        weights = []
        for slot, own in enumerate(order):
            rest = [e for e in range(len(logits)) if e not in order[:slot]]
            near = [e for e in rest if logits[own] - logits[e] <= 0.02 * max(abs(logits[e]), logits[own])]
            weights.append(1 / sum(math.exp(logits[e] - logits[own]) for e in near))
    return sum(w * _expert(problem, node, e, x) for w, e in zip(weights, order, strict=True))


def _linear(problem: Problem, matrix: str, expert: int, x: Array) -> Array:
    bias = problem.inputs[MATRIX_INPUTS[matrix][2]]
    assert bias is not None
    out, inner = bias.shape[1], len(x)
    values = [[_value(problem, matrix, expert, n, k, inner) for k in range(inner)] for n in range(out)]
    return np.array(values) @ x + bias[expert].astype(np.float64)


def _expert(problem: Problem, node: Any, expert: int, x: Array) -> Array:
    fc1 = _linear(problem, "fc1", expert, x)
    gate, up = {0: (fc1, fc1), 1: (fc1[0::2], fc1[1::2]), 2: np.split(fc1, 2)}[node.swiglu_fusion]
    if node.activation_type == "swiglu" and not node.swiglu_fusion:
        up = _linear(problem, "fc3", expert, x)
    limit = math.inf if node.swiglu_limit is None else node.swiglu_limit
    if node.activation_type == "relu2":
        activated = np.maximum(gate, 0) ** 2
    elif node.activation_type == "geglu":
        activated = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    elif node.swiglu_limit_after_activation:
        swish = gate / (1 + np.exp(-node.activation_alpha * gate))
        activated = np.minimum(swish, limit) * (np.clip(up, -limit, limit) + node.activation_beta)
    else:
        gate = np.minimum(gate, limit)
        activated = (
            gate / (1 + np.exp(-node.activation_alpha * gate)) * (np.clip(up, -limit, limit) + node.activation_beta)
        )
    return _linear(problem, "fc2", expert, activated)
