"""What an embedder may do without harm: providers side by side, captures used again, memory of any alignment."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from problems import Problem, Recipe, build
from simulated import kernels_portable
from simulated.plugin import Simulation
from test_cuda_provider import activations_of, on_device, weights_of

from qmoe_ep import CaptureError, CudaExecutionProvider, QMoEError, user_objects
from qmoe_ep.cuda.tensor import DeviceTensor

# Importing them is what registers the simulated kernels.
assert kernels_portable


class Layer:
    """A kernel of a provider with operands, called once."""

    def __init__(self, gpu: CudaExecutionProvider, rows: int = 3) -> None:
        self.problem: Problem = build(Recipe(leading=(rows,)))
        self.kernel = gpu.create_kernel(self.problem.node, 7, weights_of(self.problem))
        self.inputs: list[Any] = on_device(gpu, activations_of(self.problem))
        self.output = gpu.to_device(self.problem.poisoned_output())
        self.run()

    def run(self, inputs: list[Any] | None = None, **options: Any) -> None:
        self.kernel.execute(self.inputs if inputs is None else inputs, [self.output], **options)


@pytest.fixture
def gpu(simulated: Simulation) -> Any:
    with CudaExecutionProvider(kernels="portable") as provider:
        yield provider


@pytest.fixture
def other(simulated: Simulation) -> Any:
    with CudaExecutionProvider(kernels="portable") as provider:
        yield provider


def test_a_capture_that_is_used_again_makes_a_graph_of_its_own(gpu: CudaExecutionProvider) -> None:
    layer, capture = Layer(gpu), gpu.capture()
    graphs = []
    for _ in range(2):
        with capture:
            layer.run()
        graphs.append(capture.graph)
    graphs[0].close()
    problem, output = layer.problem, layer.output
    layer.kernel.close()
    del layer
    gc.collect()
    output.copy_from(problem.poisoned_output())
    graphs[1].replay()
    problem.check_closely(output.numpy())
    graphs[1].close()


def test_a_failed_second_use_leaves_the_first_graph_its_memory(gpu: CudaExecutionProvider) -> None:
    layer, capture = Layer(gpu), gpu.capture()
    with capture:
        layer.run()
    graph = capture.graph
    with pytest.raises(QMoEError, match="router_probs"), capture:
        layer.run([layer.inputs[0], layer.inputs[0], *layer.inputs[2:]])
    assert graph.allocations
    layer.kernel.close()
    graph.replay()
    layer.problem.check_closely(layer.output.numpy())
    graph.close()


def test_a_graph_of_another_provider_is_not_updated(gpu: CudaExecutionProvider, other: CudaExecutionProvider) -> None:
    layer = Layer(gpu)
    with gpu.capture() as capture:
        layer.run()
    with pytest.raises(CaptureError, match="another provider"), other.capture(update=capture.graph):
        pass
    capture.graph.replay()
    layer.problem.check_closely(layer.output.numpy())
    capture.graph.close()


def test_tensors_of_another_provider_may_be_dropped_at_once(
    gpu: CudaExecutionProvider, other: CudaExecutionProvider
) -> None:
    layer = Layer(gpu)
    theirs = on_device(other, activations_of(layer.problem))
    layer.output.copy_from(layer.problem.poisoned_output())
    layer.run(theirs)
    del theirs
    gc.collect()
    reused = [other.to_device(np.full(1000, np.nan, np.float32)) for _ in range(4)]
    other.synchronize()
    layer.problem.check_closely(layer.output.numpy())
    source = other.to_device(np.arange(64, dtype=np.float32))
    target = gpu.empty((64,), np.float32).copy_from(source)
    del source, reused
    gc.collect()
    other.to_device(np.full(64, np.nan, np.float32))
    other.synchronize()
    np.testing.assert_array_equal(target.numpy(), np.arange(64))


@pytest.mark.parametrize("operand", ["input", "output", "valid_rows"])
def test_memory_that_is_not_aligned_to_elements_is_refused(gpu: CudaExecutionProvider, operand: str) -> None:
    layer = Layer(gpu)
    room = gpu.empty((1 << 12,), np.uint8)
    like = {"input": layer.inputs[0], "output": layer.output, "valid_rows": gpu.to_device(np.array([3], np.int32))}
    tensor = DeviceTensor(gpu.runtime, room.pointer + 2, like[operand].shape, like[operand].dtype, owner=room)
    inputs = [tensor, *layer.inputs[1:]] if operand == "input" else layer.inputs
    with pytest.raises(QMoEError, match=f"{operand}.*aligned"):
        layer.kernel.execute(
            inputs,
            [tensor if operand == "output" else layer.output],
            valid_rows=tensor if operand == "valid_rows" else None,
        )
    layer.run()
    layer.problem.check_closely(layer.output.numpy())


def test_foreign_byte_order(gpu: CudaExecutionProvider) -> None:
    layer = Layer(gpu)
    swapped = np.asarray(layer.problem.inputs[0]).astype(">f4")
    layer.output.copy_from(layer.problem.poisoned_output())
    layer.run([gpu.to_device(swapped), *layer.inputs[1:]])
    layer.problem.check_closely(layer.output.numpy())
    with pytest.raises(QMoEError, match="byte order"):
        gpu.view(layer.inputs[0].pointer, (3, 4), np.dtype(">f4"))


def test_graphs_of_embedders_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runtimes that look at the same time: no action is run twice, and no semaphore is touched after its end."""
    freed: set[int] = set()
    inside = threading.Event()
    go_on = threading.Event()

    class Library:
        def sem_trywait(self, semaphore: int) -> int:
            assert semaphore not in freed
            inside.set()
            assert go_on.wait(60)
            return 0

        def free(self, semaphore: int) -> None:
            assert semaphore not in freed
            freed.add(semaphore)

    monkeypatch.setattr(user_objects, "_attached", {n: (lambda n=n: n) for n in (1, 2, 3)})
    monkeypatch.setattr(user_objects, "_library", Library)
    taken: list[Any] = []
    first = threading.Thread(target=lambda: taken.extend(user_objects.take_finished()))
    first.start()
    assert inside.wait(60)
    assert user_objects.take_finished() == []
    go_on.set()
    first.join(60)
    assert [action() for action in taken] == [1, 2, 3]
    assert freed == {1, 2, 3}
