"""Quantizing and swapping the expert blocks of models of the ``transformers`` library.

Nothing of that library is imported: a block is known by the name of its class and used by its attributes, as they
are since version 5 (experts stacked in ``gate_up_proj`` and ``down_proj``). The router is left as it is. Where it
selects by its logits and weighs by their softmax, the operator does the same from the logits alone; where it
selects by other rules, its selection is handed to the operator as operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from qmoe_ep.errors import QMoEError
from qmoe_ep.operator import QMoENode
from qmoe_ep.torch.layer import QMoELayer
from qmoe_ep.torch.quantize import quantize_experts

__all__ = ["LogitsBlock", "SelectedExperts", "replace_moe"]


@dataclass(frozen=True, slots=True)
class _Family:
    """How the blocks of one family of models are built.

    Attributes
    ----------
    router : attribute of the block
    rule : "logits": the k largest logits, weights by softmax; "own": whatever the router returns
    transposed : experts are [E, K, N] instead of [E, N, K]
    interleaved : gate and up rows of the fused projection alternate, instead of all gate rows first
    clamped : the gate has ``alpha`` and ``limit``, and up is offset by one
    tuple_output : the block returns a pair
    """

    router: str = "gate"
    rule: Literal["logits", "own"] = "logits"
    transposed: bool = False
    interleaved: bool = False
    clamped: bool = False
    tuple_output: bool = False


_FAMILIES = {
    "Qwen3MoeSparseMoeBlock": _Family(),
    "MixtralSparseMoeBlock": _Family(),
    "GptOssMLP": _Family(router="router", transposed=True, interleaved=True, clamped=True, tuple_output=True),
    "DeepseekV3MoE": _Family(rule="own"),
}


def replace_moe(
    model: torch.nn.Module,
    bits: int = 4,
    block_size: int | None = 32,
    *,
    symmetric: bool = True,
    scale_dtype: torch.dtype | None = None,
) -> list[str]:
    """Quantize the experts of a transformers model and swap them, in place.

    Knows the blocks of Qwen3-MoE, Mixtral, GPT-OSS and DeepSeek-V3. Weights are quantized on the device where
    they are, one layer at a time, and a layer's float weights are let go of once it is swapped. Routers, shared
    experts and everything else stay as they are.

    Parameters
    ----------
    model : in evaluation; on the CPU or a CUDA device
    bits : 1, 2, 3, 4 or 8
    block_size : values per scale, a power of two ≥ 16 that divides both sizes of the experts; None for one scale
        per output row
    symmetric : without zero points
    scale_dtype : of the scales; None for that of the weights

    Returns
    -------
    names of the swapped blocks, in the model's order

    Raises
    ------
    QMoEError
        No such block is found, or one can't be expressed; it and those after it are unchanged then.
    """
    found = [(name, module) for name, module in model.named_modules() if _family(module) is not None]
    if not found:
        known = ", ".join(_FAMILIES)
        raise QMoEError(f"model: no expert block was found in {type(model).__name__}; expected one of {known}")
    for name, block in found:
        family = _family(block)
        if family is None:
            continue
        experts = _quantized(name, block, family, bits, block_size, symmetric=symmetric, scale_dtype=scale_dtype)
        if family.rule == "own":
            block.experts = SelectedExperts(experts)
        else:
            swapped = LogitsBlock(getattr(block, family.router), experts, family.router, pair=family.tuple_output)
            model.set_submodule(name, swapped.train(block.training))
    return [name for name, _ in found]


class LogitsBlock(torch.nn.Module):
    """A router whose logits alone decide, and its experts; stands in for the whole block.

    Parameters
    ----------
    router : the model's; its ``weight`` [E, H] (and ``bias``) make the logits. It is only called where a hook
        listens to it, such as for ``output_router_logits``
    experts : the layer
    router_name : what the block called it, so that the state dict keeps its names
    pair : return (output, None), for a caller that takes a pair
    """

    def __init__(self, router: torch.nn.Module, experts: QMoELayer, router_name: str, *, pair: bool) -> None:
        super().__init__()
        self.add_module(router_name, router)
        self.experts = experts
        self._router_name, self._pair = router_name, pair

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """Float [batch, sequence, H] to the same."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        router = getattr(self, self._router_name)
        if router._forward_hooks:
            logits = router(rows)[0]
        else:
            logits = torch.nn.functional.linear(rows, router.weight, getattr(router, "bias", None))
        output = self.experts(hidden_states, logits)
        return (output, None) if self._pair else output


class SelectedExperts(torch.nn.Module):
    """Experts of a block whose router selects by rules of its own; stands in for the block's ``experts``."""

    def __init__(self, layer: QMoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute selected experts.

        Parameters
        ----------
        hidden_states : float [rows, H]
        top_k_index : int64 [rows, k], distinct in a row
        top_k_weights : float [rows, k]

        Returns
        -------
        the shape and dtype of ``hidden_states``
        """
        table = torch.zeros(
            (2, hidden_states.shape[0], self.layer.num_experts), dtype=torch.float32, device=hidden_states.device
        )
        selected, weights = table.unbind()
        selected.scatter_(1, top_k_index, 1.0)
        weights.scatter_(1, top_k_index, top_k_weights.float())
        output: torch.Tensor = self.layer(hidden_states, selected, weights)
        return output


def _family(module: torch.nn.Module) -> _Family | None:
    """The family of a block, also of a subclass of one."""
    return next((_FAMILIES[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _FAMILIES), None)


def _quantized(
    name: str,
    block: torch.nn.Module,
    family: _Family,
    bits: int,
    block_size: int | None,
    *,
    symmetric: bool,
    scale_dtype: torch.dtype | None,
) -> QMoELayer:
    experts, router = block.experts, getattr(block, family.router)
    gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if not (isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor) and hasattr(router, "weight")):
        raise QMoEError(
            f"{name}: expected stacked experts gate_up_proj and down_proj, and a router with a weight, as "
            "transformers has them since version 5; update it, or the model was changed already"
        )
    weights: dict[int, torch.Tensor | None] = {}
    for (matrix, scales, points), values in (((2, 3, 11), gate_up), ((5, 6, 12), down)):
        quantized = quantize_experts(
            values.transpose(1, 2) if family.transposed else values,
            bits=bits,
            block_size=block_size,
            symmetric=symmetric,
            scale_dtype=values.dtype if scale_dtype is None else scale_dtype,
        )
        weights[matrix], weights[scales] = quantized.packed, quantized.scales
        weights[points] = quantized.zero_points
    weights[4], weights[7] = getattr(experts, "gate_up_proj_bias", None), getattr(experts, "down_proj_bias", None)
    node = QMoENode(
        k=int(router.top_k),
        activation_type="swiglu",
        swiglu_fusion=1 if family.interleaved else 2,
        normalize_routing_weights=int(family.rule == "logits" and getattr(router, "norm_topk_prob", True)),
        expert_weight_bits=bits,
        block_size=block_size,
        **_gate(name, experts, family),
    )
    return QMoELayer(node, weights)


def _gate(name: str, experts: Any, family: _Family) -> dict[str, Any]:
    """Attributes of the gated activation."""
    if family.clamped:
        return {"activation_alpha": experts.alpha, "activation_beta": 1.0, "swiglu_limit": experts.limit}
    # The same function has several classes and names.
    samples = torch.linspace(-4, 4, 9)
    if not torch.allclose(experts.act_fn(samples), torch.nn.functional.silu(samples), atol=1e-6):
        raise QMoEError(f"{name}: the experts' activation is {experts.act_fn}; only SiLU, as gate of swiglu, is taken")
    return {}
