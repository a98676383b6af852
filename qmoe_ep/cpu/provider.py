"""The CPU execution provider: what runs where no GPU is present."""

from __future__ import annotations

import logging
import os
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from qmoe_ep.cpu.expert_cache import AGEING_TICKS
from qmoe_ep.cpu.experts import Pager
from qmoe_ep.cpu.kernel import CpuKernel
from qmoe_ep.cpu.products import NumpyProducts, Products
from qmoe_ep.errors import QMoEError
from qmoe_ep.operator import Layout, QMoENode
from qmoe_ep.provider import ExecutionProvider, forced_portable
from qmoe_ep.telemetry import TelemetryRegistry, host_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx
    from numpy.typing import NDArray

    from qmoe_ep.offload import OffloadStats

__all__ = ["CpuExecutionProvider"]

_log = logging.getLogger("qmoe_ep")


class CpuExecutionProvider(ExecutionProvider):
    """Creates kernels for QMoE nodes on the CPU.

    Parameters
    ----------
    weight_offload : page experts from mapped external data instead of holding whole tensors
        (``QMOE_EP_WEIGHT_OFFLOAD=1`` does the same)
    host_cache_bytes : with weight offload, budget of expanded experts kept in memory, in bytes of float32
        (``QMOE_EP_HOST_CACHE_BYTES`` overrides it)
    route_telemetry : hand out telemetry producers
    kernels : "auto" for compiled products where the extra ``jit`` is installed, "portable" for NumPy
        (``QMOE_EP_KERNELS=portable`` does the same)
    threads : that compute, with compiled products; None for as many as the process has cores. NumPy's own library
        has its own setting
    host_cache_ageing : requests after which the host cache halves what it knows of an expert that it doesn't hold.
        Experts that come less often are never cached: for a model with more than 64 selected experts per token over
        all its layers, give ten times that number or more

    Raises
    ------
    QMoEError
        If a budget isn't a number of bytes, or another argument isn't one of its choices.
    """

    name = "cpu"

    def __init__(
        self,
        weight_offload: bool = False,
        host_cache_bytes: int = 0,
        route_telemetry: bool = True,
        kernels: str | None = None,
        threads: int | None = None,
        host_cache_ageing: int = AGEING_TICKS,
    ) -> None:
        self.weight_offload = weight_offload or os.environ.get("QMOE_EP_WEIGHT_OFFLOAD", "0") not in ("", "0")
        self._budget = _cache_budget(host_cache_bytes)
        self.telemetry = TelemetryRegistry(host_memory(), enabled=route_telemetry)
        if host_cache_ageing < 1:
            raise QMoEError(f"host_cache_ageing: expected at least 1 request, got {host_cache_ageing!r}")
        self._portable = forced_portable(kernels)
        self._threads = _available_cores() if threads is None else threads
        if self._threads < 1:
            raise QMoEError(f"threads: expected at least 1, or None for all cores, got {threads!r}")
        self._pager = Pager(self._budget, host_cache_ageing) if self.weight_offload else None

    @cached_property
    def _products(self) -> Products:
        if self._portable:
            return NumpyProducts()
        try:
            from qmoe_ep.cpu.compiled import CompiledProducts

            return CompiledProducts(self._threads)
        except (ImportError, OSError) as error:
            _hint(error)
            return NumpyProducts()

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
        initializers : constant operands by input index; calls pass ``None`` for them. Slices of a ``np.memmap``
            are paged with weight offload, else read here
        weights_layout : override of what ``weights_prepacked`` says, "raw" or "sm80"

        Raises
        ------
        QMoEError
            If the node is declined (with the sentence of :meth:`unsupported_reason`), an
            initializer doesn't fit, or a mapped file is shorter than its tensor or another one by now.
        """
        node = self._claimed(node, weights_layout)
        return CpuKernel(
            node,
            node_id,
            dict(initializers or {}),
            weights_layout=weights_layout,
            products=self._products,
            pager=self._pager,
            telemetry=self.telemetry.producer(node_id, int(node.k)),
        )

    # --- paging ------------------------------------------------------------------------------------

    @property
    def host_cache_bytes(self) -> int:
        """Budget of the host cache; without weight offload it has no effect."""
        return self._budget if self._pager is None else self._pager.cache.budget

    def resize_host_cache(self, nbytes: int) -> None:
        """Set the budget of the host cache and bring it down to that at once.

        Raises
        ------
        QMoEError
            If experts in use hold more than that: then nothing changes. Or without weight offload.
        """
        if self._pager is None:
            raise QMoEError("host cache: this provider has none; create it with weight_offload=True")
        self._pager.cache.resize(nbytes)

    def offload_stats(self) -> OffloadStats | None:
        """Figures of this provider's paging; None without weight offload."""
        return None if self._pager is None else self._pager.stats()

    def close(self) -> None:
        """Let go of the host cache and all producers; safe to call again. Kernels that are held stay usable."""
        self.telemetry.clear()
        if self._pager is not None:
            self._pager.close()


@cache
def _hint_once() -> None:
    _log.warning(
        "CPU kernels run in NumPy, which is several times slower than compiled ones; "
        "pip install 'qmoe-ep[jit]' for those (no C compiler is needed)"
    )


def _hint(error: Exception) -> None:
    """Say once per process what would be quicker; why it isn't there is for the debug log."""
    _hint_once()
    _log.debug("no compiled CPU kernels: %s", error)


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_budget(argument: int) -> int:
    text = os.environ.get("QMOE_EP_HOST_CACHE_BYTES", "")
    if text and not (text.isascii() and text.isdigit()):
        raise QMoEError(f"QMOE_EP_HOST_CACHE_BYTES: expected a number of bytes, got {text!r}")
    budget = int(text) if text else argument
    if not isinstance(budget, int) or budget < 0:
        raise QMoEError(f"host_cache_bytes: expected a number of bytes of at least 0, got {argument!r}")
    return budget
