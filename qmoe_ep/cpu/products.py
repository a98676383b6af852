"""Products of token rows with experts' matrices: what a way to compute has to offer, and the one in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from qmoe_ep.quantization import dequantize_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    "aligned_empty",
]

Floats: TypeAlias = "NDArray[np.float32]"


_ALIGNMENT = 64


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """Memory whose address is a multiple of a cache line, uint8 [nbytes]; its contents are undefined."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes]


@dataclass(frozen=True, slots=True)
class Packed:
    """One expert's matrix as it is stored; shapes as in :func:`qmoe_ep.quantization.dequantize_matrix`.

    Attributes
    ----------
    bias : float [out] or None
    """

    matrix: ExpertMatrix
    weights: NDArray[np.uint8]
    scales: NDArray[Any]
    zero_points: NDArray[np.uint8] | None
    bias: NDArray[Any] | None


@dataclass(frozen=True, slots=True)
class Expanded:
    """One expert's matrix as float32 [out, in], contiguous, with its bias float32 [out] or None."""

    weights: Floats
    bias: Floats | None


Weights: TypeAlias = Packed | Expanded


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's matrices."""

    fc1: Weights
    fc2: Weights
    fc3: Weights | None


@dataclass(frozen=True, slots=True)
class Product:
    """y = W·x + b for rows x float32 [tokens, in], to be written to y float32 [tokens, out]; both contiguous."""

    weights: Weights
    x: Floats
    y: Floats


class Products(Protocol):
    """A way to compute products. Each row of a result depends on nothing but its row, the matrix and, in NumPy, on
    how many rows there are, so that it doesn't matter where a matrix comes from.

    Attributes
    ----------
    name : tells the ways apart in cache keys
    takes_packed : whether packed matrices are multiplied with as they are, without expanding a whole one
    """

    name: str
    takes_packed: bool

    def expand(self, packed: Packed, out: Floats) -> Expanded:
        """Expand a matrix into ``out`` float32 [out, in]; the same values whatever the way."""

    def run(self, products: Sequence[Product]) -> None:
        """Compute all of them."""


class NumpyProducts:
    """Products by NumPy's matrix product, after expanding with :func:`dequantize_matrix`."""

    name = "numpy"
    takes_packed = False

    def expand(self, packed: Packed, out: Floats) -> Expanded:
        """Expand a matrix."""
        matrix = packed.matrix
        out[...] = dequantize_matrix(
            packed.weights,
            packed.scales,
            packed.zero_points,
            bits=matrix.bits,
            block_size=matrix.block_size,
            in_features=matrix.in_features,
            layout=matrix.layout,
        )
        return Expanded(out, None if packed.bias is None else packed.bias.astype(np.float32))

    def run(self, products: Sequence[Product]) -> None:
        """Compute one after the other."""
        for product in products:
            weights = product.weights
            if isinstance(weights, Packed):
                shape = weights.matrix.out_features, weights.matrix.in_features
                weights = self.expand(weights, np.empty(shape, np.float32))
            np.matmul(product.x, weights.weights.T, out=product.y)
            if weights.bias is not None:
                np.add(product.y, weights.bias, out=product.y)
