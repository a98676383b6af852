"""Calls of a layer for a profiler to look at: one that warms, then one on other experts, of each number of rows.

    ncu --clock-control none --cache-control none --set full -o few \
        python -m benchmarks.counters --shape Qwen3-30B-A3B --rows 1,16

The second half of the launches that it lists for a number of rows are those to read.
"""

from __future__ import annotations

import click
import numpy as np

from qmoe_ep import CudaExecutionProvider
from qmoe_ep.benchmark.layer import DTYPES, Case, Layer, Shape


@click.command(help=__doc__)
@click.option("--shape", "shapes", multiple=True, required=True, help="A model's name, or H,I,E,k.")
@click.option("--rows", default="1", help="Numbers of rows, separated by commas.")
@click.option("--dtype", default="bfloat16", type=click.Choice(list(DTYPES)))
@click.option("--bits", default=4)
@click.option("--block-size", default=32)
@click.option("--format", "quant_type", default="int")
def main(shapes: tuple[str, ...], rows: str, dtype: str, bits: int, block_size: int, quant_type: str) -> None:
    """Two calls of every shape and number of rows."""
    with CudaExecutionProvider() as gpu:
        for shape in shapes:
            case = Case(Shape.parse(shape), dtype=dtype, bits=bits, block_size=block_size, quant_type=quant_type)
            layer = Layer(gpu, case)
            for count in map(int, rows.split(",")):
                x = gpu.to_device(layer.rng.standard_normal((count, layer.hidden)).astype(DTYPES[dtype]))
                calls = [[x, gpu.to_device(layer.logits(count, call))] for call in range(2)]
                output = gpu.to_device(np.full(x.shape, np.nan, x.dtype))
                for call in calls:
                    layer.kernel.execute(call, [output])
                gpu.synchronize()
                print(f"{shape} {count} rows: {layer.kernel.plan(calls[0], [output]).variant}")
            layer.kernel.close()


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.counters", standalone_mode=True)
