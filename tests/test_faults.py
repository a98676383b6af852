"""Every driver and compiler call of the runtime layer is made to fail once: a clean error, and nothing leaks."""

from __future__ import annotations

import pytest
from simulated import SimulatedDriver, SimulatedNvrtc
from simulated.plugin import Simulation, install
from simulated.scenarios import everything, run_scale

from qmoe_ep import driver, user_objects
from qmoe_ep.errors import CaptureError, CudaError, NvrtcError
from qmoe_ep.runtime import Runtime


def attempt(simulated: Simulation) -> tuple[bool, bool]:
    """Run the scenario; return whether it went through, and whether the close did."""
    ran = closed = False
    try:
        runtime = Runtime()
    except CudaError:
        return ran, True
    try:
        everything(simulated, runtime)
        ran = True
    except (CudaError, NvrtcError, CaptureError):
        # The runtime stays usable, whatever failed.
        assert run_scale(runtime).tolist() == [3.0 * number for number in range(100)]
    try:
        runtime.close()
        closed = True
    except CudaError:
        runtime.close()
    return ran, closed


def test_without_a_failure(simulated: Simulation) -> None:
    assert attempt(simulated) == (True, True)


def calls_of_the_scenario() -> list[str]:
    """Return the names of the calls that the scenario makes, in order."""
    with pytest.MonkeyPatch.context() as patch:
        simulated = install(patch)
        attempt(simulated)
        driver.install(None, None)
        return simulated.log


# Made only after another call has failed, or in ways that the tests of their modules show.
RARE = {
    "cuUserObjectRelease",
    "cuDeviceGetCount",
    "cuDriverGetVersion",
    "cuCtxSetCurrent",
    "cuPointerGetAttribute",
    "cuEventElapsedTime",  # the benchmark's alone
}


def test_the_scenario_makes_every_call() -> None:
    known = {
        name for kind in (SimulatedDriver, SimulatedNvrtc) for name in dir(kind) if name.startswith(("cu", "nvrtc"))
    }
    assert known - {"nvrtcResult"} - set(calls_of_the_scenario()) == RARE


@pytest.mark.parametrize("part", range(4))
def test_each_call_fails_once(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    refused = 0
    for nth in range(1 + part, len(calls_of_the_scenario()) + 1, 4):
        with monkeypatch.context() as patch:
            simulated = install(patch)
            simulated.fail(None, nth)
            ran, closed = attempt(simulated)
            refused += not (ran and closed)
            if simulated.log[nth - 1] == "cuCtxPopCurrent":
                # The caller's context could not be restored; the error said so.
                simulated.thread.contexts.clear()
            try:
                simulated.check_end()
            except AssertionError as error:
                raise AssertionError(f"call {nth}, {simulated.log[nth - 1]}: {error}") from error
            finally:
                driver.install(None, None)
            assert user_objects.pending() == 0, simulated.log[nth - 1]
    assert refused > 20
