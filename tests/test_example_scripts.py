"""The scripts under examples/ do what they say, on the CPU and where they can on the simulated driver."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from simulated import kernels_portable
from simulated.plugin import Simulation

from qmoe_ep.telemetry_export import read_records

# Importing them is what registers the simulated kernels.
assert kernels_portable

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def check_executor(out: str) -> None:
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == ["executor 1"] * 3 + [
        "executor 2"
    ] * 3
    assert len([line for line in lines if "6 rows took the experts" in line]) == 6


def test_executor_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "executor.py")
    check_executor(capsys.readouterr().out)


def test_executor_with_graphs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], simulated: Simulation
) -> None:
    monkeypatch.setenv("QMOE_EP_KERNELS", "portable")
    run(monkeypatch, "executor.py", "--provider", "cuda")
    check_executor(capsys.readouterr().out)


@pytest.mark.gpu
def test_executor_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "executor.py", "--provider", "cuda")
    check_executor(capsys.readouterr().out)


def test_the_executor_stays_short() -> None:
    assert len((EXAMPLES / "executor.py").read_text().splitlines()) <= 150


@pytest.mark.parametrize("provider", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], provider: str) -> None:
    run(monkeypatch, "onnx_model.py", "--provider", provider)
    assert "the same from both files" in capsys.readouterr().out


@pytest.mark.parametrize("provider", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_process_watches(tmp_path: Path, provider: str) -> None:
    records = tmp_path / "routes.jsonl"
    arguments = ["--provider", provider, "--steps", 40, "--layers", 2, "--file", records, "--port", 0]
    command = [sys.executable, EXAMPLES / "watch_routes.py", *map(str, arguments)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
    assert f"provider {provider}" in out
    assert "counts of 2 layers equal those made from the logits" in out
    assert [record.snapshot.rows for record in read_records(records)][-2:] == [40, 40]
