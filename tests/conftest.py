"""Fixtures for every test, and the mark of those that need a GPU."""

from __future__ import annotations

import pytest
from simulated.plugin import simulated

from qmoe_ep import driver
from qmoe_ep.errors import CudaError

__all__ = ["pytest_collection_modifyitems", "simulated"]


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
