"""The decode family: plans, compilation without spills, and the provider on the simulated driver taking it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import simulated.kernels_decode
import simulated.kernels_portable
from problems import Recipe, Space, build, first_seed, random_problem
from test_cuda_provider import run

from qmoe_ep import CudaExecutionProvider
from qmoe_ep.call import describe_call
from qmoe_ep.capabilities import Capabilities
from qmoe_ep.kernels import decode
from qmoe_ep.nvrtc_cache import compile_module

assert simulated.kernels_decode
assert simulated.kernels_portable

HOPPER = Capabilities.for_arch("sm_90a")
SPACE = Space(strided=(False,), most_features=128, layouts=("raw",), leading=((1,), (1, 1)))

# Chosen so that every width, block size, activation type, kind of scale, and zero points occur on every architecture.
VARIANTS = {
    "int4 blocks of 32": Recipe(hidden=256, inter=128, dtype="float16", fusion=0, scale_dtypes=("float16",) * 3),
    "int4 with zero points": Recipe(
        hidden=256, inter=128, dtype="bfloat16", zero_points=(True,) * 3, block_size=16, scale_dtypes=("bfloat16",) * 3
    ),
    "int4 in float32": Recipe(hidden=256, inter=128, block_size=128, biases=(True,) * 3, zero_points=(True,) * 3),
    "int8 by rows": Recipe(hidden=256, inter=128, bits=(8,) * 3, block_size=None, dtype="float16", fusion=2),
    "int3": Recipe(hidden=256, inter=128, bits=(3,) * 3, block_size=16, dtype="bfloat16", zero_points=(True,) * 3),
    "int2, ungated": Recipe(hidden=256, inter=128, bits=(2,) * 3, activation="gelu", fusion=0, dtype="float16"),
    "int1": Recipe(hidden=256, inter=128, bits=(1,) * 3, block_size=64, zero_points=(True,) * 3),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_compile_without_spills(name: str, arch: str) -> None:
    problem = build(replace(VARIANTS[name], leading=(1,)))
    plan = decode.plan(describe_call(problem.node, problem.inputs), Capabilities.for_arch(arch))
    assert plan is not None
    for step in plan.steps:
        for report in compile_module(step.module, arch).report():
            assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0), step.module.name


def test_what_is_declined_says_why() -> None:
    many = build(Recipe(leading=(2,)))
    call = describe_call(many.node, many.inputs)
    assert decode.plan(call, HOPPER) is None
    assert "2 rows" in str(decode.decline_reason(call, HOPPER))
    one = build(Recipe(leading=(1,)))
    call = describe_call(one.node, one.inputs)
    assert decode.decline_reason(call, HOPPER) is None
    assert "older than compute capability 8.0" in str(decode.decline_reason(call, Capabilities.for_arch("sm_75")))
    for operand in (2, 3):
        assert "aligned" in str(decode.decline_reason(call, HOPPER, {operand: 2}))


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + 40))
def test_one_row_through_the_provider(simulated: Any, seed: int) -> None:
    problem = random_problem(seed, SPACE)
    simulated.attributes["COMPUTE_CAPABILITY_MAJOR"] = 9
    with CudaExecutionProvider() as gpu:
        problem.check_closely(run(gpu, problem))
