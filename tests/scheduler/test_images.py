"""Images of prompts: handed to the worker with the slot, and paid for as the work of the vision tower."""

from typing import Any

import pytest

from tests.scheduler.simulation import FailingWorker
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    PROTOCOL,
    Add,
    End,
    Hello,
    ImageSegment,
    PageExtra,
    RequestContext,
    Status,
    Step,
    StepResult,
    encode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.estimators import PrefillBudget
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorker, FakeWorkerConfig

TOKENIZER, WORKER = PeerId("tokenizer", 0, b"t"), PeerId("worker", 0, b"w")
FIRST, SECOND = (ImageSegment(at, 6, b"%016d" % at, f"{at}.safetensors") for at in (4, 12))


def extras(*images: ImageSegment) -> list[PageExtra]:
    return [PageExtra(one.position, one.digest) for one in images]


def add(rid: int, images: list[ImageSegment], **fields: Any) -> Add:
    given = {"extras": extras(*images), **fields}
    return Add(rid, pack_column(INT32, range(3, 23)), 4, encode(SamplingParams(0)), images=images, **given)


def scheduler(undivided: str = "", running_images: int = 100, **fields: Any) -> Scheduler:
    made = Scheduler(SchedulerConfig())
    for peer in (TOKENIZER, WORKER):
        made.handle(Hello(PROTOCOL, *peer), peer, 0.0)
    limits = FakeWorker(FakeWorkerConfig(page_size=4, **fields)).limits
    limits = limits._replace(undivided=undivided, max_running_images=running_images)
    made.handle(Status(True, True, "", 100, limits), WORKER, 0.0)
    return made


@pytest.mark.parametrize(
    ("images", "fields", "reason"),
    [
        ([FIRST._replace(position=-1)], {"extras": []}, "an image has positions -1 to 4 of 20"),
        ([FIRST._replace(position=15)], {}, "positions 15 to 20 of 20"),
        ([FIRST._replace(length=0)], {}, "positions 4 to 3 of 20"),
        ([FIRST, SECOND._replace(position=9)], {}, "positions 9 to 14 of 20, after one to 9"),
        ([SECOND, FIRST], {"extras": extras(FIRST, SECOND)}, "positions 4 to 9 of 20, after one to 17"),
        ([FIRST], {"extras": []}, "no digest among the extras"),
        ([FIRST], {"extras": [PageExtra(4, b"another one.....")]}, "no digest among the extras"),
        ([FIRST._replace(digest=b"short")], {}, "no digest among the extras"),
        *(
            ([FIRST._replace(name=name)], {}, "is not the name of a file")
            for name in ("", "../a", "a/b", ".a", "a" * 300)
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(images: list[ImageSegment], fields: dict[str, Any], reason: str) -> None:
    running = scheduler()
    running.handle(add(1, images, **fields), TOKENIZER, 0.0)
    (end,) = (message for _, message in running.outgoing() if isinstance(message, End))
    assert end.reason == "validation"
    assert reason in end.message


@pytest.mark.parametrize(
    ("undivided", "tokens", "decoding", "counts"),
    [
        ("", 9, False, [9, 9, 2]),
        ("images", 9, False, [4, 8, 8]),  # a chunk of 9 would end within the first image, one of 13 within the second
        ("images", 5, False, "`max_batch_prefill_tokens`), since this model computes it in one step. Given: 6"),
        ("prompt", 20, False, [20]),
        ("prompt", 19, False, "a prompt with images must have at most 19 tokens"),
        ("", 12, True, [4, 8, 8]),  # with their work in the vision tower, neither image fits behind what is before it
        ("images", 30, True, [12, 8]),
        ("", 40, True, [20]),
    ],
)
def test_where_chunks_end(undivided: str, tokens: int, decoding: bool, counts: list[int] | str) -> None:
    running = scheduler(undivided, max_batch_prefill_tokens=tokens)
    worker = FakeWorker(FakeWorkerConfig(page_size=4, max_batch_prefill_tokens=tokens))
    found = []
    if decoding:
        ids = pack_column(INT32, [3])
        running.handle(Add(0, ids, 90, encode(SamplingParams(0))), TOKENIZER, 0.0)
    for number in range(5):
        if number == decoding:
            running.handle(add(1, [FIRST, SECOND])._replace(max_new_tokens=1), TOKENIZER, 0.0)
        if (step := running.plan(0.0)) is None:
            break
        if number >= decoding and len(unpack_int32(step.counts)) > decoding:
            found.append(unpack_int32(step.counts)[-1])
        running.handle(worker.run_step(step), WORKER, 0.0)
        running.commit()
    if isinstance(counts, str):
        assert [counts in message.message for _, message in running.outgoing() if isinstance(message, End)] == [True]
    else:
        assert found == counts


@pytest.mark.parametrize(
    ("undivided", "memory", "computed"),
    [("images", 6, True), ("images", 5, False), ("prompt", 20, True), ("prompt", 19, False)],
)
def test_what_is_not_divided_may_lack_memory(undivided: str, memory: int, computed: bool) -> None:
    """And then is not tried again and again."""
    running = scheduler(undivided, max_batch_prefill_tokens=30)
    worker = FailingWorker(FakeWorkerConfig(page_size=4, max_batch_prefill_tokens=30))
    running.handle(add(1, [FIRST, SECOND])._replace(max_new_tokens=1), TOKENIZER, 0.0)
    for _ in range(20):
        if (step := running.plan(0.0)) is None:
            break
        if sum(unpack_int32(step.counts)) > memory:
            worker.lose_step(step)
            lacking = StepResult(step.number, step.epoch, b"", b"", b"", error="no memory", out_of_memory=True)
            running.handle(lacking, WORKER, 0.0)
        else:
            running.handle(worker.run_step(step), WORKER, 0.0)
        running.commit()
    (end,) = (message for _, message in running.outgoing() if isinstance(message, End))
    assert end.reason == ("length" if computed else "generation")
    assert end.message.startswith("" if computed else "too little memory to compute this request")


def test_images_of_running_requests_are_limited() -> None:
    """A request with more of them runs while no other request does, or begins before the others."""
    running = scheduler(running_images=1)
    worker, admitted, ends = FakeWorker(FakeWorkerConfig(page_size=4)), [], 0
    for rid, images in enumerate(([FIRST], [SECOND], [FIRST, SECOND], [])):
        running.handle(add(rid, images), TOKENIZER, 0.0)
    while (step := running.plan(0.0)) is not None:
        admitted += [[len(slot.images) for slot in step.slots]] * bool(step.slots)
        running.handle(worker.run_step(step), WORKER, 0.0)
        running.commit()
        ends += sum(isinstance(message, End) for _, message in running.outgoing())
    assert (admitted, ends) == ([[1], [1], [2, 0]], 4)


def test_what_an_image_costs() -> None:
    budget = PrefillBudget(1000)
    assert (budget.encoder_cost, budget.encoder_measured) == (1.0, False)
    budget.record_images(10, 8000)
    budget.record_step(0, 10, 2000)
    assert (budget.encoder_cost, budget.encoder_measured) == (4.0, True)


def test_text_shares_no_step_with_the_tower() -> None:
    """Next to a flood of images: the step that computes a prompt of another client computes no image, which would take
    several times as long, and each image has its turn."""
    running, flood, text = (
        scheduler(max_batch_prefill_tokens=16),
        RequestContext(client="a"),
        RequestContext(client="b"),
    )
    worker = FakeWorker(FakeWorkerConfig(page_size=4, max_batch_prefill_tokens=16))

    def ask(rid: int, count: int, images: list[ImageSegment], context: RequestContext) -> None:
        images = [one._replace(digest=b"%016d" % rid) for one in images]
        ids = pack_column(INT32, range(100 * rid, 100 * rid + count))
        message = Add(rid, ids, 1, encode(SamplingParams(0)), context=context, images=images, extras=extras(*images))
        running.handle(message, TOKENIZER, 0.0)

    for rid in range(1, 7):
        ask(rid, 20, [FIRST], flood)
    texts = computed = 0
    for number in range(30):
        if number in (2, 5, 8):
            ask(10 + number, 5, [], text)
        if (step := running.plan(0.0)) is None:
            break
        planned = running.pipeline.latest
        assert planned is not None
        positions, counts = planned.encoder_positions, unpack_int32(step.counts)
        computed += positions
        if 5 in counts and len(step.slots) and not step.slots[0].images:
            texts += 1
            assert not positions
        times = {"encoder_positions": positions, "encoder_us": 4000 * positions}
        result = worker.run_step(step)._replace(**times, forward_us=1000 * sum(counts) + 4000 * positions)
        running.handle(result, WORKER, 0.0)
        running.commit()
    assert (texts, computed) == (3, 6 * FIRST.length)


def test_images_travel_with_the_slot_and_pay_for_the_tower() -> None:
    running = scheduler(max_batch_prefill_tokens=8)
    running.handle(add(1, [FIRST, SECOND]), TOKENIZER, 0.0)
    running.handle(add(2, []), TOKENIZER, 0.0)
    steps: list[Step] = []
    worker = FakeWorker(FakeWorkerConfig(page_size=4, max_batch_prefill_tokens=8))
    for _ in range(3):
        step = running.plan(0.0)
        assert step is not None
        steps.append(step)
        running.handle(worker.run_step(step), WORKER, 0.0)
        running.commit()
    assert steps[0].slots[0].images == [FIRST, SECOND]
    assert [unpack_int32(step.counts) for step in steps] == [[8], [8], [4, 4]]
    share = next(iter(running._tokenizers.requests)).share
    assert share.served == 20 + 4 + FIRST.length + SECOND.length
