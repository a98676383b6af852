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
@click.option(
    "--judged-by",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Also say how even the placement is for another recording, such as the next day's.",
)
@selection_options
@json_option
@debug_option
def command(
    file: str,
    gpus: int,
    redundant: int,
    judged_by: str | None,
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
    judged     the balance for the recording that --judged-by names
    copied     experts that are on several GPUs, the most copied first
    """
    from qmoe_ep.cli.output import print_json, print_table
    from qmoe_ep.cli.telemetry.source import counts_of, matching_counts, read_loads
    from qmoe_ep.placement import contiguous_balance, place_experts
    from qmoe_ep.route_analysis import layer_labels

    loads = read_loads(file, Selection(executor, node, window, merge))
    others = read_loads(judged_by, Selection(executor, node, merge=merge)) if judged_by else None
    judges = [None] * len(loads) if others is None else matching_counts(loads, others, str(judged_by))
    plans = []
    for load, judge in zip(loads, judges, strict=True):
        counts = counts_of(load, file)
        placement = place_experts(counts, gpus, redundant)
        figures = {"balance": placement.balance, "in_order": contiguous_balance(counts, gpus), "bound": placement.bound}
        if judge is not None:
            figures["judged"] = placement.balance_for(judge)
        plans.append((placement, figures))
    total = _total(plans)
    if as_json:
        layers = [_describe(load, *plan) for load, plan in zip(loads, plans, strict=True)]
        print_json({"file": file, "gpus": gpus, "redundant": redundant, "total": total, "layers": layers})
        return
    rows = [
        (label, *(f"{figure:.3f}" for figure in figures.values()), _copied(placement))
        for label, (placement, figures) in zip(layer_labels(loads), plans, strict=True)
    ]
    columns = [name.replace("_", " ") for name in total]
    print_table(("layer", *columns, "copied"), rows, right=range(1, len(columns) + 1))
    click.echo(
        f"Over all layers, the busiest GPU of each gets {total['balance']:.3f} times the mean load"
        + (f" ({total['judged']:.3f} times as judged)" if judged_by else "")
        + f"; {total['in_order']:.3f} times with experts in order"
    )


def _total(plans: list[tuple[Placement, dict[str, float]]]) -> dict[str, float]:
    """Figures of layers that run one after another: means, weighted by the layers' loads."""
    weights = [float(placement.loads.sum()) for placement, _ in plans]
    whole = sum(weights)
    # Nothing recorded: every layer counts alike.
    shares = [weight / whole if whole else 1 / len(plans) for weight in weights]
    names = plans[0][1]
    return {
        name: max(1.0, sum(s * figures[name] for s, (_, figures) in zip(shares, plans, strict=True))) for name in names
    }


def _describe(load: LayerLoad, placement: Placement, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "executor": load.executor,
        "node": load.node,
        "name": load.name,
        "num_experts": load.num_experts,
        **figures,
        "replicas": placement.replicas.tolist(),
        "gpus": [list(held) for held in placement.gpus],
        "loads": placement.loads.tolist(),
    }


def _copied(placement: Placement, most: int = 6) -> str:
    """``"17 ×3, 5 ×2 and 9 more"``."""
    replicas = placement.replicas
    copied = [int(expert) for expert in (-replicas).argsort(kind="stable") if replicas[expert] > 1]
    text = ", ".join(f"{expert} ×{replicas[expert]}" for expert in copied[:most])
    return (text or "-") + (f" and {len(copied) - most} more" if len(copied) > most else "")
