"""Greedy decode of a random Qwen3-MoE, every layer's experts quantized and run by this package.

    python examples/decode.py                  # real widths on a GPU, a small model on the CPU
    python examples/decode.py -o decode.json   # keep the figures

On a GPU a step (one token through the whole model) is captured once with ``torch.cuda.graph`` and replayed. The same
model runs with its own expert code in its own precision, eagerly and captured, for comparison. Needs the extra
``torch`` and transformers 5.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import qmoe_ep
from qmoe_ep.torch import QMoELayer, replace_moe

REAL = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
SMALL = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}


def make_model(sizes: dict[str, int], layers: int, device: torch.device) -> Any:
    """Random weights in bfloat16, the same at every run."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **sizes, num_hidden_layers=layers, norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=4096
    )
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            # Routes as spread and as decided as a trained router's.
            layer.mlp.gate.weight.normal_(0, 4 / sizes["hidden_size"] ** 0.5)
            for name in ("gate_up_proj", "down_proj"):
                weights = getattr(layer.mlp.experts, name)
                weights.normal_(0, weights.shape[-1] ** -0.5)
    return model


ROUNDS = 5


class Decoder:
    """A model with fixed buffers for its state, so that one step can be captured.

    Parameters
    ----------
    model : a causal language model
    tokens : how many to decode
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        device = next(model.parameters()).device
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=tokens)
        self.cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.token = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self.position = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self.places = torch.arange(tokens, device=device)
        self.decoded = torch.zeros(tokens, dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """Decode one token; everything stays on the device."""
        # Spelled out: what the library makes by itself may look at the state from the host.
        mask = (self.places <= self.position)[None, None]
        output = self.model(
            input_ids=self.token,
            position_ids=self.position,
            attention_mask=mask,
            use_cache=True,
            **{self.cache_name: self.cache},
        )
        self.token.copy_(output.logits[:, -1:].argmax(-1))
        self.decoded.index_copy_(0, self.position[0], self.token[0])
        self.position.add_(1)

    def restart(self) -> None:
        """Begin again with the first token."""
        self.cache.reset()
        self.token.fill_(1)
        self.position.zero_()
        self.decoded.fill_(-1)

    def capture(self) -> Callable[[], None]:
        """Capture one step; what replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def run(self, step: Callable[[], None]) -> tuple[list[int], float]:
        """The tokens, and how many a second."""
        self.restart()
        _wait(self.token.device)
        start = time.perf_counter()
        for _ in range(self.tokens):
            step()
        _wait(self.token.device)
        return self.decoded.tolist(), self.tokens / (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(decoder: Decoder, steps: dict[str, Callable[[], None]], results: dict[str, float]) -> list[int]:
    """Time ways to run a step in turns, after one run each that warms; the tokens, which must always be the same."""
    tokens, *others = [decoder.run(step)[0] for step in steps.values()]
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            again, speed = decoder.run(step)
            speeds[name].append(speed)
            others.append(again)
    if any(other != tokens for other in others):
        raise SystemExit(f"{', '.join(steps)}: runs decoded different tokens")
    for name in steps:
        results[name] = round(statistics.median(speeds[name]), 1)
        print(f"{name:45} {results[name]:9.1f} tokens/s", flush=True)
    return tokens


def own_experts(model: Any, tokens: int, results: dict[str, float]) -> list[int]:
    """The unmodified model, by each of its own ways to run experts."""
    decoded: list[int] = []
    for way in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(way)
        decoder = Decoder(model, tokens)
        decoded = measure(decoder, {f"own experts ({way})": decoder.step}, results)
        # The loop over experts asks the device which ones were hit, so it can't be captured.
        if decoder.token.is_cuda and way != "eager":
            try:
                step = decoder.capture()
            except RuntimeError as error:
                print(f"own experts ({way}) can't be captured: {error}")
            else:
                measure(decoder, {f"own experts ({way}), captured": step}, results)
    return decoded


@torch.no_grad()
def compare(model: Any, quantized: Any, tokens: list[int]) -> tuple[float, float]:
    """Relative L2 error of the quantized model's logits after each of the tokens, and the share of equal choices."""
    row = torch.tensor([tokens], device=next(model.parameters()).device)
    want, got = model(row).logits.float(), quantized(row).logits.float()
    return float((got - want).norm() / want.norm()), float((got.argmax(-1) == want.argmax(-1)).float().mean())


def main() -> None:
    """Parse the command line, run, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=["real", "small"], help="real widths, or a small model; by the device")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    size = options.size or ("real" if device.type == "cuda" else "small")
    model = make_model(REAL if size == "real" else SMALL, options.layers, device)
    print(f"Qwen3-MoE, {size} widths, {options.layers} layers, bfloat16, on {device}")
    results: dict[str, float] = {}
    own = own_experts(model, options.tokens, results)

    quantized = copy.deepcopy(model)
    replace_moe(quantized, options.bits, options.block_size)
    decoder = Decoder(quantized, options.tokens)
    label = f"QMoE, {options.bits} bits"
    plain = measure(decoder, {label: decoder.step}, results)
    steps: dict[str, Callable[[], None]] = {}
    if device.type == "cuda":
        label += ", captured"
        steps[label] = decoder.capture()
    layers = [module for module in quantized.modules() if isinstance(module, QMoELayer)]
    for layer in layers:
        layer.telemetry.arm(qmoe_ep.RouteTelemetryConfig(layer.num_experts, layer.node.k, mode="counts"))
    steps[f"{label}, telemetry on"] = decoder.capture() if device.type == "cuda" else decoder.step
    if measure(decoder, steps, results) != plain:
        raise SystemExit("the captured step or telemetry changed the tokens")
    snapshots = [layer.telemetry.snapshot() for layer in layers]
    touched = [len(snapshot.experts) for snapshot in snapshots if snapshot is not None]
    rows = {snapshot.rows for snapshot in snapshots if snapshot is not None}
    if rows != {(ROUNDS + 1) * options.tokens}:
        raise SystemExit(f"telemetry counted {rows} rows, expected {(ROUNDS + 1) * options.tokens} in every layer")
    error, agreement = compare(model, quantized, own)
    print("the same tokens in every run of the quantized model, telemetry on or off")
    print(f"logits differ from the model's own by {error:.1%} (L2); {agreement:.0%} of the choices are the same")
    print(f"experts taken per layer: {touched}")
    if options.output:
        record = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "qmoe_ep": qmoe_ep.__version__,
            "model": {"size": size, "layers": options.layers, "dtype": "bfloat16"},
            "bits": options.bits,
            "block_size": options.block_size,
            "tokens": options.tokens,
            "tokens_per_second": results,
            "logits_error": round(error, 4),
            "same_choices": round(agreement, 4),
            "experts_taken_per_layer": touched,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
