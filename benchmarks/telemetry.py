"""What recording and exporting cost a decode: ``python -m benchmarks.telemetry [OUT.json]``, on a GPU.

A step is one row through many MoE layers, captured once and replayed. The same replays run, in turns, with telemetry
disarmed and armed, and armed beside an exporter that writes every layer's record at an interval. A step is followed by
the host reading its result, as a sampler does, or many are queued first.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import qmoe_ep
from qmoe_ep.telemetry_export import TelemetryExporter, read_records

LAYERS, HIDDEN, INTER, EXPERTS, TOP_K, BLOCK = 48, 2048, 768, 128, 8, 32
CHUNK_SECONDS = 1.05
ROUNDS = 3
INTERVALS = {"disarmed": None, "armed": None, "exported every 1 s": 1.0, "exported every 50 ms": 0.05}
QUEUED = {"read back every step": 1, "read back every 32 steps": 32}


def make_step(gpu: qmoe_ep.CudaExecutionProvider) -> tuple[list[Any], Callable[[], None], Any]:
    """Kernels, a call of all of them, and the result; the layers share weights and have logits of their own."""
    random = np.random.default_rng(0)
    constants: dict[int, Any] = {}
    for index, rows, columns in ((2, 2 * INTER, HIDDEN), (5, HIDDEN, INTER)):
        packed = random.integers(0, 256, (EXPERTS, rows, columns // 2), np.uint8)
        scales = random.uniform(1e-3, 3e-3, (EXPERTS, rows, columns // BLOCK)).astype(np.float16)
        constants |= {index: gpu.to_device(packed), index + 1: gpu.to_device(scales)}
    node = qmoe_ep.QMoENode(k=TOP_K, activation_type="swiglu", swiglu_fusion=1, block_size=BLOCK)
    kernels = [gpu.create_kernel(node, number) for number in range(LAYERS)]
    x = gpu.to_device(random.standard_normal((1, HIDDEN)).astype(np.float16))
    logits = [gpu.to_device(random.standard_normal((1, EXPERTS)).astype(np.float16)) for _ in kernels]
    output = gpu.to_device(np.zeros((1, HIDDEN), np.float16))

    def step() -> None:
        for kernel, row in zip(kernels, logits, strict=True):
            operands = [constants.get(index) for index in range(7)]
            operands[:2] = x, row
            kernel.execute(operands, [output])

    return kernels, step, output


def measure(replay: Callable[[], None], output: Any, queued: int) -> float:
    """Microseconds per step over one chunk."""
    steps, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < CHUNK_SECONDS:
        for _ in range(queued):
            replay()
        output.numpy()
        steps += queued
    return 1e6 * (now - start) / steps


def main() -> None:
    """Measure in turns, print, and write the medians where asked."""
    times: dict[str, dict[str, list[float]]] = {name: {mode: [] for mode in QUEUED} for name in INTERVALS}
    records = dict.fromkeys(INTERVALS, 0)
    with qmoe_ep.CudaExecutionProvider() as gpu, tempfile.TemporaryDirectory() as folder:
        kernels, step, output = make_step(gpu)
        graphs = {}
        for armed in (False, True):
            if armed:
                for kernel in kernels:
                    kernel.telemetry.arm(qmoe_ep.RouteTelemetryConfig(EXPERTS, TOP_K, mode="counts"))
            step()
            with gpu.capture() as capture:
                step()
            graphs[armed] = capture.graph
        for turn in range(ROUNDS):
            for mode, queued in QUEUED.items():
                for name, interval in INTERVALS.items():
                    path = Path(folder) / f"{turn} {mode} {name}.jsonl"
                    exporter: Any = contextlib.nullcontext()
                    if interval is not None:
                        exporter = TelemetryExporter(gpu, interval=interval, path=path)
                    replay = graphs[name != "disarmed"].replay
                    with exporter:
                        times[name][mode].append(measure(replay, output, queued))
                    if interval is not None:
                        # The last round comes with the end.
                        records[name] += sum(1 for _ in read_records(path)) // LAYERS - 1
        for graph in graphs.values():
            graph.close()
    medians = {mode: {name: round(statistics.median(times[name][mode]), 2) for name in INTERVALS} for mode in QUEUED}
    result = {
        "layers": LAYERS,
        "microseconds_per_step": medians,
        "change_by_exporting": {
            mode: {name: round(of[name] / of["armed"] - 1, 5) for name, interval in INTERVALS.items() if interval}
            for mode, of in medians.items()
        },
        "rounds_while_measuring": {name: records[name] for name, interval in INTERVALS.items() if interval},
        "all": times,
    }
    print(json.dumps(result | {"all": None}, indent=1))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
