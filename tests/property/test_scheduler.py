"""Whatever comes in whatever order: every request ends once, with the tokens that it would have drawn alone.

The house checks on the way that steps are what a strict worker accepts, that no token follows an end or a cancel, and
that slots, pages and queue agree; here hypothesis decides what happens next.
"""

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.adapters import PATHS
from tests.scheduler.house import House, everything, replay
from tests.scheduler.tokenizers import Asked
from tgi.kernel.messages import Cancel, Reason, Result, Stop
from tgi.scheduler.core import Config
from tgi.worker.scripted import Script

# A prompt that begins so kills the worker, or makes its step fail. Other prompts begin with smaller ids.
DEADLY, BROKEN = 3, 4
LIMIT = 24


class Scheduler(RuleBasedStateMachine):
    """Two tokenizers, one scheduler, one worker; any of them may die at any time."""

    @initialize(
        pages=st.integers(6, 20),
        slots=st.integers(1, 4),
        budget=st.integers(4, 16),
        prefix_caching=st.booleans(),
        pace=st.sampled_from([0.2, 0.001]),
        settles=st.booleans(),
        drafts=st.sampled_from([0, 0, 1, 4, 7]),
        draft_model=st.booleans(),
        vocab_size=st.sampled_from([5, 128]),  # of 5 ids the same follow each other often
    )
    def start(
        self, pages: int, slots: int, budget: int, pace: float, settles: bool, vocab_size: int, **config: Any
    ) -> None:
        self.script = Script(pages, 4, slots, vocab_size, LIMIT, budget)
        self.house = House(self.script, Config(step_target=pace, **config), tokenizers=2)
        self.house.settles = settles
        self.house.adapters.start_with("a", "one")
        self.house.poison.add(DEADLY)
        self.house.broken.add(BROKEN)
        self.old: list[Result] = []
        self.deaths = 0

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=LIMIT) | st.integers(5, 20).map(lambda n: n * [1]),
        first=st.sampled_from([1, 1, 1, 2, DEADLY, BROKEN]),
        new=st.integers(0, 12),
        place=st.integers(0, 1),
        eos=st.booleans(),
        seed=st.none() | st.integers(0, 3),
        top_n=st.sampled_from([0, 0, 1, 3]),
        choice=st.integers(0, 1),
        prompt_top_n=st.sampled_from([None, None, 0, 2]),
        name=st.sampled_from([None, "a", "a", "b"]),
    )
    def add(
        self, prompt: list[int], first: int, new: int, place: int, eos: bool, name: str | None, **asked: Any
    ) -> None:
        stop_ids = [2, *range(40, 50)] if eos else []
        known = {adapter.name: adapter for adapter in self.house.adapters.told(place)}
        self.house.add([first, *prompt[1:]], new, place=place, stop_ids=stop_ids, adapter=known.get(name), **asked)

    @rule(name=st.sampled_from(["a", "b"]), content=st.sampled_from([None, "one", "two"]), place=st.integers(0, 1))
    def adapt(self, name: str, content: str | None, place: int) -> None:
        self.house.adapters.ask(name, content, place)

    @rule(length=st.integers(5, 9), place=st.integers(0, 1), steps=st.integers(0, 2))
    def come_late(self, length: int, place: int, steps: int) -> None:
        """An adapter is gone for a moment, in which a request comes that knows of it."""
        known = {adapter.name: adapter for adapter in self.house.adapters.told(place)}
        self.house.adapters.ask("a", None)
        for _ in range(steps):
            self.house.step()
        if "a" in known:
            self.house.add(length * [1], place=place, adapter=known["a"])
        for _ in range(steps):
            self.house.step()
        self.house.adapters.ask("a", "one")

    @rule()
    def work(self) -> None:
        self.house.adapters.work()

    @rule()
    def plan(self) -> None:
        self.house.plan()

    @rule()
    def settle(self) -> None:
        self.house.settle()

    @rule()
    def compute(self) -> None:
        if (result := self.house.compute()) is not None:
            self.old.append(result)

    @rule()
    def deliver(self) -> None:
        self.house.deliver()

    @rule(times=st.integers(1, 10))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.house.step()

    @precondition(lambda self: self.house.asked)
    @rule(data=st.data(), kind=st.sampled_from([Cancel, Stop]))
    def cancel(self, data: st.DataObject, kind: type) -> None:
        self.house.cancel(data.draw(st.sampled_from(self.house.asked)), kind)

    @rule()
    def worker_up(self) -> None:
        self.deaths += self.house.worker is not None
        self.house.worker_up()

    @precondition(lambda self: self.house.worker)
    @rule()
    def worker_down(self) -> None:
        self.house.worker_down()
        self.deaths += 1

    @rule(place=st.integers(0, 1))
    def tokenizer_dies(self, place: int) -> None:
        self.house.tokenizer_up(place)

    @rule()
    def scheduler_dies(self) -> None:
        self.house.new_core()
        self.old.clear()

    @precondition(lambda self: self.house.worker)
    @rule(data=st.data())
    def late_result(self, data: st.DataObject) -> None:
        late = [result for result in self.old if result.epoch < self.house.core.under_way.epoch]
        if late:
            self.house.handle(data.draw(st.sampled_from(late)), self.house.worker)

    @rule(seconds=st.floats(0.0, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.house.tick(seconds)

    @invariant()
    def nothing_contradicts(self) -> None:
        if hasattr(self, "house"):
            self.house.check()

    def teardown(self) -> None:
        if not hasattr(self, "house"):
            return
        house = self.house
        house.run(3000)
        for asked in house.asked:
            self.ended_well(asked)
        assert not house.adapters.asked
        assert not any(house.adapters.errors)
        assert {adapter.name: adapter.path for adapter in house.adapters.loaded()} == house.adapters.wanted
        house.settle()
        assert house.core.queued == house.core.running == house.core.pages_used == 0
        heard, steps = replay(house.journal, house.core.config)
        assert heard == house.heard
        assert steps == house.sent

    def ended_well(self, asked: Asked) -> None:
        assert asked.end is not None, "no end"
        if asked.end.reason == Reason.INVALID:
            nothing = not asked.new and not asked.tells
            assert nothing or len(asked.prompt) + asked.new > min(LIMIT, self.script.pages * 4)
            assert not asked.ids
            return
        want, tops, told, told_tops = everything(asked, self.script)
        assert asked.tops == tops[: len(asked.ids)]
        assert asked.told == told[: len(asked.told)]
        assert asked.told_tops == told_tops[: len(asked.told) * (asked.prompt_top_n or 0)]
        assert len(asked.told) == asked.tells or not asked.ids
        match asked.end.reason:
            case Reason.LENGTH:
                assert asked.ids == want
                assert len(want) == asked.new
            case Reason.EOS:
                assert asked.ids == want
                assert want[-1] in asked.stop_ids
            case Reason.STOP | Reason.CANCELLED:
                assert asked.told_to_stop
                assert asked.ids == want[: len(asked.ids)]
            case Reason.FAILED:
                # A worker that is killed three times under an innocent request makes it guilty.
                gone = asked.salt and str(PATHS[asked.salt]) in self.house.adapters.dropped
                assert asked.prompt[0] in (DEADLY, BROKEN) or self.deaths >= 1 or gone
                assert asked.ids == want[: len(asked.ids)]
            case other:
                raise AssertionError(f"ended with {other}")
        if asked.prompt[0] in (DEADLY, BROKEN):
            assert asked.end.reason in (Reason.FAILED, Reason.CANCELLED, Reason.STOP)


TestScheduler = Scheduler.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=40)
