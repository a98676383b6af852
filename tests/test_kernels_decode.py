"""The decode family: plans, compilation without spills, and the provider on the simulated driver taking it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simulated.kernels_decode
import simulated.kernels_portable
from emulated import machine
from problems import Problem, Recipe, Space, build, first_seed, random_problem
from test_cuda_provider import run

from qmoe_ep import CudaExecutionProvider
from qmoe_ep.call import CallDescription, describe_call
from qmoe_ep.capabilities import Capabilities
from qmoe_ep.kernels import decode
from qmoe_ep.kernels.decode_geometry import DownShape, GateUpShape, Geometry, choose_geometry, stream_of
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
    assert "7.5" in str(decode.decline_reason(call, Capabilities.for_arch("sm_75"))) or decode.decline_reason(
        call, Capabilities.for_arch("sm_75")
    )
    for operand in (2, 3):
        assert "aligned" in str(decode.decline_reason(call, HOPPER, {operand: 2}))


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + 40))
def test_one_row_through_the_provider(simulated: Any, seed: int) -> None:
    problem = random_problem(seed, SPACE)
    simulated.attributes["COMPUTE_CAPABILITY_MAJOR"] = 9
    with CudaExecutionProvider() as gpu:
        problem.check_closely(run(gpu, problem))


# --- geometry ------------------------------------------------------------------------------------

LAYERS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-V2-Lite": (2048, 1408, 64, 6),
    "GPT-OSS-20B": (2880, 2880, 32, 4),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}


def _sized(sizes: tuple[int, int, int, int], **fields: Any) -> CallDescription:
    """A call of one row of the sizes H, I, E and k; no operand is made at them."""
    hidden, inter, experts, k = sizes
    small = build(Recipe(leading=(1,), hidden=256, inter=256, experts=2, k=1, fusion=0, **fields))
    call = describe_call(small.node, small.inputs)
    known = call.experts
    assert known.fc3 is not None
    return replace(
        call,
        top_k=k,
        experts=replace(
            known,
            num_experts=experts,
            hidden_size=hidden,
            inter_size=inter,
            fc1=replace(known.fc1, out_features=inter, in_features=hidden),
            fc2=replace(known.fc2, out_features=hidden, in_features=inter),
            fc3=replace(known.fc3, out_features=inter, in_features=hidden),
        ),
    )


def _shapes(call: CallDescription) -> tuple[GateUpShape, DownShape]:
    gate, down = stream_of(call.experts.fc1, {}), stream_of(call.experts.fc2, {})
    assert not isinstance(gate, str)
    assert not isinstance(down, str)
    return GateUpShape.of(call, HOPPER, gate), DownShape.of(call, HOPPER, down)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_multiprocessor_holds_one_block_of_each_kernel_or_of_one(
    layer: str, dtype: str, bits: int, zero_points: bool
) -> None:
    call = _sized(LAYERS[layer], bits=(bits,) * 3, dtype=dtype, zero_points=(zero_points,) * 3)
    shapes = _shapes(call)
    chosen = choose_geometry(*shapes, HOPPER)
    assert chosen is not None
    whole, reserved = HOPPER.shared_bytes_per_multiprocessor, 1024
    taken = [shape.layout(geometry)[1] + reserved for shape, geometry in zip(shapes, chosen, strict=True)]
    assert 2 * taken[0] > whole
    assert sum(taken) <= whole or 2 * taken[1] > whole
    assert max(taken) <= HOPPER.shared_bytes_per_block_optin + reserved
    if sum(taken) <= whole:
        assert sum(32 * geometry.warps * geometry.registers for geometry in chosen) <= 65536
    assert all(2 <= geometry.stages <= 8 for geometry in chosen)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_compile_without_spills(layer: str) -> None:
    call = _sized(LAYERS[layer], dtype="float16", router_dtype="float16", scale_dtypes=("float16",) * 3)
    plan = decode.plan(call, HOPPER)
    assert plan is not None
    for step in plan.steps:
        for report in compile_module(step.module, "sm_90a").report():
            assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0), step.module.name


def test_activations_that_fill_shared_memory_are_declined() -> None:
    call = _sized((2048, 16384, 16, 8))
    assert "shared memory" in str(decode.decline_reason(call, HOPPER))
    assert decode.plan(call, HOPPER) is None


def test_sizes_beyond_the_kernels_counters_are_declined() -> None:
    call = _sized((2048, 2**28, 64, 64))
    assert "can count" in str(decode.decline_reason(call, HOPPER))


# --- the device code, on the CPU -----------------------------------------------------------------

emulated = pytest.mark.skipif(machine.COMPILER is None, reason="g++ is not installed")
FEW_BLOCKS = replace(HOPPER, multiprocessor_count=2)
SMALL = Geometry(3, 2, 168)
PLAIN = Recipe(leading=(1,), hidden=256, inter=64, dtype="float16", fusion=0, scale_dtypes=("float16",) * 3)


def _emulate(problem: Problem, **arguments: Any) -> Any:
    call = describe_call(problem.node, problem.inputs)
    return machine.run_call(
        call,
        problem.inputs,
        lambda alignment: decode.plan(call, FEW_BLOCKS, alignment, geometry=(SMALL, SMALL)),
        **arguments,
    )[0]


@emulated
@pytest.mark.parametrize(("name", "backwards"), [(name, number % 2 == 0) for number, name in enumerate(VARIANTS)])
def test_device_code_computes_the_operator(name: str, backwards: bool) -> None:
    problem = build(replace(VARIANTS[name], leading=(1,)))
    problem.check_closely(_emulate(problem, backwards=backwards))


@emulated
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_activations_that_are_not_finite(dtype: str, value: float) -> None:
    problem = build(replace(PLAIN, dtype=dtype, activation="identity"))
    problem.inputs[0].reshape(-1)[5] = value  # type: ignore[union-attr]
    problem.check_closely(_emulate(problem))


@emulated
@pytest.mark.parametrize(("factor", "inverse"), [(1e30, 1e-30), (1e-30, 1e30), (3e37, 1e-37), (1e-38, 1e38)])
def test_activations_of_any_magnitude(factor: float, inverse: float) -> None:
    problem = build(replace(PLAIN, dtype="float32", scale_dtypes=("float32",) * 3, activation="identity"))
    rows, scales = problem.inputs[0], problem.inputs[3 if factor < 1e-30 else 6]
    assert rows is not None
    assert scales is not None
    rows *= np.float32(factor)
    scales *= np.float32(inverse)
    problem.check_closely(_emulate(problem))


@emulated
def test_rows_past_the_valid_ones_are_left_alone() -> None:
    problem = build(PLAIN)
    assert np.isnan(_emulate(problem, valid_rows=0)).all()
    problem.check_closely(_emulate(problem, valid_rows=1))


@emulated
@pytest.mark.parametrize("router_dtype", ["float16", "float32"])
def test_any_logits_select_every_expert_once(router_dtype: str) -> None:
    small = replace(PLAIN, hidden=64, router_dtype=router_dtype)
    ones = build(replace(small, experts=10, k=9))
    ones.inputs[1].view(np.uint8)[...] = 0xFF  # type: ignore[union-attr]
    ones.check_closely(_emulate(ones))
    ties = build(replace(small, experts=300, k=5, logits="ties"))
    ties.check_closely(_emulate(ties))
