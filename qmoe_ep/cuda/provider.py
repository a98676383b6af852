"""The CUDA execution provider: what an embedder creates, once per device and stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qmoe_ep.cuda import tensor as tensors
from qmoe_ep.cuda.kernel import QMoEKernel
from qmoe_ep.cuda.tensor import DeviceTensor
from qmoe_ep.errors import QMoEError
from qmoe_ep.graph_capture import Capture, CapturedGraph
from qmoe_ep.kernels.chunks import DEFAULT_SCRATCH_LIMIT
from qmoe_ep.nvrtc_cache import ModuleCache
from qmoe_ep.operator import Layout, QMoENode
from qmoe_ep.provider import ExecutionProvider, forced_portable
from qmoe_ep.runtime import Runtime
from qmoe_ep.telemetry import TelemetryRegistry, runtime_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import onnx

    from qmoe_ep.memory import MemoryStatistics

__all__ = ["CudaExecutionProvider"]


class CudaExecutionProvider(ExecutionProvider):
    """Creates kernels for QMoE nodes on one CUDA device and one stream.

    Parameters
    ----------
    device : ordinal
    stream : the embedder's stream (an integer handle, or any object with ``__cuda_stream__``); None for a stream
        of the provider's own. The default stream 0 serves eager calls only
    synchronous : make each eager call wait, so that a device fault surfaces at the call that caused it
        (``QMOE_EP_SYNC=1`` does the same)
    route_telemetry : hand out telemetry producers
    kernels : "auto", or "portable" to force the portable kernels (``QMOE_EP_KERNELS`` does the same)
    scratch_limit : most bytes of scratch that a call may take; calls that would take more work in chunks of rows

    Raises
    ------
    QMoEError : scratch_limit is not positive.
    CudaError : no driver or device; the message says what was tried.
    """

    name = "cuda"

    def __init__(
        self,
        device: int = 0,
        stream: object = None,
        synchronous: bool = False,
        route_telemetry: bool = True,
        kernels: str | None = None,
        scratch_limit: int = DEFAULT_SCRATCH_LIMIT,
    ) -> None:
        if scratch_limit < 1:
            raise QMoEError(f"scratch_limit: expected a positive number of bytes, got {scratch_limit}; leave it out")
        self._only_portable, self._scratch_limit = forced_portable(kernels), scratch_limit
        self.runtime = Runtime(device, stream, synchronous)
        self.modules = ModuleCache(self.runtime)
        self.telemetry = TelemetryRegistry(runtime_memory(self.runtime), enabled=route_telemetry)

    def create_kernel(
        self,
        node: QMoENode | onnx.NodeProto,
        node_id: int = 0,
        initializers: Mapping[int, Any] | None = None,
        weights_layout: Layout | None = None,
    ) -> QMoEKernel:
        """Create the kernel of one node.

        Parameters
        ----------
        node : attributes, or a node of an ONNX model
        node_id : the embedder's number for it, used in telemetry and messages
        initializers : constant operands by input index: host arrays are uploaded (and converted from the SM80
            layout) here, once; device arrays are used in place. Calls pass None for them
        weights_layout : override of what ``weights_prepacked`` says, "raw" or "sm80"

        Raises
        ------
        QMoEError : the node is declined (the sentence of :meth:`unsupported_reason`), or an initializer doesn't fit.
        """
        node = self._claimed(node, weights_layout)
        return QMoEKernel(
            self.runtime,
            self.modules,
            node,
            node_id,
            dict(initializers or {}),
            weights_layout=weights_layout,
            only_portable=self._only_portable,
            scratch_limit=self._scratch_limit,
            telemetry=self.telemetry.producer(node_id, int(node.k)),
        )

    # --- tensors -----------------------------------------------------------------------------------

    def to_device(self, array: Any) -> DeviceTensor:
        """Copy a host array to a new tensor."""
        return tensors.to_device(self.runtime, array)

    def empty(self, shape: tuple[int, ...] | int, dtype: Any) -> DeviceTensor:
        """Allocate a tensor whose contents are undefined."""
        return tensors.empty(self.runtime, shape, dtype)

    def view(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object = None) -> DeviceTensor:
        """See contiguous device memory of somebody else as a tensor; `owner` is kept alive by it."""
        return DeviceTensor(self.runtime, pointer, tuple(shape), dtype, owner=owner)

    def memory_statistics(self) -> MemoryStatistics:
        """Device memory of the provider's pool."""
        return self.runtime.memory_statistics()

    # --- capture -----------------------------------------------------------------------------------

    def capture(self, update: CapturedGraph | None = None) -> Capture:
        """Capture what is enqueued inside the ``with`` block; ``.graph`` afterwards is the replayable graph."""
        return Capture(self.runtime, update)

    def synchronize(self) -> None:
        """Wait until everything enqueued so far is done."""
        self.runtime.wait()

    def close(self) -> None:
        """Drain and free everything: producers, modules, memory. Repeating it does nothing."""
        if not self.runtime.closed:
            self.telemetry.clear()
        self.runtime.close()
