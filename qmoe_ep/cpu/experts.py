"""Where a CPU kernel gets its experts from: arrays of the process, or slices of mapped files."""

from __future__ import annotations

import contextlib
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from qmoe_ep import offload
from qmoe_ep.cpu.expert_cache import ExpertCache
from qmoe_ep.cpu.mapped import MappedTensor, open_tensor
from qmoe_ep.cpu.products import Expanded, ExpertWeights, Packed, aligned_bytes, aligned_rows
from qmoe_ep.offload import LayerFigures, OffloadStats, UseCounters
from qmoe_ep.operator import GLOBAL_SCALES, INPUT_NAMES, MATRIX_INPUTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from qmoe_ep.call import ExpertMatrix, Experts
    from qmoe_ep.cpu.products import Floats, Products

__all__ = ["ExpertSource", "PagedExperts", "Pager", "ResidentExperts", "open_pages"]


class ExpertSource(Protocol):
    """Hands out the experts of one call.

    Attributes
    ----------
    one_by_one : whether only one expert may be in use at a time
    """

    @property
    def one_by_one(self) -> bool: ...

    def execution(self, experts: Sequence[int], routes: int) -> contextlib.AbstractContextManager[None]:
        """Surround a call that uses ``experts``, distinct ones in order of use, for ``routes`` routes."""

    def use(self, experts: Sequence[int]) -> contextlib.AbstractContextManager[ExpertWeights]:
        """Weights of the experts that a call uses next, valid inside the ``with`` block."""

    def places(self, experts: Sequence[int]) -> Sequence[int]:
        """Where they are in the first dimension of those weights."""


class ResidentExperts:
    """Experts whose packed tensors are arrays of the process.

    Parameters
    ----------
    experts : their description; layouts as the operands are
    operands : of the call, in ONNX order
    takes_packed : whether they can be multiplied with as they are
    """

    def __init__(self, experts: Experts, operands: Sequence[Any], takes_packed: bool) -> None:
        self._experts = experts
        self._operands = operands
        self.one_by_one = not takes_packed

    def execution(self, experts: Sequence[int], routes: int) -> contextlib.AbstractContextManager[None]:
        """Nothing to prepare."""
        return contextlib.nullcontext()

    def use(self, experts: Sequence[int]) -> contextlib.AbstractContextManager[ExpertWeights]:
        """The operands."""
        fc3 = self._experts.fc3
        return contextlib.nullcontext(
            ExpertWeights(
                fc1=self._packed(self._experts.fc1),
                fc2=self._packed(self._experts.fc2),
                fc3=None if fc3 is None else self._packed(fc3),
            )
        )

    def places(self, experts: Sequence[int]) -> Sequence[int]:
        """Their numbers."""
        return experts

    def _packed(self, matrix: ExpertMatrix) -> Packed:
        weights, scales, bias, zero_points = (self._operands[index] for index in MATRIX_INPUTS[matrix.name])
        return Packed(matrix, weights, scales, zero_points, bias, self._operands[GLOBAL_SCALES[matrix.name]])


# --- paging ----------------------------------------------------------------------------------------


class Pager:
    """What the paged kernels of one provider share: the host cache, memory to expand into, figures.

    Parameters
    ----------
    budget : bytes of float32 that the host cache may hold
    ageing_ticks : of the host cache, see :class:`ExpertCache`

    Attributes
    ----------
    turn : held during a paged call, so that calls of several threads don't each expand an expert at the same time
    """

    def __init__(self, budget: int, ageing_ticks: int) -> None:
        self.turn = threading.Lock()
        self.cache: ExpertCache[ExpertWeights] = ExpertCache(budget, ageing_ticks)
        self.counters = UseCounters()
        self._scratch: dict[str, NDArray[np.uint8]] = {}
        offload.register(self)

    def scratch(self, slot: str, nbytes: int) -> NDArray[np.uint8]:
        """Reusable memory, uint8 [nbytes]; its contents are those of the last use. To be used in one's turn."""
        memory = self._scratch.get(slot)
        if memory is None or memory.size < nbytes:
            self._scratch.pop(slot, None)
            memory = self._scratch[slot] = aligned_bytes(nbytes)
        return memory[:nbytes]

    def rows(self, slot: str, count: int, features: int) -> Floats:
        """Reusable rows, float32 [count, features], likewise."""
        rows: Floats = self.scratch(slot, 4 * count * features).view(np.float32).reshape(count, features)
        return rows

    def stats(self) -> OffloadStats:
        """Figures of the provider."""
        return self.counters.stats(self.cache.figures())

    def reset_stats(self) -> None:
        """Set counters to zero."""
        self.counters.reset()
        self.cache.reset_figures()

    def close(self) -> None:
        """Give memory back and leave the process-wide figures."""
        offload.unregister(self)
        self.cache.budget = 0
        self.cache.clear()
        with self.turn:
            self._scratch.clear()


def open_pages(initializers: Mapping[int, NDArray[Any]]) -> dict[int, MappedTensor] | str:
    """Open the files behind all weights, scales and zero points, or say why a node's experts can't be paged.

    Raises
    ------
    QMoEError
        If a file is shorter than its tensor, or isn't the one that was mapped.
    """
    tensors: dict[int, MappedTensor] = {}
    for weights, scales, _, zero_points in MATRIX_INPUTS.values():
        for index in (weights, scales, zero_points):
            if index not in initializers:
                continue
            tensor = open_tensor(INPUT_NAMES[index], initializers[index])
            if isinstance(tensor, str):
                return tensor
            tensors[index] = tensor
    return tensors


class PagedExperts:
    """Experts that are read from mapped files when they are selected, expanded, used and released.

    Parameters
    ----------
    layer : the embedder's number of the node
    tensors : weights, scales and zero points by input index
    biases : and global scales by input index; they are small and stay resident
    """

    one_by_one = True

    def __init__(
        self,
        pager: Pager,
        products: Products,
        layer: int,
        experts: Experts,
        tensors: Mapping[int, MappedTensor],
        biases: Mapping[int, NDArray[Any]],
    ) -> None:
        self._pager, self._products, self._layer = pager, products, layer
        self._experts, self._tensors, self._biases = experts, tensors, biases
        # A file is named together with the first tensor in it.
        self._files = {tensor.file: tensor.name for _, tensor in sorted(tensors.items(), reverse=True)}
        identities = tuple(tensor.identity for _, tensor in sorted(tensors.items()))
        self._key = (products.name, layer, experts.matrices, identities)
        self._following: dict[int, int] = {}

    @property
    def expanded_bytes(self) -> int:
        """Bytes of one expert in float32."""
        return sum(4 * m.out_features * m.in_features for m in self._experts.matrices)

    @contextlib.contextmanager
    def execution(self, experts: Sequence[int], routes: int) -> Iterator[None]:
        """Take a turn, make sure that the files are still what was opened, and count the call if it succeeds.

        Raises
        ------
        QMoEError
            If a file was changed, truncated or replaced.
        """
        with self._pager.turn:
            for file, name in self._files.items():
                file.check(name)
            self._following = dict(pairwise(experts))
            yield
            used = LayerFigures(executions=1, active_experts=routes, unique_experts=len(experts))
            self._pager.counters.add(self._layer, used)

    def places(self, experts: Sequence[int]) -> Sequence[int]:
        """There is one at a time."""
        return [0]

    def use(self, experts: Sequence[int]) -> contextlib.AbstractContextManager[ExpertWeights]:
        """One expert, expanded; the next one's bytes are asked for meanwhile."""
        (expert,) = experts
        following = self._following.get(expert)
        if following is not None and (*self._key, following) not in self._pager.cache:
            for tensor in self._tensors.values():
                tensor.read_ahead(following)
        key = (*self._key, expert)
        return self._pager.cache.lease(key, self.expanded_bytes, lambda keep: self._load(expert, keep))

    def _load(self, expert: int, keep: bool) -> ExpertWeights:
        fc3 = self._experts.fc3
        return ExpertWeights(
            fc1=self._expand(self._experts.fc1, expert, keep),
            fc2=self._expand(self._experts.fc2, expert, keep),
            fc3=None if fc3 is None else self._expand(fc3, expert, keep),
        )

    def _expand(self, matrix: ExpertMatrix, expert: int, keep: bool) -> Expanded:
        weights, scales, bias, zero_points = MATRIX_INPUTS[matrix.name]
        own, given = self._biases.get(bias), self._biases.get(GLOBAL_SCALES[matrix.name])
        packed = Packed(
            matrix,
            self._read(weights, expert)[None],
            self._read(scales, expert)[None] if scales in self._tensors else None,
            self._read(zero_points, expert)[None] if zero_points in self._tensors else None,
            None,
            None if given is None else given[expert : expert + 1],
        )
        rows, depth = matrix.out_features, matrix.in_features
        out = aligned_rows(rows, depth) if keep else self._pager.rows(matrix.name, rows, depth)
        self._products.expand(packed, 0, out)
        return Expanded(out[None], None if own is None else own[expert : expert + 1].astype(np.float32))

    def _read(self, index: int, expert: int) -> NDArray[Any]:
        tensor = self._tensors[index]
        array = tensor.read(expert, self._pager.scratch(INPUT_NAMES[index], tensor.expert_bytes))
        self._pager.counters.add(self._layer, LayerFigures(bytes_read=tensor.expert_bytes))
        return array
