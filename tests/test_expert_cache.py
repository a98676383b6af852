"""The cache of expanded experts: its rules one by one, and against a plain model."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from qmoe_ep import QMoEError
from qmoe_ep.cpu.expert_cache import ExpertCache, Lease


def request(cache: ExpertCache[str], *keys: str, nbytes: int = 4) -> None:
    """Lease and release, one after the other."""
    for key in keys:
        with cache.lease(key, nbytes, lambda keep, key=key: f"weights of {key}") as weights:  # type: ignore[misc]
            assert weights == f"weights of {key}"


def counts(cache: ExpertCache[str]) -> tuple[int, int, int]:
    figures = cache.figures()
    return figures.hits, figures.misses, figures.evictions


# --- admission -----------------------------------------------------------------------------------------


def test_the_second_request_is_cached() -> None:
    cache: ExpertCache[str] = ExpertCache(8)
    request(cache, "a")
    assert "a" not in cache
    request(cache, "a")
    assert "a" in cache
    request(cache, "a", "a")
    assert counts(cache) == (2, 2, 0)
    assert cache.figures().bytes_owned == 4


@pytest.mark.parametrize(("budget", "nbytes"), [(0, 4), (8, 0), (3, 4)])
def test_what_can_not_be_cached_leaves_no_history(budget: int, nbytes: int) -> None:
    cache: ExpertCache[str] = ExpertCache(budget)
    request(cache, "a", "a", "a", nbytes=nbytes)
    assert counts(cache) == (0, 3, 0)
    assert (cache.history_entries, cache.figures().entries) == (0, 0)


def test_a_request_cannot_admit_a_rare_expert() -> None:
    cache: ExpertCache[str] = ExpertCache(4)
    request(cache, "hot", "hot", "hot", "hot", "rare", "hot")
    assert counts(cache) == (3, 3, 0)


def test_history_is_halved_when_idle() -> None:
    cache: ExpertCache[str] = ExpertCache(4)
    # 64 ticks between requests are not idle, 65 are: then 1 // 2 + 1 stays below two.
    for gap, cached in ((63, True), (64, False)):
        cache.clear()
        request(cache, "a")
        request(cache, *(f"empty {i}" for i in range(gap)), nbytes=0)
        request(cache, "a")
        assert ("a" in cache) == cached


def test_a_longer_memory() -> None:
    # As many requests lie between those of one key as in a model of many layers.
    for ageing, hits in ((64, 0), (100, 3 * 100)):
        cache: ExpertCache[str] = ExpertCache(1000, ageing)
        for _ in range(5):
            request(cache, *(str(i) for i in range(100)))
        assert cache.figures().hits == hits


def test_only_less_frequent_entries_make_room() -> None:
    cache: ExpertCache[str] = ExpertCache(8)
    request(cache, "a", "a", "b", "b")  # both enter with frequency 2
    request(cache, "c", "c")
    assert counts(cache) == (0, 6, 0)
    request(cache, "c")  # frequency 3: of the two, the one that was used longest ago goes
    assert [key in cache for key in "abc"] == [False, True, True]
    assert counts(cache) == (0, 7, 1)


def test_nothing_goes_when_all_that_may_go_is_not_enough() -> None:
    cache: ExpertCache[str] = ExpertCache(8)
    request(cache, "a", "a", "b", "b", "b")  # b is more frequent and pinned
    request(cache, "big", "big", "big", nbytes=8)
    assert counts(cache) == (1, 7, 0)
    assert [key in cache for key in ("a", "b", "big")] == [True, True, False]


def test_a_pin_ends_after_eight_ticks() -> None:
    # A enters at its second request (frequency 2, tick 2); three more make frequency 5 and, at tick 5, a pin until 13.
    # B's n-th request comes at tick 5 + n with frequency n. It has to exceed A's 5 and to come after the pin:
    # 5 + n > 13, so n = 9. Without the pin it would be n = 6.
    cache: ExpertCache[str] = ExpertCache(4)
    request(cache, "a", "a", "a", "a", "a")
    for number in range(1, 10):
        request(cache, "b")
        assert ("b" in cache) == (number == 9)
    assert counts(cache) == (3, 2 + 9, 1)


def test_an_unpinned_entry_goes_as_soon_as_it_is_less_frequent() -> None:
    cache: ExpertCache[str] = ExpertCache(4)
    request(cache, "a", "a")
    for number in range(1, 4):
        request(cache, "b")
        assert ("b" in cache) == (number == 3)


def test_leased_entries_stay() -> None:
    cache: ExpertCache[str] = ExpertCache(4)
    request(cache, "0")
    held = cache.lease("0", 4, lambda keep: "weights of 0")
    assert held.weights == "weights of 0"
    request(cache, "1", "1", "1")
    assert "0" in cache
    held.release()
    request(cache, "1")
    assert ["0" in cache, "1" in cache] == [False, True]
    assert counts(cache) == (0, 6, 1)


def test_history_has_a_size_and_an_end() -> None:
    cache: ExpertCache[str] = ExpertCache(8)
    request(cache, *(str(i) for i in range(4096 + 32)))
    assert cache.history_entries == 4096
    request(cache, *[""] * (64 * 256 - 1), nbytes=0)
    request(cache, "new")
    assert cache.history_entries == 2  # the very last one is just at its limit
    request(cache, *[""] * (64 * 256), nbytes=0)
    request(cache, "newer")
    assert cache.history_entries == 1


def test_a_full_history_gives_up_the_least_frequent() -> None:
    cache: ExpertCache[str] = ExpertCache(4)
    request(cache, "held", "held")
    with cache.lease("held", 4, lambda keep: ""):
        request(cache, "twice", "twice")  # no room: its history stays
        request(cache, *(str(i) for i in range(4096)))
    # "0" went, "twice" is still known with frequency 2.
    request(cache, *(["twice"] * 12))
    assert "twice" in cache


def test_partitions_hold_what_fits() -> None:
    small, large = ExpertCache[str](4), ExpertCache[str](8)
    for cache in (small, large):
        request(cache, "a", "a", "b", "b", "c", "c")
    assert [cache.figures().entries for cache in (small, large)] == [1, 2]


# --- loading ---------------------------------------------------------------------------------------------


def test_the_loader_knows_whether_to_keep() -> None:
    cache: ExpertCache[bool] = ExpertCache(4)
    kept = []
    for _ in range(3):
        with cache.lease("a", 4, lambda keep: keep) as keep:
            kept.append(keep)
    assert kept == [False, True, True]


def test_a_failing_load_leaves_the_accounting_whole() -> None:
    cache: ExpertCache[str] = ExpertCache(4)

    def fail(keep: bool) -> str:
        assert cache.figures().bytes_owned == (4 if keep else 0)
        raise OSError("unreadable")

    for _ in range(2):
        with pytest.raises(OSError, match="unreadable"):
            cache.lease("a", 4, fail)
    figures = cache.figures()
    assert (figures.bytes_owned, figures.entries, figures.misses) == (0, 0, 2)
    request(cache, "a")
    assert "a" in cache
    assert cache.figures().peak_dequantized_experts == 1


def test_the_budget_holds_while_loading() -> None:
    cache: ExpertCache[str] = ExpertCache(4)
    request(cache, "a", "a", "b", "b")

    def load(keep: bool) -> str:
        assert keep
        assert "a" not in cache
        assert cache.figures().bytes_owned == 4
        return ""

    cache.lease("b", 4, load).release()
    assert cache.figures().peak_bytes_owned == 4


def test_two_threads_that_miss_the_same_key() -> None:
    cache: ExpertCache[str] = ExpertCache(8)
    request(cache, "a")
    loading, go_on = threading.Event(), threading.Event()

    def slow(keep: bool) -> str:
        loading.set()
        assert go_on.wait(10)
        return "slow"

    thread = threading.Thread(target=lambda: cache.lease("a", 4, slow).release())
    thread.start()
    assert loading.wait(10)
    with cache.lease("a", 4, lambda keep: f"kept {keep}") as weights:
        assert weights == "kept False"
    go_on.set()
    thread.join()
    with cache.lease("a", 4, lambda keep: "") as weights:
        assert weights == "slow"
    assert (counts(cache), cache.figures().bytes_owned) == ((1, 3, 0), 4)


def test_many_threads() -> None:
    cache: ExpertCache[str] = ExpertCache(20)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(400):
                request(cache, str((seed * step + step // 7) % 13))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    figures = cache.figures()
    assert figures.hits + figures.misses == 6 * 400
    assert figures.bytes_owned == 4 * figures.entries <= figures.peak_bytes_owned <= 20
    cache.resize(0)
    assert cache.figures().bytes_owned == 0


# --- the budget ------------------------------------------------------------------------------------------


def test_shrinking_takes_the_longest_unused() -> None:
    cache: ExpertCache[str] = ExpertCache(12)
    request(cache, "a", "a", "a", "b", "b", "c", "c", "b")
    cache.resize(8)
    assert [key in cache for key in "abc"] == [False, True, True]
    assert (cache.budget, cache.figures().evictions) == (8, 1)


def test_shrinking_is_refused_while_leases_prevent_it() -> None:
    cache: ExpertCache[str] = ExpertCache(12)
    request(cache, "a", "b", "c")
    request(cache, "c")
    held = [cache.lease(key, 4, lambda keep: "") for key in "ab"]
    with pytest.raises(QMoEError, match="can't shrink to 7 bytes while 8 bytes are leased"):
        cache.resize(7)
    assert (cache.budget, cache.figures().entries, cache.figures().evictions) == (12, 3, 0)
    cache.resize(8)
    assert "c" not in cache
    for lease in held:
        lease.release()
        lease.release()
    cache.resize(0)
    assert cache.figures().bytes_owned == 0


def test_a_lowered_budget_holds_from_the_next_request_on() -> None:
    cache: ExpertCache[str] = ExpertCache(12)
    request(cache, "a", "a", "b", "b", "c", "c")
    cache.budget = 4
    with cache.lease("c", 4, lambda keep: ""):
        assert (cache.figures().bytes_owned, cache.figures().hits) == (4, 1)
        cache.budget = 3
        request(cache, "d")
        assert "c" in cache
    request(cache, "d")
    assert cache.figures().bytes_owned == 0


@pytest.mark.parametrize("budget", [-1, -(2**40)])
def test_a_negative_budget(budget: int) -> None:
    with pytest.raises(QMoEError, match="at least 0"):
        ExpertCache[str](8).resize(budget)


def test_figures_begin_anew() -> None:
    cache: ExpertCache[str] = ExpertCache(8)
    request(cache, "a", "a", "b", "b")
    cache.resize(4)
    cache.reset_figures()
    figures = cache.figures()
    assert (figures.hits, figures.misses, figures.evictions) == (0, 0, 0)
    assert (figures.bytes_owned, figures.peak_bytes_owned, figures.peak_dequantized_experts) == (4, 4, 1)
    assert figures.hit_rate == 0
    request(cache, "b")
    assert cache.figures().hit_rate == 1


# --- against a plain model -------------------------------------------------------------------------------


class Model:
    """The rules as a list of steps on plain dictionaries, with no regard to speed."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.now = 0
        self.entries: dict[str, dict[str, int]] = {}
        self.history: dict[str, tuple[int, int]] = {}
        self.hits = self.misses = self.evictions = 0

    def owned(self) -> int:
        return sum(entry["bytes"] for entry in self.entries.values())

    def trim(self, budget: int) -> bool:
        free = [key for key, e in self.entries.items() if not e["leases"]]
        if self.owned() - sum(self.entries[key]["bytes"] for key in free) > budget:
            return False
        while self.owned() > budget:
            self.evict(min(free, key=lambda key: (self.entries[key]["last"], self.entries[key]["frequency"])))
            free = [key for key in free if key in self.entries]
        return True

    def evict(self, key: str) -> None:
        del self.entries[key]
        self.evictions += 1

    def lease(self, key: str, nbytes: int, fails: bool) -> bool:
        """Whether the key is cached afterwards, counted as leased then."""
        self.now += 1
        self.trim(self.budget)
        if key in self.entries:
            entry = self.entries[key]
            self.hits += 1
            entry["leases"] += 1
            entry["frequency"] += 1
            entry["last"] = self.now
            if entry["frequency"] >= 3:
                entry["pin"] = self.now + 8
            return True
        self.misses += 1
        if self.budget == 0 or nbytes == 0 or nbytes > self.budget:
            return False
        self.history = {k: h for k, h in self.history.items() if self.now - h[1] <= 64 * 256}
        frequency, last = self.history.pop(key, (0, self.now))
        frequency = (frequency // 2 if self.now - last > 64 else frequency) + 1
        self.history[key] = (frequency, self.now)
        if frequency < 2:
            return False
        victims = sorted(
            (e["frequency"], e["last"], k)
            for k, e in self.entries.items()
            if not e["leases"] and e["pin"] < self.now and e["frequency"] < frequency
        )
        chosen: list[str] = []
        while self.owned() - sum(self.entries[k]["bytes"] for k in chosen) + nbytes > self.budget:
            if not victims:
                return False
            chosen.append(victims.pop(0)[2])
        for victim in chosen:
            self.evict(victim)
        if fails:
            return False
        del self.history[key]
        self.entries[key] = {"bytes": nbytes, "frequency": frequency, "last": self.now, "pin": -1, "leases": 1}
        return True


class CacheMachine(RuleBasedStateMachine):
    """Requests, leases that are held, failing loads and changes of the budget."""

    leases: Bundle[tuple[str, Lease[str], bool]] = Bundle("leases")

    @initialize(budget=st.integers(0, 40))
    def start(self, budget: int) -> None:
        self.cache: ExpertCache[str] = ExpertCache(budget)
        self.model = Model(budget)
        self.held: dict[int, Lease[str]] = {}

    @staticmethod
    def size(key: str) -> int:
        return {"a": 4, "b": 4, "c": 4, "d": 12, "e": 1, "f": 0}[key]

    @rule(target=leases, key=st.sampled_from("abcdef"))
    def lease(self, key: str) -> tuple[str, Lease[str], bool]:
        cached = self.model.lease(key, self.size(key), fails=False)
        lease = self.cache.lease(key, self.size(key), lambda keep: f"{key} {keep}")
        assert lease.weights == f"{key} {cached}"
        return key, lease, cached

    @rule(keys=st.lists(st.sampled_from("abcdef"), max_size=12))
    def use(self, keys: list[str]) -> None:
        for key in keys:
            self.release(self.lease(key))

    @rule(key=st.sampled_from("abcdef"))
    def fail(self, key: str) -> None:
        def load(keep: bool) -> str:
            raise OSError

        hits = self.model.hits
        cached = self.model.lease(key, self.size(key), fails=True)
        if self.model.hits > hits:
            self.release((key, self.cache.lease(key, self.size(key), load), cached))
            return
        with pytest.raises(OSError):  # noqa: PT011
            self.cache.lease(key, self.size(key), load)

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[str, Lease[str], bool]) -> None:
        key, held, cached = lease
        assert held.weights == f"{key} {cached}"
        held.release()
        if cached:
            self.model.entries[key]["leases"] -= 1

    @rule(budget=st.integers(0, 40))
    def resize(self, budget: int) -> None:
        if self.model.trim(budget):
            self.model.budget = budget
            self.cache.resize(budget)
            return
        leased = sum(e["bytes"] for e in self.model.entries.values() if e["leases"])
        with pytest.raises(QMoEError, match=f"{leased} bytes are leased"):
            self.cache.resize(budget)

    @rule(budget=st.integers(0, 40))
    def set_budget(self, budget: int) -> None:
        self.cache.budget = self.model.budget = budget

    @rule(ticks=st.sampled_from([63, 64, 65] * 8 + [64 * 256]))
    def wait(self, ticks: int) -> None:
        self.model.trim(self.model.budget)
        for _ in range(ticks):
            self.cache.lease("nothing", 0, lambda keep: "").release()
        self.model.now += ticks
        self.model.misses += ticks

    @invariant()
    def agrees(self) -> None:
        figures, model = self.cache.figures(), self.model
        assert (figures.hits, figures.misses, figures.evictions) == (model.hits, model.misses, model.evictions)
        assert (figures.bytes_owned, figures.entries) == (model.owned(), len(model.entries))
        assert all(key in self.cache for key in model.entries)
        # What is out of date leaves the history at the next request that looks at it.
        assert self.cache.history_entries >= len(model.history)
        assert figures.peak_dequantized_experts >= figures.entries

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            leased: Any = sum(e["bytes"] for e in self.model.entries.values() if e["leases"])
            self.cache.clear()
            assert self.cache.figures().bytes_owned == leased


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
