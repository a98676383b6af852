"""Fixtures for every test, how examples are drawn, and the mark of those that need a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from problems import first_seed
from shell import NoDriver, Shell
from simulated.plugin import simulated

from qmoe_ep import CpuExecutionProvider, driver
from qmoe_ep.errors import CudaError

__all__ = ["no_gpu", "provider", "pytest_collection_modifyitems", "pytest_report_header", "shell", "simulated"]

# No deadline: how long an example takes says more about the machine than about the package.
settings.register_profile("qmoe_ep", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("qmoe_ep")


@pytest.fixture
def provider() -> CpuExecutionProvider:
    """The CPU provider as it is by default."""
    return CpuExecutionProvider()


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    """Runs commands with a cache folder of their own."""
    monkeypatch.setenv("QMOE_EP_CACHE_DIR", str(tmp_path / "modules"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return Shell(capsys)


@pytest.fixture
def no_gpu() -> Iterator[None]:
    """A machine without an NVIDIA driver."""
    driver.install(NoDriver(), None)
    yield
    driver.install(None, None)


def pytest_report_header() -> str:
    """Say what makes a run repeatable."""
    drawn = "derandomized" if "CI" in os.environ else "random, see --hypothesis-seed"
    return f"random problems: seeds from {first_seed()} on (QMOE_EP_TEST_SEED); hypothesis: {drawn}"


def _why_no_gpu() -> str:
    try:
        binding = driver.initialise()
        count = driver.check(binding.cuDeviceGetCount(), "cuDeviceGetCount", "count the GPUs")
    except CudaError as error:
        return str(error)
    return "" if count else "no GPU is visible"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
