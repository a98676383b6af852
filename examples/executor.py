"""An executor of one's own around the providers: claim, create, warm, capture, replay, retire, rebuild.

    python examples/executor.py [--provider cuda|cpu]

Its "model" is a stack of QMoE layers whose routers run elsewhere. Everything it uses of a provider is public; copy it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np

import qmoe_ep

EXPERTS, HIDDEN, INTER, TOP_K = 16, 128, 256, 4


@dataclass(frozen=True)
class Layer:
    """A node of the graph, and its constant operands by input index."""

    node: qmoe_ep.QMoENode
    constants: dict[int, np.ndarray]


class Executor:
    """Runs a stack of layers over fixed numbers of rows; one capture per number.

    An executor id has one generation in a provider's life: whoever rebuilds takes a new id.
    """

    def __init__(self, provider: Any, layers: list[Layer], executor: int, generation: int = 1) -> None:
        self.provider, self.executor, self.generation = provider, executor, generation
        self.kernels: list[Any] = []
        self.programs: dict[int, Program] = {}
        for number, layer in enumerate(layers):
            # Claim before anything is built: what is declined goes to another provider, with the reason in the log.
            if (reason := provider.unsupported_reason(layer.node)) is not None:
                raise qmoe_ep.QMoEError(f"layer {number}: {reason}")
        # Kernels made in the scope share the executor's telemetry producers, one per node id.
        with provider.executor_scope(executor, generation):
            for number, layer in enumerate(layers):
                self.kernels.append(provider.create_kernel(layer.node, number, layer.constants))
        for kernel in self.kernels:
            kernel.telemetry.arm(qmoe_ep.RouteTelemetryConfig(EXPERTS, TOP_K, mode="counts"))

    def run(self, x: np.ndarray, logits: list[np.ndarray]) -> np.ndarray:
        """x [rows, H] and each layer's logits [rows, E], f32, to [rows, H]."""
        if len(x) not in self.programs:
            self.programs[len(x)] = Program(self.provider, self.kernels, len(x))
        return self.programs[len(x)].run(x, logits)

    def close(self) -> None:
        """Let go of everything; the provider stays usable for others."""

        def cleanup(newly_retired: bool) -> None:
            # Nobody enters the scope meanwhile, and a second close finds nothing left to do.
            if newly_retired:
                for program in self.programs.values():
                    program.close()
                for kernel in self.kernels:
                    kernel.close()
                self.provider.telemetry.remove(self.executor)

        self.provider.retire_executor(self.executor, self.generation, cleanup)


class Program:
    """The layers over one number of rows: buffers that never move, and on a GPU one graph over all layers."""

    def __init__(self, provider: Any, kernels: list[Any], rows: int) -> None:
        self.provider, self.kernels, self.graph = provider, kernels, None
        place = getattr(provider, "to_device", np.array)
        self.values = [place(np.zeros((rows, HIDDEN), np.float32)) for _ in range(len(kernels) + 1)]
        self.logits = [place(np.zeros((rows, EXPERTS), np.float32)) for _ in kernels]
        if provider.name != "cuda":
            return
        # Warm: the first eager run compiles, allocates and uploads. It counts like any other, so it is not recorded.
        for kernel in kernels:
            kernel.telemetry.pause()
        self.enqueue()
        for kernel in kernels:
            kernel.telemetry.resume()
        for number, kernel in enumerate(kernels):
            support = kernel.capture_support([self.values[number], self.logits[number]], [self.values[number + 1]])
            if not support.supported:
                raise qmoe_ep.CaptureError(f"layer {number}: {support.reason}")
        with provider.capture() as capture:
            self.enqueue()
        self.graph = capture.graph  # owns all that its nodes address

    def enqueue(self) -> None:
        for number, kernel in enumerate(self.kernels):
            kernel.execute([self.values[number], self.logits[number]], [self.values[number + 1]])

    def run(self, x: np.ndarray, logits: list[np.ndarray]) -> np.ndarray:
        for target, source in zip([self.values[0], *self.logits], [x, *logits], strict=True):
            target.copy_from(source) if self.graph else np.copyto(target, source)
        if self.graph is None:
            self.enqueue()
            return self.values[-1].copy()
        self.graph.replay()
        return self.values[-1].numpy()  # waits

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()


def random_layer(random: np.random.Generator) -> Layer:
    """int4 experts in blocks of 32, SwiGLU with gate and up interleaved."""
    fc1 = random.standard_normal((EXPERTS, 2 * INTER, HIDDEN), np.float32) / np.float32(np.sqrt(HIDDEN))
    fc2 = random.standard_normal((EXPERTS, HIDDEN, INTER), np.float32) / np.float32(4)
    q1, q2 = (qmoe_ep.quantize_experts(w, bits=4, block_size=32, symmetric=True) for w in (fc1, fc2))
    node = qmoe_ep.QMoENode(k=TOP_K, activation_type="swiglu", swiglu_fusion=1, block_size=32)
    return Layer(node, {2: q1.packed, 3: q1.scales, 5: q2.packed, 6: q2.scales})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=["cuda", "cpu"], default="cpu")
    kind = {"cuda": qmoe_ep.CudaExecutionProvider, "cpu": qmoe_ep.CpuExecutionProvider}
    random = np.random.default_rng(0)
    layers = [random_layer(random) for _ in range(3)]
    with kind[parser.parse_args().provider]() as provider:
        for executor in (1, 2):  # the second is a rebuild after, say, new weights: a new id
            runner = Executor(provider, layers, executor)
            for rows in (1, 1, 4):
                logits = [random.standard_normal((rows, EXPERTS), np.float32) for _ in layers]
                y = runner.run(random.standard_normal((rows, HIDDEN), np.float32), logits)
                print(f"executor {executor}: {rows} rows, mean |y| {np.abs(y).mean():.3g}")
            for node, producer in provider.telemetry.sources(executor).items():
                snapshot = producer.snapshot()
                print(f"  layer {node}: {snapshot.rows} rows took the experts {snapshot.experts}")
            runner.close()


if __name__ == "__main__":
    main()
