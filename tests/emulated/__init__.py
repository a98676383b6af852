"""The device code itself, compiled for the CPU: see :mod:`tests.emulated.machine`."""
