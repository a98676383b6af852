"""A group of commands, each in a module that is imported when the command is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """Commands that are imported when used; help of the group imports none.

    Parameters
    ----------
    package : module ``{package}.{name}`` has the command as ``command``
    summaries : one line for each name, in the order of the help
    """

    def __init__(self, *arguments: Any, package: str, summaries: Mapping[str, str], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._package, self._summaries = package, summaries

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self._summaries)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self._summaries:
            return None
        command = importlib.import_module(f"{self._package}.{name}").command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries.items()))
