"""Prompt logprobs: equal to transformers, bit for bit the same in any batch and chunk, in bounded memory."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models import model as make
from tests.worker.driving import make_engine
from tests.worker.test_fake_worker import slot, step
from tests.worker.test_fallback import OTHERS, build, prompts, save
from tgi.microkernel.messages.codec import unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import MAX_PROMPT_TOP_TOKENS, SlotAssignment, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.interface import BadStep
from tgi.worker.models.loader import build_model
from tgi.worker.sampling.top_logprobs import BLOCK_ROWS

pytestmark = pytest.mark.slow

Tops = list[tuple[int, float]]
# Processors that would change any distribution.
STEERED = encode(SamplingParams(1, temperature=0.5, top_k=3, repetition_penalty=1.4, top_n=2))


def load(kind: str, dtype: str = "float32") -> TorchEngine:
    return make_engine(build_model(make(kind), dtype, "cpu", lambda stage, percent: None))


def asking(at: int, ids: list[int], top_n: int = 0, first: int = 1, sampling: bytes = STEERED) -> SlotAssignment:
    return slot(at, ids, sampling)._replace(prompt_logprobs_from=first if len(ids) > 1 else 0, prompt_top_n=top_n)


def tell(
    engine: TorchEngine, slots: Sequence[SlotAssignment], chunk: int = 4096, first_step: Sequence[int] = ()
) -> list[tuple[list[float], Tops]]:
    """The prompt logprobs of each slot, computed together in chunks; slot n starts at step first_step[n]."""
    engine.reset()
    size = engine.limits.page_size
    told: list[tuple[list[float], Tops]] = [([], []) for _ in slots]
    done = [0] * len(slots)
    free = list(range(engine.limits.pages))
    for number in count(1):
        rows, new, pages = [], [], []
        for at, one in enumerate(slots):
            total = len(one.token_ids) // 4
            if done[at] == total or number <= (first_step[at] if first_step else 0):
                continue
            if not done[at]:
                new.append(one)
                pages += [(one.slot, free.pop()) for _ in range(-(-(total + 1) // size))]
            tokens = min(chunk, total - done[at])
            rows.append((at, done[at], tokens, int(done[at] + tokens == total)))
        if not rows:
            if all(done[at] == len(one.token_ids) // 4 for at, one in enumerate(slots)):
                return told
            continue
        result = engine.collect(engine.launch(step(number, rows, new, pages)))
        assert result.error == ""
        logprobs = iter(unpack_float32(result.prompt_logprobs))
        tops = iter(zip(unpack_int32(result.prompt_top_ids), unpack_float32(result.prompt_top_logprobs), strict=True))
        for at, start, tokens, _ in rows:
            done[at] = start + tokens
            asked = slots[at]
            for position in range(start, start + tokens):
                if 0 < asked.prompt_logprobs_from <= position + 1 < asked.prompt_tokens:
                    told[at][0].append(next(logprobs))
                    told[at][1].extend(next(tops) for _ in range(asked.prompt_top_n))
        assert next(logprobs, None) is None
        assert next(tops, None) is None
    raise AssertionError


def reference(network: Any, ids: list[int], top_n: int) -> tuple[list[float], list[list[float]]]:
    """transformers' logprobs of the prompt's tokens and of the alternatives."""
    with torch.inference_mode():
        logprobs = network(torch.tensor([ids])).logits[0].float().log_softmax(-1)[:-1]
    told = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return told.tolist(), logprobs.topk(top_n).values.flatten().tolist()


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_prompt_logprobs_equal_those_of_transformers(kind: str) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(make(kind), dtype=torch.float32)
    asked = [ids for ids in prompts(16) if len(ids) > 1]
    got = tell(load(kind), [asking(at, ids, 3) for at, ids in enumerate(asked)], chunk=50)
    for ids, (logprobs, tops) in zip(asked, got, strict=True):
        expected, likeliest = reference(network, ids, 3)
        assert logprobs == pytest.approx(expected, abs=1e-4)
        assert [logprob for _, logprob in tops] == pytest.approx(likeliest, abs=1e-4)
        for at, logprob in enumerate(logprobs):
            assert logprob in [value for token, value in tops[3 * at : 3 * at + 3] if token == ids[at + 1]] or (
                ids[at + 1] not in [token for token, _ in tops[3 * at : 3 * at + 3]]
            )


@pytest.mark.parametrize(("dtype", "threads"), [("float32", 2), ("bfloat16", 1), ("float16", 1)])
def test_prompt_logprobs_have_the_same_bits_in_any_batch(dtype: str, threads: int) -> None:
    engine = load("qwen3", dtype)
    asked = prompts(13) if threads == 1 else prompts(13)[9:]
    top_n = [at % 3 * (at % 4) for at in range(len(asked))]
    alone = [tell(engine, [asking(0, ids, n)])[0] for ids, n in zip(asked, top_n, strict=True)]
    assert [len(logprobs) for logprobs, _ in alone] == [len(ids) - 1 for ids in asked]
    torch.set_num_threads(threads)
    slots = [asking(at, ids, n) for at, (ids, n) in enumerate(zip(asked, top_n, strict=True))]
    for chunk, stagger in ((4096, 0), (BLOCK_ROWS + 1, 1), (15, 0)) if threads == 1 else ((50, 0),):
        assert tell(engine, slots, chunk, [stagger * at for at in range(len(slots))]) == alone, chunk
    # Together with others that do not ask, and with other parameters.
    plain = encode(SamplingParams(3))
    mixed = [
        asking(at, ids, n, first=at % 2, sampling=plain) for at, (ids, n) in enumerate(zip(asked, top_n, strict=True))
    ]
    for at, got in enumerate(tell(engine, mixed)):
        assert got == (alone[at] if at % 2 else ([], []))


def test_a_resumed_prompt_omits_what_was_sent_before() -> None:
    engine = load("llama")
    ids = prompts(13)[12]
    whole, tops = tell(engine, [asking(0, ids, 2)])[0]
    for first in (2, 50, 99):
        for chunk in (4096, 13):
            assert tell(engine, [asking(0, ids, 2, first)], chunk)[0] == (whole[first - 1 :], tops[2 * first - 2 :])
    # Generated ids are not the prompt's.
    resumed = asking(0, ids, 2)._replace(prompt_tokens=40)
    assert tell(engine, [resumed])[0] == (whole[:39], tops[:78])


def test_a_cached_prefix_gives_the_same_logprobs() -> None:
    engine = load("llama")
    ids = prompts(13)[12]
    whole, _ = tell(engine, [asking(0, ids)])[0]
    pages = [(1, engine.limits.pages - 1 - page) for page in range(7)]  # those of the request before
    result = engine.collect(engine.launch(step(99, [(1, 48, 52, 1)], [asking(1, ids, first=49)], pages)))
    assert unpack_float32(result.prompt_logprobs) == whole[48:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fallback_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    engine = make_engine(build(make("persimmon"), dtype))
    asked = prompts(13)[8:]
    slots = [asking(at, ids, 2) for at, ids in enumerate(asked)]
    alone = [tell(engine, [one._replace(slot=0)])[0] for one in slots]
    for chunk in (4096, 33, 5):
        assert tell(engine, slots, chunk) == alone
    # With the same weights, which are rounded to the type, and nothing else rounded.
    network = transformers.AutoModelForCausalLM.from_pretrained(make("persimmon"), dtype=dtype).float()
    for ids, (logprobs, tops) in zip(asked, alone, strict=True):
        expected, likeliest = reference(network, ids, 2)
        close = 1e-4 if dtype is torch.float32 else 0.2
        assert logprobs == pytest.approx(expected, abs=close)
        assert [logprob for _, logprob in tops] == pytest.approx(likeliest, abs=close)


@pytest.mark.parametrize("config", OTHERS[1::3], ids=lambda config: config.model_type)
def test_other_architectures_equal_transformers(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(config, tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = make_engine(build(directory))
    asked = [ids for ids in prompts(13, vocab=64) if len(ids) > 60]
    layers = []
    attend = engine._attention.write_and_attend
    monkeypatch.setattr(engine._attention, "write_and_attend", lambda *a: (layers.append(a[1]), attend(*a))[1])
    for ids in asked:
        got, _ = tell(engine, [asking(0, ids)])[0]
        assert got == pytest.approx(reference(network, ids, 1)[0], abs=1e-4)
    assert layers == [0, 1] * len(asked)  # the head alone is computed for each block


def test_logits_are_computed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load("llama")
    seen = []
    plain = torch.log_softmax

    def log_softmax(logits: torch.Tensor, dim: int) -> torch.Tensor:
        seen.append(len(logits))
        return plain(logits, dim)

    monkeypatch.setattr(torch, "log_softmax", log_softmax)
    ids = prompts(15)[14]
    tell(engine, [asking(0, ids)])
    assert (sum(seen), max(seen)) == (len(ids) - 1 + 1, BLOCK_ROWS)  # and the greedy token


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs_from": 3}, {"prompt_logprobs_from": -1}, {"prompt_top_n": MAX_PROMPT_TOP_TOKENS + 1}],
    ids=str,
)
def test_impossible_prompt_logprobs_are_rejected(fields: dict[str, int]) -> None:
    engine = load("llama")
    with pytest.raises(BadStep, match="logprobs from position"):
        engine.launch(step(1, [(0, 0, 3, 1)], [slot(0, [5, 6, 7])._replace(**fields)], [(0, 1)]))
