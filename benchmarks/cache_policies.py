"""Hit rates of the host cache beside LRU's and the best possible: ``python -m benchmarks.cache_policies [OUT.json]``.

Nothing is computed: requests (layer, expert) of equal size go through :class:`ExpertCache`, through an LRU cache, which
copies every miss, and through Belady's rule, which knows the future and keeps what is asked for again soonest (a miss
that is asked for later than everything held isn't copied). Traces are synthetic: Zipf-like per prompt, with a new order
of the experts for each, and uniform; ``--traces FOLDER`` adds recorded ones, CSV files of token, layer and experts.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from qmoe_ep.cpu.expert_cache import AGEING_TICKS, ExpertCache

Key: TypeAlias = tuple[int, int]
RESIDENCY = (0.02, 0.1, 0.25, 0.5)


@dataclass(frozen=True)
class Trace:
    """Requests in order; ``expert_bytes`` is the packed size of one expert."""

    name: str
    requests: list[Key]
    experts: int
    expert_bytes: int


@dataclass(frozen=True)
class Outcome:
    """One policy on one trace: hits and copies per request, bytes read per request."""

    trace: str
    residency: float
    policy: str
    hit_rate: float
    copies_per_request: float
    bytes_per_request: float


def zipf(exponent: float, layers: int = 24, experts: int = 64, k: int = 4, tokens: int = 384) -> Trace:
    """Decoding in prompts of 96 tokens: each prompt and layer has its own order of a Zipf distribution (0: uniform)."""
    rng = np.random.default_rng(11)
    requests: list[Key] = []
    weights = 1 / np.arange(1, experts + 1) ** exponent
    for token in range(tokens):
        if token % 96 == 0:
            popularity = [rng.permutation(weights / weights.sum()) for _ in range(layers)]
        for layer in range(layers):
            chosen = rng.choice(experts, k, replace=False, p=popularity[layer])
            requests += [(layer, int(expert)) for expert in sorted(chosen)]
    name = "uniform" if exponent == 0 else f"Zipf {exponent:g} per prompt"
    return Trace(name, requests, layers * experts, 3 << 20)


def recorded(path: Path) -> Trace:
    """The decode steps of a recorded trace, whose comment lines give sizes."""
    facts: dict[str, int] = {}
    rows: list[str] = []
    with path.open(newline="") as file:
        for line in file:
            if not line.startswith("#"):
                rows.append(line)
                continue
            for name, _, value in (word.partition("=") for word in line.split()):
                if name in ("n_layer", "n_expert", "expert_bytes"):
                    facts.setdefault(name, int(value))
    steps = [row for row in csv.DictReader(rows) if row["phase"] == "1"]
    requests = [(int(row["layer"]), int(row["expert"])) for row in steps]
    return Trace(path.stem, requests, facts["n_layer"] * facts["n_expert"], facts["expert_bytes"])


def host_cache(requests: Sequence[Key], capacity: int, ageing: int = AGEING_TICKS) -> tuple[int, int]:
    """Hits and copies of the package's cache."""
    cache: ExpertCache[None] = ExpertCache(capacity, ageing)
    copies = 0

    def load(keep: bool) -> None:
        nonlocal copies
        copies += keep

    for key in requests:
        cache.lease(key, 1, load).release()
    return cache.figures().hits, copies


def host_cache_4096(requests: Sequence[Key], capacity: int) -> tuple[int, int]:
    """The same with a longer memory."""
    return host_cache(requests, capacity, 4096)


def lru(requests: Sequence[Key], capacity: int) -> tuple[int, int]:
    """Hits and copies of a cache that takes everything and gives up what was unused longest."""
    held: OrderedDict[Key, None] = OrderedDict()
    hits = 0
    for key in requests:
        if key in held:
            hits += 1
            held.move_to_end(key)
            continue
        if len(held) >= capacity:
            held.popitem(last=False)
        held[key] = None
    return hits, len(requests) - hits


def belady(requests: Sequence[Key], capacity: int) -> tuple[int, int]:
    """Hits and copies of the best possible cache."""
    never = len(requests)
    following, seen = [never] * len(requests), dict[Key, int]()
    for place in range(len(requests) - 1, -1, -1):
        following[place] = seen.get(requests[place], never)
        seen[requests[place]] = place
    held: dict[Key, int] = {}
    latest: list[tuple[int, Key]] = []
    hits = copies = 0
    for place, key in enumerate(requests):
        if key in held:
            hits += 1
        elif following[place] == never:
            continue
        elif len(held) >= capacity:
            while held.get(latest[0][1]) != -latest[0][0]:
                heapq.heappop(latest)
            if -latest[0][0] <= following[place]:
                continue
            del held[heapq.heappop(latest)[1]]
            copies += 1
        else:
            copies += 1
        held[key] = following[place]
        heapq.heappush(latest, (-following[place], key))
    return hits, copies


def compare(trace: Trace) -> list[Outcome]:
    """All policies at all sizes; what isn't a hit is read, whether it is copied into the cache or not."""
    outcomes = []
    for residency in RESIDENCY:
        capacity = max(1, int(residency * trace.experts))
        for policy in (host_cache, host_cache_4096, lru, belady):
            hits, copies = policy(trace.requests, capacity)
            count = len(trace.requests)
            read = (count - hits) * trace.expert_bytes / count
            outcomes.append(Outcome(trace.name, residency, policy.__name__, hits / count, copies / count, read))
    return outcomes


def main() -> None:
    """Compare, print, and write a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--traces", type=Path, help="a folder of recorded traces")
    arguments = parser.parse_args()
    traces = [zipf(0), zipf(1.0), zipf(1.2)]
    if arguments.traces is not None:
        traces += [recorded(path) for path in sorted(arguments.traces.glob("*.csv"))]
    outcomes = [outcome for trace in traces for outcome in compare(trace)]
    for o in outcomes:
        print(
            f"{o.trace:22} {o.residency:5.0%}  {o.policy:15}  hits {o.hit_rate:6.1%}  "
            f"copies {o.copies_per_request:6.1%}  read {o.bytes_per_request / 2**20:6.2f} MiB per request"
        )
    if arguments.output is not None:
        arguments.output.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
