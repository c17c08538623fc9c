"""The vision tower's work for an image is divided among steps, between which prompts of others are computed."""

from collections import Counter, deque
from collections.abc import Iterator
from random import Random

import pytest

from tests.scheduler.invariants import check_scheduler
from tests.scheduler.test_images import FIRST, SECOND, TOKENIZER, WORKER, add, extras, scheduler
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    MAX_DIVIDED_IMAGES,
    PIPELINE_DEPTH,
    PROTOCOL,
    Add,
    Cancel,
    End,
    Hello,
    RequestContext,
    Status,
    Step,
    StepResult,
    encode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorker, FakeWorkerConfig

SLICES = FIRST.length
SLICE_US, TOKEN_US = 2000, 200  # so two slices are within TOWER_SECONDS


def text(rid: int, client: str) -> Add:
    ids = pack_column(INT32, range(rid, rid + 10))
    return Add(rid, ids, 1, encode(SamplingParams(0)), context=RequestContext(client=client))


def image(rid: int, client: str) -> Add:
    """One with two images that no other one has."""
    images = [one._replace(digest=b"%08d%08d" % (rid, one.position)) for one in (FIRST, SECOND)]
    return add(rid, images)._replace(max_new_tokens=1, context=RequestContext(client=client))


class Run:
    """A scheduler and its worker, whose slices and tokens take their time."""

    def __init__(self, undivided: str = "", tokens: int = 200) -> None:
        self.scheduler: Scheduler = scheduler(undivided, max_batch_prefill_tokens=tokens, tower_slices=SLICES)
        self._worker = FakeWorker(FakeWorkerConfig(page_size=4, max_batch_prefill_tokens=tokens, tower_slices=SLICES))

    def add(self, message: Add) -> None:
        self.scheduler.handle(message, TOKENIZER, 0.0)

    def steps(self) -> Iterator[Step]:
        """The steps until there is nothing to compute."""
        while (step := self.scheduler.plan(0.0)) is not None:
            result = self._worker.run_step(step)
            assert not result.error
            yield step
            slices, tokens = sum(unpack_int32(step.tower)[2::3]), sum(unpack_int32(step.counts))
            took = {"encoder_us": SLICE_US * slices, "forward_us": SLICE_US * slices + TOKEN_US * tokens}
            self.scheduler.handle(result._replace(encoder_positions=slices, **took), WORKER, 0.0)
            self.scheduler.commit()


def measured(undivided: str = "", tokens: int = 200) -> Run:
    """A run that has computed a text and an image. `tokens`: the most in a step."""
    run = Run(undivided, tokens)
    run.add(text(1, "a"))
    assert len([*run.steps()]) == 1
    run.add(image(2, "a"))
    assert sum(slices(step) for step in run.steps()) == 2 * SLICES
    return run


def slices(step: Step) -> int:
    return sum(unpack_int32(step.tower)[2::3])


@pytest.mark.parametrize(
    ("undivided", "tokens"), [("", 16), ("images", 16), ("prompt", 20)]
)  # the first page is cached
def test_a_step_has_few_slices_and_no_prompt(undivided: str, tokens: int) -> None:
    """The prompt follows when its images are computed, of one request after the other."""
    run = measured(undivided)
    run.add(image(3, "a"))
    run.add(image(4, "a"))
    steps = [(slices(step), sum(unpack_int32(step.counts))) for step in run.steps()]
    each = 6 * [(2, 0)] + [(0, tokens)]
    assert steps == 2 * each


def test_a_text_beside_a_flood_of_images_is_in_the_next_step() -> None:
    run = measured()
    for rid in range(10, 18):
        run.add(image(rid, "flood"))
    waited = []
    for number, step in enumerate(run.steps()):
        assert slices(step) * SLICE_US <= 2 * SLICE_US
        if number % 5 == 0 and len(waited) < 12:
            run.add(text(100 + number, "text"))
            asked = number
        elif 10 in unpack_int32(step.counts):
            assert not step.tower  # the text's token does not wait for the tower
            waited.append(number - asked)
    assert waited == 12 * [1]


def test_an_image_gets_its_turn_in_a_flood_of_texts() -> None:
    """A client's share counts the tower's work: texts do not keep an image from the tower."""
    run = measured()
    run.add(image(10, "image"))
    texts, done = 0, 0
    for step in run.steps():
        done += slices(step)
        if done < 2 * SLICES and texts < 200:
            texts += 1
            run.add(text(100 + texts, "flood"))
    assert done == 2 * SLICES
    assert texts < 200


def test_images_of_many_clients_are_computed_in_part_a_few_at_a_time() -> None:
    """The worker gives up an image if more than MAX_DIVIDED_IMAGES are computed in part, and begins it anew."""
    run = measured()
    clients = MAX_DIVIDED_IMAGES + 3
    for rid in range(clients):
        run.add(image(10 + rid, f"client {rid}"))
    done: Counter[tuple[int, int]] = Counter()  # slices of an image of a slot
    waited = []
    for number, step in enumerate(run.steps()):
        tower = unpack_int32(step.tower)
        for slot, index, count in zip(tower[::3], tower[1::3], tower[2::3], strict=True):
            done[slot, index] += count
        assert sum(count < SLICES for count in done.values()) <= MAX_DIVIDED_IMAGES
        if number % 5 == 0 and len(waited) < 5:
            run.add(text(100 + number, "text"))
            asked = number
        elif 10 in unpack_int32(step.counts):
            waited.append(number - asked)
    assert [*done.values()] == 2 * clients * [SLICES]
    assert max(waited) < clients  # of which each has a turn


def test_an_image_of_higher_priority_does_not_wait_for_others() -> None:
    run = measured()
    for rid in range(MAX_DIVIDED_IMAGES):
        run.add(image(10 + rid, f"client {rid}"))
    steps = run.steps()
    for _ in range(MAX_DIVIDED_IMAGES):
        assert slices(next(steps)) == 2
    urgent = image(30, "urgent")
    run.add(urgent._replace(context=urgent.context._replace(priority=1)))
    first = next(steps)
    assert {unpack_int32(first.tower)[0]} == {one.slot for one in first.slots}


def test_an_undivided_prompt_waits_for_a_step_that_it_fits() -> None:
    """Its images are computed, and a text of another client leaves too few of the tokens of a step."""
    run = measured("prompt", tokens=24)
    run.add(image(10, "image"))
    steps = run.steps()
    done = 0
    while done < 2 * SLICES:
        done += slices(next(steps))
    run.add(text(100, "text")._replace(max_new_tokens=2))
    assert [sum(unpack_int32(step.counts)) for step in steps] == [10, 21]


@pytest.mark.parametrize("seed", range(24))
def test_all_requests_end_whatever_is_cancelled_and_preempted(seed: int) -> None:
    """Images are shared, pages and slots are few, priorities differ, and steps are in flight."""
    random = Random(seed)
    step_tokens = random.choice([24, 60, 200])
    config = FakeWorkerConfig(
        page_size=4, pages=random.choice([12, 20, 1000]), slots=random.choice([2, 4, 16]),
        max_batch_prefill_tokens=step_tokens, tower_slices=SLICES,
    )  # fmt: skip
    worker, running = FakeWorker(config), Scheduler(SchedulerConfig())
    for peer in (TOKENIZER, WORKER):
        running.handle(Hello(PROTOCOL, *peer), peer, 0.0)
    limits = worker.limits._replace(undivided=random.choice(["", "images", "prompt"]))
    running.handle(Status(True, True, "", 100, limits), WORKER, 0.0)
    in_flight: deque[StepResult] = deque()
    asked: set[int] = set()
    for turn in range(2000):
        if turn < 150 and random.random() < 0.4:
            made = random.choice([text, image])(turn, f"client {random.randrange(6)}")
            if made.images and random.random() < 0.5:  # which others have, too
                made = made._replace(images=[FIRST], extras=extras(FIRST))
            context = made.context._replace(priority=random.choice([0, 0, 0, 1]))
            running.handle(made._replace(max_new_tokens=random.randrange(1, 6), context=context), TOKENIZER, 0.0)
            asked.add(turn)
        if asked and random.random() < 0.05:
            running.handle(Cancel(random.choice(sorted(asked))), TOKENIZER, 0.0)
        while len(in_flight) < PIPELINE_DEPTH and (step := running.plan(0.0)) is not None:
            result, count = worker.run_step(step), slices(step)
            assert not result.error
            took = SLICE_US * count, SLICE_US * count + TOKEN_US * sum(unpack_int32(step.counts))
            in_flight.append(result._replace(encoder_positions=count, encoder_us=took[0], forward_us=took[1]))
        if in_flight and random.random() < 0.8:
            running.handle(in_flight.popleft(), WORKER, 0.0)
        running.commit()
        check_scheduler(running)
        asked -= {message.rid for _, message in running.outgoing() if isinstance(message, End)}
        if turn > 150 and not asked:
            break
    assert not asked
