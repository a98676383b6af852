"""``qmoe-ep telemetry plot``: the load of all layers as a picture."""

from __future__ import annotations

import click

from qmoe_ep.cli.main import debug_option
from qmoe_ep.cli.telemetry.source import Selection, Window, file_argument, selection_options

__all__ = ["command"]


@click.command("plot")
@file_argument()
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    required=True,
    metavar="PICTURE",
    help="The picture; its name ends in .png, .svg or .pdf.",
)
@selection_options
@debug_option
def command(file: str, output: str, executor: int | None, node: int | None, window: Window, merge: bool) -> None:
    """Draw three things: the load of each expert of each layer, how few experts take how much of it, and how the most
    used eighth of the experts drifts.

    The drift needs several records of a layer; it is always that of all windows.
    """
    from qmoe_ep.cli.files import output_path
    from qmoe_ep.cli.telemetry.source import read_histories, select_loads
    from qmoe_ep.route_plots import draw_load, save_picture

    path = output_path(output, "PICTURE")
    selection = Selection(executor, node, window, merge)
    histories = read_histories(file, selection)
    loads = [load for load in select_loads(file, histories, selection) if load.counts is not None]
    if not loads:
        raise click.UsageError(f"{file}: no layer has counts; record in mode counts or trace.")
    save_picture(draw_load(loads, histories), path)
    click.echo(f"{output}: {len(loads)} layers")
