"""The CPU provider's resident path beside ONNX Runtime's CPU provider: ``python -m benchmarks.cpu [OUT.json]``.

Float32, int4 experts in blocks of 32, the same weights and inputs for both, in one process and in turns, each with the
same number of threads. A pause before each call lets the other's threads go to sleep: they spin for a while. What is
compared are medians and best times; on a machine that does other work as well, the ratio of the best times says more.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import qmoe_ep
from qmoe_ep import reference

SHAPES = {"Qwen3-30B-A3B": (2048, 768, 128, 8), "GPT-OSS-20B": (2880, 2880, 32, 4)}
"""Hidden size, intermediate size, experts, k."""
ROWS = (1, 16, 64, 512)
BITS, BLOCK = 4, 32
PAUSE_SECONDS = 0.1
_NAMES = {2: "fc1_experts_weights", 3: "fc1_scales", 5: "fc2_experts_weights", 6: "fc2_scales"}


@dataclass(frozen=True)
class Result:
    """One line of the table; times in ms, errors relative to the largest output of the float64 reference."""

    shape: str
    rows: int
    ours_ms: float
    onnxruntime_ms: float
    ratio: float
    ours_best_ms: float
    onnxruntime_best_ms: float
    best_ratio: float
    error: float | None
    onnxruntime_error: float | None


def make_weights(shape: str, seed: int = 0) -> dict[int, np.ndarray[Any, Any]]:
    """Random experts by input index."""
    hidden, inter, experts, _ = SHAPES[shape]
    rng = np.random.default_rng(seed)
    weights: dict[int, np.ndarray[Any, Any]] = {}
    for first, out, inner in ((2, 2 * inter, hidden), (5, hidden, inter)):
        weights[first] = rng.integers(0, 256, (experts, out, inner * BITS // 8), np.uint8)
        scales = rng.uniform(0.5, 1.5, (experts, out, inner // BLOCK)) / (8 * inner**0.5)
        weights[first + 1] = scales.astype(np.float32)
    return weights


def attributes(shape: str) -> dict[str, Any]:
    """Of the node: gate and up interleaved, softmax over the selected experts."""
    return {
        "k": SHAPES[shape][3],
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "normalize_routing_weights": 1,
        "expert_weight_bits": BITS,
        "block_size": BLOCK,
    }


def runtime_session(shape: str, weights: dict[int, np.ndarray[Any, Any]], threads: int) -> onnxruntime.InferenceSession:
    """ONNX Runtime's CPU provider, weights as initializers, everything else as it comes."""
    hidden, _, experts, _ = SHAPES[shape]
    inputs = ["x", "router", _NAMES[2], _NAMES[3], "", _NAMES[5], _NAMES[6]]
    node = helper.make_node("QMoE", inputs, ["y"], domain="com.microsoft", **attributes(shape))
    tensors = []
    for index, array in weights.items():
        kind = TensorProto.UINT8 if array.dtype == np.uint8 else TensorProto.FLOAT
        tensors.append(helper.make_tensor(_NAMES[index], kind, array.shape, array.tobytes(), raw=True))
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", d]) for n, d in (("x", hidden), ("router", experts))
    ]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", hidden])
    graph = helper.make_graph([node], "layer", values, [result], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def milliseconds(run: Callable[[], object]) -> float:
    """Time of one call after a pause."""
    time.sleep(PAUSE_SECONDS)
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def measure(shape: str, threads: int, repeats: int) -> list[Result]:
    """All numbers of rows of one shape."""
    hidden, _, experts, _ = SHAPES[shape]
    weights = make_weights(shape)
    node = qmoe_ep.QMoENode(**attributes(shape))
    kernel = qmoe_ep.CpuExecutionProvider(threads=threads).create_kernel(node, 0, weights)
    session = runtime_session(shape, weights, threads)
    rng, results = np.random.default_rng(1), []
    for rows in ROWS:
        x = rng.standard_normal((rows, hidden)).astype(np.float32)
        router = rng.standard_normal((rows, experts)).astype(np.float32)
        output = np.full_like(x, np.nan)

        def ours(x: Any = x, router: Any = router, output: Any = output) -> None:
            kernel.execute([x, router], [output])

        def theirs(x: Any = x, router: Any = router) -> Any:
            return session.run(None, {"x": x, "router": router})[0]

        ours()
        expected = theirs()
        errors: list[float | None] = [None, None]
        if rows == 1:
            exact = reference.qmoe(node, [x, router, weights[2], weights[3], None, weights[5], weights[6]])
            errors = [float(np.abs(y - exact).max() / np.abs(exact).max()) for y in (output, expected)]
        pairs = [(milliseconds(ours), milliseconds(theirs)) for _ in range(repeats)]
        mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        best, other_best = (min(column) for column in zip(*pairs, strict=True))
        results.append(
            Result(shape, rows, mine, other, mine / other, best, other_best, best / other_best, errors[0], errors[1])
        )
        print(f"{shape:14} {rows:4} rows  ours {mine:8.2f} ms  ONNX Runtime {other:8.2f} ms  "
              f"ratio {mine / other:.2f} (best {best / other_best:.2f})", flush=True)  # fmt: skip
    return results


def main() -> None:
    """Measure, print, and write a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    results = [r for shape in SHAPES for r in measure(shape, arguments.threads, arguments.repeats)]
    if arguments.output is not None:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "threads": arguments.threads,
            "onnxruntime": onnxruntime.__version__,
            "results": [asdict(result) for result in results],
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
