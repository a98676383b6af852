"""The live view: what it draws for terminals of any size, and how it follows its source."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from shell import Shell
from telemetry_records import load, snapshot, write_records

from qmoe_ep.cli.telemetry.board import Board, Reading, load_strip
from qmoe_ep.cli.telemetry.feeds import open_feed
from qmoe_ep.errors import QMoEError
from qmoe_ep.telemetry_export.prometheus import SnapshotCollector, serve_metrics
from qmoe_ep.telemetry_export.records import read_records


def drawn(board: Board, width: int = 100, height: int = 30, now: float = 1010.0) -> list[str]:
    """The lines of a view."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(board.draw(width, height, now))
    return capture.get().splitlines()


def reading(counts: list[int], at: float = 1000.0, node: int = 7, epoch: int = 0) -> Reading:
    mine = load(counts, node=node)
    return Reading(dataclasses.replace(mine, epochs=(epoch, epoch)), at)


def line_of(board: Board, label: str) -> list[str]:
    (line,) = [line for line in drawn(board) if label in line]
    return line.split()


def test_nothing_yet() -> None:
    assert "waiting for the first record" in drawn(Board("r.jsonl"))[0]


def test_a_layer() -> None:
    board = Board("r.jsonl")
    board.update(reading([4, 0, 2, 2]))
    assert "r.jsonl  1 layers, of the window so far, last record 10 s ago" in drawn(board)[0]
    assert line_of(board, "node 7")[2:] == ["0", "8", "-", "3/4", "2.00", "▅", "▄▄"]
    board.update(reading([4, 0, 2, 12], at=1002.0))
    assert line_of(board, "node 7")[2:7] == ["0", "18", "5", "3/4", "2.67"]
    # The same reading again, as an endpoint gives it between two updates of its exporter.
    board.update(reading([4, 0, 2, 12], at=1002.0))
    assert line_of(board, "node 7")[4] == "5"


def test_what_is_new() -> None:
    board = Board("r.jsonl", recent=True)
    board.update(reading([4, 0, 2, 2]))
    board.update(reading([4, 0, 3, 2], at=1001.0))
    assert line_of(board, "node 7")[2:7] == ["0", "1", "1", "1/4", "4.00"]
    board.update(reading([1, 1, 0, 0], at=1002.0, epoch=1))
    assert line_of(board, "node 7")[2:7] == ["1", "2", "2", "2/4", "2.00"]


def test_the_least_even_layers_are_shown_where_not_all_fit() -> None:
    board = Board("r.jsonl")
    for node in range(20):
        board.update(reading([node, 1, 1], node=node))
    lines = drawn(board, height=12)
    assert len(lines) <= 12
    assert [line.split()[1] for line in lines if line.startswith(" node")] == ["15", "16", "17", "18", "19"]
    assert any("15 more layers" in line for line in lines)


@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(20, 200), st.integers(1, 60), st.integers(1, 300))
def test_any_terminal(layers: int, width: int, height: int, experts: int) -> None:
    board = Board("r.jsonl")
    for node in range(layers):
        board.update(reading(list(range(experts)), node=node))
    lines = drawn(board, width, height)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(height, 9)


def test_a_problem_is_shown() -> None:
    board = Board("http://localhost:1")
    board.problem = "connection refused"
    assert "connection refused" in drawn(board)[0]


def test_strips() -> None:
    assert load_strip(load([1, 1, 1, 1]), 9).plain == "▄▄▄▄"
    assert load_strip(load([0, 0, 0, 8]), 2).plain == " ▆"
    assert load_strip(load([0, 3, 0], bitmap=True), 9).plain == " ▄ "
    assert load_strip(load([0, 0]), 9).plain == "  "
    wide = load_strip(load([0] * 255 + [1]), 64)
    assert (len(wide.plain), wide.plain[-1], str(wide.spans[-1].style)) == (64, "█", "red")


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_ages(seconds: float, text: str) -> None:
    board = Board("r.jsonl")
    board.update(reading([1]))
    assert f"last record {text} ago" in drawn(board, now=1000.0 + seconds)[0]


def test_watch_a_file(shell: Shell, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 2]), snapshot(np.arange(5).tolist(), node=8))
    out = shell("telemetry", "watch", path, "--updates", 2, "--interval", 0.05).succeeded().out
    assert "node 7" in out
    assert "4/5" in out


def test_a_feed_reads_what_is_new(tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 2]))
    with open_feed(str(path)) as poll:
        assert [reading.load.rows for reading in poll()] == [3]
        with path.open("ab") as file:
            file.write((more := write_records(tmp_path / "s.jsonl", snapshot([3, 4])).read_bytes())[:-9])
            file.flush()
            assert list(poll()) == []
            file.write(more[-9:])
        assert [reading.load.rows for reading in poll()] == [7]


def test_a_feed_of_an_endpoint(tmp_path: Path) -> None:
    records = list(read_records(write_records(tmp_path / "r.jsonl", snapshot([1, 2]), names={7: "moe"})))
    port, stop = serve_metrics(SnapshotCollector(lambda: records), 0)
    url = f"http://127.0.0.1:{port}/metrics"
    with open_feed(url) as poll:
        (got,) = poll()
        assert (got.load.name, got.load.rows, got.unix_time) == ("moe", 3, 1000.0)
        stop()
        with pytest.raises(QMoEError, match="can't be read"):
            poll()


def test_watch_an_endpoint(shell: Shell, tmp_path: Path) -> None:
    records = list(read_records(write_records(tmp_path / "r.jsonl", snapshot([1, 2]))))
    port, stop = serve_metrics(SnapshotCollector(lambda: records), 0)
    url = f"http://127.0.0.1:{port}/metrics"
    assert "node 7" in shell("telemetry", "watch", url, "--updates", 1).succeeded().out
    stop()
    shell("telemetry", "watch", url, "--updates", 1).failed("can't be read")
    shell("telemetry", "watch", tmp_path / "nothing").failed("no such file")


def test_watch_goes_on_when_an_endpoint_fails(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = list(read_records(write_records(tmp_path / "r.jsonl", snapshot([1, 2]))))
    port, stop = serve_metrics(SnapshotCollector(lambda: records), 0)
    monkeypatch.setattr(time, "sleep", lambda _: stop())
    out = shell("telemetry", "watch", f"http://127.0.0.1:{port}/metrics", "--updates", 2).succeeded().out
    assert "can't be read" in out


def test_serve(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offered follows the file."""
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 2]), snapshot([3, 4]), snapshot([5, 6], node=8))
    served: list[list[int]] = []
    ports: list[int] = []

    def start(collector: SnapshotCollector, port: int, host: str) -> tuple[int, Callable[[], None]]:
        ports.append(port)
        port, stop = serve_metrics(collector, port, host)

        def look(_: float) -> None:
            with open_feed(f"http://127.0.0.1:{port}/metrics") as poll:
                served.append([reading.load.rows for reading in poll()])
            with path.open("ab") as file:
                file.write(write_records(tmp_path / "s.jsonl", snapshot([7, 8])).read_bytes())

        monkeypatch.setattr(time, "sleep", look)
        return port, stop

    monkeypatch.setattr("qmoe_ep.telemetry_export.prometheus.serve_metrics", start)
    out = shell("telemetry", "serve", path, "--port", 0, "--updates", 3).succeeded().out
    assert out.startswith("2 layers")
    assert served == [[7, 11], [15, 11]]
    assert ports == [0]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_real_terminal(tmp_path: Path) -> None:
    import pty

    path = write_records(tmp_path / "r.jsonl", snapshot([1, 2, 0, 5]))
    terminal, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "20"}
    command = [sys.executable, "-m", "qmoe_ep", "telemetry", "watch", str(path), "--interval", "0.1"]
    process = subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True, close_fds=True
    )
    os.close(inner)
    shown = b""
    with contextlib.suppress(OSError):  # The end of a terminal's output reads as an error.
        while data := os.read(terminal, 65536):
            first = b"node 7" not in shown
            shown += data
            if first and b"node 7" in shown:
                process.send_signal(signal.SIGINT)
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    # The alternate screen was entered and left, and the last view stays.
    assert b"\x1b[?1049h" in shown
    assert "3/4" in shown.decode().rpartition("\x1b[?1049l")[2]
