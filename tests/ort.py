"""ONNX Runtime's CPU provider as an oracle: one node, every operand a graph input.

With weights as graph inputs nothing is prepacked, which would quantize activations to 8 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from problems import DTYPES, Array, Problem

from qmoe_ep.operator import DOMAIN

BFLOAT16 = DTYPES["bfloat16"]

__all__ = ["execute", "one_node_model"]


def one_node_model(problem: Problem) -> onnx.ModelProto:
    """A model whose graph inputs are the problem's operands and whose output is ``output``.

    NumPy can't hand over bfloat16: such tensors are float32 outside and cast inside.
    """
    proto = problem.node_proto()
    before, after, inputs = [], [], []
    for position, (name, array) in enumerate(zip(proto.input, problem.inputs, strict=True)):
        if array is None:
            continue
        if array.dtype == BFLOAT16:
            before.append(onnx.helper.make_node("Cast", [name], [f"{name}_bf16"], to=onnx.TensorProto.BFLOAT16))
            proto.input[position] = f"{name}_bf16"
        inputs.append(onnx.helper.make_tensor_value_info(name, _outside_type(array), array.shape))
    x = problem.inputs[0]
    assert x is not None
    if x.dtype == BFLOAT16:
        proto.output[0] = "output_bf16"
        after.append(onnx.helper.make_node("Cast", ["output_bf16"], ["output"], to=onnx.TensorProto.FLOAT))
    output = onnx.helper.make_tensor_value_info("output", _outside_type(x), x.shape)
    graph = onnx.helper.make_graph([*before, proto, *after], "one_node", inputs, [output])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _outside_type(array: Array) -> int:
    if array.dtype == BFLOAT16:
        return int(onnx.TensorProto.FLOAT)
    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))


def execute(problem: Problem) -> Array:
    """What ONNX Runtime computes; bfloat16 results as float32."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    model = one_node_model(problem).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {
        name: np.ascontiguousarray(array.astype(np.float32) if array.dtype == BFLOAT16 else array)
        for name, array in zip(problem.node_proto().input, problem.inputs, strict=True)
        if array is not None
    }
    result: Array = session.run(["output"], feeds)[0]
    return result
