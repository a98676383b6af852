"""What placements and resident sets are worth on recorded routing: ``python -m benchmarks.routing TRACE.csv...``.

A trace (CSV lines of turn, phase, step, layer and expert, sizes in comment lines) is cut in two. The first half is what
an operator has recorded when deciding, the second is what comes after. Placements on 8 GPUs, without and with 16
copies, and a resident set of a quarter of all experts are made from the first half and judged by the second, beside the
best that could have been chosen for the second. ``--out OUT.json`` writes the figures.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from qmoe_ep.placement import choose_resident, contiguous_balance, hit_rates, place_experts
from qmoe_ep.route_analysis import LayerLoad, compare_loads, load_figures

GPUS, COPIES = 8, 16


def read_trace(path: Path) -> list[np.ndarray]:
    """Routes of each layer in the first and the second half of the decode steps, int [2, E]."""
    lines = path.read_text().splitlines()
    size = next(int(word.split("=")[1]) for line in lines for word in line.split() if word.startswith("n_expert="))
    rows: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        if row["phase"] == "1":
            rows[int(row["layer"])][int(row["turn"]), int(row["step"])].append(int(row["expert"]))
    halves = []
    for layer in sorted(rows):
        steps = list(rows[layer].values())
        parts = (steps[: len(steps) // 2], steps[len(steps) // 2 :])
        halves.append(np.stack([np.bincount(np.concatenate(part), minlength=size) for part in parts]))
    return halves


def load_of(node: int, counts: np.ndarray) -> LayerLoad:
    """A layer's load."""
    given = counts.astype(np.uint64)
    total = int(counts.sum())
    return LayerLoad(None, node, "", (0, 0), total, total, given > 0, given, False)


def figures(name: str, layers: list[np.ndarray]) -> dict[str, Any]:
    """All figures of a trace; means over layers."""
    whole = [load_figures(load_of(node, halves.sum(axis=0))) for node, halves in enumerate(layers)]
    moves = [compare_loads(*(load_of(node, half) for half in halves)) for node, halves in enumerate(layers)]
    found: dict[str, Any] = {
        "trace": name,
        "layers": len(layers),
        "experts": layers[0].shape[1],
        "routes_per_layer": float(np.mean([halves.sum() for halves in layers])),
        "distinct": float(np.mean([figure.distinct for figure in whole])),
        "entropy_bits": float(np.mean([figure.entropy for figure in whole])),
        "max_over_mean": float(np.mean([figure.max_over_mean for figure in whole])),
        "moved": float(np.mean([move.moved for move in moves])),
        "noise": float(np.mean([move.noise for move in moves])),
    }
    after = [halves[1] for halves in layers]
    mean = sum(counts.sum() / GPUS for counts in after)
    found["in_order"] = sum(contiguous_balance(c, GPUS) * c.sum() / GPUS for c in after) / mean
    for copies in (0, COPIES):
        early = [place_experts(halves[0], GPUS, copies) for halves in layers]
        late = [place_experts(counts, GPUS, copies) for counts in after]
        busiest = (p.balance_for(c) * c.sum() / GPUS for p, c in zip(early, after, strict=True))
        found[f"planned_{copies}"] = sum(busiest) / mean
        found[f"hindsight_{copies}"] = sum(float(p.loads.max()) for p in late) / mean
    budget = sum(counts.size for counts in after) // 4
    sizes = [1] * len(after)
    resident = choose_resident([halves[0] for halves in layers], sizes, budget)
    rates = hit_rates(after, resident, sizes, budget)
    return found | {"hit_rate": rates.hit_rate, "uniform": rates.uniform, "best": rates.best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    found = [figures(path.stem, read_trace(path)) for path in options.traces]
    for trace in found:
        print(json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in trace.items()}))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
