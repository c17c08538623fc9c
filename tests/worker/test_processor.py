"""TGI_CPU holds torch and our kernels to an instruction set, and MKL is asked for sums in one order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tgi.kernel.errors import UserError
from tgi.kernel.settings import OPTIONS
from tgi.worker import processor
from tgi.worker.processor import CPU, LEVELS, REPRODUCIBLE, hold, keep_order

# What a process finds that is held, or not, to what its argument names.
FOUND = """
import sys
from tgi.worker.processor import hold, multiplies, processor
hold(sys.argv[1] or None)
import torch
ours = [name for name in ("avx2", "fma", "avx512f", "avx_vnni", "amx_bf16") if name in processor()]
reorders = torch.ops.mkldnn._is_mkldnn_bf16_supported()
print(torch.backends.cpu.get_cpu_capability(), *ours, multiplies("bfloat16"), reorders)
"""


def found(level: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in {CPU, *LEVELS["avx2"].environment}}
    command = [sys.executable, "-c", FOUND, level]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_everything_is_held_to_it() -> None:
    if "avx2" not in processor._features():
        pytest.skip("this processor has no AVX2")
    assert found("avx2") == "AVX2 avx2 fma False False"
    if "avx512f" in processor._features():
        assert found("").startswith("AVX512 avx2 fma avx512f")


def test_a_set_that_there_is_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="TGI_CPU is 'sse2', which is not one of avx2"):
        hold("sse2")
    (tmp_path / "cpuinfo").write_text("flags : sse2 avx\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    with pytest.raises(UserError, match="this processor has no avx2"):
        hold("avx2")


def test_the_setting_names_what_there_is() -> None:
    assert OPTIONS["cpu"].choices == tuple(LEVELS)
    assert OPTIONS["cpu"].variables("cpu") == (CPU,)


@pytest.mark.parametrize(("said", "stands"), [(None, "AUTO,STRICT"), ("COMPATIBLE", "COMPATIBLE")])
def test_mkl_is_asked_for_one_order_unless_something_else_is_said(
    said: str | None, stands: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPRODUCIBLE, said or "")  # so that it is taken back
    if said is None:
        monkeypatch.delenv(REPRODUCIBLE)
    keep_order()
    assert os.environ[REPRODUCIBLE] == stands
