"""Executes a plan on a runtime, simulated or real, without the provider: what kernel families are tested with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from problems import Problem

from qmoe_ep.kernels.plan import AddressSource, Plan
from qmoe_ep.memory import Allocation
from qmoe_ep.nvrtc_cache import ModuleCache
from qmoe_ep.runtime import Runtime

__all__ = ["Alignment", "PlanRunner"]

Alignment = dict[AddressSource, int]
Array = np.ndarray[Any, Any]


class PlanRunner:
    """Runs plans of problems with ``raw`` weights and contiguous operands."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.modules = ModuleCache(runtime)

    def run(
        self,
        problem: Problem,
        make_plan: Callable[[Alignment], Plan],
        *,
        valid_rows: int | None = None,
        offset: int = 0,
        extra: Mapping[AddressSource, int] | None = None,
    ) -> Array:
        """Return the output, which was full of NaN before.

        Parameters
        ----------
        make_plan : called with the alignment of every operand
        valid_rows : null if None
        offset : elements by which operands lie behind an aligned address, as slices of larger tensors do
        extra : further addresses, such as ``"telemetry"``
        """
        operands: dict[AddressSource, Array] = {i: a for i, a in enumerate(problem.inputs) if a is not None}
        output = problem.poisoned_output()
        operands["output"] = output
        if valid_rows is not None:
            operands["valid_rows"] = np.array([valid_rows], np.int32)
        with contextlib.ExitStack() as stack:
            addresses: dict[AddressSource, int] = dict(extra or {})
            alignment: Alignment = {}
            for source, array in operands.items():
                shift = offset * array.itemsize
                addresses[source] = self._place(stack, array.nbytes + shift, "operand").pointer + shift
                alignment[source] = min(addresses[source] & -addresses[source], 256)
                self.runtime.htod(addresses[source], np.ascontiguousarray(array))
            plan = make_plan(alignment)
            for slot, nbytes in plan.scratch:
                buffer = self._place(stack, nbytes, slot)
                addresses[slot] = buffer.pointer
                self.runtime.htod(buffer.pointer, np.full(buffer.nbytes, 0xFF, np.uint8))
            self._launch(plan, addresses)
            result = np.empty_like(output)
            self.runtime.dtoh(result, addresses["output"])
        return result

    def _place(self, stack: contextlib.ExitStack, nbytes: int, purpose: str) -> Allocation:
        allocation = self.runtime.allocate(max(nbytes, 1), purpose)
        stack.callback(allocation.release)
        return allocation

    def _launch(self, plan: Plan, addresses: Mapping[AddressSource, int]) -> None:
        launches = [
            (self.runtime.prepare(step, self.modules.function(step.module, step.entry), "test"), step)
            for step in plan.steps
        ]
        with self.runtime.lock, self.runtime.current():
            for launch, step in launches:
                launch.bind(step.pointers, addresses)
                launch.enqueue()
