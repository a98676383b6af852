"""Things that an embedder's graph keeps alive, without any Python in the driver's threads.

The driver tells that a user object is gone by calling a C function from a thread of its own, at any time,
even while the interpreter is shutting down. A Python callback there would wait for the interpreter's lock and
could hang or crash the process at exit. So the function is the C library's ``sem_post`` on a semaphore that
lives outside of Python's memory, and whoever next allocates looks at the semaphores and releases.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from qmoe_ep.driver import check, driver
from qmoe_ep.errors import CaptureError

__all__ = ["attach", "pending", "take_finished"]

_SEMAPHORE_BYTES = 128
"""At least ``sizeof(sem_t)`` on every Linux."""

# Strong references: what a graph addresses, and through it the runtime, lives until the graph is gone.
_attached: dict[int, Callable[[], None]] = {}
_taking = threading.Lock()


def attach(graph: Any, released: Callable[[], None]) -> None:
    """Make a graph own something.

    Parameters
    ----------
    graph : ``CUgraph``, also one being captured into
    released : handed out by :func:`take_finished` once the graph and all its executables are gone

    Raises
    ------
    CudaError : the driver refused; the graph owns nothing.
    CaptureError : the platform has no semaphores.
    """
    library = _library()
    binding = driver()
    semaphore = library.calloc(1, _SEMAPHORE_BYTES)
    if not semaphore or library.sem_init(semaphore, 0, 0):
        raise CaptureError("can't make a semaphore for an embedder's capture: out of memory")
    post = binding.CUhostFn(ctypes.cast(library.sem_post, ctypes.c_void_p).value)
    doing = "give an embedder's graph its share in the memory it addresses"
    flag = binding.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    try:
        owned = check(binding.cuUserObjectCreate(semaphore, post, 1, flag), "cuUserObjectCreate", doing)
    except BaseException:
        library.free(semaphore)
        raise
    move = binding.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    try:
        check(binding.cuGraphRetainUserObject(graph, owned, 1, move), "cuGraphRetainUserObject", doing)
    except BaseException:
        # The driver will post the semaphore; from then on nobody else knows its address.
        _attached[semaphore] = _nothing
        check(binding.cuUserObjectRelease(owned, 1), "cuUserObjectRelease", doing)
        raise
    _attached[semaphore] = released


def pending() -> int:
    """Return how many graphs of embedders still own something, as far as is known."""
    return len(_attached)


def take_finished() -> list[Callable[[], None]]:
    """Return the actions of graphs that are gone, each once. Cheap; no driver call."""
    finished: list[Callable[[], None]] = []
    # Runtimes have locks of their own. Whoever comes second, a finalizer inside this very loop included, finds nothing.
    if not _attached or not _taking.acquire(blocking=False):
        return finished
    try:
        library = _library()
        for semaphore in list(_attached):
            if library.sem_trywait(semaphore) == 0:
                finished.append(_attached.pop(semaphore))
                library.free(semaphore)
    finally:
        _taking.release()
    return finished


def _nothing() -> None:
    return None


_loaded: ctypes.CDLL | None = None


def _library() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        try:
            library = ctypes.CDLL(None)
            library.calloc.restype = ctypes.c_void_p
            library.calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
            library.free.restype = None
            library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
            for function in (library.free, library.sem_post, library.sem_trywait):
                function.argtypes = [ctypes.c_void_p]
        except (AttributeError, TypeError, OSError) as error:
            raise CaptureError(
                "an embedder's own capture needs POSIX semaphores, which this platform lacks: capture with the "
                "provider's capture() instead"
            ) from error
        _loaded = library
    return _loaded
