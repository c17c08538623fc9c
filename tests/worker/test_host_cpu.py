"""The instruction set of a processor; TGI_CPU limits torch and the CPU kernels to one; MKL is asked for one order of
summation."""

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.table import OPTIONS
from tgi.worker import host_cpu
from tgi.worker.host_cpu import CPU_VARIABLE, MKL_MODE, kernel_set, limit_instruction_set, request_reproducible_mkl
from tgi.worker.instruction_sets import BY_NAME, INSTRUCTION_SETS

pytestmark = pytest.mark.slow

# Prints what a process uses under the limit that its argument names; "": no limit.
REPORT = """
import sys
from tgi.worker.host_cpu import cpu_features, has_arithmetic, kernel_set, limit_instruction_set
limit_instruction_set(sys.argv[1] or None)
import torch
ours = [name for name in ("avx2", "fma", "avx512f", "avx_vnni", "amx_bf16") if name in cpu_features()]
reorders = torch.ops.mkldnn._is_mkldnn_bf16_supported()
print(kernel_set().name, torch.backends.cpu.get_cpu_capability(), *ours, has_arithmetic("bfloat16"), reorders)

# The quickest dtype for models of each dtype (test_dtype.py).
import logging
from tgi.worker.models.dtype import DTYPES, dtype_name, quickest_dtype
logging.basicConfig(level=logging.INFO, format="%(message)s")
print(*(dtype_name(quickest_dtype(own)) for own in DTYPES.values()), has_arithmetic("bfloat16"))
"""


CPUINFO = {  # features that matter, of some processors
    "Zen 3": "flags : fma f16c bmi1 bmi2 abm popcnt avx2",
    "Skylake-X": "flags : fma f16c bmi1 bmi2 abm popcnt avx2 avx512f avx512dq avx512cd avx512bw avx512vl",
    "Cooper Lake": "flags : fma f16c bmi1 bmi2 abm popcnt avx2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni "
    "avx512_bf16",
    "Zen 4": "flags : fma f16c bmi1 bmi2 abm popcnt avx2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni "
    "avx512_bf16 avx512vbmi",
    "Sapphire Rapids": "flags : fma f16c bmi1 bmi2 abm popcnt avx2 avx512f avx512dq avx512cd avx512bw avx512vl "
    "avx512_vnni avx512_bf16 avx512vbmi avx512_fp16 amx_tile amx_int8 amx_bf16",
    "Sandy Bridge": "flags : popcnt avx",
    "Cortex-A72": "Features : fp asimd",
    "Neoverse N1": "Features : fp asimd fphp asimdhp asimddp",
    "Neoverse V1": "Features : fp asimd fphp asimdhp asimddp sve i8mm bf16",
}


@pytest.fixture
def processor(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates the processor of CPUINFO that is the parameter. The environment is restored after the test."""
    (tmp_path / "cpuinfo").write_text(f"{CPUINFO[request.param]}\n")
    monkeypatch.setattr(host_cpu, "CPUINFO", tmp_path / "cpuinfo")
    machine = "aarch64" if CPUINFO[request.param].startswith("Features") else "x86_64"
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(host_cpu, "_system_permits_amx", lambda: True)  # as that processor's Linux would
    for name in (CPU_VARIABLE, *(name for one in INSTRUCTION_SETS for name in one.environment)):
        monkeypatch.setenv(name, "")  # registers the variable to be restored
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("processor", "limit", "chosen"),
    [
        ("Zen 3", None, "avx2"),
        ("Skylake-X", None, "avx512"),
        ("Cooper Lake", None, "avx512"),  # no VBMI
        ("Zen 4", None, "avx512_bf16"),
        ("Sapphire Rapids", None, "amx"),
        ("Sandy Bridge", None, None),
        ("Cortex-A72", None, "neon"),
        ("Neoverse N1", None, "neon"),
        ("Neoverse V1", None, "neon_bf16"),
        *(("Sapphire Rapids", name, name) for name in ("amx", "avx512_bf16", "avx512", "avx2")),
        *(("Neoverse V1", name, name) for name in ("neon_bf16", "neon")),
    ],
    indirect=["processor"],
)
@pytest.mark.usefixtures("processor")
def test_the_best_set_of_the_processor_is_chosen_unless_limited(limit: str | None, chosen: str | None) -> None:
    limit_instruction_set(limit)
    found = kernel_set()
    assert (found and found.name) == chosen


@pytest.mark.parametrize(
    ("listed", "chosen"),
    [
        ("hw.optional.arm.FEAT_BF16: 0\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_FP16: 1", "neon"),  # M1
        ("\n".join(f"hw.optional.arm.{name}: 1" for name in host_cpu.SYSCTL_FEATURES), "neon_bf16"),  # M2
        ("", "neon"),
    ],
)
def test_apple_silicon_is_recognized(listed: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sysctl is a script that prints what a Mac's prints, and fails as for names that the system does not know."""
    (sysctl := tmp_path / "sysctl").write_text(f"#!/bin/sh\necho '{listed}'\nexit 1\n")
    sysctl.chmod(0o700)
    monkeypatch.setattr(host_cpu, "SYSCTL", str(sysctl))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    found = kernel_set()
    assert found is not None
    assert found.name == chosen


class Report(NamedTuple):
    """What REPORT prints: the words of its two lines, and what is logged."""

    used: str
    quickest: list[str]
    logged: str


@cache
def reported(limit: str) -> Report:
    """Of a process with this limit, which takes a second to import torch."""
    variables = {CPU_VARIABLE, *(name for one in INSTRUCTION_SETS for name in one.environment)}
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    command = [sys.executable, "-c", REPORT, limit]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    used, quickest = done.stdout.splitlines()
    return Report(used, quickest.split(), done.stderr)


def test_the_limit_applies_to_torch_and_the_cpu_kernels() -> None:
    features = host_cpu._processor_features()
    if not BY_NAME["avx2"].features <= features:
        pytest.skip("this processor has no AVX2")
    assert reported("avx2").used == "avx2 AVX2 avx2 fma False False"
    if BY_NAME["avx512_bf16"].features <= features:
        assert reported("avx512_bf16").used == "avx512_bf16 AVX512 avx2 fma avx512f True True"


@pytest.mark.parametrize(
    ("machine", "line", "taken"),
    [
        ("x86_64", "flags : avx2 avx_vnni avx_ne_convert", []),
        ("x86_64", "flags : avx2 avx512f avx512bw", []),
        ("x86_64", "flags : avx2 avx512f avx512_bf16", ["bfloat16"]),
        ("x86_64", "flags : avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16", ["bfloat16", "float16"]),
        ("aarch64", "Features : fp asimd fphp asimdhp", ["float16"]),
        ("aarch64", "Features : fp asimd fphp asimdhp bf16", ["bfloat16", "float16"]),
        ("ppc64le", "cpu : POWER9", []),
    ],
)
def test_arithmetic_depends_on_the_instruction_sets(
    machine: str, line: str, taken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"{line}\n")
    monkeypatch.setattr(host_cpu, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    assert [name for name in ("bfloat16", "float16") if host_cpu.has_arithmetic(name)] == taken
    assert host_cpu.has_arithmetic("float32")


def test_an_unknown_or_missing_instruction_set_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="TGI_CPU is 'sse2', which is not one of amx, avx512_bf16, avx512, avx2, neon"):
        limit_instruction_set("sse2")
    (tmp_path / "cpuinfo").write_text("flags : sse2 avx popcnt abm bmi1 bmi2 f16c\n")
    monkeypatch.setattr(host_cpu, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(UserError, match="TGI_CPU is avx2, but this processor has no avx2, fma: unset it"):
        limit_instruction_set("avx2")


def test_the_option_offers_all_instruction_sets() -> None:
    assert OPTIONS["cpu"].choices == tuple(BY_NAME)
    assert OPTIONS["cpu"].variables("cpu") == (CPU_VARIABLE,)


@pytest.mark.parametrize(("given", "expected"), [(None, "AUTO,STRICT"), ("COMPATIBLE", "COMPATIBLE")])
def test_mkl_reproducibility_is_requested_unless_the_environment_sets_a_mode(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MKL_MODE, given or "")  # registers the variable to be restored
    if given is None:
        monkeypatch.delenv(MKL_MODE)
    request_reproducible_mkl()
    assert os.environ[MKL_MODE] == expected


def test_numa_nodes_have_the_cores_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cores in ((0, "0-1,8"), (10, "6-7"), (2, "2-3"), (3, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 3, 6, 7, 8})
    assert host_cpu.numa_nodes(tmp_path) == [[0, 1, 8], [3], [6, 7]]


def test_ranks_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(cores))
    monkeypatch.setattr(host_cpu, "usable_cores", lambda: 6)
    for nodes, expected in (([[0, 1, 2], [5, 6, 7]], [0, 1, 2]), ([[0, 1, 2]], None)):
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(host_cpu, "numa_nodes", lambda: nodes)  # noqa: B023
        host_cpu.take_cores(0, 2)
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert taken == ([] if expected is None else [expected])
        taken.clear()
