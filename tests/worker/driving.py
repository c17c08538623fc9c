"""Drives an engine without a scheduler: assigns slots and pages, and plans chunks and batches as a test asks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tests.tops import split_tops
from tests.worker.test_fake_worker import slot, step
from tgi.microkernel.messages.codec import unpack_float32, unpack_int32
from tgi.microkernel.messages.kv_groups import ONE_FULL_GROUP, GroupKind, KVGroup
from tgi.microkernel.messages.protocol import DeploymentLimits, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.attention import build_attention
from tgi.worker.attention.interface import AttentionBackend
from tgi.worker.engine.draft_runner import DraftModel
from tgi.worker.engine.engine import GraphCaptureConfig, TorchEngine
from tgi.worker.engine.prompt_parts import PromptParts
from tgi.worker.models.draft_head import DraftHead
from tgi.worker.models.interface import Model
from tgi.worker.sampling.watermark import Watermark
from tgi.worker.state_cache import StateCache

# (request, number of its sampled tokens) -> its drafts, or the number of drafts that the draft model proposes.
Guess = Callable[[int, int], "list[int] | int"]


class Drawn(NamedTuple):
    """The sampled tokens of one request."""

    ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]  # the alternatives at each id; empty unless requested


def make_engine(
    model: Model,
    slots: int = 16,
    pages: int = 256,
    draft: Model | DraftHead | None = None,
    mark: Watermark | None = None,
    attention: AttentionBackend | None = None,
    recording: GraphCaptureConfig | None = None,
    images: PromptParts | None = None,
    drafting: AttentionBackend | None = None,
) -> TorchEngine:
    """`attention` and `drafting`: those of the model and of `draft`."""
    states = [KVGroup(GroupKind.RECURRENT, interval=1 << 20, drafts=8 * slots)] * (model.kv.state is not None)
    groups = [*ONE_FULL_GROUP, *states]
    state_slots = (1 + 8) * slots + 1
    attention = attention or build_attention(model.kv, pages, model.device, state_slots)
    if model.kv.state is not None and attention.state is None:
        attention.state = StateCache(model.kv.state, state_slots, model.device)
    size, dtype = attention.page_size, str(model.kv.dtype).removeprefix("torch.")
    total = min(model.context_length, pages * size)
    limits = DeploymentLimits(
        total, total - 1, pages * size, 4096, slots, pages, size, model.vocab_size, dtype, "cpu", groups
    )
    second = draft and DraftModel(draft, drafting or build_attention(draft.kv, pages, draft.device))
    return TorchEngine(
        model, attention, limits, draft_model=second, watermark=mark, graph_capture=recording, images=images
    )


def drive(
    engine: TorchEngine,
    prompts: Sequence[list[int]],
    count: int,
    samplings: Sequence[SamplingParams] | None = None,
    chunk: int = 4096,
    stagger: int = 0,
    guess: Guess | None = None,
    generated: int = 0,
) -> list[Drawn]:
    """Generates `count` tokens after each prompt, in common steps; request n starts `stagger` * n steps later.

    With `guess` the rows have drafts, at most as many as they still need. The last `generated` ids of each prompt were
    generated before.
    """
    size = engine.limits.page_size
    samplings = samplings or [SamplingParams(0)] * len(prompts)
    drawn = [Drawn([], [], []) for _ in prompts]
    computed = [0] * len(prompts)
    free = list(range(engine.limits.pages))[::-1]
    number = 0
    engine.reset()
    while any(len(one.ids) < count for one in drawn):
        rows: list[tuple[int, int, int, int]] = []
        new, pages = [], []
        drafts: list[int] = []
        draft_ids: list[int] = []
        for at, prompt in enumerate(prompts):
            known = len(prompt) + len(drawn[at].ids)
            if number < at * stagger or len(drawn[at].ids) == count:
                continue
            if computed[at] == 0:
                new.append(slot(at, prompt, encode(samplings[at]), len(prompt) - generated))
                pages += [(at, free.pop()) for _ in range(-(-(len(prompt) + count) // size))]
            tokens = min(chunk, known - computed[at])
            rows.append((at, computed[at], tokens, int(computed[at] + tokens == known)))
            computed[at] += tokens
            drafts.append(0)
            left = count - len(drawn[at].ids) - 1
            if guess is not None and computed[at] == known and left:
                guessed = guess(at, len(drawn[at].ids))
                if isinstance(guessed, list):
                    draft_ids += guessed[:left]
                    guessed = len(guessed)
                drafts[-1] = min(guessed, left)
        number += 1
        if rows:
            given = (drafts, draft_ids) if any(drafts) else ()
            result = engine.collect(engine.launch(step(number, rows, new, pages, 1, *given)))
            assert result.error == ""
            drawing = [at for at, _, _, draw in rows if draw]
            most = [1 + drafted for drafted, (*_, draw) in zip(drafts, rows, strict=True) if draw]
            assert all(1 <= got <= limit for got, limit in zip(result.counts, most, strict=True))
            for at, got in zip(drawing, result.counts, strict=True):
                computed[at] += got - 1
            drawing = [at for at, got in zip(drawing, result.counts, strict=True) for _ in range(got)]
            tops = split_tops(result) or [[]] * len(drawing)
            for at, token, logprob, top in zip(
                drawing, unpack_int32(result.token_ids), unpack_float32(result.logprobs), tops, strict=True
            ):
                drawn[at].ids.append(token)
                drawn[at].logprobs.append(_comparable(logprob))
                drawn[at].tops.append([(other, _comparable(value)) for other, value in top])
    return drawn


def _comparable(logprob: float) -> float:
    """Replaces NaN (the logprob of a row without an allowed token) by one object, which compares equal in lists."""
    return math.nan if math.isnan(logprob) else logprob


def generate(directory: Any, prompt: list[int], count: int) -> Drawn:
    """The same from transformers, greedy and in float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return generate_with(model, prompt, count)


def generate_with(model: Any, prompt: list[int], count: int) -> Drawn:
    """Greedy tokens, logprobs and the top 3 tokens of a loaded transformers model."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = out.sequences[0, len(prompt) :].tolist()
    rows = [logits[0].log_softmax(-1) for logits in out.logits]
    logprobs = [float(row[token]) for row, token in zip(rows, ids, strict=True)]
    likeliest = [row.topk(3) for row in rows]
    tops = [list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in likeliest]
    return Drawn(ids, logprobs, tops)
