"""The engine with a toy model: chunks, resumption, reused slots, shared pages and pipelining change no token."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.tops import split_tops
from tests.worker.test_fake_worker import slot, step
from tests.worker.test_sampling import bias, sampling_batch
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import DeploymentLimits, StepResult, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.attention.interface import ForwardBatch, KVCacheSpec
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.interface import BadStep, OutOfMemory, Poisoned
from tgi.worker.greedy import GreedyTokens, find_greedy_tokens
from tgi.worker.head_logits import HeadLogits
from tgi.worker.models.interface import WeightFootprint
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import sample

CPU = torch.device("cpu")
VOCAB, PAGES, SIZE, TOTAL = 61, 40, 4, 48
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


class ToyAttention:
    """KV memory in which a token's key and value are its id."""

    page_size = SIZE
    state = None

    def __init__(self) -> None:
        self.memory = torch.full((PAGES * SIZE,), -1, dtype=torch.int64)

    def plan(self, batch: ForwardBatch) -> Any:
        return None

    def write_and_attend(self, plan: Any, layer: int, qkv: Any, scale: float) -> Any:
        raise NotImplementedError


class ToyModel:
    """A model whose logits are a function of all ids of the context, read from the pages."""

    vocab_size = VOCAB
    context = TOTAL
    device = CPU
    cuda_graph_obstacle: str | None = None
    find_greedy_tokens = staticmethod(find_greedy_tokens)
    footprint = WeightFootprint(0, 0)
    kv = KVCacheSpec(1, 1, 1, 1, torch.float32)
    fails = False

    def forward(self, batch: ForwardBatch, attention: Any, reader: Any = None) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("the model fails")
        attention.memory[batch.slot_mapping[0]] = batch.tokens
        assert batch.cu_query_lens.tolist() == np.cumsum([0, *batch.query_lens_host]).tolist()
        assert batch.context_lens.tolist() == batch.context_lens_host
        ends = (batch.cu_query_lens[1:] - 1).tolist()
        logits = []
        for at in batch.logits_indices.tolist():
            row = ends.index(at)
            context = batch.context_lens_host[row]
            assert int(batch.positions[at]) == context - 1
            positions = torch.arange(context)
            ids = attention.memory[batch.page_table[0, row].long()[positions // SIZE] * SIZE + positions % SIZE]
            logits.append(toy_logits(ids.tolist()))
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)

    def forward_head(self, batch: ForwardBatch, attention: Any, reader: Any = None) -> HeadLogits:
        return HeadLogits(self.forward(batch, attention, reader))

    def forward_greedy(self, batch: ForwardBatch, attention: Any, reader: Any = None) -> GreedyTokens:
        return find_greedy_tokens(self.forward(batch, attention, reader))

    def prepare_decode(self, batch: ForwardBatch, attention: Any) -> None:
        return None


def toy_logits(ids: list[int]) -> torch.Tensor:
    """The toy model's logits after these ids."""
    weights = torch.tensor([0.9 ** (len(ids) - 1 - at) for at in range(len(ids))])
    return (TABLE[torch.tensor(ids)] * weights[:, None]).sum(0)


def expected(prompt: list[int], count: int, sampling: SamplingParams) -> tuple[list[int], list[float]]:
    """The reference: the tokens of a request, computed without engine and pages."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        drawn = sample(toy_logits(ids)[None], sampling_batch([sampling], [ids], [len(prompt)]), Noise(VOCAB, CPU))
        ids.append(int(drawn.ids))
        logprobs.append(float(drawn.logprobs))
    return ids[len(prompt) :], logprobs


def make_engine(slots: int = 4) -> TorchEngine:
    limits = DeploymentLimits(TOTAL, TOTAL - 1, PAGES * SIZE, 32, slots, PAGES, SIZE, VOCAB, "float32", "cpu")
    return TorchEngine(ToyModel(), ToyAttention(), limits)


def go(engine: TorchEngine, one: Any) -> list[int]:
    return good(engine.collect(engine.launch(one)))


def good(result: StepResult) -> list[int]:
    assert result.error == ""
    ids = unpack_int32(result.token_ids)
    assert result.counts == b"\x01" * len(ids)
    assert len(unpack_float32(result.logprobs)) == len(ids)
    return ids


SAMPLINGS = [
    SamplingParams(0),
    SamplingParams(1, do_sample=True),
    SamplingParams(2, temperature=1.5, top_k=9, top_p=0.9, repetition_penalty=1.3),
    SamplingParams(3, repetition_penalty=1.5),
]
PENALISED = [
    SamplingParams(4, count_penalty=0.8, presence_penalty=1.5),
    SamplingParams(5, do_sample=True, frequency_penalty=2.0, typical_p=0.9),
    SamplingParams(6, temperature=2.0, count_penalty=-0.5, **bias({7: -100.0, 3: 4.0, 60: 2.5})),
]
PROMPT = [5, 9, 3, 7, 7, 1, 60, 2, 8]


@pytest.mark.parametrize("sampling", SAMPLINGS + PENALISED, ids=str)
@pytest.mark.parametrize("chunks", [[9], [4, 5], [1, 1, 1, 6], [3, 3, 2, 1]], ids=str)
def test_chunks_and_steps_launched_ahead(chunks: list[int], sampling: SamplingParams) -> None:
    engine = make_engine()
    ids, logprobs = expected(PROMPT, 20, sampling)
    pages = [(2, page) for page in (7, 3, 30, 1, 9, 20, 4, 11)]
    new, start, pending = [slot(2, PROMPT, encode(sampling))], 0, []
    for number, count in enumerate(chunks):
        last = start + count == len(PROMPT)
        one = step(number + 1, [(2, start, count, int(last))], new, pages if number == 0 else [])
        pending.append(engine.launch(one))
        new, start = [], start + count
    for number in range(19):  # each launched before the one before it is collected
        pending.append(engine.launch(step(len(pending) + 1, [(2, len(PROMPT) + number, 1, 1)])))
    results = [engine.collect(one) for one in pending]
    assert [token for result in results for token in good(result)] == ids
    assert [value for result in results for value in unpack_float32(result.logprobs)] == logprobs


@pytest.mark.parametrize("sampling", SAMPLINGS + PENALISED, ids=str)
def test_a_resumed_request_continues_identically(sampling: SamplingParams) -> None:
    ids, _ = expected(PROMPT, 12, sampling)
    for cut in (1, 5, 11):
        engine = make_engine()
        known = PROMPT + ids[:cut]
        new = slot(0, known, encode(sampling))._replace(prompt_tokens=len(PROMPT))
        drawn = go(engine, step(1, [(0, 0, len(known), 1)], [new], [(0, page) for page in range(10)]))
        for number in range(len(ids) - cut - 1):
            drawn += go(engine, step(number + 2, [(0, len(known) + number, 1, 1)]))
        assert drawn == ids[cut:]


def test_many_requests_of_all_kinds_share_steps_slots_and_pages() -> None:
    """Four requests that start at different steps, one preempted and resumed in another slot; a shared prefix page."""
    engine = make_engine()
    prompts = [PROMPT, [*PROMPT[:4], 11, 12, 13], [1], PROMPT[:5]]
    want = [expected(prompt, 6, sampling)[0] for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)]
    new = [slot(at, prompts[at], encode(SAMPLINGS[at])) for at in range(4)]
    got: list[list[int]] = [[], [], [], []]

    def take(rows: list[int], one: Any) -> None:
        for row, token in zip(rows, go(engine, one), strict=True):
            got[row].append(token)

    own = [[(at, at * 8 + n) for n in range(4)] for at in range(4)]
    take([0], step(1, [(0, 0, 9, 1)], [new[0]], own[0]))
    # Request 1 finds the first page of request 0's prompt in the cache; request 2 starts in the same step.
    pages = [(1, 0), *own[1][:3], *own[2]]
    take([0, 2], step(2, [(0, 9, 1, 1), (1, 4, 2, 0), (2, 0, 1, 1)], [new[1], new[2]], pages))
    take([1, 0, 2], step(3, [(1, 6, 1, 1), (0, 10, 1, 1), (2, 1, 1, 1)]))
    # Request 0 is preempted: its slot and pages go to request 3.
    pages = [(0, page) for _, page in own[0]]
    take([3, 1, 2], step(4, [(0, 0, 5, 1), (1, 7, 1, 1), (2, 2, 1, 1)], [new[3]._replace(slot=0)], pages))
    back = slot(3, prompts[0] + got[0], encode(SAMPLINGS[0]))
    pages = [(3, page) for page in range(32, 36)]
    take([3, 2], step(5, [(0, 5, 1, 1), (3, 0, 7, 0), (2, 3, 1, 1)], [back], pages))
    take([3, 2, 0], step(6, [(0, 6, 1, 1), (2, 4, 1, 1), (3, 7, 5, 1)]))
    take([0, 2, 3, 1], step(7, [(3, 12, 1, 1), (2, 5, 1, 1), (0, 7, 1, 1), (1, 8, 1, 1)]))
    assert [len(ids) for ids in got] == [5, 3, 6, 4]
    assert [ids[: len(mine)] for mine, ids in zip(got, want, strict=True)] == got


def test_top_n_tokens_belong_to_the_sampling_rows_that_ask() -> None:
    """Next to a row that does not ask and one that does not sample; after a resumption; not in the next request."""
    asking = SamplingParams(2, temperature=1.5, top_k=9, top_n=3)
    ids, logprobs = expected(PROMPT, 3, asking)
    news = [slot(0, PROMPT), slot(1, PROMPT, encode(asking)), slot(2, PROMPT, encode(asking))]
    pages = [(at, at * 4 + n) for at in range(3) for n in range(4)]
    engine = make_engine()
    result = engine.collect(engine.launch(step(1, [(0, 0, 9, 1), (2, 0, 4, 0), (1, 0, 9, 1)], news, pages)))
    none, first = split_tops(result)
    assert none == []
    assert len(first) == 3
    assert [value for _, value in first] == sorted((value for _, value in first), reverse=True)
    assert dict(first).get(ids[0], logprobs[0]) == logprobs[0]
    second, none = split_tops(engine.collect(engine.launch(step(2, [(1, 9, 1, 1), (0, 9, 1, 1)]))))
    assert none == []
    # In another slot of another engine, after the same ids: the same bits.
    engine = make_engine()
    back = slot(3, [*PROMPT, ids[0]], encode(asking))
    again = engine.collect(engine.launch(step(1, [(3, 0, 10, 1)], [back], [(3, n) for n in range(20, 24)])))
    assert split_tops(again) == [second]
    plain = engine.collect(engine.launch(step(2, [(3, 0, 9, 1)], [slot(3, PROMPT)], [(3, n) for n in range(4)])))
    assert (plain.top_counts, plain.top_ids, plain.top_logprobs) == (b"", b"", b"")


@pytest.mark.parametrize(
    ("sampling", "enough"),
    [
        (SamplingParams(7, choice=2), True),
        (SamplingParams(0, top_n=2), False),
        (SamplingParams(0, do_sample=True), False),
        (SamplingParams(0, repetition_penalty=1.2), False),
    ],
)
def test_only_greedy_tokens_are_computed_where_all_rows_are_greedy(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, enough: bool
) -> None:
    found = GreedyTokens(torch.tensor([5, 6]), torch.zeros(2), torch.zeros(2))
    monkeypatch.setattr(ToyModel, "forward_greedy", lambda *_: found)
    news = [slot(0, [3, 4]), slot(1, [3, 4], encode(sampling))]
    engine = make_engine()
    result = engine.collect(engine.launch(step(1, [(0, 0, 2, 1), (1, 0, 2, 1)], news, [(0, 0), (1, 1)])))
    assert (good(result) == [5, 6]) is enough


def test_the_choices_of_one_seed_differ() -> None:
    samplings = [SamplingParams(5, temperature=2.0, choice=choice) for choice in range(3)]
    want = [expected(PROMPT, 8, sampling)[0] for sampling in samplings]
    assert len({tuple(ids) for ids in want}) == 3
    engine = make_engine()
    news = [slot(at, PROMPT, encode(sampling)) for at, sampling in enumerate(samplings)]
    pages = [(at, at * 6 + n) for at in range(3) for n in range(6)]
    drawn = [go(engine, step(1, [(at, 0, 9, 1) for at in range(3)], news, pages))]
    drawn += [go(engine, step(at + 2, [(row, 9 + at, 1, 1) for row in range(3)])) for at in range(7)]
    assert [list(ids) for ids in zip(*drawn, strict=True)] == want


def test_only_rows_with_draws_sample() -> None:
    engine = make_engine()
    result = engine.collect(engine.launch(step(1, [(0, 0, 3, 0)], [slot(0, PROMPT)], [(0, 0), (0, 1), (0, 2)])))
    assert (result.token_ids, result.logprobs, result.counts) == (b"", b"", b"")


FIRST = step(1, [(0, 0, 9, 1)], [slot(0, PROMPT)], [(0, 0), (0, 1), (0, 2)])


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (step(2, []), "no rows"),
        (step(2, [(0, 9, 1, 1), (0, 9, 1, 1)]), "two rows"),
        (step(2, [(1, 0, 1, 1)]), "slot 1 is empty"),
        (step(2, [(4, 0, 1, 1)]), "slot 4 is not within"),
        (step(2, [(0, 8, 1, 1)]), "does not start where"),
        (step(2, [(0, 9, 0, 1)]), "no token to compute"),
        (step(2, [(0, 9, 2, 1)]), "beyond its known ids"),
        (step(2, [(1, 0, 2, 1)], [slot(1, [1, 2, 3])], [(1, 9)]), "samples before its last known id"),
        (step(2, [(1, 0, 3, 1)], [slot(1, [1, 2, 3])]), "beyond its pages"),
        (step(2, [(1, 0, 3, 1)], [slot(1, [1, 2, 61])], [(1, 9)]), "token id 61"),
        (step(2, [(1, 0, 3, 1)], [slot(1, [1, 2, -1])], [(1, 9)]), "token id -1"),
        (step(2, [(1, 0, 3, 1)], [slot(1, [])], [(1, 9)]), "0 ids"),
        (step(2, [(1, 0, 3, 1)], [slot(1, [1] * 49)], [(1, 9)]), "49 ids"),
        (step(2, [(1, 0, 3, 1)], [slot(1, [1, 2, 3])], [(1, 40)]), "page 40"),
        (step(2, [(1, 0, 3, 1)], [slot(1, [1, 2, 3])], [(1, 9)] * 14), "more pages"),
        (step(2, [(4, 0, 3, 1)], [slot(4, [1, 2, 3])], [(4, 9)]), "slot 4"),
        (step(2, [(1, 0, 3, 1)], [slot(1, [1, 2, 3], b"\x91\x07")], [(1, 9)]), "Tokenize"),
        (step(2, [(0, 9, 1, 1)])._replace(state_copies=pack_column(INT32, [0, -1])), "4 slots and 0 snapshots"),
        (step(2, [(0, 9, 1, 1)])._replace(state_copies=pack_column(INT32, [0, 1])), "no recurrent layers"),
    ],
)  # fmt: skip
def test_a_bad_step_is_rejected_and_other_steps_continue(bad: Any, fault: str) -> None:
    engine = make_engine()
    drawn = go(engine, FIRST)
    with pytest.raises(Exception, match=fault):
        engine.launch(bad)
    drawn += go(engine, step(3, [(0, 9, 1, 1)]))
    assert drawn == expected(PROMPT, 2, SamplingParams(1))[0]


def test_a_failed_forward_does_not_advance_its_rows() -> None:
    engine = make_engine()
    drawn = go(engine, FIRST)
    engine._model.fails = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the model fails"):
        engine.launch(step(2, [(0, 9, 1, 1)]))
    engine._model.fails = False  # type: ignore[attr-defined]
    with pytest.raises(BadStep, match="does not start where"):  # what was sent ahead of the failure's result
        engine.launch(step(3, [(0, 10, 1, 1)]))
    drawn += go(engine, step(4, [(0, 9, 1, 1)]))
    assert drawn == expected(PROMPT, 2, SamplingParams(1))[0]


def test_a_lack_of_device_memory_has_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine = make_engine()
    for name in ("forward", "forward_greedy", "forward_head"):
        monkeypatch.setattr(engine._model, name, forward, raising=False)
    with pytest.raises(OutOfMemory, match=r"2\.00 GiB"):
        engine.launch(FIRST)


def test_any_error_of_a_lost_device_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton raises RuntimeError. If the device still works, the error passes unchanged."""
    engine = make_engine()
    engine._cuda = True
    raised = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    engine._raise_if_device_lost(raised)

    def lost(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(Poisoned, match="Triton Error"):
        engine._raise_if_device_lost(raised)


def test_a_reset_empties_the_slots() -> None:
    engine = make_engine()
    go(engine, FIRST)
    engine.reset()
    with pytest.raises(BadStep, match="slot 0 is empty"):
        engine.launch(step(2, [(0, 9, 1, 1)]))
    assert go(engine, FIRST) == expected(PROMPT, 1, SamplingParams(1))[0]


def test_a_request_may_fill_its_slot() -> None:
    engine = make_engine()
    prompt = list(range(TOTAL - 1))
    pages = [(0, page) for page in range(13)]
    assert (
        go(engine, step(1, [(0, 0, TOTAL - 1, 1)], [slot(0, prompt)], pages))
        == expected(prompt, 1, SamplingParams(1))[0]
    )
    go(engine, step(2, [(0, TOTAL - 1, 1, 1)]))
    with pytest.raises(BadStep, match="samples beyond the longest request"):
        engine.launch(step(3, [(0, TOTAL, 1, 1)]))


def held(engine: TorchEngine) -> dict[tuple[int, ...], list[int]]:
    """The pages that hold each prefix, as the engine reports them. Checks them against the memory."""
    found = {}
    attention: Any = engine._attention
    for one in engine.held_pages():
        ids, pages = unpack_int32(one.token_ids), unpack_int32(one.page_ids)
        memory = [int(key) for page in pages for key in attention.memory[page * SIZE : (page + 1) * SIZE]]
        assert memory == ids
        found[tuple(ids)] = pages
    return found


def test_held_pages_are_those_that_no_later_request_has_overwritten() -> None:
    engine = make_engine()
    go(engine, step(1, [(0, 0, 9, 1)], [slot(0, PROMPT)], [(0, 0), (0, 1), (0, 2)]))
    whole = tuple(PROMPT[:8])
    assert held(engine) == {whole: [0, 1]}
    # Another request shares the first page, and fills one of its own.
    other = [*PROMPT[:4], 11, 12, 13, 14]
    go(engine, step(2, [(1, 4, 4, 1)], [slot(1, other)], [(1, 0), (1, 8), (1, 9)]))
    assert held(engine) == {whole: [0, 1], tuple(other): [0, 8]}
    # The first one ends. A third request gets its second page: only what comes before is still there.
    go(engine, step(3, [(2, 0, 4, 0)], [slot(2, [5, 5, 5, 5, 6])], [(2, 1), (2, 2)]))
    assert held(engine) == {whole[:4]: [0], tuple(other): [0, 8], (5, 5, 5, 5): [1]}
    # The second one ends, too. A page that a running request gets is written as well.
    go(engine, step(4, [(2, 4, 1, 1)], pages=[(2, 8)]))
    assert held(engine) == {whole[:4]: [0], (5, 5, 5, 5): [1]}
    # A step that fails may have written its pages.
    model: Any = engine._model
    model.fails = True
    with pytest.raises(RuntimeError):
        engine.launch(step(5, [(3, 0, 4, 0)], [slot(3, [7, 7, 7, 7, 7])], [(3, 0), (3, 3)]))
    assert held(engine) == {(5, 5, 5, 5): [1]}
    engine.reset()
    assert held(engine) == {}
