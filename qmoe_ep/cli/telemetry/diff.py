"""``qmoe-ep telemetry diff``: what moved between two recordings or two windows."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from qmoe_ep.cli.main import debug_option, json_option
from qmoe_ep.cli.telemetry.source import Selection, Window, file_argument, layer_options, parse_window

if TYPE_CHECKING:
    from qmoe_ep.route_analysis import LayerLoad, LoadDifference

__all__ = ["command"]


@click.command("diff")
@file_argument("before", "A")
@file_argument("after", "B")
@click.option("--window-a", callback=parse_window, default="all", show_default=True, metavar="all|last|N", help="Of A.")
@click.option("--window-b", callback=parse_window, default="all", show_default=True, metavar="all|last|N", help="Of B.")
@layer_options
@click.option("--top", type=click.IntRange(0, 64), default=4, show_default=True, help="Experts to name.")
@json_option
@debug_option
def command(
    before: str,
    after: str,
    window_a: Window,
    window_b: Window,
    executor: int | None,
    node: int | None,
    top: int,
    as_json: bool,
) -> None:
    """Say what moved between two recordings, or two windows of one (give the file twice).

    \b
    moved     share of the routes that went to another expert
    noise     what that would be by chance alone, if nothing had changed
    hot kept  share of the most used eighth of A's experts that is in that of B
    new/gone  experts selected only in B, only in A
    """
    from qmoe_ep.cli.output import percent_text, print_json, print_table
    from qmoe_ep.cli.telemetry.source import read_loads
    from qmoe_ep.route_analysis import compare_loads, layer_labels

    first = {_key(load): load for load in read_loads(before, Selection(executor, node, window_a))}
    second = {_key(load): load for load in read_loads(after, Selection(executor, node, window_b))}
    differences = [(load, compare_loads(first[key], load)) for key, load in second.items() if key in first]
    alone = {
        "only_in_a": [load.label for key, load in first.items() if key not in second],
        "only_in_b": [load.label for key, load in second.items() if key not in first],
    }
    changed = [(load, difference) for load, difference in differences if not difference.empty]
    if as_json:
        layers = [_describe(load, difference, top) for load, difference in changed]
        print_json({"a": before, "b": after, "compared": len(differences), **alone, "layers": layers})
        return
    if changed:
        rows = [
            (
                label,
                *map(percent_text, (d.moved, d.noise, d.hot_kept)),
                f"{len(d.appeared)}/{len(d.vanished)}",
                "  ".join(f"{m.expert} {percent_text(m.before)}→{percent_text(m.after)}" for m in d.experts[:top])
                or "-",
            )
            for label, (_, d) in zip(layer_labels([load for load, _ in changed]), changed, strict=True)
        ]
        columns = ("layer", "moved", "noise", "hot kept", "new/gone", "largest changes")
        print_table(columns, rows, right=range(1, 5))
    click.echo(f"{len(changed)} of {len(differences)} layers differ")
    for name, labels in (("A", alone["only_in_a"]), ("B", alone["only_in_b"])):
        if labels:
            click.echo(f"only in {name}: {', '.join(labels)}")


def _key(load: LayerLoad) -> tuple[int | None, int]:
    return load.executor, load.node


def _describe(load: LayerLoad, difference: LoadDifference, top: int) -> dict[str, Any]:
    described = asdict(difference)
    return {
        "executor": load.executor,
        "node": load.node,
        "name": load.name,
        **described,
        "experts": described["experts"][:top],
        "changed_experts": len(difference.experts),
    }
