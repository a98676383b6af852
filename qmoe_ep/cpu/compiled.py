"""Products by machine code that is compiled when first needed, for this machine, by LLVM (the extra ``jit``).

Nothing is kept on disk: a format takes a fraction of a second, once per process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from qmoe_ep.cpu.codegen import TASK_FIELDS, module_text, scratch_bytes
from qmoe_ep.cpu.products import Expanded, NumpyProducts, Packed, Product, aligned_bytes, aligned_rows
from qmoe_ep.cpu.values import ROWS, Lanes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qmoe_ep.call import ExpertMatrix
    from qmoe_ep.cpu.products import Floats
    from qmoe_ep.formats import Element

__all__ = ["CompiledProducts"]

Worker: TypeAlias = Callable[[int, int, int, int], None]
"""Carries out tasks: (address of the tasks, how many, address of the counter, address of its scratch memory)."""

_SCALE_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e8m0fnu": 3, "float8_e4m3fn": 4}
_ONE = np.ones(1, np.float32)
_TASK_WEIGHTS = 1 << 19
"""Weights that a task multiplies with: enough to be worth a task, few enough that threads end at the same time."""
_TASK_TOKEN_BYTES = 3 << 18
"""Token rows of a task stay in the second-level cache."""
_PIECE_VALUES = 1 << 15
"""Values that elementwise work takes at once, so that its temporaries stay in the second-level cache."""
_FIRST_ROW, _LAST_ROW = TASK_FIELDS.index("first_row"), TASK_FIELDS.index("last_row")


class _Compiler:
    """Modules that were compiled in this process, by format, for the machine's vectors unless others are given."""

    def __init__(self, lanes: Lanes | None = None) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        self.lanes = _host_lanes(llvm.get_process_triple(), features) if lanes is None else lanes
        self._llvm: Any = llvm
        self._target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=2
        )
        self._lock = threading.Lock()
        self._workers: dict[tuple[str, int, int, Element], Worker] = {}
        self._engines: list[Any] = []

    def worker(self, work: str, bits: int = 0, step: int = 0, element: Element = "integer") -> Worker:
        """The function that does tasks of one kind: ``multiply_expanded``, ``multiply_packed`` or ``expand_packed``."""
        with self._lock:
            if (work, bits, step, element) not in self._workers:
                self._compile(bits, step, element)
            return self._workers[work, bits, step, element]

    def _compile(self, bits: int, step: int, element: Element) -> None:
        module = self._llvm.parse_assembly(module_text(self.lanes, bits, step, element))
        module.verify()
        passes = self._llvm.create_pass_builder(self._target, self._llvm.create_pipeline_tuning_options(speed_level=2))
        passes.getModulePassManager().run(module, passes)
        engine = self._llvm.create_mcjit_compiler(module, self._target)
        engine.finalize_object()
        self._engines.append(engine)
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        for work in ("multiply_packed", "expand_packed") if bits else ("multiply_expanded",):
            self._workers[work, bits, step, element] = prototype(engine.get_function_address(f"work_{work}"))


def _host_lanes(triple: str, features: Mapping[str, bool]) -> Lanes:
    avx512 = all(features.get(name, False) for name in ("avx512f", "avx512bw", "avx512vl"))
    arm = triple.startswith(("aarch64", "arm64"))
    fused = arm or features.get("fma", False)
    return Lanes.of_features(avx512, features.get("avx2", False), fused, many_registers=avx512 or arm)


_compiler: _Compiler | None = None
_lock = threading.Lock()


def _shared_compiler() -> _Compiler:
    global _compiler
    with _lock:
        if _compiler is None:
            _compiler = _Compiler()
        return _compiler


def _step(matrix: ExpertMatrix) -> int:
    """Codes that are decoded at once; 0 for formats and rows that aren't decoded in registers."""
    if matrix.layout != "raw" or not (matrix.plain or matrix.form.element == "e2m1"):
        return 0
    size = matrix.block_size or matrix.in_features
    return 32 if size % 32 == 0 else 16 if size % 16 == 0 else 0


class CompiledProducts:
    """Products by compiled code on several threads; packed matrices are decoded in registers.

    A row's result depends on the row and the matrix alone. Formats without a fast way (8-bit floats, float zero points,
    a length of rows that isn't a multiple of 16, other layouts) are expanded by NumPy first, one expert at a time.

    Parameters
    ----------
    threads : that compute, the calling one included
    lanes : vectors to compile for, where not those of the machine; results may differ in rounding

    Raises
    ------
    ImportError : llvmlite isn't installed.
    """

    name = "compiled"
    takes_packed = True

    def __init__(self, threads: int, lanes: Lanes | None = None) -> None:
        self._compiler = _shared_compiler() if lanes is None else _Compiler(lanes)
        self._numpy = NumpyProducts()
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0
        self._scratch = threading.local()

    def expand(self, packed: Packed, expert: int, out: Floats) -> None:
        """Expand a matrix."""
        matrix, step = packed.matrix, _step(packed.matrix)
        if not step:
            self._numpy.expand(packed, expert, out)
            return
        operands = _Operands(packed, [expert])
        # Nothing is multiplied: x is never looked at, and y is where the values go.
        tasks = operands.tasks(out, out, [0, 1], 1)
        worker = self._compiler.worker("expand_packed", matrix.bits, step, matrix.form.element)
        self._work(worker, tasks, matrix.blocks, 0)

    def run(self, products: Sequence[Product], experts: Sequence[int], bounds: Sequence[int]) -> None:
        """Compute all of them, those of one format at the same time."""
        groups: dict[tuple[str, int, int, Element], list[Product]] = {}
        for product in products:
            matrix = product.weights.matrix if isinstance(product.weights, Packed) else None
            if matrix is None:
                groups.setdefault(("multiply_expanded", 0, 0, "integer"), []).append(product)
            elif step := _step(matrix):
                kind: tuple[str, int, int, Element] = ("multiply_packed", matrix.bits, step, matrix.form.element)
                groups.setdefault(kind, []).append(product)
            else:
                self._run_expanding(product, experts, bounds)
        for work, members in groups.items():
            self._run(self._compiler.worker(*work), members, experts, bounds)

    def _run(self, worker: Worker, products: Sequence[Product], experts: Sequence[int], bounds: Sequence[int]) -> None:
        tables, kept, blocks, tokens = [], [], 0, 0
        for product in products:
            operands, x = _Operands(product.weights, experts), _padded(product.x, self._compiler.lanes)
            at_once = max(1, _TASK_TOKEN_BYTES // x.strides[0])
            tables.append(operands.tasks(x, product.y, bounds, at_once))
            kept += [operands, x]
            blocks, tokens = max(blocks, operands.blocks), max(tokens, min(at_once, x.shape[0]))
        self._work(worker, np.concatenate(tables), blocks, tokens)

    def _run_expanding(self, product: Product, experts: Sequence[int], bounds: Sequence[int]) -> None:
        packed = product.weights
        if not isinstance(packed, Packed):
            return
        values = aligned_rows(packed.matrix.out_features, packed.matrix.in_features)
        for expert, (first, last) in zip(experts, pairwise(bounds), strict=True):
            self._numpy.expand(packed, expert, values)
            bias = None if packed.bias is None else packed.bias[expert : expert + 1].astype(np.float32)
            part = Product(Expanded(values[None], bias), product.x[first:last], product.y[first:last])
            self._run(self._compiler.worker("multiply_expanded"), [part], [0], [0, last - first])

    def for_rows(self, count: int, features: int, work: Callable[[slice], None]) -> None:
        """Work on pieces, on all threads."""
        size = max(1, _PIECE_VALUES // features)
        pieces = [slice(first, min(first + size, count)) for first in range(0, count, size)]
        if len(pieces) < 2 or self._threads < 2:
            for piece in pieces:
                work(piece)
            return
        list(self._executor().map(work, pieces))

    def _work(self, worker: Worker, tasks: NDArray[np.int64], blocks: int, tokens: int) -> None:
        counter = np.zeros(1, np.int64)
        nbytes = scratch_bytes(blocks, tokens, self._compiler.lanes)

        def work() -> None:
            worker(tasks.ctypes.data, len(tasks), counter.ctypes.data, self._memory(nbytes))

        helpers = [self._executor().submit(work) for _ in range(min(self._threads, len(tasks)) - 1)]
        try:
            work()
        finally:
            # Whatever happens, nothing that they write to or read from may go before they are done.
            for helper in helpers:
                helper.result()

    def _executor(self) -> ThreadPoolExecutor:
        # A forked child has none of its parent's threads.
        if self._pool is None or self._pool_process != os.getpid():
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="qmoe_ep")
            self._pool_process = os.getpid()
        return self._pool

    def _memory(self, nbytes: int) -> int:
        """The address of this thread's scratch memory."""
        memory: NDArray[np.uint8] | None = getattr(self._scratch, "memory", None)
        if memory is None or memory.size < nbytes:
            memory = self._scratch.memory = aligned_bytes(nbytes)
        return memory.ctypes.data


def _padded(x: Floats, lanes: Lanes) -> Floats:
    """Rows with zeros behind them up to a multiple of the vector."""
    tokens, depth = x.shape
    if depth % lanes.count == 0 and x.strides[1] == 4:
        return x
    padded = np.zeros((tokens, -(-depth // lanes.count) * lanes.count), np.float32)
    padded[:, :depth] = x
    return padded


class _Operands:
    """Addresses of one matrix of some experts; keeps the arrays alive.

    Parameters
    ----------
    experts : places in the first dimension
    """

    def __init__(self, weights: Packed | Expanded, experts: Sequence[int]) -> None:
        self._experts = np.asarray(experts, np.int64)
        self._arrays: list[NDArray[Any]] = []
        self._columns: dict[str, Any] = dict.fromkeys(TASK_FIELDS, 0)
        self.blocks = 0
        self._add("weights", weights.weights)
        if weights.bias is not None:
            self._add("bias", weights.bias.astype(np.float32, copy=False))
        if isinstance(weights, Expanded):
            _, self._rows, self._depth = weights.weights.shape
        else:
            self._add_format(weights)
        self._columns.update(in_features=self._depth, out_features=self._rows)

    def _add_format(self, packed: Packed) -> None:
        matrix = packed.matrix
        self.blocks, self._rows, self._depth = matrix.blocks, matrix.out_features, matrix.in_features
        if packed.scales is not None:
            self._add("scales", packed.scales)
        if packed.global_scales is None:
            self._columns["global_scale"] = _ONE.ctypes.data
        else:
            self._add("global_scale", packed.global_scales)
        if packed.zero_points is not None:
            self._add("zero_points", packed.zero_points)
            self._columns["zero_point_bytes"] = matrix.zero_point_shape[1] if matrix.block_size else 0
        self._columns.update(
            row_bytes=matrix.row_bytes,
            blocks=matrix.blocks,
            block_shift=(matrix.block_size // _step(matrix)).bit_length() - 1 if matrix.block_size else 62,
            scale_kind=_SCALE_KINDS[(matrix.element_scale_dtype or matrix.scale_dtype).name],
        )

    def _add(self, name: str, array: NDArray[Any]) -> None:
        """Note the addresses of the experts' parts, of copies where a part isn't contiguous."""
        places = self._experts
        if not array[0].flags.c_contiguous:
            array, places = np.ascontiguousarray(array[places]), np.arange(places.size)
        self._arrays.append(array)
        self._columns[name] = array.ctypes.data + array.strides[0] * places

    def tasks(self, x: Floats, y: Floats, bounds: Sequence[int], at_once: int) -> NDArray[np.int64]:
        """Cut the product into tasks, int64 [tasks, fields]; neighbours share weights.

        Parameters
        ----------
        at_once : token rows of a task
        """
        starts = np.asarray(bounds[:-1], np.int64)
        tokens = np.asarray(bounds[1:], np.int64) - starts
        pieces = -(-tokens // at_once)
        expert = np.repeat(np.arange(tokens.size), pieces)
        piece = np.arange(expert.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        first_token = starts[expert] + piece * at_once
        count = np.minimum(at_once, tokens[expert] - piece * at_once)
        per_task = _rows_per_task(self._depth)
        first_row = np.arange(0, self._rows, per_task)
        columns = {name: v[expert] if isinstance(v, np.ndarray) else v for name, v in self._columns.items()}
        columns["tokens"], columns["x_stride"] = count, x.strides[0] // 4
        columns["x"] = x.ctypes.data + x.strides[0] * first_token
        columns["y"] = y.ctypes.data + y.strides[0] * first_token
        table = np.empty((first_row.size, expert.size, len(TASK_FIELDS)), np.int64)
        for index, name in enumerate(TASK_FIELDS):
            table[:, :, index] = columns[name]
        table[:, :, _FIRST_ROW] = first_row[:, None]
        table[:, :, _LAST_ROW] = np.minimum(first_row + per_task, self._rows)[:, None]
        return table.reshape(-1, len(TASK_FIELDS))


def _rows_per_task(in_features: int) -> int:
    return max(ROWS, _TASK_WEIGHTS // in_features // ROWS * ROWS)
