"""``qmoe-ep inspect``: one row per QMoE node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from qmoe_ep.cli.main import debug_option, json_option, layout_option, model_argument

if TYPE_CHECKING:
    from qmoe_ep.cli.nodes import ModelNode

__all__ = ["command"]


@click.command("inspect")
@model_argument
@layout_option
@json_option
@debug_option
def command(model: str, weights_layout: Literal["raw", "sm80"] | None, as_json: bool) -> None:
    """List the QMoE nodes of a model: shapes, formats, bytes, and whether each provider takes them.

    \b
    E experts, H hidden size, I intermediate size, k experts per row.
    swiglu/1 is swiglu with swiglu_fusion 1.
    bytes is what the packed weights, scales and zero points of all experts take.
    """
    from qmoe_ep import onnx as models
    from qmoe_ep.cli.nodes import model_nodes
    from qmoe_ep.cli.output import print_json, print_table

    loaded = models.load_model(model)
    described = [_describe(node) for node in model_nodes(loaded, weights_layout)]
    if as_json:
        print_json({"model": model, "nodes": described})
    elif not described:
        click.echo(f"{model} has no QMoE node")
    else:
        columns = ("node", "name", "E×H×I", "k", "bits", "block", "activation", "layout", "bytes", "cpu", "cuda")
        print_table(columns, [_row(node) for node in described])


def _describe(entry: ModelNode) -> dict[str, Any]:
    """A node as plain values; sizes are None where a declined node doesn't have them."""
    node, experts = entry.node, entry.experts
    matrices = experts.matrices if experts else ()
    return {
        "node_id": entry.node_id,
        "name": node.name,
        "experts": experts.num_experts if experts else None,
        "hidden_size": experts.hidden_size if experts else None,
        "inter_size": experts.inter_size if experts else None,
        "k": node.k,
        "quant_type": node.quant_type,
        "bits": {m.name: m.bits for m in matrices},
        "block_size": node.blocks if experts else node.block_size,
        "activation": node.activation_type,
        "swiglu_fusion": node.swiglu_fusion,
        "layout": experts.fc1.layout if experts else None,
        "zero_points": [m.name for m in matrices if m.zero_points],
        "bias": [m.name for m in matrices if m.bias_dtype is not None],
        "scale_dtype": str(experts.fc1.scale_dtype) if experts else None,
        "bytes": experts.num_experts * sum(m.expert_bytes for m in matrices) if experts else None,
        "providers": {name: {"claimed": entry.reason is None, "reason": entry.reason} for name in ("cpu", "cuda")},
    }


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    from qmoe_ep.cli.output import bytes_text

    bits = list(node["bits"].values())
    sizes = [node[size] for size in ("experts", "hidden_size", "inter_size")]
    activation = node["activation"]
    if activation == "swiglu":
        activation += f"/{node['swiglu_fusion']}"
    claims = [claim["reason"] or "yes" for claim in node["providers"].values()]
    widths = "/".join(map(str, bits if len(set(bits)) > 1 else bits[:1])) or "-"
    return (
        str(node["node_id"]),
        node["name"],
        "-" if None in sizes else "×".join(map(str, sizes)),
        str(node["k"]),
        widths if node["quant_type"] == "int" else node["quant_type"],
        str(node["block_size"] if node["block_size"] and node["block_size"] > 0 else "row"),
        activation,
        node["layout"] or "-",
        "-" if node["bytes"] is None else bytes_text(node["bytes"]),
        *claims,
    )
