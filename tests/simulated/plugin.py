"""The fixture: the whole package on the simulated driver, with leaks and violations failing the test."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from qmoe_ep import driver, nvrtc_cache
from qmoe_ep.runtime import Runtime

from . import kernels_decode, kernels_grouped, kernels_portable, kernels_prefill, toys  # noqa: F401  register their kernels
from .driver import SimulatedDriver
from .machine import Machine
from .nvrtc import SimulatedNvrtc

__all__ = ["install", "simulated", "simulation"]


class Simulation(Machine):
    """The machine, and the modules that stand in for the bindings.

    Attributes
    ----------
    driver, nvrtc : what the package's calls reach
    """

    def __init__(self) -> None:
        super().__init__()
        self.driver = SimulatedDriver(self)
        self.nvrtc = SimulatedNvrtc(self)
        self._runtimes: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()
        self.registered = self._is_registered

    def watch(self, runtime: Runtime) -> None:
        """Know who captures a stream."""
        self._runtimes[runtime.stream] = runtime

    def _is_registered(self, stream: int, address: int) -> bool:
        runtime = self._runtimes.get(stream)
        if runtime is None:
            return True
        owner = runtime.capture or runtime.foreign_capture
        return owner is not None and any(owned.pointer == address for owned in owner.allocations)

    def check_end(self) -> None:
        """Fail where something leaked or broke a rule."""
        self.heal()
        # A runtime that was only dropped is closed by its finalizer, once what refers to it has been finalized.
        for _ in range(3):
            gc.collect()
        leaks = self.leaks()
        assert not self.violations, "\n".join(self.violations)
        assert not leaks, "leaked: " + ", ".join(leaks)
        assert not self.nvrtc.live_programs(), "a compiler's program was not destroyed"
        assert not [context for context in self.thread.contexts if context], "a context was left current"


def install(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """Put a new simulation in place of the driver; ``monkeypatch`` undoes the rest."""
    simulation = Simulation()
    monkeypatch.setenv("QMOE_EP_CACHE_DISABLE", "1")
    create = Runtime.__init__

    def watched(self: Runtime, *arguments: object, **options: object) -> None:
        create(self, *arguments, **options)
        simulation.watch(self)

    monkeypatch.setattr(Runtime, "__init__", watched)
    nvrtc_cache.clear_compiled()
    driver.install(simulation.driver, simulation.nvrtc)
    return simulation


@contextlib.contextmanager
def simulation() -> Iterator[Simulation]:
    """A simulated machine; :meth:`Simulation.check_end` is the caller's to call."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            yield install(patch)
        finally:
            driver.install(None, None)
            nvrtc_cache.clear_compiled()


@pytest.fixture
def simulated() -> Iterator[Simulation]:
    """A simulated machine; at the end nothing may be left over and no rule may have been broken."""
    with simulation() as machine:
        yield machine
        machine.check_end()
