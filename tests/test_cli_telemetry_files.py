"""Files of records from anywhere: whatever is in them, a command succeeds or says in one line what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shell import Shell
from telemetry_records import record_of, snapshot, write_records

from qmoe_ep.cli.main import main

RECORD = record_of(
    snapshot([2, 0, 1, 1], mode="trace", trace=[[0, 1], [2, 3]], routes_per_row=2, rows=2, routes=4), name="layer"
)
HUGE = [2**31, 2**63 - 1, 2**63, 2**64, 10**400, -1, 0, 1, True, 1.5, 1e308, None, "1", [], {}, [[]], [10**400]]
VALUES = st.sampled_from(HUGE) | st.text(max_size=3) | st.lists(st.integers(-1, 9), max_size=5)
COMMANDS: list[tuple[str, ...]] = [
    ("show",),
    ("plan", "--gpus", "2", "--redundant", "2"),
    ("cache", "--bytes", "99", "--expert-bytes", "9"),
    ("trace",),
    ("show", "--merge"),
    ("watch", "--updates", "1"),
]


def run(path: Path, command: tuple[str, ...]) -> None:
    """Run a command on a file; only success, and failure in one line, are allowed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["telemetry", command[0], str(path), *command[1:]])
    assert code in (0, 2), err.getvalue()
    if code == 2:
        assert err.getvalue().count("\n") == 1


@settings(max_examples=60)
@given(
    st.lists(st.dictionaries(st.sampled_from(sorted(RECORD)), VALUES, min_size=1, max_size=2), min_size=1, max_size=3),
    st.integers(0, len(COMMANDS) - 1),
)
def test_odd_values(changes: list[dict[str, Any]], command: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.jsonl"
        path.write_text("".join(json.dumps(RECORD | change) + "\n" for change in changes))
        run(path, COMMANDS[command])


@pytest.mark.parametrize("field", sorted(RECORD))
def test_each_field_with_each_odd_value(tmp_path: Path, field: str) -> None:
    path = tmp_path / "r.jsonl"
    for value in (*HUGE, ...):
        record = {name: v for name, v in (RECORD | {field: value}).items() if v is not ...}
        path.write_text(json.dumps(record) + "\n")
        run(path, ("show",))
        run(path, ("trace", "-o", str(tmp_path / "t.npz")))


@settings(max_examples=60)
@given(st.binary(max_size=60), st.sampled_from(["", "[1]\n", "{}\n", "null\n"]))
@example(b"\xff\xfe", "")
@example(b"[" * 50_000, "")
@example(b'{"schema": NaN}\n', "")
def test_odd_bytes(data: bytes, before: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.jsonl"
        path.write_bytes(before.encode() + data + b"\n")
        for command in COMMANDS:
            run(path, command)


def test_a_line_that_was_cut_off(shell: Shell, tmp_path: Path) -> None:
    whole = write_records(tmp_path / "whole.jsonl", snapshot([1, 2]), snapshot([3, 4]))
    text = whole.read_bytes()
    end_of_first = text.index(b"\n", text.index(b"counts")) + 1
    for length in range(end_of_first, len(text) - 1, 7):
        (tmp_path / "cut.jsonl").write_bytes(text[:length])
        (layer,) = shell.json("telemetry", "show", tmp_path / "cut.jsonl")["layers"]
        assert layer["rows"] == 3
    (layer,) = shell.json("telemetry", "show", whole)["layers"]
    assert layer["rows"] == 7


def test_an_empty_file(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").touch()
    for command in ("show", "trace"):
        shell("telemetry", command, tmp_path / "r.jsonl").failed("r.jsonl", "no record")
