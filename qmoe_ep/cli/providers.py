"""Which provider a command uses."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from typing import Any

from qmoe_ep.errors import CudaError, NvrtcError

__all__ = ["open_provider"]


def open_provider(
    name: str, device: int = 0, *, offload: bool = False, host_cache_bytes: int = 0
) -> tuple[AbstractContextManager[Any], str]:
    """Create the provider that was asked for, to be closed by ``with``, and a clause that says which and why.

    Parameters
    ----------
    name : ``"cpu"``, ``"cuda"``, or ``"auto"`` for CUDA if it can be used and experts aren't to be paged
    offload, host_cache_bytes : of the CPU provider

    Raises
    ------
    CudaError, NvrtcError : CUDA was asked for and can't be used.
    """
    from qmoe_ep.cpu.provider import CpuExecutionProvider

    def cpu(why: str = "") -> tuple[AbstractContextManager[Any], str]:
        return closing(CpuExecutionProvider(offload, host_cache_bytes)), f"cpu{why}"

    if name == "cpu":
        return cpu()
    if offload:
        return cpu(" (pages experts)")
    try:
        from qmoe_ep import driver
        from qmoe_ep.cuda.provider import CudaExecutionProvider

        driver.nvrtc()
        provider = CudaExecutionProvider(device)
    except (CudaError, NvrtcError) as error:
        if name == "cuda":
            raise
        return cpu(f" (no CUDA: {str(error).splitlines()[0]})")
    return closing(provider), f"cuda ({provider.runtime.capabilities().name})"
