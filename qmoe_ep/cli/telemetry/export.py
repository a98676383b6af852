"""``qmoe-ep telemetry export``: records as CSV or NumPy arrays."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from qmoe_ep.cli.main import debug_option
from qmoe_ep.cli.telemetry.source import Selection, file_argument, layer_options

if TYPE_CHECKING:
    from qmoe_ep.route_analysis import LayerHistory

__all__ = ["command"]

_COLUMNS = ("unix_time", "executor", "node", "name", "epoch", "rows", "routes", "saturated", "expert", "count")


@click.command("export")
@file_argument()
@click.option("--csv", "table", type=click.Path(dir_okay=False), default=None, metavar="OUT.csv", help="Write a table.")
@click.option("--npz", type=click.Path(dir_okay=False), default=None, metavar="OUT.npz", help="Write NumPy arrays.")
@layer_options
@debug_option
def command(file: str, table: str | None, npz: str | None, executor: int | None, node: int | None) -> None:
    """Write every record as CSV or NumPy arrays.

    OUT.csv has one line for each expert that a record has seen; count is empty where only the experts were recorded.
    OUT.npz has for each layer unix_time, epoch, rows, routes, saturated [n] and counts [n, experts], or seen
    [n, experts], named like e1_n7_counts; e1 is left out for a producer of its own.
    """
    from qmoe_ep.cli.archive import write_archive
    from qmoe_ep.cli.files import output_path, whole_file
    from qmoe_ep.cli.telemetry.source import read_histories

    if table is None and npz is None:
        raise click.UsageError("Give --csv OUT.csv, --npz OUT.npz or both.")
    histories = read_histories(file, Selection(executor, node))
    records = sum(len(history.snapshots) for history in histories)
    if npz is not None:
        write_archive(output_path(npz, "OUT.npz"), dict(_arrays(histories)))
        click.echo(f"{npz}: {records} records of {len(histories)} layers")
    if table is not None:
        with whole_file(output_path(table, "OUT.csv")) as target, io.TextIOWrapper(target, "utf-8", newline="") as text:
            writer = csv.writer(text)
            writer.writerow(_COLUMNS)
            writer.writerows(_lines(histories))
        click.echo(f"{table}: {records} records of {len(histories)} layers")


def _lines(histories: Sequence[LayerHistory]) -> Iterator[tuple[Any, ...]]:
    for history in histories:
        executor = "" if history.executor is None else history.executor
        for s in history.snapshots:
            record = (s.unix_time, executor, s.node, history.name, s.epoch, s.rows, s.routes, int(s.saturated))
            for expert in s.experts:
                yield (*record, expert, "" if s.counts is None else int(s.counts[expert]))


def _arrays(histories: Sequence[LayerHistory]) -> Iterator[tuple[str, Any]]:
    import numpy as np

    from qmoe_ep.errors import QMoEError

    for history in histories:
        snapshots = history.snapshots
        if len({s.num_experts for s in snapshots}) != 1:
            raise QMoEError(f"layer {history.label}: its records have different numbers of experts; export them as CSV")
        yield f"{history.key}_unix_time", np.array([s.unix_time for s in snapshots], np.float64)
        for name in ("epoch", "rows", "routes"):
            yield f"{history.key}_{name}", np.array([getattr(s, name) for s in snapshots], np.uint64)
        yield f"{history.key}_saturated", np.array([s.saturated for s in snapshots], np.bool_)
        counts = [s.counts for s in snapshots if s.counts is not None]
        if len(counts) == len(snapshots):
            yield f"{history.key}_counts", np.stack(counts)
        else:
            yield f"{history.key}_seen", np.stack([s.bitmap for s in snapshots])
