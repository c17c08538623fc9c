"""Sampling columns: the parameters of a slot, extreme values, and errors for values that do not fit."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cases import each_case
from tests.worker.test_sampling import bad_words, bias
from tgi.hub.llguidance_tables import piece_table
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column
from tgi.microkernel.messages.protocol import MAX_TOP_TOKENS, SlotAssignment, Step, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.engine.input_batch import BatchBuilder, Slots
from tgi.worker.engine.interface import BadStep
from tgi.worker.engine.startup import WARMUP_SAMPLING_PARAMS
from tgi.worker.lora.registry import AdapterRegistry, FakeAdapter
from tgi.worker.sampling.grammar import GrammarManager
from tgi.worker.sampling.logits_processors import HISTORY_TOKENS, apply_logits_processors
from tgi.worker.sampling.sampling_batch import FIELDS_WITHOUT_EFFECT_ON_LOGITS, KERNEL_FIELDS, SamplingColumns
from tgi.worker.sampling.watermark import Watermark

pytestmark = pytest.mark.slow

# Fields that are columns of numbers.
COLUMNS = {"bias_ids", "biases", "end_ids", "bad_word_ids", "bad_word_lengths"}
LARGEST_FLOAT = 3.4028234663852886e38


def occupy(sampling: SamplingParams, prompt_tokens: int = 2, length: int = 3) -> Slots:
    slots = Slots(
        4,
        max(32, length),
        8,
        16,
        64,
        torch.device("cpu"),
        GrammarManager(lambda: piece_table([b"a"])),
        AdapterRegistry(FakeAdapter),
    )
    new = SlotAssignment(1, pack_column(INT32, [1 + at % 3 for at in range(length)]), prompt_tokens, encode(sampling))
    slots.apply_step(Step(1, 1, [new], b"", b"", b"", b"", b"", b""))
    return slots


def test_a_slot_holds_the_parameters_of_its_last_request() -> None:
    params = SamplingColumns.allocate(3)
    params.assign(1, SamplingParams(5, count_penalty=1.5, **bias({3: -1.0})), 7)
    assert params.bias[1].ids.tolist() == [3]
    assert (params.count_penalty[1], params.prompt_tokens[1]) == (1.5, 7)
    taken = params.select(np.array([1, 0]))
    assert (taken.seed.tolist(), taken.top_p.tolist(), taken.bias[1]) == ([5, 0], [1.0, 1.0], None)
    params.assign(1, SamplingParams(6), 1)
    assert params.bias[1] is None
    assert taken.count_penalty.tolist() == [1.5, 0.0]


def test_which_parameters_leave_logits_unprocessed() -> None:
    """No logits processor runs if all rows are unprocessed, and on a GPU if all rows are plain."""
    params = SamplingColumns.allocate(1)
    for plain in (SamplingParams(0), SamplingParams(9, True, top_n=3, choice=2, adapter="a", adapter_digest=b"d")):
        params.assign(0, plain, 1)
        assert params.unprocessed[0]
        assert params.plain[0] == (not plain.top_n)
    for name in set(SamplingParams._fields) - set(FIELDS_WITHOUT_EFFECT_ON_LOGITS) - COLUMNS:
        params.assign(0, SamplingParams(0, **{name: 2}), 1)
        assert not params.unprocessed[0], name
        assert params.plain[0] == (name in KERNEL_FIELDS), name
    for columns in (bias({1: 1.0}), bad_words([1])):
        params.assign(0, SamplingParams(0, **columns), 1)
        assert not params.unprocessed[0]


def test_the_warm_up_runs_each_logits_processor() -> None:
    """The KV cache leaves free the peak of memory that the warm-up measures."""
    choosing = set(FIELDS_WITHOUT_EFFECT_ON_LOGITS)
    choosing.add("grammar")  # one bit for each id: little next to the logits
    choosing |= {name for name in SamplingParams._fields if name.startswith("reasoning_")}  # the same
    idle = {
        name for name, off in SamplingParams._field_defaults.items() if getattr(WARMUP_SAMPLING_PARAMS, name) == off
    }
    assert idle <= choosing


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest result of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(one.numel() for one in tree_leaves(result) if torch.is_tensor(one))])
        return result


@each_case(
    "sampling",
    [
        SamplingParams(0, repetition_penalty=1.5),
        SamplingParams(0, frequency_penalty=3.0),
        SamplingParams(0, count_penalty=0.7, presence_penalty=-1.0),
    ],
)
def test_penalties_over_long_contexts_take_no_more_memory(sampling: SamplingParams) -> None:
    """The warm-up measures the memory of a step with short contexts."""
    largest = []
    for length in (HISTORY_TOKENS + 1, 7 * HISTORY_TOKENS):
        slots = occupy(sampling, 1, length)
        builder = BatchBuilder(slots, Watermark(64, torch.device("cpu")))
        batch = builder.build_sampling_batch(np.array([1]), np.array([length]), None)
        logits = torch.zeros(1, 64)
        with LargestTensor() as mode:
            apply_logits_processors(logits, batch)
        largest.append(mode.elements)
        assert logits.count_nonzero() == (0 if sampling.repetition_penalty != 1 else 3)
    assert largest == [HISTORY_TOKENS, HISTORY_TOKENS]


@pytest.mark.parametrize(
    "extreme",
    [
        {"seed": 2**64 - 1, "choice": 2**32, "top_n": 2**32 - 1, "top_k": 2**31 - 1},
        {"temperature": LARGEST_FLOAT, "repetition_penalty": LARGEST_FLOAT, "top_p": 1e-45, "typical_p": 1e-45},
        {"temperature": 1e-45, "repetition_penalty": 1e-45, "frequency_penalty": -2.0, "presence_penalty": 2.0},
        bias(dict.fromkeys(range(64), -100.0)),
        {"min_new_tokens": 2**32 - 1, "end_ids": pack_column(INT32, range(64)), "watermark": True},
        {"min_p": 1e-45, **bad_words(range(64), *([token] for token in range(64)))},
    ],
    ids=str,
)
def test_extreme_values_that_the_api_accepts_fit(extreme: dict[str, Any]) -> None:
    slots = occupy(SamplingParams(**{"seed": 0} | extreme))
    assert slots.params.top_n[1] <= MAX_TOP_TOKENS
    assert slots.num_known[1] == 3


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (SamplingParams(0, choice=-1), "slot 1: "),
        (SamplingParams(-1), "slot 1: "),
        (SamplingParams(0, top_k=2**63), "slot 1: "),
        (SamplingParams(0, bias_ids=pack_column(INT32, [1])), "slot 1: 1 bias_ids and 0 biases"),
        (
            SamplingParams(0, bias_ids=pack_column(INT32, [1, 1]), biases=pack_column(FLOAT32, [1, 2])),
            "slot 1: a token has two biases",
        ),
        (SamplingParams(0, **bias({64: 1.0})), "biased token id 64 is not within 0 to 63"),
        (SamplingParams(0, **bias({-1: 1.0})), "biased token id -1 is not within 0 to 63"),
        (SamplingParams(0, min_new_tokens=1, end_ids=pack_column(INT32, [64])), "end id 64 is not within 0 to 63"),
        (SamplingParams(0, min_new_tokens=2**63), "slot 1: "),
        (SamplingParams(0, top_n=1, listed_ids=pack_column(INT32, [1, 64])), "listed id 64 is not within 0 to 63"),
        (SamplingParams(0, listed_ids=pack_column(INT32, [1])), "slot 1: 1 listed_ids with top_n 0"),
        (
            SamplingParams(0, top_n=1, listed_ids=bytes(4 * MAX_TOP_TOKENS + 4)),
            f"at most {MAX_TOP_TOKENS} are possible",
        ),
        (SamplingParams(0, **bad_words([1], [64, 2])), "bad word id 64 is not within 0 to 63"),
        (SamplingParams(0, bad_word_ids=pack_column(INT32, [1])), r"slot 1: 1 bad_word_ids and bad_word_lengths \[\]"),
        (
            SamplingParams(0, bad_word_lengths=pack_column(INT32, [1])),
            r"slot 1: 0 bad_word_ids and bad_word_lengths \[1\]",
        ),
        (SamplingParams(0, **bad_words([1], [])), r"slot 1: 1 bad_word_ids and bad_word_lengths \[1, 0\]"),
    ],
    ids=str,
)
def test_values_that_the_api_never_sends_are_rejected(sampling: SamplingParams, words: str) -> None:
    with pytest.raises(BadStep, match=words):
        occupy(sampling)


@each_case("prompt_tokens", [-1, 0, 4])
def test_a_prompt_longer_than_its_ids_is_rejected(prompt_tokens: int) -> None:
    with pytest.raises(BadStep, match=f"slot 1: {prompt_tokens} of 3 ids are prompt"):
        occupy(SamplingParams(0), prompt_tokens)
