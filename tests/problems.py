"""Random valid problems of the operator, for every test that executes or breaks one.

A :class:`Recipe` says everything about a problem; :func:`build` makes the node and the operands from it.
Recipes come by hand (every field has a default), from a seed (:func:`random_problem`) or from
hypothesis (:func:`problems`); a :class:`Space` narrows what the last two choose from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx
from hypothesis import strategies as st

from qmoe_ep import reference
from qmoe_ep.operator import DOMAIN, INPUT_NAMES, MATRIX_INPUTS, OP_TYPE, Layout, QMoENode
from qmoe_ep.quantization import INTEGER_FORMATS

__all__ = [
    "DTYPES",
    "Problem",
    "Recipe",
    "Space",
    "build",
    "first_seed",
    "node_proto",
    "problems",
    "random_problem",
    "strided_view",
    "tolerance",
]

T = TypeVar("T")
Array = np.ndarray[Any, Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
MATRICES = ("fc1", "fc2", "fc3")


@dataclass(frozen=True)
class Recipe:
    """One problem, completely.

    Tuples of three belong to FC1, FC2 and FC3 (the last without effect unless there is FC3).

    Attributes
    ----------
    leading : dimensions of the input before H
    router_leading : dimensions of the router's logits before E; None for [rows]
    fc3 : only looked at for silu; swiglu with fusion 0 always has it
    block_size : None for row-wise scales; row_wise_column then says whether scales are [E, out, 1]
    dtype, router_dtype, routing_dtype : of the input, the logits and router_weights
    logits : "normal", "ties" (small integers), "big" (of order 1e4) or "special" (any bit pattern)
    layout : how the packed weights are ordered
    explicit_layout : whether the node says so by weights_prepacked 0 or 1, or -1 and the caller overrides
    strided : operands are views without a contiguous layout
    """

    leading: tuple[int, ...] = (3,)
    hidden: int = 64
    inter: int = 64
    experts: int = 4
    k: int = 2
    activation: str = "swiglu"
    fusion: int = 1
    fc3: bool = False
    bits: tuple[int, int, int] = (4, 4, 4)
    block_size: int | None = 32
    row_wise_column: bool = False
    zero_points: tuple[bool, bool, bool] = (False, False, False)
    biases: tuple[bool, bool, bool] = (False, False, False)
    dtype: str = "float32"
    router_dtype: str = "float32"
    scale_dtypes: tuple[str, str, str] = ("float32", "float32", "float32")
    bias_dtypes: tuple[str, str, str] = ("float32", "float32", "float32")
    router_weights: bool = False
    routing_dtype: str = "float32"
    router_leading: tuple[int, ...] | None = None
    normalize: bool = True
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    logits: str = "normal"
    layout: Layout = "raw"
    explicit_layout: bool = True
    strided: bool = False
    seed: int = 0

    @property
    def rows(self) -> int:
        """Product of the leading dimensions."""
        return math.prod(self.leading)

    @property
    def has_fc3(self) -> bool:
        """Whether the problem carries FC3."""
        return (self.activation == "swiglu" and self.fusion == 0) or (self.activation == "silu" and self.fc3)

    def features(self, matrix: str) -> tuple[int, int]:
        """Output and input features of a matrix."""
        if matrix == "fc2":
            return self.hidden, self.inter
        return self.inter * (2 if matrix == "fc1" and self.fusion else 1), self.hidden


@dataclass(frozen=True)
class Problem:
    """A node, its operands and what a right result is.

    Attributes
    ----------
    node : the attributes
    attributes : the same as ONNX attributes
    inputs : operands in ONNX order, None for absent ones, without trailing absent ones
    weights_layout : what to pass to a provider and to the reference
    """

    recipe: Recipe
    attributes: dict[str, Any]
    inputs: list[Array | None]
    weights_layout: Layout | None
    node: QMoENode = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "node", QMoENode(**self.attributes))

    @property
    def tolerance(self) -> float:
        """Largest relative L2 error of an output row."""
        return tolerance(self.recipe.dtype, max(self.recipe.hidden, self.recipe.inter))

    @cached_property
    def expected(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The reference's output, float64."""
        return reference.qmoe(self.node, self.inputs, weights_layout=self.weights_layout)

    @cached_property
    def magnitudes(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Norm of each row with absolute values everywhere, float64 [rows]."""
        return reference.row_magnitudes(self.node, self.inputs, weights_layout=self.weights_layout)

    def poisoned_output(self) -> Array:
        """An output full of NaN."""
        return np.full((*self.recipe.leading, self.recipe.hidden), np.nan, DTYPES[self.recipe.dtype])

    def check(self, actual: Array, allowed: float | None = None) -> None:
        """Assert that every row of an output is within the allowed error (the operator's own by default)."""
        assert actual.shape == self.expected.shape
        assert actual.dtype == DTYPES[self.recipe.dtype]
        errors = reference.row_errors(actual, self.expected, self.magnitudes)
        limit = self.tolerance if allowed is None else allowed
        assert errors.max(initial=0.0) <= limit, f"row errors {errors} exceed {limit} for {self.recipe}"

    def check_closely(self, actual: Array) -> None:
        """:meth:`check`, and that every row is as near as float32 arithmetic and one rounding allow.

        The operator's own measure is relative to absolute values everywhere, which lets much pass
        when many terms cancel. This one is for paths that compute in float32 throughout.
        """
        self.check(actual)
        rows = self.magnitudes.shape[0]
        got = actual.astype(np.float64).reshape(rows, self.recipe.hidden)
        want = self.expected.reshape(rows, self.recipe.hidden)
        valid = np.isfinite(got) & np.isfinite(want)
        error = np.linalg.norm(np.where(valid, got - np.where(valid, want, 0), 0), axis=1)
        norm = np.linalg.norm(np.where(valid, want, 0), axis=1)
        rounding, subnormal = {
            "float32": (2**-24, 2**-150),
            "float16": (2**-11, 2**-25),
            "bfloat16": (2**-8, 2**-134),
        }[self.recipe.dtype]
        computed = 2**-22 * np.maximum(norm, np.where(np.isfinite(self.magnitudes), self.magnitudes, 0))
        allowed = rounding * norm + computed + subnormal * math.sqrt(self.recipe.hidden)
        assert (error <= allowed).all(), f"row errors {error} exceed {allowed} for {self.recipe}"

    def node_proto(self, name: str = "moe") -> onnx.NodeProto:
        """The problem's node as a model holds it."""
        return node_proto(self.attributes, self.inputs, name)


def tolerance(dtype: str, features: int) -> float:
    """Largest relative L2 error of an output row; ``features`` is the longest sum, max(H, I)."""
    if dtype == "float32":
        return 2e-6 * max(1.0, math.sqrt(features / 1024))
    return {"float16": 1e-3, "bfloat16": 8e-3}[dtype]


def node_proto(attributes: dict[str, Any], inputs: Sequence[object], name: str = "moe") -> onnx.NodeProto:
    """A QMoE node whose absent inputs have empty names."""
    names = [INPUT_NAMES[i] if operand is not None else "" for i, operand in enumerate(inputs)]
    return onnx.helper.make_node(OP_TYPE, names, ["output"], name=name, domain=DOMAIN, **attributes)


# --- building --------------------------------------------------------------------------------------


def build(recipe: Recipe) -> Problem:
    """Make node and operands. Sizes are as asked, values are of order one, padding bits are random."""
    rng = np.random.default_rng(recipe.seed)
    operands: dict[int, Array] = {
        0: rng.standard_normal((*recipe.leading, recipe.hidden)).astype(DTYPES[recipe.dtype]),
        1: _logits(rng, recipe),
    }
    for index, matrix in enumerate(MATRICES):
        if matrix != "fc3" or recipe.has_fc3:
            operands.update(_matrix(rng, recipe, index))
    if recipe.router_weights:
        weights = rng.uniform(0.1, 1.0, (recipe.rows, recipe.experts)) * rng.choice([-1, 1, 1], recipe.experts)
        operands[14] = weights.astype(DTYPES[recipe.routing_dtype])
    if recipe.strided:
        operands = {index: strided_view(array, rng) for index, array in operands.items()}
    inputs = [operands.get(i) for i in range(max(operands) + 1)]
    override = None if recipe.explicit_layout else recipe.layout
    return Problem(recipe, _attributes(recipe), inputs, override)


def _attributes(recipe: Recipe) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "k": recipe.k,
        "activation_type": recipe.activation,
        "normalize_routing_weights": int(recipe.normalize),
        "swiglu_fusion": recipe.fusion,
        "activation_alpha": recipe.alpha,
        "activation_beta": recipe.beta,
        "expert_weight_bits": recipe.bits[0],
        "weights_prepacked": int(recipe.layout == "sm80") if recipe.explicit_layout else -1,
    }
    if recipe.limit is not None:
        attributes["swiglu_limit"] = recipe.limit
    if recipe.block_size is not None:
        attributes["block_size"] = recipe.block_size
    for matrix, bits in zip(MATRICES, recipe.bits, strict=True):
        if bits != recipe.bits[0]:
            attributes[f"{matrix}_expert_weight_bits"] = bits
    return attributes


def _logits(rng: np.random.Generator, recipe: Recipe) -> Array:
    leading = (recipe.rows,) if recipe.router_leading is None else recipe.router_leading
    shape, dtype = (*leading, recipe.experts), DTYPES[recipe.router_dtype]
    if recipe.logits == "ties":
        return rng.integers(-1, 2, shape).astype(dtype)
    if recipe.logits == "special":
        patterns = rng.integers(0, 1 << (8 * dtype.itemsize), shape, dtype=np.uint64)
        return patterns.astype(f"u{dtype.itemsize}").view(dtype)
    return (rng.standard_normal(shape) * (1e4 if recipe.logits == "big" else 1)).astype(dtype)


def _matrix(rng: np.random.Generator, recipe: Recipe, index: int) -> dict[int, Array]:
    weights, scales, bias, points = MATRIX_INPUTS[MATRICES[index]]
    (out, inner), bits, experts = recipe.features(MATRICES[index]), recipe.bits[index], recipe.experts
    blocks = 1 if recipe.block_size is None else inner // recipe.block_size
    shape: tuple[int, ...] = (experts, out, blocks)
    if recipe.block_size is None and not recipe.row_wise_column:
        shape = (experts, out)
    unit = 1 / (inner**0.5 * INTEGER_FORMATS[bits].default_zero_point)
    values = rng.uniform(0.5, 2.0, shape) * unit * rng.choice([-1, 1], shape)
    operands: dict[int, Array] = {
        weights: rng.integers(0, 256, (experts, out, (inner * bits + 7) // 8), np.uint8),
        scales: values.astype(DTYPES[recipe.scale_dtypes[index]]),
    }
    if recipe.biases[index]:
        operands[bias] = rng.standard_normal((experts, out)).astype(DTYPES[recipe.bias_dtypes[index]])
    if recipe.zero_points[index]:
        row = (out, (blocks * bits + 7) // 8) if recipe.block_size is not None else ((out * bits + 7) // 8,)
        operands[points] = rng.integers(0, 256, (experts, *row), np.uint8)
    return operands


def strided_view(array: Array, rng: np.random.Generator) -> Array:
    """The same values as a view that isn't contiguous: every second element, reversed, or column-major."""
    if array.ndim == 0:
        return array
    axis, kind = int(rng.integers(array.ndim)), int(rng.integers(3))
    if kind == 0:
        spread = np.zeros((*array.shape[:axis], 2 * array.shape[axis], *array.shape[axis + 1 :]), array.dtype)
        view = spread[(slice(None),) * axis + (slice(None, None, 2),)]
    elif kind == 1:
        view = np.flip(np.zeros_like(array), axis)
    else:
        view = np.zeros(array.shape, array.dtype, order="F")
    view[...] = array
    return view


# --- choosing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """What :func:`problems` and :func:`random_problem` choose from."""

    leading: tuple[tuple[int, ...], ...] = ((3,), (1,), (2,), (7,), (2, 3), (1, 4), (1, 1), (0,), (2, 0))
    bits: tuple[int, ...] = (4, 8, 2, 3, 1)
    mixed_bits: tuple[bool, ...] = (False, True)
    block_sizes: tuple[int | None, ...] = (32, 16, 64, 128, None)
    most_features: int = 128
    experts: tuple[int, ...] = (4, 1, 2, 3, 8)
    activations: tuple[str, ...] = ("swiglu", "silu", "relu", "gelu", "identity")
    fusions: tuple[int, ...] = (1, 2, 0)
    fc3: tuple[bool, ...] = (False, True)
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    mixed_dtypes: tuple[bool, ...] = (False, True)
    optional: tuple[bool, ...] = (False, True)
    router_weights: tuple[bool, ...] = (False, True)
    normalize: tuple[bool, ...] = (True, False)
    logits: tuple[str, ...] = ("normal", "normal", "ties", "big", "special")
    layouts: tuple[Layout, ...] = ("raw", "raw", "raw", "sm80")
    strided: tuple[bool, ...] = (False, True)


EVERYTHING = Space()


@st.composite
def problems(draw: st.DrawFn, space: Space = EVERYTHING) -> Problem:
    """Valid problems; the first choices of the space are the simplest."""
    recipe = _choose(space, lambda options: draw(st.sampled_from(options)))
    return build(replace(recipe, seed=draw(st.integers(0, 2**32 - 1))))


def first_seed() -> int:
    """The seed that tests over random problems count from; QMOE_EP_TEST_SEED chooses another."""
    return int(os.environ.get("QMOE_EP_TEST_SEED", "0"))


def random_problem(seed: int, space: Space = EVERYTHING) -> Problem:
    """A valid problem that depends on the seed alone."""
    rng = np.random.default_rng(seed)
    recipe = _choose(space, lambda options: options[int(rng.integers(len(options)))])
    return build(replace(recipe, seed=seed))


class _Chooser:
    def __init__(self, choose: Callable[[Sequence[Any]], Any]) -> None:
        self._choose = choose

    def one(self, options: Sequence[T]) -> T:
        value: T = self._choose(options)
        return value

    def three(self, options: Sequence[T], independent: bool = True) -> tuple[T, T, T]:
        first = self.one(options)
        return (first, self.one(options), self.one(options)) if independent else (first, first, first)


def _choose(space: Space, choose: Callable[[Sequence[Any]], Any]) -> Recipe:
    pick = _Chooser(choose)
    layout, bits, block = _format(space, pick)
    step = max(64 if layout == "sm80" else 1, block or 1)
    sizes = range(step, max(space.most_features, step) + 1, step)
    experts, leading = pick.one(space.experts), pick.one(space.leading)
    activation = pick.one(space.activations)
    rows = math.prod(leading)
    router_shapes = [(rows,), leading, (1, rows, 1), *([()] if rows == 1 else [])]
    independent = pick.one(space.mixed_dtypes)
    dtype = pick.one(space.dtypes)
    others = space.dtypes if independent else (dtype,)
    limit = pick.one((None, 7.0, 0.5))
    return Recipe(
        leading=leading,
        hidden=pick.one(sizes),
        inter=pick.one(sizes),
        experts=experts,
        k=pick.one(range(1, experts + 1)),
        activation=activation,
        fusion=pick.one(space.fusions) if activation == "swiglu" else 0,
        fc3=pick.one(space.fc3),
        bits=bits,
        block_size=block,
        row_wise_column=pick.one((False, True)),
        zero_points=pick.three(space.optional),
        biases=pick.three(space.optional),
        dtype=dtype,
        router_dtype=pick.one(others),
        scale_dtypes=pick.three(others),
        bias_dtypes=pick.three(others),
        router_weights=pick.one(space.router_weights),
        routing_dtype=pick.one(others),
        router_leading=pick.one(router_shapes),
        normalize=pick.one(space.normalize),
        # A negative alpha doesn't saturate below, so that a limit no longer bounds the gate.
        alpha=pick.one((1.0, 1.75, 0.0) if limit is not None else (1.0, 1.75, -0.5)),
        beta=pick.one((0.0, 1.0, -0.25)),
        limit=limit,
        logits=pick.one(space.logits),
        layout=layout,
        explicit_layout=pick.one((True, False)),
        strided=pick.one(space.strided),
    )


def _format(space: Space, pick: _Chooser) -> tuple[Layout, tuple[int, int, int], int | None]:
    layout = pick.one(space.layouts)
    widths = tuple(b for b in space.bits if layout == "raw" or b in (2, 4))
    if not widths:
        layout, widths = "raw", space.bits
    return layout, pick.three(widths, pick.one(space.mixed_bits)), pick.one(space.block_sizes)
