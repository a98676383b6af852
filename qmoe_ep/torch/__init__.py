"""QMoE for PyTorch: a custom operator, a module, and a swap of the experts of transformers' models.

Needs the extra ``torch``; nothing else of the package imports it.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(f"qmoe_ep.torch needs PyTorch ({error}): pip install 'qmoe-ep[torch]'") from error

from qmoe_ep.torch.layer import QMoELayer
from qmoe_ep.torch.operation import qmoe
from qmoe_ep.torch.quantize import TorchQuantizedExperts, quantize_experts
from qmoe_ep.torch.transformers import replace_moe

__all__ = ["QMoELayer", "TorchQuantizedExperts", "qmoe", "quantize_experts", "replace_moe"]
