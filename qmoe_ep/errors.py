"""The exceptions of the package, one family per cause.

Every message is a sentence for the person who has to act on it: which operand, attribute or
driver call, what was expected, what came, and what to do.
"""

from __future__ import annotations

__all__ = ["CaptureError", "CudaError", "NvrtcError", "QMoEError", "TelemetryUnsupported"]


class QMoEError(ValueError):
    """A node, an operand or a file that the package can't execute as given."""


class CudaError(RuntimeError):
    """A driver call that failed.

    Attributes
    ----------
    name : the driver's name of the result code, such as ``"CUDA_ERROR_OUT_OF_MEMORY"``
    call : the driver function, such as ``"cuMemAllocAsync"``
    doing : what was being attempted, such as ``"launch gate_up for node 7"``
    """

    def __init__(self, name: str, call: str, doing: str, hint: str = "") -> None:
        self.name, self.call, self.doing = name, call, doing
        super().__init__(f"{call} failed with {name} while trying to {doing}" + (f". {hint}" if hint else ""))


class NvrtcError(RuntimeError):
    """A module that did not compile, or a compiler that could not be used.

    Attributes
    ----------
    log : the compiler's log, possibly empty
    options : the options it was called with
    """

    def __init__(self, message: str, log: str = "", options: tuple[str, ...] = ()) -> None:
        self.log, self.options = log, options
        details = f"\noptions: {' '.join(options)}" if options else ""
        super().__init__(message + details + (f"\n{log}" if log else ""))


class CaptureError(RuntimeError):
    """A call that a stream capture can't take; the message says how to recover."""


class TelemetryUnsupported(QMoEError):
    """A telemetry configuration that doesn't fit the node it is armed on."""
