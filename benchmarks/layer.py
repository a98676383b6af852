"""Layers on a GPU, from a checkout: ``python -m benchmarks.layer`` is ``qmoe-ep bench``."""

from __future__ import annotations

import sys

from qmoe_ep.cli.main import main

_LISTS = {"--shapes": "--shape", "--dtypes": "--dtype", "--formats": "--format"}
_NUMBERS = {"--rows": "--rows", "--bits": "--bits", "--blocks": "--block-size"}


def options(given: list[str]) -> list[str]:
    """Options followed by several values, as the command line takes them."""
    result: list[str] = []
    name = ""
    for word in given:
        if word.startswith("-"):
            name = word
            result += [] if name in _LISTS else [_NUMBERS.get(name, name)]
        elif name in _LISTS:
            result += [_LISTS[name], word]
        elif name in _NUMBERS and result[-1] != _NUMBERS[name]:
            result[-1] += f",{word}"
        else:
            result.append(word)
    return result


if __name__ == "__main__":
    sys.exit(main(["bench", *options(sys.argv[1:])]))
