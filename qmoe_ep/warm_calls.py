"""Call signatures, and which of them a kernel has run eagerly: only those can be captured."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from qmoe_ep.errors import CaptureError

__all__ = ["CallSignature", "CaptureSupport", "OperandSignature", "WarmedCalls"]

OperandSignature: TypeAlias = tuple[str, tuple[int, ...]]
"""(dtype name, shape) of an operand."""

T = TypeVar("T")


class CallSignature(NamedTuple):
    """What must be equal for a captured call to do what its eager one did. Pointers are not part of it.

    Attributes
    ----------
    inputs : per input, None where it is absent
    outputs : per output
    telemetry : identities of the telemetry allocations that the call writes to
    """

    inputs: tuple[OperandSignature | None, ...]
    outputs: tuple[OperandSignature, ...]
    telemetry: tuple[int, ...] = ()

    def __str__(self) -> str:
        def show(operand: OperandSignature | None) -> str:
            return "absent" if operand is None else f"{operand[0]}[{','.join(map(str, operand[1]))}]"

        text = f"({', '.join(map(show, self.inputs))}) -> ({', '.join(map(show, self.outputs))})"
        return text + (f" telemetry {list(self.telemetry)}" if self.telemetry else "")


@dataclass(frozen=True, slots=True)
class CaptureSupport:
    """Whether a call can be captured, and if not, why and what to do."""

    supported: bool
    reason: str = ""


class WarmedCalls(Generic[T]):
    """The signatures that a kernel has run eagerly with success, the most recent `limit` of them.

    Each maps to what the caller keeps for it, such as its prepared launches. Guarded by the kernel's lock.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._calls: OrderedDict[CallSignature, T] = OrderedDict()
        self._cold = "no call has run eagerly yet"

    def __len__(self) -> int:
        return len(self._calls)

    def remember(self, signature: CallSignature, value: T) -> None:
        """Note a successful eager call; forgets the least recently used one beyond the limit."""
        self._calls[signature] = value
        self._calls.move_to_end(signature)
        if len(self._calls) > self._limit:
            self._calls.popitem(last=False)

    def get(self, signature: CallSignature) -> T | None:
        """Return what was kept for a signature, now the most recently used, or None."""
        value = self._calls.get(signature)
        if value is not None:
            self._calls.move_to_end(signature)
        return value

    def clear(self, reason: str) -> None:
        """Forget every signature; `reason` is what :meth:`support` says until the next success."""
        self._calls.clear()
        self._cold = reason

    def support(self, signature: CallSignature) -> CaptureSupport:
        """Say whether this very call can be captured."""
        if signature in self._calls:
            return CaptureSupport(True)
        return CaptureSupport(False, f"unsupported, because {self._why_not(signature)}")

    def require(self, signature: CallSignature) -> T:
        """Return what was kept for the signature of a call under capture.

        Raises
        ------
        CaptureError : it was not warmed; shows both signatures and how to recover.
        """
        value = self.get(signature)
        if value is None:
            raise CaptureError(
                f"this call can't be captured: {self._why_not(signature)}. End this capture, run the new signature "
                "once eagerly, capture again"
            )
        return value

    def _why_not(self, signature: CallSignature) -> str:
        if not self._calls:
            return f"{self._cold}; this call is {signature}"
        warmed = next(reversed(self._calls))
        return f"its signature {signature} has not run eagerly; the last one that has is {warmed}"
