"""All launched kernels compile for GPUs: Triton's interpreter accepts code that its compiler rejects."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Modules with `launches()`: see compile_launches.py.
LAUNCHES = (
    "tests.worker.gpu_kernels.launch_attention",
    "tests.worker.gpu_kernels.launch_rows",
    "tests.worker.gpu_kernels.launch_products",
    "tests.worker.gpu_kernels.launch_experts",
    "tests.worker.gpu_kernels.launch_recurrent",
    "tests.worker.gpu_kernels.launch_sampling",
)


def test_every_kernel_compiles_to_machine_code() -> None:
    """In a separate process without the interpreter. Unchanged kernels come from Triton's cache."""
    kept = Path(tempfile.gettempdir()) / f"tgi-test-kernels-{os.getuid()}"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.gpu_kernels.compile_launches", *LAUNCHES],
        env=environment | {"TRITON_CACHE_DIR": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(LAUNCHES)
    assert "tests.worker.gpu_kernels.launch_rows 100\n" in done.stdout  # 20 for each type and capability
