"""What the runtime knows of captures: their status, and what a capture of the package offers."""

from __future__ import annotations

import enum
from typing import Protocol

from qmoe_ep.memory import Allocation

__all__ = ["STATUS_BY_NUMBER", "CaptureSession", "CaptureStatus"]


class CaptureStatus(enum.Enum):
    """What the runtime's stream is doing."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


STATUS_BY_NUMBER = (CaptureStatus.NONE, CaptureStatus.ACTIVE, CaptureStatus.INVALIDATED)


class CaptureSession(Protocol):
    """A capture of the package on the runtime's stream; ``graph_capture.Capture`` is one."""

    thread: int

    def register(self, allocation: Allocation) -> None:
        """Own an allocation until the graph is gone."""

    def keep(self, thing: object) -> None:
        """Keep a Python object alive until the graph is gone."""

    def abandon(self) -> None:
        """End the stream's capture and give back what it held."""
