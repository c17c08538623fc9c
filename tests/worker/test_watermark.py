"""The watermark: its green lists, what it adds and to whom, and that it is found in the texts that have it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models import model
from tests.worker.driving import drive, make_engine
from tests.worker.test_sampling import CPU, DELTA, GAMMA, draws, green
from tgi.hub.card import read_card
from tgi.hub.tokens import read_tokenizer
from tgi.kernel.errors import UserError
from tgi.kernel.messages import Sampling
from tgi.worker.detection import Verdict, detect, detect_text
from tgi.worker.engine import TorchEngine
from tgi.worker.load import build_model
from tgi.worker.watermark import Watermark, mark_green

MARKED = Sampling(0, do_sample=True, watermark=True)
PROMPT = [30, 40, 50, 60]


@pytest.fixture(scope="module")
def directory() -> Path:
    return model("llama")


@pytest.fixture(scope="module")
def engine(directory: Path) -> TorchEngine:
    return make_engine(build_model(directory, "float32", "cpu", lambda stage, percent: None))


@pytest.mark.parametrize("vocab", [3, 97, 49152])
def test_green_tokens_get_delta_and_nothing_else_changes(vocab: int) -> None:
    """Of the rows that ask: by their true last token, however long their neighbours are."""
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(1))
    samplings = [MARKED if row % 3 else Sampling(0) for row in range(9)]
    histories = [[2] * (20 * row) + [row % 3] for row in range(9)]
    made = logits.clone()
    mark_green(made, draws(samplings, histories)._replace(mark=Watermark(vocab, CPU, GAMMA, DELTA)))
    for row in range(9):
        wanted = logits[row].clone()
        if row % 3:
            wanted[green(row % 3, vocab)] += DELTA
        assert torch.equal(made[row], wanted)


def test_lists_are_kept_within_bounds_and_are_the_same_when_they_come_back() -> None:
    small, large = (Watermark(1000, CPU, GAMMA, kept=kept) for kept in (2, 100))
    for last in (1, 2, 3, 1, 1, 7, 2, 3, 2):
        assert (small.red_words(last) == large.red_words(last)).all()
    assert list(small._known) == [3, 2]
    assert len(large._known) == 4


def test_the_largest_delta_leaves_numbers() -> None:
    made = Watermark(64, CPU, 0.5, 1e300).mark(torch.zeros(1, 64), [5])
    assert torch.isfinite(made.log_softmax(-1)).all()


def test_marked_texts_are_found_and_others_are_not(engine: TorchEngine) -> None:
    vocab = engine.limits.vocab_size
    kinds = {
        "drawn": MARKED,
        "greedy": Sampling(0, watermark=True, repetition_penalty=2.0),  # or else it would go round in circles
        "hot": MARKED._replace(temperature=1.3, top_p=0.95),
        "plain": Sampling(4, do_sample=True),
        "plain greedy": Sampling(0, repetition_penalty=2.0),
    }
    found = dict(zip(kinds, drive(engine, [PROMPT] * len(kinds), 100, list(kinds.values())), strict=True))
    for name, drawn in found.items():
        verdict = detect(drawn.ids, vocab)
        assert verdict.marked == kinds[name].watermark, (name, verdict)
        assert verdict.share == verdict.green / verdict.counted
    marked = found["drawn"].ids
    assert detect(marked[50:], vocab).marked  # a part of it
    assert not detect(marked[::-1], vocab).marked


def test_the_formula() -> None:
    """Green tokens are counted once for each predecessor, so a text that repeats itself proves nothing."""
    lists = {last: green(last, 97) for last in range(4)}
    ids = [0, lists[0][0], 0, lists[0][0], 0]
    back = 0 in green(lists[0][0], 97)
    count = int(97 * GAMMA)
    verdict = detect(ids * 50, 97, GAMMA)
    pairs = 2 + 1  # 0 → a, a → 0, and 0 → 0 where one repetition follows the other
    expected = 1 + back + (0 in lists[0])
    share = count / 97
    z = (expected - share * pairs) / np.sqrt(share * (1 - share) * pairs)
    assert verdict == Verdict(pairs, expected, pytest.approx(z))
    assert Verdict(100, 50, 0.0).chance == 0.5
    assert Verdict(100, 70, 4.0).chance == pytest.approx(3.2e-5, rel=0.02)


def test_texts_are_read_with_the_model_s_tokenizer(directory: Path) -> None:
    card = read_card(directory)
    text = "Some text, to be read."
    ids = read_tokenizer(card).encode(text, add_special_tokens=False).ids
    assert detect_text(text, directory, 0.5, "cpu") == detect(ids, card.vocab_size)
    with pytest.raises(UserError, match="Give a longer text"):
        detect_text("", directory, 0.5, "cpu")
