"""``qmoe-ep telemetry serve``: a file of records for Prometheus."""

from __future__ import annotations

import time

import click

from qmoe_ep.cli.main import debug_option
from qmoe_ep.cli.telemetry.source import file_argument

__all__ = ["command"]


@click.command("serve")
@file_argument()
@click.option("--port", type=click.IntRange(0, 65535), default=9095, show_default=True, help="0 for any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--interval", type=click.FloatRange(0.05, 3600), default=1.0, show_default=True, help="Seconds between reads."
)
@click.option("--updates", type=click.IntRange(min=1), default=None, help="Stop after so many, instead of by Ctrl-C.")
@click.option(
    "--expert-series",
    type=click.IntRange(min=0),
    default=20_000,
    show_default=True,
    help="Most time series of one expert each; with more experts, or 0, none is offered.",
)
@debug_option
def command(file: str, port: int, host: str, interval: float, updates: int | None, expert_series: int) -> None:
    """Offer the last record of each layer of a file, which may grow, as Prometheus metrics."""
    from qmoe_ep.telemetry_export.prometheus import SnapshotCollector, serve_metrics
    from qmoe_ep.telemetry_export.records import RecordFollower
    from qmoe_ep.telemetry_export.schema import NamedSnapshot

    latest: dict[tuple[int | None, int], NamedSnapshot] = {}
    with RecordFollower(file) as follower:

        def read() -> None:
            for record in follower.poll():
                latest[record.snapshot.executor, record.snapshot.node] = record

        read()
        port, stop = serve_metrics(SnapshotCollector(lambda: list(latest.values()), expert_series), port, host)
        try:
            click.echo(f"{len(latest)} layers of {file} at http://{host}:{port}/metrics")
            count = 1
            while updates is None or count < updates:
                time.sleep(interval)
                read()
                count += 1
        except KeyboardInterrupt:
            # Ctrl-C is how it ends.
            pass
        finally:
            stop()
