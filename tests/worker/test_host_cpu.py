"""TGI_CPU limits torch and the CPU kernels to an instruction set; MKL is asked for one order of summation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings import OPTIONS
from tgi.worker import host_cpu
from tgi.worker.host_cpu import CPU_LEVELS, CPU_VARIABLE, MKL_MODE, limit_instruction_set, request_reproducible_mkl

# Prints what a process uses under the limit that its argument names; "": no limit.
REPORT = """
import sys
from tgi.worker.host_cpu import has_arithmetic, instruction_sets, limit_instruction_set
limit_instruction_set(sys.argv[1] or None)
import torch
ours = [name for name in ("avx2", "fma", "avx512f", "avx_vnni", "amx_bf16") if name in instruction_sets()]
reorders = torch.ops.mkldnn._is_mkldnn_bf16_supported()
print(torch.backends.cpu.get_cpu_capability(), *ours, has_arithmetic("bfloat16"), reorders)
"""


def reported(level: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in {CPU_VARIABLE, *CPU_LEVELS["avx2"].environment}
    }
    command = [sys.executable, "-c", REPORT, level]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_the_limit_applies_to_torch_and_the_cpu_kernels() -> None:
    if "avx2" not in host_cpu._processor_features():
        pytest.skip("this processor has no AVX2")
    assert reported("avx2") == "AVX2 avx2 fma False False"
    if "avx512f" in host_cpu._processor_features():
        assert reported("").startswith("AVX512 avx2 fma avx512f")


def test_an_unknown_or_missing_instruction_set_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="TGI_CPU is 'sse2', which is not one of avx2"):
        limit_instruction_set("sse2")
    (tmp_path / "cpuinfo").write_text("flags : sse2 avx\n")
    monkeypatch.setattr(host_cpu, "CPUINFO", tmp_path / "cpuinfo")
    with pytest.raises(UserError, match="this processor has no avx2"):
        limit_instruction_set("avx2")


def test_the_option_offers_all_levels() -> None:
    assert OPTIONS["cpu"].choices == tuple(CPU_LEVELS)
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
