"""The columns of running requests: what a slot takes, at its bounds, and what it refuses in words."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.test_sampling import bad_words, bias
from tgi.hub.grammar import piece_table
from tgi.kernel.messages import MOST_TOPS, Sampling, Slot, Step, encode
from tgi.kernel.pack import FLOAT32, INT32, pack
from tgi.worker.grammar import Grammars
from tgi.worker.lora.shelf import Shelf, Unread
from tgi.worker.params import NOT_ABOUT_SCORES, Params
from tgi.worker.slots import BadStep, Slots
from tgi.worker.warm import WARM_SAMPLING

# Fields that are columns of numbers.
COLUMNS = {"bias_ids", "biases", "end_ids", "bad_word_ids", "bad_word_lengths"}
LARGEST_FLOAT = 3.4028234663852886e38


def occupy(sampling: Sampling, prompt_tokens: int = 2) -> Slots:
    slots = Slots(4, 32, 8, 16, 64, torch.device("cpu"), Grammars(lambda: piece_table([b"a"])), Shelf(Unread))
    new = Slot(1, pack(INT32, [1, 2, 3]), prompt_tokens, encode(sampling))
    slots.apply(Step(1, 1, [new], b"", b"", b"", b"", b"", b""))
    return slots


def test_a_slot_holds_what_its_last_occupant_asked_for() -> None:
    params = Params.empty(3)
    params.put(1, Sampling(5, count_penalty=1.5, **bias({3: -1.0})), 7)
    assert params.bias[1].ids.tolist() == [3]
    assert (params.count_penalty[1], params.prompt_tokens[1]) == (1.5, 7)
    taken = params.take(np.array([1, 0]))
    assert (taken.seed.tolist(), taken.top_p.tolist(), taken.bias[1]) == ([5, 0], [1.0, 1.0], None)
    params.put(1, Sampling(6), 1)
    assert params.bias[1] is None
    assert taken.count_penalty.tolist() == [1.5, 0.0]


def test_who_leaves_the_scores_alone() -> None:
    """All processors are passed over where all rows are plain."""
    params = Params.empty(1)
    for plain in (Sampling(0), Sampling(9, True, top_n=3, choice=2, adapter="a", adapter_digest=b"d")):
        params.put(0, plain, 1)
        assert params.plain[0]
    for name in set(Sampling._fields) - set(NOT_ABOUT_SCORES) - COLUMNS:
        params.put(0, Sampling(0, **{name: 2}), 1)
        assert not params.plain[0], name
    for columns in (bias({1: 1.0}), bad_words([1])):
        params.put(0, Sampling(0, **columns), 1)
        assert not params.plain[0]


def test_the_trial_at_start_has_every_processor_at_work() -> None:
    """Its peak of memory is what the KV cache must leave free."""
    choosing = set(NOT_ABOUT_SCORES)
    choosing.add("grammar")  # a bit for each id: nothing beside the scores
    idle = {name for name, off in Sampling._field_defaults.items() if getattr(WARM_SAMPLING, name) == off}
    assert idle <= choosing


@pytest.mark.parametrize(
    "extreme",
    [
        {"seed": 2**64 - 1, "choice": 2**32, "top_n": 2**32 - 1, "top_k": 2**31 - 1},
        {"temperature": LARGEST_FLOAT, "repetition_penalty": LARGEST_FLOAT, "top_p": 1e-45, "typical_p": 1e-45},
        {"temperature": 1e-45, "repetition_penalty": 1e-45, "frequency_penalty": -2.0, "presence_penalty": 2.0},
        bias(dict.fromkeys(range(64), -100.0)),
        {"min_new_tokens": 2**32 - 1, "end_ids": pack(INT32, range(64)), "watermark": True},
        {"min_p": 1e-45, **bad_words(range(64), *([token] for token in range(64)))},
    ],
    ids=str,
)
def test_whatever_passes_the_front_end_fits(extreme: dict[str, Any]) -> None:
    slots = occupy(Sampling(**{"seed": 0} | extreme))
    assert slots.params.top_n[1] <= MOST_TOPS
    assert slots.known[1] == 3


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(0, choice=-1), "slot 1: "),
        (Sampling(-1), "slot 1: "),
        (Sampling(0, top_k=2**63), "slot 1: "),
        (Sampling(0, bias_ids=pack(INT32, [1])), "slot 1: 1 bias_ids and 0 biases"),
        (Sampling(0, bias_ids=pack(INT32, [1, 1]), biases=pack(FLOAT32, [1, 2])), "slot 1: a token has two biases"),
        (Sampling(0, **bias({64: 1.0})), "biased token id 64 is not within 0 to 63"),
        (Sampling(0, **bias({-1: 1.0})), "biased token id -1 is not within 0 to 63"),
        (Sampling(0, min_new_tokens=1, end_ids=pack(INT32, [64])), "end id 64 is not within 0 to 63"),
        (Sampling(0, min_new_tokens=2**63), "slot 1: "),
        (Sampling(0, **bad_words([1], [64, 2])), "bad word id 64 is not within 0 to 63"),
        (Sampling(0, bad_word_ids=pack(INT32, [1])), r"slot 1: 1 bad_word_ids and bad_word_lengths \[\]"),
        (Sampling(0, bad_word_lengths=pack(INT32, [1])), r"slot 1: 0 bad_word_ids and bad_word_lengths \[1\]"),
        (Sampling(0, **bad_words([1], [])), r"slot 1: 1 bad_word_ids and bad_word_lengths \[1, 0\]"),
    ],
    ids=str,
)
def test_what_no_front_end_sends_is_named(sampling: Sampling, words: str) -> None:
    with pytest.raises(BadStep, match=words):
        occupy(sampling)


@pytest.mark.parametrize("prompt_tokens", [-1, 0, 4])
def test_a_prompt_that_does_not_fit_its_ids(prompt_tokens: int) -> None:
    with pytest.raises(BadStep, match=f"slot 1: {prompt_tokens} of 3 ids are prompt"):
        occupy(Sampling(0), prompt_tokens)
