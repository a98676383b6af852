"""Records of a file, one JSON object a line, which may come from anywhere: checked before they become snapshots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qmoe_ep.errors import QMoEError
from qmoe_ep.route_record import MAX_COUNT
from qmoe_ep.route_telemetry import TelemetrySnapshot

__all__ = ["parse_line", "read_records", "record_to_snapshot"]

MOST_EXPERTS = 2**20
"""Experts of a record at most, so that a short line can't ask for much memory."""
_COUNT_FIELDS = ("epoch", "rows", "routes", "lost_rows")


def read_records(path: str) -> Iterator[tuple[str, TelemetrySnapshot]]:
    """Read the layer's name and the snapshot of each line; a last line that was cut off is left out.

    Raises
    ------
    QMoEError : a line that is no record.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield parse_line(line, f"{path}, line {number}")


def parse_line(line: bytes, place: str) -> tuple[str, TelemetrySnapshot]:
    """Read one record; ``place`` is for errors.

    Raises
    ------
    QMoEError : it is none.
    """
    try:
        return record_to_snapshot(json.loads(line))
    except QMoEError as error:
        raise QMoEError(f"{place}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise QMoEError(f"{place}: not a record: {error}") from error


def record_to_snapshot(values: Any) -> tuple[str, TelemetrySnapshot]:
    """Check the values of a record: those of :meth:`TelemetrySnapshot.to_dict` and a ``name``.

    Raises
    ------
    QMoEError : a value of another type, or out of range.
    """
    if not isinstance(values, Mapping):
        raise QMoEError(f"expected an object, got {type(values).__name__}")
    fields = {
        name: values.get(name) for name in (*TelemetrySnapshot.__dataclass_fields__, "experts") if name != "bitmap"
    }
    num_experts = _integer(values, "num_experts", 1, MOST_EXPERTS)
    k = _integer(values, "routes_per_row", 1, num_experts)
    for name in _COUNT_FIELDS:
        _integer(values, name, 0, MAX_COUNT)
    _integer(values, "node", -(2**63), MAX_COUNT)
    if fields["executor"] is not None:
        _integer(values, "executor", -(2**63), MAX_COUNT)
    time = fields["unix_time"]
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < 1e11 or math.isnan(time):
        raise QMoEError(f"unix_time: expected seconds since 1970, got {time!r:.40}")
    fields["unix_time"] = float(time)
    if fields["mode"] not in ("bitmap", "counts", "trace"):
        raise QMoEError(f"mode: {fields['mode']!r:.40}")
    for name in ("saturated", "paused"):
        if not isinstance(fields[name], bool):
            raise QMoEError(f"{name}: expected true or false")
    _integers(fields["experts"], "experts", num_experts - 1)
    if fields["mode"] == "bitmap":
        fields["counts"] = None
    else:
        _integers(fields["counts"], "counts", MAX_COUNT, num_experts)
    if fields["mode"] != "trace":
        fields["trace"] = None
    else:
        if not isinstance(fields["trace"], list):
            raise QMoEError("trace: expected rows")
        for row in fields["trace"]:
            _integers(row, "trace", num_experts - 1, k)
    name = values.get("name", "")
    return name if isinstance(name, str) else "", TelemetrySnapshot.from_dict(fields)


def _integer(values: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise QMoEError(f"{name}: expected an integer from {least} to {most}, got {str(value)[:40]}")
    return value


def _integers(values: Any, name: str, most: int, length: int | None = None) -> None:
    if not isinstance(values, list) or (length is not None and len(values) != length):
        raise QMoEError(f"{name}: expected a list" + (f" of {length}" if length is not None else ""))
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise QMoEError(f"{name}: expected integers from 0 to {most}, got {str(value)[:40]}")
