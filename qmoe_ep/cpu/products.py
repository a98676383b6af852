"""Products of token rows with experts' matrices: what a way to compute has to offer, and the one in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from qmoe_ep.quantization import expand_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from qmoe_ep.call import ExpertMatrix

__all__ = [
    "Expanded",
    "ExpertWeights",
    "Floats",
    "NumpyProducts",
    "Packed",
    "Product",
    "Products",
    "Weights",
    "aligned_rows",
]

Floats: TypeAlias = "NDArray[np.float32]"
_ALIGNMENT = 64


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Memory whose address is a multiple of a cache line, uint8 [nbytes]; its contents are undefined."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


def aligned_rows(rows: int, features: int) -> Floats:
    """Undefined rows, float32 [rows, features], from the start of a cache line."""
    array: Floats = aligned_bytes(4 * rows * features).view(np.float32).reshape(rows, features)
    return array


@dataclass(frozen=True, slots=True)
class Packed:
    """One matrix of several experts as it is stored.

    Attributes
    ----------
    weights, scales, zero_points, bias, global_scales : with the experts as first dimension; of one expert as in
        :func:`qmoe_ep.quantization.expand_matrix`, bias float [out]; None for what isn't there
    """

    matrix: ExpertMatrix
    weights: NDArray[Any]
    scales: NDArray[Any] | None
    zero_points: NDArray[Any] | None
    bias: NDArray[Any] | None
    global_scales: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Expanded:
    """One matrix of several experts as float32 [experts, out, in], contiguous, with bias float32 [experts, out]."""

    weights: Floats
    bias: Floats | None


Weights: TypeAlias = Packed | Expanded


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of several experts."""

    fc1: Weights
    fc2: Weights
    fc3: Weights | None


@dataclass(frozen=True, slots=True)
class Product:
    """y = W·x + b for rows sorted by expert: x float32 [tokens, in], y float32 [tokens, out] to be written.

    Rows are contiguous, and those of y follow each other.
    """

    weights: Weights
    x: Floats
    y: Floats


class Products(Protocol):
    """A way to compute. Results depend on the rows of an expert and its matrix, not on where the matrix comes from.

    Attributes
    ----------
    name : tells the ways apart in cache keys
    takes_packed : whether packed matrices are multiplied with as they are, without expanding a whole one
    """

    name: str
    takes_packed: bool

    def expand(self, packed: Packed, expert: int, out: Floats) -> None:
        """Expand one expert's matrix into ``out`` float32 [out, in]; the same values whatever the way."""

    def run(self, products: Sequence[Product], experts: Sequence[int], bounds: Sequence[int]) -> None:
        """Compute products of the same rows.

        Parameters
        ----------
        experts : places in the first dimension of the weights
        bounds : where the rows of each begin, and the end of the last one's
        """

    def for_rows(self, count: int, features: int, work: Callable[[slice], None]) -> None:
        """``work`` on all of ``count`` rows of so many float32 values, in pieces that stay in a cache."""


class NumpyProducts:
    """Products by NumPy's matrix product, after expanding with :func:`expand_matrix`."""

    name = "numpy"
    takes_packed = False

    def expand(self, packed: Packed, expert: int, out: Floats) -> None:
        """Expand a matrix."""
        out[...] = expand_matrix(
            packed.matrix,
            packed.weights[expert],
            None if packed.scales is None else packed.scales[expert],
            None if packed.zero_points is None else packed.zero_points[expert],
            None if packed.global_scales is None else float(packed.global_scales[expert]),
        )

    def run(self, products: Sequence[Product], experts: Sequence[int], bounds: Sequence[int]) -> None:
        """Compute one expert after the other."""
        for product in products:
            weights = product.weights
            for expert, (first, last) in zip(experts, pairwise(bounds), strict=True):
                if isinstance(weights, Packed):
                    matrix = np.empty((weights.matrix.out_features, weights.matrix.in_features), np.float32)
                    self.expand(weights, expert, matrix)
                else:
                    matrix = weights.weights[expert]
                y = product.y[first:last]
                np.matmul(product.x[first:last], matrix.T, out=y)
                if weights.bias is not None:
                    y += weights.bias[expert].astype(np.float32)

    def for_rows(self, count: int, features: int, work: Callable[[slice], None]) -> None:
        """Do all at once."""
        work(slice(0, count))
