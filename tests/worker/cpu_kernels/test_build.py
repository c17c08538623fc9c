"""The build of the CPU kernels, and the reasons why they are unavailable. Runs on any machine."""

import errno
import os
import platform
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.models import model
from tgi.worker import host_cpu
from tgi.worker.cpu_kernels import build
from tgi.worker.cpu_kernels.build import KernelsUnavailable, build_library
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.instruction_sets import BY_NAME
from tgi.worker.models.loader import read_model_spec


@pytest.fixture(autouse=True)
def capable_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine that can run the kernels; tests remove a part of it."""
    cpuinfo = tmp_path / "able"
    cpuinfo.write_text(f"model name : new\nflags\t\t: sse {' '.join(BY_NAME['amx'].features)}\n")
    monkeypatch.setattr(host_cpu, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(host_cpu, "_system_permits_amx", lambda: True)
    monkeypatch.delenv(host_cpu.CPU_VARIABLE, raising=False)
    monkeypatch.setenv("CXX", "c++")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which a compiler, a script that copies itself to its output, writes its arguments. The cache is
    empty."""
    (compiler := tmp_path / "compiler").write_text(
        '#!/bin/sh\nfor last; do :; done\necho "$@" >>"$0.calls"\nsleep 0.02\ncp "$0" "$last"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "compiler.calls"


def test_a_library_is_compiled_once(calls: Path) -> None:
    reported: list[tuple[str, int]] = []
    path = build_library("bfloat16", progress=lambda stage, percent: reported.append((stage, percent)))
    assert path.read_bytes() == calls.with_suffix("").read_bytes()
    assert build_library("bfloat16") == path
    *compiled, linked = calls.read_text().splitlines()
    units = [unit.name for unit in build.translation_units(calls.parent)]
    expected = " ".join((*build.FLAGS, *BY_NAME["amx"].flags, "-DTGI_ELEMENT_BF16"))
    assert all(call.startswith(f"{expected} -c ") for call in compiled)
    assert sorted(Path(call.split()[-3]).name for call in compiled) == sorted(units)
    assert linked.startswith(f"{expected} -shared ")
    assert sorted(one.suffix for one in path.parent.iterdir()) == [".lock", ".so"]
    assert {stage for stage, _ in reported} == {"compiling the CPU kernels for amx and bfloat16"}
    assert [percent for _, percent in reported] == [100 * done // len(units) for done in range(len(units) + 1)]
    assert build_library("bfloat16", "-g") != path
    assert len(calls.read_text().splitlines()) == 2 * (len(units) + 1)


def test_each_source_file_is_compiled_once(tmp_path: Path) -> None:
    *alone, others = build.translation_units(tmp_path)
    included = [line.removeprefix('#include "').removesuffix('"') for line in others.read_text().splitlines()]
    assert sorted([*map(str, alone), *included]) == sorted(map(str, build.SOURCES.glob("*.cpp")))


def test_concurrent_builds_compile_once(calls: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(lambda _: build_library("bfloat16"), range(4)))
    assert path.exists()
    assert calls.read_text().count(" -shared ") == 1


def test_builds_that_were_killed_are_removed_from_the_cache(calls: Path, tmp_path: Path) -> None:
    (cache := tmp_path / "cache" / "tgi").mkdir(parents=True, mode=0o700)
    (killed := cache / "old.part").mkdir()
    (killed / "argmax.o").write_bytes(b"half")
    (single := cache / "older.part").write_bytes(b"half")
    (running := cache / "running.part").mkdir()
    for left in (killed, single):
        os.utime(left, (0, 0))
    build_library("bfloat16")
    assert [path.exists() for path in (killed, single, running)] == [False, False, True]


def test_a_library_of_the_package_is_used_if_it_is_made_of_these_sources(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PACKAGED", tmp_path)
    (packaged := tmp_path / build.library_name(BY_NAME["amx"], "bfloat16")).touch()
    assert build_library("bfloat16") == packaged
    assert build_library("bfloat16", "-g") != packaged
    shutil.copytree(build.SOURCES, edited := tmp_path / "edited")
    (edited / "head.cpp").write_text("// other sources\n")
    monkeypatch.setattr(build, "SOURCES", edited)
    assert build_library("bfloat16") != packaged


def test_a_missing_or_failing_compiler_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(KernelsUnavailable, match="cannot be run"):
        build_library("bfloat16")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(KernelsUnavailable, match="false failed"):
        build_library("bfloat16")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match=r"no C\+\+ compiler: install one \(such as g\+\+\), or a wheel"):
        build_library("bfloat16")


def test_a_failed_build_is_logged_as_a_warning_on_a_capable_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On another processor nothing is logged: a compiler would not help."""
    spec = read_model_spec(model("llama", hidden=128, intermediate=192), "bfloat16")
    caplog.set_level("WARNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler, said in (("false", "false failed"), (str(tmp_path / "none"), "cannot be run")):
        monkeypatch.setenv("CXX", compiler)
        kernels, reason = select_cpu_kernels([spec], "cpu")
        assert kernels is None
        assert said in reason
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert reason in caplog.messages[0]
        caplog.clear()
    monkeypatch.setattr(host_cpu, "CPUINFO", tmp_path / "none")
    kernels, reason = select_cpu_kernels([spec], "cpu")
    assert kernels is None
    assert "this processor has none of" in reason
    assert not caplog.records


def test_cxx_may_be_several_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "env false")
    with pytest.raises(KernelsUnavailable, match="env failed"):
        build_library("bfloat16")


def test_a_full_disk_or_a_missing_home_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(KernelsUnavailable, match="No space left"):
        build_library("bfloat16")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(KernelsUnavailable, match="Set XDG_CACHE_HOME"):
        build_library("bfloat16")


def test_a_processor_without_a_supported_instruction_set_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text("flags : sse avx\n")
    monkeypatch.setattr(host_cpu, "CPUINFO", tmp_path / "cpuinfo")
    with pytest.raises(KernelsUnavailable, match="none of the instruction sets amx, avx512_bf16, avx512, avx2, neon"):
        build_library("bfloat16")


def test_a_cache_that_others_can_write_to_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tgi").mkdir()
    os.chmod(tmp_path / "tgi", 0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="can be written by others"):
        build_library("bfloat16")


def test_a_broken_library_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(KernelsUnavailable, match="cannot be loaded"):
        CpuKernels(tmp_path / "broken.so", 1)
