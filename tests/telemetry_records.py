"""Snapshots of telemetry for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qmoe_ep.route_analysis import LayerHistory, LayerLoad
from qmoe_ep.telemetry import TelemetrySnapshot
from qmoe_ep.telemetry_export import NamedSnapshot, snapshot_to_record

__all__ = ["history", "load", "record_of", "snapshot", "write_records"]


def snapshot(counts: Sequence[int], **changes: Any) -> TelemetrySnapshot:
    """Of given counts, with one route per row."""
    given = [int(count) for count in counts]
    values: dict[str, Any] = {
        "executor": 1,
        "node": 7,
        "unix_time": 1000.0,
        "epoch": 0,
        "mode": "counts",
        "num_experts": len(given),
        "routes_per_row": 1,
        "rows": min(sum(given), 2**63 - 1),
        "routes": min(sum(given), 2**63 - 1),
        "saturated": sum(given) > 2**63 - 1,
        "paused": False,
        "experts": np.flatnonzero(given).tolist(),
        "counts": None if changes.get("mode") == "bitmap" else given,
        "trace": None,
        "lost_rows": 0,
    }
    return TelemetrySnapshot.from_dict(values | changes)


def history(*snapshots: TelemetrySnapshot, name: str = "") -> LayerHistory:
    """Of one layer."""
    return LayerHistory(snapshots[0].executor, snapshots[0].node, name, snapshots)


def load(counts: Sequence[int], *, bitmap: bool = False, node: int = 7, executor: int | None = 1) -> LayerLoad:
    """Of one window."""
    given = np.array(counts, np.uint64)
    total = min(sum(int(count) for count in counts), 2**63 - 1)
    return LayerLoad(
        executor=executor,
        node=node,
        name="",
        epochs=(0, 0),
        rows=total,
        routes=total,
        seen=given > 0,
        counts=None if bitmap else given,
        saturated=False,
    )


def record_of(snapshot: TelemetrySnapshot, name: str = "") -> dict[str, Any]:
    """The record of a snapshot."""
    return snapshot_to_record(NamedSnapshot(snapshot, name))


def write_records(path: Path, *snapshots: TelemetrySnapshot, names: Mapping[int, str] | None = None) -> Path:
    """Write snapshots as a file of records; names by node."""
    path.write_text("".join(json.dumps(record_of(s, (names or {}).get(s.node, ""))) + "\n" for s in snapshots))
    return path
