"""Where a CPU kernel gets its experts from, expanded to float32 and ready to multiply with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.operator import MATRIX_INPUTS
from qmoe_ep.quantization import dequantize_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from qmoe_ep.call import CallDescription, ExpertMatrix

__all__ = ["ExpertWeights", "Linear", "ResidentExperts"]


@dataclass(frozen=True, slots=True)
class Linear:
    """One expanded matrix float32 [out, in] with its bias float32 [out]."""

    weights: NDArray[np.float32]
    bias: NDArray[np.float32] | None

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """W·x + b of float32 rows [tokens, in]."""
        y: NDArray[np.float32] = x @ self.weights.T
        if self.bias is not None:
            y += self.bias
        return y


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert, expanded."""

    fc1: Linear
    fc2: Linear
    fc3: Linear | None


class ResidentExperts:
    """Experts whose packed tensors are arrays of the process, expanded anew for each call that selects them."""

    def __init__(self, call: CallDescription, operands: Sequence[Any]) -> None:
        self._experts = call.experts
        self._operands = operands

    def load(self, expert: int) -> ExpertWeights:
        """Expand expert number ``expert``."""
        fc3 = self._experts.fc3
        return ExpertWeights(
            fc1=self._expand(self._experts.fc1, expert),
            fc2=self._expand(self._experts.fc2, expert),
            fc3=None if fc3 is None else self._expand(fc3, expert),
        )

    def _expand(self, matrix: ExpertMatrix, expert: int) -> Linear:
        own: list[Any] = [
            None if self._operands[i] is None else self._operands[i][expert] for i in MATRIX_INPUTS[matrix.name]
        ]
        packed, scales, bias, zero_points = own
        weights = dequantize_matrix(
            packed,
            scales,
            zero_points,
            bits=matrix.bits,
            block_size=matrix.block_size,
            in_features=matrix.in_features,
            layout=matrix.layout,
        )
        return Linear(weights, None if bias is None else bias.astype(np.float32))
