"""Whole engines that decode with our attention, by Triton's interpreter, beside those that decode with torch's."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.models import model as make
from tests.worker.batches import Row, make_batch, moved
from tests.worker.driving import Drawn, drive, make_engine
from tests.worker.gpu.counting import counted
from tests.worker.test_recorded import Again
from tgi.kernel.messages import Sampling
from tgi.worker.attention.cuda import CudaAttention, Mixed
from tgi.worker.batch import KVShape
from tgi.worker.engine import Recording
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.gpu.trial import numbers
from tgi.worker.load import build_model
from tgi.worker.warm import warm_up

CPU, PAGES = torch.device("cpu"), 24
GPU = Gpu((8, 0))
PROMPTS = [[5, 9, 3], [7] * 29, [1]]

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def drawn(kind: str, dtype: str, stored: torch.dtype | None, gpu: Gpu | None, rows: Sequence[int] = ()) -> list[Drawn]:
    """Rows come one by one, cross pages, end, and are filled up to the next of `rows`, if steps are recorded."""
    model = build_model(make(kind, layers=2), dtype, "cpu", lambda stage, percent: None)
    attention = CudaAttention(model.kv._replace(gpu=gpu, stored=stored), PAGES, CPU, "plain")
    recording = Recording(Again(), attention, list(rows)) if rows else None
    engine = make_engine(model, slots=4, pages=PAGES, attention=attention, recording=recording)
    assert engine.record() == len(rows)  # one serves contexts of every length
    return drive(engine, PROMPTS, 5, [Sampling(0), Sampling(1, do_sample=True), Sampling(0)], stagger=1)


@pytest.mark.parametrize(
    ("kind", "dtype", "stored", "rows"),
    [
        ("gemma2", "float32", None, [4]),  # windows and capped scores
        ("llama", "bfloat16", None, []),
        # A cache of 8 bits holds other numbers wherever two results are rounded to different sides, and one unit in the
        # last place of bfloat16 is enough for that. float32 leaves such differences no room.
        ("llama", "float32", torch.float8_e4m3fn, [4]),
    ],
)
def test_an_engine_draws_what_torch_draws(
    kind: str, dtype: str, stored: torch.dtype | None, rows: Sequence[int]
) -> None:
    tolerance = {"float32": 1e-4, "bfloat16": 0.05}[dtype]
    for ours, torchs in zip(drawn(kind, dtype, stored, GPU, rows), drawn(kind, dtype, stored, None), strict=True):
        assert ours.ids == torchs.ids
        assert ours.logprobs == pytest.approx(torchs.logprobs, abs=tolerance)


@pytest.mark.parametrize("window", [None, 9])
def test_rows_of_a_token_are_ours_beside_a_prompt(window: int | None) -> None:
    kv = KVShape(1, 4, 2, 16, torch.float32, (window,))
    known = make_batch([Row(range(30), 0, [3, 1]), Row(range(17), 0, [0, 4])])
    step = make_batch([Row([5], 30, [3, 1]), Row([6], 17, [0, 4]), Row(range(20), 0, [2, 6]), Row([7], 0, [5])])
    found = []
    for gpu in (GPU, None):
        attention = CudaAttention(kv._replace(gpu=gpu), PAGES, CPU, "plain")
        attention.write_and_attend(attention.plan(known), 0, numbers(CPU, 47, 8, 16), 0.2)
        plan = attention.plan(step)
        if gpu is not None:
            assert isinstance(plan, Mixed)
            assert len(plan.single.context) == 2
            assert plan.others.query_lengths == [20, 1]
        found.append(attention.write_and_attend(plan, 0, numbers(CPU, 23, 8, 16, seed=1), 0.2))
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("drafts", [1, 3])
def test_a_draft_model_decodes_before_anybody_waits(drafts: int) -> None:
    """Single tokens too, for which there is a kernel to be compiled."""
    model, seen, gpu = (
        build_model(make("llama", layers=1), "float32", "cpu", lambda stage, percent: None),
        [],
        Gpu((8, 0)),
    )
    attend = gpu.attend

    def counting(*arguments: Any) -> torch.Tensor:
        seen.append(arguments)
        return attend(*arguments)

    gpu.attend = counting  # type: ignore[assignment]
    engine = make_engine(model, slots=2, pages=PAGES, draft=model)
    assert engine._drafter is not None
    engine._drafter._attention = CudaAttention(model.kv._replace(gpu=gpu), PAGES, CPU, "plain")
    warm_up(engine, engine.limits, 2, 20, drafts, True)
    assert seen


def test_a_layer_takes_three_launches() -> None:
    """And no copy of anything, whatever the cache holds."""
    there = torch.device("meta")
    kv = KVShape(1, 4, 2, 64, torch.bfloat16, gpu=GPU, stored=torch.float8_e5m2)
    attention = CudaAttention(kv, PAGES, there, "packed")
    batch = make_batch([Row([5], 3, [0]), Row([8], 9, [1])])
    plan = attention.plan(moved(batch, "meta"))
    qkv = torch.empty(2, 8, 64, dtype=torch.bfloat16, device=there)
    assert counted(lambda: attention.write_and_attend(plan, 0, qkv, 0.1)) == {"_keep": 1, "_attend": 1, "_join": 1}
