"""The one check, and the door to the bindings."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cuda.bindings import driver as real_driver
from cuda.bindings import nvrtc as real_nvrtc
from simulated.plugin import Simulation

from qmoe_ep import driver
from qmoe_ep.errors import CudaError, NvrtcError


@pytest.mark.parametrize(("values", "expected"), [((), None), ((7,), 7), ((7, 8), (7, 8))])
def test_success_gives_the_values(values: tuple[int, ...], expected: object) -> None:
    assert driver.check((real_driver.CUresult.CUDA_SUCCESS, *values), "cuSomething", "do something") == expected


def test_a_driver_failure_names_code_call_and_purpose() -> None:
    result = (real_driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    with pytest.raises(CudaError, match="launch gate_up for node 7") as caught:
        driver.check(result, "cuLaunchKernelEx", "launch gate_up for node 7")
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert caught.value.call == "cuLaunchKernelEx"
    assert "smaller batch" in str(caught.value)


def test_a_compiler_failure_is_of_its_own_kind() -> None:
    with pytest.raises(NvrtcError, match="NVRTC_ERROR_OUT_OF_MEMORY while trying to compile it"):
        driver.check((real_nvrtc.nvrtcResult.NVRTC_ERROR_OUT_OF_MEMORY,), "nvrtcCreateProgram", "compile it")


def test_an_unknown_code_still_fails() -> None:
    with pytest.raises(CudaError, match="99999"):
        driver.check((99999,), "cuSomething", "do something")


def test_installed_modules_are_used(simulated: Simulation) -> None:
    assert driver.driver() is simulated.driver
    assert driver.nvrtc() is simulated.nvrtc
    assert driver.initialise() is simulated.driver


def test_the_simulation_has_no_function_by_accident(simulated: Simulation) -> None:
    with pytest.raises(AttributeError, match="cuMemAlloc_v2"):
        driver.driver().cuMemAlloc_v2(1)


def test_a_failing_initialisation_is_a_cuda_error(simulated: Simulation) -> None:
    simulated.fail("cuInit", code=real_driver.CUresult.CUDA_ERROR_NO_DEVICE)
    with pytest.raises(CudaError, match="nvidia-smi"):
        driver.initialise()


def test_a_missing_driver_library_is_a_cuda_error(simulated: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(flags: int) -> None:
        raise RuntimeError("libcuda.so.1 was not found")

    monkeypatch.setattr(simulated.driver, "cuInit", absent, raising=False)
    with pytest.raises(CudaError, match=r"load the NVIDIA driver library.*libcuda\.so\.1"):
        driver.initialise()


def test_missing_bindings_are_clear_errors() -> None:
    program = """
import sys
sys.modules["cuda.bindings"] = None
from qmoe_ep import driver, errors
for call, kind in ((driver.driver, errors.CudaError), (driver.nvrtc, errors.NvrtcError)):
    try:
        call()
    except kind as error:
        print("pip install" in str(error))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["True", "True"]


def test_the_package_imports_no_bindings() -> None:
    program = """
import sys
import qmoe_ep.runtime, qmoe_ep.nvrtc_cache, qmoe_ep.scratch, qmoe_ep.graph_capture
print([name for name in sys.modules if name.startswith("cuda.bindings")])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
