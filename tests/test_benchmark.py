"""The layer benchmark, on the simulated driver: what it runs is right, and what it writes is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import Shell
from simulated import kernels_portable
from simulated.kernels import KernelLaunch, simulated_kernel
from simulated.plugin import Simulation

from qmoe_ep import CudaExecutionProvider, QMoEError
from qmoe_ep.benchmark import layer as benchmark
from qmoe_ep.benchmark import timing
from qmoe_ep.benchmark.layer import SHAPES, Case, Layer, Shape
from qmoe_ep.routing import select_experts

# Importing them is what registers the simulated kernels.
assert kernels_portable
SMALL = "64,32,8,2"


@simulated_kernel("read_stream", arguments=timing.ReadArguments)
def _read(launch: KernelLaunch) -> None:
    """Reads what it is given; nothing is written."""
    launch.memory.view(launch.arguments.source, 16 * launch.arguments.vectors, np.uint8)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(benchmark, "HOST_BURSTS", 1)
    monkeypatch.setattr(timing, "READ_BUFFER_BYTES", 1 << 20)


def bench(shell: Shell, *arguments: object) -> Any:
    return shell.json("bench", "--kernels", "portable", *arguments)


def test_record(shell: Shell, simulated: Simulation, tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    record = bench(shell, "--shape", SMALL, "--rows", "1,3", "--commit", "abc", "-o", output)
    assert json.loads(output.read_text()) == record
    assert record["commit"] == "abc"
    assert record["peak_device_bytes"] > 0
    assert set(record["host"]) == {"shape", "eager_us", "replay_us"}
    assert [(r["shape"], r["rows"], r["variant"]) for r in record["results"]] == [
        (SMALL, 1, "portable"),
        (SMALL, 3, "portable"),
    ]
    assert all(0 < r["error"] < 1e-3 for r in record["results"])


@pytest.mark.parametrize(
    ("option", "value"), [("--bits", 3), ("--block-size", 0), ("--dtype", "float32"), ("--routing", "zipf")]
)
def test_formats(shell: Shell, simulated: Simulation, option: str, value: object) -> None:
    (result,) = bench(shell, "--shape", SMALL, "--rows", 2, option, value)["results"]
    assert result["error"] < (1e-6 if value == "float32" else 1e-3)
    assert value in result.values()


def test_small_floats_and_telemetry(shell: Shell, simulated: Simulation) -> None:
    off, on = bench(shell, "--shape", SMALL, "--rows", 2, "--format", "fp4", "--telemetry")["results"]
    assert (off["quant_type"], off["telemetry"], on["telemetry"]) == ("fp4", False, True)
    assert max(off["error"], on["error"]) < 1e-3


def test_table(shell: Shell, simulated: Simulation) -> None:
    out = shell("bench", "--kernels", "portable", "--shape", SMALL, "--rows", 1).succeeded().out
    assert len(out.splitlines()) == 3
    assert SMALL in out


def test_routings(simulated: Simulation) -> None:
    with CudaExecutionProvider(kernels="portable") as gpu:
        shares = {}
        for routing in benchmark.ROUTINGS:
            layer = Layer(gpu, Case(Shape("wide", 64, 32, 16, 2), routing=routing))
            chosen = select_experts(layer.logits(400, 0), 2)
            shares[routing] = np.sort(np.bincount(chosen.reshape(-1), minlength=16) / 400)[::-1]
            layer.kernel.close()
    assert shares["one"].tolist() == [1, 1, *[0] * 14]
    assert shares["normal"][0] < 0.25 < shares["zipf"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "Qwen9"), ["Qwen9", "H,I,E,k"]),
        (("--shape", "64,0,8,2"), ["64,0,8,2"]),
        (("--rows", "one"), ["integers", "one"]),
        (("--rows", "0"), ["--rows"]),
        (("-o", "/nowhere/record.json"), ["/nowhere/record.json", "folder"]),
        (("--shape", SMALL, "--bits", "5"), ["5"]),
    ],
)
def test_bad_usage(shell: Shell, simulated: Simulation, arguments: tuple[object, ...], words: list[str]) -> None:
    shell("bench", *arguments).failed(*words)


def test_needs_a_gpu(shell: Shell, no_gpu: None) -> None:
    shell("bench", "--shape", SMALL).failed("driver")


def test_shapes() -> None:
    assert Shape.parse("Mixtral-8x7B") is SHAPES["Mixtral-8x7B"]
    assert Shape.parse(" 64, 32,8,2") == Shape(" 64, 32,8,2", 64, 32, 8, 2)
    with pytest.raises(QMoEError, match="H,I,E,k"):
        Shape.parse("1,2,3")
