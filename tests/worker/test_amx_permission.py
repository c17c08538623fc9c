"""Where the system refuses AMX, the next instruction set is used. The system call really fails (refuse_amx.py)."""

import os
import platform
import subprocess
import sys

import pytest

from tests.worker.cpu_kernels.available import library
from tgi.worker import host_cpu
from tgi.worker.host_cpu import CPU_VARIABLE
from tgi.worker.instruction_sets import INSTRUCTION_SETS, best_set

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"),
        reason="AMX is for x86-64, and Linux asks for it",
    ),
]

# Prints the instruction set in use and a product of its kernels.
PRODUCT = """
from tgi.worker.host_cpu import cpu_features, has_arithmetic, kernel_set
import torch
from tgi.worker.cpu_kernels.build import build_library
from tgi.worker.cpu_kernels.kernels import CpuKernels
kernels = CpuKernels(build_library("bfloat16"), threads=1)
ones = torch.ones(40, 64, dtype=torch.bfloat16)
print(kernel_set().name, int(kernels.linear(ones, kernels.pack_weight(ones)).sum()), "amx_tile" in cpu_features())
"""


def without_amx(code: str, limit: str = "") -> subprocess.CompletedProcess[str]:
    """The result of a Python program in a process to which the system refuses AMX."""
    variables = {CPU_VARIABLE, *(name for one in INSTRUCTION_SETS for name in one.environment)}
    environment = {name: value for name, value in os.environ.items() if name not in variables} | {CPU_VARIABLE: limit}
    command = [sys.executable, "-m", "tests.worker.refuse_amx", sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_next_instruction_set_is_used() -> None:
    expected = best_set(frozenset(name for name in host_cpu._listed_features() if not name.startswith("amx_")))
    if expected is None:
        pytest.skip("this processor has none of the instruction sets")
    library("bfloat16", expected.name)
    done = without_amx(PRODUCT)
    assert done.stdout.split() == [expected.name, str(40 * 40 * 64), "False"], done.stderr


def test_a_limit_to_amx_is_rejected() -> None:
    """With the name of what is missing, and why."""
    listed = {name for name in host_cpu._listed_features() if name.startswith("amx_")}
    reason = "the system does not permit" if {"amx_bf16", "amx_int8", "amx_tile"} <= listed else "this processor has no"
    done = without_amx("from tgi.worker.host_cpu import limit_instruction_set\nlimit_instruction_set('amx')")
    assert f"TGI_CPU is amx, but {reason} " in done.stderr
