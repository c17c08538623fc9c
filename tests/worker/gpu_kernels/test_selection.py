"""Self-tests run before the GPU kernels are used; if one fails, torch's kernels compute."""

import logging
import re

import pytest
import torch

from tgi.worker.gpu_kernels.selection import MODULES, select_gpu_kernels, self_tested_kernels
from tgi.worker.models.loader import ModelSpec

CPU = torch.device("cpu")
FAILING = f"{__package__}.failing"


def test_kernels_that_would_not_be_used_are_not_tested(caplog: pytest.LogCaptureFixture) -> None:
    assert select_gpu_kernels([ModelSpec(None, torch.float32)], "cpu") == (None, "they are for GPUs")
    assert select_gpu_kernels([ModelSpec(None, torch.float32)], "cuda") == (None, "the model runs through transformers")
    assert not caplog.messages


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_kernels_that_agree_with_torch_are_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        gpu, reason = self_tested_kernels(CPU, (8, 0))
    assert gpu is not None
    assert gpu.capability == (8, 0)
    assert (reason, caplog.messages) == ("", [])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "wrong",
            r"our own fail in wrong: SelfTestFailed: twice a number differs from torch's by [\d.]+",
        ),
        ("uncompiled", r"our own fail in uncompiled: \w+"),
        ("missing", r"our own fail in missing: ModuleNotFoundError"),
    ],
)
def test_a_failing_kernel_leaves_the_models_to_torch(name: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    gpu, told = self_tested_kernels(CPU, (9, 0), [*MODULES[:1], f"{FAILING}.{name}"])
    assert gpu is None
    assert re.search(reason, told)
    record = caplog.records[-1]
    assert record.levelname == "WARNING"
    assert re.search(reason, record.getMessage())
