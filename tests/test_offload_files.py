"""Files that change under a paged kernel: errors that name file, tensor and sizes, and never a crash."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from paged import PagedFile, call_inputs, packed_bytes, routed, store, two_of_four
from problems import Array, Recipe, build

from qmoe_ep import CpuExecutionProvider, QMoEError
from qmoe_ep.cpu.kernel import CpuKernel
from qmoe_ep.cpu.mapped import MappedFile

PROBLEM = two_of_four(biases=(True, True, True))
INPUTS = routed(PROBLEM, [0, 3])


@pytest.fixture
def stored(tmp_path: Path) -> PagedFile:
    return store(PROBLEM, tmp_path)


def paged(stored: PagedFile) -> CpuKernel:
    kernel = stored.kernel(CpuExecutionProvider(weight_offload=True))
    assert kernel.paged
    return kernel


def refused(kernel: CpuKernel, *words: str) -> None:
    """A call fails with all the words and leaves its output alone."""
    output = np.full((2, 64), 7, np.float32)
    with pytest.raises(QMoEError) as raised:
        kernel.execute(INPUTS, [output])
    for word in words:
        assert word in str(raised.value)
    assert (output == 7).all()


def test_truncated_before_the_kernel_is_made(stored: PagedFile) -> None:
    initializers = stored.map()
    size = stored.path.stat().st_size
    os.truncate(stored.path, 1000)
    for offload in (True, False):
        with pytest.raises(QMoEError) as raised:
            CpuExecutionProvider(weight_offload=offload).create_kernel(PROBLEM.node, 0, initializers)
        for word in ("fc1_experts_weights", str(stored.path), "the file has 1000"):
            assert word in str(raised.value)
    os.truncate(stored.path, size)


@pytest.mark.parametrize("size", [0, 1, 4096, 10**6])
def test_truncated_or_grown_after_the_kernel_was_made(stored: PagedFile, size: int) -> None:
    kernel, before = paged(stored), stored.path.stat().st_size
    kernel(*INPUTS)
    os.truncate(stored.path, size)
    refused(kernel, str(stored.path), "fc1_experts_weights", f"had {before} bytes", f"has {size} now")


def test_truncated_during_a_call(stored: PagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = paged(stored)
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=10**6)
    cached = stored.kernel(provider)
    cached(*INPUTS)
    check = MappedFile.check
    size = stored.path.stat().st_size

    def check_and_truncate(self: MappedFile, tensor: str) -> None:
        check(self, tensor)
        os.truncate(stored.path, 100)

    with monkeypatch.context() as patch:
        patch.setattr(MappedFile, "check", check_and_truncate)
        refused(kernel, str(stored.path), "fc1_experts_weights", "the file ends after", f"{size} when it was opened")
        os.truncate(stored.path, size)
        patch.setattr(MappedFile, "check", lambda *_: os.truncate(stored.path, 100))
        refused(cached, "the file ends after")
    stats = provider.offload_stats()
    assert stats is not None
    assert (stats.cache_bytes_owned, stats.layer_executions) == (0, 1)


def test_replaced(stored: PagedFile, tmp_path: Path) -> None:
    kernel = paged(stored)
    other = tmp_path / "other.bin"
    other.write_bytes(b"\1" * 123)
    os.replace(other, stored.path)
    refused(kernel, str(stored.path), "fc1_experts_weights", "123 bytes")


def test_replaced_before_the_kernel_is_made(stored: PagedFile, tmp_path: Path) -> None:
    initializers = stored.map()
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(stored.path.stat().st_size))
    os.replace(other, stored.path)
    with pytest.raises(QMoEError, match="isn't the one that was mapped"):
        CpuExecutionProvider(weight_offload=True).create_kernel(PROBLEM.node, 0, initializers)


def test_rewritten_in_place(stored: PagedFile) -> None:
    kernel = paged(stored)
    status = stored.path.stat()
    with stored.path.open("r+b") as file:
        file.write(b"\0")
    os.utime(stored.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    refused(kernel, str(stored.path), "fc1_experts_weights", "was written to")


def test_removed(stored: PagedFile) -> None:
    kernel, gone = paged(stored), stored.map()
    expected = kernel(*INPUTS)
    stored.path.unlink()
    assert kernel(*INPUTS).tobytes() == expected.tobytes()
    for offload in (True, False):
        late = CpuExecutionProvider(weight_offload=offload).create_kernel(PROBLEM.node, 0, gone)
        assert not late.paged
        assert late(*INPUTS).tobytes() == expected.tobytes()


def test_reading_fails(stored: PagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = paged(stored)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    refused(kernel, str(stored.path), "fc1_experts_weights", "Input/output error")


def test_short_reads_go_on(stored: PagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = paged(stored)
    expected = kernel(*INPUTS)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:100]], offset))
    assert kernel(*INPUTS).tobytes() == expected.tobytes()


def test_no_reading_at_an_offset(stored: PagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = paged(stored)(*INPUTS)
    monkeypatch.delattr(os, "preadv")
    kernel = stored.kernel(CpuExecutionProvider(weight_offload=True))
    assert not kernel.paged
    assert kernel(*INPUTS).tobytes() == expected.tobytes()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_not_readable(stored: PagedFile) -> None:
    initializers = stored.map()
    stored.path.chmod(0)
    with pytest.raises(QMoEError, match="can't be opened"):
        CpuExecutionProvider(weight_offload=True).create_kernel(PROBLEM.node, 0, initializers)


def test_without_paging_the_file_is_not_needed_any_more(stored: PagedFile) -> None:
    kernel = stored.kernel(CpuExecutionProvider())
    expected = kernel(*INPUTS)
    os.truncate(stored.path, 0)
    assert kernel(*INPUTS).tobytes() == expected.tobytes()


def test_strided_experts_of_a_resident_kernel(tmp_path: Path) -> None:
    problem = build(Recipe(experts=3))
    initializers: dict[int, Array] = {}
    for index, array in enumerate(problem.inputs):
        if array is not None and index >= 2:
            path = tmp_path / f"{index}.bin"
            path.write_bytes(np.flip(array, 1).tobytes())
            mapped = np.memmap(path, np.uint8, "r").view(array.dtype).reshape(array.shape)
            initializers[index] = np.flip(mapped, 1)
    kernel = CpuExecutionProvider().create_kernel(problem.node, 0, initializers)
    for index in initializers:
        os.truncate(tmp_path / f"{index}.bin", 0)
    problem.check_closely(kernel(*call_inputs(problem)))


def test_strided_tensors_are_checked_against_the_file(tmp_path: Path) -> None:
    problem = build(Recipe(experts=3))
    weights = problem.inputs[2]
    assert weights is not None
    path = tmp_path / "weights.bin"
    path.write_bytes(weights.tobytes())
    mapped = np.flip(np.memmap(path, np.uint8, "r").reshape(weights.shape), 1)
    os.truncate(path, 10)
    initializers = {i: a for i, a in enumerate(problem.inputs) if a is not None and i >= 2}
    with pytest.raises(QMoEError, match=r"fc1_experts_weights in .*weights\.bin: .* the file has 10"):
        CpuExecutionProvider().create_kernel(problem.node, 0, {**initializers, 2: mapped})


def test_one_descriptor_per_file(stored: PagedFile) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    provider = CpuExecutionProvider(weight_offload=True)
    initializers = [stored.map() for _ in range(3)]
    mapped = descriptors()
    kernels = [provider.create_kernel(PROBLEM.node, i, weights) for i, weights in enumerate(initializers)]
    assert descriptors() == mapped + 1
    del kernels, initializers
    assert descriptors() == before


def test_a_copy_is_another_file(stored: PagedFile, tmp_path: Path) -> None:
    copy = tmp_path / "copy.bin"
    shutil.copy(stored.path, copy)
    provider = CpuExecutionProvider(weight_offload=True, host_cache_bytes=10**6)
    for path in (stored.path, copy):
        kernel = PagedFile(PROBLEM, path, stored.offsets).kernel(provider)
        for _ in range(2):
            kernel(*routed(PROBLEM, [2]))
    stats = provider.offload_stats()
    assert stats is not None
    assert (stats.cache_misses, stats.bytes_read) == (4, 4 * packed_bytes(PROBLEM))
