"""Expert paging: the same bits as without it, what is read and cached, its figures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged import PagedFile, call_inputs, expanded_bytes, packed_bytes, paged_indices, routed, store, two_of_four
from problems import Array, Problem, Recipe, Space, build, problems

import qmoe_ep
from qmoe_ep import CpuExecutionProvider, QMoEError, RouteTelemetryConfig
from qmoe_ep.cpu.mapped import MappedFile
from qmoe_ep.offload import OffloadStats

PROBLEM = two_of_four()
X = expanded_bytes(PROBLEM)
TEMPORARY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def figures(provider: CpuExecutionProvider) -> OffloadStats:
    stats = provider.offload_stats()
    assert stats is not None
    return stats


def cache_counts(provider: CpuExecutionProvider) -> tuple[int, int, int]:
    stats = figures(provider)
    return stats.cache_hits, stats.cache_misses, stats.cache_evictions


@pytest.fixture
def stored(tmp_path: Path) -> PagedFile:
    return store(PROBLEM, tmp_path)


# --- the same bits ---------------------------------------------------------------------------------------


@given(problems(Space(strided=(False,))), st.sampled_from([0, 1, 2, 100]))
@settings(TEMPORARY, max_examples=100)
def test_random_problems(tmp_path: Path, problem: Problem, cached: int) -> None:
    file = store(problem, tmp_path)
    expected = file.resident()
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=cached * expanded_bytes(problem))
    kernel = file.kernel(provider)
    assert kernel.paged
    for _ in range(3):
        output = problem.poisoned_output()
        kernel.execute(call_inputs(problem), [output])
        assert output.tobytes() == expected.tobytes()
    problem.check_closely(output)
    stats = figures(provider)
    if problem.recipe.rows:
        assert stats.active_experts == 3 * problem.recipe.rows * problem.recipe.k
        assert stats.cache_hits + stats.cache_misses == stats.unique_experts
        assert stats.bytes_read == stats.cache_misses * packed_bytes(problem)
        assert stats.cache_peak_bytes_owned <= stats.cache_budget
        if cached == 0:
            assert stats.peak_dequantized_experts == 1
    else:
        assert stats == OffloadStats.sum([stats, OffloadStats.sum([])])
        assert stats.layer_executions == stats.bytes_read == 0


@pytest.mark.parametrize("bits", [2, 4])
def test_sm80_layout(tmp_path: Path, bits: int) -> None:
    problem = build(Recipe(bits=(bits,) * 3, layout="sm80", hidden=128, inter=64, zero_points=(True, False, False)))
    file = store(problem, tmp_path)
    provider = CpuExecutionProvider(weight_offload=True)
    kernel = file.kernel(provider)
    assert kernel.paged
    result = kernel(*call_inputs(problem))
    problem.check_closely(result)
    assert result.tobytes() == file.resident().tobytes()


def test_many_layers_share_a_cache(tmp_path: Path) -> None:
    made = [two_of_four(seed=seed) for seed in range(3)]
    files = [store(problem, tmp_path, f"layer {i}.bin") for i, problem in enumerate(made)]
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=4 * X)
    kernels = [file.kernel(provider, node_id=10 + i) for i, file in enumerate(files)]
    for step in range(6):
        for kernel, file, problem in zip(kernels, files, made, strict=True):
            inputs = routed(problem, [step % 2, 1])
            plain = file.kernel(CpuExecutionProvider())(*inputs)
            assert kernel(*inputs).tobytes() == plain.tobytes()
    stats = figures(provider)
    assert sorted(stats.layers) == [10, 11, 12]
    assert sum(layer.bytes_read for layer in stats.layers.values()) == stats.bytes_read
    assert all(layer.executions == 6 for layer in stats.layers.values())
    assert stats.cache_peak_bytes_owned <= 4 * X


def test_layers_of_one_number_do_not_share_experts(tmp_path: Path) -> None:
    made = [two_of_four(seed=seed) for seed in range(2)]
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=100 * X)
    files = [store(problem, tmp_path, f"{i}.bin") for i, problem in enumerate(made)]
    kernels = [file.kernel(provider) for file in files]
    for _ in range(3):
        for kernel, file, problem in zip(kernels, files, made, strict=True):
            inputs = routed(problem, [0])
            assert kernel(*inputs).tobytes() == file.kernel(CpuExecutionProvider())(*inputs).tobytes()
    assert cache_counts(provider) == (2, 4, 0)


def test_a_file_mapped_anew_is_another_key(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=100 * X)
    same = stored.map()
    for initializers, counts in ((same, (0, 2, 0)), (same, (2, 2, 0)), (stored.map(), (2, 4, 0))):
        kernel = provider.create_kernel(PROBLEM.node, 0, initializers)
        for _ in range(2):
            kernel(*routed(PROBLEM, [3]))
        assert cache_counts(provider) == counts


# --- what is read and cached -------------------------------------------------------------------------------


def test_the_same_two_experts_five_times(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=2 * X)
    kernel = stored.kernel(provider)
    for _ in range(5):
        kernel(*routed(PROBLEM, [1, 3]))
    assert cache_counts(provider) == (6, 4, 0)
    assert figures(provider).cache_bytes_owned == 2 * X


def test_without_a_cache_everything_is_read_each_time(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True)
    kernel = stored.kernel(provider)
    for _ in range(3):
        kernel(*routed(PROBLEM, [1, 3]))
    assert cache_counts(provider) == (0, 6, 0)
    assert figures(provider).bytes_read == 3 * 2 * packed_bytes(PROBLEM)
    assert figures(provider).peak_dequantized_experts == 1


def test_a_hot_expert_stays(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=X)
    kernel = stored.kernel(provider)
    for expert in [0, 0, 0, 0, 2, 0]:
        kernel(*routed(PROBLEM, [expert]))
    assert cache_counts(provider) == (3, 3, 0)


def test_a_pinned_expert_goes_late(stored: PagedFile) -> None:
    # The arithmetic of the ninth request is in test_expert_cache.py; here the same through calls.
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=X)
    kernel = stored.kernel(provider)
    for _ in range(2 + 3):
        kernel(*routed(PROBLEM, [0]))
    for number in range(1, 12):
        kernel(*routed(PROBLEM, [1]))
        assert figures(provider).cache_evictions == int(number >= 9)
    assert cache_counts(provider) == (3 + 2, 2 + 9, 1)


def test_all_experts_with_room_for_one(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=X)
    kernel, plain = stored.kernel(provider), stored.kernel(CpuExecutionProvider(weight_offload=True))
    rng = np.random.default_rng(0)
    for _ in range(20):
        inputs = routed(PROBLEM, rng.integers(0, 4, 6).tolist())
        assert kernel(*inputs).tobytes() == plain(*inputs).tobytes()
    assert figures(provider).cache_peak_bytes_owned == X
    assert figures(provider).peak_dequantized_experts == 2


def test_only_selected_experts_are_read(stored: PagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    read = MappedFile.read

    def spy(self: MappedFile, tensor: str, offset: int, target: Array) -> None:
        ranges.append((offset, target.size))
        read(self, tensor, offset, target)

    kernel = stored.kernel(CpuExecutionProvider(weight_offload=True))
    monkeypatch.setattr(MappedFile, "read", spy)
    kernel(*routed(PROBLEM, [2, 2, 2]))
    expected = []
    for index in paged_indices(PROBLEM):
        array = PROBLEM.inputs[index]
        if array is not None:
            expected.append((stored.offsets[index] + 2 * array[0].nbytes, array[0].nbytes))
    assert sorted(ranges) == sorted(expected)


def test_the_next_expert_is_asked_for_unless_cached(stored: PagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(MappedFile, "read_ahead", lambda self, offset, nbytes: asked.append(offset))
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=X)
    kernel = stored.kernel(provider)
    size = packed_bytes(PROBLEM)
    kernel(*routed(PROBLEM, [3, 0, 2]))
    of_expert = {
        expert: {
            stored.offsets[i] + expert * a[0].nbytes
            for i in paged_indices(PROBLEM)
            if (a := PROBLEM.inputs[i]) is not None
        }
        for expert in range(4)
    }
    assert set(asked) == of_expert[2] | of_expert[3]
    asked.clear()
    kernel(*routed(PROBLEM, [1]))
    assert not asked
    kernel(*routed(PROBLEM, [3]))  # is cached now
    kernel(*routed(PROBLEM, [3, 0]))
    assert not asked
    assert figures(provider).bytes_read == size * figures(provider).cache_misses


def test_threads(tmp_path: Path) -> None:
    made = [two_of_four(seed=seed) for seed in range(2)]
    files = [store(problem, tmp_path, f"{i}.bin") for i, problem in enumerate(made)]
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=2 * X)
    kernels = [file.kernel(provider, i) for i, file in enumerate(files)]
    rng = np.random.default_rng(3)
    calls = [routed(made[0], rng.integers(0, 4, 3).tolist()) for _ in range(8)]
    expected = [[file.kernel(CpuExecutionProvider())(*c).tobytes() for c in calls] for file in files]
    wrong: list[object] = []

    def work(first: int) -> None:
        for step in range(30):
            layer, call = (first + step) % 2, (first * 5 + step) % 8
            if kernels[layer](*calls[call]).tobytes() != expected[layer][call]:
                wrong.append((layer, call))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    stats = figures(provider)
    assert stats.layer_executions == 4 * 30
    assert stats.cache_peak_bytes_owned <= 2 * X
    assert stats.peak_dequantized_experts <= 3


# --- the budget ----------------------------------------------------------------------------------------------


def test_resizing(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=4 * X)
    kernel = stored.kernel(provider)
    for _ in range(2):
        kernel(*routed(PROBLEM, range(4)))
    assert figures(provider).cache_bytes_owned == 4 * X
    provider.resize_host_cache(2 * X + 1)
    assert (figures(provider).cache_bytes_owned, provider.host_cache_bytes) == (2 * X, 2 * X + 1)
    with pytest.raises(QMoEError, match="at least 0"):
        provider.resize_host_cache(-1)
    with pytest.raises(QMoEError, match="weight_offload=True"):
        CpuExecutionProvider().resize_host_cache(5)


def test_environment(stored: PagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QMOE_EP_WEIGHT_OFFLOAD", "1")
    monkeypatch.setenv("QMOE_EP_HOST_CACHE_BYTES", str(3 * X))
    provider = CpuExecutionProvider(host_cache_bytes=X)
    assert stored.kernel(provider).paged
    assert (provider.weight_offload, provider.host_cache_bytes) == (True, 3 * X)
    assert figures(provider).cache_budget == 3 * X
    monkeypatch.setenv("QMOE_EP_WEIGHT_OFFLOAD", "0")
    assert not stored.kernel(CpuExecutionProvider()).paged
    assert stored.kernel(CpuExecutionProvider(weight_offload=True)).paged
    for text in ("-1", "1e9", "many"):
        monkeypatch.setenv("QMOE_EP_HOST_CACHE_BYTES", text)
        with pytest.raises(QMoEError, match="QMOE_EP_HOST_CACHE_BYTES: expected a number of bytes"):
            CpuExecutionProvider()


def test_the_memory_of_the_cache(stored: PagedFile) -> None:
    for ageing, hits in ((1, 0), (4, 4)):
        provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=4 * X, host_cache_ageing=ageing)
        kernel = stored.kernel(provider)
        for _ in range(3):
            kernel(*routed(PROBLEM, range(4)))
        assert figures(provider).cache_hits == hits
    with pytest.raises(QMoEError, match="host_cache_ageing"):
        CpuExecutionProvider(host_cache_ageing=0)


def test_a_budget_that_is_no_size() -> None:
    for budget in (-1, 1.5):
        with pytest.raises(QMoEError, match="host_cache_bytes"):
            CpuExecutionProvider(weight_offload=True, host_cache_bytes=budget)  # type: ignore[arg-type]


# --- what can't be paged -------------------------------------------------------------------------------------


def interleaved(array: Array, folder: Path) -> Array:
    """The same values in a file where an expert's bytes aren't contiguous."""
    swapped = np.ascontiguousarray(np.swapaxes(array, 0, 1))
    path = folder / "interleaved.bin"
    path.write_bytes(swapped.tobytes())
    mapped = np.memmap(path, np.uint8, "r").view(array.dtype).reshape(swapped.shape)
    return np.swapaxes(mapped, 0, 1)


@pytest.mark.parametrize("index", [2, 3, 5, 6, 12])
@pytest.mark.parametrize("how", ["interleaved", "not mapped", "at the call"])
def test_falls_back_to_memory(tmp_path: Path, index: int, how: str, caplog: pytest.LogCaptureFixture) -> None:
    problem = two_of_four(zero_points=(False, True, False), biases=(True, True, True))
    file = store(problem, tmp_path)
    initializers, inputs = file.map(), call_inputs(problem)
    array = problem.inputs[index]
    assert array is not None
    if how == "interleaved":
        initializers[index] = interleaved(array, tmp_path)
    elif how == "not mapped":
        initializers[index] = array
    elif index == 12:
        return
    else:
        del initializers[index]
        inputs += [None] * (13 - len(inputs))
        inputs[index] = array
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=4 * X)
    with caplog.at_level(logging.WARNING, "qmoe_ep"):
        kernel = provider.create_kernel(problem.node, 5, initializers)
    assert not kernel.paged
    assert "node 5 keeps its experts in memory" in caplog.text
    for _ in range(3):
        assert kernel(*inputs).tobytes() == file.resident().tobytes()
    assert figures(provider) == replace(OffloadStats.sum([]), cache=replace(figures(provider).cache))
    assert figures(provider).cache_misses == 0


def test_only_weights_have_to_be_mapped(tmp_path: Path) -> None:
    problem = two_of_four(biases=(True, True, True))
    file = store(problem, tmp_path)
    initializers = file.map()
    for index in (4, 7):
        bias = problem.inputs[index]
        assert bias is not None
        initializers[index] = bias
    kernel = CpuExecutionProvider(weight_offload=True).create_kernel(problem.node, 0, initializers)
    assert kernel.paged
    assert kernel(*call_inputs(problem)).tobytes() == file.resident().tobytes()


def test_views_of_one_mapping(tmp_path: Path) -> None:
    problem = build(Recipe(hidden=96, inter=64, zero_points=(True, True, True), scale_dtypes=("bfloat16",) * 3))
    file = store(problem, tmp_path)
    whole = np.memmap(file.path, np.uint8, "r")
    initializers = {}
    for index, array in file.map().items():
        piece = np.asarray(whole[file.offsets[index] :][: array.nbytes])
        initializers[index] = piece.view(array.dtype).reshape(array.shape)
    kernel = CpuExecutionProvider(weight_offload=True).create_kernel(problem.node, 0, initializers)
    assert kernel.paged
    assert kernel(*call_inputs(problem)).tobytes() == file.resident().tobytes()


# --- figures -----------------------------------------------------------------------------------------------


def executed(stats: OffloadStats) -> tuple[int, ...]:
    return stats.layer_executions, stats.active_experts, stats.unique_experts


def test_figures_of_calls(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True)
    kernel = stored.kernel(provider, node_id=4)
    kernel(*routed(PROBLEM, [0, 0, 0, 1]))
    kernel(*routed(PROBLEM, [2]))
    kernel(*routed(PROBLEM, []))
    stats = figures(provider)
    assert executed(stats) == (2, 5, 3)
    assert stats.tokens_per_expert == pytest.approx(5 / 3)
    assert stats.layers[4] == stats.total
    plain = stats.to_dict()
    assert plain["layers"]["4"]["bytes_read"] == plain["bytes_read"] == 3 * packed_bytes(PROBLEM)
    assert plain["cache"]["misses"] == 3


def test_rows_that_are_not_valid_select_nothing(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True)
    kernel = stored.kernel(provider)
    output = np.zeros((3, 64), np.float32)
    kernel.execute(routed(PROBLEM, [1, 2, 3]), [output], valid_rows=1)
    assert executed(figures(provider)) == (1, 1, 1)
    assert not output[1:].any()


def test_process_wide_figures(tmp_path: Path) -> None:
    def total() -> tuple[int, ...]:
        stats = qmoe_ep.offload_stats()
        return (*executed(stats), stats.cache_hits, stats.cache_bytes_owned, stats.cache_budget)

    before = np.array(total())
    providers = [CpuExecutionProvider(weight_offload=True, host_cache_bytes=n * X) for n in (1, 2)]
    file = store(PROBLEM, tmp_path)
    kernels = [file.kernel(provider) for provider in providers]
    for kernel in kernels:
        for _ in range(3):
            kernel(*routed(PROBLEM, [1, 2]))
    # The one with room for two caches both; the other caches the first that asks twice.
    assert (np.array(total()) - before).tolist() == [6, 12, 12, 3, 3 * X, 3 * X]
    providers[0].close()
    assert (np.array(total()) - before).tolist() == [3, 6, 6, 2, 2 * X, 2 * X]
    del kernel, kernels
    del providers
    assert (np.array(total()) - before).tolist() == [0] * 6


def test_figures_begin_anew(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=2 * X)
    kernel = stored.kernel(provider)
    for _ in range(3):
        kernel(*routed(PROBLEM, [0, 3]))
    qmoe_ep.reset_offload_stats()
    stats = figures(provider)
    assert (*executed(stats), stats.bytes_read, *cache_counts(provider)) == (0,) * 7
    assert (stats.cache_bytes_owned, stats.cache_peak_bytes_owned, stats.cache_budget) == (2 * X, 2 * X, 2 * X)
    assert not stats.layers
    kernel(*routed(PROBLEM, [0]))
    assert cache_counts(provider) == (1, 0, 0)


def test_without_paging_there_are_no_figures(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(host_cache_bytes=X)
    before = qmoe_ep.offload_stats()
    stored.kernel(provider)(*routed(PROBLEM, [1]))
    assert provider.offload_stats() is None
    assert qmoe_ep.offload_stats() == before


def test_a_closed_provider_keeps_nothing(stored: PagedFile) -> None:
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=4 * X)
    kernel = stored.kernel(provider)
    inputs = routed(PROBLEM, [0, 1])
    first = kernel(*inputs)
    kernel(*inputs)
    provider.close()
    provider.close()
    assert figures(provider).cache_bytes_owned == 0
    assert kernel(*inputs).tobytes() == first.tobytes()
    assert figures(provider).cache_bytes_owned == 0


# --- with telemetry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("paging", [False, True])
def test_telemetry_counts_calls(stored: PagedFile, paging: bool) -> None:
    provider = CpuExecutionProvider(weight_offload=paging)
    with provider.executor_scope(executor=1, generation=1):
        kernel = stored.kernel(provider, node_id=7)
    assert kernel.telemetry is not None
    kernel(*routed(PROBLEM, [1]))
    kernel.telemetry.arm(RouteTelemetryConfig(num_experts=4, routes_per_row=1, mode="trace", trace_rows=8))
    rows: Sequence[int] = [3, 0, 3]
    kernel(*routed(PROBLEM, rows))
    kernel.execute(routed(PROBLEM, [2, 1]), [np.zeros((2, 64), np.float32)], valid_rows=1)
    with pytest.raises(QMoEError):
        kernel(np.zeros((1, 63), np.float32), np.zeros((1, 4), np.float32))
    snapshot = provider.telemetry.sources(executor=1)[7].snapshot()
    assert snapshot is not None
    assert snapshot.counts is not None
    assert snapshot.trace is not None
    assert (snapshot.rows, snapshot.counts.tolist()) == (4, [1, 0, 1, 2])
    assert snapshot.trace[:, 0].tolist() == [3, 0, 3, 2]
    retired: list[bool] = []
    provider.retire_executor(executor=1, generation=1, cleanup=retired.append)
    assert retired == [True]
    provider.close()
    assert len(provider.telemetry) == 0


def test_telemetry_can_be_off(stored: PagedFile) -> None:
    assert stored.kernel(CpuExecutionProvider(route_telemetry=False)).telemetry is None
