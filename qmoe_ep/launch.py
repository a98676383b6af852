"""A kernel ready to be launched many times: prepared configuration, patchable arguments, one driver call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from qmoe_ep.driver import check, driver
from qmoe_ep.errors import QMoEError
from qmoe_ep.kernels.plan import AddressSource, Step

__all__ = ["Function", "PreparedLaunch"]

DEFAULT_DYNAMIC_SHARED_BYTES = 48 << 10
"""What any kernel may ask for without opting in."""

_WHOLE_CARVEOUT = 100  # percent


class Function:
    """A loaded kernel. Owned by the module cache, which unloads its module after a drain.

    Attributes
    ----------
    handle : ``CUfunction``
    module, entry : where it comes from, for messages
    """

    __slots__ = ("_dynamic_shared_limit", "entry", "handle", "module")

    def __init__(self, handle: Any, module: str, entry: str) -> None:
        self.handle, self.module, self.entry = handle, module, entry
        self._dynamic_shared_limit = DEFAULT_DYNAMIC_SHARED_BYTES

    def allow_dynamic_shared(self, nbytes: int) -> None:
        """Opt in to `nbytes` of dynamic shared memory; the limit only ever grows.

        A kernel that opts in also asks for as large a part of the first-level cache as there is: by itself it would get
        what its own blocks need, which leaves no room for those of the kernel that follows it. Call it with the
        runtime's context current and its lock held.

        Raises
        ------
        CudaError : more than the device offers beside the kernel's static shared memory.
        """
        if nbytes <= self._dynamic_shared_limit:
            return
        attributes = driver().CUfunction_attribute
        doing = f"allow {nbytes} bytes of dynamic shared memory for {self.entry} of {self.module}"
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes),
            (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, _WHOLE_CARVEOUT),
        ):
            check(driver().cuFuncSetAttribute(self.handle, attribute, value), "cuFuncSetAttribute", doing)
        self._dynamic_shared_limit = nbytes


class PreparedLaunch:
    """One step of a plan bound to a stream. Made by :meth:`qmoe_ep.runtime.Runtime.prepare`.

    Not thread safe: it belongs to one kernel object, which serialises its calls. Patching it after
    :meth:`enqueue` is safe, because the driver copies the arguments when it is called.

    Attributes
    ----------
    arguments : the by-value struct, a copy of the step's own; set its fields between launches
    doing : what errors say was attempted
    """

    __slots__ = (
        "_config",
        "_function",
        "_handle",
        "_launch",
        "_offsets",
        "_parameters",
        "_pointers",
        "arguments",
        "doing",
    )

    def __init__(self, step: Step, function: Function, stream: Any, doing: str) -> None:
        binding = driver()
        self.doing = doing
        self.arguments: Any = type(step.arguments).from_buffer_copy(step.arguments)
        self._function, self._handle, self._offsets = function, function.handle, step.offsets
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        # The address as an int is taken by the bindings as it is; anything else is converted at every launch.
        self._parameters = ctypes.addressof(self._pointers)
        self._launch = binding.cuLaunchKernelEx
        self._config = binding.CUlaunchConfig()
        self._config.hStream = stream
        if step.dependent:
            attribute = binding.CUlaunchAttribute()
            attribute.id = binding.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self._config.attrs = [attribute]
            self._config.numAttrs = 1
        self.set_geometry(step.grid, step.block, step.shared_bytes)

    def set_geometry(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int] | None = None,
        shared_bytes: int | None = None,
    ) -> None:
        """Change the grid, and the block and dynamic shared memory (bytes) where given.

        Raises
        ------
        QMoEError : a dimension of zero; an empty launch is no launch.
        CudaError : the device doesn't offer so much shared memory.
        """
        if min(grid) < 1 or (block is not None and min(block) < 1):
            raise QMoEError(f"{self.doing}: expected every dimension of grid {grid} and block {block} to be positive")
        config = self._config
        if shared_bytes is not None:
            self._function.allow_dynamic_shared(shared_bytes)
            config.sharedMemBytes = shared_bytes
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        if block is not None:
            config.blockDimX, config.blockDimY, config.blockDimZ = block

    def bind(self, pointers: tuple[tuple[str, AddressSource], ...], addresses: Mapping[AddressSource, int]) -> None:
        """Fill pointer fields; a source that `addresses` lacks becomes null. The step's offsets are added."""
        for field, source in pointers:
            setattr(self.arguments, field, addresses.get(source))
        for field, offset in self._offsets:
            if address := getattr(self.arguments, field):
                setattr(self.arguments, field, address + offset)

    def enqueue(self) -> None:
        """Launch: one driver call. The runtime's context must be current.

        Raises
        ------
        CudaError : the driver refused the launch, or reports an earlier asynchronous failure.
        """
        check(self._launch(self._config, self._handle, self._parameters, 0), "cuLaunchKernelEx", self.doing)
