"""The package as something to install: quick to import, typed, complete as a wheel."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import qmoe_ep

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "qmoe_ep"


def in_new_process(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def test_import_is_quick() -> None:
    timed = "import time; t = time.perf_counter(); import qmoe_ep; print(time.perf_counter() - t)"
    assert min(float(in_new_process(timed)) for _ in range(3)) <= 0.3


@pytest.mark.parametrize("use", ["", "qmoe_ep.QMoENode", "qmoe_ep.CpuExecutionProvider()", "qmoe_ep.reference.qmoe"])
def test_import_needs_no_gpu(use: str) -> None:
    loaded = in_new_process(f"import sys, qmoe_ep; {use}\nprint(*sys.modules)").split()
    assert not {name for name in loaded if name == "cuda" or name.startswith(("cuda.", "onnxruntime", "click"))}


def test_the_torch_extra_is_named_where_it_is_missing() -> None:
    code = """
import sys
sys.modules["torch"] = None
import qmoe_ep
try:
    qmoe_ep.torch
except ImportError as error:
    print(error)
"""
    assert "pip install 'qmoe-ep[torch]'" in in_new_process(code)


def test_help_imports_no_command() -> None:
    code = "import sys; from qmoe_ep.cli.main import main; main(['--help'])\nprint(*sys.modules)"
    loaded = in_new_process(code).splitlines()[-1].split()
    assert not {"numpy", "onnx", "rich", "qmoe_ep.cli.run"} & set(loaded)


@pytest.mark.parametrize("name", qmoe_ep.__all__)
def test_public_names_exist(name: str) -> None:
    assert name in dir(qmoe_ep)
    assert getattr(qmoe_ep, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = qmoe_ep.nonsense


def test_version_is_that_of_the_installation() -> None:
    try:
        installed = metadata.version("qmoe-ep")
    except metadata.PackageNotFoundError:
        pytest.skip("qmoe-ep is not installed here")
    assert installed == qmoe_ep.__version__


def test_wheel_is_complete(tmp_path: Path) -> None:
    """Device code is data to the wheel; it must not be forgotten."""
    if importlib.util.find_spec("build") is None or int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs build and setuptools 77 or newer")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "qmoe_ep", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", "dist"]
    built = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("qmoe_ep/")}
    sources = {p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*") if p.suffix in (".py", ".cu", ".cuh")}
    assert any(name.endswith(".cuh") for name in sources)
    assert inside == sources | {"qmoe_ep/py.typed"}
