"""Peers with keys that send anything: well-formed messages with any values, in any order, from any role.

The scheduler never raises, serves the requests of its honest tokenizer exactly, and balances its pages.
"""

import typing
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from tests.property.test_codec import messages, values
from tests.scheduler.simulation import Simulation, expected_ids
from tests.tokenizer.harness import API, OTHER, READY, PoolHarness, ids_of
from tgi.microkernel.links.link import PeerDisconnected, PeerId
from tgi.microkernel.messages.codec import INT32, UINT32, pack_column
from tgi.microkernel.messages.protocol import (
    MESSAGES,
    PROTOCOL,
    AdapterUpdated,
    Add,
    Cancel,
    DeploymentLimits,
    End,
    FinishReason,
    Generate,
    HeldPages,
    Hello,
    PromptLogprobs,
    RequestContext,
    SamplingParams,
    Status,
    StepResult,
    Stop,
    Tokenize,
    Tokens,
    UpdateAdapter,
    decode,
    encode,
)
from tgi.microkernel.observability.flight_recorder import RingRecorder
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

pytestmark = pytest.mark.fuzz

VOCABULARY = 128
WORKER = FakeWorkerConfig(pages=20, page_size=4, slots=4, vocab_size=VOCABULARY, max_total_tokens=24)

EDGES = [-(2**63), -(2**31) - 1, -(2**31), -2, -1, 0, 1, 2, 3, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**64 - 1]
numbers = st.sampled_from(EDGES) | st.integers(0, 12)
ids = st.lists(st.sampled_from([-(2**31), -1, 0, 1, 2, 127, 128, 2**31 - 1]), max_size=30).map(
    lambda ids: pack_column(INT32, ids)
)
columns = ids | st.binary(max_size=9)
VALID = Add(1, pack_column(INT32, [1, 2, 3]), 4, encode(SamplingParams(1)))
hostile_fields: dict[str, st.SearchStrategy[Any]] = {
    name: values(typing.get_type_hints(Add)[name])
    | (numbers if typing.get_type_hints(Add)[name] is int else st.nothing())
    for name in Add._fields
} | {
    "prompt_ids": columns,
    "sampling": st.binary(max_size=20) | messages(SamplingParams).map(encode) | st.just(encode(Cancel(1))),
    "stop_ids": columns,
    "resume_ids": columns,
}


@st.composite
def adds(draw: st.DrawFn) -> Add:
    """A valid request but for one or two fields."""
    names = draw(st.lists(st.sampled_from(sorted(hostile_fields)), min_size=1, max_size=2, unique=True))
    return VALID._replace(rid=draw(st.integers(1, 4)))._replace(**{name: draw(hostile_fields[name]) for name in names})


from_a_tokenizer = (
    adds()
    | adds()
    | st.builds(Cancel, numbers)
    | st.builds(Stop, numbers)
    | st.one_of([messages(kind) for kind in MESSAGES if kind is not Hello])
)


def travels(message: Any) -> bool:
    """Whether the codec can carry the message."""
    try:
        return bool(encode(message))
    except OverflowError:
        return False


def serve(simulation: Simulation) -> None:
    """Computes until the honest requests have ended. The worker answers a step or an adapter that it cannot compute or
    load with an error, as the worker's loop does."""
    for _ in range(500):
        if all(request.end is not None for request in simulation.requests):
            break
        simulation.plan()
        while updates := simulation.adapters.queued_updates:
            assert simulation.worker is not None
            simulation.handle(AdapterUpdated(updates.popleft().rid, "there is no such adapter"), simulation.worker)
        while simulation.steps:
            step = simulation.steps.popleft()
            simulation.begin_others()
            result = simulation.engine.run_step(step)
            simulation.results.append(result)
        while simulation.deliver():
            pass
        simulation.advance_time(0.01)
    simulation.check()


@settings(max_examples=120, deadline=None)
@given(st.lists(from_a_tokenizer.filter(travels), max_size=12), st.booleans())
def test_scheduler_survives_any_message_of_a_tokenizer(hostile: list[Any], worker_first: bool) -> None:
    simulation = Simulation(WORKER, SchedulerConfig())
    if worker_first:
        simulation.worker_up()
    attacker = PeerId("tokenizer", 7, b"attacker")
    simulation.handle(Hello(PROTOCOL, *attacker), attacker)
    honest = [simulation.add([5, 6, 7], 5), simulation.add([8] * 6, 4, seed=1)]
    for message in hostile:
        simulation.handle(message, attacker)
    if not worker_first:
        simulation.worker_up()
    serve(simulation)
    assert [request.ids for request in honest] == [expected_ids(request, WORKER) for request in honest]
    simulation.handle(PeerDisconnected(), attacker)
    simulation.check()


result_columns = st.integers(0, 9).map(lambda rows: b"\1" * rows) | columns
limits = st.builds(DeploymentLimits, *[numbers] * 8, dtype=st.text(max_size=4), device=st.text(max_size=4))
from_a_worker = (
    st.builds(Status, st.booleans(), st.booleans(), st.text(max_size=4), numbers, st.none() | limits)
    | st.builds(AdapterUpdated, numbers, st.text(max_size=4))
    | st.builds(
        StepResult,
        number=st.integers(0, 4) | numbers,
        epoch=st.integers(0, 4) | numbers,
        counts=st.integers(0, 4).map(lambda rows: b"\1" * rows) | st.binary(max_size=4),
        token_ids=columns,
        logprobs=columns,
        forward_us=numbers,
        error=st.just("") | st.text(max_size=4),
        row_errors=st.lists(st.text(max_size=2), max_size=3),
    )
    | st.one_of([messages(kind) for kind in MESSAGES if kind is not Hello])
)


# Fields of a result that is honest otherwise.
tampered = st.sampled_from([name for name in StepResult._fields if name not in ("number", "epoch")]).flatmap(
    lambda name: st.tuples(st.just(name), values(typing.get_type_hints(StepResult)[name]) | result_columns)
)


@settings(max_examples=150, deadline=None)
@given(st.booleans(), st.lists(st.none() | tampered | from_a_worker.filter(travels), max_size=20))
@example(True, [HeldPages(b"\0" * 4, b"\0"), Status(True, True, "", 0, None)])
def test_scheduler_survives_any_message_of_a_worker(ready: bool, hostile: list[Any]) -> None:
    """None: a step is planned. A pair: one is planned, and answered with another value in a field."""
    simulation = Simulation(WORKER, SchedulerConfig())
    attacker = PeerId("worker", 0, b"attacker")
    simulation.worker = attacker
    simulation.handle(Hello(PROTOCOL, *attacker), attacker)
    if ready:
        simulation.handle(simulation.adapters.worker_status(), attacker)
    honest = [simulation.add([5, 6, 7], 5), simulation.add([8] * 6, 4, seed=1, top_n=2)]
    for message in hostile:
        if message is None:
            simulation.plan()
        elif isinstance(message, tuple) and not isinstance(message, tuple(MESSAGES)):
            name, value = message
            simulation.plan()
            if simulation.steps:
                result = simulation.engine.run_step(simulation.steps.popleft())
                if isinstance(value, type(getattr(result, name))):
                    simulation.handle(result._replace(**{name: value}), attacker)
        else:
            simulation.handle(message, attacker)
    simulation.scheduler.deadline(simulation.now)
    simulation.worker_down()
    simulation.check()
    if ready:  # else the limits of the deployment may be those that the hostile one has stated
        simulation.worker_up()
        while updates := simulation.adapters.queued_updates:  # to load what the hostile one has stated
            simulation.handle(AdapterUpdated(updates.popleft().rid, "no such directory"), simulation.worker)
        serve(simulation)
        assert all(request.end is not None for request in honest)


# --- tokenizers -------------------------------------------------------------------------------------------------------

hostile_generate_fields: dict[str, st.SearchStrategy[Any]] = {
    "rid": numbers,
    "inputs": st.text(max_size=9) | st.just("\\ud800"),
    "sampling": messages(SamplingParams),
    "max_new_tokens": st.none() | numbers,
    "truncate": st.none() | numbers,
    "stop_strings": st.lists(st.text(max_size=3), max_size=3),
    "resume_ids": columns,
    "context": messages(RequestContext),
    "chat": st.binary(max_size=9) | st.sampled_from([b"{}", b"[]", b'{"messages": 1}', b'{"messages": []}', b"1"]),
    "hide_stop": st.booleans(),
    "prompt_logprobs_from": numbers,
    "prompt_top_n": numbers,
    "grammar": st.binary(max_size=9) | st.sampled_from([b"{}", b"[]", b'{"type": "json"}', b'{"type": "regex"}']),
    "stop_token_ids": columns,
    "bad_words": st.lists(st.text(max_size=3), max_size=3),
    "listed_texts": st.lists(st.text(max_size=3), max_size=3),
    "input_ids": columns,
}


@st.composite
def generates(draw: st.DrawFn) -> Generate:
    """A valid request but for one or two fields."""
    names = draw(st.lists(st.sampled_from(sorted(hostile_generate_fields)), max_size=2, unique=True))
    valid = Generate(draw(st.integers(1, 4)), "Hello", SamplingParams(1), max_new_tokens=4)
    return valid._replace(**{name: draw(hostile_generate_fields[name]) for name in names})


rid_columns = st.lists(st.integers(0, 5), max_size=3).map(partial(pack_column, UINT32)) | st.binary(max_size=9)
from_a_scheduler = (
    st.builds(Tokens, rid_columns, rid_columns, columns, columns, rid_columns, columns, columns)
    | st.builds(PromptLogprobs, numbers, columns, columns, columns)
    | st.builds(End, numbers, st.sampled_from(FinishReason) | st.text(max_size=4), st.text(max_size=4))
    | st.builds(Status, st.booleans(), st.booleans(), st.text(max_size=4), numbers, st.none() | limits)
    | st.one_of([messages(kind) for kind in MESSAGES if kind is not Hello])
)
from_an_api = (
    generates()
    | generates()
    | st.builds(Cancel, numbers)
    | st.builds(Tokenize, numbers, st.text(max_size=4), st.booleans(), hostile_generate_fields["chat"])
    | st.one_of([messages(kind) for kind in MESSAGES if kind is not Hello])
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), (from_a_scheduler | from_an_api).filter(travels)), max_size=12))
def test_tokenizer_survives_any_message_of_any_peer(hostile: list[tuple[bool, Any]]) -> None:
    """True: from the scheduler."""
    harness = PoolHarness(template="{{ messages }}")
    for from_scheduler, message in hostile:
        harness.pool.handle(harness.scheduler if from_scheduler else API, message)
        harness.run_jobs()
        for _, sent in harness.pool.drain_outgoing():
            encode(sent)
    harness.pool.handle(API, PeerDisconnected())
    harness.disconnect_scheduler()
    harness.connect_scheduler()
    harness.pool.handle(harness.scheduler, READY)
    harness.pool.drain_outgoing()  # it is told of changes of adapters
    honest = harness.submit(77, "Hello", api=OTHER, max_new_tokens=1)
    harness.pool.drain_outgoing()
    harness.send_tokens((honest.rid, ids_of("a")))
    harness.pool.handle(harness.scheduler, End(honest.rid, FinishReason.LENGTH))
    assert [message.text for message in harness.received_by(OTHER) if isinstance(message, End)] == ["a"]


@pytest.mark.parametrize(
    ("name", "value"), [("request_key", -1), ("request_index", -1), ("waited_ms", -1), ("waited_ms", 2**64 - 1)]
)
def test_a_front_end_cannot_end_a_tokenizer_by_a_number(name: str, value: int, tmp_path: Path) -> None:
    harness = PoolHarness()
    harness.pool._recorder = RingRecorder(tmp_path / "ring")
    context = RequestContext(request_key=1)._replace(**{name: value})
    harness.pool.handle(API, Generate(1, "Hello", SamplingParams(1), context=context))
    sent = harness.pool.drain_outgoing()
    assert [(peer, type(message)) for peer, message in sent] == [(API, End)]
    assert f"`{name}` is {value}" in sent[0][1].message


def test_the_highest_stamp_of_an_adapter_change_ends_no_tokenizer() -> None:
    harness = PoolHarness()
    change = UpdateAdapter(0, "a", "/a", stamp=2**64 - 1)
    harness.pool.handle(harness.scheduler, READY._replace(adapter_changes=[change]))
    harness.pool.drain_outgoing()
    harness.pool.handle(API, UpdateAdapter(1, "b", "/b"))
    assert [type(decode(encode(message))) for _, message in harness.pool.drain_outgoing()] == [UpdateAdapter]
