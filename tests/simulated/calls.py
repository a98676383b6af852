"""What makes a method a driver call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .machine import Code, Refused

__all__ = ["call"]


def call(context: bool = True, may_wait: bool = False, destroys: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Make a method a driver call: logged, failed on demand, checked for context and capture.

    Parameters
    ----------
    context : needs a current context
    may_wait : may wait or free, which a thread-local capture forbids its own thread
    destroys : its first argument's object is not a leak of the package when the call was made to fail
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        name = function.__name__

        @functools.wraps(function)
        def wrapper(self: Any, *arguments: Any) -> tuple[Any, ...]:
            machine = self.machine
            with machine.lock:
                code = machine.injected(name)
                if code is not None:
                    self.on_injected(name, arguments, destroys)
                    return (code, None)
                try:
                    if context:
                        self.check_context()
                    if may_wait:
                        machine.check_thread_capture(name)
                    value = function(self, *arguments)
                except Refused as refused:
                    return (refused.code, None)
                if value is None:
                    return (Code.CUDA_SUCCESS,)
                return (Code.CUDA_SUCCESS, *value) if isinstance(value, tuple) else (Code.CUDA_SUCCESS, value)

        return wrapper

    return decorate
