"""The watermark: green lists, the bias on green tokens, and detection."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models import model
from tests.worker.driving import drive, make_engine
from tests.worker.test_sampling import CPU, DELTA, GAMMA, green, sampling_batch
from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.models.loader import build_model
from tgi.worker.sampling.logits_processors import apply_watermark
from tgi.worker.sampling.watermark import Watermark, WatermarkEvidence, detect_watermark, detect_watermark_in_text

MARKED = SamplingParams(0, do_sample=True, watermark=True)
PROMPT = [30, 40, 50, 60]


@pytest.fixture(scope="module")
def directory() -> Path:
    return model("llama")


@pytest.fixture(scope="module")
def engine(directory: Path) -> TorchEngine:
    return make_engine(build_model(directory, "float32", "cpu", lambda stage, percent: None))


@pytest.mark.parametrize("vocab", [3, 97, 49152])
def test_green_tokens_get_delta_and_nothing_else_changes(vocab: int) -> None:
    """In the rows that ask, by their own last token, whatever the lengths of other rows."""
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(1))
    samplings = [MARKED if row % 3 else SamplingParams(0) for row in range(9)]
    histories = [[2] * (20 * row) + [row % 3] for row in range(9)]
    made = logits.clone()
    apply_watermark(made, sampling_batch(samplings, histories)._replace(watermark=Watermark(vocab, CPU, GAMMA, DELTA)))
    for row in range(9):
        wanted = logits[row].clone()
        if row % 3:
            wanted[green(row % 3, vocab)] += DELTA
        assert torch.equal(made[row], wanted)


def test_the_cache_of_green_lists_is_bounded_and_recomputed_lists_are_equal() -> None:
    small, large = (Watermark(1000, CPU, GAMMA, max_cached=kept) for kept in (2, 100))
    for last in (1, 2, 3, 1, 1, 7, 2, 3, 2):
        assert (small.red_bitmask(last) == large.red_bitmask(last)).all()
    assert list(small._red_bitmasks) == [3, 2]
    assert len(large._red_bitmasks) == 4


def test_the_largest_delta_gives_finite_logits() -> None:
    made = Watermark(64, CPU, 0.5, 1e300).add_green_bias(torch.zeros(1, 64), [5])
    assert torch.isfinite(made.log_softmax(-1)).all()


def test_the_watermark_is_detected_only_in_marked_texts(engine: TorchEngine) -> None:
    vocab = engine.limits.vocab_size
    kinds = {
        "drawn": MARKED,
        "greedy": SamplingParams(0, watermark=True, repetition_penalty=2.0),  # otherwise it would repeat itself
        "hot": MARKED._replace(temperature=1.3, top_p=0.95),
        "plain": SamplingParams(4, do_sample=True),
        "plain greedy": SamplingParams(0, repetition_penalty=2.0),
    }
    found = dict(zip(kinds, drive(engine, [PROMPT] * len(kinds), 100, list(kinds.values())), strict=True))
    for name, drawn in found.items():
        evidence = detect_watermark(drawn.ids, vocab)
        assert evidence.marked == kinds[name].watermark, (name, evidence)
        assert evidence.share == evidence.green / evidence.counted
    marked = found["drawn"].ids
    assert detect_watermark(marked[50:], vocab).marked  # a part of it
    assert not detect_watermark(marked[::-1], vocab).marked


def test_the_z_score() -> None:
    """Each pair of tokens is counted once, so repetition adds no evidence."""
    lists = {last: green(last, 97) for last in range(4)}
    ids = [0, lists[0][0], 0, lists[0][0], 0]
    back = 0 in green(lists[0][0], 97)
    count = int(97 * GAMMA)
    evidence = detect_watermark(ids * 50, 97, GAMMA)
    pairs = 2 + 1  # 0 → a, a → 0, and 0 → 0 where one repetition follows the other
    expected = 1 + back + (0 in lists[0])
    share = count / 97
    z = (expected - share * pairs) / np.sqrt(share * (1 - share) * pairs)
    assert evidence == WatermarkEvidence(pairs, expected, pytest.approx(z))
    assert WatermarkEvidence(100, 50, 0.0).chance == 0.5
    assert WatermarkEvidence(100, 70, 4.0).chance == pytest.approx(3.2e-5, rel=0.02)


def test_texts_are_encoded_with_the_models_tokenizer(directory: Path) -> None:
    card = read_model_config(directory)
    text = "Some text, to be read."
    ids = read_tokenizer(card).encode(text, add_special_tokens=False).ids
    assert detect_watermark_in_text(text, directory, 0.5, "cpu") == detect_watermark(ids, card.vocab_size)
    with pytest.raises(UserError, match="Give a longer text"):
        detect_watermark_in_text("", directory, 0.5, "cpu")


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "watermark.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    exec(example, {"ids": [1, 2, 3, 4, 5], "vocab_size": 64})
    assert capsys.readouterr().out.startswith("4 ")  # pairs
