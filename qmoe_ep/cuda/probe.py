"""An optional probe: which experts each row selects, and by what margin, so that two runs can be compared."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.cuda.tensor import as_device_tensor
from qmoe_ep.routing import select_experts

if TYPE_CHECKING:
    from qmoe_ep.cuda.kernel import QMoEKernel

__all__ = ["dump_routes", "route_dump_enabled"]

_LOG = logging.getLogger("qmoe_ep.routes")


def route_dump_enabled() -> bool:
    """Whether ``QMOE_EP_ROUTE_DUMP`` asks for the probe; it is ignored under capture."""
    return os.environ.get("QMOE_EP_ROUTE_DUMP", "0") not in ("", "0")


def dump_routes(kernel: QMoEKernel, router_probs: Any) -> None:
    """Log one line per row: node, row, selected experts in order, and the margin between the smallest selected and
    the largest rejected logit (infinite when none is rejected). Waits for the logits.
    """
    logits = as_device_tensor(kernel.runtime, router_probs, "router_probs").numpy()
    experts, k = logits.shape[-1], kernel.node.k
    logits = logits.reshape(-1, experts)
    order = select_experts(logits, experts)
    values = np.take_along_axis(logits.astype(np.float64), order.astype(np.int64), axis=1)
    for row in range(logits.shape[0]):
        margin = np.inf
        if k < experts:
            with np.errstate(invalid="ignore"):
                margin = values[row, k - 1] - values[row, k]
        chosen = order[row, :k].tolist()
        _LOG.warning("node %s row %d experts %s margin %g", kernel.node_id, row, chosen, margin)
