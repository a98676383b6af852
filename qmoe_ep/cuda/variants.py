"""Which kernel family a call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmoe_ep.kernels import decode, grouped, portable, prefill
from qmoe_ep.kernels.chunks import DEFAULT_SCRATCH_LIMIT, plan_in_chunks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qmoe_ep.call import CallDescription
    from qmoe_ep.capabilities import Capabilities
    from qmoe_ep.kernels.plan import AddressSource, Plan

__all__ = ["choose_plan"]


def choose_plan(
    call: CallDescription,
    capabilities: Capabilities,
    alignment: Mapping[AddressSource, int] | None = None,
    *,
    only_portable: bool = False,
    scratch_limit: int = DEFAULT_SCRATCH_LIMIT,
) -> Plan:
    """The plan of the fastest family that serves a call, in chunks of rows if scratch would exceed a limit in bytes."""

    def make(part: CallDescription, known: Mapping[AddressSource, int]) -> Plan:
        return _choose_family(part, capabilities, known, only_portable)

    return plan_in_chunks(call, make, alignment or {}, scratch_limit)


def _choose_family(
    call: CallDescription, capabilities: Capabilities, alignment: Mapping[AddressSource, int], only_portable: bool
) -> Plan:
    """The fastest family; the portable one serves all."""
    made = None
    if not only_portable and not _is_special(call):
        if prefill.worthwhile(call):
            made = prefill.plan(call, capabilities, alignment)
        made = made or decode.plan(call, capabilities, alignment) or grouped.plan(call, capabilities, alignment)
    return made or portable.plan(call, capabilities, alignment)


def _is_special(call: CallDescription) -> bool:
    """Formats, activations and routing that only the portable kernels know."""
    node = call.node
    return (
        not all(matrix.plain for matrix in call.experts.matrices)
        or node.activation_type in ("geglu", "relu2")
        or bool(node.use_sparse_mixer)
        or bool(node.swiglu_limit_after_activation and call.experts.gating != "none")
    )
