"""How commands print: tables, JSON, progress. Colour follows the terminal and ``NO_COLOR``."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

__all__ = ["bytes_text", "number_text", "percent_text", "print_json", "print_table", "progress_bar"]

_FILE_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""


def print_json(value: Any) -> None:
    """Print a value of plain types as JSON."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print rows of text under column heads; long cells wrap. Columns whose number is in ``right`` are of figures."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=_FILE_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="right" if number in right else "left")
    for row in rows:
        # Names come from files; they are text, not markup.
        table.add_row(*map(Text, row))
    console.print(table)


@contextlib.contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on standard error, where that is a terminal; yields ``update(done, total, what)``."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(doing, total=None)

        def update(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{doing} {escape(what)}")

        yield update


def bytes_text(count: int) -> str:
    """Spell a number of bytes with three digits: ``"1.50 MiB"``."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.3g} {units[0]}"


def number_text(value: float | None) -> str:
    """Spell a figure with two decimals; ``"-"`` for None."""
    return "-" if value is None else f"{value:.2f}"


def percent_text(share: float | None) -> str:
    """Spell a share, 0 to 1, as ``"12.3%"``; ``"-"`` for None."""
    return "-" if share is None else f"{100 * share:.1f}%"
