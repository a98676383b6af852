"""The ONNX operator ``com.microsoft::QMoE`` (quantized mixture of experts) on NVIDIA GPUs and the CPU.

Names load on first use, so that importing the package needs neither a GPU nor a driver and is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qmoe_ep import onnx, reference
    from qmoe_ep.call import CallDescription, ExpertMatrix, Experts, OperandType, describe_call
    from qmoe_ep.cpu.provider import CpuExecutionProvider
    from qmoe_ep.cuda.provider import CudaExecutionProvider
    from qmoe_ep.errors import CaptureError, CudaError, NvrtcError, QMoEError, TelemetryUnsupported
    from qmoe_ep.float_quantization import FloatQuantizedExperts, quantize_float_experts
    from qmoe_ep.offload import OffloadStats, offload_stats, reset_offload_stats
    from qmoe_ep.operator import QMoENode, unsupported_reason
    from qmoe_ep.quantization import (
        QuantizedExperts,
        dequantize_experts,
        quantize_experts,
        raw_to_sm80,
        sm80_to_raw,
    )
    from qmoe_ep.telemetry import RouteTelemetryConfig, TelemetrySnapshot

__version__ = "0.1.0"

_MODULES = {
    "qmoe_ep.call": ("CallDescription", "ExpertMatrix", "Experts", "OperandType", "describe_call"),
    "qmoe_ep.cpu.provider": ("CpuExecutionProvider",),
    "qmoe_ep.cuda.provider": ("CudaExecutionProvider",),
    "qmoe_ep.errors": ("CaptureError", "CudaError", "NvrtcError", "QMoEError", "TelemetryUnsupported"),
    "qmoe_ep.float_quantization": ("FloatQuantizedExperts", "quantize_float_experts"),
    "qmoe_ep.offload": ("OffloadStats", "offload_stats", "reset_offload_stats"),
    "qmoe_ep.operator": ("QMoENode", "unsupported_reason"),
    "qmoe_ep.quantization": (
        "QuantizedExperts",
        "dequantize_experts",
        "quantize_experts",
        "raw_to_sm80",
        "sm80_to_raw",
    ),
    "qmoe_ep.telemetry": ("RouteTelemetryConfig", "TelemetrySnapshot"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("onnx", "reference")
_OPTIONAL_SUBMODULES = ("torch",)
"""Importable only where their library is; so they are none of the names that ``import *`` asks for."""


__all__ = [
    "CallDescription",
    "CaptureError",
    "CpuExecutionProvider",
    "CudaError",
    "CudaExecutionProvider",
    "ExpertMatrix",
    "Experts",
    "FloatQuantizedExperts",
    "NvrtcError",
    "OffloadStats",
    "OperandType",
    "QMoEError",
    "QMoENode",
    "QuantizedExperts",
    "RouteTelemetryConfig",
    "TelemetrySnapshot",
    "TelemetryUnsupported",
    "__version__",
    "dequantize_experts",
    "describe_call",
    "offload_stats",
    "onnx",
    "quantize_experts",
    "quantize_float_experts",
    "raw_to_sm80",
    "reference",
    "reset_offload_stats",
    "sm80_to_raw",
    "unsupported_reason",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES or name in _OPTIONAL_SUBMODULES:
        return importlib.import_module(f"qmoe_ep.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'qmoe_ep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
