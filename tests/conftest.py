"""Fixtures for every test."""

from simulated.plugin import simulated

__all__ = ["simulated"]
