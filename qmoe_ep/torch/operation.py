"""The custom operator ``qmoe_ep::qmoe``, on CUDA and CPU tensors.

It takes the operands of the ONNX operator as tensors and its attributes as keyword arguments, and keeps no state
between calls, so that ``torch.compile`` and ``torch.export`` see one plain function.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from qmoe_ep.call import OperandType
from qmoe_ep.errors import QMoEError
from qmoe_ep.operator import INPUT_NAMES, ROUTER_WEIGHTS, QMoENode
from qmoe_ep.torch.device import borrowed_calls, cpu_provider
from qmoe_ep.torch.telemetry import producer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qmoe_ep.cpu.kernel import CpuKernel

__all__ = ["ATTRIBUTES", "DTYPES", "node_of", "qmoe"]

ATTRIBUTES = (
    "k",
    "activation_type",
    "normalize_routing_weights",
    "swiglu_fusion",
    "activation_alpha",
    "activation_beta",
    "swiglu_limit",
    "expert_weight_bits",
    "fc1_expert_weight_bits",
    "fc2_expert_weight_bits",
    "fc3_expert_weight_bits",
    "block_size",
    "quant_type",
    "use_sparse_mixer",
    "swiglu_limit_after_activation",
)
"""Attributes of the node that the operator takes, in the order of its keyword arguments."""

_ACTIVATIONS = (0, 1, ROUTER_WEIGHTS)
DTYPES = {
    torch.uint8: np.dtype(np.uint8),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}


def _qmoe(
    input: torch.Tensor,
    router_probs: torch.Tensor,
    fc1_experts_weights: torch.Tensor,
    fc1_scales: torch.Tensor | None,
    fc2_experts_weights: torch.Tensor,
    fc2_scales: torch.Tensor | None,
    fc1_experts_bias: torch.Tensor | None = None,
    fc2_experts_bias: torch.Tensor | None = None,
    fc3_experts_weights: torch.Tensor | None = None,
    fc3_scales: torch.Tensor | None = None,
    fc3_experts_bias: torch.Tensor | None = None,
    fc1_zero_points: torch.Tensor | None = None,
    fc2_zero_points: torch.Tensor | None = None,
    fc3_zero_points: torch.Tensor | None = None,
    router_weights: torch.Tensor | None = None,
    fc1_global_scale: torch.Tensor | None = None,
    fc2_global_scale: torch.Tensor | None = None,
    *,
    k: int = 1,
    activation_type: str = "relu",
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    swiglu_limit: float | None = None,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None,
    block_size: int | None = None,
    quant_type: str = "int",
    use_sparse_mixer: int = 0,
    swiglu_limit_after_activation: int = 0,
    telemetry: int = 0,
) -> torch.Tensor:
    """Mixture of quantized experts: the ONNX operator ``com.microsoft::QMoE`` on tensors of one device.

    On CUDA the call is enqueued on the current stream, also under ``torch.cuda.graph``, with output and scratch
    from PyTorch's allocator. On the CPU it returns when it is done. There is no gradient.

    Parameters
    ----------
    input : float32, float16 or bfloat16 [rows, H] or [batch, sequence, H]
    router_probs : logits, float [..., E] with as many rows
    fc1_experts_weights, fc1_scales, fc2_experts_weights, ... : operands under their ONNX names, with the shapes of
        the ONNX operator, contiguous; packed weights in the raw layout, whatever the format; 8-bit floats as bytes
    k, activation_type, ... : attributes under their ONNX names
    telemetry : handle of a layer's route telemetry; 0 for none

    Returns
    -------
    a new contiguous tensor of the shape and dtype of ``input``

    Raises
    ------
    QMoEError
        An operand or attribute doesn't fit, or tensors are on different devices.
    """
    operands = (
        input,
        router_probs,
        fc1_experts_weights,
        fc1_scales,
        fc1_experts_bias,
        fc2_experts_weights,
        fc2_scales,
        fc2_experts_bias,
        fc3_experts_weights,
        fc3_scales,
        fc3_experts_bias,
        fc1_zero_points,
        fc2_zero_points,
        fc3_zero_points,
        router_weights,
        fc1_global_scale,
        fc2_global_scale,
    )
    attributes = (
        k,
        activation_type,
        normalize_routing_weights,
        swiglu_fusion,
        activation_alpha,
        activation_beta,
        swiglu_limit,
        expert_weight_bits,
        fc1_expert_weight_bits,
        fc2_expert_weight_bits,
        fc3_expert_weight_bits,
        block_size,
        quant_type,
        use_sparse_mixer,
        swiglu_limit_after_activation,
    )
    if input.device.type not in ("cuda", "cpu"):
        raise QMoEError(f"input: expected a tensor on a CUDA device or the CPU, got one on {input.device}; move it")
    output = input.new_empty(input.shape)
    (_on_cuda if input.is_cuda else _on_cpu)(output, operands, attributes, telemetry)
    return output


qmoe = torch.library.custom_op("qmoe_ep::qmoe", _qmoe, mutates_args=())
qmoe.__doc__ = _qmoe.__doc__


@qmoe.register_fake
def _(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return input.new_empty(input.shape)


@lru_cache(maxsize=1024)
def node_of(attributes: tuple[Any, ...]) -> QMoENode:
    """The node with these values of :data:`ATTRIBUTES`."""
    return QMoENode(**dict(zip(ATTRIBUTES, attributes, strict=True)))


def _dtype(tensor: torch.Tensor, index: int) -> np.dtype[Any]:
    dtype: np.dtype[Any] | None = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise QMoEError(
            f"{INPUT_NAMES[index]}: expected float32, float16, bfloat16, or uint8 where it is packed, got "
            f"{tensor.dtype}; convert it, or view 8-bit floats as uint8"
        )
    return dtype


def _checked(tensor: torch.Tensor, index: int, device: torch.device) -> OperandType:
    """The type of a CUDA operand, once its device and layout are right."""
    name = INPUT_NAMES[index]
    if tensor.device != device:
        raise QMoEError(f"{name}: is on {tensor.device}, expected {device}, where input is; move it there")
    if not tensor.is_contiguous():
        raise QMoEError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}; make a copy")
    return OperandType(tuple(tensor.shape), _dtype(tensor, index))


def _on_cuda(
    output: torch.Tensor, operands: tuple[torch.Tensor | None, ...], attributes: tuple[Any, ...], telemetry: int
) -> None:
    device = output.device
    # Activations may be views. Weights that are would be copied at every call, so they are refused.
    tensors = [t.contiguous() if t is not None and i in _ACTIVATIONS else t for i, t in enumerate(operands)]
    scratch: list[torch.Tensor] = []

    def describe() -> tuple[QMoENode, list[OperandType | None]]:
        types = [None if t is None else _checked(t, i, device) for i, t in enumerate(tensors)]
        return node_of(attributes), types

    def allocate(nbytes: int) -> int:
        # Given back when this call returns: the allocator reuses it in the order of the stream, or of the graph.
        scratch.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
        return int(scratch[0].data_ptr())

    borrowed_calls(device.index).execute(
        (attributes, *(None if t is None else (t.dtype, t.shape, t.stride(), t.device) for t in tensors)),
        describe,
        [0 if t is None else t.data_ptr() for t in tensors],
        output.data_ptr(),
        torch.cuda.current_stream(device).cuda_stream,
        allocate,
        producer(telemetry) if telemetry else None,
    )


def _on_cpu(
    output: torch.Tensor, operands: tuple[torch.Tensor | None, ...], attributes: tuple[Any, ...], telemetry: int
) -> None:
    kernel = _cpu_kernel(attributes, telemetry)
    kernel.telemetry = producer(telemetry) if telemetry else None
    kernel.execute([None if t is None else _array(t, i) for i, t in enumerate(operands)], [_array(output, 0)])


def _array(tensor: torch.Tensor, index: int) -> NDArray[Any]:
    """A CPU tensor's memory as an array, without a copy."""
    if tensor.device.type != "cpu":
        raise QMoEError(f"{INPUT_NAMES[index]}: is on {tensor.device}, expected the CPU, where input is; move it there")
    dtype, tensor = _dtype(tensor, index), tensor.detach()
    # NumPy has no bfloat16 of its own, so PyTorch doesn't convert it.
    raw = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    array: NDArray[Any] = raw.numpy().view(dtype)
    return array


@lru_cache(maxsize=1024)
def _cpu_kernel(attributes: tuple[Any, ...], telemetry: int) -> CpuKernel:
    return cpu_provider().create_kernel(node_of(attributes), telemetry, weights_layout="raw")
