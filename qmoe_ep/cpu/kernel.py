"""One QMoE node on the CPU.

Routes of all rows are computed first and sorted by expert; each selected expert is visited once per call for all its
tokens, and the results land in a table with one line per route, which is summed per row in slot order. So the result
doesn't depend on how tokens are grouped.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from qmoe_ep.activation import activate, split_fused
from qmoe_ep.call import CallDescription, check_constants, check_output, describe_call, merge_operands
from qmoe_ep.cpu.experts import ExpertSource, PagedExperts, ResidentExperts, open_pages
from qmoe_ep.cpu.mapped import read_whole
from qmoe_ep.cpu.products import Product, aligned_rows
from qmoe_ep.errors import QMoEError
from qmoe_ep.operator import GLOBAL_SCALES, INPUT_NAMES, MATRIX_INPUTS, ROUTER_WEIGHTS, Layout, QMoENode, resolve_layout
from qmoe_ep.quantization import raw_weights
from qmoe_ep.routing import route

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from qmoe_ep.call import Experts
    from qmoe_ep.cpu.experts import Pager
    from qmoe_ep.cpu.products import ExpertWeights, Floats, Products
    from qmoe_ep.telemetry import RouteTelemetry

__all__ = ["CpuKernel"]

Signature: TypeAlias = tuple[tuple[tuple[int, ...], Any] | None, ...]
_MAX_SIGNATURES = 64
_BATCH_BYTES = 64 << 20
"""What the rows between FC1 and FC2 of several experts that are computed together may take."""

_ROW_GAP = 16
"""Float32 values between rows: a cache line."""

_log = logging.getLogger("qmoe_ep")


class CpuKernel:
    """Executes one node; made by :meth:`CpuExecutionProvider.create_kernel`.

    Calls of one kernel are serialised by its lock; different kernels run at the same time.

    Attributes
    ----------
    telemetry : its producer of route telemetry, None where the provider has it off
    """

    def __init__(
        self,
        node: QMoENode,
        node_id: int,
        initializers: Mapping[int, NDArray[Any]],
        *,
        weights_layout: Layout | None,
        products: Products,
        pager: Pager | None,
        telemetry: RouteTelemetry | None,
    ) -> None:
        experts = check_constants(node, initializers, weights_layout=weights_layout)
        self.node = node
        self.node_id = node_id
        self.weights_layout = weights_layout
        self.telemetry = telemetry
        self._products = products
        self._paged = None if pager is None else self._open_pages(pager, experts, initializers)
        self._constants = self._keep(initializers)
        self._raw = self._convert_layout() if experts is not None and self._paged is None else {}
        self._calls: OrderedDict[Signature, CallDescription] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Let go of the constants, after a call in flight; later calls are refused. Repeating it does nothing."""
        with self._lock:
            self._closed = True
            self._constants, self._raw, self._paged = {}, {}, None
            self._calls.clear()

    @property
    def paged(self) -> bool:
        """Whether experts are read from their files when they are selected."""
        return self._paged is not None

    def _open_pages(
        self, pager: Pager, experts: Experts | None, initializers: Mapping[int, NDArray[Any]]
    ) -> PagedExperts | None:
        reason: object = "its experts aren't all initializers"
        if experts is not None:
            tensors = open_pages(initializers)
            if isinstance(tensors, dict):
                small = {m[2] for m in MATRIX_INPUTS.values()} | set(GLOBAL_SCALES.values())
                biases = {i: initializers[i] for i in sorted(small & initializers.keys())}
                biases = {index: read_whole(INPUT_NAMES[index], array) for index, array in biases.items()}
                return PagedExperts(pager, self._products, self.node_id, experts, tensors, biases)
            reason = tensors
        _log.warning("node %s keeps its experts in memory in spite of weight offload: %s", self.node_id, reason)
        return None

    def _keep(self, initializers: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Initializers to hold: resident ones, and mapped ones that are only paged."""
        paged = {i for m in MATRIX_INPUTS.values() for i in (m[0], m[1], m[3])} if self._paged is not None else set()
        return {i: a if i in paged else read_whole(INPUT_NAMES[i], a) for i, a in initializers.items()}

    def _convert_layout(self) -> dict[int, NDArray[np.uint8]]:
        """Weights in the raw layout by input index, where they are held in another one; those are let go of."""
        layout = resolve_layout(self.node, self.weights_layout)
        if layout == "raw":
            return {}
        converted = {}
        for name, (index, *_) in MATRIX_INPUTS.items():
            if index in self._constants:
                packed = self._constants[index]
                converted[index] = raw_weights(packed, layout, bits=self.node.bits(name))
                # Shape and dtype are all that is asked of it from now on.
                self._constants[index] = np.broadcast_to(np.uint8(0), packed.shape)
        return converted

    def __call__(self, *inputs: NDArray[Any] | None) -> NDArray[Any]:
        """Execute and return a new output array; operands as in :meth:`execute`."""
        if not inputs or inputs[0] is None:
            raise QMoEError(f"{INPUT_NAMES[0]} (input 0) is required but absent")
        _check_arrays(inputs)
        output = np.empty(inputs[0].shape, inputs[0].dtype)
        self.execute(inputs, [output])
        return output

    def execute(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        valid_rows: int | NDArray[Any] | None = None,
    ) -> None:
        """Execute the node; ``outputs[0]`` is written only if everything succeeded.

        Parameters
        ----------
        inputs : arrays in ONNX order, strided ones welcome; ``None`` for absent ones and for those
            given as initializers
        outputs : one array of the shape and dtype of input 0
        valid_rows : rows from this one on are neither computed nor counted, and their output is left
            as it is

        Raises
        ------
        QMoEError
            Naming the operand, what was expected and what came.
        """
        _check_arrays(inputs)
        with self._lock:
            if self._closed:
                raise QMoEError(f"the kernel of node {self.node_id} is closed; create it again")
            operands = merge_operands(self._constants, inputs)
            call = self._describe(operands)
            output = _checked_output(call, outputs)
            rows = _valid_rows(call, valid_rows)
            if rows:
                computed, chosen = self._compute(call, operands, rows)
                _write_rows(output, computed)
                if self.telemetry is not None:
                    self.telemetry.add_call(chosen, call.experts.num_experts, _logits(call, operands, rows))

    def _describe(self, operands: Sequence[NDArray[Any] | None]) -> CallDescription:
        signature = tuple(None if o is None else (o.shape, o.dtype) for o in operands)
        if (call := self._calls.get(signature)) is not None:
            self._calls.move_to_end(signature)
            return call
        call = describe_call(self.node, operands, weights_layout=self.weights_layout)
        self._calls[signature] = call
        if len(self._calls) > _MAX_SIGNATURES:
            self._calls.popitem(last=False)
        return call

    def _source(self, call: CallDescription, operands: Sequence[Any]) -> ExpertSource:
        if self._paged is not None:
            return self._paged
        experts = call.experts
        if self._raw:
            experts = experts.with_raw_layout()
            operands = [self._raw.get(i, operand) for i, operand in enumerate(operands)]
        return ResidentExperts(experts, operands, self._products.takes_packed)

    def _compute(self, call: CallDescription, operands: Sequence[Any], rows: int) -> tuple[Floats, NDArray[np.int32]]:
        """Float32 [rows, H] of the first ``rows`` rows, and the experts that they select, int32 [rows, k]."""
        experts = call.experts
        x = _float_rows(operands[0].reshape(call.rows, experts.hidden_size)[:rows])
        router_weights = operands[ROUTER_WEIGHTS]
        chosen, weights = route(
            _logits(call, operands, rows),
            None if router_weights is None else router_weights[:rows],
            top_k=call.top_k,
            normalize=bool(self.node.normalize_routing_weights),
            sparse_mixer=bool(self.node.use_sparse_mixer),
        )
        routes = _Routes.by_expert(chosen)
        source = self._source(call, operands)
        contributions = aligned_rows(routes.count, experts.hidden_size)
        with np.errstate(all="ignore"), source.execution(routes.experts, routes.count):
            for batch in routes.batches(1 if source.one_by_one else _routes_at_once(call)):
                with source.use(batch.experts) as used:
                    places, part = source.places(batch.experts), slice(batch.bounds[0], batch.bounds[-1])
                    _run_experts(call, self._products, used, places, batch, x, contributions[part])
        output = np.zeros((rows, experts.hidden_size), np.float32)

        def combine(part: slice) -> None:
            with np.errstate(all="ignore"):
                for slot in range(call.top_k):
                    routed = contributions[routes.places[part, slot]]
                    routed *= weights[part, slot, None].astype(np.float32)
                    output[part] += routed

        self._products.for_rows(rows, experts.hidden_size, combine)
        return output, chosen


@dataclass(frozen=True, slots=True)
class _Routes:
    """Routes sorted by expert, those of one expert by row.

    Attributes
    ----------
    experts : distinct, ascending
    bounds : where each expert's routes begin, and the end of the last one's
    rows : integers [routes], the row of each
    places : integers [rows, k], where each row's routes are; of the whole call
    """

    experts: list[int]
    bounds: list[int]
    rows: NDArray[np.int64]
    places: NDArray[np.int64]

    @classmethod
    def by_expert(cls, chosen: NDArray[np.int32]) -> _Routes:
        order = np.argsort(chosen, axis=None, kind="stable")
        places = np.empty(order.size, np.int64)
        places[order] = np.arange(order.size)
        experts, starts = np.unique(chosen.reshape(-1)[order], return_index=True)
        bounds = [*starts.tolist(), order.size]
        return cls(experts.tolist(), bounds, order // chosen.shape[1], places.reshape(chosen.shape))

    @property
    def count(self) -> int:
        return self.bounds[-1] - self.bounds[0]

    def batches(self, most: int) -> Iterator[_Routes]:
        """Consecutive experts with up to ``most`` routes together, or one with more."""
        first = 0
        for last in range(1, len(self.experts) + 1):
            if last == len(self.experts) or self.bounds[last + 1] - self.bounds[first] > most:
                bounds = self.bounds[first : last + 1]
                rows = self.rows[bounds[0] : bounds[-1]]
                yield _Routes(self.experts[first:last], bounds, rows, self.places)
                first = last


def _routes_at_once(call: CallDescription) -> int:
    experts = call.experts
    between = experts.fc1.out_features + (0 if experts.fc3 is None else experts.inter_size) + experts.inter_size
    return max(1, _BATCH_BYTES // (4 * between))


def _run_experts(
    call: CallDescription,
    products: Products,
    used: ExpertWeights,
    places: Sequence[int],
    batch: _Routes,
    x: Floats,
    out: Floats,
) -> None:
    """W2·activation(W1·x + b1) + b2 of the batch's routes, from x [rows, ≥ H] to out [routes, H]."""
    experts, tokens = call.experts, batch.count
    bounds = [bound - batch.bounds[0] for bound in batch.bounds]
    rows = x[batch.rows][:, : experts.hidden_size]
    fc1 = aligned_rows(tokens, experts.fc1.out_features)
    work = [Product(used.fc1, rows, fc1)]
    gate, up = split_fused(experts.gating, fc1)
    if used.fc3 is not None:
        up = aligned_rows(tokens, experts.inter_size)
        work.append(Product(used.fc3, rows, up))
    products.run(work, places, bounds)
    activated = aligned_rows(tokens, experts.inter_size)

    def apply(part: slice) -> None:
        with np.errstate(all="ignore"):
            activated[part] = activate(call.node, gate[part], None if up is None else up[part])

    products.for_rows(tokens, experts.inter_size, apply)
    products.run([Product(used.fc2, activated, out)], places, bounds)


def _float_rows(operand: NDArray[Any]) -> Floats:
    """Rows as float32, some distance apart so that equal columns don't share a place in caches."""
    rows, features = operand.shape
    x = np.zeros((rows, features + _ROW_GAP), np.float32)
    x[:, :features] = operand
    return x


def _check_arrays(inputs: Sequence[object]) -> None:
    for index, operand in enumerate(inputs):
        if operand is not None and not isinstance(operand, np.ndarray):
            name = INPUT_NAMES[index] if index < len(INPUT_NAMES) else f"input {index}"
            raise QMoEError(f"{name}: expected a NumPy array, got {type(operand).__name__}; convert it")


def _checked_output(call: CallDescription, outputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if len(outputs) != 1:
        raise QMoEError(f"outputs: expected exactly 1 array, got {len(outputs)}")
    output = outputs[0]
    if not isinstance(output, np.ndarray):
        raise QMoEError(f"output: expected a NumPy array, got {type(output).__name__}; allocate it like the input")
    check_output(call, output)
    if not output.flags.writeable:
        raise QMoEError("output: the array is read-only; give a writable one")
    return output


def _logits(call: CallDescription, operands: Sequence[Any], rows: int) -> NDArray[Any]:
    """The router's logits of the first rows: [rows, E]."""
    logits: NDArray[Any] = operands[1].reshape(call.rows, call.experts.num_experts)[:rows]
    return logits


def _valid_rows(call: CallDescription, valid_rows: int | NDArray[Any] | None) -> int:
    if valid_rows is None:
        return call.rows
    array = np.asarray(valid_rows)
    if array.size != 1 or array.dtype.kind not in "iu":
        raise QMoEError(f"valid_rows: expected one integer, got {array.dtype} of shape {list(array.shape)}")
    return min(max(int(array.reshape(())), 0), call.rows)


def _write_rows(output: NDArray[Any], computed: NDArray[np.float32]) -> None:
    """Round the leading rows to the output's dtype, which may be strided and of rank 2 or 3."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = computed.astype(output.dtype)
    if output.ndim == 2:
        output[: rounded.shape[0]] = rounded
        return
    sequence = output.shape[1]
    for batch in range(-(-rounded.shape[0] // sequence)):
        part = rounded[batch * sequence : (batch + 1) * sequence]
        output[batch, : part.shape[0]] = part
