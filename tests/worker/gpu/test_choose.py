"""Kernels are tried before they are used, and where one fails, torch computes."""

import logging
import re

import pytest
import torch

from tgi.worker.gpu.choose import MODULES, find_gpu, tried
from tgi.worker.load import Recipe

CPU = torch.device("cpu")
FAILING = f"{__package__}.failing"


def test_where_they_have_nothing_to_do_they_are_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    assert find_gpu([Recipe(None, torch.float32)], "cpu") == (None, "they are for GPUs")
    assert find_gpu([Recipe(None, torch.float32)], "cuda") == (None, "the model runs through transformers")
    assert not caplog.messages


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_kernels_that_agree_with_torch_are_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        gpu, reason = tried(CPU, (8, 0))
    assert gpu is not None
    assert gpu.capability == (8, 0)
    assert (reason, caplog.messages) == ("", [])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong", r"our own fail in wrong: Differs: twice a number differs from torch's by [\d.]+, where the largest"),
        ("uncompiled", r"our own fail in uncompiled: \w+"),
        ("missing", r"our own fail in missing: ModuleNotFoundError"),
    ],
)
def test_where_a_kernel_fails_torch_computes(name: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    gpu, told = tried(CPU, (9, 0), [*MODULES[:1], f"{FAILING}.{name}"])
    assert gpu is None
    assert re.search(reason, told)
    record = caplog.records[-1]
    assert record.levelname == "WARNING"
    assert re.search(reason, record.getMessage())
