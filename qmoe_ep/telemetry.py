"""Route telemetry: which experts each node really routes to, at no cost while disarmed.

A provider has a :class:`TelemetryRegistry`, a kernel a :class:`RouteTelemetry` producer, which an operator arms with a
:class:`RouteTelemetryConfig` and reads as :class:`TelemetrySnapshot`.
"""

from __future__ import annotations

from qmoe_ep.route_record import MAX_COUNT, RouteTelemetryConfig, TelemetryMode
from qmoe_ep.route_telemetry import RouteTelemetry, TelemetrySnapshot, take_snapshots
from qmoe_ep.telemetry_memory import RecordMemory, host_memory, runtime_memory
from qmoe_ep.telemetry_registry import TelemetryRegistry

__all__ = [
    "MAX_COUNT",
    "RecordMemory",
    "RouteTelemetry",
    "RouteTelemetryConfig",
    "TelemetryMode",
    "TelemetryRegistry",
    "TelemetrySnapshot",
    "host_memory",
    "runtime_memory",
    "take_snapshots",
]
