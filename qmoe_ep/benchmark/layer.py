"""One QMoE layer on a GPU, from router logits to output.

Each configuration captures one graph of several calls whose experts are disjoint (or, with many rows, whose
logits differ), so that the L2 never serves the weights, and reports the median replay per call beside the time
that one plain kernel needs to read the bytes of the distinct experts touched, measured in the same run. Weights
are random; the output is poisoned before the error against the float64 reference is taken.
"""

from __future__ import annotations

import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import qmoe_ep
from qmoe_ep import reference
from qmoe_ep.benchmark.timing import ReadLimit, median_microseconds
from qmoe_ep.call import CallDescription, describe_call, packed_bytes
from qmoe_ep.cuda.provider import CudaExecutionProvider
from qmoe_ep.cuda.tensor import DeviceTensor
from qmoe_ep.errors import QMoEError
from qmoe_ep.formats import FLOAT_DTYPES, FORMATS
from qmoe_ep.operator import GLOBAL_SCALES, MATRIX_INPUTS, QMoENode
from qmoe_ep.routing import select_experts
from qmoe_ep.telemetry import RouteTelemetryConfig

__all__ = ["DTYPES", "ROUTINGS", "SHAPES", "Case", "Layer", "Result", "Shape", "host_time", "machine", "measure"]

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Routing: TypeAlias = Literal["normal", "zipf", "one"]
ROUTINGS: tuple[Routing, ...] = ("normal", "zipf", "one")
"""Independent normal logits; experts whose shares fall as 1/rank; all rows to the same k experts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a layer, and its model's name."""

    name: str
    hidden_size: int
    inter_size: int
    num_experts: int
    top_k: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A name of :data:`SHAPES`, or ``"H,I,E,k"``."""
        if text in SHAPES:
            return SHAPES[text]
        sizes = text.split(",")
        if len(sizes) != 4 or not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
            raise QMoEError(f"shape {text!r}: expected H,I,E,k or one of {', '.join(SHAPES)}")
        return cls(text, *map(int, sizes))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("Qwen3-30B-A3B", 2048, 768, 128, 8),
        Shape("DeepSeek-V2-Lite", 2048, 1408, 64, 6),
        Shape("GPT-OSS-20B", 2880, 2880, 32, 4),
        Shape("Mixtral-8x7B", 4096, 14336, 8, 2),
        Shape("DeepSeek-V3", 7168, 2048, 256, 8),
    )
}
CHUNK_BYTES = 64 << 20
HOST_BURSTS = 60


@dataclass(frozen=True, slots=True)
class Case:
    """What one measurement is of, beside the number of rows; block size 0 is one scale per row.

    Bits are of integers, block sizes of formats that have none of their own. ``telemetry`` arms a record of counts.
    """

    shape: Shape
    dtype: str = "float16"
    bits: int = 4
    block_size: int = 32
    routing: Routing = "normal"
    quant_type: str = "int"
    telemetry: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table; times in µs, bytes of the distinct experts touched per second in GB/s."""

    shape: str
    rows: int
    dtype: str
    bits: int
    block_size: int
    routing: str
    quant_type: str
    telemetry: bool
    variant: str
    us: float
    limit_us: float
    ratio: float
    gbps: float
    tflops: float
    error: float
    scratch_mib: float

    HEAD = f"{'shape':17} {'rows':>6} dtype    b  blk {'us':>9} {'limit':>8}  ratio    GB/s TFLOP/s error   kernels"

    def __str__(self) -> str:
        spread = "" if self.routing == "normal" else f", routes: {self.routing}"
        spread += "" if self.quant_type == "int" else f", {self.quant_type}"
        spread += ", telemetry on" if self.telemetry else ""
        return (
            f"{self.shape:17} {self.rows:6} {self.dtype:8} {self.bits} {self.block_size:4} {self.us:9.2f} "
            f"{self.limit_us:8.2f} {self.ratio:6.2f} {self.gbps:7.0f} {self.tflops:7.1f} {self.error:.1e} "
            f"{self.variant}{spread}"
        )


class Layer:
    """A layer with random weights on the device: swiglu with separate gate and up, softmax over the chosen k."""

    def __init__(self, gpu: CudaExecutionProvider, case: Case, seed: int = 0) -> None:
        self.gpu, self.case = gpu, case
        shape = case.shape
        self.hidden, self.inter, self.experts, self.k = (
            shape.hidden_size,
            shape.inter_size,
            shape.num_experts,
            shape.top_k,
        )
        self.rng = np.random.default_rng(seed)
        form = FORMATS[case.quant_type]
        self.node = QMoENode(
            k=self.k,
            activation_type="swiglu",
            normalize_routing_weights=1,
            quant_type=form.name,
            expert_weight_bits=form.bits or case.bits,
            block_size=form.block_size or case.block_size or None,
            weights_prepacked=int(form.element == "e2m1"),
        )
        self.bits, self.block = self.node.bits("fc1"), self.node.blocks
        self.weights: dict[int, DeviceTensor] = {}
        for name, (weights, scales, _, _) in MATRIX_INPUTS.items():
            out, inner = (self.hidden, self.inter) if name == "fc2" else (self.inter, self.hidden)
            self.weights |= self._matrix(weights, scales, GLOBAL_SCALES[name], out, inner)
        self.kernel = gpu.create_kernel(self.node, 0, self.weights)
        if case.telemetry and self.kernel.telemetry is not None:
            self.kernel.telemetry.arm(RouteTelemetryConfig(self.experts, self.k, mode="counts"))

    def _matrix(self, weights: int, scales: int, global_scales: int, out: int, inner: int) -> dict[int, DeviceTensor]:
        """Random codes and scales that keep the layer's values near one, by operand index."""
        form, spread = self.node.form, 1 / np.sqrt(self.hidden)
        codes = self.rng.integers(0, 256, CHUNK_BYTES, np.uint8)
        if form.element == "e4m3":
            codes &= 0xBF  # below 2, and no NaN
        elif form.element == "integer":
            spread /= 2.0 ** (self.bits - 1)
        else:
            spread /= 4
        operands = {weights: self._fill((self.experts, out, packed_bytes(inner, self.bits)), codes)}
        wants_global = form.global_scale == "always" or (form.square_blocks and not self.block)
        if not form.square_blocks or self.block:
            factors = self.rng.uniform(0.5, 1.5, CHUNK_BYTES // 4) * (1 if wants_global else spread)
            dtype = DTYPES[self.case.dtype] if form.scale_dtypes == FLOAT_DTYPES else form.scale_dtypes[0]
            rows = -(-out // self.block) if form.square_blocks else out
            blocks = (-(-inner // self.block),) if self.block else ()
            operands[scales] = self._fill((self.experts, rows, *blocks), factors.astype(dtype))
        if wants_global:
            operands[global_scales] = self._fill((self.experts,), np.full(self.experts, spread, np.float32))
        return operands

    def _fill(self, shape: tuple[int, ...], chunk: NDArray[Any]) -> DeviceTensor:
        """A tensor of as many repetitions of a chunk as it takes."""
        tensor = self.gpu.empty(shape, chunk.dtype)
        chunk = chunk[: min(chunk.size, math.prod(shape))]
        first = self.gpu.to_device(chunk)
        for offset in range(0, tensor.nbytes, first.nbytes):
            size = min(first.nbytes, tensor.nbytes - offset)
            self.gpu.runtime.dtod(tensor.pointer + offset, first.pointer, size, doing="fill")
        return tensor

    def logits(self, rows: int, call: int) -> NDArray[Any]:
        """For one row: disjoint sets of experts from call to call. For more, as the case's routing says."""
        values = self.rng.standard_normal((rows, self.experts))
        if rows == 1 or self.case.routing == "one":
            first = call * self.k % (self.experts // self.k * self.k)
            values[:, first : first + self.k] += 20
        elif self.case.routing == "zipf":
            # Adding Gumbel noise to the logarithms of shares draws without replacement in those shares.
            values = self.rng.gumbel(size=values.shape) - np.log(1 + self.rng.permutation(self.experts))
        return values.astype(DTYPES[self.case.dtype])

    def run(self, rows: int, limit: ReadLimit) -> Result:
        """Measure one number of rows."""
        gpu = self.gpu
        calls = max(2, min(self.experts // self.k, 16)) if rows == 1 else 4 if rows <= 512 else 2
        x = self.rng.standard_normal((rows, self.hidden)).astype(DTYPES[self.case.dtype])
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
            self.case.shape.name,
            rows,
            self.case.dtype,
            self.bits,
            self.block,
            self.case.routing,
            self.case.quant_type,
            self.case.telemetry,
            plan.variant,
            round(us, 2),
            round(limit_us, 2),
            round(us / limit_us, 2),
            round(nbytes / us / 1e3, 1),
            round(flops / us / 1e6, 1),
            self.error(inputs[0], x, hosts[0], call),
            round(sum(size for _, size in plan.scratch) / 2**20, 2),
        )

    def error(self, inputs: list[DeviceTensor], x: NDArray[Any], logits: NDArray[Any], call: CallDescription) -> float:
        """Largest relative L2 error of the first rows of a call, against the norm of the true row."""
        output = self.gpu.to_device(np.full(x.shape, np.nan, x.dtype))
        self.kernel.execute(inputs, [output])
        x, logits = x[:2], logits[:2]
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
        got = output.numpy()[:2].astype(np.float64)
        return float(f"{(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max():.2e}")

    def host_microseconds(self) -> tuple[float, float]:
        """Host time of a warmed eager call and of a replay of it, µs, without waiting for the device."""
        x = self.gpu.to_device(self.rng.standard_normal((1, self.hidden)).astype(DTYPES[self.case.dtype]))
        operands, output = [x, self.gpu.to_device(self.logits(1, 0))], self.gpu.empty((1, self.hidden), x.dtype)
        self.kernel.execute(operands, [output])
        with self.gpu.capture() as capture:
            self.kernel.execute(operands, [output])
        with capture.graph as graph:
            return (
                host_time(self.gpu, lambda: self.kernel.execute(operands, [output])),
                host_time(self.gpu, graph.replay),
            )


def host_time(gpu: CudaExecutionProvider, run: Callable[[], object]) -> float:
    """Median over short bursts, so that the launch queue never fills."""
    times = []
    for _ in range(HOST_BURSTS):
        gpu.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            run()
        times.append((time.perf_counter() - start) / 20 * 1e6)
    return round(float(np.median(times)), 2)


def machine(gpu: CudaExecutionProvider) -> dict[str, Any]:
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


def measure(
    gpu: CudaExecutionProvider, cases: Iterable[Case], rows: Iterable[int], show: Callable[[str], object]
) -> dict[str, Any]:
    """Measure every case at every number of rows.

    Parameters
    ----------
    show : called with each line of the table as it is known

    Returns
    -------
    the record: device, driver, versions, commit, the host's times of the first case, peak device memory in bytes,
    and the results
    """
    results: list[Result] = []
    host: dict[str, Any] = {}
    limit = ReadLimit(gpu.runtime)
    for case in cases:
        layer = Layer(gpu, case)
        for count in rows:
            if not results:
                show(Result.HEAD)
            results.append(layer.run(count, limit))
            show(str(results[-1]))
        if not host:
            eager, replay = layer.host_microseconds()
            host = {"shape": case.shape.name, "eager_us": eager, "replay_us": replay}
            show(f"host: eager call {eager} us, replay {replay} us")
        layer.kernel.close()
    limit.close()
    record = machine(gpu) | {"host": host, "results": [asdict(result) for result in results]}
    record["peak_device_bytes"] = gpu.memory_statistics().used_peak
    return record
