"""Route telemetry for people who run a service: snapshots of all layers, taken beside the work and published.

:class:`TelemetryExporter` takes and publishes, :mod:`~qmoe_ep.telemetry_export.records` writes, reads and follows files
of records, :mod:`~qmoe_ep.telemetry_export.prometheus` speaks to Prometheus.
"""

from __future__ import annotations

from qmoe_ep.telemetry_export.exporter import TelemetryExporter
from qmoe_ep.telemetry_export.records import RecordFollower, RecordWriter, read_records
from qmoe_ep.telemetry_export.schema import SCHEMA_VERSION, NamedSnapshot, record_to_snapshot, snapshot_to_record

__all__ = [
    "SCHEMA_VERSION",
    "NamedSnapshot",
    "RecordFollower",
    "RecordWriter",
    "TelemetryExporter",
    "read_records",
    "record_to_snapshot",
    "snapshot_to_record",
]
