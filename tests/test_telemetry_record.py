"""What a call adds to a telemetry record: in NumPy and by the device code, against plain counting."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from emulated import machine
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from problems import Recipe, build

from qmoe_ep import QMoEError, RouteTelemetryConfig
from qmoe_ep.call import describe_call
from qmoe_ep.capabilities import Capabilities
from qmoe_ep.kernels import route
from qmoe_ep.kernels.plan import Plan
from qmoe_ep.nvrtc_cache import clear_compiled, compile_module
from qmoe_ep.route_record import MAX_COUNT, RecordView, TelemetryMode, record_routes
from qmoe_ep.routing import route as reference_route
from qmoe_ep.routing import select_experts

MODES: tuple[TelemetryMode, ...] = ("bitmap", "counts", "trace")
Array = np.ndarray[Any, Any]
emulated = pytest.mark.skipif(machine.COMPILER is None, reason="g++ is not installed")


@dataclass
class Model:
    """A window as lists."""

    config: RouteTelemetryConfig
    rows: list[tuple[int, ...]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def add(self, selected: Array, logits: Array) -> None:
        """Count a call."""
        self.rows += [tuple(row) for row in selected.tolist()]
        for row in logits.astype(np.float64):
            falling = [*sorted(row, reverse=True), -np.inf]
            k = self.config.routes_per_row
            self.margins.append(np.float32(falling[k - 1] - falling[k]))

    def check(self, record: Array) -> None:
        """Compare every figure."""
        view, config = RecordView(record), self.config
        counts = Counter(expert for row in self.rows for expert in row)
        assert (view.header.rows, view.header.routes) == (len(self.rows), sum(counts.values()))
        assert not view.header.saturated
        assert view.header.ticket == 0
        assert [bool(seen) for seen in view.seen()] == [counts[e] > 0 for e in range(config.num_experts)]
        if config.mode != "bitmap":
            assert view.counts.tolist() == [counts[e] for e in range(config.num_experts)]
        if config.mode == "trace":
            last = self.rows[-config.trace_rows :]
            assert [tuple(row) for row in view.trace().tolist()] == last
            assert view.header.trace_lost == len(self.rows) - len(last)
        if config.margins:
            np.testing.assert_array_equal(view.trace_margins(), self.margins[-config.trace_rows :])


def new_record(config: RouteTelemetryConfig, epoch: int = 3) -> Array:
    """A record whose ring is poisoned."""
    record = np.full(config.record_bytes, 0xFF, np.uint8)
    record[: config.counters_bytes] = config.empty_record(epoch, recording=True)
    return record


@st.composite
def windows(draw: st.DrawFn) -> tuple[RouteTelemetryConfig, list[Array]]:
    """A configuration and some calls."""
    experts = draw(st.integers(1, 70))
    k = draw(st.integers(1, min(experts, 5)))
    mode = draw(st.sampled_from(MODES))
    config = RouteTelemetryConfig(experts, k, mode, draw(st.integers(1, 9)), mode == "trace" and draw(st.booleans()))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.integers(0, 12), max_size=6))
    dtype = draw(st.sampled_from([np.float32, np.float16, bfloat16]))
    return config, [random.normal(size=(n, experts)).astype(np.float16).astype(dtype) for n in sizes]


@given(windows())
@settings(max_examples=150)
def test_numpy_counts(window: tuple[RouteTelemetryConfig, list[Array]]) -> None:
    config, calls = window
    record, model = new_record(config), Model(config)
    for logits in calls:
        selected = select_experts(logits, config.routes_per_row)
        record_routes(record, selected, config.num_experts, logits)
        model.add(selected, logits)
        model.check(record)
    assert RecordView(record).header.epoch == 3


def test_margins_without_logits_are_unknown() -> None:
    config = RouteTelemetryConfig(4, 1, "trace", 3, margins=True)
    record = new_record(config)
    record_routes(record, np.array([[0], [1]]), 4)
    assert np.isnan(RecordView(record).trace_margins()).tolist() == [True, True]


@pytest.mark.parametrize("change", ["paused", "experts", "k"])
def test_numpy_leaves_the_record_alone(change: str) -> None:
    config = RouteTelemetryConfig(8, 2, "trace", 4)
    record = new_record(config)
    RecordView(record).header.recording = change != "paused"
    before = record.tobytes()
    record_routes(record, np.zeros((3, 3 if change == "k" else 2), int), 9 if change == "experts" else 8)
    assert record.tobytes() == before


def test_numpy_saturates() -> None:
    config = RouteTelemetryConfig(4, 1, "counts")
    record = new_record(config)
    view = RecordView(record)
    view.header.rows = view.header.routes = MAX_COUNT - 1
    view.counts[:] = [MAX_COUNT - 1, 0, 0, 0]
    record_routes(record, np.array([[0]]), 4)
    assert not view.header.saturated
    for _ in range(2):
        record_routes(record, np.array([[0], [0], [1]]), 4)
    assert (view.header.saturated, view.header.rows, view.header.routes) == (1, MAX_COUNT, MAX_COUNT)
    assert view.counts.tolist() == [MAX_COUNT, 2, 0, 0]


@pytest.mark.parametrize(
    "values",
    [
        (0, 1, "counts", 1),
        (4, 5, "counts", 1),
        (4, 0, "counts", 1),
        (4, 1, "all", 1),
        (4, 1, "trace", 0),
        (4, 1, "counts", 1, True),
    ],
)
def test_configurations_out_of_range(values: tuple[Any, ...]) -> None:
    with pytest.raises(QMoEError, match="telemetry"):
        RouteTelemetryConfig(*values)


# --- the device code -------------------------------------------------------------------------------


class Device:
    """Route steps on the CPU, and the record they write to."""

    def __init__(self, config: RouteTelemetryConfig) -> None:
        self.config = config
        self._buffer = machine.GuardedBuffer(-(-config.record_bytes // 16) * 16)
        self.record = self._buffer.array[: config.record_bytes]
        self.record[:] = new_record(config)

    def call(self, logits: Array, valid: int | None, *, backwards: bool, armed: bool = True) -> tuple[bytes, Array]:
        """Route once; returns all bytes of the result, and the selected experts of the valid rows."""
        rows, experts = logits.shape
        k = self.config.routes_per_row
        problem = build(Recipe(leading=(rows,), hidden=16, inter=16, block_size=16, experts=experts, k=k))
        call = describe_call(problem.node, problem.inputs)
        plan = Plan("portable", "routing alone", route.route_scratch(call), (route.route_step(call),))
        operand = machine.GuardedBuffer(logits.nbytes)
        operand.array[:] = logits.reshape(-1).view(np.uint8)
        addresses: dict[int | str, int] = {1: operand.address}
        count = machine.GuardedBuffer(4)
        if valid is not None:
            count.array.view(np.int32)[0] = valid
            addresses["valid_rows"] = count.address
        if armed:
            addresses["telemetry"] = self._buffer.address
        scratch = machine.run_plan(plan, addresses, backwards=backwards)
        used = 4 * call.routes
        result = b"".join(scratch[slot].array[:used].tobytes() for slot in ("route_experts", "route_weights"))
        selected = scratch["route_experts"].array[:used].view(np.int32).reshape(rows, k).copy()
        return result, selected[: rows if valid is None else max(0, min(valid, rows))]


SEQUENCE: Sequence[tuple[int, int | None]] = (
    (1, None),
    (11, None),
    (9, 4),
    (3, 0),
    (3, -1),
    (2, 7),
    (40, 30),
    (5, None),
)


@emulated
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("experts", "k", "mode", "ring", "margins"),
    [
        (5, 2, "bitmap", 1, False),
        (70, 3, "counts", 1, False),
        (33, 1, "trace", 7, False),
        (64, 40, "trace", 16, True),
        (3, 3, "trace", 16, True),
    ],
)
def test_emulated(experts: int, k: int, mode: TelemetryMode, ring: int, margins: bool, backwards: bool) -> None:
    config = RouteTelemetryConfig(experts, k, mode, ring, margins)
    device, host, model = Device(config), new_record(config), Model(config)
    random = np.random.default_rng(experts)
    for rows, valid in SEQUENCE:
        logits = random.normal(size=(rows, experts)).astype(np.float32)
        plain, _ = device.call(logits, valid, backwards=backwards, armed=False)
        model.check(device.record)
        recorded, selected = device.call(logits, valid, backwards=backwards)
        assert recorded == plain
        if len(selected):
            expected, _ = reference_route(logits[: len(selected)], None, top_k=k, normalize=True)
            np.testing.assert_array_equal(selected, expected)
        record_routes(host, selected, experts, logits[: len(selected)])
        model.add(selected, logits[: len(selected)])
        model.check(device.record)
        assert device.record.tobytes() == host.tobytes()


@emulated
@pytest.mark.parametrize("change", ["paused", "experts", "k"])
def test_emulated_leaves_the_record_alone(change: str) -> None:
    device = Device(RouteTelemetryConfig(8, 2, "trace", 4))
    header = RecordView(device.record).header
    header.recording = change != "paused"
    header.num_experts += change == "experts"
    header.routes_per_row += change == "k"
    before = device.record.tobytes()
    device.call(np.eye(6, 8, dtype=np.float32), None, backwards=False)
    assert device.record.tobytes() == before


@emulated
def test_emulated_saturates() -> None:
    config = RouteTelemetryConfig(4, 1, "counts")
    device, host = Device(config), new_record(config)
    for record in (device.record, host):
        view = RecordView(record)
        view.header.rows = view.header.routes = MAX_COUNT - 1
        view.counts[:] = [MAX_COUNT - 1, 0, 0, 0]
    for rows in (1, 9, 9):
        _, selected = device.call(np.eye(4, dtype=np.float32)[np.arange(rows) % 3 % 2], None, backwards=False)
        record_routes(host, selected, 4)
        assert device.record.tobytes() == host.tobytes()
    assert RecordView(host).counts[0] == MAX_COUNT


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_compiles_without_spills(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QMOE_EP_CACHE_DISABLE", "1")
    clear_compiled()
    problem = build(Recipe())
    module = route.route_module(describe_call(problem.node, problem.inputs))
    assert f"sizeof(qmoe::RouteRecord) == {ctypes.sizeof(route.RECORD_LAYOUT[0])}" in module.source
    (report,) = compile_module(module, Capabilities.for_arch(arch).arch).report()
    assert (report.stack_bytes, report.spill_store_bytes, report.spill_load_bytes) == (0, 0, 0)
