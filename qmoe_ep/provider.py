"""What the providers have in common: claims, executors and their telemetry, the choice of kernels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from qmoe_ep.errors import QMoEError
from qmoe_ep.operator import Layout, QMoENode, check_claim, unsupported_reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import onnx

    from qmoe_ep.telemetry import TelemetryRegistry

__all__ = ["ExecutionProvider", "forced_portable"]


class ExecutionProvider:
    """Base of the providers; a context manager that closes.

    Attributes
    ----------
    telemetry : producers of route telemetry, by executor and node
    """

    telemetry: TelemetryRegistry

    def unsupported_reason(self, node: QMoENode | onnx.NodeProto, weights_layout: Layout | None = None) -> str | None:
        """Why this provider declines a node, or ``None``."""
        return unsupported_reason(node, weights_layout)

    def executor_scope(self, executor: int, generation: int) -> AbstractContextManager[None]:
        """Create and run kernels under an executor's generation, exclusively; see the telemetry registry."""
        return self.telemetry.executor_scope(executor, generation)

    def retire_executor(self, executor: int, generation: int, cleanup: Callable[[bool], None] | None = None) -> None:
        """Mark an executor's generation as retired, for good, and call ``cleanup(newly_retired)``."""
        self.telemetry.retire_scope(executor, generation, cleanup or (lambda _: None))

    def close(self) -> None:
        """Let go of everything; safe to call again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _claimed(node: QMoENode | onnx.NodeProto, weights_layout: Layout | None) -> QMoENode:
        """The attributes of a node that is not declined."""
        if not isinstance(node, QMoENode):
            node = QMoENode.from_onnx(node)
        check_claim(node, weights_layout)
        return node


def forced_portable(kernels: str | None) -> bool:
    """Whether the portable kernels are forced: by a provider's argument, else by ``QMOE_EP_KERNELS``.

    Raises
    ------
    QMoEError
        If it is neither ``"portable"`` nor ``"auto"``.
    """
    value = kernels or os.environ.get("QMOE_EP_KERNELS") or "auto"
    if value not in ("auto", "portable"):
        raise QMoEError(f"kernels (or QMOE_EP_KERNELS) must be 'auto' or 'portable', got {value!r}")
    return value == "portable"
