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
    if not only_portable:
        if prefill.worthwhile(call):
            made = prefill.plan(call, capabilities, alignment)
        made = made or decode.plan(call, capabilities, alignment) or grouped.plan(call, capabilities, alignment)
    return made or portable.plan(call, capabilities, alignment)
