"""PyTorch on a GPU: the operator on any stream, in graphs captured cold, and swapped models."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import Recipe, build

from qmoe_ep import QMoEError, RouteTelemetryConfig
from qmoe_ep.routing import select_experts

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'qmoe-ep[torch]'")

from test_torch import Doubled, activations_of, array, attributes_of, layer_of, operands_of  # noqa: E402

from qmoe_ep.torch import qmoe, quantize_experts, replace_moe  # noqa: E402

pytestmark = pytest.mark.gpu


def on_gpu(problem: Any) -> tuple[Any, list[Any]]:
    """The problem's layer and activations on the GPU."""
    return layer_of(problem).cuda(), [None if a is None else a.cuda() for a in activations_of(problem)]


def recipe(rows: int = 1, dtype: str = "float16", **changes: Any) -> Recipe:
    """A layer whose operands are all of one type."""
    types = {"router_dtype": dtype, "scale_dtypes": (dtype,) * 3, "bias_dtypes": (dtype,) * 3}
    return Recipe(**{"leading": (rows,), "hidden": 256, "inter": 128, "experts": 8, "dtype": dtype, **types, **changes})


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_family_of_kernels_on_every_stream(dtype: str, rows: int) -> None:
    for fusion in (0, 1, 2):
        problem = build(recipe(rows, dtype, fusion=fusion, zero_points=(True,) * 3, biases=(True,) * 3))
        layer, activations = on_gpu(problem)
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                x = activations[0] + 0
                problem.check(array(layer(x, *activations[1:]).cpu()))


def test_the_operators_registration_is_sound_on_cuda() -> None:
    problem = build(recipe(3))
    operands = {name: value.cuda() for name, value in operands_of(problem).items()}
    torch.library.opcheck(qmoe, (), {**operands, **attributes_of(problem)})


def test_views_and_odd_addresses() -> None:
    problem = build(recipe(4, biases=(True,) * 3))
    layer, (x, logits, _) = on_gpu(problem)
    wide = torch.cat([x, x], 1)[:, : x.shape[1]]
    assert not wide.is_contiguous()
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
    odd = room[1:].view_as(x).copy_(x)
    for value in (wide, odd, x.reshape(2, 2, -1)):
        problem.check(array(layer(value, logits).reshape(x.shape).cpu()))
    with pytest.raises(QMoEError, match=r"router_probs: is on cpu, expected cuda:0"):
        layer(x, logits.cpu())
    layer.fc1_scales = layer.fc1_scales.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(QMoEError, match="fc1_scales: expected a contiguous tensor"):
        layer(x, logits)


def test_the_very_first_call_of_a_process_is_captured() -> None:
    program = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from problems import build
from test_torch_gpu import array, on_gpu, recipe
problem = build(recipe(2))
layer, (x, logits, _) = on_gpu(problem)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    output = layer(x, logits)
graph.replay()
problem.check(array(output.cpu()))
print("OK")
"""
    here = Path(__file__).parent
    command = [sys.executable, "-c", program, str(here), str(here.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "OK"), done.stderr


@pytest.mark.parametrize("rows", [1, 6])
def test_a_graph_captured_cold_keeps_its_memory(rows: int) -> None:
    # Sizes that no other test has run, so that modules are loaded under the capture.
    problem = build(recipe(rows, hidden=320, inter=96 + 32 * rows, experts=5))
    layer, (x, logits, _) = on_gpu(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(x, logits)
    output.fill_(float("nan"))
    graph.replay()
    problem.check(array(output.cpu()))
    eager = layer(x, logits)
    assert torch.equal(eager, output)
    # What the graph's scratch was must not be handed to anybody.
    taken = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(64)]
    del eager
    gc.collect()
    for _ in range(3):
        output.fill_(float("nan"))
        graph.replay()
        problem.check(array(output.cpu()))
    assert all(bool(block.isnan().all()) for block in taken)


def test_telemetry_counts_eager_calls_and_replays_and_its_record_stays_with_the_graph() -> None:
    problem = build(recipe(6))
    layer, (x, logits, _) = on_gpu(problem)
    want = layer(x, logits)
    layer.telemetry.arm(RouteTelemetryConfig(8, 2, mode="counts"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(layer(x, logits), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(x, logits)
    for _ in range(9):
        graph.replay()
    snapshot = layer.telemetry.snapshot()
    chosen = select_experts(problem.inputs[1], 2)
    assert snapshot.rows == 60
    assert snapshot.counts.tolist() == (10 * np.bincount(chosen.reshape(-1), minlength=8)).tolist()
    layer.telemetry.reset_boundary()
    graph.replay()
    assert layer.telemetry.snapshot().rows == 6
    layer.telemetry.disarm()
    output.fill_(float("nan"))
    graph.replay()
    assert torch.equal(output, want)
    moved = layer.cpu()
    assert not moved.telemetry.armed


def test_threads_on_their_own_streams() -> None:
    problem = build(recipe(3))
    layer, (x, logits, _) = on_gpu(problem)
    want, failures = layer(x, logits), []
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            failures.extend(i for i in range(100) if not torch.equal(layer(x, logits), want))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # PyTorch makes one to begin with
def test_compiled_by_graphs() -> None:
    problem = build(recipe(3))
    layer, (x, logits, _) = on_gpu(problem)
    model = Doubled(layer)
    want = model(x, logits)
    compiled = torch.compile(model, backend="cudagraphs", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(compiled(x, logits), want)


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_quantization_is_the_same_on_every_device(bits: int) -> None:
    values = torch.randn(3, 32, 96)
    here, there = (quantize_experts(v, bits=bits, block_size=16, symmetric=False) for v in (values, values.cuda()))
    for name in ("packed", "scales", "zero_points"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gpt-oss", "deepseek-v3"])
def test_swapped_models(family: str) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    from test_torch_transformers import dequantize_in_place, error, logits_of, make_model

    rounded, model = make_model(family), make_model(family).cuda()
    dequantize_in_place(rounded, 4, 32, False)
    replace_moe(model, 4, 32, symmetric=False)
    want = logits_of(rounded).logits
    tokens = torch.arange(22).reshape(2, 11) * 31 % 96
    with torch.no_grad():
        assert error(model(tokens.cuda()).logits.cpu(), want) <= 1e-4
        one = model(tokens[:1, :1].cuda(), use_cache=False).logits.cpu()
    assert error(one[0, 0], want[0, 0]) <= 1e-4
