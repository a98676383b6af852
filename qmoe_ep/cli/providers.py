"""Which provider a command uses, and what a model's graph says about its arrays."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any

import numpy as np

from qmoe_ep.errors import CudaError, NvrtcError, QMoEError

if TYPE_CHECKING:
    import onnx

__all__ = ["float_types", "open_provider", "value_type"]


def open_provider(name: str, device: int = 0) -> tuple[AbstractContextManager[Any], str]:
    """Create the provider that was asked for, to be closed by ``with``, and a clause that says which and why.

    Parameters
    ----------
    name : ``"cpu"``, ``"cuda"``, or ``"auto"`` for CUDA if it can be used

    Raises
    ------
    CudaError, NvrtcError : CUDA was asked for and can't be used.
    """
    from qmoe_ep.cpu.provider import CpuExecutionProvider

    if name == "cpu":
        return closing(CpuExecutionProvider()), "cpu"
    try:
        from qmoe_ep import driver
        from qmoe_ep.cuda.provider import CudaExecutionProvider

        driver.nvrtc()
        provider = CudaExecutionProvider(device)
    except (CudaError, NvrtcError) as error:
        if name == "cuda":
            raise
        return closing(CpuExecutionProvider()), f"cpu (no CUDA: {str(error).splitlines()[0]})"
    return closing(provider), f"cuda ({provider.runtime.capabilities().name})"


def value_type(value: onnx.ValueInfoProto) -> tuple[np.dtype[Any], tuple[int | None, ...] | None]:
    """Dtype and shape of a graph's input or output; dimensions that aren't fixed are None, as is an unknown rank.

    Raises
    ------
    QMoEError : it isn't a tensor of numbers.
    """
    import onnx

    tensor = value.type.tensor_type
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except (KeyError, TypeError, ValueError):
        dtype = np.dtype(object)
    if dtype.hasobject or not value.type.HasField("tensor_type"):
        raise QMoEError(f"{value.name!r} of the model's graph is not a tensor of numbers; only those are supported")
    if not tensor.HasField("shape"):
        return dtype, None
    return dtype, tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)


def float_types(graph: onnx.GraphProto) -> dict[str, np.dtype[Any]]:
    """Dtypes of the values that a graph tells the types of, by name."""
    types: dict[str, np.dtype[Any]] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        try:
            types[value.name] = value_type(value)[0]
        except QMoEError:
            continue
    return types
