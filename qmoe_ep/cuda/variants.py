"""Which kernel family a call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmoe_ep.kernels import decode, grouped, portable, prefill

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
) -> Plan:
    """The plan of the fastest family that serves a call; the portable one serves all."""
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
