"""A small writer of LLVM IR text: one function at a time, values in static single assignment, counted loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["FunctionWriter", "vector"]


def vector(count: int, element: str) -> str:
    """The type of ``count`` elements: ``vector(16, "float")`` is ``"<16 x float>"``."""
    return f"<{count} x {element}>"


class FunctionWriter:
    """Writes one function.

    Parameters
    ----------
    name : of the function
    parameters : (type, name) of each; used in the text as ``%name``
    result : type that it returns
    exported : whether it is called from outside
    inline : whether its text takes the place of calls; otherwise it stays a function, which compiles quicker
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, str]],
        result: str = "void",
        exported: bool = False,
        inline: bool = False,
    ) -> None:
        given = ", ".join(f"{kind} %{label}" for kind, label in parameters)
        linkage, attribute = "" if exported else "internal", "alwaysinline" if inline else "noinline"
        self._lines = [f"define {linkage} {result} @{name}({given}) nounwind {attribute} {{", "entry:"]
        self._count = 0
        self._block = "entry"

    # --- single steps ------------------------------------------------------------------------------

    def _name(self, what: str = "v") -> str:
        self._count += 1
        return f"{what}{self._count}"

    def do(self, text: str) -> None:
        """An instruction without a value."""
        self._lines.append(f"  {text}")

    def op(self, text: str) -> str:
        """An instruction with a value, whose name is returned."""
        name = f"%{self._name()}"
        self.do(f"{name} = {text}")
        return name

    def load(self, kind: str, pointer: str, align: int = 1) -> str:
        """Load a value."""
        return self.op(f"load {kind}, ptr {pointer}, align {align}")

    def store(self, kind: str, value: str, pointer: str, align: int = 1) -> None:
        """Store a value."""
        self.do(f"store {kind} {value}, ptr {pointer}, align {align}")

    def at(self, pointer: str, index: str | int, element: str = "i8") -> str:
        """The address of element ``index`` of an array."""
        return self.op(f"getelementptr {element}, ptr {pointer}, i64 {index}")

    def splat(self, count: int, element: str, value: str) -> str:
        """A vector of ``count`` times the same value."""
        kind = vector(count, element)
        one = self.op(f"insertelement {kind} poison, {element} {value}, i64 0")
        return self.op(f"shufflevector {kind} {one}, {kind} poison, {vector(count, 'i32')} zeroinitializer")

    def shuffle(self, element: str, count: int, first: str, second: str, lanes: Sequence[int]) -> str:
        """The ``lanes`` of two vectors of ``count`` elements, those of the second counted on."""
        kind = vector(count, element)
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.op(f"shufflevector {kind} {first}, {kind} {second}, {vector(len(lanes), 'i32')} <{mask}>")

    def least(self, a: str | int, b: str | int) -> str:
        """The smaller of two signed i64."""
        return self.op(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})")

    # --- control -----------------------------------------------------------------------------------

    def _label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block = name

    def loop(
        self,
        start: str | int,
        stop: str | int,
        step: str | int,
        body: Callable[[str, list[str]], Sequence[str] | None],
        carried: Sequence[tuple[str, str]] = (),
    ) -> list[str]:
        """``for i in range(start, stop, step)`` with i64 numbers and a positive step.

        Parameters
        ----------
        body : writes one round, given i and the carried values, and returns their next values
        carried : (type, first value) of each

        Returns
        -------
        the carried values at the end
        """
        head, inside, done = self._name("head"), self._name("inside"), self._name("done")
        index, values = f"%{self._name('i')}", [f"%{self._name('c')}" for _ in carried]
        before = self._block
        self.do(f"br label %{head}")
        self._label(head)
        place = len(self._lines)
        more = self.op(f"icmp slt i64 {index}, {stop}")
        self.do(f"br i1 {more}, label %{inside}, label %{done}")
        self._label(inside)
        following = list(body(index, values) or [])
        after = self.op(f"add nsw i64 {index}, {step}")
        latch = self._block
        self.do(f"br label %{head}")
        phis = [f"  {index} = phi i64 [ {start}, %{before} ], [ {after}, %{latch} ]"]
        for name, (kind, first), then in zip(values, carried, following, strict=True):
            phis.append(f"  {name} = phi {kind} [ {first}, %{before} ], [ {then}, %{latch} ]")
        self._lines[place:place] = phis
        self._label(done)
        return values

    def repeat_while(self, first: str, stop: str, body: Callable[[str], str]) -> None:
        """``i = first; while i < stop: i = body(i)`` with i64 numbers."""
        head, inside, done = self._name("head"), self._name("inside"), self._name("done")
        index, before = f"%{self._name('i')}", self._block
        self.do(f"br label %{head}")
        self._label(head)
        place = len(self._lines)
        self.do(f"br i1 {self.op(f'icmp slt i64 {index}, {stop}')}, label %{inside}, label %{done}")
        self._label(inside)
        following = body(index)
        self._lines.insert(place, f"  {index} = phi i64 [ {first}, %{before} ], [ {following}, %{self._block} ]")
        self.do(f"br label %{head}")
        self._label(done)

    def when(self, condition: str, body: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        """``if condition: body() else: otherwise()``, both without values."""
        yes, no, done = self._name("yes"), self._name("no"), self._name("done")
        self.do(f"br i1 {condition}, label %{yes}, label %{no}")
        self._label(yes)
        body()
        self.do(f"br label %{done}")
        self._label(no)
        if otherwise is not None:
            otherwise()
        self.do(f"br label %{done}")
        self._label(done)

    def choose(self, value: str, cases: Sequence[int], body: Callable[[int], None]) -> None:
        """``body(value)``, written out for each of the cases; nothing happens for other values."""
        done = self._name("done")
        labels = [self._name("case") for _ in cases]
        table = " ".join(f"i64 {case}, label %{label}" for case, label in zip(cases, labels, strict=True))
        self.do(f"switch i64 {value}, label %{done} [ {table} ]")
        for case, label in zip(cases, labels, strict=True):
            self._label(label)
            body(case)
            self.do(f"br label %{done}")
        self._label(done)

    def finish(self, value: str = "void") -> str:
        """Return and give the text."""
        self.do(f"ret {value}")
        return "\n".join([*self._lines, "}"])
