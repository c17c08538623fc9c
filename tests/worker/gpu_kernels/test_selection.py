"""Self-tests run before the GPU kernels are used; if one fails, torch's kernels compute."""

import logging
import re
from pathlib import Path

import pytest
import torch

from tests.models import model
from tgi.worker.gpu_kernels import selection
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.selection import MODULES, select_gpu_kernels, self_tested_kernels
from tgi.worker.models.config_reader import read_config, read_decoder_config
from tgi.worker.models.loader import ModelSpec
from tgi.worker.quantization.scheme import QuantizationScheme

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FAILING = f"{__package__}.failing"


def test_kernels_that_would_not_be_used_are_not_tested(caplog: pytest.LogCaptureFixture) -> None:
    assert select_gpu_kernels([ModelSpec(None, torch.float32)], "cpu") == (None, "they are for GPUs")
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


def test_self_tests_that_have_passed_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another GPU, driver or version, or after a failure, they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    card, runs = ["one"], []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(selection, "DRIVER", tmp_path / "driver")

    def test(device: torch.device, capability: tuple[int, int], *_: object) -> tuple[GpuKernels | None, str]:
        runs.append(device)
        return (GpuKernels(capability), "") if passes[0] else (None, "they fail")

    monkeypatch.setattr(selection, "self_tested_kernels", test)
    passes = [False]
    spec = [ModelSpec(read_decoder_config(read_config(model("llama"))), torch.float32)]

    def select() -> int:
        found, _ = select_gpu_kernels(spec, "cuda")
        assert (found is not None) == passes[0]
        return len(runs)

    assert [select(), select()] == [1, 2]
    passes = [True]
    assert [select(), select(), select()] == [3, 3, 3]
    (tmp_path / "driver").write_text("version 600")
    assert [select(), select()] == [4, 4]
    card[0] = "another"
    assert [select(), select()] == [5, 5]


def test_only_what_a_model_uses_is_tested() -> None:
    """Each kernel is compiled for its self-test, which delays the first start on a machine."""
    transformers, plain = ModelSpec(None, torch.bfloat16), spec_of("llama")
    dense = selection.needed_modules([plain, transformers], False)
    assert selection.needed_modules([transformers], False) == selection.EVERY_MODEL
    assert dense == (*selection.EVERY_MODEL, *selection.DECODER)
    experts = selection.needed_modules([plain, spec_of("mixtral")], True)
    assert experts == (*dense, *selection.INVARIANT, *selection.EXPERTS)
    assert set(selection.needed_modules([spec_of("deepseek_v2")], False)) == {
        *dense,
        *selection.EXPERTS,
        *selection.LATENT,
    }
    assert selection.needed_modules([spec_of("lfm2")], False) == (*dense, selection.RECURRENT[0])
    assert selection.needed_modules([spec_of("qwen3_5_text")], False) == (*dense, *selection.RECURRENT[:2])
    assert selection.needed_modules([spec_of("mamba2")], False) == (*dense, *selection.RECURRENT[::2])
    quantized = plain._replace(scheme=QuantizationScheme(made="int4"))
    assert selection.needed_modules([quantized], False) == (*dense, *selection.QUANTIZED)


def spec_of(kind: str) -> ModelSpec:
    return ModelSpec(read_decoder_config(read_config(model(kind))), torch.bfloat16)
