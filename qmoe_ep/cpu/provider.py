"""The CPU execution provider: what runs where no GPU is present."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qmoe_ep.cpu.kernel import CpuKernel
from qmoe_ep.operator import Layout, QMoENode, unsupported_reason
from qmoe_ep.telemetry import TelemetryRegistry, host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import onnx
    from numpy.typing import NDArray

__all__ = ["CpuExecutionProvider"]


class CpuExecutionProvider:
    """Creates kernels for QMoE nodes on the CPU.

    Parameters
    ----------
    weight_offload : page experts from mapped external data instead of holding whole tensors
    host_cache_bytes : budget of expanded experts kept in memory, in bytes of float32
    route_telemetry : hand out telemetry producers

    Attributes
    ----------
    telemetry : the producers of all executors
    """

    name = "cpu"

    def __init__(self, weight_offload: bool = False, host_cache_bytes: int = 0, route_telemetry: bool = True) -> None:
        self.weight_offload = weight_offload
        self.host_cache_bytes = host_cache_bytes
        self.telemetry = TelemetryRegistry(host_memory(), enabled=route_telemetry)

    def unsupported_reason(self, node: QMoENode | onnx.NodeProto, weights_layout: Layout | None = None) -> str | None:
        """Why this provider declines a node, or ``None``."""
        return unsupported_reason(node, weights_layout)

    def create_kernel(
        self,
        node: QMoENode | onnx.NodeProto,
        node_id: int = 0,
        initializers: Mapping[int, NDArray[Any]] | None = None,
        weights_layout: Layout | None = None,
    ) -> CpuKernel:
        """Create the kernel of one node.

        Parameters
        ----------
        node : attributes, or a node of an ONNX model
        node_id : the embedder's number for it, used in telemetry and figures
        initializers : constant operands by input index; calls pass ``None`` for them
        weights_layout : override of what ``weights_prepacked`` says, "raw" or "sm80"

        Raises
        ------
        QMoEError
            If the node is declined (with the sentence of :meth:`unsupported_reason`) or an
            initializer doesn't fit.
        """
        if not isinstance(node, QMoENode):
            node = QMoENode.from_onnx(node)
        kernel = CpuKernel(node, node_id, dict(initializers or {}), weights_layout)
        kernel.telemetry = self.telemetry.producer(node_id, int(node.k))
        return kernel

    def executor_scope(self, executor: int, generation: int) -> AbstractContextManager[None]:
        """Create and run kernels under an executor's generation, exclusively; see the telemetry registry."""
        return self.telemetry.executor_scope(executor, generation)

    def retire_executor(self, executor: int, generation: int, cleanup: Callable[[bool], None] | None = None) -> None:
        """Mark an executor's generation as retired, for good, and call ``cleanup(newly_retired)``."""
        self.telemetry.retire_scope(executor, generation, cleanup or (lambda _: None))

    def close(self) -> None:
        """Let go of everything; safe to call again."""
        self.telemetry.clear()
