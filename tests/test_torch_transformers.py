"""Swapping the experts of transformers' models, against the library's own code with the same dequantized weights."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qmoe_ep
from qmoe_ep import QMoEError

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'qmoe-ep[torch]'")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from qmoe_ep.torch import QMoELayer, quantize_experts, replace_moe  # noqa: E402

# The library's own deprecations and hints are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
QWEN3 = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3 without normalization": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOss",
        {
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}


def make_model(family: str, **changes: Any) -> Any:
    """A small model with random weights, the same at every call."""
    kind, options = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            if value.ndim > 1:
                value.normal_(0, 0.2)
        for block in (m for m in model.modules() if hasattr(m, "experts")):
            router = getattr(block, "gate", None) or block.router
            router.weight.mul_(4)
            # Large enough to change what is selected.
            for name in ("e_score_correction_bias", "bias"):
                if getattr(router, name, None) is not None:
                    getattr(router, name).normal_(0, 0.5)
            for name in ("gate_up_proj_bias", "down_proj_bias"):
                if hasattr(block.experts, name):
                    getattr(block.experts, name).normal_(0, 0.5)
    return model


def dequantize_in_place(model: Any, bits: int, block_size: int | None, symmetric: bool) -> None:
    """Give the library's own code the weights that the quantized ones stand for."""
    for block in (m for m in model.modules() if hasattr(m, "experts")):
        for name in ("gate_up_proj", "down_proj"):
            weights = getattr(block.experts, name)
            transposed = type(block).__name__ == "GptOssMLP"
            values = weights.detach().transpose(1, 2) if transposed else weights.detach()
            q = quantize_experts(values, bits=bits, block_size=block_size, symmetric=symmetric)
            zero_points = None if q.zero_points is None else q.zero_points.numpy()
            exact = torch.from_numpy(
                qmoe_ep.dequantize_experts(
                    q.packed.numpy(), q.scales.numpy(), zero_points, bits=bits, block_size=block_size
                )
            )
            with torch.no_grad():
                weights.copy_(exact.transpose(1, 2) if transposed else exact)


def logits_of(model: Any, **options: Any) -> Any:
    tokens = torch.arange(22).reshape(2, 11) * 31 % SIZES["vocab_size"]
    with torch.no_grad():
        return model(tokens, **options)


def error(got: Any, want: Any) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("bits", "block_size", "symmetric"), [(8, 32, True), (4, 16, False), (4, None, True)])
def test_only_the_rounding_of_weights_changes_the_output(
    family: str, bits: int, block_size: int | None, symmetric: bool
) -> None:
    model = make_model(family)
    unmodified = logits_of(model).logits
    rounded = copy.deepcopy(model)
    dequantize_in_place(rounded, bits, block_size, symmetric)
    want = logits_of(rounded).logits
    names = replace_moe(model, bits, block_size, symmetric=symmetric)
    assert names == [f"model.layers.{i}.mlp" for i in ((1,) if family == "deepseek-v3" else (0, 1))]
    got = logits_of(model).logits
    assert error(got, want) <= 2e-5
    assert error(got, unmodified) <= 1.01 * error(want, unmodified)
    assert error(want, unmodified) <= (0.2 if bits == 8 else 1)
    kept = {name for name in dict(rounded.named_parameters()) if ".experts." not in name}
    assert set(dict(model.named_parameters())) == kept


@pytest.mark.parametrize("family", FAMILIES)
def test_router_logits_are_still_recorded(family: str) -> None:
    if family == "deepseek-v3" and "output_router_logits" not in transformers.DeepseekV3Config().to_dict():
        pytest.skip("this version of the library doesn't record them for this family")
    model = make_model(family)
    want = logits_of(model, output_router_logits=True).router_logits
    replace_moe(model, 8)
    got = logits_of(model, output_router_logits=True)
    assert len(got.router_logits) == len(want) > 0
    torch.testing.assert_close(got.router_logits[0], want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.logits, logits_of(model).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_swapped_model_generates_is_copied_and_restored(family: str) -> None:
    model = make_model(family)
    replace_moe(model, 8, scale_dtype=torch.float16)
    layers = [m for m in model.modules() if isinstance(m, QMoELayer)]
    assert {layer.fc1_scales.dtype for layer in layers} == {torch.float16}
    want = logits_of(model).logits
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape[1] > 3
    other = make_model(family)
    replace_moe(other, 8, scale_dtype=torch.float16)
    with torch.no_grad():
        for buffer in other.buffers():
            buffer.zero_()
    other.load_state_dict(model.state_dict(), strict=True)
    for name, buffer in model.named_buffers():
        other.get_buffer(name).copy_(buffer)
    assert torch.equal(logits_of(other).logits, want)
    assert torch.equal(logits_of(copy.deepcopy(model)).logits, want)


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_half_precision(family: str) -> None:
    model = make_model(family).to(torch.bfloat16)
    reference = copy.deepcopy(model).float()
    replace_moe(model, 8)
    assert error(logits_of(model).logits.float(), logits_of(reference).logits) <= 0.1


def test_what_can_not_be_swapped_is_refused() -> None:
    with pytest.raises(QMoEError, match="no expert block was found in Linear"):
        replace_moe(torch.nn.Linear(2, 2))
    model = make_model("qwen3")
    before = logits_of(model).logits
    with pytest.raises(QMoEError, match="block_size = 128 doesn't divide"):
        replace_moe(model, 4, 128)
    assert torch.equal(logits_of(model).logits, before)
    with pytest.raises(QMoEError, match=r"model\.layers\.0\.mlp: the experts' activation"):
        replace_moe(make_model("qwen3", hidden_act="gelu"))
    for family in ("qwen3", "deepseek-v3"):
        model = make_model(family)
        replace_moe(model)
        with pytest.raises(QMoEError, match=r"no expert block was found|changed already"):
            replace_moe(model)


def test_the_example_decodes_on_the_cpu(tmp_path: Path) -> None:
    root, figures = Path(__file__).parents[1], tmp_path / "decode.json"
    command = [sys.executable, "examples/decode.py", "--device", "cpu", "--size", "small", "--layers", "1"]
    command += ["--tokens", "6", "-o", str(figures)]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the same tokens in every run" in done.stdout
    assert json.loads(figures.read_text())["tokens_per_second"]["QMoE, 4 bits"] > 0
