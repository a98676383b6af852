"""Quantized experts as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qmoe_ep.call import OperandType, describe_experts
from qmoe_ep.errors import QMoEError
from qmoe_ep.formats import E4M3, E8M0
from qmoe_ep.operator import GLOBAL_SCALES, INPUT_NAMES, MATRIX_INPUTS, QMoENode, check_claim
from qmoe_ep.torch.operation import ATTRIBUTES, DTYPES, qmoe
from qmoe_ep.torch.telemetry import create_producer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qmoe_ep.telemetry import RouteTelemetry

__all__ = ["QMoELayer"]

_WEIGHTS = tuple(sorted({i for indices in MATRIX_INPUTS.values() for i in indices} | set(GLOBAL_SCALES.values())))
# PyTorch has float8_e8m0fnu since 2.7.
_FLOAT8 = {
    getattr(torch, name): dtype
    for name, dtype in (("float8_e4m3fn", E4M3), ("float8_e8m0fnu", E8M0))
    if hasattr(torch, name)
}


class QMoELayer(torch.nn.Module):
    """The experts of one layer: logits of a router in, weighted sum of the selected experts out.

    Weights are buffers under the names of the ONNX operands, which the kernels read in place; they follow
    ``.to(device)`` and ``state_dict``. There are no parameters and there is no gradient.

    Parameters
    ----------
    node : the attributes; weights are raw whatever ``weights_prepacked`` says
    weights : operands by input index of the ONNX operator, tensors or arrays (taken without a copy); 8-bit floats are
        kept as their bytes, uint8, which no conversion of the module's type touches

    Attributes
    ----------
    node : the attributes
    num_experts, hidden_size, inter_size : E, H, I

    Raises
    ------
    QMoEError
        The node is declined, or an operand doesn't fit: which one, what was expected and what came.
    """

    fc1_experts_weights: torch.Tensor
    fc1_scales: torch.Tensor | None
    fc1_experts_bias: torch.Tensor | None
    fc2_experts_weights: torch.Tensor
    fc2_scales: torch.Tensor | None
    fc2_experts_bias: torch.Tensor | None
    fc3_experts_weights: torch.Tensor | None
    fc3_scales: torch.Tensor | None
    fc3_experts_bias: torch.Tensor | None
    fc1_zero_points: torch.Tensor | None
    fc2_zero_points: torch.Tensor | None
    fc3_zero_points: torch.Tensor | None
    fc1_global_scale: torch.Tensor | None
    fc2_global_scale: torch.Tensor | None

    def __init__(self, node: QMoENode, weights: Mapping[int, Any]) -> None:
        super().__init__()
        check_claim(node, "raw")
        for index in weights:
            if index not in _WEIGHTS:
                raise QMoEError(f"weights: {index} is not the input index of a weight; expected some of {_WEIGHTS}")
        tensors = {index: _tensor(value, index) for index, value in weights.items() if value is not None}
        dtypes = {**DTYPES, **_FLOAT8}
        types = {i: OperandType(tuple(t.shape), dtypes.get(t.dtype, np.dtype(object))) for i, t in tensors.items()}
        experts = describe_experts(node, types, weights_layout="raw")
        self.node = node
        self.num_experts, self.hidden_size = experts.num_experts, experts.hidden_size
        self.inter_size = experts.inter_size
        for index in _WEIGHTS:
            tensor = tensors.get(index)
            if tensor is not None and tensor.dtype in _FLOAT8:
                tensor = tensor.view(torch.uint8)
            self.register_buffer(INPUT_NAMES[index], tensor)
        # Plain values, for tracers.
        self._attributes: dict[str, Any] = {name: getattr(node, name) for name in ATTRIBUTES}
        self._telemetry: RouteTelemetry | None = None
        self._telemetry_device: torch.device | None = None
        self._telemetry_handle = 0

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        router_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the layer.

        Parameters
        ----------
        hidden_states : float [rows, H] or [batch, sequence, H]
        router_logits : float [..., E]; the k largest of a row are selected
        router_weights : float [rows, E], the weight of every expert; None for the softmax of the logits

        Returns
        -------
        the shape and dtype of ``hidden_states``

        Raises
        ------
        QMoEError
            An operand doesn't fit.
        """
        output: torch.Tensor = qmoe(
            hidden_states,
            router_logits,
            self.fc1_experts_weights,
            self.fc1_scales,
            self.fc2_experts_weights,
            self.fc2_scales,
            self.fc1_experts_bias,
            self.fc2_experts_bias,
            self.fc3_experts_weights,
            self.fc3_scales,
            self.fc3_experts_bias,
            self.fc1_zero_points,
            self.fc2_zero_points,
            self.fc3_zero_points,
            router_weights,
            self.fc1_global_scale,
            self.fc2_global_scale,
            **self._attributes,
            telemetry=self._telemetry_handle,
        )
        return output

    @property
    def telemetry(self) -> RouteTelemetry:
        """The layer's producer of route telemetry, disarmed at first; its changes act on the current stream.

        A layer that has moved to another device has a new one there.

        Raises
        ------
        CudaError : the driver refuses.
        """
        device = self.fc1_experts_weights.device
        if self._telemetry is None or self._telemetry_device != device:
            self._telemetry_handle, self._telemetry = create_producer(device, int(self.node.k))
            self._telemetry_device = device
        return self._telemetry

    def __getstate__(self) -> dict[str, Any]:
        # A copy counts for itself.
        return self.__dict__ | {"_telemetry": None, "_telemetry_device": None, "_telemetry_handle": 0}

    def extra_repr(self) -> str:
        """Sizes and format."""
        return (
            f"experts={self.num_experts}, k={self.node.k}, hidden={self.hidden_size}, inter={self.inter_size}, "
            f"{'' if self.node.quant_type == 'int' else f'quant_type={self.node.quant_type}, '}"
            f"bits={self.node.bits('fc1')}, block_size={self.node.blocks or None}, "
            f"activation={self.node.activation_type}"
        )


def _tensor(value: Any, index: int) -> torch.Tensor:
    """A contiguous tensor over an operand's memory where it has one."""
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value) if value.flags.writeable else value.copy()
        if array.dtype == DTYPES[torch.bfloat16]:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        small = [kind for kind, dtype in _FLOAT8.items() if dtype == array.dtype]
        value = torch.from_numpy(array.view(np.uint8) if array.dtype in (E4M3, E8M0) else array)
        value = value.view(*small) if small else value
    if not isinstance(value, torch.Tensor):
        raise QMoEError(f"{INPUT_NAMES[index]}: expected a tensor or an array, got {type(value).__name__}; convert it")
    return value.detach().contiguous()
