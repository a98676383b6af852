"""Paging a model that is larger than its memory: ``python -m benchmarks.offload MODEL_FOLDER [OUT.json]``.

Makes a model of 4 GiB (many layers, int4 experts as external data) in the folder unless it is there, and runs it token
by token, each run in a process of its own:

- with Zipf-like and uniform routing and a host cache of 512 MiB: peak resident memory (without pages of the page
  cache), hits, time per token;
- without a cache, from a cold page cache, with and without read-ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import qmoe_ep
from benchmarks.cache_policies import belady, lru
from qmoe_ep import onnx as models
from qmoe_ep.cpu.mapped import MappedFile

HIDDEN, INTER, EXPERTS, TOP_K, BITS, BLOCK = 2048, 768, 128, 8, 4, 32
MODEL_BYTES, BUDGET = 4 << 30, 512 << 20
AGEING = 4096
PEAK_ALLOWED = BUDGET + (300 << 20)
_INPUTS = {2: "fc1_experts_weights", 3: "fc1_scales", 5: "fc2_experts_weights", 6: "fc2_scales"}
_PACKED = {2: (2 * INTER, HIDDEN * BITS // 8), 5: (HIDDEN, INTER * BITS // 8)}
_SCALES = {3: (2 * INTER, HIDDEN // BLOCK), 6: (HIDDEN, INTER // BLOCK)}


def make_model(folder: Path) -> Path:
    """Write model and external data, layer by layer, unless a complete one is there."""
    path, data = folder / "layers.onnx", folder / "layers.bin"
    layer_bytes = EXPERTS * sum(a * b * (1 if i in _PACKED else 4) for i, (a, b) in (_PACKED | _SCALES).items())
    layers = -(-MODEL_BYTES // layer_bytes)
    if path.exists() and data.exists() and data.stat().st_size == layers * layer_bytes:
        return path
    rng = np.random.default_rng(5)
    nodes, tensors = [], []
    with data.open("wb") as file:
        for layer in range(layers):
            names = ["x", "router", *[""] * 5]
            for index, name in _INPUTS.items():
                shape = (EXPERTS, *(_PACKED | _SCALES)[index])
                if index in _PACKED:
                    array = rng.integers(0, 256, shape, np.uint8)
                else:
                    array = rng.uniform(1e-3, 3e-3, shape).astype(np.float32)
                kind = TensorProto.UINT8 if index in _PACKED else TensorProto.FLOAT
                tensor = TensorProto(name=f"{layer}.{name}", data_type=kind, dims=shape)
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in (("location", data.name), ("offset", file.tell()), ("length", array.nbytes)):
                    tensor.external_data.add(key=key, value=str(value))
                tensors.append(tensor)
                names[index] = tensor.name
                file.write(array.tobytes())
            node = helper.make_node(
                "QMoE",
                names,
                [f"y{layer}"],
                name=f"layer{layer}",
                domain="com.microsoft",
                k=TOP_K,
                activation_type="swiglu",
                swiglu_fusion=1,
                normalize_routing_weights=1,
                expert_weight_bits=BITS,
                block_size=BLOCK,
            )
            nodes.append(node)
        file.flush()
        os.fsync(file.fileno())
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", d]) for n, d in (("x", HIDDEN), ("router", EXPERTS))
    ]
    results = [helper.make_tensor_value_info(f"y{layer}", TensorProto.FLOAT, ["n", HIDDEN]) for layer in range(layers)]
    graph = helper.make_graph(nodes, "layers", values, results, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def route(layers: int, tokens: int, exponent: float) -> np.ndarray[Any, Any]:
    """Logits [tokens, layers, 1, experts] whose selected experts follow a Zipf distribution per layer (0: uniform)."""
    rng = np.random.default_rng(9)
    logits = np.zeros((tokens, layers, 1, EXPERTS), np.float32)
    weights = 1 / np.arange(1, EXPERTS + 1) ** exponent
    for layer in range(layers):
        popularity = rng.permutation(weights / weights.sum())
        for token in range(tokens):
            logits[token, layer, 0, rng.choice(EXPERTS, TOP_K, replace=False, p=popularity)] = rng.uniform(4, 6, TOP_K)
    return logits


def memory(field: str) -> int:
    """A figure of this process in bytes, from the system."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"the system doesn't tell {field}")


def evict(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def run(path: Path, tokens: int, exponent: float, budget: int, ageing: int, cold: bool, ahead: bool) -> dict[str, Any]:
    """Run the model on tokens, one row each; the layers don't feed each other, which changes no access."""
    if cold:
        evict(path.with_suffix(".bin"))
    if not ahead:
        MappedFile.read_ahead = lambda self, offset, nbytes: None  # type: ignore[method-assign]
    reading = time_reads()
    model = models.load_model(path)
    provider = qmoe_ep.CpuExecutionProvider(True, budget, host_cache_ageing=ageing)
    entries = model.qmoe_nodes()
    kernels = [
        provider.create_kernel(e.node, e.node_id, {i: model.read(t) for i, t in e.constants.items()}) for e in entries
    ]
    if not all(kernel.paged for kernel in kernels):
        raise RuntimeError("a layer isn't paged")
    logits = route(len(kernels), tokens, exponent)
    x, output = (
        np.random.default_rng(1).standard_normal((1, HIDDEN)).astype(np.float32),
        np.empty((1, HIDDEN), np.float32),
    )
    anonymous, times = 0, []
    for token in range(tokens):
        started = time.perf_counter()
        for layer, kernel in enumerate(kernels):
            kernel.execute([x, logits[token, layer]], [output])
            anonymous = max(anonymous, memory("RssAnon"))
        times.append(time.perf_counter() - started)
    stats = qmoe_ep.offload_stats()
    return {
        "layers": len(kernels),
        "tokens": tokens,
        "zipf": exponent,
        "budget": budget,
        "ageing": ageing,
        "cold": cold,
        "read_ahead": ahead,
        "peak_resident_bytes": anonymous,
        "peak_resident_and_page_cache_bytes": memory("VmHWM"),
        "seconds_per_token": float(np.median(times)),
        "seconds_reading_per_token": reading[0] / tokens,
        "hit_rate": stats.cache.hit_rate,
        **other_policies(logits, budget),
        "evictions": stats.cache_evictions,
        "bytes_read": stats.bytes_read,
        "peak_bytes_owned": stats.cache_peak_bytes_owned,
        "peak_dequantized_experts": stats.peak_dequantized_experts,
    }


def other_policies(logits: np.ndarray[Any, Any], budget: int) -> dict[str, float]:
    """Hit rates on the same requests of a cache that takes everything, and of the best possible one."""
    capacity = budget // (4 * 3 * INTER * HIDDEN)
    if capacity == 0:
        return {"lru_hit_rate": 0.0, "best_possible_hit_rate": 0.0}
    requests = [
        (layer, int(expert))
        for token in logits
        for layer, row in enumerate(token)
        for expert in np.flatnonzero(row[0] > 0)
    ]
    hits = {"lru_hit_rate": lru(requests, capacity)[0], "best_possible_hit_rate": belady(requests, capacity)[0]}
    return {name: count / len(requests) for name, count in hits.items()}


def time_reads() -> list[float]:
    """Seconds that reads take from now on, in one number that grows; with read-ahead they find their bytes there."""
    total, read = [0.0], MappedFile.read

    def timed(self: MappedFile, tensor: str, offset: int, target: Any) -> None:
        started = time.perf_counter()
        read(self, tensor, offset, target)
        total[0] += time.perf_counter() - started

    MappedFile.read = timed  # type: ignore[method-assign]
    return total


def in_process(path: Path, *arguments: Any) -> dict[str, Any]:
    """:func:`run` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.offload", "--run", json.dumps([str(path), *arguments])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}, flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything, check peaks, and write a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run is not None:
        path, *rest = json.loads(options.run)
        print(json.dumps(run(Path(path), *rest)))
        return
    if options.folder is None:
        parser.error("name a folder for the model of 4 GiB")
    path = make_model(options.folder)
    results = [
        in_process(path, options.tokens, exponent, BUDGET, ageing, False, True)
        for exponent, ageing in ((1.1, AGEING), (0.0, AGEING), (1.1, 64))
    ]
    cold = [in_process(path, 3, 0.0, 0, 64, True, ahead) for _ in range(7) for ahead in (False, True)]
    for ahead in (False, True):
        for figure in ("seconds_per_token", "seconds_reading_per_token"):
            times = [result[figure] for result in cold if result["read_ahead"] == ahead]
            print(f"cold, read-ahead {ahead}: {figure} median {np.median(times):.3f}, best {min(times):.3f}")
    results += cold
    for result in results:
        if result["peak_resident_bytes"] > PEAK_ALLOWED:
            raise SystemExit(f"peak resident memory {result['peak_resident_bytes']} is above {PEAK_ALLOWED}")
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
