"""MKL is asked for sums in one order where its own depends on the batch, and only there."""

import os
import platform
from pathlib import Path

import pytest

from tgi.worker import sums
from tgi.worker.native import build


@pytest.mark.parametrize(
    ("flags", "said", "stands"),
    [
        ("avx2", None, "AUTO,STRICT"),
        ("avx2", "COMPATIBLE", "COMPATIBLE"),
        ("avx2 avx512f", None, None),
    ],
)
def test_only_where_mkl_needs_it_and_nothing_else_is_said(
    flags: str, said: str | None, stands: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv(sums.REPRODUCIBLE, said or "")  # so that it is taken back
    if said is None:
        monkeypatch.delenv(sums.REPRODUCIBLE)
    sums.keep_order()
    assert os.environ.get(sums.REPRODUCIBLE) == stands
