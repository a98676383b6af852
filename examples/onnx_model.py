"""What is in a model with QMoE nodes, its weights in the other order, and the same results from both files.

    python examples/onnx_model.py [MODEL.onnx INPUTS.npz] [--provider cpu|cuda] [--weights-layout raw|sm80]

The QMoE nodes run by this package, all others by the evaluator of the ``onnx`` package.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from onnx.reference import ReferenceEvaluator

import qmoe_ep
from qmoe_ep import onnx as models

HERE = Path(__file__).parent


def report(model: models.LoadedModel) -> None:
    """Print one line per QMoE node."""
    for entry in model.qmoe_nodes():
        node = entry.node
        shapes = {qmoe_ep.operator.INPUT_NAMES[i]: list(t.dims) for i, t in entry.constants.items()}
        claim = qmoe_ep.unsupported_reason(node) or "runs"
        print(f"node {entry.node_id} {node.name!r}: {node.activation_type}, k {node.k}, {shapes}: {claim}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=HERE / "moe_int4.onnx", type=Path)
    parser.add_argument("inputs", nargs="?", default=HERE / "moe_int4.inputs.npz", type=Path)
    parser.add_argument("--provider", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--weights-layout", choices=["raw", "sm80"], help="order of the weights, if the file is silent")
    options = parser.parse_args()

    model = models.load_model(options.model)
    report(model)
    stored = options.weights_layout or ("sm80" if model.qmoe_nodes()[0].node.weights_prepacked == 1 else "raw")
    other = "raw" if stored == "sm80" else "sm80"
    inputs = dict(np.load(options.inputs))
    kind = qmoe_ep.CudaExecutionProvider if options.provider == "cuda" else qmoe_ep.CpuExecutionProvider
    with kind() as provider, tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "converted.onnx"
        names = models.convert_layout(options.model, converted, other, weights_layout=stored)
        print(f"{stored} to {other}: {', '.join(names)}")
        before = models.run_model(model, inputs, provider, weights_layout=stored)
        after = models.run_model(converted, inputs, provider)
        # The evaluator of onnx by itself works as well. It reads the whole model and hands over weights with each call,
        # which a GPU takes raw.
        raw = converted if other == "raw" else options.model
        evaluator = ReferenceEvaluator(str(raw), new_ops=[models.reference_ops(provider, "raw")])
        for name, again in zip(after, evaluator.run(None, inputs), strict=True):
            assert np.array_equal(after[name], again, equal_nan=True), name
        for name, expected in before.items():
            actual = after[name]
            assert np.array_equal(expected, actual, equal_nan=True), name
            print(f"{name}: {actual.dtype} {list(actual.shape)}, the same from both files")


if __name__ == "__main__":
    main()
