"""What a device offers, as data: kernels choose their geometry and variant from this alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qmoe_ep.errors import QMoEError

__all__ = ["Capabilities"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits of one device.

    Attributes
    ----------
    device : ordinal
    name : the device's marketing name
    compute_capability : (major, minor)
    multiprocessor_count : streaming multiprocessors
    max_threads_per_block : threads
    shared_bytes_per_block_optin : dynamic and static shared memory a block may ask for, bytes
    l2_bytes : size of the L2 cache, bytes
    shared_bytes_per_multiprocessor : shared memory of one multiprocessor, bytes
    max_threads_per_multiprocessor : resident threads
    registers_per_multiprocessor : 32-bit registers
    """

    device: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessor_count: int
    max_threads_per_block: int
    shared_bytes_per_block_optin: int
    l2_bytes: int
    shared_bytes_per_multiprocessor: int
    max_threads_per_multiprocessor: int
    registers_per_multiprocessor: int = 65536

    @property
    def arch(self) -> str:
        """The architecture to compile for, with its specific instructions where it has some: ``"sm_90a"``."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @classmethod
    def for_arch(cls, arch: str) -> Capabilities:
        """Limits of a typical data-centre device of an architecture, for compiling without a GPU.

        Parameters
        ----------
        arch : ``"sm_75"``, ``"sm_90a"``, ``"sm_100"``, …; 7.5 is the oldest

        Raises
        ------
        QMoEError : not an architecture name, or older than 7.5.
        """
        match = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", arch)
        capability = (int(match[1]), int(match[2])) if match else (0, 0)
        if capability < (7, 5):
            raise QMoEError(f"arch: expected sm_75 or newer, such as sm_90a; got {arch!r}")
        newest = max(known for known in _TYPICAL if known <= capability)
        name, count, optin, l2_bytes, shared, threads = _TYPICAL[newest]
        return cls(0, name, capability, count, 1024, optin << 10, l2_bytes << 20, shared << 10, threads)


# compute capability: (name, multiprocessors, opt-in KiB per block, L2 MiB, shared KiB and threads per multiprocessor)
_TYPICAL: dict[tuple[int, int], tuple[str, int, int, int, int, int]] = {
    (7, 5): ("T4", 40, 64, 4, 64, 1024),
    (8, 0): ("A100", 108, 163, 40, 164, 2048),
    (8, 6): ("A10", 72, 99, 6, 100, 1536),
    (8, 7): ("Orin", 16, 163, 4, 164, 1536),
    (8, 9): ("L40S", 142, 99, 96, 100, 1536),
    (9, 0): ("H100", 132, 227, 50, 228, 2048),
    (10, 0): ("B200", 148, 227, 126, 228, 2048),
    (11, 0): ("Thor", 20, 227, 32, 228, 1536),
    (12, 0): ("RTX PRO 6000", 188, 99, 128, 100, 1536),
}
