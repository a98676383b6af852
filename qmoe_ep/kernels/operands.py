"""The operands of the expert matrices as argument structs of every family name them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from qmoe_ep.operator import MATRIX_INPUTS

if TYPE_CHECKING:
    from qmoe_ep.kernels.plan import AddressSource

__all__ = ["matrix_fields", "matrix_pointers"]

_OPERANDS = ("weights", "scales", "bias", "zero_points")


def matrix_fields(*matrices: str) -> tuple[tuple[str, type[ctypes.c_void_p]], ...]:
    """Fields of a struct: weights, scales, bias and zero points of each matrix, ``"fc1"`` to ``"fc3"``."""
    return tuple((f"{matrix}_{operand}", ctypes.c_void_p) for matrix in matrices for operand in _OPERANDS)


def matrix_pointers(*matrices: str) -> tuple[tuple[str, AddressSource], ...]:
    """Where the addresses of those fields come from."""
    return tuple(
        (f"{matrix}_{operand}", index)
        for matrix in matrices
        for operand, index in zip(_OPERANDS, MATRIX_INPUTS[matrix], strict=True)
    )
