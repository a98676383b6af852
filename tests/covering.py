"""Covering designs: few combinations of options in which every pair of values of two factors occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["pairwise"]

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]


def pairwise(factors: Mapping[str, Sequence[Any]], valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows that cover every pair of values, chosen greedily; the same rows every time.

    ``valid`` says whether a complete row makes sense; pairs that no valid row has are given up.
    """
    names = sorted(factors, key=lambda name: -len(factors[name]))
    open_pairs: dict[Pair, None] = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows: list[Row] = []
    while open_pairs:
        seed = next(iter(open_pairs))
        picked = _complete(names, factors, dict(seed), open_pairs)
        row = {name: factors[name][i] for name, i in picked.items()}
        if not valid(row):
            row, picked = _repair(names, factors, dict(seed), valid)
        del open_pairs[seed]
        if row:
            rows.append(row)
            for pair in _pairs(names, picked):
                open_pairs.pop(pair, None)
    return rows


def _pairs(names: Sequence[str], picked: Mapping[str, int]) -> list[Pair]:
    return [((a, picked[a]), (b, picked[b])) for a, b in itertools.combinations(names, 2)]


def _complete(
    names: Sequence[str], factors: Mapping[str, Sequence[Any]], picked: dict[str, int], open_pairs: Mapping[Pair, None]
) -> dict[str, int]:
    """Give every other factor the value that covers most with what is picked so far."""
    position = {name: p for p, name in enumerate(names)}

    def covers(name: str, value: int) -> int:
        sides = (((other, i), (name, value)) for other, i in picked.items())
        return sum((a, b) in open_pairs if position[a[0]] < position[b[0]] else (b, a) in open_pairs for a, b in sides)

    for name in names:
        if name not in picked:
            # Ties go round the values, so that free choices vary.
            turn = len(open_pairs) % len(factors[name])
            options = [(turn + step) % len(factors[name]) for step in range(len(factors[name]))]
            picked[name] = max(options, key=lambda value: covers(name, value))
    return picked


def _repair(
    names: Sequence[str], factors: Mapping[str, Sequence[Any]], seed: dict[str, int], valid: Callable[[Row], bool]
) -> tuple[Row, dict[str, int]]:
    """The first valid row with the seed's pair, changing as few of the other factors as that takes; or nothing."""
    free = [name for name in names if name not in seed]
    base = {name: seed.get(name, 0) for name in names}
    for changed in range(len(free) + 1):
        for subset in itertools.combinations(free, min(changed, 3)):
            for values in itertools.product(*(range(len(factors[name])) for name in subset)):
                picked = {**base, **dict(zip(subset, values, strict=True))}
                row = {name: factors[name][i] for name, i in picked.items()}
                if valid(row):
                    return row, picked
        if changed == 3:
            break
    return {}, base
