"""Fixtures for every test, how examples are drawn, and the mark of those that need a GPU."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from problems import first_seed
from simulated.plugin import simulated

from qmoe_ep import driver
from qmoe_ep.errors import CudaError

__all__ = ["pytest_collection_modifyitems", "pytest_report_header", "simulated"]

# No deadline: how long an example takes says more about the machine than about the package.
settings.register_profile("qmoe_ep", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("qmoe_ep")


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
