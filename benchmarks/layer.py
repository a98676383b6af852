"""One QMoE layer on a GPU, from router logits to output: ``python -m benchmarks.layer``.

Each configuration captures one graph of several calls whose experts are disjoint (or, with many rows, whose
logits differ), so that the L2 never serves the weights, and reports the median replay per call beside the time
that one plain kernel needs to read the bytes of the distinct experts touched, measured in the same run. Weights
are random; the output is poisoned before the error against the float64 reference is taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import qmoe_ep
from benchmarks.timing import ReadLimit, median_microseconds
from qmoe_ep import reference
from qmoe_ep.call import CallDescription, describe_call
from qmoe_ep.cuda.tensor import DeviceTensor
from qmoe_ep.formats import FLOAT_DTYPES, FORMATS
from qmoe_ep.operator import GLOBAL_SCALES, MATRIX_INPUTS
from qmoe_ep.routing import select_experts

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-V2-Lite": (2048, 1408, 64, 6),
    "GPT-OSS-20B": (2880, 2880, 32, 4),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}
_CHUNK = 64 << 20


@dataclass(frozen=True)
class Result:
    """One row of the table; times in µs."""

    shape: str
    rows: int
    dtype: str
    format: str
    bits: int
    block_size: int
    variant: str
    us: float
    limit_us: float
    ratio: float
    gbps: float
    tflops: float
    error: float
    scratch_mib: float


class Layer:
    """A layer with random weights on the device: swiglu with separate gate and up, softmax over the chosen k.

    ``bits`` are those of integers, ``block`` that of formats which have none of their own.
    """

    def __init__(
        self,
        gpu: qmoe_ep.CudaExecutionProvider,
        shape: str,
        dtype: str,
        form: str = "int",
        bits: int = 4,
        block: int = 32,
        seed: int = 0,
    ) -> None:
        self.gpu, self.shape, self.dtype = gpu, shape, dtype
        self.hidden, self.inter, self.experts, self.k = SHAPES[shape]
        self.rng = np.random.default_rng(seed)
        self.node = qmoe_ep.QMoENode(
            k=self.k,
            activation_type="swiglu",
            normalize_routing_weights=1,
            quant_type=form,
            expert_weight_bits=bits if form == "int" else FORMATS[form].bits,
            block_size=FORMATS[form].block_size or block or None,
            weights_prepacked=1 if FORMATS[form].element == "e2m1" else 0,
        )
        self.bits, self.block = self.node.bits("fc1"), self.node.blocks
        self.weights: dict[int, DeviceTensor] = {}
        for name, (weights, scales, _, _) in MATRIX_INPUTS.items():
            out, inner = (self.hidden, self.inter) if name == "fc2" else (self.inter, self.hidden)
            self.weights |= self._matrix(weights, scales, GLOBAL_SCALES[name], out, inner)
        self.kernel = gpu.create_kernel(self.node, 0, self.weights)

    def _matrix(self, weights: int, scales: int, global_scales: int, out: int, inner: int) -> dict[int, DeviceTensor]:
        """Random codes and scales that keep the layer's values near one, by operand index."""
        form, spread = self.node.form, 1 / np.sqrt(self.hidden)
        rows = -(-out // self.block) if form.square_blocks else out
        codes = self.rng.integers(0, 256, _CHUNK, np.uint8)
        if form.element == "e4m3":
            codes &= 0xBF  # below 2, and no NaN
        elif form.element == "integer":
            spread /= 2.0 ** (self.bits - 1)
        else:
            spread /= 4
        factors = self.rng.uniform(0.5, 1.5, _CHUNK // 4) * (1 if form.global_scale == "always" else spread)
        dtype = DTYPES[self.dtype] if form.scale_dtypes == FLOAT_DTYPES else form.scale_dtypes[0]
        shape = (self.experts, rows, -(-inner // self.block)) if self.block else (self.experts, rows)
        operands = {
            weights: self._fill((self.experts, out, inner * self.bits // 8), codes),
            scales: self._fill(shape, factors.astype(dtype)),
        }
        if form.global_scale == "always":
            operands[global_scales] = self._fill((self.experts,), np.full(self.experts, spread, np.float32))
        return operands

    def _fill(self, shape: tuple[int, ...], chunk: np.ndarray[Any, Any]) -> DeviceTensor:
        """A tensor of as many repetitions of a chunk as it takes."""
        tensor = self.gpu.empty(shape, chunk.dtype)
        chunk = chunk[: min(chunk.size, math.prod(shape))]
        first = self.gpu.to_device(chunk)
        for offset in range(0, tensor.nbytes, first.nbytes):
            size = min(first.nbytes, tensor.nbytes - offset)
            self.gpu.runtime.dtod(tensor.pointer + offset, first.pointer, size, doing="fill")
        return tensor

    def logits(self, rows: int, call: int) -> np.ndarray[Any, Any]:
        """For one row: disjoint sets of experts from call to call. For more: independent normal logits."""
        values = self.rng.standard_normal((rows, self.experts))
        if rows == 1:
            first = call * self.k % (self.experts // self.k * self.k)
            values[0, first : first + self.k] += 20
        return values.astype(DTYPES[self.dtype])

    def run(self, rows: int, limit: ReadLimit) -> Result:
        """Measure one number of rows."""
        gpu = self.gpu
        calls = max(2, min(self.experts // self.k, 16)) if rows == 1 else 4 if rows <= 512 else 2
        x = self.rng.standard_normal((rows, self.hidden)).astype(DTYPES[self.dtype])
        hosts = [self.logits(rows, call) for call in range(calls)]
        inputs = [[gpu.to_device(x), gpu.to_device(logits)] for logits in hosts]
        output = gpu.to_device(np.full(x.shape, np.nan, x.dtype))
        for operands in inputs:
            self.kernel.execute(operands, [output])
        with gpu.capture() as capture:
            for operands in inputs:
                self.kernel.execute(operands, [output])
        with capture.graph as graph:
            us = median_microseconds(gpu.runtime, graph.replay) / calls
        plan = self.kernel.plan(inputs[0], [output])
        touched = np.mean([np.unique(select_experts(logits, self.k)).size for logits in hosts])
        call = describe_call(self.node, [inputs[0][0], inputs[0][1], *(self.weights.get(i) for i in range(2, 17))])
        nbytes = int(touched * sum(m.expert_bytes for m in call.experts.matrices))
        limit_us = limit.microseconds(nbytes)
        flops = 2 * rows * self.k * 3 * self.hidden * self.inter
        return Result(
            self.shape,
            rows,
            self.dtype,
            self.node.quant_type,
            self.bits,
            self.block,
            plan.variant,
            round(us, 2),
            round(limit_us, 2),
            round(us / limit_us, 2),
            round(nbytes / us / 1e3, 1),
            round(flops / us / 1e6, 1),
            self.error(x, hosts[0], call),
            round(sum(size for _, size in plan.scratch) / 2**20, 2),
        )

    def error(self, x: np.ndarray[Any, Any], logits: np.ndarray[Any, Any], call: CallDescription) -> float:
        """Largest relative L2 error of the first rows, against the norm of the true row."""
        x, logits = x[:2], logits[:2]
        output = self.gpu.to_device(np.full(x.shape, np.nan, x.dtype))
        self.kernel.execute([self.gpu.to_device(x), self.gpu.to_device(logits)], [output])
        chosen = np.unique(select_experts(logits, self.k))
        operands: list[Any] = [x, logits[:, chosen], *[None] * 15]
        for index, tensor in self.weights.items():
            stride = tensor.nbytes // self.experts
            part = [
                self.gpu.view(tensor.pointer + int(e) * stride, tensor.shape[1:], tensor.dtype, tensor).numpy()
                for e in chosen
            ]
            operands[index] = np.stack(part)
        want = reference.qmoe(self.node, operands)
        got = output.numpy().astype(np.float64)
        return float(f"{(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max():.2e}")

    def host_microseconds(self) -> tuple[float, float]:
        """Host time of a warmed eager call and of a replay of it, µs, without waiting for the device."""
        x = self.gpu.to_device(self.rng.standard_normal((1, self.hidden)).astype(DTYPES[self.dtype]))
        operands, output = [x, self.gpu.to_device(self.logits(1, 0))], self.gpu.empty((1, self.hidden), x.dtype)
        self.kernel.execute(operands, [output])
        with self.gpu.capture() as capture:
            self.kernel.execute(operands, [output])
        with capture.graph as graph:
            return (
                host_time(self.gpu, lambda: self.kernel.execute(operands, [output])),
                host_time(self.gpu, graph.replay),
            )


def host_time(gpu: qmoe_ep.CudaExecutionProvider, run: Any) -> float:
    """Median over short bursts, so that the launch queue never fills."""
    times = []
    for _ in range(60):
        gpu.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            run()
        times.append((time.perf_counter() - start) / 20 * 1e6)
    return round(float(np.median(times)), 2)


def machine(gpu: qmoe_ep.CudaExecutionProvider) -> dict[str, Any]:
    """Where and by what the figures were made."""
    from qmoe_ep.driver import check, driver, nvrtc

    version = check(driver().cuDriverGetVersion(), "cuDriverGetVersion", "read the driver's version")
    compiler = check(nvrtc().nvrtcVersion(), "nvrtcVersion", "read the compiler's version")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": gpu.runtime.capabilities().name,
        "driver": str(version),
        "nvrtc": str(compiler),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "qmoe_ep": qmoe_ep.__version__,
        "commit": commit or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _line(r: Result) -> str:
    return (
        f"{r.shape:17} {r.rows:5} {r.dtype:8} {r.format:5} {r.bits} {r.block_size:4} {r.us:9.2f} {r.limit_us:8.2f} "
        f"{r.ratio:6.2f} {r.gbps:7.0f} {r.tflops:7.1f} {r.error:.1e} {r.variant}"
    )


def _layers(options: argparse.Namespace) -> Iterator[tuple[str, str, str, int, int]]:
    """Every combination that differs in its layer."""
    for shape, dtype, form in itertools.product(options.shapes, options.dtypes, options.formats):
        for bits in options.bits if form == "int" else [FORMATS[form].bits]:
            for block in [FORMATS[form].block_size] if FORMATS[form].block_size else options.blocks:
                yield shape, dtype, form, bits, block


def main() -> None:
    """Parse the command line, measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16, 64, 512, 4096])
    parser.add_argument("--dtypes", nargs="*", default=["float16"], choices=DTYPES)
    parser.add_argument("--formats", nargs="*", default=["int"], choices=FORMATS, help="--bits is for int alone")
    parser.add_argument("--bits", nargs="*", type=int, default=[4], choices=[1, 2, 3, 4, 8])
    parser.add_argument("--blocks", nargs="*", type=int, default=[32], help="0 is row-wise")
    parser.add_argument("--kernels", choices=["auto", "portable"], default="auto")
    parser.add_argument("--commit", help="recorded when the tree is no git checkout")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    results: list[Result] = []
    host: dict[str, Any] = {}
    with qmoe_ep.CudaExecutionProvider(kernels=options.kernels) as gpu:
        limit = ReadLimit(gpu.runtime)
        print(f"{'shape':17} {'rows':>5} dtype    form  b  blk {'us':>9} {'limit':>8}  ratio    GB/s TFLOP/s error")
        for shape, dtype, form, bits, block in _layers(options):
            layer = Layer(gpu, shape, dtype, form, bits, block)
            for rows in options.rows:
                r = layer.run(rows, limit)
                results.append(r)
                print(_line(r), flush=True)
            if not host:
                eager, replay = layer.host_microseconds()
                host = {"shape": shape, "eager_us": eager, "replay_us": replay}
                print(f"host: eager call {eager} us, replay {replay} us")
            layer.kernel.close()
            del layer
        record = machine(gpu) | {"host": host, "results": [asdict(r) for r in results]}
        record["peak_device_bytes"] = gpu.memory_statistics().used_peak
        if options.commit:
            record["commit"] = options.commit
        limit.close()
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
