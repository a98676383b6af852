"""``qmoe-ep convert``: the order of packed weights."""

from __future__ import annotations

from typing import Literal

import click

from qmoe_ep.cli.main import debug_option, layout_option, model_argument

__all__ = ["command"]


@click.command("convert")
@model_argument
@click.argument("target", type=click.Path(dir_okay=False), metavar="OUT.onnx")
@click.option("--layout", required=True, type=click.Choice(["raw", "sm80"]), help="Order of the result's weights.")
@layout_option
@debug_option
def command(
    model: str, target: str, layout: Literal["raw", "sm80"], weights_layout: Literal["raw", "sm80"] | None
) -> None:
    """Write a copy of a model with its packed weights in raw or SM80 order; external data stays external."""
    from qmoe_ep import onnx as models

    changed = models.convert_layout(model, target, layout, weights_layout=weights_layout)
    click.echo(f"{target}: {len(changed)} tensors now in {layout} order")
