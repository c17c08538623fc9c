"""Our own kernels are built with care, and where they cannot be had the reason is told: tested on any machine."""

import errno
import os
import platform
import tempfile
from pathlib import Path

import pytest

from tgi.worker import processor
from tgi.worker.native import build
from tgi.worker.native.build import NEEDED, Unavailable, library
from tgi.worker.native.choose import find_kernels
from tgi.worker.native.kernels import Kernels


@pytest.fixture(autouse=True)
def able(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that could have them, unless a test takes something away."""
    cpuinfo = tmp_path / "able"
    cpuinfo.write_text(f"model name : new\nflags\t\t: sse {' '.join(NEEDED)}\n")
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv(processor.CPU, raising=False)
    monkeypatch.setenv("CXX", "c++")


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that is quick, as it writes down its arguments alone."""
    (compiler := tmp_path / "compiler").write_text(
        '#!/bin/sh\nfor last; do :; done\necho "$@" >>"$0.calls"\ncp "$0" "$last"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = library()
    assert path.read_bytes() == compiler.read_bytes()
    assert library() == path
    (call,) = (tmp_path / "compiler.calls").read_text().splitlines()
    assert call.startswith(" ".join(build.FLAGS))
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert library("-g") != path
    assert len((tmp_path / "compiler.calls").read_text().splitlines()) == 2


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="cannot be run"):
        library()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(Unavailable, match="false failed"):
        library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        library()


def test_that_they_cannot_be_compiled_is_a_warning_where_the_processor_has_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There the server is slower than it could be, and a compiler is all that is missing."""
    caplog.set_level("WARNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler, said in (("false", "false failed"), (str(tmp_path / "none"), "cannot be run")):
        monkeypatch.setenv("CXX", compiler)
        kernels, reason = find_kernels([], "cpu")
        assert kernels is None
        assert said in reason
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert reason in caplog.messages[0]
        caplog.clear()
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    kernels, reason = find_kernels([], "cpu")
    assert kernels is None
    assert "this processor has no avx512_bf16" in reason
    assert not caplog.records


def test_a_compiler_may_be_several_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "env false")
    with pytest.raises(Unavailable, match="env failed"):
        library()


def test_without_a_place_to_write_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkstemp", full)
    with pytest.raises(Unavailable, match="No space left"):
        library()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(Unavailable, match="Set XDG_CACHE_HOME"):
        library()


def test_another_processor_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name : old\nflags\t\t: sse avx2 avx512f\n")
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    with pytest.raises(Unavailable, match=r"no avx512_bf16, avx512_vnni, avx512bw, avx512vbmi, avx512vl$"):
        library()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(Unavailable, match=r"no avx512_bf16, avx512_vnni, avx512bw, avx512f, avx512vbmi, avx512vl$"):
        library()


def test_code_that_others_could_have_written_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tgi").mkdir()
    os.chmod(tmp_path / "tgi", 0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="can be written by others"):
        library()


def test_a_broken_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(Unavailable, match="cannot be loaded"):
        Kernels(tmp_path / "broken.so", 1)
