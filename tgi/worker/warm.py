"""First steps before anybody waits for one: they load what is loaded lazily, and show how much memory a step takes."""

from collections.abc import Sequence

from tgi.kernel.messages import Sampling, Slot, Step, encode
from tgi.kernel.pack import FLOAT32, INT32, UINT8, pack
from tgi.kernel.presence import Limits
from tgi.worker.engine import TorchEngine

WARM_PROMPT = 20  # tokens: more than one page
# Every processor at work.
WARM_SAMPLING = Sampling(
    seed=1,
    temperature=0.9,
    top_k=10,
    top_p=0.9,
    typical_p=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    count_penalty=0.1,
    presence_penalty=0.1,
    bias_ids=pack(INT32, [0]),
    biases=pack(FLOAT32, [1.0]),
    watermark=True,
    min_new_tokens=1,
    end_ids=pack(INT32, [0]),
    min_p=0.01,
    bad_word_ids=pack(INT32, [0, 0]),
    bad_word_lengths=pack(INT32, [2]),
)


def warm_up(engine: TorchEngine, limits: Limits, rows: int, tokens: int, drafts: int, finds: bool) -> None:
    """A prefill of `rows` prompts of `tokens` tokens, a decode step behind it, and a step with so many drafts for as
    many rows as may have them at once. The draft model finds them if there is one. Then all is forgotten."""
    if drafts and finds:
        drafts = max(drafts, 2)  # behind the first, the draft model computes single tokens
    drafts = max(0, min(drafts, limits.max_total_tokens - tokens - 2))
    each = -(-min(tokens + 2 + drafts, limits.max_total_tokens) // limits.page_size)
    ids = pack(INT32, [0] * tokens)
    slots = [Slot(slot, ids, tokens, encode(WARM_SAMPLING if slot % 2 else Sampling(0))) for slot in range(rows)]
    pages = [(slot, (slot * each + page) % limits.pages) for slot in range(rows) for page in range(each)]
    _run(engine, _step(1, rows, 0, tokens, slots, pages))
    _run(engine, _step(2, rows, tokens, 1))
    if drafts:
        drafting = max(1, min(rows, limits.max_batch_prefill_tokens // (1 + drafts)))
        drafted = _step(3, drafting, tokens + 1, 1)
        found = [0] * (0 if finds else drafting * drafts)
        _run(engine, drafted._replace(drafts=pack(INT32, [drafts] * drafting), draft_ids=pack(INT32, found)))
    engine.reset()


def _step(
    number: int,
    rows: int,
    start: int,
    count: int,
    slots: Sequence[Slot] = (),
    pages: Sequence[tuple[int, int]] = (),
) -> Step:
    """A step of the first `rows` slots, all of which draw."""
    owners, page_ids = (pack(INT32, [page[at] for page in pages]) for at in range(2))
    starts, counts, draws = pack(INT32, [start] * rows), pack(INT32, [count] * rows), pack(UINT8, [1] * rows)
    return Step(number, 0, list(slots), owners, page_ids, pack(INT32, range(rows)), starts, counts, draws)


def _run(engine: TorchEngine, step: Step) -> None:
    engine.collect(engine.launch(step))
