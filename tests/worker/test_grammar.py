"""Grammars: rows sample only allowed tokens, in any batch, after resumptions and with drafts."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests.models import model
from tests.worker.driving import Drawn, drive, make_engine
from tests.worker.test_fake_worker import slot, step
from tests.worker.test_sampling import bad_words, bias
from tgi.hub.llguidance_tables import piece_table, token_table
from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import StepResult, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.engine.engine import NO_TOKEN_LEFT, TorchEngine
from tgi.worker.models.loader import build_model
from tgi.worker.sampling.grammar import MAX_COMPILED_GRAMMARS, GrammarManager
from tgi.worker.sampling.logits_processors import apply_grammar_bitmask
from tgi.worker.sampling.sampling_batch import SamplingBatch, SamplingColumns
from tgi.worker.sampling.token_bitmask import GrammarBitmask

EOS = 2
PATTERNS = [
    "[0-9]{3}-[0-9]{4}",
    "(red|green|blue)( (red|green|blue)){0,4}",
    "",
    '"[a-zé]{0,12}"',
    "a{25}",
    "(?i)yes|no",
]
COUNT = 30  # tokens: enough for all of them
PROMPT = [30, 40, 50, 60]


@pytest.fixture(scope="module")
def directory() -> Path:
    return model("llama")


@pytest.fixture(scope="module")
def engine(directory: Path) -> TorchEngine:
    card = read_model_config(directory)
    loaded = build_model(directory, "float32", "cpu", lambda stage, percent: None)
    made = make_engine(loaded)
    made._grammars = made._slots._grammars = GrammarManager(
        lambda: token_table(read_tokenizer(card), card.eos_token_ids, loaded.vocab_size)
    )
    return made


def of(pattern: str) -> str:
    return str(LLMatcher.grammar_from_regex(pattern)) if pattern else ""


def sampling(pattern: str, seed: int = 0, **fields: object) -> SamplingParams:
    return SamplingParams(seed, **{"do_sample": True, "grammar": of(pattern)} | fields)  # type: ignore[arg-type]


def text(directory: Path, ids: list[int]) -> str:
    """The text up to EOS, which must be sampled and must be followed by EOS only."""
    end = ids.index(EOS)
    assert set(ids[end:]) == {EOS}
    return str(read_tokenizer(read_model_config(directory)).decode(ids[:end]))


def run(engine: TorchEngine, samplings: list[SamplingParams], **how: int) -> list[Drawn]:
    return drive(engine, [PROMPT] * len(samplings), COUNT, samplings, **how)


@pytest.mark.parametrize("seed", range(4))
def test_texts_match_and_end(engine: TorchEngine, directory: Path, seed: int) -> None:
    found = run(engine, [sampling(pattern, seed) for pattern in PATTERNS])
    for pattern, drawn in zip(PATTERNS, found, strict=True):
        if pattern:
            assert re.fullmatch(pattern, text(directory, drawn.ids))
            assert drawn.logprobs[-1] == 0.0  # nothing else is left


def test_other_rows_change_nothing(engine: TorchEngine) -> None:
    wanted = [sampling(pattern, seed) for seed, pattern in enumerate(PATTERNS)]
    together = run(engine, wanted, stagger=2, chunk=2)
    assert together == [run(engine, [one])[0] for one in wanted]
    free = PATTERNS.index("")
    assert run(engine, [wanted[free]] * 3)[1] == together[free]


def test_greedy_rows_and_all_logits_processors(engine: TorchEngine, directory: Path) -> None:
    """No processor makes a forbidden token possible, and none is listed among the alternatives."""
    forbidden = pack_column(INT32, [5, 6, 7])
    pushed = {"bias_ids": forbidden, "biases": pack_column(FLOAT32, [100.0] * 3), "repetition_penalty": 1.3}
    for fields in ({"do_sample": False}, {"temperature": 5.0, "top_k": 3}, {"top_p": 0.5, "typical_p": 0.5}):
        (drawn,) = run(engine, [sampling("[xyz]{1,9}", top_n=5, **pushed, **fields)])
        assert re.fullmatch("[xyz]{1,9}", text(directory, drawn.ids))
        for top in drawn.tops[drawn.ids.index(EOS) + 1 :]:
            assert top == [(EOS, 0.0)]


def test_a_resumed_request_continues_in_its_grammar(engine: TorchEngine) -> None:
    """After a preemption or a worker's crash, from any token on."""
    asked = sampling(PATTERNS[1], 3)
    (whole,) = run(engine, [asked])
    for known in (1, 3, whole.ids.index(EOS)):
        ids = PROMPT + whole.ids[:known]
        engine.reset()
        back = slot(0, ids, encode(asked))._replace(prompt_tokens=len(PROMPT))
        size = engine.limits.page_size
        rows = [(0, 0, len(ids), 1)]
        drawn = []
        for number in range(1, 6):
            new, pages = ([back], [(0, page) for page in range(-(-64 // size))]) if number == 1 else ([], [])
            drawn += unpack_int32(collect(engine, number, rows, new, pages).token_ids)
            rows = [(0, len(ids) + number - 1, 1, 1)]
        assert drawn == whole.ids[known : known + 5]


def collect(engine: TorchEngine, number: int, rows: list, new: list, pages: list) -> StepResult:
    return engine.collect(engine.launch(step(number, rows, new, pages)))


CALLS = r"""%llguidance {}
start: (ANY <[3]>)* ANY (<[4]> GAP "{" /[a-f]{2,4}/ "}" <[5]>)+
ANY: /[a-z]{0,3}/
GAP: /[ \n]?/
"""


def test_special_tokens_after_drafts(engine: TorchEngine) -> None:
    """Named by id, as in grammars of tool calls: bitmasks equal those without drafts, after right and wrong drafts."""
    pushed = {"bias_ids": pack_column(INT32, [3, 4, 5, 66]), "biases": pack_column(FLOAT32, [4.0] * 3 + [2.0])}
    for seed in range(3):
        asked = SamplingParams(seed, do_sample=True, grammar=CALLS, **pushed)  # type: ignore[arg-type]
        (truth,) = drive(engine, [PROMPT], 20, [asked])
        assert set(truth.ids) & {3, 4, 5}
        engine.reset()
        pages = [(0, page) for page in range(-(-64 // engine.limits.page_size))]
        drawn = unpack_int32(collect(engine, 1, [(0, 0, 4, 1)], [slot(0, PROMPT, encode(asked))], pages).token_ids)
        number = 2
        while len(drawn) < 16:
            drafts = truth.ids[len(drawn) : len(drawn) + 4]
            drafts[number % 4] = (drafts[number % 4] + number % 2) % 512  # every other time one is wrong
            at = len(PROMPT) + len(drawn) - 1
            result = engine.collect(engine.launch(step(number, [(0, at, 1, 1)], drafts=[4], draft_ids=drafts)))
            assert not any(result.row_errors)
            assert result.counts == bytes([5 if number % 2 == 0 else 1 + number % 4])
            drawn += unpack_int32(result.token_ids)
            number += 1
        assert drawn == truth.ids[: len(drawn)]


def test_faults_of_rows_that_do_not_sample_are_reported(engine: TorchEngine) -> None:
    lost, broken = SamplingParams(1, adapter="x", adapter_digest=b"x"), SamplingParams(1, grammar="no grammar at all")
    engine.reset()
    new = [slot(at, PROMPT, encode(one)) for at, one in enumerate((lost, SamplingParams(1), broken))]
    rows = [(0, 0, 3, 0), (1, 0, 4, 1), (2, 0, 4, 1)]
    faults = collect(engine, 1, rows, new, [(at, at) for at in range(3)]).row_errors
    assert faults[:2] == ["the adapter x is not loaded any more", ""]
    assert "grammar" in faults[2]


def test_a_failing_grammar_ends_only_its_row(engine: TorchEngine) -> None:
    broken = SamplingParams(1, grammar="no grammar at all")
    good = sampling(PATTERNS[0], 7)
    engine.reset()
    pages = [(at, at) for at in range(3)]
    new = [slot(at, PROMPT, encode(one)) for at, one in enumerate((good, broken, good))]
    result = collect(engine, 1, [(at, 0, 4, 1) for at in range(3)], new, pages)
    assert result.error == ""
    assert [bool(fault) for fault in result.row_errors] == [False, True, False]
    assert "grammar" in result.row_errors[1]
    assert unpack_int32(result.token_ids)[0] == unpack_int32(result.token_ids)[2]
    result = collect(engine, 2, [(at, 4, 1, 1) for at in range(3)], [], [])
    assert [bool(fault) for fault in result.row_errors] == [False, True, False]
    # The next occupant of its slot knows nothing of it.
    result = collect(engine, 3, [(1, 0, 4, 1)], [slot(1, PROMPT)], [(1, 1)])
    assert result.row_errors == []


@pytest.mark.parametrize("pattern", ["", "[xyz]{9}"])
def test_bad_words_that_leave_no_token_end_only_their_row(engine: TorchEngine, directory: Path, pattern: str) -> None:
    """At once, after a text that begins one, and after drafts."""
    tokenizer = read_tokenizer(read_model_config(directory))
    x = tokenizer.token_to_id("x")
    good = sampling("x{9}", 7)
    forced = bias({x: 100.0})
    engine.reset()
    new = [
        slot(0, PROMPT, encode(good)),
        slot(1, PROMPT, encode(sampling(pattern, **bad_words(*([token] for token in range(512)))))),
        slot(2, PROMPT, encode(sampling(pattern, **forced, **bad_words(*([x, token] for token in range(512)))))),
    ]
    result = collect(engine, 1, [(at, 0, 4, 1) for at in range(3)], new, [(at, at) for at in range(3)])
    assert result.row_errors == ["", NO_TOKEN_LEFT, ""]
    assert unpack_int32(result.token_ids)[::2] == [x, x]
    rows = [(0, 4, 1, 1), (2, 4, 1, 1)]
    result = engine.collect(engine.launch(step(2, rows, drafts=[2, 2], draft_ids=[x, x, x, 7])))
    assert result.counts[0] == 3
    assert result.row_errors == ["", NO_TOKEN_LEFT]


def test_without_a_grammar_no_token_table_is_loaded() -> None:
    def load() -> None:
        raise AssertionError("a table was made")

    grammars = GrammarManager(load)  # type: ignore[arg-type]
    grammars.assign_slot(0, SamplingParams(0), [])
    assert grammars.wait_for_bitmask(np.array([0, 1])) is None


def test_a_grammar_whose_text_no_tokens_can_write() -> None:
    grammars = GrammarManager(lambda: piece_table([b"a", b"b"]))
    grammars.assign_slot(3, sampling("[ab]{2}(c|d)x"), [])
    slots = np.array([0, 3])
    faults = []
    for token in (1, 2, 1):
        masks = grammars.wait_for_bitmask(slots)
        assert masks is not None
        assert masks.rows.tolist() == [1]
        faults.append(masks.faults)
        grammars.accept_sampled(slots, masks, torch.tensor([0, token]), None)
    assert faults[0] == ["", ""]
    assert "its grammar cannot continue" in faults[2][1]


def test_compiled_grammars_are_cached() -> None:
    grammars = GrammarManager(lambda: piece_table([b"a", b"b"]))
    for number in [*range(MAX_COMPILED_GRAMMARS + 5), MAX_COMPILED_GRAMMARS + 4]:
        grammars.assign_slot(0, sampling(f"a{{{number + 1}}}"), [])
        assert grammars.wait_for_bitmask(np.array([0])) is not None
    assert len(grammars._compiled) == MAX_COMPILED_GRAMMARS
    assert of("a{1}") not in grammars._compiled


def test_the_bitmask_forbids_tokens() -> None:
    vocab, generator = 75, np.random.default_rng(1)
    allowed = generator.random((2, 96)) < 0.3
    words = np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)
    scores = torch.randn(4, vocab)
    expected = scores.clone()
    expected[1][~torch.from_numpy(allowed[0, :vocab])] = -torch.inf
    expected[3][~torch.from_numpy(allowed[1, :vocab])] = -torch.inf
    batch = SamplingBatch(SamplingColumns.allocate(4), np.zeros(4, np.int64), lambda rows, begins: torch.empty(0), None)
    apply_grammar_bitmask(scores, batch)
    apply_grammar_bitmask(scores, batch._replace(grammar_bitmask=GrammarBitmask(np.array([1, 3]), words, [""] * 4)))
    assert torch.equal(scores, expected)
