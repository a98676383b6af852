"""ONNX files: loading, running whole models through the evaluator of onnx, quantizing float experts.

:func:`load_model` reads a file and maps its external data, :class:`Session` and :func:`run_model`
run it with QMoE by a provider, :func:`reference_ops` gives the operator to an evaluator of your own,
:func:`quantize_model` turns float MoE nodes of a file into QMoE nodes, and :func:`convert_layout` changes the order of
packed weights.
"""

from __future__ import annotations

from qmoe_ep.onnx.evaluate import Session, reference_ops, run_model
from qmoe_ep.onnx.layout import convert_layout
from qmoe_ep.onnx.model import LoadedModel, QMoENodeEntry, graph_inputs, graph_outputs, load_model
from qmoe_ep.onnx.quantize import ConvertedNode, quantize_model

__all__ = [
    "ConvertedNode",
    "LoadedModel",
    "QMoENodeEntry",
    "Session",
    "convert_layout",
    "graph_inputs",
    "graph_outputs",
    "load_model",
    "quantize_model",
    "reference_ops",
    "run_model",
]
