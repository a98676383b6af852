"""Recipes that stand for the compile-time variants of the kernels; nothing is executed with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import covering
from problems import Recipe, build
from special_problems import FORMS, special
from special_problems import FUNCTIONS as SPECIAL_FUNCTIONS

from qmoe_ep.call import CallDescription, describe_call

__all__ = ["FACTORS", "covering_calls", "every_call", "special_calls", "variant_call"]

FLOATS = ("float32", "float16", "bfloat16")
WIDTHS = (1, 2, 3, 4, 8)
# activation, fusion, FC3
FUNCTIONS = (
    ("swiglu", 1, False),
    ("swiglu", 2, False),
    ("swiglu", 0, True),
    ("silu", 0, True),
    ("silu", 0, False),
    ("relu", 0, False),
    ("gelu", 0, False),
    ("identity", 0, False),
)
FACTORS: dict[str, tuple[Any, ...]] = {
    "function": FUNCTIONS,
    "bits1": WIDTHS,
    "bits2": WIDTHS,
    "bits3": WIDTHS,
    "block_size": (None, 16, 32, 64, 128),
    "dtype": FLOATS,
    "scale_dtype": FLOATS,
    "router_dtype": FLOATS,
    "bias_dtype": ("none", *FLOATS),
    "routing_dtype": ("none", *FLOATS),
    "zero_points1": (False, True),
    "zero_points2": (False, True),
    "zero_points3": (False, True),
    "normalize": (False, True),
    "rows": (1, 12, 96),
    "odd": (False, True),
}


def variant_call(row: dict[str, Any]) -> CallDescription:
    """The call that one choice of factors stands for; ``odd`` sizes make row-wise rows end within a byte."""
    activation, fusion, fc3 = row["function"]
    block = row["block_size"]
    size = (block or 64) - (1 if row["odd"] and block is None else 0)
    biased, routed = row["bias_dtype"] != "none", row["routing_dtype"] != "none"
    recipe = Recipe(
        leading=(row["rows"],),
        hidden=size,
        inter=size,
        experts=2,
        activation=activation,
        fusion=fusion,
        fc3=fc3,
        bits=(row["bits1"], row["bits2"], row["bits3"]),
        block_size=block,
        zero_points=(row["zero_points1"], row["zero_points2"], row["zero_points3"]),
        biases=(biased, biased, biased),
        dtype=row["dtype"],
        router_dtype=row["router_dtype"],
        scale_dtypes=(row["scale_dtype"],) * 3,
        bias_dtypes=(row["bias_dtype"] if biased else "float32",) * 3,
        router_weights=routed,
        routing_dtype=row["routing_dtype"] if routed else "float32",
        normalize=row["normalize"],
    )
    problem = build(recipe)
    return describe_call(problem.node, problem.inputs)


def covering_calls() -> Iterator[CallDescription]:
    """Calls in which every pair of compile-time choices occurs."""
    return map(variant_call, covering.pairwise(FACTORS))


def special_calls() -> Iterator[CallDescription]:
    """Every format, activation and way to route beyond plain integers, each at least once, raw."""
    functions = list(SPECIAL_FUNCTIONS)
    for number, form in enumerate(form for form in FORMS if "columns" not in form):
        function, rows = functions[number % len(functions)], (1, 12, 96)[number % 3]
        dtype = FLOATS[number % 3]
        problem = special(form, function, rows=rows, dtype=dtype, sparse=number == 1)
        yield describe_call(problem.node, problem.inputs)


def every_call(axes: tuple[str, ...], base: dict[str, Any] | None = None) -> Iterator[CallDescription]:
    """Every combination of some factors; the others stay at their first value or at ``base``."""
    fixed = {name: values[0] for name, values in FACTORS.items()} | (base or {})
    for values in itertools.product(*(FACTORS[axis] for axis in axes)):
        yield variant_call(fixed | dict(zip(axes, values, strict=True)))
