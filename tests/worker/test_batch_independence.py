"""120 requests of all kinds through the real scheduler, at once with drafts, and every third one alone: equal to the
bit."""

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from llguidance import LLMatcher

from tests.models import model
from tests.parameters import accepted
from tests.scheduler.simulated_tokenizers import SubmittedRequest
from tests.scheduler.simulation import Simulation
from tests.tops import Tops
from tests.worker.loras import make_adapter
from tests.worker.test_sampling import bad_words
from tgi.hub.llguidance_tables import token_table
from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column, unpack_float32, unpack_uint32
from tgi.microkernel.messages.protocol import FinishReason, LoadedAdapter, Step, StepResult, Tokens
from tgi.microkernel.messages.sampling_params import NEUTRAL, PARAMETERS, SamplingParams
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.attention import build_attention
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig
from tgi.worker.lora.registry import load_adapters
from tgi.worker.models.loader import build_model

pytestmark = pytest.mark.slow

COUNT = 120
EOS = 2
# Too few pages for as many slots: rows are preempted. Prompts are computed in chunks.
SCRIPT = FakeWorkerConfig(pages=30, slots=32, vocab_size=512, max_total_tokens=128, max_batch_prefill_tokens=64)
GRAMMARS = [
    str(LLMatcher.grammar_from_regex(regex)) for regex in ("[a-f]{2,9}", "(yes|no|maybe)+", r"[0-9]+\.[0-9]{3}")
]


class Request(NamedTuple):
    prompt: list[int]
    new: int
    ends: bool  # by EOS
    sampling: SamplingParams


class Outcome(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    tops: list[Tops]
    reason: str


class Engine:
    """The torch engine behind the interface of the FakeWorker."""

    def __init__(self, engine: TorchEngine) -> None:
        self.limits = SCRIPT.limits()
        self.adapters = engine.adapters
        self._engine = engine
        self._epoch = 0

    def run_step(self, step: Step) -> StepResult:
        if step.epoch > self._epoch:
            self._engine.reset()
            self._epoch = step.epoch
        result = self._engine.collect(self._engine.launch(step))
        assert not any(result.row_errors), result.row_errors
        return result


def random_request(draw: Random, adapters: list[LoadedAdapter]) -> Request:
    def rarely(*values: object, off: object) -> object:
        return draw.choice(values) if draw.random() < 0.3 else off

    ends = draw.random() < 0.8
    biased = draw.sample(range(512), draw.choice([0, 0, 0, 1, 5]))
    # A prefix that others have too, and something of its own.
    prompt = [7, 8, 9, 10] * draw.randrange(9) + [draw.randrange(6, 512) for _ in range(draw.randrange(1, 30))]
    least = draw.choice([0, 0, 3, 8])
    # Few tokens make up the sequences, so that some begin in the texts.
    sequences = [draw.choices(range(6, 40), k=size) for size in draw.choice([[], [], [1] * 9, [1, 2, 3, 2, 2, 2]])]
    adapter = draw.choice([LoadedAdapter("", "", b""), *adapters])
    fields = {name: rarely(*accepted(name), off=NEUTRAL[name]) for name in PARAMETERS} | {
        "seed": draw.getrandbits(64),
        "do_sample": draw.random() < 0.5,
        "temperature": rarely(0.3, 0.9, 2.5, off=1.0),
        "top_k": rarely(1, 5, 100, 10**6, off=0),
        "top_p": rarely(0.1, 0.8, 0.99, off=1.0),
        "repetition_penalty": rarely(0.8, 1.3, off=1.0),
        "top_n": rarely(1, 5, 20, off=0),
        "choice": rarely(1, 2, 77, off=0),
        "bias_ids": pack_column(INT32, biased),
        "biases": pack_column(FLOAT32, [draw.choice([-100.0, -1.0, 2.5]) for _ in biased]),
        "grammar": rarely(*GRAMMARS, off=""),
        "min_new_tokens": least,
        "end_ids": pack_column(INT32, [EOS]) if least and ends else b"",
        "adapter": adapter.name,
        "adapter_digest": adapter.digest,
        **bad_words(*sequences),
    }
    if fields["top_n"]:
        listed = Random(str(fields["seed"])).sample(range(6, 512), 3)
        fields["listed_ids"] = pack_column(INT32, listed)
    if not fields["grammar"] and draw.random() < 0.5:  # a grammar may not allow what a budget forces
        fields |= reasoning(draw)
    return Request(prompt, draw.randrange(1, 20), ends, SamplingParams(**fields))  # type: ignore[arg-type]


def reasoning(draw: Random) -> dict[str, object]:
    """A budget of reasoning that many answers reach."""
    opening, close = (
        draw.choices(range(6, 40), k=draw.randrange(2)),
        draw.choices(range(6, 512), k=draw.randrange(1, 4)),
    )
    return {
        "reasoning_budget": draw.randrange(1, 8),
        "reasoning_open_ids": pack_column(INT32, opening),
        "reasoning_close_ids": pack_column(INT32, close),
        "reasoning_special_ids": pack_column(INT32, [*opening, *close[: draw.randrange(1, 4)]]),
        "reasoning_repeats": draw.random() < 0.5,
    }


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    directory = model("llama")
    card = read_model_config(directory)
    loaded = build_model(directory, "float32", "cpu", lambda stage, percent: None)
    limits = SCRIPT.limits()
    assert (loaded.vocab_size, card.eos_token_ids) == (limits.vocab_size, (EOS,))

    def table() -> object:
        return token_table(read_tokenizer(card), card.eos_token_ids, loaded.vocab_size)

    made = TorchEngine(loaded, build_attention(loaded.kv, limits.pages, loaded.device), limits, table)  # type: ignore[arg-type]
    store = tmp_path_factory.mktemp("adapters")
    load_adapters(
        made.adapters, tuple((name, str(make_adapter(store / name, directory, seed=ord(name)))) for name in "ab")
    )
    return made


def simulate(engine: TorchEngine, **config: Any) -> Simulation:
    sim = Simulation(SCRIPT, SchedulerConfig(**config))
    sim.adapters.preloaded = {adapter.name: Path(adapter.path) for adapter in engine.adapters.loaded_adapters}
    sim.worker_up()
    sim.engine = Engine(engine)  # type: ignore[assignment]
    return sim


def add(sim: Simulation, request: Request) -> SubmittedRequest:
    """As a tokenizer sends it."""
    asked = SubmittedRequest(request.prompt, request.new, [EOS] if request.ends else [], request.sampling, [])
    sim.rids += 1
    sim.tokenizers[0].requests[sim.rids] = asked
    sim.submit(0, sim.rids, asked)
    return asked


def outcomes(sim: Simulation, all_requests: list[SubmittedRequest]) -> list[Outcome]:
    logprobs: dict[int, list[float]] = {rid: [] for rid in sim.tokenizers[0].requests}
    for _, message in sim.received:
        if isinstance(message, Tokens):
            values = iter(unpack_float32(message.logprobs))
            for rid, count in zip(unpack_uint32(message.rids), unpack_uint32(message.counts), strict=True):
                logprobs[rid] += [next(values) for _ in range(count)]
    told = []
    for asked, numbers in zip(all_requests, logprobs.values(), strict=True):
        assert asked.end is not None
        told.append(Outcome(asked.ids, numbers, asked.tops, asked.end.reason))
    return told


def test_alone_and_all_at_once(engine: TorchEngine) -> None:
    """With random arrivals, chunked prefill, prefix hits, drafts and preemptions; and alone."""
    draw = Random(20)
    requests = [random_request(draw, engine.adapters.loaded_adapters) for _ in range(COUNT)]
    sim = simulate(engine, max_drafts=4)
    all_requests = []
    for request in requests:  # about as many come in as end
        all_requests.append(add(sim, request))
        while draw.random() < 0.2:
            sim.step()
    sim.run()
    counters = sim.scheduler.counters
    assert counters.preemptions > 5
    assert 5 < counters.accepted_draft_tokens < counters.draft_tokens - 5
    together = outcomes(sim, all_requests)
    for number, request in [*enumerate(requests)][::3]:
        sim = simulate(engine, prefix_caching=False)
        asked = add(sim, request)
        sim.run()
        assert outcomes(sim, [asked]) == [together[number]], request
    assert {outcome.reason for outcome in together} == {FinishReason.LENGTH, FinishReason.EOS}
    for name, off in SamplingParams._field_defaults.items():
        assert any(getattr(request.sampling, name) != off for request in requests), name


def test_min_new_tokens_holds_back_eos(engine: TorchEngine) -> None:
    """With EOS as the likeliest token; but a grammar whose text is complete ends it."""
    pushed = {
        "bias_ids": pack_column(INT32, [EOS]),
        "biases": pack_column(FLOAT32, [100.0]),
        "end_ids": pack_column(INT32, [EOS]),
    }
    sim = simulate(engine)
    short = str(LLMatcher.grammar_from_regex("ab"))
    longer = str(LLMatcher.grammar_from_regex("a[bc]*"))
    asked = [
        add(sim, Request([5, 6], 12, True, SamplingParams(1, min_new_tokens=least, grammar=grammar, **pushed)))  # type: ignore[arg-type]
        for least, grammar in ((0, ""), (1, ""), (5, ""), (12, ""), (9, short), (6, longer))
    ]
    sim.run()
    lengths = [(len(one.ids), one.end and one.end.reason) for one in asked]
    assert lengths[:4] == [
        (1, FinishReason.EOS),
        (2, FinishReason.EOS),
        (6, FinishReason.EOS),
        (12, FinishReason.LENGTH),
    ]
    assert lengths[4][0] <= 3
    assert lengths[4][1] == FinishReason.EOS
    assert lengths[5] == (7, FinishReason.EOS)
