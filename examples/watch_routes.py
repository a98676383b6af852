"""A decode of several layers that another process watches while it runs.

    python examples/watch_routes.py [--provider auto|cuda|cpu] [--steps N] [--layers N] [--file FILE]

On a GPU the step is captured once and replayed. An exporter writes what the layers route to into a file and offers it
to Prometheus; a second process, which knows the file's name only, follows it. At the end the counts that the second
process saw are compared with an independent count made from the logits of every step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import qmoe_ep
from qmoe_ep.telemetry_export import RecordFollower, TelemetryExporter

EXPERTS, HIDDEN, INTER, TOP_K = 64, 256, 128, 4


def watch(path: str, layers: int, last_rows: int, results: Any) -> None:
    """The other process: follow the file until every layer has counted all rows; hand over what was seen last."""
    seen: dict[int, list[int]] = {}
    rows: dict[int, int] = {}
    deadline = time.monotonic() + 120
    with RecordFollower(path) as follower:
        while time.monotonic() < deadline and (len(rows) < layers or min(rows.values()) < last_rows):
            for record in follower.poll():
                snapshot = record.snapshot
                seen[snapshot.node], rows[snapshot.node] = snapshot.counts.tolist(), snapshot.rows
                if snapshot.node == 0:
                    busiest = int(np.argmax(snapshot.counts))
                    print(f"  watched: {record.name} at row {snapshot.rows}, busiest expert {busiest}", flush=True)
            time.sleep(0.02)
    results.put(seen)


def make_layer(random: np.random.Generator) -> tuple[qmoe_ep.QMoENode, dict[int, np.ndarray]]:
    """int4 experts in blocks of 32, SwiGLU with gate and up interleaved."""
    fc1 = random.standard_normal((EXPERTS, 2 * INTER, HIDDEN), np.float32) / np.float32(np.sqrt(HIDDEN))
    fc2 = random.standard_normal((EXPERTS, HIDDEN, INTER), np.float32) / np.float32(4)
    q1, q2 = (qmoe_ep.quantize_experts(w, bits=4, block_size=32, symmetric=True) for w in (fc1, fc2))
    node = qmoe_ep.QMoENode(k=TOP_K, activation_type="swiglu", swiglu_fusion=1, block_size=32)
    return node, {2: q1.packed, 3: q1.scales, 5: q2.packed, 6: q2.scales}


def decode(provider: Any, layers: int, steps: int, path: Path, port: int | None) -> list[list[int]]:
    """Run `steps` rows through all layers; returns the independent count, [layers][experts]."""
    random = np.random.default_rng(0)
    place = getattr(provider, "to_device", np.array)
    with provider.executor_scope(executor=1, generation=1):
        kernels = []
        for node_id in range(layers):
            node, constants = make_layer(random)
            kernels.append(provider.create_kernel(node, node_id, constants))
    x = place(random.standard_normal((1, HIDDEN), np.float32))
    logits = [place(np.zeros((1, EXPERTS), np.float32)) for _ in kernels]
    output = place(np.zeros((1, HIDDEN), np.float32))

    def step() -> None:
        for kernel, row in zip(kernels, logits, strict=True):
            kernel.execute([x, row], [output])

    graph = None
    for kernel in kernels:
        kernel.telemetry.arm(qmoe_ep.RouteTelemetryConfig(EXPERTS, TOP_K, mode="counts"), paused=True)
    step()  # warm; armed and paused, so that it isn't counted
    if provider.name == "cuda":
        with provider.capture() as capture:
            step()
        graph = capture.graph
    for kernel in kernels:
        kernel.telemetry.resume()  # the graph records from now on, with no new capture

    # Experts differ in how often they are chosen, and each layer has its own favourites.
    favour = [random.permutation(-np.log(1 + np.arange(EXPERTS))) for _ in kernels]
    counted = np.zeros((layers, EXPERTS), np.int64)
    names = {node_id: f"layers.{node_id}" for node_id in range(layers)}
    with TelemetryExporter(provider, interval=0.1, path=path, port=port, names=names) as exporter:
        if exporter.port is not None:
            print(f"metrics at http://127.0.0.1:{exporter.port}/metrics")
        start = time.perf_counter()
        for _ in range(steps):
            for layer, row in enumerate(logits):
                values = (random.gumbel(size=(1, EXPERTS)) + favour[layer]).astype(np.float32)
                row.copy_from(values) if graph else np.copyto(row, values)
                # The definition of a route, not the package's own selection.
                counted[layer, np.argsort(-values[0], kind="stable")[:TOP_K]] += 1
            graph.replay() if graph else step()
        if graph:
            provider.synchronize()
        print(f"{steps} steps of {layers} layers, {1e6 * (time.perf_counter() - start) / steps:.0f} µs each")
    if graph:
        graph.close()
    provider.retire_executor(1, 1, lambda _: provider.telemetry.remove(1))
    return counted.tolist()


def open_provider(choice: str) -> Any:
    """CUDA where it can be used, unless something else is asked for."""
    if choice == "cpu":
        return qmoe_ep.CpuExecutionProvider()
    try:
        return qmoe_ep.CudaExecutionProvider()
    except (qmoe_ep.CudaError, qmoe_ep.NvrtcError):
        if choice == "cuda":
            raise
        return qmoe_ep.CpuExecutionProvider()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--file", type=Path, help="where records go, to be read with qmoe-ep telemetry")
    parser.add_argument("--port", type=int, help="offer Prometheus metrics there")
    options = parser.parse_args()
    with open_provider(options.provider) as provider, tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "routes.jsonl"
        # A process of its own that never touches the GPU; "spawn", since a driver doesn't survive a fork.
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        watcher = context.Process(target=watch, args=(str(path), options.layers, options.steps, results))
        watcher.start()
        print(f"provider {provider.name}")
        try:
            counted = decode(provider, options.layers, options.steps, path, options.port)
            seen = results.get(timeout=150)
        except queue.Empty:
            raise SystemExit("the watching process saw nothing") from None
        finally:
            watcher.join(1)
            watcher.terminate()
        if [seen.get(layer) for layer in range(options.layers)] != counted:
            raise SystemExit("counts differ from those made from the logits")
        print(f"counts of {options.layers} layers equal those made from the logits")


if __name__ == "__main__":
    main()
