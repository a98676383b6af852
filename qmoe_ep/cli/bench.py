"""``qmoe-ep bench``: one layer on a GPU, beside the time that reading its bytes takes."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, Literal

import click

from qmoe_ep.cli.main import debug_option, json_option

__all__ = ["command"]


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [int(part) for part in value.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"expected integers such as 1,16,512, got {value!r}") from None


@click.command("bench")
@click.option("--shape", "shapes", multiple=True, metavar="NAME|H,I,E,k", help="Layer; may be repeated.")
@click.option("--rows", default="1,4,16,64,512,4096", show_default=True, callback=_numbers)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(["float16", "bfloat16", "float32"]))
@click.option("--bits", default="4", show_default=True, callback=_numbers, help="1, 2, 3, 4 or 8.")
@click.option("--block-size", default="32", show_default=True, callback=_numbers, help="0 is one scale per row.")
@click.option("--routing", "routings", multiple=True, type=click.Choice(["normal", "zipf", "one"]))
@click.option("--format", "formats", multiple=True, type=click.Choice(["int", "fp4", "nvfp4", "fp8", "wfp4afp8"]))
@click.option("--telemetry", is_flag=True, help="Measure each layer with route telemetry armed as well.")
@click.option("--kernels", type=click.Choice(["auto", "portable"]), default="auto", show_default=True)
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--commit", help="Recorded where the working folder is no git checkout.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the record as JSON.")
@json_option
@debug_option
def command(
    shapes: tuple[str, ...],
    rows: list[int],
    dtypes: tuple[str, ...],
    bits: list[int],
    block_size: list[int],
    routings: tuple[Literal["normal", "zipf", "one"], ...],
    formats: tuple[str, ...],
    telemetry: bool,
    kernels: str,
    device: int,
    commit: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time whole layers, from router logits to output, by replays of a graph whose weights the L2 never serves.

    \b
    limit  µs that one plain kernel needs to read the bytes of the distinct experts touched
    ratio  time over limit
    error  largest relative L2 error of a row against the float64 reference

    Needs a GPU. Without --shape, five layers of well-known models are measured.
    """
    from qmoe_ep.benchmark.layer import SHAPES, Case, Shape, measure
    from qmoe_ep.cuda.provider import CudaExecutionProvider

    if output is not None and not output.absolute().parent.is_dir():
        raise click.UsageError(f"--output {output}: its folder doesn't exist.")
    if any(count < 1 for count in rows):
        raise click.UsageError("--rows: expected numbers of at least 1.")
    layers = [Shape.parse(shape) for shape in shapes or SHAPES]
    armed = (False, True) if telemetry else (False,)
    combinations = product(
        layers, dtypes or ("float16",), bits, block_size, routings or ("normal",), formats or ("int",), armed
    )
    cases = [Case(*combination) for combination in combinations]
    show: Any = (lambda _: None) if as_json else click.echo
    with CudaExecutionProvider(device, kernels=kernels) as gpu:
        record = measure(gpu, cases, rows, show)
    if commit:
        record["commit"] = commit
    text = json.dumps(record, indent=1)
    if as_json:
        click.echo(text)
    if output is not None:
        output.write_text(text + "\n")
