"""``qmoe-ep telemetry``: what people do with the records of route telemetry."""

from __future__ import annotations

import click

from qmoe_ep.cli.lazy import LazyGroup
from qmoe_ep.cli.main import debug_option

__all__ = ["command"]

_COMMANDS = {
    "show": "Print the load of each layer.",
    "plot": "Draw the load of all layers, and how it changes, as a picture.",
    "watch": "Show a file that grows, or a running exporter, in the terminal.",
    "diff": "Say what moved between two recordings or two windows.",
    "trace": "Print or export the experts of each row; find where two traces part.",
    "plan": "Balance the experts of each layer over GPUs.",
    "cache": "Say which share of the routes a memory for some of the experts serves.",
    "export": "Write the records as CSV or NumPy arrays.",
    "serve": "Offer the records of a file to Prometheus.",
}


@click.group("telemetry", cls=LazyGroup, package=__name__, summaries=_COMMANDS, no_args_is_help=False)
@debug_option
def command() -> None:
    """Read what route telemetry recorded: which experts a service really uses."""
