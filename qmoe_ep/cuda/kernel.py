"""One QMoE node on the GPU: from operands to launches, and what is kept warm between calls.

A call: views of its operands → signature → (warm) prepared launches, or describe, plan, compile, prepare →
scratch → bind addresses → enqueue in order → publish. On a warmed signature only addresses that changed are
patched. Nothing is allocated, compiled or waited for while the stream is captured.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from qmoe_ep.call import check_constants, check_output, describe_call, merge_operands
from qmoe_ep.cuda.probe import dump_routes, route_dump_enabled
from qmoe_ep.cuda.tensor import DeviceTensor, as_device_tensor, empty, free_after_use, to_device
from qmoe_ep.cuda.variants import choose_plan
from qmoe_ep.errors import CaptureError, QMoEError
from qmoe_ep.graph_capture import CallSignature, CaptureSupport, GraphResources, Registrar, WarmedCalls, registrar
from qmoe_ep.operator import INPUT_NAMES, MATRIX_INPUTS, Layout, QMoENode, resolve_layout
from qmoe_ep.quantization import raw_weights
from qmoe_ep.scratch import ScratchPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qmoe_ep.call import CallDescription
    from qmoe_ep.kernels.plan import AddressSource, Plan
    from qmoe_ep.launch import PreparedLaunch
    from qmoe_ep.memory import Allocation
    from qmoe_ep.nvrtc_cache import ModuleCache
    from qmoe_ep.runtime import Runtime
    from qmoe_ep.telemetry import RouteTelemetry

__all__ = ["QMoEKernel"]

_LOG = logging.getLogger("qmoe_ep")
_FULL_ALIGNMENT = 16
_MAX_HOT = 64
Alignment: TypeAlias = tuple[tuple["AddressSource", int], ...]


@dataclass(slots=True)
class _Prepared:
    """The launches of one plan, and the addresses that they hold."""

    plan: Plan
    launches: tuple[PreparedLaunch, ...]
    addresses: tuple[Any, ...] = ()
    generation: int = -1
    scratch: tuple[Allocation, ...] = ()


@dataclass(slots=True)
class _Warm:
    """What is kept for a signature: one set of launches per alignment of its operands."""

    call: CallDescription
    variants: dict[Alignment, _Prepared] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Hot:
    """A warmed call whose operands are all aligned tensors of the runtime: only given addresses can change.

    ``patches`` are (argument struct, field, position among the given operands).
    """

    prepared: _Prepared
    patches: tuple[tuple[Any, str, int], ...]
    used: tuple[Allocation, ...]


@dataclass(frozen=True, slots=True)
class _Operands:
    """One call's operands as device views."""

    inputs: list[DeviceTensor | None]
    output: DeviceTensor
    valid_rows: DeviceTensor | None
    telemetry: Allocation | None
    signature: CallSignature


class QMoEKernel:
    """Executes one node on one runtime; made by :meth:`CudaExecutionProvider.create_kernel`.

    Owns the device copies of its initializers and its scratch. Both go, after a drain, when the kernel is
    closed or dropped, unless a captured graph still addresses them.

    Attributes
    ----------
    node, node_id : what it executes, and the embedder's number for it
    runtime : the provider's
    telemetry : the route telemetry producer, or None where the provider was built without
    """

    def __init__(
        self,
        runtime: Runtime,
        modules: ModuleCache,
        node: QMoENode,
        node_id: int,
        initializers: Mapping[int, Any],
        *,
        weights_layout: Layout | None,
        only_portable: bool,
        scratch_limit: int,
        telemetry: RouteTelemetry | None,
    ) -> None:
        check_constants(node, initializers, weights_layout=weights_layout)
        self.node, self.node_id, self.telemetry = node, node_id, telemetry
        self.runtime, self._modules = runtime, modules
        self._only_portable, self._scratch_limit = only_portable, scratch_limit
        self._layout = resolve_layout(node, weights_layout)
        self._lock = threading.RLock()
        self._constants = {i: self._upload(i, value) for i, value in initializers.items()}
        self._scratch = ScratchPool(runtime, f"node {node_id}")
        self._warmed: WarmedCalls[_Warm] = WarmedCalls()
        self._hot: dict[tuple[Any, ...], _Hot] = {}
        self._last_used: tuple[Allocation, ...] = ()
        self._dump_routes = route_dump_enabled()
        self._closed = False

    def _upload(self, index: int, value: Any) -> DeviceTensor:
        """A constant on the device, raw."""
        on_host = isinstance(value, np.ndarray)
        tensor = None if on_host else as_device_tensor(self.runtime, value, INPUT_NAMES[index])
        matrix = next((name for name, indices in MATRIX_INPUTS.items() if index == indices[0]), None)
        if matrix is not None and self._layout != "raw":
            host = value if tensor is None else tensor.numpy()
            return to_device(self.runtime, raw_weights(host, self._layout, bits=self.node.bits(matrix)))
        return to_device(self.runtime, value) if tensor is None else tensor

    # --- calls -------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> DeviceTensor:
        """Execute into a new tensor; operands as in :meth:`execute`. Not during capture: nothing is allocated there."""
        if not inputs or inputs[0] is None:
            raise QMoEError(f"{INPUT_NAMES[0]} (input 0) is required but absent")
        x = as_device_tensor(self.runtime, inputs[0], INPUT_NAMES[0])
        output = empty(self.runtime, x.shape, x.dtype)
        self.execute((x, *inputs[1:]), [output])
        return output

    def execute(self, inputs: Sequence[Any], outputs: Sequence[Any], valid_rows: Any = None) -> None:
        """Enqueue the node on the runtime's stream and return; the result is there when the stream gets there.

        Parameters
        ----------
        inputs : device arrays in ONNX order, contiguous; None for absent ones and for initializers
        outputs : one device array of the shape and dtype of input 0
        valid_rows : device int32 of one element that the device reads when the call runs: rows from that one on
            are neither computed nor counted, and their output is left untouched. None means all rows

        Raises
        ------
        QMoEError : an operand doesn't fit; nothing was allocated or launched.
        CaptureError : the stream is capturing and the call's signature was not warmed.
        CudaError, NvrtcError : the driver or the compiler failed; the kernel is as warm as before.
        """
        runtime = self.runtime
        with self._lock, runtime.lock, runtime.current():
            if self._closed:
                raise QMoEError(f"the kernel of node {self.node_id} is closed; create it again")
            runtime.collect()
            owner = registrar(runtime)
            hot = owner is None and self._launch_hot(inputs, outputs, valid_rows)
            if not hot:
                self._launch(inputs, outputs, valid_rows, owner)
        if owner is None:
            if not hot:
                free_after_use(runtime, (*inputs, *outputs, valid_rows))
            runtime.synchronize()
            if self._dump_routes:
                dump_routes(self, inputs[1])

    def _launch_hot(self, inputs: Sequence[Any], outputs: Sequence[Any], valid_rows: Any) -> bool:
        """Launch a call that :meth:`_launch` has prepared for; False if it isn't one. All of its host time counts."""
        tensors = (*inputs, *outputs, valid_rows)
        key, addresses = self._hot_key(inputs, tensors)
        hot = self._hot.get(key)
        if hot is None or hot.prepared.generation != self._scratch.generation:
            return False
        prepared = hot.prepared
        bound = (key, addresses)
        if bound != prepared.addresses:
            prepared.addresses = ()
            for arguments, name, position in hot.patches:
                setattr(arguments, name, addresses[position])
            prepared.addresses = bound
        for launch in prepared.launches:
            launch.enqueue()
        self._last_used = hot.used
        return True

    def _hot_key(self, inputs: Sequence[Any], tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
        """What identifies a prepared hot call, and its addresses; a key that is in no table where it can't be hot."""
        runtime, combined = self.runtime, 0
        record = None if self.telemetry is None else self.telemetry.record
        key: list[Any] = [len(inputs), None if record is None else record.identity]
        addresses: list[int] = []
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                addresses.append(0)
            elif type(tensor) is DeviceTensor and tensor.runtime is runtime and not tensor.read_only:
                key.append(tensor.signature)
                addresses.append(tensor.pointer)
                combined |= tensor.pointer
            else:
                return (), addresses
        return ((), addresses) if combined % _FULL_ALIGNMENT else (tuple(key), addresses)

    def _launch(self, inputs: Sequence[Any], outputs: Sequence[Any], valid_rows: Any, owner: Registrar | None) -> None:
        operands = self._view(inputs, outputs, valid_rows)
        warm = self._warmed.get(operands.signature)
        if warm is None:
            warm = _Warm(self._describe(operands))
            if not warm.call.rows:
                self._skip(owner)
                return
            if owner is not None:
                self._warmed.require(operands.signature)
        prepared = self._run(warm, operands, owner)
        if owner is None:
            self._warmed.remember(operands.signature, warm)
            self._remember_hot(prepared, inputs, (*inputs, *outputs, valid_rows))

    def _remember_hot(self, prepared: _Prepared, inputs: Sequence[Any], tensors: tuple[Any, ...]) -> None:
        key, _ = self._hot_key(inputs, tensors)
        if not key:
            return
        positions: dict[AddressSource, int] = {i: i for i, value in enumerate(inputs) if value is not None}
        positions.update(output=len(inputs), valid_rows=len(inputs) + 1)
        patches = tuple(
            (launch.arguments, name, positions[source])
            for launch, step in zip(prepared.launches, prepared.plan.steps, strict=True)
            for name, source in step.pointers
            if source in positions
        )
        if len(self._hot) >= _MAX_HOT:
            self._hot.clear()
        self._hot[key] = _Hot(prepared, patches, self._last_used)

    def _view(self, inputs: Sequence[Any], outputs: Sequence[Any], valid_rows: Any) -> _Operands:
        if len(outputs) != 1:
            raise QMoEError(f"outputs: expected exactly 1 array, got {len(outputs)}")
        runtime = self.runtime
        views = [
            None if value is None else as_device_tensor(runtime, value, INPUT_NAMES[min(i, len(INPUT_NAMES) - 1)])
            for i, value in enumerate(inputs)
        ]
        merged = merge_operands(self._constants, views)
        output = as_device_tensor(runtime, outputs[0], "output", writable=True)
        rows = None if valid_rows is None else as_device_tensor(runtime, valid_rows, "valid_rows")
        record = None if self.telemetry is None else self.telemetry.record
        signature = CallSignature(
            tuple([None if v is None else v.signature for v in merged] + [None if rows is None else rows.signature]),
            (output.signature,),
            () if record is None else (record.identity,),
        )
        operands = _Operands(merged, output, rows, record, signature)
        _check_elements(operands)
        return operands

    def _describe(self, operands: _Operands) -> CallDescription:
        """Check everything that a signature says; a warmed one has been checked."""
        if self._layout != "raw":
            for indices in MATRIX_INPUTS.values():
                if operands.inputs[indices[0]] is not None and indices[0] not in self._constants:
                    raise QMoEError(
                        f"{INPUT_NAMES[indices[0]]}: weights in the SM80 layout are converted once, when the kernel is "
                        "created; give them as initializers"
                    )
        call = describe_call(self.node, operands.inputs, weights_layout="raw")
        output, rows = operands.output, operands.valid_rows
        check_output(call, output)
        if rows is not None and (rows.dtype != np.int32 or rows.shape not in ((), (1,))):
            raise QMoEError(f"valid_rows: expected one int32 on the device, got {rows.dtype} {list(rows.shape)}")
        return call

    def _skip(self, owner: Registrar | None) -> None:
        """A call of zero rows: the empty output is there already."""
        reason = "the last call had zero rows, which leaves nothing to capture"
        self._warmed.clear(reason)
        self._hot.clear()
        if owner is not None:
            raise CaptureError(
                f"node {self.node_id}: a call of zero rows can't be captured. End this capture, and capture a call "
                "that has rows once it has run eagerly"
            )

    # --- launches ----------------------------------------------------------------------------------

    def _run(self, warm: _Warm, operands: _Operands, owner: Registrar | None) -> _Prepared:
        pointers = [0 if v is None else v.pointer for v in operands.inputs]
        output, rows, record = operands.output.pointer, operands.valid_rows, operands.telemetry
        combined = output
        for pointer in pointers:
            combined |= pointer
        alignment = () if not combined % _FULL_ALIGNMENT else _alignment(operands)
        prepared = warm.variants.get(alignment)
        if prepared is None:
            if owner is not None:
                raise CaptureError(
                    f"node {self.node_id}: the operands' alignment differs from that of the warmed calls. End this "
                    "capture, run the call once eagerly with these operands, capture again"
                )
            prepared = self._prepare(warm.call, dict(alignment))
        if owner is not None:
            self._register(owner, operands)
        addresses = (
            *pointers,
            output,
            0 if rows is None else rows.pointer,
            0 if record is None else record.pointer,
        )
        if owner is None and prepared.generation == self._scratch.generation:
            if addresses != prepared.addresses:
                self._bind(prepared, addresses, _scratch_addresses(prepared))
            for launch in prepared.launches:
                launch.enqueue()
        else:
            self._run_with_scratch(prepared, addresses, owner)
        self._last_used = prepared.scratch if record is None else (*prepared.scratch, record)
        warm.variants[alignment] = prepared
        return prepared

    def _run_with_scratch(self, prepared: _Prepared, addresses: tuple[int, ...], owner: Registrar | None) -> None:
        with self._scratch.call(owner) as scratch:
            prepared.generation = -1
            slots = scratch.reserve(prepared.plan.scratch)
            self._bind(prepared, addresses, slots)
            for launch in prepared.launches:
                launch.enqueue()
            scratch.publish()
        prepared.scratch = tuple(scratch.used[slot] for slot, _ in prepared.plan.scratch)
        prepared.generation = self._scratch.generation

    def _prepare(self, call: CallDescription, alignment: Mapping[AddressSource, int]) -> _Prepared:
        plan = self._choose_plan(call, alignment)
        _LOG.debug("node %s: %d rows take the %s kernels, %s", self.node_id, call.rows, plan.variant, plan.reason)
        self._modules.preload([step.module for step in plan.steps])
        launches = tuple(
            self.runtime.prepare(step, self._modules.function(step.module, step.entry), f"node {self.node_id}")
            for step in plan.steps
        )
        return _Prepared(plan, launches)

    def _bind(self, prepared: _Prepared, addresses: tuple[int, ...], scratch: Mapping[str, int]) -> None:
        operands = len(INPUT_NAMES)
        sources: dict[AddressSource, int] = {i: address for i, address in enumerate(addresses[:operands]) if address}
        sources.update(scratch)
        output, valid_rows, telemetry = addresses[operands:]
        sources.update(output=output, valid_rows=valid_rows, telemetry=telemetry)
        prepared.addresses = ()
        for launch, step in zip(prepared.launches, prepared.plan.steps, strict=True):
            launch.bind(step.pointers, sources)
        prepared.addresses = addresses

    def _register(self, owner: Registrar, operands: _Operands) -> None:
        """Give the graph its share in all that its nodes address (scratch is registered as it is reserved)."""
        tensors = [*operands.inputs, operands.output, operands.valid_rows]
        for tensor in tensors:
            if tensor is None:
                continue
            if tensor.allocation is not None and tensor.runtime is self.runtime:
                owner.register(tensor.allocation)
            else:
                owner.keep(tensor)
        if operands.telemetry is not None:
            owner.register(operands.telemetry)

    # --- for embedders -----------------------------------------------------------------------------

    def capture_support(self, inputs: Sequence[Any], outputs: Sequence[Any], valid_rows: Any = None) -> CaptureSupport:
        """Whether this very call can be captured: *unsupported, because…* until it has succeeded eagerly."""
        with self._lock, self.runtime.lock, self.runtime.current():
            return self._warmed.support(self._view(inputs, outputs, valid_rows).signature)

    def plan(self, inputs: Sequence[Any], outputs: Sequence[Any] | None = None, valid_rows: Any = None) -> Plan:
        """What a call with these operands would launch: the variant, why it was chosen, scratch and steps."""
        with self._lock, self.runtime.lock, self.runtime.current():
            target = [inputs[0]] if outputs is None else outputs
            operands = self._view(inputs, target, valid_rows)
            return self._choose_plan(self._describe(operands), dict(_alignment(operands)))

    def _choose_plan(self, call: CallDescription, alignment: Mapping[AddressSource, int]) -> Plan:
        return choose_plan(
            call,
            self.runtime.capabilities(),
            alignment,
            only_portable=self._only_portable,
            scratch_limit=self._scratch_limit,
        )

    def graph_resources(self) -> GraphResources:
        """A share in everything that the last call's nodes address beside its operands.

        For an embedder that captures by itself and wants to hold the memory explicitly; close it after the
        graph's last replay. (Under such a capture the graph takes its share by itself as well.)
        """
        with self._lock, self.runtime.lock:
            constants = [t.allocation for t in self._constants.values() if t.allocation is not None]
            return GraphResources(self.runtime, (*self._last_used, *constants), tuple(self._constants.values()))

    def scratch_capacities(self) -> dict[str, int]:
        """Scratch slot → bytes of the warm pool."""
        with self._lock:
            return self._scratch.capacities()

    def close(self) -> None:
        """Drain and give up scratch and constants, except what graphs own. Repeating it does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._warmed.clear("the kernel is closed")
            self._hot.clear()
            self._constants.clear()
            self._last_used = ()
            self._scratch.close()


def _scratch_addresses(prepared: _Prepared) -> dict[str, int]:
    slots = (slot for slot, _ in prepared.plan.scratch)
    return {slot: allocation.pointer for slot, allocation in zip(slots, prepared.scratch, strict=True)}


def _check_elements(operands: _Operands) -> None:
    """Refuse what isn't aligned to its elements: such an access would end the context for everybody in it."""
    named = [*zip(INPUT_NAMES, operands.inputs, strict=False), ("output", operands.output)]
    for name, tensor in (*named, ("valid_rows", operands.valid_rows)):
        if tensor is not None and tensor.pointer % tensor.dtype.itemsize:
            raise QMoEError(
                f"{name}: {tensor.pointer:#x} is not aligned to its elements ({tensor.dtype}); copy it elsewhere"
            )


def _alignment(operands: _Operands) -> Alignment:
    """The operands that are aligned to less than 16 bytes, and to how much."""
    sources: list[tuple[AddressSource, DeviceTensor | None]] = [
        *enumerate(operands.inputs),
        ("output", operands.output),
    ]
    return tuple(
        (source, tensor.pointer & -tensor.pointer)
        for source, tensor in sources
        if tensor is not None and tensor.pointer % _FULL_ALIGNMENT
    )
