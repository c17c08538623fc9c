"""All launched kernels compile for GPUs: Triton's interpreter accepts code that its compiler rejects."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Modules with `launches()` (see compile_launches.py), and how many kernels they launch.
LAUNCHES = {"attention": 70, "rows": 95, "products": 48, "experts": 56, "recurrent": 38, "sampling": 29}


def test_every_kernel_compiles_to_machine_code() -> None:
    """In a separate process without the interpreter. Unchanged kernels come from Triton's cache."""
    kept = Path(tempfile.gettempdir()) / f"tgi-test-kernels-{os.getuid()}"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    counts = {f"tests.worker.gpu_kernels.launch_{module}": count for module, count in LAUNCHES.items()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.gpu_kernels.compile_launches", *counts],
        env=environment | {"TRITON_CACHE_DIR": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} {count}" for name, count in counts.items()]
