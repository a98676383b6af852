"""A record: one snapshot of one layer as plain values, and the checks of one that comes from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qmoe_ep.errors import QMoEError
from qmoe_ep.route_record import MAX_COUNT
from qmoe_ep.route_telemetry import TelemetrySnapshot

__all__ = ["SCHEMA_VERSION", "NamedSnapshot", "record_to_snapshot", "snapshot_to_record"]

SCHEMA_VERSION = 1
"""Grows when a reader of the former version would misread a record. Fields that are new don't change it."""

_MOST_EXPERTS = 2**20
_LATEST_TIME = 1e11
_LARGEST_MARGIN = 3.4e38
_MARGIN_TYPES = {float, int, type(None)}


@dataclass(frozen=True, slots=True)
class NamedSnapshot:
    """A snapshot with what a reader wants to call its layer.

    Attributes
    ----------
    name : of the layer; empty where it has none
    footprint_bytes : device (or host) memory of the layer's record
    """

    snapshot: TelemetrySnapshot
    name: str = ""
    footprint_bytes: int = 0


def snapshot_to_record(named: NamedSnapshot) -> dict[str, Any]:
    """Return plain numbers, strings and lists: one line of a file of records."""
    return {
        "version": SCHEMA_VERSION,
        "name": named.name,
        "footprint_bytes": named.footprint_bytes,
        **named.snapshot.to_dict(),
    }


def record_to_snapshot(values: Any) -> NamedSnapshot:
    """Return what :func:`snapshot_to_record` described; fields that it doesn't know are ignored.

    Raises
    ------
    QMoEError : a field is missing, or not what a record has there; or the record is of a later version.
    """
    if not isinstance(values, Mapping):
        raise QMoEError(f"record: expected an object, got {type(values).__name__}")
    version = _integer(values, "version", 1, MAX_COUNT)
    if version > SCHEMA_VERSION:
        raise QMoEError(f"version: expected up to {SCHEMA_VERSION}, got {version}; read it with a newer qmoe-ep")
    num_experts = _integer(values, "num_experts", 1, _MOST_EXPERTS)
    top_k = _integer(values, "routes_per_row", 1, num_experts)
    mode = values.get("mode")
    if mode not in ("bitmap", "counts", "trace"):
        raise QMoEError(f"mode: expected bitmap, counts or trace, got {_short(mode)}")
    fields: dict[str, Any] = {"num_experts": num_experts, "routes_per_row": top_k, "mode": mode}
    fields |= {name: _integer(values, name, 0, MAX_COUNT) for name in ("epoch", "rows", "routes", "lost_rows")}
    fields |= {name: _flag(values, name) for name in ("saturated", "paused")}
    fields["executor"] = None if values.get("executor") is None else _integer(values, "executor", -(2**63), MAX_COUNT)
    fields["node"] = _integer(values, "node", -(2**63), MAX_COUNT)
    fields["unix_time"] = _time(values)
    fields["experts"] = _integers(values.get("experts"), "experts", num_experts - 1)
    fields["counts"] = None if mode == "bitmap" else _integers(values.get("counts"), "counts", MAX_COUNT, num_experts)
    fields["trace"] = _trace(values, num_experts, top_k) if mode == "trace" else None
    fields["margins"] = _margins(values, len(fields["trace"])) if mode == "trace" else None
    name, footprint = values.get("name", ""), values.get("footprint_bytes", 0)
    if not isinstance(name, str) or not _is_integer(footprint, 0, MAX_COUNT):
        raise QMoEError("name, footprint_bytes: expected a string and a number of bytes")
    return NamedSnapshot(TelemetrySnapshot.from_dict(fields), name, footprint)


def _trace(values: Mapping[str, Any], num_experts: int, top_k: int) -> list[list[int]]:
    rows = values.get("trace")
    if not isinstance(rows, list):
        raise QMoEError(f"trace: expected a list of rows, got {_short(rows)}")
    return [_integers(row, "trace", num_experts - 1, top_k) for row in rows]


def _margins(values: Mapping[str, Any], rows: int) -> list[float | None] | None:
    margins = values.get("margins")
    if margins is None:
        return None
    if not isinstance(margins, list) or len(margins) != rows or not set(map(type, margins)) <= _MARGIN_TYPES:
        raise QMoEError(f"margins: expected a list of {rows} numbers or nulls, one for each row of the trace")
    return [None if margin is None or not abs(margin) < _LARGEST_MARGIN else float(margin) for margin in margins]


def _time(values: Mapping[str, Any]) -> float:
    time = values.get("unix_time")
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < _LATEST_TIME:
        raise QMoEError(f"unix_time: expected seconds since 1970, got {_short(time)}")
    return float(time)


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if not isinstance(value, bool):
        raise QMoEError(f"{name}: expected true or false, got {_short(value)}")
    return value


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _integer(values: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = values.get(name)
    if not _is_integer(value, least, most):
        raise QMoEError(f"{name}: expected an integer from {least} to {most}, got {_short(value)}")
    return int(value)  # type: ignore[arg-type]


def _integers(values: object, name: str, most: int, length: int | None = None) -> list[int]:
    if not isinstance(values, list) or (length is not None and len(values) != length):
        raise QMoEError(f"{name}: expected a list" + ("" if length is None else f" of {length}") + " of integers")
    # Nearly all the time of reading a file goes into this check, so that it is quick where nothing is wrong.
    if values and not (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= most):
        for value in values:
            if not _is_integer(value, 0, most):
                raise QMoEError(f"{name}: expected integers from 0 to {most}, got {_short(value)}")
    return values


def _short(value: object) -> str:
    """What came, cut: it may be of any size. A huge integer isn't spelled at all."""
    if isinstance(value, int) and abs(value) > 2**64:
        return "an integer beyond 64 bits"
    text = repr(value) if isinstance(value, (str, int, float, bool)) or value is None else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
