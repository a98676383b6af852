"""Which kernel family a call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmoe_ep.kernels import decode, portable

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
    if not only_portable and (plan := decode.plan(call, capabilities, alignment)) is not None:
        return plan
    return portable.plan(call, capabilities, alignment)
