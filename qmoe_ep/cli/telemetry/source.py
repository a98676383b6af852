"""Records of a file as commands want them: by layer, filtered, and summed over windows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import click

from qmoe_ep.errors import QMoEError
from qmoe_ep.route_analysis import LayerHistory, LayerLoad, continues, merge_executors, merge_windows
from qmoe_ep.route_telemetry import TelemetrySnapshot
from qmoe_ep.telemetry_export.records import read_records

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Selection",
    "Window",
    "counts_of",
    "file_argument",
    "layer_options",
    "matching_counts",
    "parse_window",
    "printable",
    "read_histories",
    "read_loads",
    "select_loads",
    "selection_options",
]

Command = TypeVar("Command", bound=Callable[..., Any])
Window: TypeAlias = Literal["all", "last"] | int


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records a command looks at.

    Attributes
    ----------
    executor, node : only this one, if given
    window : all of them together, the last of each layer, or the one of this epoch
    merge : executors that have the same node count as one
    """

    executor: int | None = None
    node: int | None = None
    window: Window = "all"
    merge: bool = False


def parse_window(context: click.Context, parameter: click.Parameter, value: str) -> Window:
    """Read ``all``, ``last`` or the number of a window."""
    if value in ("all", "last"):
        return "all" if value == "all" else "last"
    if not re.fullmatch(r"[0-9]{1,20}", value):
        raise click.BadParameter(f"expected all, last or the number of a window, got {value!r}", context, parameter)
    return int(value)


def file_argument(name: str = "file", metavar: str = "FILE") -> Callable[[Command], Command]:
    """Give a command the path of a file of records."""
    return click.argument(name, type=click.Path(exists=True, dir_okay=False), metavar=metavar)


def layer_options(command: Command) -> Command:
    """Give a command the options ``--executor`` and ``--node``."""
    command = click.option("--node", type=int, default=None, help="Only the layer of this number.")(command)
    return click.option("--executor", type=int, default=None, help="Only this executor.")(command)


def selection_options(command: Command) -> Command:
    """Give a command the options that make a :class:`Selection`."""
    command = click.option(
        "--merge", is_flag=True, help="Count executors that have the same layer as one, such as prefill and decode."
    )(command)
    command = click.option(
        "--window",
        callback=parse_window,
        default="all",
        show_default=True,
        metavar="all|last|N",
        help="All windows together, the last one of each layer, or the one of this epoch.",
    )(command)
    return layer_options(command)


def read_histories(path: str, selection: Selection, *, every: bool = True) -> list[LayerHistory]:
    """Read the records of the chosen layers, by executor and node.

    Parameters
    ----------
    every : keep all records, instead of the last one of each window

    Raises
    ------
    QMoEError : not a file of records, or none of the chosen layers in it.
    """
    names: dict[tuple[int | None, int], str] = {}
    found: dict[tuple[int | None, int], list[TelemetrySnapshot]] = {}
    for record in read_records(path):
        name, snapshot = record.name, record.snapshot
        if selection.executor not in (None, snapshot.executor) or selection.node not in (None, snapshot.node):
            continue
        key = (snapshot.executor, snapshot.node)
        names[key] = printable(name) or names.get(key, "")
        layer = found.setdefault(key, [])
        if not every and layer and continues(layer[-1], snapshot):
            layer.pop()
        layer.append(snapshot)
    if not found:
        chosen = [f"{what} {n}" for what in ("executor", "node") if (n := getattr(selection, what)) is not None]
        raise QMoEError(f"{path}: no record" + (f" of {', '.join(chosen)}" if chosen else ""))
    order = sorted(found, key=lambda key: (-1 if key[0] is None else key[0], key[1]))
    return [LayerHistory(*key, names[key], tuple(found[key])) for key in order]


def read_loads(path: str, selection: Selection) -> list[LayerLoad]:
    """Read and sum the chosen windows of the chosen layers.

    Raises
    ------
    QMoEError : not a file of records, or nothing chosen in it.
    """
    return select_loads(path, read_histories(path, selection, every=False), selection)


def select_loads(path: str, histories: Sequence[LayerHistory], selection: Selection) -> list[LayerLoad]:
    """Sum the chosen windows; layers that don't have the chosen window are left out.

    Raises
    ------
    QMoEError : no layer has the window.
    """
    epoch = selection.window if isinstance(selection.window, int) else None
    if epoch is not None:
        histories = [h for h in histories if any(s.epoch == epoch for s in h.snapshots)]
        if not histories:
            raise QMoEError(f"{path}: no layer has a window {epoch}")
    loads = [merge_windows(history, epoch, last=selection.window == "last") for history in histories]
    return merge_executors(loads) if selection.merge else loads


def printable(name: str) -> str:
    """A name that a terminal can be given: without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def counts_of(load: LayerLoad, path: str) -> NDArray[np.uint64]:
    """The counts of a load, [E].

    Raises
    ------
    QMoEError : only the experts seen were recorded.
    """
    if load.counts is None:
        raise QMoEError(f"{path}: layer {load.label} has no counts; record in mode counts or trace")
    return load.counts


def matching_counts(loads: Sequence[LayerLoad], others: Sequence[LayerLoad], path: str) -> list[NDArray[np.uint64]]:
    """Counts of the same layers of another recording, at ``path``.

    Raises
    ------
    QMoEError : it lacks one of the layers.
    """
    found = {(load.executor, load.node, load.num_experts): load for load in others}
    counts = []
    for load in loads:
        other = found.get((load.executor, load.node, load.num_experts))
        if other is None:
            raise QMoEError(f"{path}: no layer {load.label} of {load.num_experts} experts")
        counts.append(counts_of(other, path))
    return counts
