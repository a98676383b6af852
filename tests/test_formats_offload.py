"""Number formats in model files whose weights are external, held whole and paged expert by expert."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from paged import packed_bytes
from problems import Problem
from shell import model_of
from special_problems import FORMS, special

from qmoe_ep import CpuExecutionProvider
from qmoe_ep.onnx import run_model
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
