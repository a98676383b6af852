"""Problems whose expert tensors lie in one file, as external data does, for tests of paging."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from problems import Array, Problem, Recipe, build

from qmoe_ep import CpuExecutionProvider
from qmoe_ep.cpu.kernel import CpuKernel
from qmoe_ep.operator import MATRIX_INPUTS

__all__ = ["PagedFile", "call_inputs", "packed_bytes", "paged_indices", "routed", "store", "two_of_four"]

_ALIGNMENT = 64


@dataclass(frozen=True)
class PagedFile:
    """A problem's initializers in a file.

    Attributes
    ----------
    path : of the file
    offsets : of each tensor by input index
    """

    problem: Problem
    path: Path
    offsets: dict[int, int]

    def map(self) -> dict[int, Array]:
        """The initializers as fresh mappings, one each."""
        return {
            index: np.memmap(self.path, np.uint8, "r", offset, (self._of(index).nbytes,))
            .view(self._of(index).dtype)
            .reshape(self._of(index).shape)
            for index, offset in self.offsets.items()
        }

    def _of(self, index: int) -> Array:
        array = self.problem.inputs[index]
        assert array is not None
        return array

    def kernel(self, provider: CpuExecutionProvider, node_id: int = 0) -> CpuKernel:
        """A kernel whose initializers are mapped anew."""
        return provider.create_kernel(
            self.problem.node, node_id, self.map(), weights_layout=self.problem.weights_layout
        )

    def resident(self) -> Array:
        """What a provider without paging computes."""
        return self.kernel(CpuExecutionProvider())(*call_inputs(self.problem))


def store(problem: Problem, folder: Path, name: str = "experts.bin") -> PagedFile:
    """Write a problem's initializers to a file, each at a multiple of 64 bytes."""
    offsets: dict[int, int] = {}
    path = folder / name
    with path.open("wb") as file:
        for index, array in enumerate(problem.inputs):
            if array is not None and 2 <= index < 14:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                offsets[index] = file.tell()
                file.write(array.tobytes())
    return PagedFile(problem, path, offsets)


def call_inputs(problem: Problem) -> list[Array | None]:
    """What a call brings when the initializers are given at creation."""
    return [a if i < 2 or i == 14 else None for i, a in enumerate(problem.inputs)]


def routed(problem: Problem, experts: Iterable[int]) -> list[Array | None]:
    """Inputs of a call, one row for each of ``experts``, which it selects first."""
    chosen = np.array(list(experts), np.int64)
    rng = np.random.default_rng(7)
    x = rng.standard_normal((chosen.size, problem.recipe.hidden)).astype(np.float32)
    logits = np.zeros((chosen.size, problem.recipe.experts), np.float32)
    logits[np.arange(chosen.size), chosen] = 5
    return [x, logits]


def two_of_four(**changes: object) -> Problem:
    """Four experts, k = 1, each expanding to the same number of bytes."""
    return build(replace(Recipe(experts=4, k=1, hidden=64, inter=32), **changes))  # type: ignore[arg-type]


def paged_indices(problem: Problem) -> set[int]:
    """Input indices of weights, scales and zero points."""
    return {i for m in MATRIX_INPUTS.values() for i in (m[0], m[1], m[3]) if i < len(problem.inputs)}


def packed_bytes(problem: Problem, expert: int = 0) -> int:
    """Bytes of one expert's weights, scales and zero points."""
    arrays = [problem.inputs[i] for i in paged_indices(problem)]
    return sum(a[expert].nbytes for a in arrays if a is not None)


def expanded_bytes(problem: Problem) -> int:
    """Bytes of one expert in float32."""
    recipe = problem.recipe
    names = ("fc1", "fc2", "fc3") if recipe.has_fc3 else ("fc1", "fc2")
    return sum(4 * out * inner for out, inner in map(recipe.features, names))
