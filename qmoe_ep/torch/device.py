"""What the operator needs of each device, made when it is first used there."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

from qmoe_ep.cpu.provider import CpuExecutionProvider

if TYPE_CHECKING:
    from qmoe_ep.cuda.borrowed import BorrowedCalls

__all__ = ["borrowed_calls", "cpu_provider"]

_calls: dict[int, BorrowedCalls] = {}
_lock = threading.Lock()


@cache
def cpu_provider() -> CpuExecutionProvider:
    """The provider whose kernels serve CPU tensors."""
    return CpuExecutionProvider(route_telemetry=False)


def borrowed_calls(device: int) -> BorrowedCalls:
    """The calls of one CUDA device, in its primary context, which PyTorch uses too.

    Raises
    ------
    CudaError : the driver refuses.
    """
    calls = _calls.get(device)
    # A forked child's runtime counts as closed.
    if calls is not None and not calls.runtime.closed:
        return calls
    from qmoe_ep.cuda.borrowed import BorrowedCalls
    from qmoe_ep.driver import initialise, relaxed_capture_mode
    from qmoe_ep.nvrtc_cache import ModuleCache
    from qmoe_ep.provider import forced_portable
    from qmoe_ep.runtime import Runtime

    with _lock:
        calls = _calls.get(device)
        if calls is None or calls.runtime.closed:
            initialise()
            # The first call may be one that is being captured.
            with relaxed_capture_mode():
                runtime = Runtime(device)
            calls = BorrowedCalls(runtime, ModuleCache(runtime), only_portable=forced_portable(None))
            _calls[device] = calls
        return calls
