"""LLVM IR of values: codes, scales and zero points to float32, multiply-adds, sums across lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qmoe_ep.cpu.ir import FunctionWriter, vector
from qmoe_ep.formats import element_values

if TYPE_CHECKING:
    from qmoe_ep.formats import Element

__all__ = [
    "ROWS",
    "SCALE_BYTES",
    "Lanes",
    "decode",
    "multiply_add",
    "prefetch",
    "scale_function",
    "sum_lanes",
    "unpack_one",
]

SCALE_BYTES = (4, 2, 2, 1, 1)
"""Of each kind of scale: float32, float16, bfloat16, float8_e8m0, float8_e4m3."""

ROWS = 4
"""Rows that are summed across lanes together."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The machine's vectors.

    Attributes
    ----------
    count : float32 per vector: 16, 8 or 4
    fused : whether multiply-add is one instruction
    lookup : whether 16 values can be looked up in a register by one instruction
    fused_tokens, tile_tokens : token rows that the microkernels take at once, by what fits into registers
    """

    count: int
    fused: bool
    lookup: bool
    fused_tokens: int
    tile_tokens: int

    @classmethod
    def of_features(cls, avx512: bool, avx2: bool, fused: bool, many_registers: bool) -> Lanes:
        """By what the machine has; ``many_registers``: 32 vector registers."""
        count = 16 if avx512 else 8 if avx2 else 4
        return cls(count, fused, avx512, *((4, 6) if many_registers else (2, 2)))

    @property
    def floats(self) -> str:
        return vector(self.count, "float")

    @property
    def ints(self) -> str:
        return vector(self.count, "i32")


def prefetch(f: FunctionWriter, address: str) -> None:
    """Ask for the cache line of an address, which may be anywhere."""
    f.do(f"call void @llvm.prefetch.p0(ptr {address}, i32 0, i32 3, i32 1)")


def multiply_add(f: FunctionWriter, lanes: Lanes, a: str, b: str, c: str) -> str:
    kind = lanes.floats
    if lanes.fused:
        return f.op(f"call {kind} @llvm.fma.v{lanes.count}f32({kind} {a}, {kind} {b}, {kind} {c})")
    product = f.op(f"fmul {kind} {a}, {b}")
    return f.op(f"fadd {kind} {c}, {product}")


def _halves(f: FunctionWriter, count: int, group: int, a: str, b: str) -> str:
    """Add the upper to the lower half of each group of lanes: those of ``a``, then those of ``b``."""
    lower = [first + lane for first in range(0, 2 * count, group) for lane in range(group // 2)]
    sums = [f.shuffle("float", count, a, b, [lane + offset for lane in lower]) for offset in (0, group // 2)]
    return f.op(f"fadd {vector(count, 'float')} {sums[0]}, {sums[1]}")


def sum_lanes(f: FunctionWriter, lanes: Lanes, rows: Sequence[str]) -> str:
    """The sums of four vectors as ``<4 x float>``; each the same tree of halves."""
    count, group = lanes.count, lanes.count
    pairs = [_halves(f, count, group, rows[0], rows[1]), _halves(f, count, group, rows[2], rows[3])]
    group //= 2
    both = _halves(f, count, group, *pairs)
    group //= 2
    while group > 1:
        # Sums stay at the start of each row's quarter; the other lanes don't matter.
        both = f.op(
            f"fadd {lanes.floats} {both}, "
            + f.shuffle("float", count, both, "poison", [(lane + group // 2) % count for lane in range(count)])
        )
        group //= 2
    return f.shuffle("float", count, both, "poison", [row * (count // 4) for row in range(4)])


def decode(
    f: FunctionWriter, lanes: Lanes, bits: int, element: Element, step: int, codes: str, zero: str, scale: str
) -> list[str]:
    """``step`` values from the address ``codes``, as vectors; ``zero`` and ``scale`` are floats.

    They are (code − zero)·scale, or what 4-bit floats spell times the scale. Differences are exact in float32, so that
    each value is rounded once, as in NumPy.
    """
    kind = lanes.floats
    scales = f.splat(lanes.count, "float", scale)
    parts = _codes(f, lanes, bits, step, codes)
    if lanes.lookup and bits <= 4:
        # A register of the 16 possible values: looking one up is a single instruction.
        numbers = [float(code) for code in range(16)]
        if element == "e2m1":
            numbers = element_values(np.arange(16, dtype=np.uint8), element, np.float32).tolist()
        every = f"<{', '.join(f'float {number}' for number in numbers)}>"
        if element == "integer":
            every = f.op(f"fsub {kind} {every}, {f.splat(lanes.count, 'float', zero)}")
        look_up = f"call {kind} @llvm.x86.avx512.permvar.sf.512({kind} {f.op(f'fmul {kind} {every}, {scales}')}"
        return [f.op(f"{look_up}, {lanes.ints} {part})") for part in parts]
    if element == "e2m1":
        values = [_four_bit_floats(f, lanes, part) for part in parts]
    else:
        zeros = f.splat(lanes.count, "float", zero)
        numbers_of = [f.op(f"uitofp {lanes.ints} {part} to {kind}") for part in parts]
        values = [f.op(f"fsub {kind} {number}, {zeros}") for number in numbers_of]
    return [f.op(f"fmul {kind} {value}, {scales}") for value in values]


def _four_bit_floats(f: FunctionWriter, lanes: Lanes, codes: str) -> str:
    """What e2m1 codes spell: twice the magnitude is a whole number below 16, looked up by shifting a word of them."""
    doubles = element_values(np.arange(8, dtype=np.uint8), "e2m1", np.float32) * 2
    word = sum(int(number) << 4 * code for code, number in enumerate(doubles))

    def constant(number: int) -> str:
        return f.splat(lanes.count, "i32", str(number))

    ints, kind = lanes.ints, lanes.floats
    shift = f.op(f"shl {ints} {f.op(f'and {ints} {codes}, {constant(7)}')}, {constant(2)}")
    double = f.op(f"and {ints} {f.op(f'lshr {ints} {constant(word)}, {shift}')}, {constant(15)}")
    number = f.op(f"uitofp {ints} {double} to {kind}")
    magnitude = f.op(f"fmul {kind} {number}, {f.splat(lanes.count, 'float', '0.5')}")
    sign = f.op(f"shl {ints} {f.op(f'and {ints} {codes}, {constant(8)}')}, {constant(28)}")
    signed = f.op(f"or {ints} {f.op(f'bitcast {kind} {magnitude} to {ints}')}, {sign}")
    return f.op(f"bitcast {ints} {signed} to {kind}")


def _codes(f: FunctionWriter, lanes: Lanes, bits: int, step: int, codes: str) -> list[str]:
    """``step`` codes as i32; with lookup, bits above the lowest four may hold anything."""
    if bits == 8:
        return _eight_bits(f, lanes, step, codes)
    wide = _three_bits(f, lanes, step, codes) if bits == 3 else _from_words(f, lanes, bits, step, codes)
    if lanes.lookup and bits == 4:
        return wide
    mask = f.splat(lanes.count, "i32", str((1 << bits) - 1))
    return [f.op(f"and {lanes.ints} {part}, {mask}") for part in wide]


def _from_words(f: FunctionWriter, lanes: Lanes, bits: int, step: int, codes: str) -> list[str]:
    """Each lane gets the 32-bit word that holds its code, and shifts it down."""
    count = max(1, step * bits // 32)
    if step * bits < 32:
        number = f.op(f"zext i{step * bits} {f.load(f'i{step * bits}', codes)} to i32")
        words = f.op(f"insertelement <1 x i32> poison, i32 {number}, i64 0")
    else:
        words = f.load(vector(count, "i32"), codes)
    parts = []
    for first in range(0, step, lanes.count):
        places = [(first + lane) * bits for lane in range(lanes.count)]
        spread = f.shuffle("i32", count, words, "poison", [place // 32 for place in places])
        shifts = ", ".join(f"i32 {place % 32}" for place in places)
        parts.append(f.op(f"lshr {lanes.ints} {spread}, <{shifts}>"))
    return parts


def _eight_bits(f: FunctionWriter, lanes: Lanes, step: int, codes: str) -> list[str]:
    narrow = vector(lanes.count, "i8")
    pieces = [f.load(narrow, f.at(codes, first)) for first in range(0, step, lanes.count)]
    return [f.op(f"zext {narrow} {piece} to {lanes.ints}") for piece in pieces]


def _three_bits(f: FunctionWriter, lanes: Lanes, step: int, codes: str) -> list[str]:
    """Eight codes in three bytes: each lane gets its three bytes and shifts them down."""
    count = step * 3 // 8
    packed = f.load(vector(count, "i8"), codes)
    padded = f.shuffle("i8", count, packed, "zeroinitializer", [*range(count), *[count] * (64 - count)])
    wide = []
    for first in range(0, step, lanes.count):
        groups = [3 * ((first + lane) // 8) for lane in range(lanes.count)]
        shifts = ", ".join(f"i32 {3 * ((first + lane) % 8)}" for lane in range(lanes.count))
        places = [place for group in groups for place in (group, group + 1, group + 2, 63)]
        spread = f.shuffle("i8", 64, padded, "poison", places)
        words = f.op(f"bitcast {vector(4 * lanes.count, 'i8')} {spread} to {lanes.ints}")
        wide.append(f.op(f"lshr {lanes.ints} {words}, <{shifts}>"))
    return wide


def scale_function(kind: int) -> str:
    """A scale as float32, exactly; its kind is a place in :data:`SCALE_BYTES`."""
    f = FunctionWriter(f"scale_{kind}", [("ptr", "scales"), ("i64", "index")], "float", inline=True)
    if kind == 0:
        return f.finish(f"float {f.load('float', f.at('%scales', '%index', 'float'), 4)}")
    if kind >= 3:
        byte = f.op(f"zext i8 {f.load('i8', f.at('%scales', '%index'))} to i32")
        bits = _power_of_two(f, byte) if kind == 3 else _eight_bit_float(f, byte)
        return f.finish(f"float {f.op(f'bitcast i32 {bits} to float')}")
    half = f.op(f"zext i16 {f.load('i16', f.at('%scales', '%index', 'i16'), 2)} to i32")
    if kind == 2:
        moved = f.op(f"shl i32 {half}, 16")
        return f.finish(f"float {f.op(f'bitcast i32 {moved} to float')}")
    sign = f.op(f"shl i32 {f.op(f'and i32 {half}, 32768')}, 16")
    magnitude = f.op(f"and i32 {half}, 32767")
    moved = f.op(f"shl i32 {magnitude}, 13")
    # The exponent's bias differs by 112; a product by a power of two is exact and normalises subnormals.
    scaled = f.op(f"fmul float {f.op(f'bitcast i32 {moved} to float')}, 0x46F0000000000000")
    finite = f.op(f"icmp ult i32 {magnitude}, {0x7C00}")
    endless = f.op(f"or i32 {moved}, {0x7F800000}")
    bits = f.op(f"select i1 {finite}, i32 {f.op(f'bitcast float {scaled} to i32')}, i32 {endless}")
    signed = f.op(f"or i32 {bits}, {sign}")
    return f.finish(f"float {f.op(f'bitcast i32 {signed} to float')}")


def _power_of_two(f: FunctionWriter, byte: str) -> str:
    """Bits of a float32 of the value of a float8_e8m0; the smallest is subnormal."""
    smallest = f.op(f"icmp eq i32 {byte}, 0")
    bits = f.op(f"select i1 {smallest}, i32 {0x00400000}, i32 {f.op(f'shl i32 {byte}, 23')}")
    return f.op(f"select i1 {f.op(f'icmp eq i32 {byte}, 255')}, i32 {0x7FC00000}, i32 {bits}")


def _eight_bit_float(f: FunctionWriter, byte: str) -> str:
    """Bits of a float32 of the value of a float8_e4m3."""
    magnitude = f.op(f"and i32 {byte}, 127")
    # As above: the exponent's bias differs by 120.
    moved = f.op(f"bitcast i32 {f.op(f'shl i32 {magnitude}, 20')} to float")
    scaled = f.op(f"bitcast float {f.op(f'fmul float {moved}, 0x4770000000000000')} to i32")
    bits = f.op(f"select i1 {f.op(f'icmp eq i32 {magnitude}, 127')}, i32 {0x7FC00000}, i32 {scaled}")
    sign = f.op(f"and i32 {byte}, 128")
    return f.op(f"or i32 {bits}, {f.op(f'shl i32 {sign}, 24')}")


def unpack_one(f: FunctionWriter, bits: int, base: str, index: str) -> str:
    """Code number ``index`` of a bit stream, as i32; reads no byte that holds none of its bits."""
    place = f.op(f"mul i64 {index}, {bits}")
    shift = f.op(f"trunc i64 {f.op(f'and i64 {place}, 7')} to i32")
    first = f.op(f"lshr i64 {place}, 3")
    last = f.op(f"lshr i64 {f.op(f'add i64 {place}, {bits - 1}')}, 3")
    low = f.op(f"zext i8 {f.load('i8', f.at(base, first))} to i32")
    high = f.op(f"zext i8 {f.load('i8', f.at(base, last))} to i32")
    word = f.op(f"or i32 {low}, {f.op(f'shl i32 {high}, 8')}") if bits == 3 else low
    return f.op(f"and i32 {f.op(f'lshr i32 {word}, {shift}')}, {(1 << bits) - 1}")
