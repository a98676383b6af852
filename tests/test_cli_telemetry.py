"""The telemetry commands: what each prints and writes, and one line with exit code 2 for whatever is wrong."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from problems import Recipe, build
from shell import EXAMPLE, Shell, model_of
from telemetry_records import snapshot, write_records

from qmoe_ep import TelemetrySnapshot

COMMANDS = ("show", "plot", "watch", "diff", "trace", "plan", "cache", "export")


@pytest.fixture
def two_layers(tmp_path: Path) -> Path:
    """Node 7 in two windows, node 8 in one, both of executor 1."""
    return write_records(
        tmp_path / "two.jsonl",
        snapshot([1, 0, 1, 0], unix_time=1000.0),
        snapshot([4, 0, 2, 2], unix_time=1001.0),
        snapshot([5, 5, 5, 5], node=8, unix_time=1001.0),
        snapshot([0, 8, 0, 0], epoch=1, unix_time=1002.0),
        names={7: "first", 8: "second"},
    )


def traced(rows: list[list[int]], lost: list[list[int]] | None = None, **changes: int) -> TelemetrySnapshot:
    """With a ring of rows, after those that left it."""
    gone = lost or []
    counts = np.bincount(np.array(gone + rows).ravel(), minlength=8)
    return snapshot(counts.tolist(), mode="trace", trace=rows, lost_rows=len(gone), routes_per_row=2, **changes)


# --- usage and bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help(shell: Shell, command: tuple[str, ...]) -> None:
    assert shell("telemetry", *command, "--help").succeeded().out.startswith("Usage: qmoe-ep telemetry")


def test_the_group_lists_its_commands(shell: Shell) -> None:
    text = shell("telemetry", "--help").succeeded().out
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["Missing command"]),
        (("fly",), ["fly"]),
        (("show",), ["FILE", "qmoe-ep telemetry show --help"]),
        (("show", "nowhere.jsonl"), ["nowhere.jsonl"]),
        (("show", "FILE", "--window", "soon"), ["all, last or the number", "soon"]),
        (("show", "FILE", "--window", "-1"), ["-1"]),
        (("show", "FILE", "--window", "9"), ["no layer has a window 9"]),
        (("show", "FILE", "--executor", "9", "--node", "7"), ["no record of executor 9, node 7"]),
        (("plan", "FILE"), ["--gpus"]),
        (("plan", "FILE", "--gpus", "0"), ["0"]),
        (("plan", "FILE", "--gpus", "2", "--redundant", "99999999999999999999"), ["4096"]),
        (("cache", "FILE", "--bytes", "9"), ["--expert-bytes or --model"]),
        (("cache", "FILE", "--bytes", "9", "--expert-bytes", "0"), ["at least 1"]),
        (("cache", "FILE", "--bytes", "much", "--expert-bytes", "1"), ["24GiB", "much"]),
        (("cache", "FILE", "--bytes", "9" * 30, "--expert-bytes", "1"), ["24GiB"]),
        (("cache", "FILE", "--bytes", "1 i", "--expert-bytes", "1"), ["24GiB"]),
        (("cache", "FILE", "--bytes", "9", "--model", EXAMPLE), ["node 7", "0 to 0"]),
        (("diff", "FILE"), ["B"]),
        (("trace", "FILE"), ["no trace", "mode trace"]),
        (("trace", "FILE", "FILE", "-o", "x.npz"), ["leave out OTHER"]),
        (("export", "FILE"), ["--csv"]),
        (("export", "FILE", "--csv", "/nowhere/x.csv"), ["/nowhere/x.csv", "folder"]),
        (("plot", "FILE"), ["-o"]),
        (("plot", "FILE", "-o", "/nowhere/x.png"), ["/nowhere/x.png", "folder"]),
        (("watch", "nowhere.jsonl"), ["nowhere.jsonl"]),
    ],
)
def test_bad_usage(shell: Shell, two_layers: Path, arguments: tuple[object, ...], words: list[str]) -> None:
    shell("telemetry", *(two_layers if a == "FILE" else a for a in arguments)).failed(*words)


# --- show ---------------------------------------------------------------------------------------------


def test_show(shell: Shell, two_layers: Path) -> None:
    first, second = shell.json("telemetry", "show", two_layers)["layers"]
    assert (first["name"], first["executor"], first["node"], first["epochs"]) == ("first", 1, 7, [0, 1])
    assert (first["rows"], first["routes"], first["distinct"], first["dead"]) == (16, 16, 4, [])
    assert first["top"][0] == {"expert": 1, "share": 0.5}
    assert (second["entropy_bits"], second["max_over_mean"], second["variation"]) == (2, 1, 0)
    table = shell("telemetry", "show", two_layers).succeeded().out
    for word in ("first", "second", "0–1", "4/4", "2.00/2.00", "1 50.0%"):
        assert word in table


def test_show_chooses_windows_and_layers(shell: Shell, two_layers: Path) -> None:
    def rows(*options: object) -> list[int]:
        return [layer["rows"] for layer in shell.json("telemetry", "show", two_layers, *options)["layers"]]

    assert rows("--window", "last") == [8, 20]
    assert rows("--window", 0) == [8, 20]
    assert rows("--window", 1) == [8]
    assert rows("--node", 8) == [20]


def test_show_of_a_bitmap_and_of_a_saturated_record(shell: Shell, tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "r.jsonl",
        snapshot([1, 0, 0], mode="bitmap"),
        snapshot([2**63 - 1, 2**63 - 1, 0], node=8),
        snapshot([0, 0, 0], node=9, executor=None),
    )
    private, seen, full = shell.json("telemetry", "show", path)["layers"]
    assert (seen["distinct"], seen["dead"], seen["entropy_bits"], seen["top"]) == (1, [1, 2], None, [])
    assert (full["saturated"], full["rows"], full["entropy_bits"]) == (True, 2**63 - 1, 1)
    assert (private["executor"], private["distinct"]) == (None, 0)
    table = shell("telemetry", "show", path).succeeded().out
    assert f"{2**63 - 1:,}+" in table
    assert "1/node 8" in table


def test_executors_are_merged_on_demand(shell: Shell, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 2]), snapshot([3, 4], executor=2))
    assert len(shell.json("telemetry", "show", path)["layers"]) == 2
    (layer,) = shell.json("telemetry", "show", path, "--merge")["layers"]
    assert (layer["executor"], layer["rows"]) == (None, 10)


def test_names_are_text(shell: Shell, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 2]), names={7: "[red]a\x1b[31m"})
    out = shell("telemetry", "show", path).succeeded().out
    assert "[red]a" in out
    assert "\x1b" not in out


# --- plan and cache -----------------------------------------------------------------------------------


def test_plan(shell: Shell, two_layers: Path) -> None:
    planned = shell.json("telemetry", "plan", two_layers, "--gpus", 2, "--window", "0")
    first, second = planned["layers"]
    assert (first["balance"], first["in_order"], first["bound"]) == (1, 1, 1)
    assert sorted(map(sorted, first["gpus"])) in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])
    assert (first["loads"], first["replicas"], second["loads"]) == ([4, 4], [1, 1, 1, 1], [10, 10])
    assert planned["total"] == {"balance": 1, "in_order": 1, "bound": 1}


def test_plan_with_copies(shell: Shell, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([90, 10, 10, 10]))
    table = shell("telemetry", "plan", path, "--gpus", 4, "--redundant", 4).succeeded().out
    assert "0 ×4, 1 ×2" in table
    assert "3.000 times with experts in order" in table


def test_plan_judged_by_another_recording(shell: Shell, tmp_path: Path) -> None:
    made_for = write_records(tmp_path / "a.jsonl", snapshot([3, 3, 1, 1]))
    later = write_records(tmp_path / "b.jsonl", snapshot([1, 1, 3, 3]), snapshot([1, 1], node=8))
    options = ("--gpus", 2, "--judged-by")
    (layer,) = shell.json("telemetry", "plan", made_for, *options, later)["layers"]
    assert (layer["balance"], layer["judged"]) == (1, 1)
    shifted = write_records(tmp_path / "c.jsonl", snapshot([8, 0, 0, 0]))
    (layer,) = shell.json("telemetry", "plan", made_for, *options, shifted)["layers"]
    assert (layer["balance"], layer["judged"]) == (1, 2)
    assert "(2.000 times as judged)" in shell("telemetry", "plan", made_for, *options, shifted).succeeded().out
    shell("telemetry", "plan", later, *options, made_for).failed("a.jsonl", "no layer node 8 of 2 experts")


def test_cache(shell: Shell, two_layers: Path) -> None:
    found = shell.json("telemetry", "cache", two_layers, "--bytes", "1KiB", "--expert-bytes", 512)
    assert (found["budget"], found["bytes"]) == (1024, 1024)
    first, second = found["layers"]
    assert (first["resident"], first["hit_rate"], first["uniform"], first["best"]) == ([1], 0.5, 0.25, 0.5)
    assert (second["resident"], second["hit_rate"]) == ([0], 0.25)
    assert found["hit_rate"] == found["best"] == pytest.approx(13 / 36)
    table = shell("telemetry", "cache", two_layers, "--bytes", "1.5kB", "--expert-bytes", "0.5 KB").succeeded().out
    for word in ("3/8", "all", "50.0%", "38.9%"):
        assert word in table


def test_cache_chosen_from_another_recording(shell: Shell, two_layers: Path, tmp_path: Path) -> None:
    other = write_records(tmp_path / "r.jsonl", snapshot([0, 0, 0, 9]), snapshot([0, 9, 0, 0], node=8))
    found = shell.json(
        "telemetry", "cache", two_layers, "--bytes", 2, "--expert-bytes", 1, "--chosen-from", other, "--even"
    )
    assert [layer["resident"] for layer in found["layers"]] == [[3], [1]]
    assert found["hit_rate"] < found["best"]
    lacking = write_records(tmp_path / "s.jsonl", snapshot([0, 0, 0, 9]))
    shell("telemetry", "cache", two_layers, "--bytes", 2, "--expert-bytes", 1, "--chosen-from", lacking).failed(
        "s.jsonl", "no layer second of 4 experts"
    )


def test_cache_takes_sizes_from_a_model(shell: Shell, tmp_path: Path) -> None:
    model = model_of(build(Recipe()), tmp_path / "m.onnx")
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 2, 3, 4], node=0))
    (layer,) = shell.json("telemetry", "cache", path, "--bytes", "1 GB", "--model", model)["layers"]
    (node,) = shell.json("inspect", model)["nodes"]
    assert (layer["expert_bytes"] * 4, layer["hit_rate"]) == (node["bytes"], 1)
    wide = write_records(tmp_path / "w.jsonl", snapshot([1] * 5, node=0))
    shell("telemetry", "cache", wide, "--bytes", 9, "--model", model).failed("4 experts", "5")


@pytest.mark.parametrize("command", [("plan", "--gpus", 2), ("cache", "--bytes", 9, "--expert-bytes", 1)])
def test_counts_are_needed(shell: Shell, tmp_path: Path, command: tuple[object, ...]) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 0], mode="bitmap"))
    shell("telemetry", command[0], path, *command[1:]).failed("node 7", "no counts", "mode counts or trace")


def test_nothing_recorded_yet(shell: Shell, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([0, 0]))
    assert shell.json("telemetry", "plan", path, "--gpus", 2)["total"]["balance"] == 1
    assert shell.json("telemetry", "cache", path, "--bytes", 1, "--expert-bytes", 1)["hit_rate"] is None


# --- diff and trace -----------------------------------------------------------------------------------


def test_diff_of_a_file_with_itself_is_empty(shell: Shell, two_layers: Path) -> None:
    found = shell.json("telemetry", "diff", two_layers, two_layers)
    assert (found["compared"], found["layers"], found["only_in_a"], found["only_in_b"]) == (2, [], [], [])
    assert shell("telemetry", "diff", two_layers, two_layers).succeeded().out == "0 of 2 layers differ\n"


def test_diff_of_windows(shell: Shell, two_layers: Path) -> None:
    options = ("--window-a", 0, "--window-b", 1)
    found = shell.json("telemetry", "diff", two_layers, two_layers, *options)
    (layer,) = found["layers"]
    assert (layer["moved"], layer["appeared"], layer["vanished"], layer["changed_experts"]) == (1, [1], [0, 2, 3], 4)
    assert layer["experts"][0] == {"expert": 1, "before": 0, "after": 1}
    assert (found["only_in_a"], found["only_in_b"]) == (["second"], [])
    text = shell("telemetry", "diff", two_layers, two_layers, *options).succeeded().out
    for word in ("100.0%", "1/3", "1 0.0%→100.0%", "1 of 1 layers differ", "only in A: second"):
        assert word in text


def test_trace(shell: Shell, tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "r.jsonl",
        traced([[0, 1], [2, 3]]),
        traced([[2, 3], [4, 5]], lost=[[0, 1]]),
        traced([[6, 7]], node=8),
    )
    first, second = shell.json("telemetry", "trace", path, "--rows", 2)["layers"]
    assert (first["recorded_rows"], first["rows"], first["experts"]) == (3, [1, 2], [[2, 3], [4, 5]])
    assert (second["rows"], second["margins"]) == ([0], None)
    assert "4 5" in shell("telemetry", "trace", path).succeeded().out
    shell("telemetry", "trace", path, "-o", tmp_path / "t.npz").succeeded()
    with np.load(tmp_path / "t.npz") as arrays:
        assert sorted(arrays) == ["e1_n7_experts", "e1_n7_rows", "e1_n8_experts", "e1_n8_rows"]
        assert arrays["e1_n7_rows"].tolist() == [0, 1, 2]
        assert arrays["e1_n7_experts"].tolist() == [[0, 1], [2, 3], [4, 5]]
    shell("telemetry", "trace", path, "--window", 5).failed("window 5")


def test_trace_with_margins(shell: Shell, tmp_path: Path) -> None:
    kept = {**traced([[0, 1], [2, 3]]).to_dict(), "margins": [0.5, None]}
    path = write_records(tmp_path / "r.jsonl", TelemetrySnapshot.from_dict(kept))
    assert shell.json("telemetry", "trace", path)["layers"][0]["margins"] == [0.5, None]
    assert "0.5" in shell("telemetry", "trace", path).succeeded().out
    other = write_records(tmp_path / "b.jsonl", traced([[0, 1], [2, 4]]))
    (layer,) = shell.json("telemetry", "trace", path, other)["layers"]
    assert (layer["row"], layer["margin_a"], layer["margin_b"]) == (1, None, None)
    shell("telemetry", "trace", path, "-o", tmp_path / "t.npz").succeeded()
    with np.load(tmp_path / "t.npz") as arrays:
        np.testing.assert_array_equal(arrays["e1_n7_margins"], np.array([0.5, np.nan], np.float32))


def test_where_traces_part(shell: Shell, tmp_path: Path) -> None:
    first = write_records(tmp_path / "a.jsonl", traced([[0, 1], [2, 3]]), traced([[0, 1], [4, 5]], node=8))
    second = write_records(tmp_path / "b.jsonl", traced([[0, 1], [3, 2]]), traced([[0, 1], [4, 6]], node=8))
    assert "agree in every row" in shell("telemetry", "trace", first, first).succeeded().out
    seven, eight = shell.json("telemetry", "trace", first, second)["layers"]
    assert (seven["row"], seven["a"], seven["b"], seven["same_set"]) == (1, [2, 3], [3, 2], True)
    assert (eight["row"], eight["same_set"], eight["margin_a"]) == (1, False, None)
    assert "part at row 1, in layer node 7" in shell("telemetry", "trace", first, second).succeeded().out
    unordered = shell("telemetry", "trace", first, second, "--ignore-order").succeeded().out
    assert "part at row 1, in layer node 8" in unordered
    apart = write_records(tmp_path / "c.jsonl", traced([[0, 1]], node=9))
    shell("telemetry", "trace", first, apart).failed("no layer in common")


# --- export -------------------------------------------------------------------------------------------


def test_export(shell: Shell, two_layers: Path, tmp_path: Path) -> None:
    table, arrays = tmp_path / "r.csv", tmp_path / "r.npz"
    out = shell("telemetry", "export", two_layers, "--csv", table, "--npz", arrays).succeeded().out
    assert out.count("4 records of 2 layers") == 2
    with table.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == 2 + 3 + 4 + 1
    assert {(line["name"], line["epoch"], line["expert"], line["count"]) for line in lines} >= {
        ("first", "1", "1", "8")
    }
    with np.load(arrays) as stored:
        assert stored["e1_n7_counts"].tolist() == [[1, 0, 1, 0], [4, 0, 2, 2], [0, 8, 0, 0]]
        assert stored["e1_n7_epoch"].tolist() == [0, 0, 1]
        assert stored["e1_n8_unix_time"].tolist() == [1001]


def test_export_of_bitmaps_and_of_changing_sizes(shell: Shell, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 0], mode="bitmap", executor=None))
    shell("telemetry", "export", path, "--csv", tmp_path / "r.csv", "--npz", tmp_path / "r.npz").succeeded()
    with np.load(tmp_path / "r.npz") as stored:
        assert stored["n7_seen"].tolist() == [[True, False]]
    assert (tmp_path / "r.csv").read_text().splitlines()[1].endswith(",0,")
    changing = write_records(tmp_path / "c.jsonl", snapshot([1, 0]), snapshot([1, 0, 0], epoch=1))
    shell("telemetry", "export", changing, "--npz", tmp_path / "c.npz").failed("different numbers of experts", "CSV")
    assert not (tmp_path / "c.npz").exists()


# --- plot ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (3, 4), (60, 256)])
def test_plot(shell: Shell, tmp_path: Path, layers: int, experts: int) -> None:
    pytest.importorskip("matplotlib")
    counts = np.random.default_rng(0).integers(0, 9, (3, layers, experts)).cumsum(axis=0)
    snapshots = [
        snapshot(counts[step, node].tolist(), node=node, unix_time=1e9 + step)
        for step in range(3)
        for node in range(layers)
    ]
    path = write_records(tmp_path / "r.jsonl", *snapshots, names={0: "$odd_$"})
    assert f"{layers} layers" in shell("telemetry", "plot", path, "-o", tmp_path / "p.png").succeeded().out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    shell("telemetry", "plot", path, "-o", tmp_path / "p.jpeg2").failed("p.jpeg2", "png")


def test_plot_of_one_record(shell: Shell, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 0, 4]), snapshot([0, 0], node=8))
    shell("telemetry", "plot", path, "-o", tmp_path / "p.svg").succeeded()
    text = (tmp_path / "p.svg").read_text()
    assert "needs at least two records of a layer" in text
    assert "node 8" in text


def test_plot_without_matplotlib(
    shell: Shell, two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    shell("telemetry", "plot", two_layers, "-o", tmp_path / "p.png").failed("Matplotlib", "qmoe-ep[telemetry]")


def test_plot_of_a_bitmap(shell: Shell, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", snapshot([1, 0], mode="bitmap"))
    shell("telemetry", "plot", path, "-o", tmp_path / "p.png").failed("no layer has counts")
