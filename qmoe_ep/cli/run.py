"""``qmoe-ep run``: a whole model, with QMoE by the package and everything else by the evaluator of onnx."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from qmoe_ep.cli.main import debug_option, json_option, layout_option, model_argument

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qmoe_ep.offload import OffloadStats
    from qmoe_ep.onnx import LoadedModel

__all__ = ["command"]


@click.command("run")
@model_argument
@click.argument("inputs", type=click.Path(exists=True, dir_okay=False), metavar="INPUTS.npz")
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="OUT.npz", help="Write the outputs.")
@click.option(
    "--provider",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where QMoE nodes run; auto takes CUDA if it can be used.",
)
@layout_option
@click.option(
    "--offload",
    is_flag=True,
    help="Page experts from the model's external data instead of holding them all; on the CPU.",
)
@click.option(
    "--host-cache-bytes",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="With --offload: float32 bytes of expanded experts that may be kept.",
)
@json_option
@debug_option
def command(
    model: str,
    inputs: str,
    output: str | None,
    provider: str,
    weights_layout: Literal["raw", "sm80"] | None,
    offload: bool,
    host_cache_bytes: int,
    as_json: bool,
) -> None:
    """Run a model on the arrays of an .npz file, which are named like the graph's inputs.

    bfloat16 arrays are stored as their uint16 bits, in INPUTS.npz and in OUT.npz.
    """
    from qmoe_ep import onnx as models
    from qmoe_ep.cli.files import output_path
    from qmoe_ep.cli.output import progress_bar
    from qmoe_ep.cli.providers import open_provider

    if output is not None:
        output_path(output, "-o")
    if offload and provider == "cuda":
        raise click.UsageError("--offload is for the CPU; use --provider cpu, or leave it out.")
    loaded = models.load_model(model)
    arrays = _read_inputs(loaded, inputs)
    provider_context, which = open_provider(provider, offload=offload, host_cache_bytes=host_cache_bytes)
    with provider_context as chosen, progress_bar(f"running on {chosen.name}"):
        if host_cache_bytes and not getattr(chosen, "weight_offload", False):
            raise click.UsageError("--host-cache-bytes has no effect without --offload; give both.")
        started = time.perf_counter()
        results = _evaluate(loaded, arrays, chosen, weights_layout)
        seconds = time.perf_counter() - started
        paging = chosen.offload_stats() if chosen.name == "cpu" else None
    if output is not None:
        from qmoe_ep.cli.archive import write_archive

        write_archive(output, results)
    _print(arrays, results, which, seconds, paging, as_json)


def _read_inputs(loaded: LoadedModel, path: str) -> dict[str, NDArray[Any]]:
    """The graph's inputs from an archive, checked by name, type and shape before any is read."""
    from qmoe_ep import onnx as models
    from qmoe_ep.cli.archive import ArrayArchive
    from qmoe_ep.errors import QMoEError

    archive = ArrayArchive(path)
    wanted = {name: (dtype, dims) for name, dtype, dims in models.graph_inputs(loaded)}
    missing = [name for name in wanted if name not in archive.arrays]
    unknown = [name for name in archive.arrays if name not in wanted]
    if missing or unknown:
        raise QMoEError(
            f"{path}: expected the graph's inputs {_names(list(wanted))}, got {_names(list(archive.arrays))}"
            f" (missing: {_names(missing)}; unknown: {_names(unknown)}); rename the arrays"
        )
    for name, (dtype, dims) in wanted.items():
        if dtype is None:
            raise QMoEError(f"{loaded.path}: input {name!r} is not a tensor of numbers; only those are supported")
        _check_shape(f"{path}: array {name!r}", dims, archive.arrays[name].shape)
    return {name: archive.read(name, dtype) for name, (dtype, _) in wanted.items()}


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _check_shape(where: str, expected: Sequence[int | str | None] | None, shape: tuple[int, ...]) -> None:
    from qmoe_ep.errors import QMoEError

    if expected is None:
        return
    fits = len(expected) == len(shape) and all(
        not isinstance(want, int) or want == got for want, got in zip(expected, shape, strict=True)
    )
    if not fits:
        words = ", ".join("?" if size is None else str(size) for size in expected)
        raise QMoEError(f"{where}: expected shape [{words}], got {list(shape)}; reshape it")


def _evaluate(
    loaded: LoadedModel,
    arrays: Mapping[str, NDArray[Any]],
    provider: Any,
    weights_layout: Literal["raw", "sm80"] | None,
) -> dict[str, NDArray[Any]]:
    from qmoe_ep import onnx as models
    from qmoe_ep.errors import CaptureError, CudaError, NvrtcError, QMoEError

    try:
        return dict(models.run_model(loaded, arrays, provider, weights_layout=weights_layout))
    except (CaptureError, CudaError, MemoryError, NvrtcError, OSError, QMoEError):
        raise
    except Exception as error:
        # The evaluator of onnx raises whatever an operator of the model makes it raise.
        raise QMoEError(f"{loaded.path}: the model can't be evaluated: {type(error).__name__}: {error}") from error


def _print(
    arrays: Mapping[str, NDArray[Any]],
    results: Mapping[str, NDArray[Any]],
    which: str,
    seconds: float,
    paging: OffloadStats | None,
    as_json: bool,
) -> None:
    from qmoe_ep.cli.output import print_json, print_table

    if as_json:
        shapes = [
            {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in group.items()}
            for group in (arrays, results)
        ]
        printed = {"provider": which, "seconds": seconds, "inputs": shapes[0], "outputs": shapes[1]}
        print_json(printed if paging is None else {**printed, "paging": paging.to_dict()})
        return
    rows = [
        (kind, name, str(list(a.shape)), str(a.dtype))
        for kind, group in (("input", arrays), ("output", results))
        for name, a in group.items()
    ]
    print_table(("", "name", "shape", "dtype"), rows)
    click.echo(f"provider: {which}")
    click.echo(f"time: {1000 * seconds:.1f} ms")
    if paging is not None:
        _print_paging(paging)


def _print_paging(paging: OffloadStats) -> None:
    from qmoe_ep.cli.output import bytes_text

    if not paging.layer_executions:
        click.echo("paging: no call paged experts; their tensors must be external data, one expert after the other")
        return
    cache = paging.cache
    click.echo(
        f"paging: {bytes_text(paging.bytes_read)} read, {paging.layer_executions} layer executions, "
        f"{paging.active_experts} routes to {paging.unique_experts} experts, "
        f"at most {paging.peak_dequantized_experts} expanded at once"
    )
    click.echo(
        f"host cache: {cache.hits} hits, {cache.misses} misses, {cache.evictions} evictions, "
        f"{bytes_text(cache.bytes_owned)} held of {bytes_text(cache.budget)}, "
        f"at most {bytes_text(cache.peak_bytes_owned)}"
    )
