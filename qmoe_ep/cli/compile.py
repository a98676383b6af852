"""``qmoe-ep compile``: the module cache filled ahead of time, for GPUs that need not be here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from qmoe_ep.cli.main import debug_option, json_option, layout_option, model_argument

if TYPE_CHECKING:
    import numpy as np

    from qmoe_ep.capabilities import Capabilities
    from qmoe_ep.cli.nodes import ModelNode
    from qmoe_ep.kernels.plan import Plan, Step
    from qmoe_ep.nvrtc_cache import CompiledModule

__all__ = ["command"]

_ROWS = (*range(1, 9), 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Rows per call for which plans are made: the choice of kernels changes with them."""


@dataclass(frozen=True, slots=True)
class _Usage:
    """What one kernel takes on one architecture; shared memory is static and dynamic together."""

    arch: str
    variant: str
    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    origin: str


@click.command("compile")
@model_argument
@click.option("--arch", "archs", multiple=True, required=True, metavar="ARCH", help="Such as sm_90a; may be repeated.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default=None,
    help="Type of activations, where the model doesn't tell; that of the scales or biases by default.",
)
@click.option("--report", is_flag=True, help="List registers, spills and shared memory of each kernel.")
@layout_option
@json_option
@debug_option
def command(
    model: str,
    archs: tuple[str, ...],
    dtype: str | None,
    report: bool,
    weights_layout: Literal["raw", "sm80"] | None,
    as_json: bool,
) -> None:
    """Compile the GPU kernels that a model's QMoE nodes need and keep them in the cache folder.

    Needs NVRTC but no GPU. Nodes that no provider takes are named and left out.
    """
    from qmoe_ep import onnx as models
    from qmoe_ep.capabilities import Capabilities
    from qmoe_ep.cli.nodes import model_nodes

    targets = [(arch, Capabilities.for_arch(arch)) for arch in dict.fromkeys(archs)]
    nodes = list(model_nodes(models.load_model(model), weights_layout))
    for node in nodes:
        if node.reason is not None:
            click.echo(f"qmoe-ep: node {node.node.name or node.node_id} is left out: {node.reason}", err=True)
    plans = {arch: _plans(nodes, capabilities, dtype) for arch, capabilities in targets}
    usages: list[_Usage] = []
    origins: list[str] = []
    for arch, kernels in _compile(plans):
        origins += [binary.origin for binary, _, _ in kernels]
        usages += [usage for binary, variant, steps in kernels for usage in _usages(arch, binary, variant, steps)]
    _print(model, usages, origins, report, as_json)


def _plans(nodes: list[ModelNode], capabilities: Capabilities, dtype: str | None) -> list[Plan]:
    """The plans that calls of any size may take, on the fastest kernels and on the portable ones."""
    from qmoe_ep.cuda.variants import choose_plan
    from qmoe_ep.kernels import portable

    plans: list[Plan] = []
    for node in nodes:
        if node.reason is not None:
            continue
        wanted = _dtype(dtype)
        plans += [choose_plan(node.call(rows, wanted), capabilities) for rows in _ROWS]
        plans += [portable.plan(node.call(2, wanted), capabilities, form=form) for form in ("few", "many")]
    return plans


def _dtype(name: str | None) -> np.dtype[Any] | None:
    import ml_dtypes
    import numpy as np

    if name is None:
        return None
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _compile(plans: dict[str, list[Plan]]) -> Iterator[tuple[str, list[tuple[CompiledModule, str, list[Step]]]]]:
    """Compile every distinct module, some at a time; yields them per architecture with the steps that use them."""
    from qmoe_ep.cli.output import progress_bar
    from qmoe_ep.nvrtc_cache import compile_modules

    uses: dict[str, dict[Any, tuple[str, list[Step]]]] = {}
    for arch, made in plans.items():
        modules = uses.setdefault(arch, {})
        for plan in made:
            for step in plan.steps:
                modules.setdefault(step.module, (plan.variant, []))[1].append(step)
    total, done, workers = sum(map(len, uses.values())), 0, os.cpu_count() or 1
    with progress_bar("compiling") as update:
        for arch, modules in uses.items():
            sources = list(modules)
            binaries: list[CompiledModule] = []
            for first in range(0, len(sources), workers):
                binaries += compile_modules(sources[first : first + workers], arch, workers)
                done = done + len(sources[first : first + workers])
                update(done, total, arch)
            yield arch, [(binary, *modules[source]) for binary, source in zip(binaries, sources, strict=True)]


def _usages(arch: str, binary: CompiledModule, variant: str, steps: list[Step]) -> Iterator[_Usage]:
    for kernel in binary.report():
        dynamic = max((step.shared_bytes for step in steps if step.entry == kernel.entry), default=0)
        yield _Usage(
            arch=arch,
            variant=variant,
            kernel=kernel.entry,
            registers=kernel.registers,
            spill_bytes=kernel.spill_store_bytes + kernel.spill_load_bytes,
            stack_bytes=kernel.stack_bytes,
            shared_bytes=kernel.shared_bytes + dynamic,
            origin=binary.origin,
        )


def _print(model: str, usages: list[_Usage], origins: list[str], report: bool, as_json: bool) -> None:
    from qmoe_ep.cli.output import print_json, print_table
    from qmoe_ep.module_store import ModuleStore

    store = ModuleStore.default()
    folder = None if store is None else str(store.folder)
    compiled = origins.count("compiled")
    if as_json:
        counts = {"modules": len(origins), "compiled": compiled}
        print_json({"model": model, "cache": folder, **counts, "kernels": [asdict(usage) for usage in usages]})
        return
    if report and usages:
        columns = ("arch", "family", "kernel", "registers", "spills (bytes)", "stack (bytes)", "shared (bytes)")
        rows = [
            (u.arch, u.variant, u.kernel, *map(str, (u.registers, u.spill_bytes, u.stack_bytes, u.shared_bytes)))
            for u in usages
        ]
        print_table(columns, rows)
    if not origins:
        click.echo(f"{model} has no QMoE node to compile for")
        return
    place = f"in {folder}" if folder else "but not kept: QMOE_EP_CACHE_DISABLE=1"
    click.echo(f"{len(origins)} modules ready {place}; {compiled} of them compiled now")
