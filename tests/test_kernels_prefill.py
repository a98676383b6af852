"""Plans of the prefill kernels, and their device code executed on the CPU.

Rows of the output are compared more strictly than the operator asks: its tolerance is relative to a sum of absolute
values, beside which even a wrong result can be small. Here the error is relative to the row itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated import machine
from plan_runner import Alignment, PlanRunner
from problems import Problem, Recipe, Space, build, random_problem
from test_cuda_provider import activations_of, on_device, weights_of

from qmoe_ep import CudaExecutionProvider
from qmoe_ep.call import CallDescription, describe_call
from qmoe_ep.capabilities import Capabilities
from qmoe_ep.cuda.variants import choose_plan
from qmoe_ep.kernels import prefill
from qmoe_ep.kernels.plan import AddressSource, Plan
from qmoe_ep.nvrtc_cache import compile_module, compile_modules
from qmoe_ep.routing import select_experts
from qmoe_ep.runtime import Runtime

# Two multiprocessors, so that blocks have several items each.
SMALL = replace(Capabilities.for_arch("sm_90a"), multiprocessor_count=2)
H200 = Capabilities.for_arch("sm_90a")
# What is executed on the CPU, too.
EMULATED = ("several steps, tiles and experts", "8 bits", "mixed bits by row", "halves with a limit")
RAW = Space(layouts=("raw",), strided=(False,), dtypes=("float16", "bfloat16"), leading=((3,), (2, 3), (40,)))
BF16 = Recipe(leading=(20,), hidden=128, inter=128, dtype="bfloat16", scale_dtypes=("bfloat16",) * 3)
F16 = replace(BF16, dtype="float16", scale_dtypes=("float16",) * 3)
# Largest relative L2 error of a row: a few roundings of weights, activations and the output.
RELATIVE = {"float16": 4e-3, "bfloat16": 3e-2}
SUBNORMAL = {"float16": 2.0**-25, "bfloat16": 2.0**-134}
EVERYWHERE = (True, True, True)
Array = np.ndarray[Any, Any]

emulated = pytest.mark.skipif(machine.COMPILER is None, reason="g++ is not installed")

VARIANTS: dict[str, Recipe] = {
    "several steps, tiles and experts": replace(
        BF16, leading=(190,), experts=3, k=1, hidden=384, inter=272, block_size=16
    ),
    "8 bits": replace(BF16, bits=(8, 8, 8), zero_points=EVERYWHERE, hidden=288, inter=160),
    "8 bits in float16": replace(F16, bits=(8, 8, 8)),
    "3 bits": replace(F16, bits=(3, 3, 3), hidden=160, inter=544),
    "mixed bits by row": replace(
        BF16, bits=(2, 1, 2), block_size=None, zero_points=EVERYWHERE, hidden=208, inter=304, biases=EVERYWHERE
    ),
    "no gate": replace(F16, fusion=0, activation="relu", hidden=144, inter=400, block_size=16, leading=(150,)),
    "third matrix": replace(BF16, fusion=0, activation="silu", fc3=True, biases=EVERYWHERE, hidden=160, inter=96),
    "halves with a limit": replace(
        F16,
        fusion=2,
        limit=1.0,
        bits=(3, 3, 3),
        block_size=64,
        hidden=192,
        inter=320,
        scale_dtypes=("float32", "bfloat16", "float32"),
    ),
}


def _call(problem: Problem) -> CallDescription:
    return describe_call(problem.node, problem.inputs)


def _plan(call: CallDescription, alignment: dict[AddressSource, int] | None = None) -> Plan:
    made = prefill.plan(call, SMALL, alignment)
    assert made is not None
    return made


def _emulate(problem: Problem, **options: Any) -> tuple[Array, dict[str, machine.GuardedBuffer]]:
    call = _call(problem)
    chosen = select_experts(problem.inputs[1].reshape(call.rows, -1)[: options.get("valid_rows")], call.top_k)  # type: ignore[union-attr]
    tiles = [n for count in np.bincount(chosen.reshape(-1)) for n in (128 * (count >= 128), count % 128) if n]
    widths = {128 if n > 64 else 64 if n > 32 else 32 for n in tiles}

    def make(alignment: dict[AddressSource, int]) -> Plan:
        """The plan without the kernels of widths that no tile has; they would do nothing but take time to compile."""
        made = _plan(call, alignment)
        names = {f"{product}_{width}" for product in ("gate_up", "down") for width in {128, 64, 32} - widths}
        return replace(made, steps=tuple(step for step in made.steps if step.name not in names))

    return machine.run_call(call, problem.inputs, make, **options)


def check_rows(problem: Problem, output: Array) -> None:
    """The operator's check, and that the error is small beside each row itself."""
    problem.check(output)
    # Half the distance of subnormal values of the output's type is nobody's error.
    unavoidable = SUBNORMAL[problem.recipe.dtype] * np.sqrt(problem.recipe.hidden)
    difference = np.linalg.norm(output.astype(np.float64) - problem.expected, axis=-1)
    allowed = RELATIVE[problem.recipe.dtype] * np.linalg.norm(problem.expected, axis=-1) + unavoidable
    assert (difference <= allowed).all(), f"row errors {difference} exceed {allowed} for {problem.recipe}"


def _exact_was_used(scratch: dict[str, machine.GuardedBuffer]) -> bool:
    return int(scratch["exact_tile_count"].array.view(np.int32)[0]) > 0


# --- plans ---------------------------------------------------------------------------------------


def test_plans_are_complete() -> None:
    served = 0
    for seed in range(120):
        problem = random_problem(seed, RAW)
        call = _call(problem)
        made = prefill.plan(call, H200)
        assert (made is None) == (prefill.unserved_reason(call, H200) is not None)
        if made is None:
            continue
        served += 1
        slots = {slot for slot, nbytes in made.scratch if nbytes > 0}
        assert len(slots) == len(made.scratch)
        used: set[object] = set()
        for step in made.steps:
            fields = {field for field, *_ in step.arguments._fields_}
            for field, source in step.pointers:
                assert field in fields
                assert isinstance(source, int) or source in slots | {"output", "valid_rows", "telemetry"}
                used.add(source)
            assert step.entry in step.module.entries
            assert 1 <= step.grid[0] < 2**31
            assert step.shared_bytes <= H200.shared_bytes_per_block_optin
        assert {i for i, operand in enumerate(problem.inputs) if operand is not None} | slots | {"output"} <= used
    assert served > 40


def test_modules_with_one_name_are_one_module() -> None:
    seen: dict[str, str] = {}
    for seed in range(120):
        call = _call(random_problem(seed, RAW))
        for alignment in (None, dict.fromkeys(range(15), 2)):
            made = prefill.plan(call, H200, alignment)
            for step in made.steps if made else ():
                assert seen.setdefault(step.module.name, step.module.source) == step.module.source
    assert len(set(seen.values())) == len(seen)


def test_scratch_is_linear_in_routes() -> None:
    sizes = [
        sum(n for _, n in _plan(_call(build(replace(F16, leading=(rows,))))).scratch) for rows in (2000, 4000, 6000)
    ]
    assert abs((sizes[2] - sizes[1]) - (sizes[1] - sizes[0])) <= 4096


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (replace(BF16, dtype="float32"), "not float16 or bfloat16"),
        (replace(BF16, hidden=136, block_size=None), "multiples of 16"),
        (replace(BF16, fusion=0, bits=(4, 4, 8)), "FC1 and FC3 differ"),
    ],
)
def test_what_is_not_served_says_why(recipe: Recipe, reason: str) -> None:
    call = _call(build(recipe))
    assert reason in str(prefill.unserved_reason(call, H200))
    assert prefill.plan(call, H200) is None


def test_other_devices_are_not_served() -> None:
    call = _call(build(BF16))
    for arch in ("sm_75", "sm_80", "sm_100"):
        assert "compute capability" in str(prefill.unserved_reason(call, Capabilities.for_arch(arch)))
    less = replace(H200, shared_bytes_per_block_optin=99 << 10)
    assert "shared memory" in str(prefill.unserved_reason(call, less))


def test_many_tokens_per_expert_take_these_kernels() -> None:
    call = _call(build(replace(BF16, leading=(120,), experts=8)))
    assert choose_plan(call, H200).variant == "prefill"
    assert choose_plan(call, H200, only_portable=True).variant == "portable"
    later = replace(call, node=replace(call.node, prefill_min_tokens=31))
    for other in (replace(call, rows=20), later):
        assert choose_plan(other, H200).variant not in ("prefill", "portable")
    assert choose_plan(call, Capabilities.for_arch("sm_80")).variant == "grouped"


@pytest.mark.parametrize("variant", VARIANTS)
def test_simulated_calls_of_the_provider(simulated: Any, variant: str) -> None:
    problem = build(replace(VARIANTS[variant], leading=(130,), experts=5))
    with CudaExecutionProvider() as gpu:
        simulated.watch(gpu.runtime)
        kernel = gpu.create_kernel(problem.node, 7, weights_of(problem))
        operands, output = on_device(gpu, activations_of(problem)), gpu.to_device(problem.poisoned_output())
        assert kernel.plan(operands, [output]).variant == "prefill"
        kernel.execute(operands, [output])
        eager = output.numpy()
        problem.check(eager)
        output.copy_from(problem.poisoned_output())
        with gpu.capture() as capture:
            kernel.execute(operands, [output])
        capture.graph.replay()
        assert output.numpy().tobytes() == eager.tobytes()
        capture.graph.close()
        kernel.close()


# --- device code on the CPU ----------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("variant", EMULATED)
def test_emulated_variants(variant: str) -> None:
    problem = build(VARIANTS[variant])
    output, _ = _emulate(problem)
    check_rows(problem, output)


@emulated
def test_emulated_order_of_threads_makes_no_difference() -> None:
    problem = build(replace(BF16, leading=(50,), experts=20))
    forwards, _ = _emulate(problem)
    backwards, _ = _emulate(problem, backwards=True)
    assert forwards.tobytes() == backwards.tobytes()
    check_rows(problem, forwards)


@emulated
def test_emulated_rows_past_valid_rows_are_left_alone() -> None:
    problem = build(BF16)
    whole, _ = _emulate(problem)
    output, _ = _emulate(problem, valid_rows=11)
    assert np.isnan(output[11:]).all()
    assert output[:11].tobytes() == whole[:11].tobytes()


@emulated
def test_emulated_float16_that_would_overflow_or_flush_is_computed_exactly() -> None:
    problem = build(F16)
    _, scratch = _emulate(problem)
    assert not _exact_was_used(scratch)
    zero = build(F16)
    zero.inputs[0][3] = 0  # type: ignore[index]
    _, scratch = _emulate(zero)
    assert not _exact_was_used(scratch)
    tiny, huge = build(F16), build(F16)
    tiny.inputs[0][5] *= np.float16(2**-10)  # type: ignore[index]
    tiny.inputs[6][...] *= np.float16(2**9)  # type: ignore[index]
    huge.inputs[3][...] = huge.inputs[3].astype(np.float32) * 6e5  # type: ignore[index, union-attr]
    huge.inputs[0][...] *= np.float16(1e-5)  # type: ignore[index]
    for unfit in (tiny, huge):
        output, scratch = _emulate(unfit)
        assert _exact_was_used(scratch)
        unfit.check(output)


@emulated
@pytest.mark.parametrize("powers", [(-6, 0, 0), (-10, 0, 0), (0, 0, -14), (-14, 8, 8), (0, -9, 9)])
def test_emulated_small_float16_values_lose_no_more_than_the_output_does(powers: tuple[int, ...]) -> None:
    problem = build(F16)
    for index, power in zip((0, 3, 6), powers, strict=True):
        operand = problem.inputs[index]
        assert operand is not None
        operand[...] = operand.astype(np.float32) * 2.0**power
    output, _ = _emulate(problem)
    check_rows(problem, output)


@emulated
def test_emulated_non_finite_values_come_out_as_in_the_reference() -> None:
    problem = build(replace(BF16, biases=EVERYWHERE, router_weights=True, normalize=False))
    problem.inputs[0][0, 3], problem.inputs[0][1, 5], problem.inputs[0][2, 7] = np.nan, np.inf, -np.inf  # type: ignore[index]
    problem.inputs[14][3:5, :2] = [[0.0, 1.0], [np.nan, 1.0]]  # type: ignore[index]
    output, _ = _emulate(problem)
    problem.check(output)


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [BF16, F16], ids=["bfloat16", "float16"])
def test_common_modules_compile_without_spills(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QMOE_EP_CACHE_DISABLE", "1")
    for step in _plan(_call(build(recipe))).steps:
        if not step.entry.startswith("prefill"):
            continue
        compiled = compile_module(step.module, "sm_90a")
        assert "warning" not in compiled.log, compiled.log
        assert "Potential Performance Loss" not in compiled.log, compiled.log
        for report in compiled.report():
            assert (report.spill_store_bytes, report.spill_load_bytes, report.stack_bytes) == (0, 0, 0), report


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner() -> Iterator[PlanRunner]:
    """One runtime for all, on a device that the kernels are for."""
    with Runtime() as runtime:
        if runtime.capabilities().compute_capability != (9, 0):
            pytest.skip("the prefill kernels are for compute capability 9.0")
        yield PlanRunner(runtime)


@pytest.mark.gpu
def test_on_the_gpu(runner: PlanRunner) -> None:
    capabilities = runner.runtime.capabilities()
    problems = [build(recipe) for recipe in VARIANTS.values()]
    problems += [build(replace(recipe, hidden=2880, inter=544, leading=(500,), k=3)) for recipe in (BF16, F16)]
    plans = [
        prefill.plan(_call(problem), capabilities, alignment)
        for problem in problems
        for alignment in (None, {i: a.itemsize for i, a in enumerate(problem.inputs) if a is not None})
    ]
    compile_modules(dict.fromkeys(s.module for made in plans if made for s in made.steps), runner.modules.arch, 16)
    for problem in problems:
        call = _call(problem)
        for offset in (0, 1):

            def make(alignment: Alignment, call: CallDescription = call) -> Plan:
                made = prefill.plan(call, capabilities, alignment)
                assert made is not None
                return made

            first, second = (runner.run(problem, make, offset=offset) for _ in range(2))
            check_rows(problem, first)
            assert first.tobytes() == second.tobytes()
