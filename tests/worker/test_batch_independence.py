"""200 requests of all kinds through the real scheduler, alone, and all at once with drafts: equal to the bit."""

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from llguidance import LLMatcher

from tests.models import model
from tests.scheduler.house import House
from tests.scheduler.tokenizers import Asked
from tests.tops import Tops
from tests.worker.loras import make_adapter
from tests.worker.test_sampling import bad_words
from tgi.hub.card import read_card
from tgi.hub.grammar import token_table
from tgi.hub.tokens import read_tokenizer
from tgi.kernel.messages import Reason, Result, Sampling, Step, Tokens
from tgi.kernel.pack import FLOAT32, INT32, floats, pack, uints
from tgi.kernel.presence import Adapter
from tgi.scheduler.core import Config
from tgi.worker.attention import build_attention
from tgi.worker.engine import TorchEngine
from tgi.worker.load import build_model
from tgi.worker.lora.shelf import stock
from tgi.worker.scripted import Script

COUNT = 200
EOS = 2
# Too few pages for as many slots: rows are preempted. Prompts are computed in chunks.
SCRIPT = Script(pages=30, slots=32, vocab_size=512, max_total_tokens=128, max_batch_prefill_tokens=64)
GRAMMARS = [
    str(LLMatcher.grammar_from_regex(regex)) for regex in ("[a-f]{2,9}", "(yes|no|maybe)+", r"[0-9]+\.[0-9]{3}")
]


class Request(NamedTuple):
    prompt: list[int]
    new: int
    ends: bool  # by EOS
    sampling: Sampling


class Outcome(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    tops: list[Tops]
    reason: str


class Engine:
    """The real engine in the place of the scripted worker."""

    def __init__(self, engine: TorchEngine) -> None:
        self.limits = SCRIPT.limits()
        self.adapters = engine.adapters
        self._engine = engine
        self._epoch = 0

    def run_step(self, step: Step) -> Result:
        if step.epoch > self._epoch:
            self._engine.reset()
            self._epoch = step.epoch
        result = self._engine.collect(self._engine.launch(step))
        assert not any(result.faults), result.faults
        return result


def random_request(draw: Random, adapters: list[Adapter]) -> Request:
    def rarely(*values: object, off: object) -> object:
        return draw.choice(values) if draw.random() < 0.3 else off

    ends = draw.random() < 0.8
    biased = draw.sample(range(512), draw.choice([0, 0, 0, 1, 5]))
    # A prefix that others have too, and something of its own.
    prompt = [7, 8, 9, 10] * draw.randrange(9) + [draw.randrange(6, 512) for _ in range(draw.randrange(1, 30))]
    least = draw.choice([0, 0, 3, 8])
    # Few tokens make up the sequences, so that some begin in the texts.
    sequences = [draw.choices(range(6, 40), k=size) for size in draw.choice([[], [], [1] * 9, [1, 2, 3, 2, 2, 2]])]
    adapter = draw.choice([Adapter("", "", b""), *adapters])
    fields = {
        "seed": draw.getrandbits(64),
        "do_sample": draw.random() < 0.5,
        "temperature": rarely(0.3, 0.9, 2.5, off=1.0),
        "top_k": rarely(1, 5, 100, 10**6, off=0),
        "top_p": rarely(0.1, 0.8, 0.99, off=1.0),
        "repetition_penalty": rarely(0.8, 1.3, off=1.0),
        "top_n": rarely(1, 5, 20, off=0),
        "choice": rarely(1, 2, 77, off=0),
        "typical_p": rarely(0.2, 0.9, off=1.0),
        "frequency_penalty": rarely(-2.0, 1.0, off=0.0),
        "count_penalty": rarely(-1.0, 0.7, off=0.0),
        "presence_penalty": rarely(-1.0, 1.5, off=0.0),
        "bias_ids": pack(INT32, biased),
        "biases": pack(FLOAT32, [draw.choice([-100.0, -1.0, 2.5]) for _ in biased]),
        "grammar": rarely(*GRAMMARS, off=""),
        "watermark": rarely(True, off=False),
        "min_new_tokens": least,
        "end_ids": pack(INT32, [EOS]) if least and ends else b"",
        "adapter": adapter.name,
        "adapter_digest": adapter.digest,
        "min_p": rarely(0.02, 0.2, 1.0, off=0.0),
        **bad_words(*sequences),
    }
    return Request(prompt, draw.randrange(1, 20), ends, Sampling(**fields))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    directory = model("llama")
    card = read_card(directory)
    loaded = build_model(directory, "float32", "cpu", lambda stage, percent: None)
    limits = SCRIPT.limits()
    assert (loaded.vocab_size, card.eos_token_ids) == (limits.vocab_size, (EOS,))

    def table() -> object:
        return token_table(read_tokenizer(card), card.eos_token_ids, loaded.vocab_size)

    made = TorchEngine(loaded, build_attention(loaded.kv, limits.pages, loaded.device), limits, table)  # type: ignore[arg-type]
    store = tmp_path_factory.mktemp("adapters")
    stock(made.adapters, tuple((name, str(make_adapter(store / name, directory, seed=ord(name)))) for name in "ab"))
    return made


def house_of(engine: TorchEngine, **config: Any) -> House:
    house = House(SCRIPT, Config(**config))
    house.adapters.stock = {adapter.name: Path(adapter.path) for adapter in engine.adapters.listed}
    house.worker_up()
    house.engine = Engine(engine)  # type: ignore[assignment]
    return house


def add(house: House, request: Request) -> Asked:
    """As a tokenizer sends it."""
    asked = Asked(request.prompt, request.new, [EOS] if request.ends else [], request.sampling, [])
    house.rids += 1
    house.tokenizers[0].requests[house.rids] = asked
    house._submit(0, house.rids, asked)
    return asked


def outcomes(house: House, everybody: list[Asked]) -> list[Outcome]:
    logprobs: dict[int, list[float]] = {rid: [] for rid in house.tokenizers[0].requests}
    for _, message in house.heard:
        if isinstance(message, Tokens):
            values = iter(floats(message.logprobs))
            for rid, count in zip(uints(message.rids), uints(message.counts), strict=True):
                logprobs[rid] += [next(values) for _ in range(count)]
    told = []
    for asked, numbers in zip(everybody, logprobs.values(), strict=True):
        assert asked.end is not None
        told.append(Outcome(asked.ids, numbers, asked.tops, asked.end.reason))
    return told


def test_alone_and_all_at_once(engine: TorchEngine) -> None:
    """Arriving at any time, in chunks, with prefix hits, drafts and preemptions; and without all that."""
    draw = Random(20)
    requests = [random_request(draw, engine.adapters.listed) for _ in range(COUNT)]
    house = house_of(engine, drafts=4)
    everybody = []
    for request in requests:  # about so many as end come in
        everybody.append(add(house, request))
        while draw.random() < 0.2:
            house.step()
    house.run()
    counters = house.core.counters
    assert counters.preemptions > 5
    assert 5 < counters.accepted_tokens < counters.drafted_tokens - 5
    together = outcomes(house, everybody)
    for number, request in enumerate(requests):
        house = house_of(engine, prefix_caching=False)
        asked = add(house, request)
        house.run()
        assert outcomes(house, [asked]) == [together[number]], request
    assert {outcome.reason for outcome in together} == {Reason.LENGTH, Reason.EOS}
    for name, off in Sampling._field_defaults.items():
        assert any(getattr(request.sampling, name) != off for request in requests), name


def test_least_lengths_hold(engine: TorchEngine) -> None:
    """With EOS as the likeliest token; but a grammar whose text is complete ends it."""
    pushed = {"bias_ids": pack(INT32, [EOS]), "biases": pack(FLOAT32, [100.0]), "end_ids": pack(INT32, [EOS])}
    house = house_of(engine)
    short = str(LLMatcher.grammar_from_regex("ab"))
    longer = str(LLMatcher.grammar_from_regex("a[bc]*"))
    asked = [
        add(house, Request([5, 6], 12, True, Sampling(1, min_new_tokens=least, grammar=grammar, **pushed)))  # type: ignore[arg-type]
        for least, grammar in ((0, ""), (1, ""), (5, ""), (12, ""), (9, short), (6, longer))
    ]
    house.run()
    lengths = [(len(one.ids), one.end and one.end.reason) for one in asked]
    assert lengths[:4] == [(1, Reason.EOS), (2, Reason.EOS), (6, Reason.EOS), (12, Reason.LENGTH)]
    assert lengths[4][0] <= 3
    assert lengths[4][1] == Reason.EOS
    assert lengths[5] == (7, Reason.EOS)
