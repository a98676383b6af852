"""``qmoe-ep telemetry watch``: a live view in the terminal."""

from __future__ import annotations

import time

import click

from qmoe_ep.cli.main import debug_option
from qmoe_ep.errors import QMoEError

__all__ = ["command"]


@click.command("watch")
@click.argument("source", metavar="FILE|URL")
@click.option(
    "--interval", type=click.FloatRange(0.05, 3600), default=1.0, show_default=True, help="Seconds between updates."
)
@click.option("--updates", type=click.IntRange(min=1), default=None, help="Stop after so many, instead of by Ctrl-C.")
@click.option("--recent", is_flag=True, help="Show what came since the record before, instead of the whole window.")
@debug_option
def command(source: str, interval: float, updates: int | None, recent: bool) -> None:
    """Show in the terminal what a file that grows, or the endpoint of an exporter, says of each layer.

    Each layer has a strip of bars, one for each expert, or for a few of them where the terminal is narrow: the height
    is the load by the mean load of the layer. If not all layers fit, those with the largest max/mean are shown.
    """
    from rich.console import Console
    from rich.live import Live

    from qmoe_ep.cli.telemetry.board import Board
    from qmoe_ep.cli.telemetry.feeds import open_feed

    console = Console(highlight=False)
    board = Board(source, recent=recent)
    with open_feed(source) as poll, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        count = 0
        try:
            while updates is None or count < updates:
                if count:
                    time.sleep(interval)
                try:
                    for reading in poll():
                        board.update(reading)
                    board.problem = ""
                except QMoEError as error:
                    # An endpoint that restarts comes back; one that never was there is an error.
                    if not count:
                        raise
                    board.problem = str(error)
                live.update(board.draw(console.width, console.height), refresh=True)
                count += 1
        except KeyboardInterrupt:
            # Ctrl-C is how a view ends.
            pass
    if console.is_terminal:
        console.print(board.draw(console.width, console.height))
