"""``qmoe-ep quantize``: float MoE nodes of a model become QMoE nodes."""

from __future__ import annotations

import os
from pathlib import Path

import click

from qmoe_ep.cli.main import debug_option

__all__ = ["command"]


@click.command("quantize")
@click.argument("source", type=click.Path(exists=True, dir_okay=False), metavar="FLOAT.onnx")
@click.argument("target", type=click.Path(dir_okay=False), metavar="OUT.onnx")
@click.option(
    "--format",
    "quant_type",
    type=click.Choice(["int", "fp4", "nvfp4", "fp8"]),
    default="int",
    show_default=True,
    help="Numbers of the weights; --bits and --symmetric are of int, --block-size of int and fp8.",
)
@click.option("--bits", type=click.Choice(["1", "2", "3", "4", "8"]), default="4", show_default=True)
@click.option(
    "--block-size",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    help="Weights that share a scale: a power of two of at least 16, or 0 for one scale per row.",
)
@click.option(
    "--symmetric/--asymmetric", default=True, show_default=True, help="Whether to do without stored zero points."
)
@debug_option
def command(source: str, target: str, quant_type: str, bits: str, block_size: int, symmetric: bool) -> None:
    """Quantize the float MoE nodes of a model; external data stays external."""
    from qmoe_ep import onnx as models
    from qmoe_ep.cli.files import output_path
    from qmoe_ep.cli.output import bytes_text, progress_bar

    if output_path(target, "OUT.onnx").exists() and os.path.samefile(source, target):
        raise click.UsageError("OUT.onnx is FLOAT.onnx; give another name.")
    with progress_bar("quantizing") as update:
        nodes = models.quantize_model(
            source,
            target,
            bits=int(bits),
            block_size=block_size,
            symmetric=symmetric,
            quant_type=quant_type,
            progress=update,
        )
    kind = f"{bits} bits" if quant_type == "int" else quant_type
    size = bytes_text(Path(target).stat().st_size)
    click.echo(f"{target}: {len(nodes)} QMoE nodes of {kind}; {size} without external data")
