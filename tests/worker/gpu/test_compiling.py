"""Kernels compile for GPUs as they are launched. Triton's interpreter takes what its compiler does not."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Modules with `launches()`: see compiling.py.
LAUNCHES = ("tests.worker.gpu.attending", "tests.worker.gpu.rows", "tests.worker.gpu.products")


def test_every_kernel_compiles_to_machine_code() -> None:
    """In a process of its own, where nothing is interpreted. What has not changed since is not compiled again."""
    kept = Path(tempfile.gettempdir()) / f"tgi-test-kernels-{os.getuid()}"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.gpu.compiling", *LAUNCHES],
        env=environment | {"TRITON_CACHE_DIR": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(LAUNCHES)
    assert "tests.worker.gpu.rows 55\n" in done.stdout  # 11 for each type and capability
