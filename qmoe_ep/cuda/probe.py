"""An optional probe: which experts each row selects, and by what margin, so that two runs can be compared."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from qmoe_ep.routing import select_experts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qmoe_ep.call import CallDescription
    from qmoe_ep.cuda.kernel import QMoEKernel
    from qmoe_ep.cuda.tensor import DeviceTensor

__all__ = ["dump_routes", "route_dump_enabled"]

_LOG = logging.getLogger("qmoe_ep.routes")


def route_dump_enabled() -> bool:
    """Whether ``QMOE_EP_ROUTE_DUMP`` asks for the probe; it is ignored under capture."""
    return os.environ.get("QMOE_EP_ROUTE_DUMP", "0") not in ("", "0")


def dump_routes(kernel: QMoEKernel, call: CallDescription, inputs: Sequence[DeviceTensor | None]) -> None:
    """Log one line per row: node, row, selected experts in order, and the margin between the smallest selected and
    the largest rejected logit (infinite when none is rejected). Waits for the logits.
    """
    router = inputs[1]
    if router is None:
        return
    logits = router.numpy().reshape(call.rows, call.experts.num_experts)
    order = select_experts(logits, call.experts.num_experts)
    values = np.take_along_axis(logits.astype(np.float64), order.astype(np.int64), axis=1)
    for row in range(call.rows):
        margin = np.inf
        if call.top_k < call.experts.num_experts:
            with np.errstate(invalid="ignore"):
                margin = values[row, call.top_k - 1] - values[row, call.top_k]
        chosen = order[row, : call.top_k].tolist()
        _LOG.warning("node %s row %d experts %s margin %g", kernel.node_id, row, chosen, margin)
