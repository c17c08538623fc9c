"""Random events in random order: every request ends exactly once, with the tokens that it samples alone.

Hypothesis chooses the events. The simulation checks that the strict fake worker accepts all steps, that no token
follows an end or a cancel, and that slots, pages and queue agree.
"""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.adapter_updates import PATHS
from tests.scheduler.simulated_tokenizers import SubmittedRequest
from tests.scheduler.simulation import Simulation, expected_answer, replay
from tgi.microkernel.messages.kv_groups import GroupKind, KVGroup, paged_groups
from tgi.microkernel.messages.protocol import Cancel, FinishReason, StepResult, Stop
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

pytestmark = pytest.mark.fuzz

# The first id of a prompt that crashes the worker, or makes its step fail. Other prompts begin with smaller ids.
DEADLY, BROKEN = 3, 4
LIMIT = 24
FULL, SLIDING = KVGroup(), KVGroup(GroupKind.SLIDING, 5)
KV_GROUPS = [(FULL,)] * 3 + [(FULL, SLIDING), (FULL, SLIDING, SLIDING), (FULL, FULL, SLIDING), (SLIDING,)]
KV_GROUPS += [(FULL, KVGroup(GroupKind.SLIDING, 1), KVGroup(GroupKind.SLIDING, 12))]
STATES = [
    KVGroup(GroupKind.RECURRENT, snapshots=count, interval=each, drafts=drafts)
    for count, each, drafts in ((0, 8, 9), (1, 4, 2), (3, 8, 0), (20, 16, 30))
]
KV_GROUPS += [*((FULL, state) for state in STATES), (FULL, SLIDING, STATES[2])]


class SchedulerMachine(RuleBasedStateMachine):
    """Two tokenizers, one scheduler, one worker; any of them may crash at any time."""

    @initialize(
        pages=st.integers(6, 20),
        slots=st.integers(1, 4),
        budget=st.integers(4, 16),
        prefix_caching=st.booleans(),
        step_target=st.sampled_from([0.2, 0.001]),
        commits=st.booleans(),
        max_drafts=st.sampled_from([0, 0, 1, 4, 7]),
        draft_model=st.booleans(),
        vocab_size=st.sampled_from([5, 128]),  # with 5 ids the text repeats itself often
        names_requests=st.booleans(),
        groups=st.sampled_from(KV_GROUPS),
        most_files=st.sampled_from([None, 1, 3, 1000]),
    )
    def start(
        self,
        pages: int,
        slots: int,
        budget: int,
        step_target: float,
        commits: bool,
        vocab_size: int,
        names_requests: bool,
        groups: tuple[KVGroup, ...],
        most_files: int | None,
        **config: Any,
    ) -> None:
        pages *= len(paged_groups(groups))
        self.worker_config = FakeWorkerConfig(pages, 4, slots, vocab_size, LIMIT, budget, groups=groups)
        self.sim = Simulation(self.worker_config, SchedulerConfig(step_target=step_target, **config), tokenizers=2)
        self.sim.commits_after_plan = commits
        self.sim.names_requests = names_requests
        if most_files is not None:
            self.sim.files, self.sim.most_files = {}, most_files
        self.sim.adapters.preload("a", "one")
        self.sim.poison.add(DEADLY)
        self.sim.broken.add(BROKEN)
        self.old: list[StepResult] = []
        self.worker_losses = 0

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=LIMIT) | st.integers(5, 20).map(lambda n: n * [1]),
        first=st.sampled_from([1, 1, 1, 2, DEADLY, BROKEN]),
        new=st.integers(0, 12),
        tokenizer=st.integers(0, 1),
        eos=st.booleans(),
        seed=st.none() | st.integers(0, 3),
        top_n=st.sampled_from([0, 0, 1, 3]),
        choice=st.integers(0, 1),
        prompt_top_n=st.sampled_from([None, None, 0, 2]),
        name=st.sampled_from([None, "a", "a", "b"]),
        client=st.sampled_from(["", "", "light", "heavy"]),
        weight=st.sampled_from([1.0, 1.0, 3.0]),
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def add(
        self, prompt: list[int], first: int, new: int, tokenizer: int, eos: bool, name: str | None, **options: Any
    ) -> None:
        stop_ids = [2, *range(40, 50)] if eos else []
        known = {adapter.name: adapter for adapter in self.sim.adapters.ever_reported(tokenizer)}
        self.sim.add(
            [first, *prompt[1:]], new, tokenizer=tokenizer, stop_ids=stop_ids, adapter=known.get(name), **options
        )

    @rule(name=st.sampled_from(["a", "b"]), content=st.sampled_from([None, "one", "two"]), tokenizer=st.integers(0, 1))
    def update_adapter(self, name: str, content: str | None, tokenizer: int) -> None:
        self.sim.adapters.request_update(name, content, tokenizer)

    @rule(length=st.integers(5, 9), tokenizer=st.integers(0, 1), steps=st.integers(0, 2))
    def request_after_unload(self, length: int, tokenizer: int, steps: int) -> None:
        """A request names an adapter that is unloaded for a moment."""
        known = {adapter.name: adapter for adapter in self.sim.adapters.ever_reported(tokenizer)}
        self.sim.adapters.request_update("a", None)
        for _ in range(steps):
            self.sim.step()
        if "a" in known:
            self.sim.add(length * [1], tokenizer=tokenizer, adapter=known["a"])
        for _ in range(steps):
            self.sim.step()
        self.sim.adapters.request_update("a", "one")

    @rule()
    def apply_update(self) -> None:
        self.sim.adapters.apply_next_update()

    @rule()
    def plan(self) -> None:
        self.sim.plan()

    @rule()
    def commit(self) -> None:
        self.sim.commit()

    @rule()
    def compute(self) -> None:
        if (result := self.sim.compute()) is not None:
            self.old.append(result)

    @rule()
    def transfer(self) -> None:
        self.sim.transfer()

    @precondition(lambda self: self.sim.files)
    @rule(data=st.data())
    def lose_file(self, data: st.DataObject) -> None:
        del self.sim.files[data.draw(st.sampled_from([*self.sim.files]))]

    @rule()
    def deliver(self) -> None:
        self.sim.deliver()

    @rule(times=st.integers(1, 10))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.sim.step()

    @precondition(lambda self: self.sim.requests)
    @rule(data=st.data(), kind=st.sampled_from([Cancel, Stop]))
    def cancel(self, data: st.DataObject, kind: type) -> None:
        self.sim.cancel(data.draw(st.sampled_from(self.sim.requests)), kind)

    @rule()
    def worker_up(self) -> None:
        self.worker_losses += self.sim.worker is not None
        self.sim.worker_up()

    @precondition(lambda self: self.sim.worker)
    @rule()
    def worker_down(self) -> None:
        self.sim.worker_down(outside=True)
        self.worker_losses += 1

    @rule(tokenizer=st.integers(0, 1))
    def restart_tokenizer(self, tokenizer: int) -> None:
        self.sim.tokenizer_up(tokenizer)

    @rule()
    def begin_again(self) -> None:
        """A journal goes on in a new file; the calls after this one are repeated from there."""
        self.sim.begin_again_when_idle()

    @rule()
    def restart_scheduler(self) -> None:
        self.sim.restart_scheduler()
        self.old.clear()

    @precondition(lambda self: self.sim.worker)
    @rule(data=st.data())
    def late_result(self, data: st.DataObject) -> None:
        late = [result for result in self.old if result.epoch < self.sim.scheduler.pipeline.epoch]
        if late:
            self.sim.handle(data.draw(st.sampled_from(late)), self.sim.worker)

    @rule(seconds=st.floats(0.0, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.sim.advance_time(seconds)

    @invariant()
    def state_is_consistent(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        sim.run(3000)
        for request in sim.requests:
            self.check_end(request)
        assert not sim.adapters.pending
        assert not any(sim.adapters.errors)
        assert {adapter.name: adapter.path for adapter in sim.adapters.loaded()} == sim.adapters.wanted
        sim.commit()
        assert sim.scheduler.queued == sim.scheduler.running == sim.scheduler.pages_used == 0
        messages, steps = replay(sim.journal, Scheduler(sim.scheduler.config))
        assert messages == sim.received
        assert steps == sim.sent

    def check_end(self, request: SubmittedRequest) -> None:
        assert request.end is not None, "no end"
        if request.end.reason == FinishReason.INVALID:
            nothing = not request.new and not request.expected_prompt_logprobs
            assert nothing or len(request.prompt) + request.new > self.worker_config.limits().max_total_tokens
            assert not request.ids
            return
        expected = expected_answer(request, self.worker_config)
        assert request.tops == expected.tops[: len(request.ids)]
        assert request.prompt_logprobs == expected.prompt_logprobs[: len(request.prompt_logprobs)]
        assert request.prompt_tops == expected.prompt_tops[: len(request.prompt_logprobs) * (request.prompt_top_n or 0)]
        assert len(request.prompt_logprobs) == request.expected_prompt_logprobs or not request.ids
        match request.end.reason:
            case FinishReason.LENGTH:
                assert request.ids == expected.ids
                assert len(expected.ids) == request.new
            case FinishReason.EOS:
                assert request.ids == expected.ids
                assert expected.ids[-1] in request.stop_ids
            case FinishReason.STOP | FinishReason.CANCELLED:
                assert request.cancelled_by_client
                assert request.ids == expected.ids[: len(request.ids)]
            case FinishReason.FAILED:
                assert request.cache_salt
                assert str(PATHS[request.cache_salt]) in self.sim.adapters.dropped
                assert request.ids == expected.ids[: len(request.ids)]
            case FinishReason.QUARANTINED:
                # An innocent one only for deaths from outside, all in its turns by accident, which is unlikely.
                killed_too_often = self.worker_losses >= 5 and request.end.message.startswith("the worker was killed ")
                assert request.prompt[0] in (DEADLY, BROKEN) or killed_too_often
                assert request.ids == expected.ids[: len(request.ids)]
            case other:
                raise AssertionError(f"ended with {other}")
        if request.prompt[0] in (DEADLY, BROKEN):
            assert request.end.reason in (
                FinishReason.FAILED, FinishReason.QUARANTINED, FinishReason.CANCELLED, FinishReason.STOP
            )  # fmt: skip


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40)
