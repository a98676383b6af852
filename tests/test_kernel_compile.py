"""The device code compiles with the real compiler, for every pair of compile-time choices, without spills."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_variants
import pytest
from covering import pairwise

from qmoe_ep.capabilities import Capabilities
from qmoe_ep.kernels import portable
from qmoe_ep.kernels.plan import ModuleSource
from qmoe_ep.nvrtc_cache import CompiledModule, clear_compiled, compile_module

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a", "sm_100")


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for real, every time."""
    monkeypatch.setenv("QMOE_EP_CACHE_DISABLE", "1")
    clear_compiled()


def _portable_modules(arch: str) -> list[ModuleSource]:
    capabilities = Capabilities.for_arch(arch)
    calls = [*kernel_variants.covering_calls(), *kernel_variants.special_calls()]
    # The form, too, is a choice; rows alone would tie it to the tile size.
    plans = [portable.plan(call, capabilities) for call in calls]
    plans += [portable.plan(call, capabilities, form="few") for call in calls[::4]]
    return list(dict.fromkeys(step.module for plan in plans for step in plan.steps))


def _compile_all(modules: list[ModuleSource], arch: str) -> list[CompiledModule]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda module: compile_module(module, arch), modules))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_portable_modules_compile_without_spills(arch: str) -> None:
    modules = _portable_modules(arch)
    assert len({module.name for module in modules}) == len(modules)
    for module, compiled in zip(modules, _compile_all(modules, arch), strict=True):
        assert "warning" not in compiled.log, compiled.log
        reports = {report.entry: report for report in compiled.report()}
        assert set(reports) == set(module.entries)
        for report in reports.values():
            assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0), (module.name, report)
            assert report.stack_bytes == 0, (module.name, report)
            assert report.shared_bytes <= 48 << 10


def test_portable_modules_need_no_half_headers() -> None:
    """Halves are converted without the headers, so that portable kernels run where those are missing."""
    for path in Path(portable.__file__).parent.glob("*.cuh"):
        if path.name in ("route.cuh", "group.cuh", "quantization.cuh", "activation.cuh", "float_types.cuh") or (
            path.name.startswith("portable")
        ):
            assert "#include <" not in path.read_text(), path.name


def test_every_pair_is_covered() -> None:
    rows = pairwise(kernel_variants.FACTORS)
    names = list(kernel_variants.FACTORS)
    for a in names:
        for b in names[names.index(a) + 1 :]:
            wanted = {(x, y) for x in kernel_variants.FACTORS[a] for y in kernel_variants.FACTORS[b]}
            assert wanted == {(row[a], row[b]) for row in rows}
    assert len(rows) <= 80
