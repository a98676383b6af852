"""What the decode kernels compute, in NumPy. Types and formats are read from the generated source."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from qmoe_ep import routing
from qmoe_ep.activation import activate
from qmoe_ep.kernels.decode import DownArguments, GateUpArguments

from .kernels import KernelLaunch, simulated_kernel
from .kernels_portable import _DTYPES, DeviceFormat, dtype_named, linear, record_call

_ROUTING = re.compile(r"Routing<([\w:]+), ([\w:]+), (true|false), \d+>")
_STREAM = re.compile(r"StreamFormat<(\d+), (\d+), (true|false), ([\w:]+), \d+, \d+, (\d+), (\d+)>")


def _route(launch: KernelLaunch) -> tuple[Any, Any, Any] | None:
    """Experts, weights and logits of the row; None if it is not valid."""
    a, view = launch.arguments, launch.memory.view
    if a.valid_rows and int(view(a.valid_rows, (1,), np.int32)[0]) < 1:
        return None
    found = _ROUTING.search(launch.source)
    if found is None:
        raise LookupError("no Routing in the source")
    logits = view(a.router_probs, (1, a.experts), dtype_named(found[1]))
    given = None if found[2] == "void" else view(a.router_weights, (1, a.experts), dtype_named(found[2]))
    return *routing.route(logits, given, top_k=a.top_k, normalize=found[3] == "true"), logits


def _format(source: str, bias: str) -> tuple[DeviceFormat, int, int]:
    """The streamed format with a bias type, and its output and input features."""
    found = _STREAM.search(source)
    if found is None:
        raise LookupError("no StreamFormat in the source")
    bits, block, points, scale, out, inner = found.groups()
    fmt = DeviceFormat(int(bits), int(block), points == "true", dtype_named(scale), _DTYPES[bias])
    return fmt, int(out), int(inner)


@simulated_kernel("decode_gate_up", arguments=GateUpArguments)
def _gate_up(launch: KernelLaunch) -> None:
    routed = _route(launch)
    a, view, source = launch.arguments, launch.memory.view, launch.source
    found = re.search(
        r"GateUp<qmoe.*?>, ([\w:]+), \d+, .*>, ([\w:]+), ([\w:]+), qmoe::Gating::k(\w+), .*k(\w+), \d", source
    )
    if found is None:
        raise LookupError("no GateUp in the source")
    if routed is None:
        return
    record_call(launch, a.telemetry, routed[0], a.experts, routed[2])
    gating = found[4]
    first, out, hidden = _format(source, found[2])
    second, _, _ = _format(source, found[3])
    inter = out // 2 if gating in ("Interleaved", "Halves") else out
    node: Any = SimpleNamespace(
        activation_type=found[5].lower(),
        activation_alpha=np.float32(a.scalars.alpha),
        activation_beta=np.float32(a.scalars.beta),
        swiglu_limit_after_activation=0,
        swiglu_limit=np.float32(a.scalars.limit),
    )
    x = view(a.input, (1, hidden), dtype_named(found[1])).astype(np.float32)
    activated = view(a.activated, (a.top_k, a.activated_pitch), np.float32)
    activated[:, inter:] = 0
    with np.errstate(all="ignore"):
        for slot, expert in enumerate(routed[0][0]):
            fc1 = linear(launch, "fc1", first, int(expert), out, hidden, x)
            up = None
            if gating == "Interleaved":
                fc1, up = fc1[:, 0::2], fc1[:, 1::2]
            elif gating == "Halves":
                fc1, up = fc1[:, :inter], fc1[:, inter:]
            elif gating == "Third":
                up = linear(launch, "fc3", second, int(expert), inter, hidden, x)
            activated[slot, :inter] = activate(node, fc1, up)[0]


@simulated_kernel("decode_down", arguments=DownArguments)
def _down(launch: KernelLaunch) -> None:
    routed = _route(launch)
    a, view = launch.arguments, launch.memory.view
    found = re.search(r"Down<qmoe.*?>, ([\w:]+), .*>, ([\w:]+), \d+, \w+>", launch.source)
    if found is None:
        raise LookupError("no Down in the source")
    if routed is None:
        return
    fmt, hidden, inter = _format(launch.source, found[2])
    step = 4 * {8: 32, 1: 64 if fmt.block_size == 16 else 128}.get(fmt.bits, 64)
    activated = view(a.activated, (a.top_k, -(-inter // step) * step), np.float32)[:, :inter]
    output = np.zeros(hidden, np.float32)
    with np.errstate(all="ignore"):
        for slot, expert in enumerate(routed[0][0]):
            value = linear(launch, "fc2", fmt, int(expert), hidden, inter, activated[slot : slot + 1])[0]
            output += np.float32(routed[1][0, slot]) * value
        view(a.output, (hidden,), dtype_named(found[1]))[:] = output.astype(dtype_named(found[1]))
