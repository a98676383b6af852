"""Number formats in model files: weights in external data, held whole and paged, and what commands make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from paged import packed_bytes
from problems import Problem
from shell import model_of
from special_problems import FORMS, special

from qmoe_ep import CpuExecutionProvider, QMoEError
from qmoe_ep.cli.nodes import model_nodes
from qmoe_ep.onnx import load_model, run_model
from qmoe_ep.routing import select_experts


def stored(problem: Problem, folder: Path) -> Path:
    """The problem as a model with external weights."""
    model = onnx.load(model_of(problem, folder / "model.onnx"))
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    return folder / "model.onnx"


@pytest.mark.parametrize("function", ["swiglu with fc3", "geglu"])
@pytest.mark.parametrize("form", FORMS)
def test_external_weights(tmp_path: Path, form: str, function: str) -> None:
    problem = special(form, function, 4)
    path, inputs = stored(problem, tmp_path), {"input": problem.inputs[0], "router_probs": problem.inputs[1]}
    whole = run_model(path, inputs, CpuExecutionProvider())["output"]
    problem.check_closely(whole)
    provider = CpuExecutionProvider(weight_offload=True)
    paged = run_model(path, inputs, provider)["output"]
    problem.check_closely(paged)
    stats = provider.offload_stats()
    assert stats is not None
    logits = problem.inputs[1]
    assert logits is not None
    touched = np.unique(select_experts(logits, problem.node.k)).size
    if not form.endswith("columns"):  # those are converted and held whole
        assert stats.bytes_read == touched * packed_bytes(problem)


@pytest.mark.parametrize("form", ["fp4", "nvfp4", "fp8 blocks", "fp8 global", "int"])
@pytest.mark.parametrize("biased", [True, False])
def test_a_call_whose_input_has_no_known_type(tmp_path: Path, form: str, biased: bool) -> None:
    """It is that of scales, where these are of such a type, else of biases."""
    problem = special(form, "geglu", 4, dtype="float16")
    if not biased:
        problem = replace(problem, inputs=[None if i in (4, 7) else a for i, a in enumerate(problem.inputs)])
    model = onnx.load(model_of(problem, tmp_path / "model.onnx"))
    renamed = [onnx.helper.make_node("Identity", [name], [f"{name}_known"]) for name in model.graph.node[0].input[:2]]
    model.graph.node[0].input[0], model.graph.node[0].input[1] = "input_known", "router_probs_known"
    for node in renamed:
        model.graph.node.insert(0, node)
    onnx.save(model, tmp_path / "model.onnx")
    (node,) = model_nodes(load_model(tmp_path / "model.onnx"))
    if form in ("fp8 blocks", "int"):
        assert node.call(1).dtype == np.float32
    elif biased:
        assert node.call(1).dtype == np.float16
    else:
        with pytest.raises(QMoEError, match="--dtype"):
            node.call(1)
    assert node.call(1, np.dtype(np.float16)).dtype == np.float16
