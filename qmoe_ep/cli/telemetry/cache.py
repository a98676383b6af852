"""``qmoe-ep telemetry cache``: what a memory for some of the experts would serve."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

import click

from qmoe_ep.cli.main import debug_option, json_option
from qmoe_ep.cli.telemetry.source import Selection, Window, file_argument, selection_options

if TYPE_CHECKING:
    from qmoe_ep.route_analysis import LayerLoad

__all__ = ["command"]


_UNITS = {"b": 1, **{f"{unit}b": 1000**i for i, unit in enumerate("kmgt", 1)}}
_UNITS |= {f"{unit}ib": 1024**i for i, unit in enumerate("kmgt", 1)}


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Read bytes with an optional unit."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([kmgt]?i?b)?", value.strip().lower())
    if match is None or (unit := match[2] or "b") not in _UNITS:
        raise click.BadParameter(f"expected bytes such as 4096, 24GiB or 1.5GB, got {value!r}", context, parameter)
    return int(Decimal(match[1]) * _UNITS[unit])


@click.command("cache")
@file_argument()
@click.option(
    "--bytes",
    "budget",
    callback=_bytes,
    required=True,
    metavar="BYTES",
    help="Room for experts of all layers: 4096, 24GiB, 1.5GB.",
)
@click.option("--expert-bytes", callback=_bytes, metavar="BYTES", help="What one expert takes, in every layer.")
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    metavar="MODEL.onnx",
    help="Take the bytes of an expert of each layer from the model, whose QMoE nodes are numbered from 0.",
)
@click.option(
    "--chosen-from",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Choose the resident experts by this recording, such as yesterday's, instead of by FILE itself.",
)
@click.option("--even", is_flag=True, help="Give every layer the same number of bytes.")
@selection_options
@json_option
@debug_option
def command(
    file: str,
    budget: int,
    expert_bytes: int | None,
    model: str | None,
    chosen_from: str | None,
    even: bool,
    executor: int | None,
    node: int | None,
    window: Window,
    merge: bool,
    as_json: bool,
) -> None:
    """Say which share of the routes goes to experts that fit a number of bytes.

    The experts with the most routes per byte are resident.

    \b
    hit rate  share of the routes that go to resident experts
    uniform   what it would be if every expert were used alike
    best      of as many experts of this layer chosen in hindsight; for the total, a bound for any choice
    """
    from qmoe_ep.cli.output import bytes_text, percent_text, print_json, print_table
    from qmoe_ep.cli.telemetry.source import counts_of, matching_counts, read_loads
    from qmoe_ep.placement import choose_resident, hit_rates
    from qmoe_ep.route_analysis import layer_labels

    loads = read_loads(file, Selection(executor, node, window, merge))
    sizes = _expert_sizes(loads, expert_bytes, model)
    counts = [counts_of(load, file) for load in loads]
    basis = counts
    if chosen_from is not None:
        basis = matching_counts(loads, read_loads(chosen_from, Selection(executor, node, merge=merge)), chosen_from)
    resident = choose_resident(basis, sizes, budget, even=even)
    rates = hit_rates(counts, resident, sizes, budget)
    if as_json:
        shares = {"hit_rate": rates.hit_rate, "uniform": rates.uniform, "best": rates.best}
        layers = [
            {
                "executor": load.executor,
                "node": load.node,
                "name": load.name,
                "num_experts": load.num_experts,
                "expert_bytes": size,
                "resident": mine.nonzero()[0].tolist(),
                "bytes": layer.nbytes,
                "hit_rate": layer.hit_rate,
                "uniform": layer.uniform,
                "best": layer.best,
            }
            for load, size, mine, layer in zip(loads, sizes, resident, rates.layers, strict=True)
        ]
        print_json({"file": file, "budget": budget, "bytes": rates.nbytes, **shares, "layers": layers})
        return
    rows = [
        (
            label,
            f"{layer.resident}/{load.num_experts}",
            bytes_text(layer.nbytes),
            *map(percent_text, (layer.hit_rate, layer.uniform, layer.best)),
        )
        for label, load, layer in zip(layer_labels(loads), loads, rates.layers, strict=True)
    ]
    number, of = sum(layer.resident for layer in rates.layers), sum(load.num_experts for load in loads)
    totals = map(percent_text, (rates.hit_rate, rates.uniform, rates.best))
    rows.append(("all", f"{number}/{of}", bytes_text(rates.nbytes), *totals))
    print_table(("layer", "resident", "bytes", "hit rate", "uniform", "best"), rows, right=range(1, 6))


def _expert_sizes(loads: Sequence[LayerLoad], expert_bytes: int | None, model: str | None) -> list[int]:
    """Bytes of an expert of each layer."""
    if (expert_bytes is None) == (model is None):
        raise click.UsageError("Give either --expert-bytes or --model, to tell what one expert takes.")
    if expert_bytes is not None:
        if expert_bytes < 1:
            raise click.UsageError("--expert-bytes: expected at least 1.")
        return [expert_bytes] * len(loads)
    from qmoe_ep import onnx as models
    from qmoe_ep.cli.nodes import model_nodes

    nodes = {entry.node_id: entry for entry in model_nodes(models.load_model(str(model)))}
    sizes = []
    for load in loads:
        entry = nodes.get(load.node)
        if entry is None or entry.experts is None:
            reason = entry.reason if entry else f"its QMoE nodes are 0 to {len(nodes) - 1}"
            raise click.UsageError(f"{model}: no sizes for node {load.node}: {reason}.")
        if entry.experts.num_experts != load.num_experts:
            raise click.UsageError(
                f"{model}: node {load.node} has {entry.experts.num_experts} experts, the recording {load.num_experts}."
            )
        sizes.append(sum(matrix.expert_bytes for matrix in entry.experts.matrices))
    return sizes
