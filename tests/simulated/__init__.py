"""A CUDA driver and compiler made of Python, for machines without a GPU.

``cuda.bindings`` stays real as far as its types go; only the functions are replaced. Work is carried out when
somebody waits for it, every allocation has an address range of its own, freed memory is never valid again, and
the rules of stream capture are enforced. See :class:`Machine` for the switches a test may turn.
"""

from .driver import SimulatedDriver
from .kernels import KernelLaunch, simulated_kernel
from .machine import Machine
from .memory import Memory, SimulatedFault
from .nvrtc import SimulatedNvrtc

__all__ = [
    "KernelLaunch",
    "Machine",
    "Memory",
    "SimulatedDriver",
    "SimulatedFault",
    "SimulatedNvrtc",
    "simulated_kernel",
]
