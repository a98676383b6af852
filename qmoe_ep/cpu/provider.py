"""The CPU execution provider: what runs where no GPU is present."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qmoe_ep.cpu.kernel import CpuKernel
from qmoe_ep.operator import Layout, QMoENode, unsupported_reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx
    from numpy.typing import NDArray

__all__ = ["CpuExecutionProvider"]


class CpuExecutionProvider:
    """Creates kernels for QMoE nodes on the CPU.

    Parameters
    ----------
    weight_offload : page experts from mapped external data instead of holding whole tensors
    host_cache_bytes : budget of expanded experts kept in memory, in bytes of float32
    """

    name = "cpu"

    def __init__(self, weight_offload: bool = False, host_cache_bytes: int = 0) -> None:
        self.weight_offload = weight_offload
        self.host_cache_bytes = host_cache_bytes

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
        return CpuKernel(node, node_id, dict(initializers or {}), weights_layout)

    def close(self) -> None:
        """Let go of everything; safe to call again."""
