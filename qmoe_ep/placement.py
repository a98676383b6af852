"""Where to put experts, by the load that telemetry recorded: over GPUs, and in a memory that can't hold all of them.

:func:`place_experts` balances one layer over GPUs, with copies of its hottest experts; :func:`choose_resident` fills a
number of bytes with the experts of all layers that serve the most routes, and :func:`hit_rates` says how many of the
routes of a load they serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmoe_ep.errors import QMoEError

__all__ = ["HitRates", "LayerHits", "Placement", "choose_resident", "contiguous_balance", "hit_rates", "place_experts"]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Experts of one layer on GPUs.

    Attributes
    ----------
    gpus : for each GPU the experts it holds, ascending; a copied expert is on several
    replicas : int64 [E], on how many GPUs each expert is
    loads : float64 [G], expected routes of each GPU, if the copies of an expert share its routes evenly
    bound : a balance that no placement of these copies in the same room goes below; at least 1
    """

    gpus: tuple[tuple[int, ...], ...]
    replicas: NDArray[np.int64]
    loads: NDArray[np.float64]
    bound: float

    @property
    def balance(self) -> float:
        """Load of the busiest GPU by the mean load; 1 is even, also where nothing was recorded."""
        return _balance(self.loads)

    def balance_for(self, counts: NDArray[Any]) -> float:
        """The balance if other routes come than those that it was made for: integers [E]."""
        per_copy = np.asarray(counts, np.float64) / self.replicas
        return _balance(np.array([per_copy[list(held)].sum() for held in self.gpus]))


# --- over GPUs ----------------------------------------------------------------------------------------


def place_experts(counts: NDArray[Any], gpus: int, redundant: int = 0) -> Placement:
    """Balance one layer over GPUs.

    Copies are chosen first: one after another goes to the expert with the largest load per copy, which makes the
    largest of these loads as small as that number of copies can. Copied experts then go to the GPUs with the fewest
    experts, the others, in order of falling load, to the least loaded GPU that has room (LPT, longest processing time
    first). At last pairs of experts are exchanged between the busiest GPU and another, as long as that lowers the load
    of the busier of the two.

    Every GPU has room for the same number of experts, ``ceil((E + redundant) / gpus)``, and holds an expert once.
    Copies need room that colder experts then lack, so that few of them can do harm; there are none, if
    that is better by more than a hundredth.

    Parameters
    ----------
    counts : [E], routes of each expert; all zero if nothing is known, for an even spread by number
    gpus : at least 1
    redundant : copies beyond the first of each expert, together; those that would put an expert on a GPU twice
        are left out

    Raises
    ------
    QMoEError : a number out of range.
    """
    load = np.asarray(counts, np.float64)
    if gpus < 1 or redundant < 0 or load.ndim != 1 or not load.size:
        raise QMoEError(
            f"placement: expected counts [E], at least 1 GPU and 0 copies, got {list(load.shape)}, {gpus}, {redundant}"
        )
    if not np.isfinite(load).all() or load.min() < 0:
        raise QMoEError("placement: expected counts that are finite and not negative")
    room = -(-(load.size + redundant) // gpus)
    placement = _place(load, _replicate(load, gpus, redundant), gpus, room)
    if redundant:
        plain = _place(load, np.ones(load.size, np.int64), gpus, room)
        placement = plain if placement.balance > 1.01 * plain.balance else placement
    return placement


def _place(load: NDArray[np.float64], replicas: NDArray[np.int64], gpus: int, room: int) -> Placement:
    per_copy = load / replicas
    held = _pack(per_copy, replicas, gpus, room)
    _exchange(held, per_copy)
    return Placement(
        gpus=tuple(tuple(np.flatnonzero(mine).tolist()) for mine in held),
        replicas=replicas,
        loads=held @ per_copy,
        bound=_bound(per_copy, replicas, gpus, room),
    )


def _bound(per_copy: NDArray[np.float64], replicas: NDArray[np.int64], gpus: int, room: int) -> float:
    """The mean load, or that of the hottest copy with the coldest ones that can't all be elsewhere, by the mean."""
    mean = float((per_copy * replicas).sum()) / gpus
    if not mean:
        return 1.0
    others = np.sort(np.repeat(per_copy, replicas))[:-1]
    company = max(0, int(replicas.sum()) - (gpus - 1) * room - 1)
    return max(1.0, float(per_copy.max() + others[:company].sum()) / mean)


def contiguous_balance(counts: NDArray[Any], gpus: int) -> float:
    """The balance of the usual layout: experts in order of number, in blocks of ``ceil(E / gpus)``."""
    load = np.asarray(counts, np.float64)
    block = -(-load.size // gpus)
    padded = np.zeros(block * gpus)
    padded[: load.size] = load
    return _balance(padded.reshape(gpus, block).sum(axis=1))


def _balance(loads: NDArray[np.float64]) -> float:
    mean = loads.mean()
    # Rounding may leave an even load a hair below its own mean.
    return max(1.0, float(loads.max() / mean)) if mean else 1.0


def _replicate(load: NDArray[np.float64], gpus: int, redundant: int) -> NDArray[np.int64]:
    """Copies of each expert, [E]: each of ``redundant`` to the largest load per copy."""
    replicas = np.ones(load.size, np.int64)
    for _ in range(min(redundant, load.size * (gpus - 1))):
        replicas[np.where(replicas < gpus, load / replicas, -1.0).argmax()] += 1
    return replicas


def _pack(per_copy: NDArray[np.float64], replicas: NDArray[np.int64], gpus: int, room: int) -> NDArray[np.bool_]:
    """Which GPU holds which expert, bool [G, E]."""
    held = np.zeros((gpus, per_copy.size), np.bool_)
    loads, taken = np.zeros(gpus), np.zeros(gpus, np.int64)
    order = np.argsort(-per_copy, kind="stable")
    # Copied experts first, to the emptiest GPUs: these then differ by one expert at most, so that the copies of each
    # expert find as many GPUs with room. Then LPT.
    for expert in order[replicas[order] > 1]:
        chosen = np.lexsort((loads, taken))[: replicas[expert]]
        held[chosen, expert] = True
        loads[chosen] += per_copy[expert]
        taken[chosen] += 1
    for expert in order[replicas[order] == 1]:
        gpu = np.where(taken < room, loads, np.inf).argmin()
        held[gpu, expert] = True
        loads[gpu] += per_copy[expert]
        taken[gpu] += 1
    return held


def _exchange(held: NDArray[np.bool_], per_copy: NDArray[np.float64]) -> None:
    """Exchange pairs with the busiest GPU while that lowers the busier of the two."""
    # Each exchange lowers the busiest load or the number of GPUs that have it; the limit is for rounding alone.
    for _ in range(held.size):
        loads = held @ per_copy
        busiest = int(loads.argmax())
        best = _best_exchange(held, per_copy, loads, busiest)
        if best is None:
            return
        other, given, taken = best
        held[busiest, given], held[busiest, taken] = False, True
        held[other, given], held[other, taken] = True, False


def _best_exchange(
    held: NDArray[np.bool_], per_copy: NDArray[np.float64], loads: NDArray[np.float64], busiest: int
) -> tuple[int, int, int] | None:
    """The other GPU, the expert given and the one taken that lower the busier of the two the most."""
    best, lowest = None, loads[busiest] * (1 - 1e-9)
    for other in range(held.shape[0]):
        given = np.flatnonzero(held[busiest] & ~held[other])
        taken = np.flatnonzero(held[other] & ~held[busiest])
        if other == busiest or not given.size or not taken.size:
            continue
        shift = per_copy[given][:, None] - per_copy[taken]
        busier = np.maximum(loads[busiest] - shift, loads[other] + shift)
        place = int(busier.argmin())
        if busier.flat[place] < lowest:
            i, j = divmod(place, taken.size)
            best, lowest = (other, int(given[i]), int(taken[j])), busier.flat[place]
    return best


# --- in a memory that can't hold all -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerHits:
    """What a resident set serves of one layer; shares are None where the layer has no routes.

    Attributes
    ----------
    resident : its experts in memory, a number
    nbytes : that they take
    hit_rate : share of the layer's routes that go to them, 0 to 1
    uniform : what it would be if every expert were used alike: the share of experts in memory
    best : that of the best set of so many experts, chosen in hindsight
    """

    resident: int
    nbytes: int
    hit_rate: float | None
    uniform: float
    best: float | None


@dataclass(frozen=True, slots=True)
class HitRates:
    """What a resident set serves of all layers; shares are None where there are no routes.

    Attributes
    ----------
    layers : one by one
    nbytes : that the set takes
    hit_rate : share of all routes that go to the set
    uniform : what it would be if every expert of a layer were used alike
    best : a bound that no set of the budget exceeds: the best set in hindsight, where an expert may be there in part
    """

    layers: tuple[LayerHits, ...]
    nbytes: int
    hit_rate: float | None
    uniform: float | None
    best: float | None


def choose_resident(
    counts: Sequence[NDArray[Any]], expert_bytes: Sequence[int], budget: int, *, even: bool = False
) -> list[NDArray[np.bool_]]:
    """Fill a number of bytes with experts, those with the most routes per byte first.

    Experts without a route follow in order of layer and number, while there is room.

    Parameters
    ----------
    counts : for each layer [E], routes of each expert
    expert_bytes : for each layer the bytes of one expert, at least 1
    budget : bytes
    even : give every layer the same number of bytes, instead of what its routes are worth

    Returns
    -------
    For each layer bool [E], which experts are resident.

    Raises
    ------
    QMoEError : a number out of range.
    """
    _check_budget(counts, expert_bytes, budget)
    if even:
        share = budget // max(1, len(counts))
        return [choose_resident([c], [size], share)[0] for c, size in zip(counts, expert_bytes, strict=True)]
    loads, sizes, layers, experts = _candidates(counts, expert_bytes)
    resident = [np.zeros(len(layer), np.bool_) for layer in counts]
    left = budget
    for place in np.argsort(-loads / sizes, kind="stable"):
        size = int(expert_bytes[layers[place]])
        if size <= left:
            resident[layers[place]][experts[place]] = True
            left -= size
    return resident


def hit_rates(
    counts: Sequence[NDArray[Any]], resident: Sequence[NDArray[np.bool_]], expert_bytes: Sequence[int], budget: int
) -> HitRates:
    """Say which share of the routes of a load goes to a resident set.

    Parameters
    ----------
    counts : for each layer [E], routes of each expert
    resident : for each layer bool [E]
    expert_bytes : for each layer the bytes of one expert, at least 1
    budget : bytes, for the bound

    Raises
    ------
    QMoEError : a number out of range.
    """
    _check_budget(counts, expert_bytes, budget)
    layers, hits, even_hits, total = [], 0.0, 0.0, 0.0
    for layer, mine, size in zip(counts, resident, expert_bytes, strict=True):
        load = layer.astype(np.float64)
        number, routes, served = int(mine.sum()), load.sum(), load[mine].sum()
        most = np.sort(load)[::-1][:number].sum()
        uniform = number / load.size
        layers.append(LayerHits(number, number * int(size), _share(served, routes), uniform, _share(most, routes)))
        hits, even_hits, total = hits + served, even_hits + uniform * routes, total + routes
    return HitRates(
        layers=tuple(layers),
        nbytes=sum(layer.nbytes for layer in layers),
        hit_rate=_share(hits, total),
        uniform=_share(even_hits, total),
        # No less than what the set serves, whatever is lost to rounding.
        best=_share(max(hits, _fractional(counts, expert_bytes, budget)), total),
    )


def _fractional(counts: Sequence[NDArray[Any]], expert_bytes: Sequence[int], budget: int) -> float:
    """Routes of the best set of a budget of which the last expert may be there in part."""
    loads, sizes, _, _ = _candidates(counts, expert_bytes)
    order = np.argsort(-loads / sizes, kind="stable")
    loads, sizes = loads[order], sizes[order]
    before = np.cumsum(sizes) - sizes
    return float((loads * np.clip((budget - before) / sizes, 0.0, 1.0)).sum())


def _candidates(
    counts: Sequence[NDArray[Any]], expert_bytes: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
    """Load, bytes, layer and number of every expert of every layer."""
    lengths = [len(layer) for layer in counts]
    return (
        np.concatenate([np.asarray(layer, np.float64) for layer in counts]),
        np.repeat(np.array(expert_bytes, np.float64), lengths),
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(length) for length in lengths]),
    )


def _check_budget(counts: Sequence[NDArray[Any]], expert_bytes: Sequence[int], budget: int) -> None:
    if budget < 0 or not counts or len(counts) != len(expert_bytes) or min(expert_bytes) < 1:
        raise QMoEError(
            f"resident set: expected 0 bytes or more, and for each layer the bytes of an expert, at least 1; "
            f"got {budget} bytes, {len(counts)} layers and sizes {list(expert_bytes)}"
        )


def _share(part: float, whole: float) -> float | None:
    return min(1.0, float(part / whole)) if whole else None
