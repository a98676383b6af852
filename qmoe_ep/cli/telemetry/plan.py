"""``qmoe-ep telemetry plan``: a balanced placement of experts on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from qmoe_ep.cli.main import debug_option, json_option
from qmoe_ep.cli.telemetry.source import Selection, Window, file_argument, selection_options

if TYPE_CHECKING:
    from qmoe_ep.placement import Placement
    from qmoe_ep.route_analysis import LayerLoad

__all__ = ["command"]


@click.command("plan")
@file_argument()
@click.option("--gpus", type=click.IntRange(1, 1024), required=True, help="GPUs that share the experts of a layer.")
@click.option(
    "--redundant",
    type=click.IntRange(0, 4096),
    default=0,
    show_default=True,
    help="Copies of hot experts in each layer, beyond the first of each expert.",
)
@selection_options
@json_option
@debug_option
def command(
    file: str,
    gpus: int,
    redundant: int,
    executor: int | None,
    node: int | None,
    window: Window,
    merge: bool,
    as_json: bool,
) -> None:
    """Balance the experts of each layer over GPUs by their recorded load.

    Hot experts are copied first, if copies are allowed; then experts go, hottest first, to the least loaded GPU with
    room; then pairs are exchanged as long as that helps. --json prints which GPU holds which experts.

    \b
    balance    load of the busiest GPU by the mean load; 1 is even
    in order   the same for experts in blocks by number, without copies
    bound      no placement of these copies in the same room is better
    copied     experts that are on several GPUs, the most copied first
    """
    from qmoe_ep.cli.output import print_json, print_table
    from qmoe_ep.cli.telemetry.source import read_loads
    from qmoe_ep.placement import contiguous_balance, place_experts
    from qmoe_ep.route_analysis import layer_labels

    plans = []
    for load in read_loads(file, Selection(executor, node, window, merge)):
        if load.counts is None:
            raise click.UsageError(f"{file}: layer {load.label} has no counts; record in mode counts or trace.")
        plans.append((load, place_experts(load.counts, gpus, redundant), contiguous_balance(load.counts, gpus)))
    total = _total(plans)
    if as_json:
        layers = [_describe(*plan) for plan in plans]
        print_json({"file": file, "gpus": gpus, "redundant": redundant, "total": total, "layers": layers})
        return
    rows = [
        (label, *map(_balance_text, (placement.balance, in_order, placement.bound)), _copied(placement))
        for label, (_, placement, in_order) in zip(layer_labels([load for load, _, _ in plans]), plans, strict=True)
    ]
    print_table(("layer", "balance", "in order", "bound", "copied"), rows, right=range(1, 4))
    click.echo(
        f"Over all layers, the busiest GPU of each gets {total['balance']:.3f} times the mean load; "
        f"{total['in_order']:.3f} times with experts in order"
    )


def _total(plans: list[tuple[LayerLoad, Placement, float]]) -> dict[str, float]:
    """Balance of layers that run one after another: the sum of the largest loads by that of the mean loads."""
    means = [float(placement.loads.mean()) for _, placement, _ in plans]
    whole = sum(means) or 1.0
    planned = sum(mean * placement.balance for mean, (_, placement, _) in zip(means, plans, strict=True))
    in_order = sum(mean * balance for mean, (_, _, balance) in zip(means, plans, strict=True))
    return {"balance": max(1.0, planned / whole), "in_order": max(1.0, in_order / whole)}


def _describe(load: LayerLoad, placement: Placement, in_order: float) -> dict[str, Any]:
    return {
        "executor": load.executor,
        "node": load.node,
        "name": load.name,
        "num_experts": load.num_experts,
        "balance": placement.balance,
        "in_order": in_order,
        "bound": placement.bound,
        "replicas": placement.replicas.tolist(),
        "gpus": [list(held) for held in placement.gpus],
        "loads": placement.loads.tolist(),
    }


def _balance_text(balance: float) -> str:
    return f"{balance:.3f}"


def _copied(placement: Placement, most: int = 6) -> str:
    """``"17 ×3, 5 ×2 and 9 more"``."""
    replicas = placement.replicas
    copied = [int(expert) for expert in (-replicas).argsort(kind="stable") if replicas[expert] > 1]
    text = ", ".join(f"{expert} ×{replicas[expert]}" for expert in copied[:most])
    return (text or "-") + (f" and {len(copied) - most} more" if len(copied) > most else "")
