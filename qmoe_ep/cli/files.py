"""Files that commands write: completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

__all__ = ["output_path", "whole_file"]


def output_path(path: str, name: str) -> Path:
    """Check that a file can be written there before any work is done; ``name`` is that of the parameter.

    Raises
    ------
    click.UsageError : its folder doesn't exist.
    """
    if not Path(path).absolute().parent.is_dir():
        raise click.UsageError(f"{name} {path}: its folder doesn't exist.")
    return Path(path)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes its name once everything is written; an error leaves nothing behind."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
