"""Recurrent layers: requests go on from snapshots of the state, and only where one is valid.

The fake worker keeps the chain of the computed ids as the state of each slot. It rejects a row whose state is another
one than that of the ids before it.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.kv_groups import GroupKind, KVGroup
from tgi.scheduler.kv_cache import KVCacheManager
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.scheduler.state_snapshots import StateSnapshots
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

SIZE, INTERVAL = 4, 16
STATE = KVGroup(GroupKind.RECURRENT, snapshots=4, interval=INTERVAL)
CONFIG = FakeWorkerConfig(
    pages=60, page_size=SIZE, slots=4, vocab_size=128, max_total_tokens=96, max_batch_prefill_tokens=48,
    groups=(KVGroup(), STATE),
)  # fmt: skip


def run(sim: Simulation, prompt: list[int], new: int = 4) -> int:
    """Runs a request to its end. Returns how many tokens were found in the prefix cache."""
    before = sim.scheduler.counters.cache_hit_tokens
    request = sim.add(prompt, new)
    sim.run()
    assert_as_if_alone(request, sim.worker_config)
    return sim.scheduler.counters.cache_hit_tokens - before


def started(config: FakeWorkerConfig = CONFIG) -> Simulation:
    sim = Simulation(config)
    sim.worker_up()
    return sim


def test_a_prefix_ends_where_a_snapshot_was_taken() -> None:
    """At the last page border of a prompt, after each interval, and where two prompts part."""
    sim, first = started(), [*range(50, 74)]
    assert run(sim, first) == 0
    assert run(sim, [*first[:23], 1]) == 20  # of 23 equal tokens: the last border before the prompt's end
    assert run(sim, [*first[:18], 1, 2, 3]) == 16  # the interval
    other = first[:13]
    assert run(sim, [*other, 2]) == 0  # all pages of 12 tokens are there, but no state
    assert run(sim, [*other, 3]) == 12  # now it is, since two prompts had this prefix


def test_a_state_is_cached_while_tokens_are_generated() -> None:
    """A preempted request, or the next turn of a chat, computes at most one interval of what was generated."""
    sim, prompt = started(), [*range(50, 55)]
    request = sim.add(prompt, 62)  # the last row begins at position 65
    sim.run()
    assert run(sim, [*prompt, *request.ids, 1]) == 64


def test_drafts_keep_the_number_of_states_and_leave_out_no_snapshot() -> None:
    groups = (KVGroup(), STATE._replace(drafts=3))
    sim = Simulation(CONFIG._replace(groups=groups, vocab_size=5), SchedulerConfig(max_drafts=4, draft_model=True))
    sim.worker_up()
    prompts = [[number, 1, 2, 3, 4] for number in range(2)]
    requests = [sim.add(prompt, 62) for prompt in prompts]
    sim.run()
    drafted = [sum(unpack_int32(step.drafts)) for step in sim.sent if step.drafts]
    assert max(drafted) == 3
    assert sim.scheduler.counters.accepted_draft_tokens > 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert run(sim, [*prompt, *request.ids, 1]) == 64


def test_short_prompts_are_computed_in_one_step() -> None:
    """A snapshot that saves less than an eighth of an interval costs more than it saves."""
    config = CONFIG._replace(groups=(KVGroup(), STATE._replace(interval=32 * SIZE)))
    for tokens, steps in ((4 * SIZE, 1), (4 * SIZE + 1, 2)):
        sim = started(config)
        run(sim, [*range(50, 50 + tokens)], 1)
        assert len(sim.sent) == steps


def test_the_snapshot_least_recently_used_is_overwritten() -> None:
    sim = started()
    prompts = [[number, *range(50, 60)] for number in range(5)]
    for prompt in prompts[:4]:
        assert run(sim, prompt) == 0
    assert run(sim, prompts[0]) == 8
    assert run(sim, prompts[4]) == 0
    assert [run(sim, prompt) for prompt in (prompts[0], prompts[4], prompts[2], prompts[1])] == [8, 8, 8, 0]


def test_a_restarted_scheduler_finds_the_snapshots_of_running_requests() -> None:
    sim = started()
    prompt = [*range(50, 90)]
    sim.add(prompt, 20)
    for _ in range(6):
        sim.step()
    sim.restart_scheduler()
    sim.run()
    assert sim.scheduler.counters.cache_hit_tokens == 36
    assert_as_if_alone(sim.requests[0], CONFIG)


def test_models_without_recurrent_layers_have_no_copies() -> None:
    sim = started(CONFIG._replace(groups=(KVGroup(),)))
    assert run(sim, [*range(50, 74)]) == 0
    assert run(sim, [*range(50, 74)]) == 20
    assert not any(step.state_copies for step in sim.sent)


def simulate(seed: int) -> Simulation:
    """Requests with common prefixes, scarce pages, restarts of worker and scheduler, steps that lack memory."""
    dice = random.Random(seed)
    groups = (KVGroup(), STATE._replace(snapshots=dice.choice((1, 3, 12)), interval=dice.choice((4, 8, 32))))
    config = CONFIG._replace(pages=dice.choice((25, 30, 60)), groups=groups, max_batch_prefill_tokens=16)
    sim = Simulation(config, SchedulerConfig(prefix_caching=dice.random() < 0.9), tokenizers=2)
    sim.commits_after_plan = dice.random() < 0.5
    sim.worker_up()
    texts = [[dice.randrange(1, 100) for _ in range(50)] for _ in range(2)]
    for _ in range(60):
        if dice.random() < 0.6:
            common = dice.choice(texts)[: dice.randrange(1, 50)]
            own = [dice.randrange(1, 100) for _ in range(dice.randrange(1, 8))]
            sim.add(common + own, dice.randrange(1, 30), tokenizer=dice.randrange(2))
        for _ in range(dice.randrange(6)):
            sim.step()
        event = dice.random()
        if event < 0.04:
            sim.restart_scheduler()
        elif event < 0.07:
            sim.worker_up(keeps_pages=dice.random() < 0.5)
        elif event < 0.1:
            sim.cancel(dice.choice(sim.requests)) if sim.requests else None
        sim.memory = dice.choice((12, 1 << 30)) if event > 0.9 else 1 << 30
        sim.check()
    sim.memory = 1 << 30
    sim.run()
    for request in sim.requests:
        if not request.cancelled_by_client:
            assert_as_if_alone(request, config)
    return sim


def test_answers_are_exact_whatever_happens() -> None:
    sims = [simulate(seed) for seed in range(12)]
    assert sum(sim.scheduler.counters.cache_hit_tokens for sim in sims) > 1000
    assert sum(sim.scheduler.counters.preemptions for sim in sims) > 20


def nothing(*arguments: Any) -> None:
    return None


def copies_at_random(original: Callable[..., bytes]) -> Callable[..., bytes]:
    def take_copies(self: StateSnapshots) -> bytes:
        pairs = [self._copies[at : at + 2] for at in range(0, len(self._copies), 2)]
        self._copies = [slot for pair in reversed(pairs) for slot in pair]
        return original(self)

    return take_copies


def names_stay_after_eviction(original: Callable[..., None]) -> Callable[..., None]:
    def take(self: StateSnapshots, name: bytes, slot: int) -> None:
        before = dict(self._number_of)
        original(self, name, slot)
        for old, number in before.items():
            self._number_of.setdefault(old, number)

    return take


def snapshots_outlive_pages(original: Callable[..., None]) -> Callable[..., None]:
    def worker_state_lost(self: KVCacheManager) -> None:
        assert self.snapshots is not None
        kept = dict(self.snapshots._number_of)
        original(self)
        self.snapshots._number_of.update(kept)

    return worker_state_lost


def copies_come_a_step_late(original: Callable[..., bytes]) -> Callable[..., bytes]:
    late: list[bytes] = [b""]

    def take_copies(self: StateSnapshots) -> bytes:
        late.append(original(self))
        return late.pop(0)

    return take_copies


PLANTED: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "a hit without its snapshot": (KVCacheManager, "_has_follower", lambda original: lambda *arguments: True),
    "the state is not restored": (StateSnapshots, "restore", lambda original: nothing),
    "a lost worker's snapshots are kept": (KVCacheManager, "worker_state_lost", snapshots_outlive_pages),
    "snapshots of lost steps are found": (StateSnapshots, "forget", lambda original: nothing),
    "an evicted snapshot is found": (StateSnapshots, "take", names_stay_after_eviction),
    "copies in another order": (StateSnapshots, "take_copies", copies_at_random),
    "copies are lost": (StateSnapshots, "take_copies", lambda original: lambda self: b""),
    "copies come a step late": (StateSnapshots, "take_copies", copies_come_a_step_late),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong = PLANTED[name]
    monkeypatch.setattr(owner, attribute, wrong(getattr(owner, attribute)))
    with pytest.raises((AssertionError, KeyError)):
        [simulate(seed) for seed in range(60)]
