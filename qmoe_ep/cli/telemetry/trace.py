"""``qmoe-ep telemetry trace``: the experts of each row, and where two recordings part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from qmoe_ep.cli.main import debug_option, json_option
from qmoe_ep.cli.telemetry.source import Selection, file_argument, layer_options

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qmoe_ep.route_analysis import LayerHistory
    from qmoe_ep.route_trace import RouteTrace, TraceDifference

__all__ = ["command"]


@click.command("trace")
@file_argument()
@click.argument("other", type=click.Path(exists=True, dir_okay=False), required=False, metavar="[OTHER]")
@layer_options
@click.option(
    "--window", type=click.IntRange(min=0), default=None, help="The window of this epoch, instead of the last."
)
@click.option("--rows", type=click.IntRange(min=0), default=16, show_default=True, help="Rows to print, the last ones.")
@click.option("--ignore-order", is_flag=True, help="With OTHER: the same experts in another order are no difference.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), default=None, metavar="OUT.npz", help="Export the rows."
)
@json_option
@debug_option
def command(
    file: str,
    other: str | None,
    executor: int | None,
    node: int | None,
    window: int | None,
    rows: int,
    ignore_order: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Print the recorded experts of each row, in order of selection, or find the first row where two recordings part.

    Rows are numbered from the beginning of the window. margin is the smallest selected logit less the largest rejected
    one, where the recording has it. OUT.npz gets, for each layer, rows [n], experts [n, k] and margins [n], named like
    e1_n7_rows; e1 is left out for a producer of its own.
    """
    from qmoe_ep.cli.archive import write_archive
    from qmoe_ep.cli.files import output_path

    if other is not None and output is not None:
        raise click.UsageError("OUT.npz is for the rows of one recording; leave out OTHER.")
    chosen = Selection(executor, node)
    traces = _traces(file, chosen, window)
    if other is not None:
        _compare(file, traces, other, _traces(other, chosen, window), not ignore_order, as_json)
    elif output is not None:
        arrays: dict[str, NDArray[Any]] = {}
        for history, trace in traces:
            arrays[f"{history.key}_rows"], arrays[f"{history.key}_experts"] = trace.rows, trace.experts
            if trace.margins is not None:
                arrays[f"{history.key}_margins"] = trace.margins
        write_archive(output_path(output, "OUT.npz"), arrays)
        click.echo(f"{output}: {sum(len(trace.rows) for _, trace in traces)} rows of {len(traces)} layers")
    else:
        _print(file, traces, rows, as_json)


def _traces(path: str, chosen: Selection, window: int | None) -> list[tuple[LayerHistory, RouteTrace]]:
    """Of each layer that has one in its last window, or in that of the given epoch."""
    from qmoe_ep.cli.telemetry.source import read_histories
    from qmoe_ep.route_analysis import split_windows
    from qmoe_ep.route_trace import join_traces

    traces = []
    for history in read_histories(path, chosen):
        windows = [w for w in split_windows(history.snapshots) if window in (None, w[0].epoch)]
        trace = join_traces(windows[-1]) if windows else None
        if trace is not None:
            traces.append((history, trace))
    if not traces:
        place = "" if window is None else f" in window {window}"
        raise click.UsageError(f"{path}: no trace{place}; record in mode trace.")
    return traces


def _print(path: str, traces: list[tuple[LayerHistory, RouteTrace]], most: int, as_json: bool) -> None:
    from qmoe_ep.cli.output import print_json, print_table
    from qmoe_ep.route_analysis import layer_labels

    if as_json:
        layers = []
        for history, trace in traces:
            kept = slice(max(0, len(trace.rows) - most), None)
            margins = None if trace.margins is None else [_finite(margin) for margin in trace.margins[kept].tolist()]
            layers.append(
                {
                    "executor": history.executor,
                    "node": history.node,
                    "name": history.name,
                    "recorded_rows": len(trace.rows),
                    "rows": trace.rows[kept].tolist(),
                    "experts": trace.experts[kept].tolist(),
                    "margins": margins,
                }
            )
        print_json({"file": path, "layers": layers})
        return
    cells = []
    for label, (_, trace) in zip(layer_labels([history for history, _ in traces]), traces, strict=True):
        for place in range(max(0, len(trace.rows) - most), len(trace.rows)):
            margin = "-" if trace.margins is None else f"{trace.margins[place]:.4g}"
            experts = " ".join(map(str, trace.experts[place]))
            cells.append((label, str(trace.rows[place]), experts, margin))
    print_table(("layer", "row", "experts", "margin"), cells, right=(1, 3))


def _compare(
    path: str,
    traces: list[tuple[LayerHistory, RouteTrace]],
    other_path: str,
    others: list[tuple[LayerHistory, RouteTrace]],
    ordered: bool,
    as_json: bool,
) -> None:
    from qmoe_ep.cli.output import print_json, print_table
    from qmoe_ep.route_analysis import layer_labels
    from qmoe_ep.route_trace import first_difference

    found = {(history.executor, history.node): trace for history, trace in others}
    pairs = [(h, trace, found[h.executor, h.node]) for h, trace in traces if (h.executor, h.node) in found]
    if not pairs:
        raise click.UsageError(f"{path} and {other_path} have no layer in common.")
    compared = [(history, first_difference(first, second, ordered=ordered)) for history, first, second in pairs]
    if as_json:
        print_json({"a": path, "b": other_path, "layers": [_describe(*pair) for pair in compared]})
        return
    labels = layer_labels([history for history, _ in compared])
    print_table(
        ("layer", "rows compared", "differ", "first", "experts of A", "experts of B", "margin A", "margin B"),
        [_row(*pair) for pair in zip(labels, (difference for _, difference in compared), strict=True)],
        right=(1, 2, 3, 6, 7),
    )
    differing = [(d.row, label) for label, (_, d) in zip(labels, compared, strict=True) if d.row is not None]
    if differing:
        # The first layer of that row, in the order of the nodes.
        row, label = min(differing, key=lambda pair: pair[0])
        click.echo(f"The recordings part at row {row}, in layer {label}")
    else:
        click.echo("The recordings agree in every row that both have")


def _finite(margin: float | None) -> float | None:
    """What JSON can say."""
    return None if margin is None or not math.isfinite(margin) else margin


def _describe(history: LayerHistory, difference: TraceDifference) -> dict[str, Any]:
    return {
        "executor": history.executor,
        "node": history.node,
        "name": history.name,
        "compared": difference.compared,
        "differing": difference.differing,
        "row": difference.row,
        "a": list(difference.before),
        "b": list(difference.after),
        "same_set": difference.same_set,
        "margin_a": _finite(difference.margins[0]),
        "margin_b": _finite(difference.margins[1]),
    }


def _row(label: str, difference: TraceDifference) -> tuple[str, ...]:
    first, second = (" ".join(map(str, side)) or "-" for side in (difference.before, difference.after))
    margins = ("-" if margin is None else f"{margin:.4g}" for margin in difference.margins)
    row = "-" if difference.row is None else str(difference.row)
    return (label, str(difference.compared), str(difference.differing), row, first, second, *margins)
