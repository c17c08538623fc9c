"""Peers of a comparison are held to the instruction set of TGI_CPU."""

import sys
from pathlib import Path

import pytest

from scripts.benchmarks import peer_cpu
from scripts.benchmarks.servers import Failed
from scripts.benchmarks.workloads import run
from tgi.worker.host_cpu import CPU_VARIABLE, cpu_features

pytestmark = pytest.mark.slow

# What NumPy finds by CPUID when it is imported.
FOUND = "from numpy._core._multiarray_umath import __cpu_features__ as found; print(found['AVX512F'], found['AVX2'])"


def test_without_a_limit_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    assert peer_cpu.environ() == {}
    assert peer_cpu.in_words() == ""


def test_programs_held_to_avx2_find_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_cpu, "PEERS_DIRECTORY", tmp_path)
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    more, avx2 = "avx512f" in cpu_features(), "avx2" in cpu_features()
    monkeypatch.setenv(CPU_VARIABLE, "avx2")
    held = peer_cpu.environ()
    assert held["ONEDNN_MAX_CPU_ISA"] == held["OV_CPU_MAX_ISA"] == "AVX2"
    left = more and not peer_cpu.hides_avx512()  # where CPUID cannot fault
    assert run(sys.executable, "-c", FOUND, **held).split() == [str(left), str(avx2)]


def test_a_fault_of_a_program_still_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_cpu, "PEERS_DIRECTORY", tmp_path)
    monkeypatch.setenv(CPU_VARIABLE, "avx2")
    with pytest.raises(Failed, match="ended with -11"):
        run(sys.executable, "-c", "import ctypes; ctypes.string_at(0)", **peer_cpu.environ())


def test_an_unknown_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_VARIABLE, "sse2")
    with pytest.raises(Failed, match="peers cannot be held to sse2; known are amx, avx512_bf16, avx512, avx2"):
        peer_cpu.environ()
