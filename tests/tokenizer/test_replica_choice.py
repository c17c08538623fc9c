"""The choice of a replica: the longest prefix, a fair load, adapters; the hit rate on a load with shared prefixes."""

from array import array
from collections.abc import Callable
from itertools import count
from random import Random
from statistics import fmean

import pytest

from tests.scheduler.simulated_tokenizers import SubmittedRequest
from tests.scheduler.simulation import Simulation
from tests.tokenizer.harness import API, LIMITS, hello
from tgi.microkernel.links.link import PeerId, ReplicaId
from tgi.microkernel.messages.protocol import End, Generate, Status, Tokens
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.encoder import EncodedPrompt
from tgi.tokenizer.replica_choice import (
    BLOCK_TOKENS,
    MAX_KEYS,
    Candidate,
    SentPrefixes,
    best_candidate,
    lasting_excess,
    prompt_keys,
)
from tgi.tokenizer.request import TokenizerRequestState
from tgi.tokenizer.schedulers import SchedulerReplica, Schedulers
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig


def ids(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def matched(sent: SentPrefixes, prompt: bytes, digest: bytes = b"") -> int:
    return sent.matched(prompt_keys(prompt, digest))


def filled(capacity: int, *prompts: bytes, digest: bytes = b"") -> SentPrefixes:
    sent = SentPrefixes()
    sent.capacity = capacity
    for prompt in prompts:
        sent.record(prompt_keys(prompt, digest))
    return sent


def test_prompts_match_in_whole_blocks_from_the_first_token_on() -> None:
    sent = filled(1000, ids(*range(40)))
    assert matched(sent, ids(*range(40))) == 2 * BLOCK_TOKENS
    assert matched(sent, ids(*range(20))) == BLOCK_TOKENS
    assert matched(sent, ids(*range(16), *range(50, 70))) == BLOCK_TOKENS
    assert matched(sent, ids(1, *range(40))) == 0
    assert matched(sent, ids(*range(16, 32))) == 0  # the second block, without the first
    assert matched(sent, b"") == 0
    sent.clear()
    assert matched(sent, ids(*range(40))) == 0


def test_a_long_prompt_has_few_keys_and_most_of_its_match_counts() -> None:
    sent = filled(100_000, ids(*range(16_000)))
    assert len(sent) < 50
    for common in (100, 1000, 5000, 15_000):
        found = matched(sent, ids(*range(common), *range(90_000, 100_000)))
        assert 0.75 * (common - BLOCK_TOKENS) < found <= common


def test_prompts_of_another_adapter_do_not_match_but_its_use_counts() -> None:
    sent = filled(1000, ids(*range(40)), digest=b"first")
    assert matched(sent, ids(*range(50, 90)), b"first") > 0
    assert matched(sent, ids(*range(40)), b"other") == matched(sent, ids(*range(40))) == 0


def test_a_prefix_counts_until_the_cache_should_have_evicted_it() -> None:
    first, second, third = (ids(*range(start, start + 32)) for start in (0, 100, 200))
    assert [matched(filled(96, first, second, third), one) for one in (first, second, third)] == [32, 32, 32]
    assert [matched(filled(95, first, second, third), one) for one in (first, second, third)] == [0, 32, 32]
    fourth = ids(*range(300, 332))
    again = filled(64, first, second, first, third, fourth)
    assert [matched(again, one) for one in (first, second, third, fourth)] == [32, 0, 32, 32]


def test_the_memory_of_a_replica_is_bounded() -> None:
    sent = filled(1 << 30, *(ids(*range(start, start + 32)) for start in range(MAX_KEYS)))
    assert len(sent) == MAX_KEYS
    assert matched(sent, ids(*range(MAX_KEYS - 1, MAX_KEYS + 31))) == 32
    evicting = filled(100, *(ids(*range(start, start + 32)) for start in range(100)))
    assert len(evicting) < 10


def choose(loads: tuple[int, ...], slots: int, prompt: bytes, known: dict[int, bytes]) -> int:
    """What is chosen where these replicas were sent these prompts."""
    candidates = [
        Candidate(number, load, slots, filled(1 << 20, known.get(number, b""))) for number, load in enumerate(loads)
    ]
    return best_candidate(prompt_keys(prompt, b""), candidates)


@pytest.mark.parametrize(
    ("loads", "tokens", "slots", "chosen"),
    [
        ((4, 5), (0, 64), 64, {1}),
        ((0, 9), (0, 64), 64, {0}),  # 64 tokens are not worth sharing it with nine more
        ((0, 5), (0, 2000), 64, {1}),
        ((0, 80), (0, 16_000), 256, {0}),  # however long a prompt is
        ((9, 9), (2000, 5000), 64, {0, 1}),  # more than MAX_MATCHED_TOKENS are worth no more
        ((9, 9), (100, 500), 64, {1}),
        ((8, 1), (64, 64), 64, {1}),
        ((3, 3), (0, 0), 64, {0, 1}),
        ((31, 30), (0, 0), 64, {0, 1}),
        ((40, 20), (0, 0), 64, {1}),
        ((4, 3), (0, 5000), 4, {1}),
        ((3, 4), (0, 5000), 4, {0}),  # it would wait for a slot
    ],
)
def test_the_best_replica(loads: tuple[int, ...], tokens: tuple[int, ...], slots: int, chosen: set[int]) -> None:
    found = set()
    for seed in range(40):
        prompt = ids(*range(1000 * seed, 1000 * seed + 16_000))
        known = {number: prompt[: 4 * count] for number, count in enumerate(tokens)}
        found.add(choose(loads, slots, prompt, known))
    assert found == chosen


def test_a_prompt_that_all_requests_have_is_shared_by_all_replicas() -> None:
    prompt, loads, sent = prompt_keys(ids(*range(500)), b""), [0] * 64, [filled(1 << 20) for _ in range(64)]
    for _ in range(640):
        candidates = [Candidate(number, load, 64, sent[number]) for number, load in enumerate(loads)]
        chosen = best_candidate(prompt, candidates)
        sent[chosen].record(prompt)
        loads[chosen] += 1
    assert max(loads) < 25


def test_a_popular_prefix_leaves_a_replica_whose_load_stays_above_the_mean() -> None:
    """Four requests above the bound are not worth computing 500 tokens again, but they are if that goes on."""
    prompt, loads = ids(*range(500)), (18, 12, 12, 12)
    mean, lasting, chosen = sum(loads) / len(loads), [0.0] * len(loads), []
    for _ in range(60):
        candidates = [
            Candidate(number, load, 64, filled(1 << 20, prompt if number == 0 else b""), lasting[number])
            for number, load in enumerate(loads)
        ]
        chosen.append(best_candidate(prompt_keys(prompt, b""), candidates))
        lasting = [lasting_excess(one, load - mean, 1.0) for one, load in zip(lasting, loads, strict=True)]
    assert set(chosen[:3]) == {0}
    assert 0 not in chosen[50:]


def test_tokenizers_agree_on_a_new_prefix_and_few_move_when_a_replica_comes() -> None:
    """The values are those of any process: strings have another hash in each."""
    prompts = [ids(*range(key, key + 16)) for key in range(400)]
    before = [choose((2,) * 10, 64, one, {}) for one in prompts]
    assert before[:6] == [1, 3, 0, 6, 3, 5]
    assert max(map(before.count, range(10))) < 80
    after = [choose((2,) * 11, 64, one, {}) for one in prompts]
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert set(moved) == {10}
    assert 20 < len(moved) < 60


def test_a_replica_that_was_retired_gets_no_request() -> None:
    schedulers = Schedulers(lambda peer: b"")
    for number in range(3):
        peer = PeerId("scheduler", number, b"boot")
        replica = schedulers.at(ReplicaId("", number))
        schedulers.connect(replica, peer, hello(peer), 0.0)
        schedulers.set_status(replica, Status(True, True, "", 100, LIMITS))
    request = TokenizerRequestState(1, API, Generate(1, "", SamplingParams(5)), 0.0)
    request.set_prompt(EncodedPrompt(ids(*range(200)), 200, 0))
    left = {0, 1, 2}
    while left:
        chosen = schedulers.choose(request, 0.0)
        assert chosen is not None
        left.remove(chosen.number)
        schedulers.disconnect(chosen, 0.0, planned=True)
        schedulers.remove(chosen.replica_id)
    assert schedulers.choose(request, 0.0) is None


# --- hit rate ---------------------------------------------------------------------------------------------------------

GROUPS, PREFIX, SUFFIX, REQUESTS, AT_ONCE, TOKENIZERS, PAGES = 40, 192, 24, 800, 24, 2, 800
REPORT_STEPS = 10


class RoutedLoad:
    """Requests that TOKENIZERS tokenizers send to real schedulers with `replicas` times PAGES / `replicas` pages of KV
    cache. The tokenizers know of the load what they are told in the product: with the tokens of each step if they have
    requests there, and every REPORT_STEPS steps."""

    def __init__(
        self, replicas: int, choose: Callable[[list[Schedulers], TokenizerRequestState], int], slots: int = 64
    ) -> None:
        config = FakeWorkerConfig(pages=PAGES // replicas, page_size=16, slots=slots, max_total_tokens=512)
        self.replicas = [Simulation(config) for _ in range(replicas)]
        self.views = [Schedulers(lambda peer: b"", TOKENIZERS) for _ in range(TOKENIZERS)]
        for one in self.replicas:
            one.tokenizer_up(0)
            one.worker_up()
        for view in self.views:
            for number in range(replicas):
                peer = PeerId("scheduler", number, b"boot")
                view.connect(view.at(ReplicaId("", number)), peer, hello(peer), 0.0)
        self._choose = choose
        self._rids = count()
        self._live: list[tuple[SubmittedRequest, SchedulerReplica, int]] = []
        self.ended: list[End] = []
        self.loads: list[list[int]] = []  # of each replica, after each step
        self._report()

    def _report(self) -> None:
        for view in self.views:
            for replica, one in zip(view, self.replicas, strict=True):
                load = one.scheduler
                limits = LIMITS._replace(pages=one.worker_config.pages, max_batch_size=one.worker_config.slots)
                view.set_status(replica, Status(True, True, "", 100, limits, load.queued, load.running))

    def send(self, prompt: list[int], new: int) -> None:
        """The tokenizers send requests in turn."""
        rid = next(self._rids)
        view = self.views[rid % TOKENIZERS]
        request = TokenizerRequestState(rid, API, Generate(rid, "", SamplingParams(5)), 0.0)
        request.set_prompt(EncodedPrompt(ids(*prompt), len(prompt), 0))
        number = self._choose([view], request)
        seen = view[ReplicaId("", number)]
        seen.requests[rid] = request
        self._live.append((self.replicas[number].add(prompt, new), seen, rid))

    def step(self) -> None:
        """A step of each replica."""
        for number, one in enumerate(self.replicas):
            one.step()
            for _, message in one.received:
                if isinstance(message, Tokens):
                    for seen in (view[ReplicaId("", number)] for view in self.views):
                        if seen.requests:
                            seen.set_load(message.load)
            one.received.clear()
        for entry in [one for one in self._live if one[0].end is not None]:
            request, seen, rid = entry
            assert request.end is not None
            self._live.remove(entry)
            self.ended.append(request.end)
            del seen.requests[rid]
        self.loads.append([one.scheduler.queued + one.scheduler.running for one in self.replicas])
        if len(self.loads) % REPORT_STEPS == 0:
            self._report()

    @property
    def at_once(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def run(self, seed: int) -> float:
        """Requests of GROUPS groups with a common prefix each. Returns the share of the prompt tokens that the prefix
        caches had."""
        random = Random(seed)
        prefixes = [[random.randrange(300) for _ in range(PREFIX)] for _ in range(GROUPS)]
        sent = 0
        while sent < REQUESTS or self.at_once:
            while sent < REQUESTS and self.at_once < AT_ONCE:
                group = min(int(random.expovariate(3 / GROUPS)), GROUPS - 1)
                prompt = prefixes[group] + [random.randrange(300) for _ in range(SUFFIX)]
                self.send(prompt, random.randint(4, 30))
                sent += 1
            self.step()
        assert len(self.ended) == REQUESTS
        return sum(end.cached_tokens for end in self.ended) / (REQUESTS * (PREFIX + SUFFIX))


def by_rule(views: list[Schedulers], request: TokenizerRequestState) -> int:
    replica = views[0].choose(request, 0.0)
    assert replica is not None
    return replica.number


def test_the_hit_rate_is_that_of_one_large_cache() -> None:
    """Also the load: that of the busier replica, averaged over the run."""
    seed, turns = 7, count()
    routed = RoutedLoad(2, by_rule)
    one_cache = RoutedLoad(1, lambda views, request: 0).run(seed)
    in_turn = RoutedLoad(2, lambda views, request: next(turns) % 2).run(seed)
    by_the_rule = routed.run(seed)
    means = [fmean(loads) for loads in zip(*routed.loads, strict=True)]
    print(one_cache, in_turn, by_the_rule, means)
    assert by_the_rule > 0.95 * one_cache
    assert in_turn < 0.9 * by_the_rule
    assert max(means) / fmean(means) < 1.1


def test_two_replicas_need_half_the_steps() -> None:
    """24 requests of 100 tokens at once, four slots at each replica."""
    steps = []
    for replicas in (1, 2):
        routed = RoutedLoad(replicas, by_rule, slots=4)
        for number in range(24):
            routed.send([number] * PREFIX, 100)
        while routed.at_once:
            routed.step()
        assert {end.generated_tokens for end in routed.ended} == {100}
        steps.append(len(routed.loads))
    print(steps)
    assert steps[1] < 0.55 * steps[0]
