"""Calls in chunks of rows: plans, the provider on the simulated driver, device code on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated import machine
from problems import Problem, Recipe, build
from test_cuda_provider import activations_of, on_device, weights_of

from qmoe_ep import CudaExecutionProvider
from qmoe_ep.call import CallDescription, describe_call
from qmoe_ep.capabilities import Capabilities
from qmoe_ep.cuda.variants import choose_plan
from qmoe_ep.errors import QMoEError
from qmoe_ep.kernels.plan import Plan
from qmoe_ep.nvrtc_cache import compile_module
from qmoe_ep.routing import select_experts
from qmoe_ep.telemetry import RouteTelemetryConfig

H200 = Capabilities.for_arch("sm_90a")
ODD = Recipe(
    leading=(5, 15), hidden=34, inter=18, experts=5, k=2, block_size=None, router_weights=True, dtype="float16"
)


def _call(problem: Problem) -> CallDescription:
    return describe_call(problem.node, problem.inputs)


def _scratch(plan: Plan) -> int:
    return sum(nbytes for _, nbytes in plan.scratch if nbytes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scratch_stays_below_the_limit(dtype: str) -> None:
    call = _call(build(Recipe(leading=(64,), hidden=128, inter=128, k=4, dtype=dtype)))
    for rows in (64, 1000, 9000):
        wide = replace(call, rows=rows, input_shape=(rows, 128))
        whole = choose_plan(wide, H200)
        for limit in (1 << 20, 3 << 20, 1 << 30):
            plan = choose_plan(wide, H200, scratch_limit=limit)
            assert _scratch(plan) <= limit
            assert ("chunks" in plan.reason) == (_scratch(whole) > limit)


def test_one_row_that_needs_more_is_refused() -> None:
    with pytest.raises(QMoEError, match="scratch_limit = 10"):
        choose_plan(_call(build(Recipe())), H200, scratch_limit=10)


def test_a_limit_that_is_no_size_is_refused() -> None:
    with pytest.raises(QMoEError, match="scratch_limit: expected a positive number"):
        CudaExecutionProvider(scratch_limit=0)


def _run(problem: Problem, limit: int | None, simulated: Any, valid: int | None) -> list[np.ndarray[Any, Any]]:
    """Output of an eager call and of a captured one, and the experts counted."""
    options: dict[str, Any] = {} if limit is None else {"scratch_limit": limit}
    with CudaExecutionProvider(kernels="portable", **options) as gpu:
        simulated.watch(gpu.runtime)
        kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
        operands, output = on_device(gpu, activations_of(problem)), gpu.to_device(problem.poisoned_output())
        rows = None if valid is None else gpu.to_device(np.array([valid], np.int32))
        assert ("chunks" in kernel.plan(operands, [output]).reason) == (limit is not None)
        kernel.execute(operands, [output], valid_rows=rows)
        eager = output.numpy()
        output.copy_from(problem.poisoned_output())
        with gpu.capture() as capture:
            kernel.execute(operands, [output], valid_rows=rows)
        capture.graph.replay()
        captured = output.numpy()
        capture.graph.close()
        kernel.close()
    return [eager, captured]


@pytest.mark.parametrize("valid", [None, 0, 31, 75])
def test_chunks_compute_what_the_whole_call_does(simulated: Any, valid: int | None) -> None:
    problem = build(ODD)
    for whole, chunked in zip(
        _run(problem, None, simulated, valid), _run(problem, 10_000, simulated, valid), strict=True
    ):
        assert whole.tobytes() == chunked.tobytes()


def test_telemetry_counts_every_valid_row_once(simulated: Any) -> None:
    problem = build(ODD)
    with CudaExecutionProvider(scratch_limit=10_000) as gpu:
        simulated.watch(gpu.runtime)
        kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
        kernel.telemetry.arm(RouteTelemetryConfig(ODD.experts, ODD.k, mode="counts"))
        operands, output = on_device(gpu, activations_of(problem)), gpu.to_device(problem.poisoned_output())
        kernel.execute(operands, [output], valid_rows=gpu.to_device(np.array([31], np.int32)))
        snapshot = kernel.telemetry.snapshot()
        chosen = select_experts(problem.inputs[1], ODD.k)[:31]
        assert (snapshot.rows, snapshot.routes) == (31, 62)
        assert np.array_equal(snapshot.counts, np.bincount(chosen.ravel(), minlength=ODD.experts))
        kernel.telemetry.disarm()
        kernel.close()


@pytest.mark.skipif(machine.COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("valid", [None, 31])
def test_emulated_chunks(valid: int | None) -> None:
    problem = build(ODD)
    call, reasons = _call(problem), []

    def make(alignment: Any) -> Plan:
        plan = choose_plan(call, H200, alignment, only_portable=True, scratch_limit=10_000)
        reasons.append(plan.reason)
        return plan

    output, _ = machine.run_call(call, problem.inputs, make, valid_rows=valid)
    assert "chunks of 16 rows" in reasons[0] or "chunks of 8 rows" in reasons[0]
    rows = output.reshape(-1, 34)
    assert np.isnan(rows[valid or 75 :]).all()
    expected = problem.expected.reshape(-1, 34)[:valid]
    assert np.abs(rows[:valid] - expected).max() <= 4e-3 * np.abs(expected).max()


def test_the_module_compiles() -> None:
    call = _call(build(Recipe(leading=(300,))))
    plan = choose_plan(call, H200, scratch_limit=100_000)
    assert compile_module(plan.steps[0].module, "sm_75").report()[0].spill_load_bytes == 0
