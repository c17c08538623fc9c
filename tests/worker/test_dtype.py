"""The dtype in which a model computes: named, the model's own, or the quickest on this processor by trial."""

import os
from pathlib import Path

import pytest
import torch

from tests.models import model
from tests.worker.test_host_cpu import reported
from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.table import Settings
from tgi.worker import host_cpu
from tgi.worker.engine.startup import DTYPE_FILE, start_engine
from tgi.worker.models.dtype import DTYPES, dtype_name, resolve_dtype

pytestmark = pytest.mark.slow


def test_a_dtype_is_the_models_own_unless_another_is_named() -> None:
    for name, dtype in DTYPES.items():
        assert resolve_dtype({"dtype": name}, "auto") is resolve_dtype({"torch_dtype": name}, "auto") is dtype
        assert resolve_dtype({"dtype": "float32"}, name) is dtype
        assert dtype_name(dtype) == name
    assert resolve_dtype({}, "auto") is torch.float32
    for config, asked in (({"dtype": "float64"}, "auto"), ({}, "float64"), ({"dtype": 3}, "auto")):
        with pytest.raises(UserError, match="choose one of float32, bfloat16, float16 with --dtype"):
            resolve_dtype(config, asked)


def test_the_trial_avoids_emulated_types() -> None:
    if "avx2" not in host_cpu._processor_features():
        pytest.skip("this processor has no AVX2")
    found = reported("avx2")
    assert found.quickest == ["float32", "float32", "float32", "False"]
    assert "computing in float32: in a trial on this processor bfloat16 took " in found.logged


def test_the_trial_prefers_16_bits_where_the_processor_computes_in_them() -> None:
    _, (single, brain, half, arithmetic), logged = reported("")
    assert (single, half in DTYPES) == ("float32", True)
    if arithmetic == "True":
        assert brain == "bfloat16"
        assert "computing in bfloat16: in a trial on this processor bfloat16 took " in logged


def test_a_restarted_worker_computes_in_the_dtype_of_the_first(tmp_path: Path) -> None:
    """Whatever the trial would choose then: continued requests get the same numbers."""
    settings = Settings(
        model_dir=model("llama", dtype="bfloat16"), run_dir=tmp_path, device="cpu", max_batch_size=4,
        disable_custom_kernels=True,
    )  # fmt: skip

    def dtype() -> str:
        return start_engine(settings, lambda stage, percent: None).limits.dtype

    first = dtype()
    assert (tmp_path / DTYPE_FILE).read_text() == f"{os.getppid()} {first}"
    other = "bfloat16" if first == "float32" else "float32"
    (tmp_path / DTYPE_FILE).write_text(f"{os.getppid()} {other}")
    assert dtype() == other
    (tmp_path / DTYPE_FILE).write_text(f"1 {other}")  # another deployment's
    third = dtype()  # of a trial of its own
    assert (tmp_path / DTYPE_FILE).read_text() == f"{os.getppid()} {third}"
