"""Commands of the command line run in this process, and files for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from problems import DTYPES, Array, Problem

from qmoe_ep.cli.main import main
from qmoe_ep.operator import INPUT_NAMES

__all__ = [
    "EXAMPLE",
    "EXAMPLE_INPUTS",
    "MODELS",
    "NoDriver",
    "Result",
    "Shell",
    "addition",
    "inputs_of",
    "model_of",
    "save",
    "tensor_type",
]

ROOT = Path(__file__).resolve().parents[1]
MODELS = Path(__file__).parent / "data" / "models"
EXAMPLE, EXAMPLE_INPUTS = ROOT / "examples" / "moe_int4.onnx", ROOT / "examples" / "moe_int4.inputs.npz"


class Result:
    """What a command did."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        capsys.readouterr()
        self.code = main([str(a) for a in arguments])
        self.out, self.err = capsys.readouterr()

    def succeeded(self) -> Result:
        assert (self.code, self.err) == (0, ""), self.err
        return self

    def failed(self, *words: str) -> None:
        """Assert exit code 2 and one line that has all the words."""
        assert (self.code, self.out) == (2, "")
        assert self.err.endswith("\n")
        assert self.err.startswith("qmoe-ep: ")
        assert self.err.count("\n") == 1
        for word in words:
            assert word in self.err


class Shell:
    """Runs commands."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Result:
        return Result(self._capsys, *arguments)

    def json(self, *arguments: object) -> Any:
        return json.loads(self(*arguments, "--json").succeeded().out)


class NoDriver:
    """A machine without an NVIDIA driver: the bindings raise."""

    def cuInit(self, flags: int) -> None:
        raise RuntimeError("libcuda.so.1 is not there")


def model_of(problem: Problem, path: Path) -> Path:
    """A model of one node whose weights are initializers."""
    given = {name: a for name, a in zip(INPUT_NAMES, problem.inputs, strict=False) if a is not None}
    inputs = {name: a for name, a in given.items() if name in ("input", "router_probs", "router_weights")}
    weights = [numpy_helper.from_array(a, name) for name, a in given.items() if name not in inputs]
    values = [helper.make_tensor_value_info(name, tensor_type(a), a.shape) for name, a in inputs.items()]
    output = helper.make_tensor_value_info("output", tensor_type(inputs["input"]), inputs["input"].shape)
    save([problem.node_proto()], values, [output], weights, path)
    return path


def save(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any], path: Path) -> None:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def tensor_type(array: Array) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def inputs_of(problem: Problem, path: Path) -> Path:
    """The operands of a call as an archive."""
    arrays = {INPUT_NAMES[i]: problem.inputs[i] for i in (0, 1) if problem.inputs[i] is not None}
    np.savez(path, **{n: a.view(np.uint16) if a.dtype == DTYPES["bfloat16"] else a for n, a in arrays.items()})
    return path


def addition(path: Path) -> Path:
    """A model without a QMoE node: ``z = x + y``."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xyz"]
    save([helper.make_node("Add", ["x", "y"], ["z"])], values[:2], values[2:], [], path)
    return path
