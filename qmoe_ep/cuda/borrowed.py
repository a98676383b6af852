"""Calls on the streams and in the memory of an embedder with an allocator of its own, such as PyTorch.

A :class:`~qmoe_ep.cuda.kernel.QMoEKernel` belongs to one stream and keeps its scratch warm. Here nothing is kept
but prepared launches: output, scratch and stream come with each call. So the embedder's allocator decides about
reuse, a graph that the embedder captures keeps whatever was allocated under its capture, and no call has to be
warmed before it is captured.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmoe_ep.call import describe_call
from qmoe_ep.cuda.variants import choose_plan
from qmoe_ep.driver import check, driver, relaxed_capture_mode
from qmoe_ep.graph_capture import embedders_graph
from qmoe_ep.operator import INPUT_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from qmoe_ep.call import CallDescription, Operand
    from qmoe_ep.kernels.plan import AddressSource, Plan
    from qmoe_ep.launch import PreparedLaunch
    from qmoe_ep.memory import Allocation
    from qmoe_ep.nvrtc_cache import ModuleCache
    from qmoe_ep.operator import QMoENode
    from qmoe_ep.runtime import Runtime
    from qmoe_ep.telemetry import RouteTelemetry

__all__ = ["BorrowedCalls"]

_FULL_ALIGNMENT = 16
_SLOT_ALIGNMENT = 256
_MAX_PREPARED = 1024


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The launches of one call on one stream, and where its scratch slots begin in one buffer."""

    plan: Plan
    launches: tuple[PreparedLaunch, ...]
    slots: tuple[tuple[str, int], ...]
    scratch_bytes: int


class BorrowedCalls:
    """Enqueues calls of any node on any stream of a runtime's context. Thread safe.

    Parameters
    ----------
    runtime : of the context; its own stream is not used
    modules : loaded into it
    only_portable : force the portable kernels
    """

    def __init__(self, runtime: Runtime, modules: ModuleCache, *, only_portable: bool = False) -> None:
        self.runtime = runtime
        self._modules, self._only_portable = modules, only_portable
        self._prepared: OrderedDict[Hashable, _Prepared] = OrderedDict()

    def execute(
        self,
        signature: Hashable,
        describe: Callable[[], tuple[QMoENode, Sequence[Operand | None]]],
        addresses: Sequence[int],
        output: int,
        stream: int,
        allocate: Callable[[int], int],
        telemetry: RouteTelemetry | None = None,
    ) -> None:
        """Enqueue one call and return.

        Parameters
        ----------
        signature : equal for calls with the same attributes, dtypes, shapes and presence of operands
        describe : the node and its operands in ONNX order (contiguous, raw layout); asked once per signature
        addresses : of the operands in ONNX order, 0 for absent ones
        output : address of the contiguous output, of the shape and dtype of input 0
        stream : handle; where work on the operands' memory is ordered
        allocate : returns the address of so many bytes, which stay untouched until the stream has run the call
        telemetry : producer whose armed record the call counts into. A graph that is being captured on the
            stream keeps that record

        Raises
        ------
        QMoEError : an operand doesn't fit; nothing was launched.
        CudaError, NvrtcError : the driver or the compiler failed.
        """
        runtime = self.runtime
        with runtime.lock, runtime.current():
            runtime.collect()
            record = None if telemetry is None else telemetry.record
            prepared = self._prepare(signature, describe, addresses, output, stream)
            if not prepared.launches:
                return
            graph = embedders_graph(runtime, stream) if record is not None or runtime.synchronous else None
            if record is not None and graph is not None:
                graph.register(record)
            elif record is not None:
                # It was written in the order of the runtime's stream.
                runtime.order_stream_after(stream)
            self._enqueue(prepared, addresses, output, allocate(prepared.scratch_bytes), record)
            if graph is not None:
                return
            if record is not None:
                # Whatever reads or frees the record does so in the order of the runtime's stream.
                runtime.wait_for_stream(stream)
            if runtime.synchronous:
                check(driver().cuStreamSynchronize(driver().CUstream(stream)), "cuStreamSynchronize", "finish the call")

    def _prepare(
        self,
        signature: Hashable,
        describe: Callable[[], tuple[QMoENode, Sequence[Operand | None]]],
        addresses: Sequence[int],
        output: int,
        stream: int,
    ) -> _Prepared:
        combined = output
        for address in addresses:
            combined |= address
        alignment = _alignment(addresses, output) if combined % _FULL_ALIGNMENT else ()
        key = (signature, stream, alignment)
        prepared = self._prepared.get(key)
        if prepared is None:
            node, operands = describe()
            call = describe_call(node, operands, weights_layout="raw")
            prepared = self._plan(call, dict(alignment), stream)
            self._prepared[key] = prepared
            if len(self._prepared) > _MAX_PREPARED:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end(key)
        return prepared

    def _plan(self, call: CallDescription, alignment: dict[AddressSource, int], stream: int) -> _Prepared:
        plan = choose_plan(call, self.runtime.capabilities(), alignment, only_portable=self._only_portable)
        # Loading modules is none of a capture's business.
        with relaxed_capture_mode():
            self._modules.preload([step.module for step in plan.steps])
            launches = tuple(
                self.runtime.prepare(step, self._modules.function(step.module, step.entry), "QMoE", stream)
                for step in plan.steps
            )
        slots, offset = [], 0
        for slot, nbytes in plan.scratch:
            slots.append((slot, offset))
            offset += -(-max(nbytes, 1) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        return _Prepared(plan, launches, tuple(slots), offset)

    @staticmethod
    def _enqueue(
        prepared: _Prepared, addresses: Sequence[int], output: int, scratch: int, record: Allocation | None
    ) -> None:
        sources: dict[AddressSource, int] = {i: address for i, address in enumerate(addresses) if address}
        sources.update((slot, scratch + offset) for slot, offset in prepared.slots)
        sources["output"] = output
        if record is not None:
            sources["telemetry"] = record.pointer
        for launch, step in zip(prepared.launches, prepared.plan.steps, strict=True):
            launch.bind(step.pointers, sources)
        for launch in prepared.launches:
            launch.enqueue()


def _alignment(addresses: Sequence[int], output: int) -> tuple[tuple[AddressSource, int], ...]:
    """The operands that are aligned to less than 16 bytes, and to how much."""
    sources: list[tuple[AddressSource, int]] = [*enumerate(addresses[: len(INPUT_NAMES)]), ("output", output)]
    return tuple((source, a & -a) for source, a in sources if a and a % _FULL_ALIGNMENT)
