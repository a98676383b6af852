"""``qmoe-ep telemetry show``: the load of each layer as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from qmoe_ep.cli.main import debug_option, json_option
from qmoe_ep.cli.telemetry.source import Selection, Window, file_argument, selection_options

if TYPE_CHECKING:
    from qmoe_ep.route_analysis import LayerLoad

__all__ = ["command"]


@click.command("show")
@file_argument()
@selection_options
@click.option("--top", type=click.IntRange(0, 64), default=4, show_default=True, help="Most used experts to name.")
@json_option
@debug_option
def command(
    file: str, executor: int | None, node: int | None, window: Window, merge: bool, top: int, as_json: bool
) -> None:
    """Print the load of each layer.

    \b
    experts   those that were selected, of all
    entropy   of the routes over experts, in bits, of what an even load has
    max/mean  load of the most used expert by the mean load; 1 is even
    CV        standard deviation of the load by its mean; 0 is even
    A + after a figure: a counter has reached its end, the true one is at least that.
    """
    from qmoe_ep.cli.output import print_json, print_table
    from qmoe_ep.cli.telemetry.source import read_loads
    from qmoe_ep.route_analysis import layer_labels

    loads = read_loads(file, Selection(executor, node, window, merge))
    layers = [_describe(load, top) for load in loads]
    if as_json:
        print_json({"file": file, "layers": layers})
        return
    columns = ("layer", "window", "rows", "experts", "dead", "entropy", "max/mean", "CV", "most used")
    print_table(columns, [_row(*pair) for pair in zip(layer_labels(loads), layers, strict=True)], right=range(2, 8))


def _describe(load: LayerLoad, top: int) -> dict[str, Any]:
    from qmoe_ep.route_analysis import load_figures

    figures = load_figures(load, top)
    return {
        "executor": load.executor,
        "node": load.node,
        "name": load.name,
        "epochs": list(load.epochs),
        "rows": load.rows,
        "routes": load.routes,
        "saturated": load.saturated,
        "num_experts": load.num_experts,
        "distinct": figures.distinct,
        "dead": list(figures.dead),
        "entropy_bits": figures.entropy,
        "max_over_mean": figures.max_over_mean,
        "variation": figures.variation,
        "top": [{"expert": expert, "share": share} for expert, share in figures.top],
    }


def _row(label: str, layer: dict[str, Any]) -> tuple[str, ...]:
    from math import log2

    from qmoe_ep.cli.output import number_text

    first, last = layer["epochs"]
    entropy = layer["entropy_bits"]
    return (
        label,
        str(first) if first == last else f"{first}–{last}",
        f"{layer['rows']:,}" + ("+" if layer["saturated"] else ""),
        f"{layer['distinct']}/{layer['num_experts']}",
        str(len(layer["dead"])),
        "-" if entropy is None else f"{entropy:.2f}/{log2(layer['num_experts']):.2f}",
        number_text(layer["max_over_mean"]),
        number_text(layer["variation"]),
        "  ".join(f"{top['expert']} {100 * top['share']:.1f}%" for top in layer["top"]) or "-",
    )
