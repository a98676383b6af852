"""Files of records, Prometheus metrics, and the exporter's thread."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem, Recipe, build
from simulated import kernels_portable
from simulated.plugin import Simulation

from qmoe_ep import CpuExecutionProvider, CudaError, CudaExecutionProvider, QMoEError, RouteTelemetryConfig
from qmoe_ep.routing import select_experts
from qmoe_ep.telemetry import TelemetrySnapshot
from qmoe_ep.telemetry_export import (
    NamedSnapshot,
    RecordFollower,
    RecordWriter,
    TelemetryExporter,
    read_records,
    record_to_snapshot,
    snapshot_to_record,
)
from qmoe_ep.telemetry_export import prometheus as metrics

# Importing them is what registers the simulated kernels.
assert kernels_portable

COUNT = st.integers(0, 2**63 - 1)


@st.composite
def snapshots(draw: st.DrawFn) -> NamedSnapshot:
    experts = draw(st.integers(1, 12))
    k = draw(st.integers(1, experts))
    mode = draw(st.sampled_from(["bitmap", "counts", "trace"]))
    counts = draw(st.lists(COUNT, min_size=experts, max_size=experts))
    row = st.lists(st.integers(0, experts - 1), min_size=k, max_size=k)
    trace = draw(st.lists(row, max_size=4)) if mode == "trace" else None
    margin = st.none() | st.floats(0, width=32, allow_infinity=False)
    values = {
        "executor": draw(st.none() | st.integers(-5, 2**63 - 1)),
        "node": draw(st.integers(-5, 2**63 - 1)),
        "unix_time": draw(st.floats(0, 4e9)),
        "mode": mode,
        "num_experts": experts,
        "routes_per_row": k,
        "saturated": draw(st.booleans()),
        "paused": draw(st.booleans()),
        "experts": [expert for expert, count in enumerate(counts) if count],
        "counts": None if mode == "bitmap" else counts,
        "trace": trace,
        "margins": [draw(margin) for _ in trace] if trace is not None and draw(st.booleans()) else None,
        **{name: draw(COUNT) for name in ("epoch", "rows", "routes", "lost_rows")},
    }
    return NamedSnapshot(TelemetrySnapshot.from_dict(values), draw(st.text(max_size=8)), draw(st.integers(0, 2**40)))


def simple(rows: int = 1, node: int = 7, executor: int | None = 1, epoch: int = 0) -> NamedSnapshot:
    counts = [rows, rows, 0, 0]
    values = {
        "executor": executor,
        "node": node,
        "unix_time": 1000.0 + rows,
        "mode": "counts",
        "num_experts": 4,
        "routes_per_row": 2,
        "saturated": False,
        "paused": False,
        "experts": [0, 1] if rows else [],
        "counts": counts,
        "trace": None,
        "epoch": epoch,
        "rows": rows,
        "routes": 2 * rows,
        "lost_rows": 0,
    }
    return NamedSnapshot(TelemetrySnapshot.from_dict(values), "layers.7", 64)


def rows_of(records: Iterator[NamedSnapshot] | list[NamedSnapshot]) -> list[int]:
    return [record.snapshot.rows for record in records]


# --- records -----------------------------------------------------------------------------------------


@given(snapshots())
def test_records_are_plain_json_and_come_back(named: NamedSnapshot) -> None:
    record = snapshot_to_record(named)
    back = record_to_snapshot(json.loads(json.dumps(record, allow_nan=False)))
    assert snapshot_to_record(back) == record
    assert (back.name, back.footprint_bytes) == (named.name, named.footprint_bytes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "newer"),
        ({"version": None}, "version"),
        ({"num_experts": 10**9}, "num_experts"),
        ({"num_experts": True}, "num_experts"),
        ({"routes_per_row": 5}, "routes_per_row"),
        ({"mode": "all"}, "mode"),
        ({"rows": -1}, "rows"),
        ({"rows": 10**5000}, "beyond 64 bits"),
        ({"rows": 1.5}, "rows"),
        ({"epoch": "1"}, "epoch"),
        ({"unix_time": float("nan")}, "unix_time"),
        ({"unix_time": 1e300}, "unix_time"),
        ({"unix_time": 10**400}, "unix_time"),
        ({"paused": 1}, "paused"),
        ({"experts": [4]}, "experts"),
        ({"experts": "0" * 10**6}, "experts"),
        ({"counts": [1, 2]}, "counts"),
        ({"counts": None}, "counts"),
        ({"mode": "trace"}, "trace"),
        ({"mode": "trace", "trace": [[0, 1], [0]]}, "trace"),
        ({"mode": "trace", "trace": [[0, 1]], "margins": [0.5, 1.5]}, "margins"),
        ({"mode": "trace", "trace": [[0, 1]], "margins": ["0.5"]}, "margins"),
        ({"mode": "trace", "trace": [[0, 1]], "margins": 0.5}, "margins"),
        ({"name": 7}, "name"),
        ({"executor": "one"}, "executor"),
    ],
)
def test_what_is_no_record(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(QMoEError, match=words) as caught:
        record_to_snapshot({**snapshot_to_record(simple()), **changes})
    assert len(str(caught.value)) < 200


def test_margins_that_json_or_float32_can_not_hold_are_unknown() -> None:
    given = [float("inf"), float("nan"), 1e300, 10**400, -1e39, None, 2]
    record = {**snapshot_to_record(simple()), "mode": "trace", "trace": [[0, 1]] * 7, "margins": given}
    assert snapshot_to_record(record_to_snapshot(record))["margins"] == [None] * 6 + [2.0]
    del record["margins"]
    assert record_to_snapshot(record).snapshot.margins is None


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_anything_else_is_no_record(value: Any) -> None:
    with pytest.raises(QMoEError):
        record_to_snapshot(value)


# --- files -------------------------------------------------------------------------------------------


def test_append_read_and_follow(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    with RecordFollower(path) as follower:
        assert follower.poll() == []
        with RecordWriter(path) as writer:
            writer.write([simple(1), simple(2)])
            assert rows_of(follower.poll()) == [1, 2]
            assert follower.poll() == []
            writer.write([simple(3)])
            assert rows_of(follower.poll()) == [3]
    with RecordWriter(path) as writer:
        writer.write([simple(4)])
    assert rows_of(read_records(path)) == [1, 2, 3, 4]


@settings(max_examples=50, deadline=None)
@given(cut=st.integers(1, 400), follow=st.booleans())
def test_a_line_cut_short_is_waited_for_and_removed(
    tmp_path_factory: pytest.TempPathFactory, cut: int, follow: bool
) -> None:
    """At any byte: readers see whole records only, and the next writer goes on in a clean file."""
    path = tmp_path_factory.mktemp("cut") / "routes.jsonl"
    with RecordWriter(path) as writer:
        writer.write([simple(1), simple(2)])
    data = path.read_bytes()
    path.write_bytes(data[: max(0, len(data) - cut)])
    whole = rows_of(read_records(path))
    assert whole == [1, 2][: len(whole)]
    with RecordFollower(path) as follower:
        if follow:
            assert rows_of(follower.poll()) == whole
        with RecordWriter(path) as writer:
            writer.write([simple(3)])
        assert rows_of(follower.poll()) == ([3] if follow else [*whole, 3])
    assert rows_of(read_records(path)) == [*whole, 3]


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    script = (
        "import itertools, sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_telemetry_export import RecordWriter, simple\n"
        "writer = RecordWriter(sys.argv[1])\n"
        "for rows in itertools.count(1):\n    writer.write([simple(rows)])\n    print(rows, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, path, Path(__file__).parent], stdout=subprocess.PIPE)
    assert child.stdout is not None
    for _ in range(200):
        assert child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    rows = rows_of(read_records(path))
    assert len(rows) >= 200
    assert rows == list(range(1, len(rows) + 1))
    with RecordWriter(path) as writer:
        writer.write([simple(0)])
    assert rows_of(read_records(path))[-1] == 0


def test_rotation(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    size = len(json.dumps(snapshot_to_record(simple(9)), separators=(",", ":"))) + 8
    with RecordWriter(path, max_bytes=3 * size, keep=2) as writer, RecordFollower(path) as follower:
        seen = []
        for rows in range(1, 11):
            writer.write([simple(rows)])
            seen += rows_of(follower.poll())
        assert seen == list(range(1, 11))
        assert {p.name: rows_of(read_records(p)) for p in tmp_path.iterdir()} == {
            "routes.jsonl": [10],
            "routes.jsonl.1": [7, 8, 9],
            "routes.jsonl.2": [4, 5, 6],
        }
    with RecordWriter(path, max_bytes=1, keep=0) as writer:
        writer.write([simple(1), simple(2)])
    assert rows_of(read_records(path)) == [2]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a"), pytest.raises(QMoEError, match="another exporter"):
        RecordWriter(tmp_path / "a")
    with RecordWriter(tmp_path / "a") as writer:
        writer.close()


def test_what_can_not_be_opened(tmp_path: Path) -> None:
    with pytest.raises(QMoEError, match="can't be written"):
        RecordWriter(tmp_path / "no" / "a")
    with pytest.raises(QMoEError, match="max_bytes"):
        RecordWriter(tmp_path / "a", max_bytes=0)
    with pytest.raises(QMoEError, match="can't be read"):
        list(read_records(tmp_path / "a"))
    with pytest.raises(QMoEError, match="can't be read"):
        RecordFollower(tmp_path).poll()


def test_a_bad_line_is_named_and_passed(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    line = json.dumps(snapshot_to_record(simple(1))) + "\n"
    path.write_text(line + "{}\n" + line)
    with pytest.raises(QMoEError, match="line 2: version"):
        list(read_records(path))
    with RecordFollower(path) as follower:
        assert rows_of(follower.poll()) == [1]
        with pytest.raises(QMoEError, match="line 2"):
            follower.poll()
        assert rows_of(follower.poll()) == [1]
    path.write_bytes(b"\xff\n")
    with pytest.raises(QMoEError, match="line 1: not a record"):
        list(read_records(path))


# --- Prometheus --------------------------------------------------------------------------------------


def scrape(collector: metrics.SnapshotCollector) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def test_metrics_come_back() -> None:
    layers = [simple(3), simple(0, node=8), simple(5, executor=None), simple(2**30, executor=2, epoch=4)]
    text = scrape(metrics.SnapshotCollector(lambda: layers))
    back = metrics.read_metrics(text)
    assert [snapshot_to_record(layer) for layer in back] == [snapshot_to_record(layer) for layer in layers]
    assert 'qmoe_load_max_over_mean{executor="1",layer="layers.7",node="7"} 2.0' in text
    assert 'qmoe_expert_routes_total{executor="1",expert="1",layer="layers.7",node="7"} 3.0' in text


def test_the_dashboard_names_what_is_exported() -> None:
    dashboard = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text())
    text = scrape(metrics.SnapshotCollector(lambda: [simple(3)]))
    exported = set(re.findall(r"^(qmoe_\w+?)(?:{| )", text, re.MULTILINE))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    named = {name for expression in expressions for name in re.findall(r"qmoe_\w+", expression)}
    assert named <= exported
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    documented = (Path(__file__).parents[1] / "docs" / "telemetry.md").read_text()
    assert not [name for name in exported if f"`{name}`" not in documented]


def test_bounded_cardinality() -> None:
    layers = [simple(3), simple(1, node=8)]
    text = scrape(metrics.SnapshotCollector(lambda: layers, expert_series=7))
    assert "qmoe_expert_routes_total{" not in text
    assert "qmoe_expert_series_omitted 1.0" in text
    assert [layer.snapshot.mode for layer in metrics.read_metrics(text)] == ["bitmap"] * 2
    assert "qmoe_expert_routes_total{" in scrape(metrics.SnapshotCollector(lambda: layers, expert_series=8))


@pytest.mark.parametrize("text", ["", "up 1\n", "qmoe_rows_total{x=", 'qmoe_rows_total{executor=""} 1\n'])
def test_what_is_no_metrics(text: str) -> None:
    with pytest.raises(QMoEError, match="metrics of route telemetry"):
        metrics.read_metrics(text)


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prometheus_client", "prometheus_client.core", "prometheus_client.parser"):
        monkeypatch.setitem(sys.modules, name, None)
    collector = metrics.SnapshotCollector(lambda: [])
    for use in (
        lambda: metrics.serve_metrics(collector, 0),
        lambda: metrics.read_metrics("up 1"),
        lambda: list(collector.collect()),
    ):
        with pytest.raises(QMoEError, match=r"qmoe-ep\[telemetry\]"):
            use()


# --- the exporter ------------------------------------------------------------------------------------


PROBLEM = build(Recipe(leading=(8,), experts=5, k=2))
CONFIG = RouteTelemetryConfig(5, 2, mode="counts")


def weights_of(problem: Problem) -> dict[int, Any]:
    return {i: a for i, a in enumerate(problem.inputs) if a is not None and 2 <= i < 14}


def expected_counts(rows: int = 8) -> list[int]:
    chosen = select_experts(PROBLEM.inputs[1][:rows], 2)
    return np.bincount(chosen.reshape(-1), minlength=5).tolist()


class Layer:
    """An armed kernel of a provider and its operands."""

    def __init__(self, provider: Any, node: int = 7) -> None:
        self.kernel = provider.create_kernel(PROBLEM.node, node, weights_of(PROBLEM))
        place = getattr(provider, "to_device", np.array)
        self.inputs = [place(PROBLEM.inputs[0]), place(PROBLEM.inputs[1])]
        self.output = place(PROBLEM.poisoned_output())
        self.kernel.telemetry.arm(CONFIG)

    def run(self, **options: Any) -> None:
        self.kernel.execute(self.inputs, [self.output], **options)


@pytest.fixture(params=["cpu", "simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def provider(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "cpu":
        yield CpuExecutionProvider()
        return
    if request.param == "simulated":
        request.getfixturevalue("simulated")
    with CudaExecutionProvider(kernels="portable" if request.param == "simulated" else None) as gpu:
        yield gpu


@pytest.fixture(params=["simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[CudaExecutionProvider]:
    if request.param == "simulated":
        request.getfixturevalue("simulated")
    with CudaExecutionProvider(kernels="portable" if request.param == "simulated" else None) as provider:
        yield provider


def counts_by_layer(snapshots: list[NamedSnapshot]) -> dict[tuple[int | None, int], list[int]]:
    return {(s.snapshot.executor, s.snapshot.node): s.snapshot.counts.tolist() for s in snapshots}


def test_every_live_producer_is_published(provider: Any, tmp_path: Path) -> None:
    """Two executors with the same node ids, and a kernel outside any executor."""
    layers = {}
    for executor in (1, 2):
        with provider.executor_scope(executor, 1):
            layers[executor, 7] = Layer(provider)
    layers[None, 7] = Layer(provider)
    unarmed = provider.create_kernel(PROBLEM.node, 9, weights_of(PROBLEM))
    seen: list[list[NamedSnapshot]] = []
    path = tmp_path / "routes.jsonl"
    with TelemetryExporter(provider, interval=3600, path=path, callback=seen.append, names={7: "moe"}) as exporter:
        for times, layer in enumerate(layers.values()):
            for _ in range(times):
                layer.run()
        exporter.publish()
    want = {key: [times * count for count in expected_counts()] for times, key in enumerate(layers)}
    # One round was asked for, the last comes with the stop.
    assert [counts_by_layer(round_) for round_ in seen] == [want, want]
    records = list(read_records(path))
    assert len(records) == 6
    assert {record.name for record in records} == {"moe"}
    assert counts_by_layer(records[3:]) == want
    assert all(record.footprint_bytes > 0 for record in records)
    del unarmed


def test_snapshots_while_another_thread_runs(provider: Any) -> None:
    """Nothing is lost and nothing counted twice, whenever a snapshot is taken."""
    layer, seen = Layer(provider), []
    with TelemetryExporter(provider, interval=0.001, callback=seen.append):
        for _ in range(60):
            layer.run()
    final = seen[-1][0].snapshot
    assert final.counts.tolist() == [60 * count for count in expected_counts()]
    rows = [round_[0].snapshot.rows for round_ in seen]
    assert rows == sorted(rows)
    assert all(row % 8 == 0 for row in rows)


def test_snapshots_while_a_graph_replays(gpu: CudaExecutionProvider) -> None:
    """Windows end between replays; no snapshot holds parts of two, or of a replay."""
    layers, seen = [Layer(gpu, node) for node in (1, 2)], []
    for layer in layers:
        layer.run()
    with gpu.capture() as capture:
        for layer in layers:
            layer.run()
    once = np.array(expected_counts())
    with TelemetryExporter(gpu, interval=0.001, callback=seen.append):
        for number in range(80):
            if number % 20 == 0:
                for layer in layers:
                    layer.kernel.telemetry.reset_boundary()
            capture.graph.replay()
    capture.graph.close()
    assert [named.snapshot.rows for named in seen[-1]] == [160, 160]
    for round_ in seen:
        for named in round_:
            assert named.snapshot.counts.tolist() == (once * (named.snapshot.rows // 8)).tolist()


def test_replays_resets_and_rows_that_count(gpu: CudaExecutionProvider) -> None:
    """A graph padded to 8 rows of which 5 are valid: snapshots between replays, resets, pauses, and after disarm."""
    layer, seen = Layer(gpu), []
    valid = gpu.to_device(np.array([5], np.int32))
    layer.run(valid_rows=valid)
    telemetry = layer.kernel.telemetry
    telemetry.reset_boundary()
    with gpu.capture() as capture:
        layer.run(valid_rows=valid)
        # During a capture a round is skipped.
        assert TelemetryExporter(gpu, callback=seen.append).publish() == []
    exporter = TelemetryExporter(gpu, callback=lambda _: None)

    def published() -> tuple[int, int, list[int]]:
        snapshot = exporter.publish()[0].snapshot
        return snapshot.epoch, snapshot.rows, snapshot.counts.tolist()

    first, once = telemetry.snapshot().epoch, expected_counts(5)
    for _ in range(3):
        capture.graph.replay()
    assert published() == (first, 15, [3 * count for count in once])
    telemetry.reset_boundary()
    capture.graph.replay()
    assert published() == (first + 1, 5, once)
    telemetry.pause()
    capture.graph.replay()
    assert published() == (first + 1, 5, once)
    telemetry.resume()
    valid.copy_from(np.array([8], np.int32))
    capture.graph.replay()
    assert published() == (first + 1, 13, (np.array(once) + expected_counts()).tolist())
    telemetry.disarm()
    capture.graph.replay()
    gpu.synchronize()
    assert exporter.publish() == []
    capture.graph.close()


def test_retire_while_exporting(provider: Any) -> None:
    ended = threading.Event()
    with TelemetryExporter(provider, interval=0.0005, callback=lambda _: ended.is_set()):
        for executor in range(1, 9):
            with provider.executor_scope(executor, 1):
                layer = Layer(provider)
            layer.run()
            provider.retire_executor(executor, 1, lambda _, executor=executor: provider.telemetry.remove(executor))
            layer.kernel.close()
    assert provider.telemetry.producers() == () or not any(p.armed for p in provider.telemetry.producers())


def test_saturation_shows(provider: Any) -> None:
    """The counters are preset near their end; see RouteTelemetry.preset."""
    layer = Layer(provider)
    layer.kernel.telemetry.preset(2**63 - 5, np.array([2**63 - 1, 0, 0, 0, 2]))
    layer.run()
    (named,) = TelemetryExporter(provider, callback=lambda _: None).publish()
    assert named.snapshot.saturated
    assert named.snapshot.rows == 2**63 - 1
    assert 'qmoe_saturated{executor="",layer="",node="7"} 1.0' in scrape(metrics.SnapshotCollector(lambda: [named]))
    assert record_to_snapshot(snapshot_to_record(named)).snapshot.saturated


def test_endpoint(provider: Any) -> None:
    layer = Layer(provider)
    layer.run()
    with TelemetryExporter(
        provider, interval=3600, port=0, names=lambda executor, node: f"{executor}/{node}"
    ) as exporter:
        exporter.publish()
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as response:
            (named,) = metrics.read_metrics(response.read().decode())
        assert (named.name, named.snapshot.counts.tolist()) == ("None/7", expected_counts())
        with pytest.raises(QMoEError, match="choose another"):
            metrics.serve_metrics(metrics.SnapshotCollector(lambda: []), exporter.port or 0)
        with pytest.raises(QMoEError, match="runs already"):
            exporter.start()
    exporter.stop()


def test_a_failed_round_is_logged_and_tried_again(
    provider: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    layer = Layer(provider)
    layer.run()
    rounds = threading.Semaphore(0)

    def fail(_: object) -> None:
        rounds.release()
        raise ValueError("broken callback")

    with TelemetryExporter(provider, interval=0.001, callback=fail):
        assert all(rounds.acquire(timeout=60) for _ in range(2))
    assert "broken callback" in caplog.text


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize", "cuMemHostAlloc"])
def test_a_driver_failure_ends_one_round(simulated: Simulation, call: str) -> None:
    with CudaExecutionProvider(kernels="portable") as gpu:
        layers = [Layer(gpu, node) for node in (1, 2)]
        exporter = TelemetryExporter(gpu, callback=lambda _: None)
        simulated.fail(call, 2 if call == "cuMemcpyDtoHAsync" else 1)
        with pytest.raises(CudaError, match=call):
            exporter.publish()
        simulated.heal()
        assert [named.snapshot.node for named in exporter.publish()] == [1, 2]
        del layers


def test_a_round_is_read_at_one_point_and_blocks_nobody(simulated: Simulation) -> None:
    """All layers, a trace beyond 64 KiB among them: one wait, during which calls go on; none of them is torn."""
    with CudaExecutionProvider(kernels="portable") as gpu:
        layers = [Layer(gpu, node) for node in range(1, 5)]
        layers[0].kernel.telemetry.arm(RouteTelemetryConfig(5, 2, mode="trace", trace_rows=20_000))
        for layer in layers:
            layer.run()
        wait, waits = simulated.driver.cuEventSynchronize, []

        def slow(event: object) -> object:
            waits.append(event)
            other = threading.Thread(target=lambda: [layer.run() for layer in layers])
            other.start()
            other.join(60)
            assert not other.is_alive()
            return wait(event)

        before = simulated.counts()
        simulated.driver.cuEventSynchronize = slow
        seen = TelemetryExporter(gpu, callback=lambda _: None).publish()
        simulated.driver.cuEventSynchronize = wait
        after = simulated.counts() - before
        assert len(waits) == 1
        assert (after["cuStreamSynchronize"], after["cuMemcpyDtoHAsync"]) == (0, 4)
        assert [named.snapshot.rows for named in seen] == [8] * 4
        assert len({named.snapshot.unix_time for named in seen}) == 1
        assert [named.snapshot.rows for named in TelemetryExporter(gpu, callback=lambda _: None).publish()] == [16] * 4


def test_bad_arguments(tmp_path: Path) -> None:
    cpu = CpuExecutionProvider()
    for arguments, words in (
        ({"interval": 0, "port": 0}, "interval"),
        ({"interval": float("nan"), "port": 0}, "interval"),
        ({}, "nothing would be published"),
    ):
        with pytest.raises(QMoEError, match=words):
            TelemetryExporter(cpu, **arguments)  # type: ignore[arg-type]
    with pytest.raises(QMoEError, match="route_telemetry"):
        TelemetryExporter(CpuExecutionProvider(route_telemetry=False), port=0)
    path = tmp_path / "a"
    exporter = TelemetryExporter(cpu, path=path, port=70000)
    with pytest.raises(QMoEError, match="70000"):
        exporter.start()
    # Nothing is left open.
    RecordWriter(path).close()
