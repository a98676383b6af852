"""Endpoints that the live view is pointed at: what is odd, lacking or absent, and what a terminal shows of it."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from shell import Shell
from telemetry_records import snapshot, write_records

from qmoe_ep import QMoEError
from qmoe_ep.cli.telemetry.feeds import open_feed
from qmoe_ep.telemetry_export.prometheus import SnapshotCollector, read_metrics, serve_metrics
from qmoe_ep.telemetry_export.schema import NamedSnapshot

prometheus_client = pytest.importorskip("prometheus_client")

LAYERS = [
    NamedSnapshot(snapshot([4, 0, 2, 2]), 'a "layer"\\'),
    NamedSnapshot(snapshot([2**63 - 1, 2**63 - 1], node=8, executor=None, epoch=3)),
    NamedSnapshot(snapshot([1, 0, 1], node=9, mode="bitmap")),
]


def metrics(expert_series: int = 100) -> str:
    """What an endpoint says of the layers."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(SnapshotCollector(lambda: LAYERS, expert_series))
    text: str = prometheus_client.generate_latest(registry).decode()
    return text


@contextlib.contextmanager
def answering(data: bytes) -> Iterator[str]:
    """A server that answers just that."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_endpoint_is_read_as_it_was_written() -> None:
    with answering(metrics().encode()) as url, open_feed(url) as poll:
        first, full, seen = sorted(poll(), key=lambda reading: reading.load.node)
    assert (first.load.executor, first.load.node, first.load.name, first.unix_time) == (1, 7, 'a "layer"\\', 1000)
    assert first.load.counts is not None
    assert (first.load.rows, first.load.counts.tolist(), first.figures) == (8, [4, 0, 2, 2], None)
    assert full.load.counts is not None
    assert (full.load.executor, full.load.epochs, full.load.saturated) == (None, (3, 3), True)
    assert full.load.counts.tolist() == [2**63 - 1] * 2
    assert seen.figures is not None
    assert (seen.figures.distinct, seen.figures.max_over_mean) == (2, None)


def test_figures_without_series_for_experts(shell: Shell) -> None:
    with answering(metrics(expert_series=0).encode()) as url:
        out = shell("telemetry", "watch", url, "--updates", 1).succeeded().out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if "not told" in line}
    assert lines["1/a"][2:] == ["0", "8", "-", "3/4", "2.00", "not", "told"]
    assert len(lines) == 3
    assert "2/3" in out


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>hello</html>",
        b"\xff\xfe",
        b"up 1\n",
        b"qmoe_experts 4\n",
        b'qmoe_experts{executor="1",node="7",layer=""} 4\n',
        b'qmoe_experts{executor="one",node="7",layer=""} nan\n',
    ],
)
def test_watch_what_is_no_exporter(shell: Shell, data: bytes) -> None:
    with answering(data) as url:
        shell("telemetry", "watch", url, "--updates", 1).failed(url)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("qmoe_experts", "1e18"),
        ("qmoe_experts", "0"),
        ("qmoe_experts", "NaN"),
        ("qmoe_rows_total", "-1"),
        ("qmoe_rows_total", "Inf"),
        ("qmoe_expert_routes_total", "-1"),
        ("qmoe_distinct_experts", "99"),
        ("qmoe_load_max_over_mean", "99"),
        ("qmoe_load_max_over_mean", "NaN"),
        ("qmoe_snapshot_timestamp_seconds", "Inf"),
    ],
)
def test_odd_values_are_refused(metric: str, value: str) -> None:
    text = metrics()
    start = text.index(f"\n{metric}{{") + 1
    end = text.index("\n", start)
    changed = text[:start] + text[start:end].rpartition(" ")[0] + f" {value}" + text[end:]
    with pytest.raises(QMoEError, match="not metrics of route telemetry"):
        read_metrics(changed)


def test_an_expert_too_many_is_refused() -> None:
    with pytest.raises(QMoEError, match="expected routes of 4 experts"):
        read_metrics(metrics().replace('expert="2"', 'expert="99"'))


def test_nobody_there(shell: Shell) -> None:
    port, stop = serve_metrics(SnapshotCollector(lambda: LAYERS), 0)
    stop()
    shell("telemetry", "watch", f"http://127.0.0.1:{port}", "--updates", 1).failed(str(port), "refused")
    shell("telemetry", "watch", "http://", "--updates", 1).failed("http://")


def test_a_port_that_is_taken(shell: Shell, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 2]))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        shell("telemetry", "serve", path, "--port", port, "--updates", 1).failed(str(port), "choose another")


def test_without_prometheus_client(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 2]))
    for name in ("prometheus_client", "prometheus_client.parser"):
        monkeypatch.setitem(sys.modules, name, None)
    shell("telemetry", "serve", path, "--updates", 1).failed("prometheus-client", "qmoe-ep[telemetry]")
    with answering(b"x 1\n") as url:
        shell("telemetry", "watch", url).failed("prometheus-client", "qmoe-ep[telemetry]")
