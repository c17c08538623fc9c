"""`compute_type` with a fake nvidia-smi."""

from pathlib import Path

import pytest

from tgi.microkernel.settings.table import Settings
from tgi.server import compute_type


def write_nvidia_smi(folder: Path, output: str, code: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{output}'\nexit {code}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("output", "code", "name"),
    [
        ("NVIDIA H200\\nNVIDIA H200\\n", 0, "1-nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB\\n", 0, "1-nvidia-a100-sxm4-80gb"),
        ("NVIDIA H100 80GB HBM3\\n", 0, "1-nvidia-h100-80fb-hbm3"),
        ("no devices were found\\n", 6, "gpu+optimized"),
        ("", 0, "gpu+optimized"),
    ],
)
def test_compute_type_is_named_after_the_first_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int, name: str
) -> None:
    write_nvidia_smi(tmp_path, output, code)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert compute_type(Settings()) == name
    assert compute_type(Settings(device="cpu")) == "gpu+optimized"


def test_compute_type_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compute_type(Settings()) == "gpu+optimized"
