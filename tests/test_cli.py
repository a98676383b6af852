"""The command line: what each command prints and writes, and one line with exit code 2 for whatever is wrong."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import click
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from problems import Problem, Recipe, build
from shell import EXAMPLE, EXAMPLE_INPUTS, Shell, addition, model_of, save, tensor_type
from simulated import kernels_portable
from simulated.plugin import Simulation

from qmoe_ep.cli.main import main
from qmoe_ep.errors import CaptureError, NvrtcError, QMoEError
from qmoe_ep.operator import INPUT_NAMES

# Importing them is what registers the simulated kernels.
assert kernels_portable

# --- usage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [(), ("run",), ("inspect",), ("quantize",), ("convert",), ("bench",), ("compile",), ("doctor",)]
)
def test_help(shell: Shell, command: tuple[str, ...]) -> None:
    assert shell(*command, "--help").succeeded().out.startswith("Usage: qmoe-ep")


def test_version(shell: Shell) -> None:
    assert shell("--version").succeeded().out.startswith("qmoe-ep, version ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["Missing command"]),
        (("fly",), ["fly"]),
        (("run",), ["MODEL.onnx", "qmoe-ep run --help"]),
        (("run", "nowhere.onnx", "x.npz"), ["nowhere.onnx"]),
        (("run", EXAMPLE, EXAMPLE_INPUTS, "--provider", "tpu"), ["tpu", "cuda"]),
        (("run", EXAMPLE, EXAMPLE_INPUTS, "-o", "/nowhere/out.npz"), ["/nowhere/out.npz", "folder"]),
        (("inspect", EXAMPLE, "--weights-layout", "odd"), ["odd", "sm80"]),
        (("quantize", EXAMPLE, EXAMPLE), ["another name"]),
        (("quantize", EXAMPLE, "/nowhere/out.onnx"), ["folder"]),
        (("quantize", EXAMPLE, "out.onnx", "--bits", "5"), ["5"]),
        (("compile", EXAMPLE), ["--arch"]),
        (("compile", EXAMPLE, "--arch", "sm_30"), ["sm_75"]),
        (("compile", EXAMPLE, "--arch", "avx"), ["avx"]),
    ],
)
def test_bad_usage(shell: Shell, arguments: tuple[object, ...], words: list[str]) -> None:
    shell(*arguments).failed(*words)


def test_debug_shows_the_traceback(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    shell("run", EXAMPLE, tmp_path / "bad.npz").failed("bad.npz")
    for arguments in (["--debug", "run"], ["run", "--debug"]):
        with pytest.raises(QMoEError, match=r"bad\.npz"):
            main([*arguments, str(EXAMPLE), str(tmp_path / "bad.npz")])


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (click.Abort(), 130, "interrupted"),
        (click.ClickException("so it is"), 2, "so it is"),
        (MemoryError("9 bytes"), 2, "not enough memory: 9 bytes"),
        (PermissionError(13, "Permission denied", "secret"), 2, "secret: Permission denied"),
        (CaptureError("two\nlines"), 2, "two lines"),
        (NvrtcError("it doesn't compile", "a long log", ("-x",)), 2, "it doesn't compile\n"),
        (ZeroDivisionError("division"), 1, "ZeroDivisionError: division (unexpected; --debug shows where)"),
    ],
)
def test_errors_are_one_line(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, words: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("qmoe_ep.cli.doctor.examine", fail)
    result = shell("doctor")
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
    assert words in result.err


@pytest.mark.parametrize("command", [("run", EXAMPLE_INPUTS), ("inspect",), ("compile", "--arch", "sm_90a")])
@pytest.mark.parametrize("damage", ["empty", "text", "truncated"])
def test_bad_models(shell: Shell, tmp_path: Path, command: tuple[object, ...], damage: str) -> None:
    good = EXAMPLE.read_bytes()
    path = tmp_path / "bad.onnx"
    path.write_bytes({"empty": b"", "text": b"not a model\n" * 9, "truncated": good[: len(good) // 2]}[damage])
    shell(command[0], path, *command[1:]).failed("bad.onnx")


# --- inspect -----------------------------------------------------------------------------------------


def test_inspect(shell: Shell) -> None:
    (node,) = shell.json("inspect", EXAMPLE)["nodes"]
    assert node["name"] == "experts"
    assert (node["experts"], node["hidden_size"], node["inter_size"], node["k"]) == (8, 64, 128, 2)
    assert (node["bits"], node["block_size"], node["layout"]) == ({"fc1": 4, "fc2": 4}, 32, "raw")
    # Codes, float32 scales, packed zero points.
    fc1, fc2 = 256 * (32 + 2 * 4 + 1), 64 * (64 + 4 * 4 + 2)
    assert node["bytes"] == 8 * (fc1 + fc2)
    assert node["providers"]["cpu"] == node["providers"]["cuda"] == {"claimed": True, "reason": None}
    table = shell("inspect", EXAMPLE).succeeded().out
    for word in ("experts", "swiglu/1", "8×64×128", "raw", "yes"):
        assert word in table


def test_inspect_says_why_not(shell: Shell, tmp_path: Path) -> None:
    problem = build(Recipe())
    problem.attributes["activation_type"] = "[red]"
    (node,) = shell.json("inspect", model_of(problem, tmp_path / "m.onnx"))["nodes"]
    assert not node["providers"]["cpu"]["claimed"]
    assert "activation_type" in node["providers"]["cuda"]["reason"]
    assert node["bytes"] is None
    assert "[red]" in shell("inspect", tmp_path / "m.onnx").succeeded().out


def test_inspect_checks_operands(shell: Shell, tmp_path: Path) -> None:
    problem = build(Recipe())
    problem.inputs[3] = np.zeros((4, 128, 3), np.float32)
    (node,) = shell.json("inspect", model_of(problem, tmp_path / "m.onnx"))["nodes"]
    assert "fc1_scales" in node["providers"]["cpu"]["reason"]


def weights_as_inputs(problem: Problem, path: Path, dims: str | None = None) -> Path:
    """A model whose weights are inputs; `dims` leaves the dimensions open."""
    given = [(name, a) for name, a in zip(INPUT_NAMES, problem.inputs, strict=False) if a is not None]
    values = [
        helper.make_tensor_value_info(n, tensor_type(a), a.shape if dims is None else [dims] * a.ndim) for n, a in given
    ]
    save([problem.node_proto()], values, [helper.make_tensor_value_info("output", 1, None)], [], path)
    return path


def test_inspect_weights_that_are_inputs(shell: Shell, tmp_path: Path) -> None:
    problem = build(Recipe(activation="swiglu", fusion=0, bits=(4, 8, 2)))
    (node,) = shell.json("inspect", weights_as_inputs(problem, tmp_path / "m.onnx"))["nodes"]
    assert node["bits"] == {"fc1": 4, "fc2": 8, "fc3": 2}
    assert "4/8/2" in shell("inspect", tmp_path / "m.onnx").succeeded().out
    (node,) = shell.json("inspect", weights_as_inputs(problem, tmp_path / "m.onnx", "n"))["nodes"]
    assert "known only at a call" in node["providers"]["cpu"]["reason"]


def test_inspect_without_a_qmoe_node(shell: Shell, tmp_path: Path) -> None:
    model = addition(tmp_path / "add.onnx")
    assert "has no QMoE node" in shell("inspect", model).succeeded().out
    assert shell.json("inspect", model)["nodes"] == []


# --- quantize ----------------------------------------------------------------------------------------


def float_model(path: Path) -> Path:
    """A float MoE node: 4 experts of 32 × 64."""
    random = np.random.default_rng(3)
    weights = {
        "fc1": random.standard_normal((4, 64, 32), np.float32) / 6,
        "fc2": random.standard_normal((4, 32, 64), np.float32) / 8,
    }
    node = helper.make_node(
        "MoE", ["x", "p", "fc1", "", "fc2"], ["y"], name="moe", domain="com.microsoft", k=2, activation_type="silu"
    )
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", s]) for n, s in (("x", 32), ("p", 4), ("y", 32))
    ]
    save([node], values[:2], values[2:], [numpy_helper.from_array(a, n) for n, a in weights.items()], path)
    return path


@pytest.mark.parametrize("options", [(), ("--bits", 8, "--block-size", 0), ("--bits", 2, "--asymmetric")])
def test_quantize(shell: Shell, tmp_path: Path, options: tuple[object, ...]) -> None:
    source, target = float_model(tmp_path / "float.onnx"), tmp_path / "out.onnx"
    assert "1 QMoE nodes" in shell("quantize", source, target, *options).succeeded().out
    (node,) = shell.json("inspect", target)["nodes"]
    assert node["providers"]["cpu"]["claimed"]
    assert node["bits"]["fc1"] == (options[1] if options else 4)
    assert node["zero_points"] == (["fc1", "fc2"] if "--asymmetric" in options else [])
    np.savez(tmp_path / "in.npz", x=np.ones((2, 32), np.float32), p=np.eye(2, 4, dtype=np.float32))
    shell("run", target, tmp_path / "in.npz", "--provider", "cpu").succeeded()


def test_quantize_refuses_a_block_size(shell: Shell, tmp_path: Path) -> None:
    source, target = float_model(tmp_path / "float.onnx"), tmp_path / "out.onnx"
    shell("quantize", source, target, "--block-size", 24).failed("block_size")
    assert not target.exists()


# --- compile, doctor ---------------------------------------------------------------------------------


def test_compile(shell: Shell, simulated: Simulation, tmp_path: Path) -> None:
    printed = shell.json("compile", EXAMPLE, "--arch", "sm_90a", "--arch", "sm_80")
    assert printed["compiled"] == printed["modules"] == len(simulated.nvrtc.compilations) > 0
    said = shell("compile", EXAMPLE, "--arch", "sm_90a").succeeded().out
    assert f"modules ready in {tmp_path}" in said.replace("\n", " ") or "not kept" in said


def test_compile_without_a_qmoe_node(shell: Shell, tmp_path: Path) -> None:
    said = shell("compile", addition(tmp_path / "add.onnx"), "--arch", "sm_90a").succeeded().out
    assert "has no QMoE node" in said


def test_compile_names_declined_nodes(shell: Shell, simulated: Simulation, tmp_path: Path) -> None:
    problem = build(Recipe())
    problem.attributes["use_sparse_mixer"] = 1
    result = shell("compile", model_of(problem, tmp_path / "m.onnx"), "--arch", "sm_90a")
    assert (result.code, result.err.count("\n")) == (0, 1)
    assert "use_sparse_mixer" in result.err


def test_compile_reports_real_kernels(shell: Shell, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    shutil.copy(EXAMPLE, tmp_path / "m.onnx")
    printed = shell.json("compile", tmp_path / "m.onnx", "--arch", "sm_90a")
    kernels = printed["kernels"]
    assert len(kernels) >= printed["modules"] > 0
    assert all(kernel["registers"] > 0 and kernel["arch"] == "sm_90a" for kernel in kernels)
    assert len(list((tmp_path / "modules").glob("*.module"))) == printed["modules"]
    table = shell("compile", tmp_path / "m.onnx", "--arch", "sm_90a", "--report").succeeded().out
    assert all(word in table for word in ("registers", "spills", "shared", kernels[0]["kernel"]))


def test_doctor_without_a_gpu(shell: Shell, no_gpu: None) -> None:
    findings = {finding["what"]: finding for finding in shell.json("doctor")}
    assert findings["Python"]["works"]
    assert not findings["NVIDIA driver"]["works"]
    assert findings["NVIDIA driver"]["remedy"]
    assert not findings["GPU"]["works"]
    assert findings["cache folder"]["works"]
    assert "The CPU can be used" in shell("doctor").succeeded().out


def test_doctor_with_a_gpu(shell: Shell, simulated: Simulation) -> None:
    findings = {finding["what"]: finding for finding in shell.json("doctor")}
    assert findings["NVIDIA driver"]["works"]
    assert findings["GPU 0"]["works"]
    assert "compute capability 9.0" in findings["GPU 0"]["details"]
    assert findings["NVRTC"]["details"] == "13.0"
    assert "CPU and CUDA can be used" in shell("doctor").succeeded().out


def test_doctor_finds_each_thing_missing(
    shell: Shell, simulated: Simulation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("qmoe_ep.includes.find_cuda_headers", lambda: None)
    monkeypatch.setattr(metadata, "version", missing)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("QMOE_EP_CACHE_DIR", str(tmp_path / "file" / "modules"))
    monkeypatch.delenv("QMOE_EP_CACHE_DISABLE", raising=False)
    simulated.fail("nvrtcVersion")
    simulated.fail("cuDeviceGetName")
    findings = {finding["what"]: finding for finding in shell.json("doctor")}
    for what in ("numpy", "compiled CPU kernels", "GPU 0", "CUDA headers", "cache folder"):
        assert not findings[what]["works"], what
    simulated.heal()
    monkeypatch.setenv("QMOE_EP_CACHE_DISABLE", "1")
    simulated.attributes["COMPUTE_CAPABILITY_MAJOR"] = 6
    findings = {finding["what"]: finding for finding in shell.json("doctor")}
    assert "7.5" in findings["GPU 0"]["remedy"]
    assert "switched off" in findings["cache folder"]["details"]
