"""LLVM IR of the CPU products: y = W·x + b with W decoded in registers, for the machine's vectors.

A *task* is a range of output rows of one expert's matrix and some token rows (see :data:`TASK_FIELDS`). Each value
y[t, n] is one chain of vector multiply-adds over k in ascending order, summed across lanes in one fixed tree,
whatever the tile, the number of tokens and the place where weights come from (codes or expanded float32). So packed
and expanded experts give the same bits, and no row's result depends on its neighbours.

Few tokens: codes become values in registers and are used at once; each weight is read once. What bounds it is
decoding, about one operation per weight vector and step. More tokens: a tile of rows is decoded into the first-level
cache and multiplied with all tokens, ``ROWS`` × ``tokens`` accumulators at a time; what bounds it is multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmoe_ep.cpu.ir import FunctionWriter, vector
from qmoe_ep.cpu.values import (
    ROWS,
    SCALE_BYTES,
    Lanes,
    decode,
    multiply_add,
    prefetch,
    scale_function,
    sum_lanes,
    unpack_one,
)

if TYPE_CHECKING:
    from qmoe_ep.formats import Element

__all__ = ["TASK_FIELDS", "module_text", "scratch_bytes"]

TASK_FIELDS = (
    "weights",  # address of codes, or of expanded float32 [out, in]
    "scales",  # address, [out, blocks]
    "zero_points",  # address of packed zero points, or 0 for the default
    "global_scale",  # address of a float32 that all scales are multiplied by
    "bias",  # address of float32 [out], or 0
    "x",  # address of float32 [tokens, in]
    "y",  # address of float32 [tokens, out]
    "tokens",
    "first_row",
    "last_row",  # exclusive
    "in_features",
    "x_stride",  # from one token row to the next; where in_features isn't a multiple of the vector, zeros follow it
    "out_features",
    "row_bytes",  # of codes
    "blocks",  # scales per row
    "zero_point_bytes",  # per row, or 0 for one zero point per row
    "block_shift",  # log2 of steps per block; 62 for one block per row
    "scale_kind",  # place in SCALE_BYTES
)
"""The task's fields, each an i64."""

TILE_DEPTH = 1024
"""Columns of a decoded tile, which stays in the first-level cache (16 KiB) beside as many of some token rows."""
TILE_STRIDE = TILE_DEPTH + 16
"""Rows of a tile begin in different sets of that cache."""


def scratch_bytes(blocks: int, tokens: int, lanes: Lanes) -> int:
    """What one worker needs for tasks of up to so many scales per row and tokens."""
    tile = 4 * ROWS * TILE_STRIDE
    return 2 * 4 * ROWS * (blocks + 16) + tile + 4 * ROWS * lanes.count * tokens + 256


def _microkernel(lanes: Lanes, tokens: int, rows: int) -> str:
    """acc[t, r] += Σk w[r, k]·x[t, k] for float32 rows: accumulators of ``tokens`` × ``rows`` vectors in registers.

    The depth is a multiple of the vector.
    """
    names = ("w", "ldw", "x", "ldx", "depth", "acc")
    kinds = ("ptr", "i64", "ptr", "i64", "i64", "ptr")
    f = FunctionWriter(f"tile_{tokens}_{rows}", list(zip(kinds, names, strict=True)))
    weight_rows = _row_addresses(f, "%w", "%ldw", rows, "float")
    token_rows = _row_addresses(f, "%x", "%ldx", tokens, "float")
    size = lanes.count
    # The accumulators of a token's rows lie ROWS apart from the next token's.
    places = [f.at("%acc", (t * ROWS + r) * size, "float") for t in range(tokens) for r in range(rows)]
    first = [(lanes.floats, f.load(lanes.floats, place, 64)) for place in places]

    def body(k: str, acc: list[str]) -> list[str]:
        w = [f.load(lanes.floats, f.at(row, k, "float"), 4) for row in weight_rows]
        x = [f.load(lanes.floats, f.at(row, k, "float"), 4) for row in token_rows]
        return [multiply_add(f, lanes, w[i % rows], x[i // rows], acc[i]) for i in range(tokens * rows)]

    for place, value in zip(places, f.loop(0, "%depth", size, body, first), strict=True):
        f.store(lanes.floats, value, place, 64)
    return f.finish()


def _row_addresses(f: FunctionWriter, base: str, stride: str, rows: int, element: str) -> list[str]:
    addresses = [base]
    for _ in range(rows - 1):
        addresses.append(f.at(addresses[-1], stride, element))
    return addresses


def _store_sums(f: FunctionWriter, lanes: Lanes, accumulators: Sequence[str], y: str, bias: str) -> None:
    """Write the sums of four or one accumulators to y, plus the bias where there is one (its address may be null)."""
    rows = len(accumulators)
    sums = sum_lanes(f, lanes, [*accumulators, *["zeroinitializer"] * (ROWS - rows)])
    if rows == 1:
        sums = f.op(f"extractelement {vector(4, 'float')} {sums}, i64 0")
    kind = vector(4, "float") if rows == ROWS else "float"
    f.store(kind, sums, y, 4)

    def add_bias() -> None:
        f.store(kind, f.op(f"fadd {kind} {sums}, {f.load(kind, bias, 4)}"), y, 4)

    f.when(f.op(f"icmp ne ptr {bias}, null"), add_bias)


def _finish_tile(lanes: Lanes, rows: int) -> str:
    """Sums of the accumulators of ``rows`` rows for every token."""
    names = (("ptr", "acc"), ("i64", "tokens"), ("ptr", "y"), ("i64", "ldy"), ("ptr", "bias"))
    f = FunctionWriter(f"finish_{rows}", names)

    def body(t: str, _: list[str]) -> None:
        base = f.at("%acc", f.op(f"mul i64 {t}, {ROWS * lanes.count}"), "float")
        places = [f.at(base, r * lanes.count, "float") for r in range(rows)]
        accumulators = [f.load(lanes.floats, place, 64) for place in places]
        _store_sums(f, lanes, accumulators, f.at("%y", f.op(f"mul i64 {t}, %ldy"), "float"), "%bias")

    f.loop(0, "%tokens", 1, body)
    return f.finish()


def _fused(lanes: Lanes, bits: int, element: Element, step: int, tokens: int, rows: int) -> str:
    """y[t, r] of a few tokens straight from codes: each is decoded in registers and used for all tokens."""
    names = ("codes", "ldw", "scales", "zeros", "blocks", "shift", "x", "ldx", "depth", "y", "ldy", "bias")
    kinds = ("ptr", "i64", "ptr", "ptr", "i64", "i64", "ptr", "i64", "i64", "ptr", "i64", "ptr")
    f = FunctionWriter(f"fused_{tokens}_{rows}", list(zip(kinds, names, strict=True)))
    code_rows = _row_addresses(f, "%codes", "%ldw", rows, "i8")
    scale_rows = _row_addresses(f, "%scales", "%blocks", rows, "float")
    zero_rows = _row_addresses(f, "%zeros", "%blocks", rows, "float")
    token_rows = _row_addresses(f, "%x", "%ldx", tokens, "float")
    steps = f.op(f"udiv i64 %depth, {step}")
    next_rows = f.op(f"mul i64 %ldw, {rows}")
    zero = [(lanes.floats, "zeroinitializer")] * (tokens * rows)

    def body(s: str, acc: list[str]) -> list[str]:
        block = f.op(f"lshr i64 {s}, %shift")
        place, k = f.op(f"mul i64 {s}, {step * bits // 8}"), f.op(f"mul i64 {s}, {step}")
        if rows == ROWS:
            # Rows are short, so that the machine's own prefetching starts anew with each: ask for the next rows.
            ahead = f.at(f.at("%codes", next_rows), f.op(f"mul i64 {s}, {rows * step * bits // 8}"))
            for line in range(0, rows * step * bits // 8, 64):
                prefetch(f, f.at(ahead, line))
        values = []
        for codes, scales, zeros in zip(code_rows, scale_rows, zero_rows, strict=True):
            scale = f.load("float", f.at(scales, block, "float"), 4)
            point = f.load("float", f.at(zeros, block, "float"), 4)
            values.append(decode(f, lanes, bits, element, step, f.at(codes, place), point, scale))
        for part in range(step // lanes.count):
            for t in range(tokens):
                x = f.load(lanes.floats, f.at(f.at(token_rows[t], k, "float"), part * lanes.count, "float"), 4)
                for r in range(rows):
                    acc[t * rows + r] = multiply_add(f, lanes, values[r][part], x, acc[t * rows + r])
        return acc

    acc = f.loop(0, steps, 1, lambda s, values: body(s, list(values)), zero)
    for t, y in enumerate(_row_addresses(f, "%y", "%ldy", tokens, "float")):
        _store_sums(f, lanes, acc[t * rows : (t + 1) * rows], y, "%bias")
    return f.finish()


def _decode_row(lanes: Lanes, bits: int, element: Element, step: int) -> str:
    """Values of steps [first, last) of one row, written to out."""
    names = (("ptr", "codes"), ("ptr", "scales"), ("ptr", "zeros"), ("i64", "shift"))
    f = FunctionWriter("decode_row", [*names, ("i64", "first"), ("i64", "last"), ("ptr", "out")])

    def body(s: str, _: list[str]) -> None:
        block = f.op(f"lshr i64 {s}, %shift")
        scale = f.load("float", f.at("%scales", block, "float"), 4)
        point = f.load("float", f.at("%zeros", block, "float"), 4)
        place = f.at("%codes", f.op(f"mul i64 {s}, {step * bits // 8}"))
        out = f.at("%out", f.op(f"mul i64 {f.op(f'sub i64 {s}, %first')}, {step}"), "float")
        for part, value in enumerate(decode(f, lanes, bits, element, step, place, point, scale)):
            f.store(lanes.floats, value, f.at(out, part * lanes.count, "float"), 4)

    f.loop("%first", "%last", 1, body)
    return f.finish()


def _task_fields(f: FunctionWriter) -> dict[str, str]:
    fields = {}
    pointers = TASK_FIELDS[:7]
    for index, name in enumerate(TASK_FIELDS):
        kind = "ptr" if name in pointers else "i64"
        fields[name] = f.load(kind, f.at("%task", index, "i64"), 8)
    return fields


def _prepare(bits: int) -> str:
    """Scales and zero points of some rows as float32, [rows, blocks] each."""
    names = (("ptr", "task"), ("i64", "row"), ("i64", "rows"), ("ptr", "scales"), ("ptr", "zeros"))
    f = FunctionWriter("prepare", names)
    task = _task_fields(f)
    blocks = task["blocks"]
    start = f.op(f"mul i64 %row, {blocks}")
    count = f.op(f"mul i64 %rows, {blocks}")
    factor = f.load("float", task["global_scale"], 4)

    def scales(kind: int) -> None:
        def body(i: str, _: list[str]) -> None:
            index = f.op(f"add i64 {start}, {i}")
            wide = f.op(f"call float @scale_{kind}(ptr {task['scales']}, i64 {index})")
            f.store("float", f.op(f"fmul float {wide}, {factor}"), f.at("%scales", i, "float"), 4)

        f.loop(0, count, 1, body)
        width = SCALE_BYTES[kind]
        following = f.at(task["scales"], f.op(f"mul i64 {f.op(f'add i64 {start}, {count}')}, {width}"))
        f.loop(0, f.op(f"mul i64 {count}, {width}"), 64, lambda i, _: prefetch(f, f.at(following, i)))

    f.choose(task["scale_kind"], range(len(SCALE_BYTES)), scales)

    def default() -> None:
        f.loop(0, count, 1, lambda i, _: f.store("float", f"{1 << (bits - 1)}.0", f.at("%zeros", i, "float"), 4))

    def stored() -> None:
        def row(r: str, _: list[str]) -> None:
            def point(j: str, _: list[str]) -> None:
                # One zero point per row is found along the rows of the expert, else along the blocks of the row.
                own = f.op(f"add i64 %row, {r}")
                single = f.op(f"icmp eq i64 {task['zero_point_bytes']}, 0")
                base = f.at(task["zero_points"], f.op(f"mul i64 {own}, {task['zero_point_bytes']}"))
                index = f.op(f"select i1 {single}, i64 {own}, i64 {j}")
                out = f.at("%zeros", f.op(f"add i64 {f.op(f'mul i64 {r}, {blocks}')}, {j}"), "float")
                number = f.op(f"uitofp i32 {unpack_one(f, bits, base, index)} to float")
                f.store("float", number, out, 4)

            f.loop(0, blocks, 1, point)

        f.loop(0, "%rows", 1, row)

    f.when(f.op(f"icmp eq ptr {task['zero_points']}, null"), default, stored)
    return f.finish()


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Addresses of a worker's memory."""

    scales: str
    zeros: str
    tile: str
    acc: str


def _divide_scratch(f: FunctionWriter, blocks: str) -> _Scratch:
    padded = f.op(f"and i64 {f.op(f'add i64 {blocks}, 15')}, -16")
    each = f.op(f"mul i64 {padded}, {4 * ROWS}")
    zeros = f.at("%scratch", each)
    tile = f.at(zeros, each)
    return _Scratch("%scratch", zeros, tile, f.at(tile, 4 * ROWS * TILE_STRIDE))


def _for_rows(f: FunctionWriter, rows: str, group: int, call: Callable[[int, str], None]) -> None:
    """``call(count, r)`` for groups of rows and then for single ones; the group is a power of two."""
    whole = f.op(f"and i64 {rows}, {-group}")
    f.loop(0, whole, group, lambda r, _: call(group, r))
    f.loop(whole, rows, 1, lambda r, _: call(1, r))


def _moved(f: FunctionWriter, pointer: str, rows: str, stride: str | int, element: str = "float") -> str:
    return f.at(pointer, f.op(f"mul i64 {rows}, {stride}"), element)


def _moved_bias(f: FunctionWriter, bias: str, rows: str) -> str:
    """A bias further on; null stays null."""
    absent = f.op(f"icmp eq ptr {bias}, null")
    return f.op(f"select i1 {absent}, ptr null, ptr {f.at(bias, rows, 'float')}")


def _multiply_tile(lanes: Lanes) -> str:
    """Accumulate a tile of rows for all tokens, as evenly grouped as they fit into registers."""
    names = (("ptr", "w"), ("i64", "ldw"), ("ptr", "x"), ("i64", "ldx"), ("i64", "depth"), ("ptr", "acc"))
    f = FunctionWriter("multiply_tile", [*names, ("i64", "tokens"), ("i64", "rows")])
    groups = f.op(f"udiv i64 {f.op(f'add i64 %tokens, {lanes.tile_tokens - 1}')}, {lanes.tile_tokens}")
    rounded = f.op(f"sub i64 {f.op(f'add i64 %tokens, {groups}')}, 1")
    size = f.op(f"udiv i64 {rounded}, {groups}")

    def group(t: str, _: list[str]) -> None:
        x = _moved(f, "%x", t, "%ldx")
        acc = _moved(f, "%acc", t, ROWS * lanes.count)

        def of_size(tokens: int) -> None:
            def multiply(rows: int, r: str) -> None:
                w, place = _moved(f, "%w", r, "%ldw"), _moved(f, acc, r, lanes.count)
                f.do(f"call void @tile_{tokens}_{rows}(ptr {w}, i64 %ldw, ptr {x}, i64 %ldx, i64 %depth, ptr {place})")

            _for_rows(f, "%rows", ROWS, multiply)

        f.choose(f.least(size, f.op(f"sub i64 %tokens, {t}")), range(1, lanes.tile_tokens + 1), of_size)

    f.loop(0, "%tokens", size, group)
    return f.finish()


def _tile(
    f: FunctionWriter,
    lanes: Lanes,
    task: Mapping[str, str],
    acc: str,
    row: str,
    rows: str,
    weights: Callable[[str, str], tuple[str, str]],
) -> None:
    """One tile of rows for all tokens; ``weights(k, depth)`` gives address and stride of its columns from k on."""
    tokens = task["tokens"]
    depth = f.op(f"and i64 {f.op('add i64 ' + task['in_features'] + f', {lanes.count - 1}')}, {-lanes.count}")
    vectors = f.op(f"mul i64 {tokens}, {ROWS}")
    f.loop(
        0,
        vectors,
        1,
        lambda i, _: f.store(lanes.floats, "zeroinitializer", _moved(f, acc, i, lanes.count), 64),
    )

    def chunk(k: str, _: list[str]) -> None:
        part = f.least(f.op(f"sub i64 {depth}, {k}"), TILE_DEPTH)
        w, stride = weights(k, part)
        x = f.at(task["x"], k, "float")
        f.do(
            f"call void @multiply_tile(ptr {w}, i64 {stride}, ptr {x}, i64 {task['x_stride']}, i64 {part}, ptr {acc}, "
            f"i64 {tokens}, i64 {rows})"
        )

    f.loop(0, depth, TILE_DEPTH, chunk)
    bias = _moved_bias(f, task["bias"], row)

    def finish(count: int, r: str) -> None:
        y = f.at(f.at(task["y"], row, "float"), r, "float")
        f.do(
            f"call void @finish_{count}(ptr {_moved(f, acc, r, lanes.count)}, i64 {tokens}, ptr {y}, "
            f"i64 {task['out_features']}, ptr {_moved_bias(f, bias, r)})"
        )

    _for_rows(f, rows, ROWS, finish)


def _for_tiles(f: FunctionWriter, task: Mapping[str, str], body: Callable[[str, str], None]) -> None:
    """``body(row, rows)`` for tiles of the task's rows."""

    def tile(row: str, _: list[str]) -> None:
        body(row, f.least(f.op(f"sub i64 {task['last_row']}, {row}"), ROWS))

    f.loop(task["first_row"], task["last_row"], ROWS, tile)


def _multiply_expanded(lanes: Lanes) -> str:
    """A task whose weights are float32."""
    f = FunctionWriter("multiply_expanded", [("ptr", "task"), ("ptr", "scratch")])
    task = _task_fields(f)
    scratch = _divide_scratch(f, "0")
    depth = task["in_features"]

    def tile(row: str, rows: str) -> None:
        w = _moved(f, task["weights"], row, depth)

        def in_place() -> None:
            _tile(f, lanes, task, scratch.acc, row, rows, lambda k, part: (f.at(w, k, "float"), depth))

        def copied() -> None:
            def weights(k: str, part: str) -> tuple[str, str]:
                count = f.least(f.op(f"sub i64 {depth}, {k}"), part)

                def copy(r: str, _: list[str]) -> None:
                    source, out = f.at(_moved(f, w, r, depth), k, "float"), _moved(f, scratch.tile, r, TILE_STRIDE)
                    f.do(f"call void @copy_padded(ptr {source}, i64 {count}, i64 {part}, ptr {out})")

                f.loop(0, rows, 1, copy)
                return scratch.tile, str(TILE_STRIDE)

            _tile(f, lanes, task, scratch.acc, row, rows, weights)

        # Reading rows in place is quick as long as they are read once; a tile of them is in nobody's way.
        few = f.op(f"icmp sle i64 {task['tokens']}, {lanes.tile_tokens}")
        ragged = f.op(f"and i64 {depth}, {lanes.count - 1}")
        f.when(f.op(f"and i1 {few}, {f.op(f'icmp eq i64 {ragged}, 0')}"), in_place, copied)

    _for_tiles(f, task, tile)
    return f.finish()


def _multiply_packed(lanes: Lanes, bits: int, step: int) -> str:
    """A task whose weights are codes."""
    f = FunctionWriter("multiply_packed", [("ptr", "task"), ("ptr", "scratch")])
    task = _task_fields(f)
    scratch = _divide_scratch(f, task["blocks"])
    few = f.op(f"icmp sle i64 {task['tokens']}, {lanes.fused_tokens}")

    def tile(row: str, rows: str) -> None:
        f.do(f"call void @prepare(ptr %task, i64 {row}, i64 {rows}, ptr {scratch.scales}, ptr {scratch.zeros})")
        codes = _moved(f, task["weights"], row, task["row_bytes"], "i8")

        def directly() -> None:
            f.choose(task["tokens"], range(1, lanes.fused_tokens + 1), of_tokens)

        def of_tokens(tokens: int) -> None:
            def multiply(count: int, r: str) -> None:
                number = f.op(f"add i64 {row}, {r}")
                f.do(
                    f"call void @fused_{tokens}_{count}(ptr {_moved(f, codes, r, task['row_bytes'], 'i8')}, "
                    f"i64 {task['row_bytes']}, ptr {_moved(f, scratch.scales, r, task['blocks'])}, "
                    f"ptr {_moved(f, scratch.zeros, r, task['blocks'])}, i64 {task['blocks']}, "
                    f"i64 {task['block_shift']}, ptr {task['x']}, i64 {task['x_stride']}, "
                    f"i64 {task['in_features']}, "
                    f"ptr {f.at(task['y'], number, 'float')}, i64 {task['out_features']}, "
                    f"ptr {_moved_bias(f, task['bias'], number)})"
                )

            _for_rows(f, rows, ROWS, multiply)

        def tiled() -> None:
            def weights(k: str, depth: str) -> tuple[str, str]:
                _decode_rows(f, task, step, scratch, codes, rows, k, depth, scratch.tile, str(TILE_STRIDE))
                return scratch.tile, str(TILE_STRIDE)

            _tile(f, lanes, task, scratch.acc, row, rows, weights)

        f.when(few, directly, tiled)

    _for_tiles(f, task, tile)
    return f.finish()


def _decode_rows(
    f: FunctionWriter,
    task: Mapping[str, str],
    step: int,
    scratch: _Scratch,
    codes: str,
    rows: str,
    k: str,
    depth: str,
    out: str,
    stride: str,
) -> None:
    """Write the values of columns [k, k + depth) of some rows."""
    first = f.op(f"udiv i64 {k}, {step}")
    last = f.op(f"add i64 {first}, {f.op(f'udiv i64 {depth}, {step}')}")

    def row(r: str, _: list[str]) -> None:
        f.do(
            f"call void @decode_row(ptr {_moved(f, codes, r, task['row_bytes'], 'i8')}, "
            f"ptr {_moved(f, scratch.scales, r, task['blocks'])}, ptr {_moved(f, scratch.zeros, r, task['blocks'])}, "
            f"i64 {task['block_shift']}, i64 {first}, i64 {last}, ptr {_moved(f, out, r, stride)})"
        )

    f.loop(0, rows, 1, row)


def _copy_padded() -> str:
    """``count`` floats, then zeros up to ``size``."""
    names = (("ptr", "source"), ("i64", "count"), ("i64", "size"), ("ptr", "out"))
    f = FunctionWriter("copy_padded", names)

    def copy(i: str, _: list[str]) -> None:
        f.store("float", f.load("float", f.at("%source", i, "float"), 4), f.at("%out", i, "float"), 4)

    f.loop(0, "%count", 1, copy)
    f.loop("%count", "%size", 1, lambda i, _: f.store("float", "0.0", f.at("%out", i, "float"), 4))
    return f.finish()


def _expand(step: int) -> str:
    """A task that writes its rows' values to y float32 [out, in] instead of multiplying with them."""
    f = FunctionWriter("expand_packed", [("ptr", "task"), ("ptr", "scratch")])
    task = _task_fields(f)
    scratch = _divide_scratch(f, task["blocks"])
    depth = task["in_features"]

    def tile(row: str, rows: str) -> None:
        f.do(f"call void @prepare(ptr %task, i64 {row}, i64 {rows}, ptr {scratch.scales}, ptr {scratch.zeros})")
        codes = _moved(f, task["weights"], row, task["row_bytes"], "i8")
        _decode_rows(f, task, step, scratch, codes, rows, "0", depth, _moved(f, task["y"], row, depth), depth)

    _for_tiles(f, task, tile)
    return f.finish()


def _worker(work: str) -> str:
    """Take tasks from a common counter until none is left."""
    names = (("ptr", "tasks"), ("i64", "count"), ("ptr", "counter"), ("ptr", "scratch"))
    f = FunctionWriter(f"work_{work}", names, exported=True)

    def number() -> str:
        return f.op("atomicrmw add ptr %counter, i64 1 monotonic, align 8")

    def work_on(task: str) -> str:
        f.do(f"call void @{work}(ptr {_moved(f, '%tasks', task, len(TASK_FIELDS), 'i64')}, ptr %scratch)")
        return number()

    f.repeat_while(number(), "%count", work_on)
    return f.finish()


def module_text(lanes: Lanes, bits: int = 0, step: int = 0, element: Element = "integer") -> str:
    """The IR of the products with expanded weights, or (``bits`` > 0) with codes read in steps of so many."""
    kind = lanes.floats
    parts = [
        f"declare {kind} @llvm.fma.v{lanes.count}f32({kind}, {kind}, {kind})",
        "declare i64 @llvm.smin.i64(i64, i64)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    if lanes.lookup:
        parts.append(f"declare {kind} @llvm.x86.avx512.permvar.sf.512({kind}, {lanes.ints})")
    parts += [_copy_padded(), _multiply_tile(lanes)]
    parts += [_microkernel(lanes, t, r) for t in range(1, lanes.tile_tokens + 1) for r in (1, ROWS)]
    parts += [_finish_tile(lanes, r) for r in (1, ROWS)]
    if not bits:
        return "\n\n".join([*parts, _multiply_expanded(lanes), _worker("multiply_expanded")])
    parts += [scale_function(number) for number in range(len(SCALE_BYTES))]
    parts += [_fused(lanes, bits, element, step, t, r) for t in range(1, lanes.fused_tokens + 1) for r in (1, ROWS)]
    parts += [
        _prepare(bits),
        _decode_row(lanes, bits, element, step),
        _expand(step),
        _multiply_packed(lanes, bits, step),
    ]
    parts += [_worker("expand_packed"), _worker("multiply_packed")]
    return "\n\n".join([*parts])
