"""The draft runner: its drafts are accepted where the models agree, and never change the sampled tokens."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import model as make
from tests.worker.cpu_kernels.test_models import load as load_native
from tests.worker.driving import drive, make_engine
from tests.worker.test_fake_worker import slot, step
from tests.worker.test_speculation import COUNT, VOCAB, engine_of, load, requests
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.settings.table import Settings
from tgi.worker.engine.draft_runner import DRAFT_PREFILL_INTERVAL
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.startup import LoadedModels, _cache_requirements, quantization_by_directory, start_engine

pytestmark = pytest.mark.slow


def asking(count: int, among: float = 1.0) -> tuple[list[int], Callable[[int, int], int]]:
    """A guess function that asks for `count` drafts in a share `among` of the rows, and the rows that it asked for."""
    rng, asked = random.Random(count), []

    def guess(row: int, drawn: int) -> int:
        if rng.random() >= among:
            return 0
        asked.append(row)
        return count

    return asked, guess


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_drafts_of_the_same_model_are_accepted(dtype: str) -> None:
    """Also for rows that sample, with all logits processors but grammars."""
    model = load("llama", dtype)
    engine = engine_of(model, draft=model)
    prompts, samplings = requests(7)
    samplings = [sampling._replace(grammar="") for sampling in samplings]
    truth = drive(engine_of(model), prompts, COUNT, samplings)
    for count, chunk, stagger in ((4, 4096, 0), (3, 7, 2)):
        asked, guess = asking(count)
        assert drive(engine, prompts, COUNT, samplings, chunk, stagger, guess) == truth
        assert sorted(asked) == sorted([*range(len(prompts))] * (COUNT // (count + 1)))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_drafts_of_another_model_change_no_token(kind: str) -> None:
    """One that is sometimes right and one that never is, for rows with and without grammars, in used slots."""
    model = load()
    prompts, samplings = requests(8)
    truth = drive(engine_of(model), prompts, COUNT, samplings)
    engine = engine_of(model, draft=load(kind, "bfloat16" if kind == "llama" else "float32"))
    wasted = []
    for among, chunk, stagger in ((1.0, 4096, 0), (0.5, 7, 3)):
        asked, guess = asking(3, among)
        assert drive(engine, prompts, COUNT, samplings, chunk, stagger, guess) == truth
        wasted.append(len(asked) / (among * COUNT * len(prompts)))
    assert (wasted[0] < 0.6) == (kind == "llama")


def test_draft_models_with_smaller_or_larger_vocabularies() -> None:
    """Models of one tokenizer may be padded to different sizes."""
    narrow, wide = load(), load(vocab=VOCAB + 70)
    prompts, samplings = requests(9, 3)
    for model, draft in ((narrow, wide), (wide, narrow)):
        truth = drive(make_engine(model), prompts, 12, samplings[:3])
        assert model is narrow or any(token >= VOCAB for one in truth for token in one.ids)
        assert drive(make_engine(model, draft=draft), prompts, 12, samplings[:3], guess=asking(3)[1]) == truth


def test_the_draft_model_follows_steps_without_drafts() -> None:
    """It computes prompts, and several tokens at a time of rows that decode without drafts. Afterwards its drafts are
    all accepted; also after a cached prefix, and in a reused slot."""
    model = load()
    engine = make_engine(model, draft=model)
    prompt = list(range(20, 52))
    (truth,) = drive(engine, [prompt], 2 * DRAFT_PREFILL_INTERVAL + 6)
    after = 2 * DRAFT_PREFILL_INTERVAL + 1
    asked: list[int] = []

    def guess(row: int, drawn: int) -> int:
        asked.append(drawn)
        return 4 if drawn >= after else 0

    assert drive(engine, [prompt], 2 * DRAFT_PREFILL_INTERVAL + 6, guess=guess) == [truth]
    assert asked[-1] == after  # all 4 drafts were accepted, and one more token came
    # Another request finds the prompt's two pages and more in the cache, and takes the slot.
    known = prompt + truth.ids[: DRAFT_PREFILL_INTERVAL - 1]
    size = engine.limits.page_size
    cached = len(known) // size * size - size
    pages = [(0, engine._slots.page_table[0, at]) for at in range(cached // size)] + [(0, 200 + at) for at in range(4)]
    new = [slot(0, known)]
    result = engine.collect(engine.launch(step(99, [(0, cached, len(known) - cached, 1)], new, pages, 1, [4])))
    assert result.counts == b"\x05"
    assert unpack_int32(result.token_ids) == truth.ids[DRAFT_PREFILL_INTERVAL - 1 : DRAFT_PREFILL_INTERVAL + 4]


def test_which_rows_the_draft_model_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts at once, because other requests may share their pages; tokens decoded without drafts up to
    DRAFT_PREFILL_INTERVAL at a time; no cached prefix; and for drafts first the tokens not computed yet, then one token
    at a time."""
    model, draft = load(), load()
    engine = make_engine(model, draft=draft)
    seen: list[list[int]] = []
    forward = draft.forward_head
    monkeypatch.setattr(
        draft, "forward_head", lambda batch, cache: (seen.append(batch.query_lens_host), forward(batch, cache))[1]
    )
    drive(engine, [list(range(20, 52)), [7]], DRAFT_PREFILL_INTERVAL + 1, chunk=20)
    assert seen == [
        [20],
        [12],
        [DRAFT_PREFILL_INTERVAL - 1],
        [DRAFT_PREFILL_INTERVAL],
    ]  # a prompt of one token is computed later, with the tokens after it
    del seen[:]
    new, pages = slot(5, list(range(20, 57))), [(5, engine._slots.page_table[0, at]) for at in range(2)]
    engine.launch(step(99, [(5, 32, 5, 1)], [new], [*pages, (5, 255)]))
    engine.collect(engine.launch(step(100, [(5, 37, 1, 1)])))
    engine.collect(engine.launch(step(101, [(5, 38, 1, 1)], drafts=[3])))
    assert seen == [[5], [2], [1], [1]]


def test_the_draft_runner_sees_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on our own kernels, whose decode fast path is off with a draft model."""
    model, draft = load_native("llama", native=True), load_native("llama", native=True)
    seen: list[int] = []
    forward = draft.forward_head
    monkeypatch.setattr(
        draft, "forward_head", lambda batch, cache: (seen.extend(batch.query_lens_host), forward(batch, cache))[1]
    )
    drive(
        make_engine(model, draft=draft),
        [[7]],
        3 * DRAFT_PREFILL_INTERVAL,
        guess=lambda _, drawn: int(drawn == 3 * DRAFT_PREFILL_INTERVAL - 2),
    )
    assert max(seen) == DRAFT_PREFILL_INTERVAL


def test_the_draft_model_continues_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = load(), load()
    engine = make_engine(model, draft=draft)
    prompt = list(range(20, 52))
    (truth,) = drive(engine, [prompt], 10)
    engine.reset()
    pages = [(0, page) for page in range(3)]
    engine.collect(engine.launch(step(1, [(0, 0, 32, 1)], [slot(0, prompt)], pages)))

    def fail(*_: object) -> None:
        raise RuntimeError("it fails")

    for failing in (model, draft, model):
        with monkeypatch.context() as patch:
            patch.setattr(failing, "forward_head", fail)
            patch.setattr(failing, "forward_greedy", fail)
            with pytest.raises(RuntimeError, match="it fails"):
                engine.launch(step(2, [(0, 32, 1, 1)], drafts=[3]))
    result = engine.collect(engine.launch(step(5, [(0, 32, 1, 1)], drafts=[3])))
    assert result.counts == b"\x04"
    assert unpack_int32(result.token_ids) == truth.ids[1:5]


def start(draft: Path | None, run: Path, served: Path | None = None, **settings: Any) -> tuple[TorchEngine, list[str]]:
    """An engine started with a draft model, and the reported stages of start-up."""
    told: list[str] = []
    values = {"max_batch_size": 4, "max_total_tokens": 64, "speculate": 3, "device": "cpu"} | settings
    wanted = Settings(model_dir=served or make("llama"), draft_model_dir=draft, run_dir=run, **values)
    return start_engine(wanted, lambda stage, percent: told.append(stage)), told


def test_the_draft_model_is_loaded_at_start(tmp_path: Path) -> None:
    engine, told = start(make("llama"), tmp_path)
    assert {"loading weights", "draft model: loading weights"} <= set(told)
    pages, prompt = [(0, 0), (0, 1)], [9, 8, 7]
    first = unpack_int32(engine.collect(engine.launch(step(1, [(0, 0, 3, 1)], [slot(0, prompt)], pages))).token_ids)
    result = engine.collect(engine.launch(step(2, [(0, 3, 1, 1)], drafts=[3])))
    assert result.counts == b"\x04"
    assert drive(make_engine(load("llama")), [prompt], 5)[0].ids == first + unpack_int32(result.token_ids)


@pytest.mark.parametrize(
    ("asked", "drafts"), [("int4", "int4"), ("eetq", "eetq"), ("fp8", "fp8"), ("gptq", None), (None, None)]
)
def test_quantization_at_load_applies_to_the_draft_model_too(
    asked: str | None, drafts: str | None, tmp_path: Path
) -> None:
    served, draft = tmp_path / "served", tmp_path / "draft"
    settings = Settings(model_dir=served, draft_model_dir=draft, quantize=asked)
    assert quantization_by_directory(settings) == {served: asked, draft: drafts}


def test_a_page_takes_the_bytes_of_both_caches() -> None:
    large, small = load("qwen3"), load("llama", hidden=64, layers=2)
    both, alone, other = (
        _cache_requirements(LoadedModels(*models)) for models in ((large, small), (large, None), (small, None))
    )
    assert both == alone._replace(page_bytes=alone.page_bytes + other.page_bytes, windows=())  # one KV group
    halved = _cache_requirements(LoadedModels(large, small, torch.float8_e5m2))
    assert halved == both._replace(page_bytes=both.page_bytes // large.kv.dtype.itemsize)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"vocab": VOCAB + 70}, "their tokenizers differ"),
        ({"context": 48}, "the draft model's sequences have at most 48 tokens"),
    ],
)
def test_an_unsuitable_draft_model_is_rejected(draft: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        start(make("llama", **draft), tmp_path)


def test_a_draft_model_without_weights_is_rejected(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(make("llama"), broken)
    for file in broken.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match="broken"):
        start(broken, tmp_path)


def test_the_draft_models_context_limits_requests(tmp_path: Path) -> None:
    engine, _ = start(make("llama", context=48), tmp_path, max_total_tokens=None)
    assert engine.limits.max_total_tokens == 48
