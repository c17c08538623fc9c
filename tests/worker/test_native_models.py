"""Whole models on our own kernels: as near to float32 as on torch's, and the same bits under any load."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.models import model as make
from tests.worker.batches import Row, make_batch
from tests.worker.driving import drive, make_engine
from tests.worker.ours import our_kernels
from tgi.kernel.messages import Sampling
from tgi.worker.attention import build_attention, page_size
from tgi.worker.attention.native import NativeAttention
from tgi.worker.batch import Model
from tgi.worker.load import build_model, read_recipe
from tgi.worker.models.families import FAMILIES
from tgi.worker.native import choose
from tgi.worker.native.choose import find_kernels

LENGTHS = (90, 1, 17, 44)  # the windows of the models have 40 tokens


@cache
def directory(kind: str) -> Path:
    return make(kind, hidden=128, intermediate=192)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def load(kind: str, dtype: str = "bfloat16", native: bool = False) -> Model:
    path = directory(kind)
    kernels = our_kernels(read_recipe(path, dtype)) if native else None
    return build_model(path, dtype, "cpu", lambda stage, percent: None, kernels=kernels)


def logprobs(model: Model) -> torch.Tensor:
    """Behind each prompt, [prompts, vocab]."""
    attention = build_attention(model.kv, 100, model.device)
    rows = [Row(ids, 0, list(range(20 * row, 20 * row + 20))) for row, ids in enumerate(prompts())]
    return model.forward(make_batch(rows, attention.page_size), attention).log_softmax(-1)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_is_computed_as_well_as_by_torch_and_bit_for_bit_the_same(kind: str) -> None:
    ours = load(kind, native=True)
    engine = make_engine(ours, pages=64)
    assert isinstance(engine._attention, NativeAttention)
    exact, torchs = logprobs(load(kind, "float32")), logprobs(load(kind))
    off, allowed = (logprobs(ours) - exact).abs(), (torchs - exact).abs()
    assert off.mean() <= 1.25 * allowed.mean() + 1e-4
    # Greedy rows among themselves do without logits.
    samplings = [Sampling(0), Sampling(7, temperature=0.8), Sampling(3, top_k=5), Sampling(0)]
    together = drive(engine, prompts(), 8, samplings, chunk=23, stagger=1)
    alone = [drive(engine, [ids], 8, [asked])[0] for ids, asked in zip(prompts(), samplings, strict=True)]
    assert together == alone


def test_what_does_not_fit_is_left_to_torch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "need_processor", lambda: None)
    recipe = read_recipe(directory("llama"), "bfloat16")
    small = read_recipe(make("llama"), "bfloat16")  # heads of 16 numbers
    assert find_kernels([recipe], "cuda")[0] is None
    for recipes, reason in (
        ([recipe, small], "head_dim of 16"),
        ([read_recipe(directory("llama"), "float32")], "in float32"),
        ([read_recipe(make("gpt2"), "bfloat16")], "through transformers"),
    ):
        kernels, told = find_kernels(recipes, "cpu")
        assert kernels is None
        assert reason in told
    assert not caplog.messages


def test_pages_tell_our_kernels_from_torchs() -> None:
    """So a scheduler refuses a restarted worker that would go on with the others, whose last bits differ."""
    one, other = load("llama", native=True), load("llama")
    assert page_size(one.kv, one.device) != page_size(other.kv, other.device)
