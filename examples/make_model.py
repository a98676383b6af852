"""Make the example: a small model with a router, eight int4 experts and a residual, and inputs for it.

    python examples/make_model.py [FOLDER]

writes ``moe_int4.onnx`` and ``moe_int4.inputs.npz``, the same bytes each time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import qmoe_ep

EXPERTS, HIDDEN, INTER, TOP_K, BITS, BLOCK = 8, 64, 128, 2, 4, 32
ROWS = 6


def expert_initializers(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Quantized weights with zero points, and biases, by operand name."""
    tensors: dict[str, np.ndarray] = {}
    for name, rows, columns in (("fc1", 2 * INTER, HIDDEN), ("fc2", HIDDEN, INTER)):
        weights = random.standard_normal((EXPERTS, rows, columns), np.float32) / np.float32(np.sqrt(columns))
        quantized = qmoe_ep.quantize_experts(weights, bits=BITS, block_size=BLOCK, symmetric=False)
        tensors[f"{name}_experts_weights"] = quantized.packed
        tensors[f"{name}_scales"] = quantized.scales
        tensors[f"{name}_experts_bias"] = 0.1 * random.standard_normal((EXPERTS, rows), np.float32)
        if quantized.zero_points is not None:
            tensors[f"{name}_zero_points"] = quantized.zero_points
    return tensors


def make_model(random: np.random.Generator) -> onnx.ModelProto:
    """``output = x + QMoE(x, x · router)``."""
    tensors = {"router": random.standard_normal((HIDDEN, EXPERTS), np.float32), **expert_initializers(random)}
    operands = ["x", "logits"]
    operands += [f"{m}_{part}" for m in ("fc1", "fc2") for part in ("experts_weights", "scales", "experts_bias")]
    operands += ["", "", "", "fc1_zero_points", "fc2_zero_points"]
    experts = helper.make_node(
        "QMoE",
        operands,
        ["mixed"],
        name="experts",
        domain="com.microsoft",
        k=TOP_K,
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.702,
        activation_beta=1.0,
        swiglu_limit=7.0,
        normalize_routing_weights=1,
        expert_weight_bits=BITS,
        block_size=BLOCK,
        weights_prepacked=0,
    )
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "router"], ["logits"], name="route"),
            experts,
            helper.make_node("Add", ["x", "mixed"], ["output"], name="residual"),
        ],
        "mixture_of_experts",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", HIDDEN])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["rows", HIDDEN])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="qmoe-ep example")


def main() -> None:
    """Write both files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    random = np.random.default_rng(7)
    onnx.save(make_model(random), folder / "moe_int4.onnx")
    np.savez(folder / "moe_int4.inputs.npz", x=random.standard_normal((ROWS, HIDDEN), np.float32))


if __name__ == "__main__":
    main()
