"""``qmoe-ep run``: results, what is printed, paging, and one line with exit code 2 for whatever is wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from problems import DTYPES, Array, Recipe, build
from shell import EXAMPLE, EXAMPLE_INPUTS, MODELS, Shell, addition, inputs_of, model_of
from simulated import kernels_portable
from simulated.plugin import Simulation

# Importing them is what registers the simulated kernels.
assert kernels_portable

STORED_MODELS = (
    "m1_int4_b32_zp_gptoss_f32.onnx",
    "m3_int8_rowwise_router_weights_f32.onnx",
    "m5_int4_sm80_prepacked_external_many_f16/m5_int4_sm80_prepacked_external_many_f16.onnx",
)


@pytest.mark.parametrize("name", STORED_MODELS)
def test_stored_models_match(shell: Shell, tmp_path: Path, name: str) -> None:
    model = MODELS / name
    shell("run", model, model.with_suffix(".inputs.npz"), "-o", tmp_path / "out.npz", "--provider", "cpu").succeeded()
    with np.load(tmp_path / "out.npz") as actual, np.load(model.with_suffix(".expected.npz")) as expected:
        for output in actual.files:
            got, want = actual[output].astype(np.float64), expected[output].astype(np.float64)
            assert got.shape == want.shape
            error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
            assert error.max() <= (2e-6 if actual[output].dtype == np.float32 else 1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["raw", "sm80"])
def test_run_matches_the_reference(shell: Shell, tmp_path: Path, dtype: str, layout: Any) -> None:
    kinds = (dtype, dtype, dtype)
    problem = build(Recipe(dtype=dtype, router_dtype=dtype, scale_dtypes=kinds, layout=layout, explicit_layout=False))
    model, inputs = model_of(problem, tmp_path / "m.onnx"), inputs_of(problem, tmp_path / "in.npz")
    arguments = ("run", model, inputs, "-o", tmp_path / "out.npz", "--provider", "cpu", "--weights-layout", layout)
    shell(*arguments).succeeded()
    with np.load(tmp_path / "out.npz") as data:
        output = data["output"]
    assert output.dtype == (np.uint16 if dtype == "bfloat16" else DTYPES[dtype])
    problem.check(output.view(DTYPES[dtype]))


def test_run_prints_shapes_provider_and_time(shell: Shell, no_gpu: None) -> None:
    result = shell("run", EXAMPLE, EXAMPLE_INPUTS).succeeded()
    for word in ("output", "[6, 64]", "float32", "provider: cpu (no CUDA: ", "time: "):
        assert word in result.out
    printed = shell.json("run", EXAMPLE, EXAMPLE_INPUTS, "--provider", "cpu")
    assert printed["provider"] == "cpu"
    assert printed["seconds"] > 0
    assert printed["inputs"] == {"x": {"shape": [6, 64], "dtype": "float32"}}
    assert printed["outputs"] == {"output": {"shape": [6, 64], "dtype": "float32"}}


def test_run_without_a_qmoe_node(shell: Shell, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.float32([1, 2]), y=np.float32([10, 20]))
    model = addition(tmp_path / "add.onnx")
    shell("run", model, tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--provider", "cpu").succeeded()
    with np.load(tmp_path / "out.npz") as data:
        np.testing.assert_array_equal(data["z"], np.float32([11, 22]))


def test_run_on_cuda_without_a_gpu(shell: Shell, no_gpu: None) -> None:
    shell("run", EXAMPLE, EXAMPLE_INPUTS, "--provider", "cuda").failed("cuInit", "driver")


def test_run_on_the_simulated_gpu(shell: Shell, simulated: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QMOE_EP_KERNELS", "portable")
    for provider in ("auto", "cuda"):
        assert shell.json("run", EXAMPLE, EXAMPLE_INPUTS, "--provider", provider)["provider"].startswith("cuda (")


@pytest.mark.gpu
def test_run_on_cuda(shell: Shell, tmp_path: Path) -> None:
    for provider in ("cpu", "cuda"):
        shell("run", EXAMPLE, EXAMPLE_INPUTS, "-o", tmp_path / f"{provider}.npz", "--provider", provider).succeeded()
    with np.load(tmp_path / "cpu.npz") as cpu, np.load(tmp_path / "cuda.npz") as cuda:
        error = np.linalg.norm(cpu["output"] - cuda["output"], axis=-1) / np.linalg.norm(cpu["output"], axis=-1)
    assert error.max() <= 4e-6


BAD_INPUTS: dict[str, tuple[dict[str, Array], list[str]]] = {
    "none": ({}, ["missing: 'x'"]),
    "wrong name": ({"X": np.zeros((6, 64), np.float32)}, ["missing: 'x'", "unknown: 'X'"]),
    "one too many": ({"x": np.zeros((6, 64), np.float32), "y": np.zeros(1)}, ["unknown: 'y'"]),
    "wrong shape": ({"x": np.zeros((6, 65), np.float32)}, ["'x'", "[rows, 64]", "[6, 65]"]),
    "wrong rank": ({"x": np.zeros(64, np.float32)}, ["'x'", "[rows, 64]", "[64]"]),
    "wrong dtype": ({"x": np.zeros((6, 64))}, ["'x'", "float32", "float64"]),
    "pickled": ({"x": np.array([None, 1])}, ["'x'", "pickled"]),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs(shell: Shell, tmp_path: Path, case: str) -> None:
    arrays, words = BAD_INPUTS[case]
    np.savez(tmp_path / "in.npz", **arrays)
    shell("run", EXAMPLE, tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--provider", "cpu").failed(*words)
    assert not (tmp_path / "out.npz").exists()


def test_declined_nodes_fail_to_run(shell: Shell, tmp_path: Path) -> None:
    problem = build(Recipe())
    problem.attributes["use_sparse_mixer"] = 1
    model, inputs = model_of(problem, tmp_path / "m.onnx"), inputs_of(problem, tmp_path / "in.npz")
    shell("run", model, inputs, "--provider", "cpu").failed("use_sparse_mixer")


def test_what_the_evaluator_refuses_is_bad_input(shell: Shell, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros(2, np.float32), y=np.zeros(3, np.float32))
    shell("run", addition(tmp_path / "add.onnx"), tmp_path / "in.npz", "--provider", "cpu").failed("add.onnx")


# --- external data -----------------------------------------------------------------------------------


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A copy of the model with external data."""
    source = MODELS / STORED_MODELS[2]
    shutil.copytree(source.parent, tmp_path / "model")
    return tmp_path / "model" / source.name


def relocate(location: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        proto = onnx.load(model, load_external_data=False)
        for entry in proto.graph.initializer[0].external_data:
            if entry.key == "location":
                entry.value = location
        model.write_bytes(proto.SerializeToString())

    return change


def link_out(model: Path) -> None:
    data = model.parent / "fc1_experts_weights"
    data.rename(model.parent.parent / "outside")
    data.symlink_to(model.parent.parent / "outside")


BAD_DATA: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "parent": (relocate("../outside"), ["'../outside'", "without '..'"]),
    "absolute": (relocate("/etc/hostname"), ["'/etc/hostname'", "relative path"]),
    "link": (link_out, ["link out of the model's folder"]),
    "missing": (lambda model: (model.parent / "fc1_experts_weights").unlink(), ["missing"]),
    "short": (
        lambda model: os.truncate(model.parent / "fc1_experts_weights", 32767),
        ["expected at least 32768 bytes", "32767"],
    ),
}


@pytest.mark.parametrize("options", [(), ("--offload",)])
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_external_data(shell: Shell, external: Path, tmp_path: Path, case: str, options: tuple[str, ...]) -> None:
    change, words = BAD_DATA[case]
    change(external)
    inputs = external.with_suffix(".inputs.npz")
    arguments = ("run", external, inputs, "-o", tmp_path / "out.npz", "--provider", "cpu", *options)
    shell(*arguments).failed("fc1_experts_weights", *words)
    assert not (tmp_path / "out.npz").exists()


# --- paging ------------------------------------------------------------------------------------------


def test_paging_gives_the_same_and_prints_figures(shell: Shell, external: Path, tmp_path: Path) -> None:
    arguments = ("run", external, external.with_suffix(".inputs.npz"), "-o")
    outputs = []
    for options in (("--provider", "cpu"), ("--offload",), ("--offload", "--host-cache-bytes", 10**6)):
        shell(*arguments, tmp_path / "out.npz", *options).succeeded()
        with np.load(tmp_path / "out.npz") as data:
            outputs.append(data["output"])
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])
    printed = shell.json(*arguments[:-1], "--offload", "--host-cache-bytes", 10**6)
    assert printed["provider"] == "cpu (pages experts)"
    paging = printed["paging"]
    assert paging["executions"] == 1
    assert paging["bytes_read"] > 0
    assert paging["cache"]["misses"] == paging["unique_experts"] <= 8
    assert paging["cache"]["budget"] == 10**6
    text = shell(*arguments[:-1], "--offload").succeeded().out
    for words in ("paging: ", " read, 1 layer executions, ", "host cache: 0 hits, ", "0 B held of 0 B"):
        assert words in text
    assert "paging" not in shell.json(*arguments[:-1], "--provider", "cpu")


def test_embedded_experts_are_not_paged(shell: Shell) -> None:
    result = shell("run", EXAMPLE, EXAMPLE_INPUTS, "--offload")
    assert result.code == 0
    assert "paging: no call paged experts" in result.out
    assert result.err.startswith("qmoe-ep: warning: ")
    assert result.err.count("\n") == 1


def test_warnings_of_a_command_that_fails_are_not_shown(shell: Shell, tmp_path: Path) -> None:
    # Two inputs have the size "rows", which the evaluator finds only after the kernel has warned.
    problem = build(Recipe())
    model = model_of(problem, tmp_path / "m.onnx")
    proto = onnx.load(model)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    onnx.save(proto, model)
    with np.load(inputs_of(problem, tmp_path / "good.npz")) as data:
        arrays = dict(data)
    np.savez(tmp_path / "in.npz", **{**arrays, "input": np.concatenate([arrays["input"]] * 2)})
    shell("run", model, tmp_path / "in.npz", "--offload").failed("router_probs", "rows")


def test_paging_options_that_dont_fit(shell: Shell) -> None:
    shell("run", EXAMPLE, EXAMPLE_INPUTS, "--provider", "cuda", "--offload").failed("--offload is for the CPU")
    arguments = ("run", EXAMPLE, EXAMPLE_INPUTS, "--provider", "cpu", "--host-cache-bytes")
    shell(*arguments, 5).failed("--host-cache-bytes has no effect without --offload")
    shell(*arguments, -5, "--offload").failed("--host-cache-bytes")
