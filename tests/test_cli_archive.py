"""Arrays in .npz files: what is written is read back, and nothing in a bad file is believed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from problems import DTYPES, Array

from qmoe_ep.cli.archive import ArrayArchive, write_archive
from qmoe_ep.errors import QMoEError

BFLOAT16 = DTYPES["bfloat16"]


def npy(array: Array) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def header(shape: str, dtype: str = "<f4") -> bytes:
    """The head of an .npy file that may say anything."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def archive_of(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@given(
    arrays.arrays(
        st.sampled_from([np.dtype(t) for t in ("?", "u1", "<i8", ">i4", "<f2", "<f4", "<f8", "<c8")]),
        arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    st.booleans(),
)
def test_reads_what_numpy_writes(tmp_path_factory: pytest.TempPathFactory, array: Array, compressed: bool) -> None:
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    (np.savez_compressed if compressed else np.savez)(path, plain=array, turned=array.T, fortran=array.copy("F"))
    archive = ArrayArchive(path)
    for name, expected in (("plain", array), ("turned", array.T), ("fortran", array)):
        actual = archive.read(name)
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(actual, expected)


def test_bfloat16_is_stored_as_bits(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0], [np.nan, 3e38]], np.float32).astype(BFLOAT16)
    write_archive(tmp_path / "a.npz", {"x": values, "file": np.arange(3)})
    with np.load(tmp_path / "a.npz", allow_pickle=False) as data:
        assert data["x"].dtype == np.uint16
        np.testing.assert_array_equal(data["file"], np.arange(3))
    back = ArrayArchive(tmp_path / "a.npz").read("x", BFLOAT16)
    assert back.dtype == BFLOAT16
    np.testing.assert_array_equal(back.view(np.uint16), values.view(np.uint16))


def test_another_type_is_refused(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.npz", {"x": np.zeros(3, np.float32)})
    archive = ArrayArchive(tmp_path / "a.npz")
    with pytest.raises(QMoEError, match=r"'x': expected float16, got float32"):
        archive.read("x", np.dtype(np.float16))
    with pytest.raises(QMoEError, match=r"'x': expected uint16 \(the bits of bfloat16\), got float32"):
        archive.read("x", BFLOAT16)


def test_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match=r"[Oo]bject"):
        write_archive(path, {"good": np.zeros(3), "bad": np.array([object()])})
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a.npz"]
    write_archive(path, {"good": np.zeros(3)})
    assert path.stat().st_mode & 0o400
    assert os.listdir(tmp_path) == ["a.npz"]


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("unpickled",)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = archive_of(tmp_path / "a.npz", {"x.npy": header("(1,)", "|O") + pickle.dumps(Bomb())})
    with pytest.raises(QMoEError, match=r"'x' is pickled \(dtype object\), which is never read"):
        ArrayArchive(path)
    assert not Path("unpickled").exists()


HUGE = 2**60
BAD = {
    "huge": ({"x.npy": header(f"({HUGE},)") + b"1234"}, f"needs {4 * HUGE} bytes, the file has 4"),
    "short": ({"x.npy": npy(np.zeros(8, np.float32))[:-4]}, "needs 32 bytes, the file has 28"),
    "long": ({"x.npy": npy(np.zeros(8, np.float32)) + b"1234"}, "needs 32 bytes, the file has 36"),
    "negative": ({"x.npy": header("(-1, -4)") + b"1" * 16}, "negative dimension"),
    "zero among huge": ({"x.npy": header(f"(0, {HUGE}, {HUGE})")}, "is too large"),
    "not an array": ({"readme.txt": b"hello"}, "'readme.txt' is not an array"),
    "no header": ({"x.npy": b"hello"}, "its header can't be read"),
    "empty": ({"x.npy": b""}, "its header can't be read"),
    "version": ({"x.npy": b"\x93NUMPY\x09\x00" + b" " * 64}, "its header can't be read"),
    "code in the header": ({"x.npy": header("__import__('os').getcwd()")}, "its header can't be read"),
    "text": ({"x.npy": npy(np.array(["a"]))}, "expected numbers"),
    "structured": ({"x.npy": npy(np.zeros(2, "f4,f4"))}, "expected numbers"),
    "raw bfloat16": ({"x.npy": header("(2,)", "|V2") + b"1234"}, r"store bfloat16 as array.view\(numpy.uint16\)"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_bad_members(tmp_path: Path, case: str, compression: int) -> None:
    members, message = BAD[case]
    with pytest.raises(QMoEError, match=message):
        ArrayArchive(archive_of(tmp_path / "a.npz", members, compression)).read("x")


def test_what_is_no_file() -> None:
    with pytest.raises(QMoEError, match="not a file"):
        ArrayArchive(os.devnull)


def test_the_same_name_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy(np.zeros(1)))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", npy(np.zeros(1)))
    with pytest.raises(QMoEError, match="'x' is there twice"):
        ArrayArchive(tmp_path / "a.npz")


def test_sizes_that_the_archive_invents(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a.npz", {"x.npy": npy(np.zeros(8, np.float32))})
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    struct.pack_into("<L", data, entry + 24, 0x7FFFFFFF)
    path.write_bytes(data)
    with pytest.raises(QMoEError, match="claims more bytes than the archive has"):
        ArrayArchive(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_any_damage_is_a_clear_error(tmp_path: Path, compression: int) -> None:
    """Each byte turned over, and each prefix: the right arrays or a QMoEError, never another exception."""
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    good = archive_of(tmp_path / "good.npz", {"x.npy": npy(expected)}, compression).read_bytes()
    path = tmp_path / "bad.npz"
    for position in range(len(good)):
        for bad in (good[:position], good[:position] + bytes([good[position] ^ 0xFF]) + good[position + 1 :]):
            path.write_bytes(bad)
            try:
                archive = ArrayArchive(path)
                actual = {name: archive.read(name) for name in archive.arrays}
            except QMoEError:
                continue
            for array in actual.values():
                np.testing.assert_array_equal(array, expected)
