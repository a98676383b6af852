"""Compiling with the real compiler, and the module cache in memory and on disk."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from simulated.plugin import Simulation
from simulated.toys import fill_step

from qmoe_ep import includes, module_store, nvrtc_cache
from qmoe_ep.errors import CudaError, NvrtcError
from qmoe_ep.includes import find_cuda_headers, resolve_includes
from qmoe_ep.kernels.plan import ModuleSource
from qmoe_ep.module_store import ModuleStore
from qmoe_ep.nvrtc_cache import CompiledModule, ModuleCache, choose_arch, compile_module, compile_modules
from qmoe_ep.runtime import Runtime

F32 = ModuleSource("toy_f32", 'extern "C" __global__ void toy_f32(float* a) { a[threadIdx.x] *= 2.0f; }', ("toy_f32",))
HALF = ModuleSource(
    "toy_half",
    """#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void toy_half(__half* a, __nv_bfloat16* b) {
    a[threadIdx.x] = __float2half(__bfloat162float(b[threadIdx.x]));
}
""",
    ("toy_half",),
)
SHARED = ModuleSource(
    "toy_shared",
    """extern "C" __global__ void toy_shared(float* a) {
    __shared__ float tile[256];
    tile[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    a[threadIdx.x] = tile[255 - threadIdx.x];
}
extern "C" __global__ void toy_local(float* a, int n) {
    float local[64];
    for (int i = 0; i < 64; ++i) local[i] = a[i];
    for (int i = 0; i < n; ++i) local[(i * 7) & 63] += local[i & 63];
    for (int i = 0; i < 64; ++i) a[i] = local[i];
}
""",
    ("toy_shared", "toy_local"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, not yet created, and nothing compiled in memory."""
    folder = tmp_path / "modules"
    monkeypatch.setenv("QMOE_EP_CACHE_DIR", str(folder))
    monkeypatch.delenv("QMOE_EP_CACHE_DISABLE", raising=False)
    nvrtc_cache.clear_compiled()
    return folder


def compile_anew(module: ModuleSource = F32, arch: str = "sm_80") -> CompiledModule:
    """Compile as another process would."""
    nvrtc_cache.clear_compiled()
    return compile_module(module, arch)


class TestCompiling:
    @pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100"])
    @pytest.mark.parametrize("module", [F32, HALF], ids=["f32", "half"])
    def test_every_architecture(self, folder: Path, module: ModuleSource, arch: str) -> None:
        compiled = compile_module(module, arch)
        assert compiled.cubin.startswith(b"\x7fELF")
        assert compiled.origin == "compiled"
        (report,) = compiled.report()
        assert report.entry == module.name
        assert 0 < report.registers < 64
        assert (report.spill_store_bytes, report.spill_load_bytes, report.shared_bytes) == (0, 0, 0)

    def test_report(self, folder: Path) -> None:
        local, shared = compile_module(SHARED, "sm_80").report()
        assert (local.entry, local.stack_bytes, local.shared_bytes) == ("toy_local", 256, 0)
        assert (shared.entry, shared.stack_bytes, shared.shared_bytes) == ("toy_shared", 0, 1024)
        assert compile_anew(SHARED).report() == (local, shared)

    def test_a_failure_carries_log_and_options(self, folder: Path) -> None:
        module = ModuleSource(
            "toy_bad", 'extern "C" __global__ void toy_bad() { missing(); }', ("toy_bad",), ("-DX=1",)
        )
        with pytest.raises(NvrtcError, match='identifier "missing" is undefined') as caught:
            compile_module(module, "sm_80")
        assert "toy_bad.cu(1)" in caught.value.log
        assert "--gpu-architecture=sm_80" in caught.value.options
        assert "-DX=1" in caught.value.options
        assert not list(folder.glob("*"))

    def test_an_unknown_architecture(self, folder: Path) -> None:
        with pytest.raises(NvrtcError, match="sm_12"):
            compile_module(F32, "sm_12")

    def test_no_fast_math(self) -> None:
        assert not any("fast" in option for option in nvrtc_cache.OPTIONS)

    def test_several_at_once(self, folder: Path) -> None:
        modules = (F32, HALF, SHARED)
        assert [compiled.name for compiled in compile_modules(modules, "sm_80")] == [module.name for module in modules]
        assert compile_modules((), "sm_80") == ()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 8), "sm_87"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 1), "sm_120"),
    ],
)
def test_architecture_of_a_device(capability: tuple[int, int], expected: str) -> None:
    assert choose_arch(capability, (75, 80, 86, 87, 90, 100, 120)) == expected


def test_a_device_too_new_for_the_compiler() -> None:
    with pytest.raises(NvrtcError, match=r"13\.0: install a newer nvidia-cuda-nvrtc"):
        choose_arch((13, 0), (75, 90, 120))


class TestIncludes:
    def test_own_files_come_from_the_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\n#include <cuda_fp16.h>\n')
        (tmp_path / "inner.cuh").write_text("constexpr int kInner = 3;\n")
        monkeypatch.setattr(includes.importlib.resources, "files", lambda package: tmp_path)
        found = resolve_includes(ModuleSource("toy", '#include "outer.cuh"\n', ()))
        assert sorted(found.texts) == ["inner.cuh", "outer.cuh"]
        assert found.system == ("cuda_fp16.h",)
        assert found.system_digest
        source = '#include "outer.cuh"\nextern "C" __global__ void toy(int* a) { *a = kInner; }'
        first = compile_module(ModuleSource("toy_included", source, ("toy",)), "sm_80")
        assert b"toy" in first.cubin

    @pytest.mark.parametrize("name", ["absent.cuh", "../errors.py"])
    def test_a_file_that_the_package_lacks(self, name: str) -> None:
        with pytest.raises(NvrtcError, match="not among the package's kernels"):
            resolve_includes(ModuleSource("toy", f'#include "{name}"\n', ()))

    def test_without_half_headers_f32_works_and_half_names_the_package(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(includes, "find_cuda_headers", lambda: None)
        assert compile_module(F32, "sm_80").cubin
        with pytest.raises(NvrtcError, match=r"cuda_bf16\.h, cuda_fp16\.h.*pip install nvidia-cuda-runtime"):
            compile_module(HALF, "sm_80")

    def test_a_toolkit_is_the_fallback(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "include").mkdir()
        for name in ("cuda_fp16.h", "cuda_bf16.h"):
            (tmp_path / "include" / name).write_text("")
        monkeypatch.setattr(includes, "_wheel_headers", lambda: None)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert find_cuda_headers() == tmp_path / "include"


class TestKeys:
    def test_each_part_matters(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def entries() -> int:
            return len(list(folder.glob("*.module")))

        compile_anew(F32)
        variants = [
            ModuleSource(F32.name, F32.source + "\n", F32.entries),
            ModuleSource("toy_f32_v2", F32.source, F32.entries),
            ModuleSource(F32.name, F32.source, (*F32.entries, "another")),
            ModuleSource(F32.name, F32.source, F32.entries, ("-DX=1",)),
        ]
        for number, variant in enumerate(variants, start=2):
            assert compile_anew(variant).origin == "compiled"
            assert entries() == number
        assert compile_anew(F32, "sm_86").origin == "compiled"
        monkeypatch.setattr(nvrtc_cache, "CACHE_VERSION", -1)
        assert compile_anew(F32).origin == "compiled"
        assert entries() == 7

    def test_an_include_matters(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(includes.importlib.resources, "files", lambda package: tmp_path)
        module = ModuleSource(
            "toy", '#include "value.cuh"\nextern "C" __global__ void toy(int* a) { *a = VALUE; }', ("toy",)
        )
        for value in (1, 2):
            (tmp_path / "value.cuh").write_text(f"#define VALUE {value}\n")
            assert compile_anew(module).origin == "compiled"
            assert compile_anew(module).origin == "disk"


class TestDisk:
    def test_the_second_process_reads(self, folder: Path) -> None:
        first, second = compile_anew(), compile_anew()
        assert (first.origin, second.origin) == ("compiled", "disk")
        assert (first.cubin, first.log) == (second.cubin, second.log)

    def test_modes(self, folder: Path) -> None:
        before = os.umask(0)
        try:
            compile_anew()
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == 0o700
        (entry,) = folder.iterdir()
        assert entry.stat().st_mode & 0o077 == 0

    def test_disabled(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("QMOE_EP_CACHE_DISABLE", "1")
        assert compile_anew().origin == compile_anew().origin == "compiled"
        assert not folder.exists()

    def test_the_users_cache_folder_is_the_default(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("QMOE_EP_CACHE_DIR", raising=False)
        monkeypatch.delenv("QMOE_EP_CACHE_DISABLE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        store = ModuleStore.default()
        assert store is not None
        assert store.folder == tmp_path / "qmoe_ep" / "modules"

    @pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "foreign"])
    def test_a_damaged_entry_is_compiled_again(self, folder: Path, damage: str) -> None:
        whole = compile_anew()
        (entry,) = folder.iterdir()
        data = bytearray(entry.read_bytes())
        if damage == "flipped":
            data[-1] ^= 1
        size = {"empty": 0, "truncated": len(data) // 2, "flipped": len(data), "foreign": 0}[damage]
        entry.write_bytes(bytes(data[:size]) or (b"not a module at all" if damage == "foreign" else b""))
        again = compile_anew()
        assert (again.origin, again.cubin) == ("compiled", whole.cubin)
        assert compile_anew().origin == "disk"

    def test_a_folder_that_others_may_write_to_is_not_used(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        compile_anew()
        for mode in (0o770, 0o707):
            folder.chmod(mode)
            assert compile_anew(F32).origin == "compiled"
        compile_anew(SHARED)
        assert len(list(folder.iterdir())) == 1
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "chmod 700" in record.getMessage()
        folder.chmod(0o700)
        assert compile_anew().origin == "disk"

    def test_an_entry_that_others_may_write_to_is_not_used(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        compile_anew()
        (entry,) = folder.iterdir()
        entry.chmod(0o666)
        assert compile_anew().origin == "compiled"
        assert len(caplog.records) == 1

    def test_a_folder_of_somebody_else_is_not_used(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compile_anew()
        owner = folder.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        if owner != 0:
            assert compile_anew().origin == "compiled"
        else:
            # What belongs to root can't have been put there by an equal.
            assert compile_anew().origin == "disk"

    @pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
    def test_a_read_only_or_full_disk_warns_once(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(tempfile, "mkstemp", refuse)
        for module in (F32, SHARED):
            assert compile_anew(module).origin == "compiled"
        (record,) = caplog.records
        assert "each process compiles anew" in record.getMessage()

    def test_a_disk_that_fills_up_leaves_nothing(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "replace", refuse)
        assert compile_anew().origin == "compiled"
        assert list(folder.iterdir()) == []

    def test_a_path_that_can_not_be_a_folder(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder.write_text("a file")
        folder.chmod(0o600)
        assert compile_anew().origin == "compiled"
        assert len(caplog.records) == 1

    def test_what_a_killed_writer_left_is_removed_in_time(self, folder: Path) -> None:
        compile_anew()
        old, young = folder / "qmoe_ep-old.partial", folder / "qmoe_ep-young.partial"
        for path in (old, young):
            path.write_bytes(b"half")
        os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
        compile_anew(SHARED)
        assert not old.exists()
        assert young.exists()


WRITER = """
import os, sys
from qmoe_ep.module_store import ModuleStore
from pathlib import Path
store = ModuleStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2])):
    store.save("shared", bytes([number % 251]) * 300_000, "log")
"""


def start_writer(folder: Path, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(rounds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


class TestProcesses:
    def test_two_racing_writers_never_leave_a_torn_entry(self, folder: Path) -> None:
        store = ModuleStore(folder)
        writers = [start_writer(folder, 60) for _ in range(2)]
        for writer in writers:
            go(writer)
        seen = 0
        while any(writer.poll() is None for writer in writers):
            if store.path("shared").exists():
                stored = store.load("shared")
                assert stored is not None
                assert stored.cubin == stored.cubin[:1] * 300_000
                seen += 1
        for writer in writers:
            writer.communicate()
            assert writer.returncode == 0
        assert seen
        assert [path.name for path in folder.iterdir()] == ["shared.module"]

    def test_a_killed_writer_leaves_the_entry_whole(self, folder: Path) -> None:
        store = ModuleStore(folder)
        for _ in range(3):
            writer = start_writer(folder, 1_000_000)
            go(writer)
            deadline = time.monotonic() + 20
            while not store.path("shared").exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.05)
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
            stored = store.load("shared")
            assert stored is not None
            assert stored.cubin == stored.cubin[:1] * 300_000

    def test_two_processes_compile_the_same_module(self, folder: Path) -> None:
        program = """
import sys
from qmoe_ep.nvrtc_cache import compile_module
from qmoe_ep.kernels.plan import ModuleSource
module = ModuleSource("toy_f32", sys.argv[1], ("toy_f32",))
print(len(compile_module(module, "sm_80").cubin))
"""
        command = [sys.executable, "-c", program, F32.source]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        sizes = {process.communicate()[0] for process in processes}
        assert len(sizes) == 1
        assert all(process.returncode == 0 for process in processes)
        assert compile_anew().origin == "disk"


class TestThreads:
    def test_one_compilation_serves_all(self, simulated: Simulation) -> None:
        simulated.nvrtc.delay_seconds = 0.1
        barrier = threading.Barrier(8)

        def ask(_: int) -> CompiledModule:
            barrier.wait()
            return compile_module(F32, "sm_80")

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(ask, range(8)))
        assert simulated.nvrtc.compilations == ["toy_f32"]
        assert all(result is results[0] for result in results)

    def test_a_failure_reaches_all_and_is_forgotten(self, simulated: Simulation) -> None:
        simulated.nvrtc.delay_seconds = 0.1
        simulated.fail("nvrtcCompileProgram")
        barrier = threading.Barrier(4)

        def ask(_: int) -> str:
            barrier.wait()
            try:
                return compile_module(F32, "sm_80").origin
            except NvrtcError as error:
                return type(error).__name__

        original = simulated.nvrtc.nvrtcCompileProgram

        def slow(*arguments: object) -> object:
            time.sleep(0.1)
            return original(*arguments)

        simulated.nvrtc.nvrtcCompileProgram = slow
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, range(4))) == ["NvrtcError"] * 4
        assert compile_module(F32, "sm_80").origin == "compiled"


class TestLoading:
    def test_a_module_is_loaded_once(self, simulated: Simulation) -> None:
        step = fill_step(4, 1.0)
        with Runtime() as runtime:
            cache = ModuleCache(runtime)
            cache.preload([step.module, step.module])
            functions = {id(cache.function(step.module, step.entry)) for _ in range(3)}
            assert len(functions) == 1
        counts = simulated.counts()
        assert (counts["cuModuleLoadData"], counts["cuModuleGetFunction"], counts["cuModuleUnload"]) == (1, 1, 1)

    def test_it_is_compiled_for_the_device(self, simulated: Simulation) -> None:
        with Runtime() as runtime:
            assert ModuleCache(runtime).arch == "sm_90a"
        simulated.attributes["COMPUTE_CAPABILITY_MAJOR"], simulated.attributes["COMPUTE_CAPABILITY_MINOR"] = 7, 5
        with Runtime() as runtime:
            assert ModuleCache(runtime).arch == "sm_75"

    def test_a_missing_entry(self, simulated: Simulation) -> None:
        with Runtime() as runtime, pytest.raises(CudaError, match="find kernel toy_absent in module toy_fill_v1"):
            ModuleCache(runtime).function(fill_step(4, 1.0).module, "toy_absent")

    def test_a_refused_binary_is_tried_again(self, simulated: Simulation) -> None:
        step = fill_step(4, 1.0)
        with Runtime() as runtime:
            cache = ModuleCache(runtime)
            simulated.fail("cuModuleLoadData")
            with pytest.raises(CudaError, match="load module toy_fill_v1"):
                cache.function(step.module, step.entry)
            assert cache.function(step.module, step.entry).entry == "toy_fill"

    def test_two_threads_load_one_module(self, simulated: Simulation) -> None:
        step = fill_step(4, 1.0)
        simulated.nvrtc.delay_seconds = 0.05
        with Runtime() as runtime, ThreadPoolExecutor(4) as pool:
            cache = ModuleCache(runtime)
            functions = list(pool.map(lambda _: cache.function(step.module, step.entry), range(4)))
            assert all(function is functions[0] for function in functions)
        assert simulated.counts()["cuModuleLoadData"] == 1


@pytest.fixture(autouse=True)
def warnings_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test may see the one warning per folder."""
    monkeypatch.setattr(module_store, "_warned", set())
