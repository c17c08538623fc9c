"""The choice of a library for long prompts, with libraries that are written here."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import model as make
from tests.worker.driving import drive, make_engine
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.gpu_kernels import flash_attention
from tgi.worker.gpu_kernels.flash_attention import Heads, Library, PromptAttention, choose_prompt_attention
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.paged_attention import reference_attention
from tgi.worker.models.loader import build_model

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 32, 16, torch.float32)


def right(module: Any, query: Tensor, keys: Tensor, values: Tensor, rows: Any, scale: float, *limits: Any) -> Tensor:
    counts = rows.starts.diff().tolist()
    assert sum(counts) == len(query)
    return reference_attention(query, keys, values, rows.table.tolist(), counts, rows.context.tolist(), scale, *limits)


def without_window(*arguments: Any) -> Tensor:
    return right(*arguments[:6], None, arguments[7])


def broken(*arguments: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("times", "capability", "expected"),
    [
        ({"right": 1.0, None: 1.2}, (9, 0), "right"),
        ({"right": 1.0, "other": 0.9, None: 1.2}, (9, 0), "other"),
        ({"right": 1.0, None: 1.04}, (9, 0), None),  # not quicker by enough
        ({"right": 1.0, None: 1.2}, (8, 0), None),
    ],
)
def test_the_quickest_that_is_right_is_chosen(
    times: dict[str | None, float],
    capability: tuple[int, int],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    libraries = [Library(name, "a_library", (9,), right) for name in times if name]
    wrong = [Library("wrong", "a_library", (9,), without_window), Library("broken", "a_library", (9,), broken)]
    missing = Library("missing", "no_such_library", (9,), right)
    monkeypatch.setattr(flash_attention, "LIBRARIES", (*wrong, missing, *libraries))
    module = SimpleNamespace(__spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "a_library", module)
    trial = lambda kernels, chosen, *rest: times[chosen and chosen.library.name]  # noqa: E731
    monkeypatch.setattr(flash_attention, "_trial", trial)
    found = choose_prompt_attention.__wrapped__(GpuKernels(capability), HEADS, CPU)
    assert (found and found.library.name) == expected
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (2 if capability == (9, 0) else 0)
    assert all("wrong is installed" in one or "no kernel image" in one for one in said)


@pytest.mark.slow
def test_long_prompts_are_computed_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to decode rows, in chunks, with windows and a soft cap; all else by our kernel."""
    monkeypatch.setattr(flash_attention, "LEAST_QUERIES", 16)
    served, found = [], []

    def counting(*arguments: Any) -> Tensor:
        served.append(arguments[4].longest)
        return right(*arguments)

    for prompts in (None, PromptAttention(Library("right", "", (9,), counting), None)):
        model = build_model(make("gemma2", layers=2), "float32", "cpu", lambda stage, percent: None)
        attention = CudaAttention(model.kv._replace(gpu_kernels=GpuKernels((9, 0))), 24, CPU)
        attention._prompts = prompts
        engine = make_engine(model, slots=4, pages=24, attention=attention)
        found.append(drive(engine, [[5, 9, 3], list(range(40)), [7] * 20], 3, chunk=30, stagger=1))
    assert set(served) == {20, 30}
    for ours, theirs in zip(*found, strict=True):
        assert ours.ids == theirs.ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
