"""The stored cases: attributes, operands and results that ONNX Runtime and a float64 program gave."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from problems import DTYPES, Array

from qmoe_ep.operator import INPUT_NAMES, QMoENode

__all__ = ["CASES", "Golden", "load"]

FOLDER = Path(__file__).parent / "data" / "golden"
CASES = tuple(sorted(path.stem for path in FOLDER.glob("*.npz")))


@dataclass(frozen=True)
class Golden:
    """One case.

    Attributes
    ----------
    attributes : of the node
    inputs : operands in ONNX order, None for absent ones
    onnxruntime : what ONNX Runtime gave
    exact : float64 with the rules that ONNX Runtime follows
    specified : float64 with the operator's rules, where they are stored and differ
    """

    attributes: dict[str, Any]
    inputs: list[Array | None]
    onnxruntime: Array
    exact: Array
    specified: Array | None

    @property
    def node(self) -> QMoENode:
        return QMoENode(**self.attributes)


@cache
def load(name: str) -> Golden:
    """Read a case; bfloat16 operands are stored as their bits."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as data:
        dtypes = json.loads(str(data["dtypes"]))
        inputs: list[Array | None] = [
            (data[n].view(DTYPES["bfloat16"]) if dtypes[n] == "bfloat16" else data[n]) if n in data else None
            for n in INPUT_NAMES
        ]
        return Golden(
            attributes=json.loads(str(data["attributes"])),
            inputs=inputs,
            onnxruntime=data["expected"],
            exact=data["ref_f64"],
            specified=data.get("ref_spec_f64"),
        )
