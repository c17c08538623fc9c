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
from tgi.microkernel.link import PeerId, Place
from tgi.microkernel.protocol import End, Generate, Status, Tokens
from tgi.microkernel.sampling_params import SamplingParams
from tgi.tokenizer.encoder import EncodedPrompt
from tgi.tokenizer.replica_choice import (
    BLOCK_TOKENS,
    MAX_HOLDERS,
    MAX_PRICE,
    PRICE_GRAIN,
    Candidate,
    HashRing,
    PrefixIndex,
    Prices,
    ReplicaChoice,
    prompt_keys,
)
from tgi.tokenizer.request import TokenizerRequestState
from tgi.tokenizer.schedulers import SchedulerReplica, Schedulers
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig


def ids(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def matched(index: PrefixIndex, prompt: bytes, digest: bytes = b"") -> int:
    """What counts for the replica 0."""
    levels = index.matches(prompt_keys(prompt, digest))
    return max((tokens for tokens, numbers in levels if 0 in numbers), default=0)


def filled(capacity: int, *prompts: bytes, digest: bytes = b"") -> PrefixIndex:
    index = PrefixIndex()
    index.set_capacity(0, capacity)
    for prompt in prompts:
        index.record(prompt_keys(prompt, digest), 0)
    return index


def test_prompts_match_in_whole_blocks_from_the_first_token_on() -> None:
    index = filled(1000, ids(*range(40)))
    assert matched(index, ids(*range(40))) == 2 * BLOCK_TOKENS
    assert matched(index, ids(*range(20))) == BLOCK_TOKENS
    assert matched(index, ids(*range(16), *range(50, 70))) == BLOCK_TOKENS
    assert matched(index, ids(1, *range(40))) == 0
    assert matched(index, ids(*range(16, 32))) == 0  # the second block, without the first
    assert matched(index, b"") == 0
    index.forget(0)
    assert matched(index, ids(*range(40))) == 0


def test_a_long_prompt_has_few_keys_and_most_of_its_match_counts() -> None:
    index = filled(100_000, ids(*range(16_000)))
    assert len(index) < 50
    for common in (100, 1000, 5000, 15_000):
        found = matched(index, ids(*range(common), *range(90_000, 100_000)))
        assert 0.75 * (common - BLOCK_TOKENS) < found <= common


def test_prompts_of_another_adapter_do_not_match_but_its_use_counts() -> None:
    index = filled(1000, ids(*range(40)), digest=b"first")
    assert matched(index, ids(*range(50, 90)), b"first") > 0
    assert matched(index, ids(*range(40)), b"other") == matched(index, ids(*range(40))) == 0


def test_a_prefix_counts_until_the_cache_should_have_evicted_it() -> None:
    first, second, third = (ids(*range(start, start + 32)) for start in (0, 100, 200))
    assert [matched(filled(96, first, second, third), one) for one in (first, second, third)] == [32, 32, 32]
    assert [matched(filled(95, first, second, third), one) for one in (first, second, third)] == [0, 32, 32]
    fourth = ids(*range(300, 332))
    again = filled(64, first, second, first, third, fourth)
    assert [matched(again, one) for one in (first, second, third, fourth)] == [32, 0, 32, 32]


def test_the_memory_of_an_index_is_bounded() -> None:
    index = PrefixIndex(max_keys=100)
    for number in range(MAX_HOLDERS + 50):
        index.set_capacity(number, 1 << 30)
        index.record(prompt_keys(ids(*range(16)), b""), number)
    assert len(index._stamps[prompt_keys(ids(*range(16)), b"").keys[0]]) == MAX_HOLDERS
    for start in range(1000):
        index.record(prompt_keys(ids(*range(start, start + 16)), b""), 0)
    assert len(index) == 100


def choose(candidates: dict[int, Candidate | None], prompt: bytes, known: dict[int, bytes]) -> int | None:
    """What is chosen where these replicas were sent these prompts."""
    choice = ReplicaChoice()
    for number in candidates:
        choice.ring.add(number)
        choice.index.set_capacity(number, 1 << 20)
    for number, sent in known.items():
        choice.index.record(prompt_keys(sent, b""), number)
    loads = [one.load for one in candidates.values() if one is not None]
    return choice.choose(prompt_keys(prompt, b""), sum(loads) / len(loads) if loads else 0.0, candidates.get)


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
    candidates: dict[int, Candidate | None] = {number: Candidate(load, slots) for number, load in enumerate(loads)}
    found = set()
    for seed in range(40):
        prompt = ids(*range(1000 * seed, 1000 * seed + 16_000))
        found.add(choose(candidates, prompt, {number: prompt[: 4 * count] for number, count in enumerate(tokens)}))
    assert found == chosen


def test_replicas_that_must_not_get_a_request_are_left_out() -> None:
    prompt = ids(*range(500))
    assert choose({0: None, 1: Candidate(9, 64)}, prompt, {0: prompt}) == 1
    assert choose({0: None, 1: None}, prompt, {0: prompt}) is None


def test_a_prompt_that_all_requests_have_is_shared_by_all_replicas() -> None:
    choice, loads, prompt = ReplicaChoice(), dict.fromkeys(range(200), 0), prompt_keys(ids(*range(500)), b"")
    for number in loads:
        choice.ring.add(number)
        choice.index.set_capacity(number, 1 << 20)
    for sent in range(2000):
        number = choice.choose(prompt, sent / len(loads), lambda number: Candidate(loads[number], 64))
        assert number is not None
        loads[number] += 1
    assert max(loads.values()) < 25


def test_the_price_of_a_replica_follows_its_load() -> None:
    """It does not count while it is small, and is bounded; a replica that has gone has none."""
    prices, lifetime = Prices(), 8 * 24
    prices.observe({number: 24 if number else 30 for number in range(8)}, lifetime)
    assert prices[0] == 0
    for _ in range(4):
        prices.observe({number: 24 if number else 30 for number in range(8)}, lifetime)
    assert PRICE_GRAIN <= prices[0] < MAX_PRICE
    assert prices[0] % PRICE_GRAIN == 0
    assert {prices[number] for number in range(1, 8)} == {0}
    for _ in range(100):
        prices.observe({0: 40, 1: 8}, lifetime)
    assert (prices[0], prices[1], prices[2]) == (MAX_PRICE, -MAX_PRICE, 0)
    for _ in range(100):
        prices.observe({0: 8, 1: 40}, lifetime)
    assert (prices[0], prices[1]) == (-MAX_PRICE, MAX_PRICE)
    prices.observe({0: 0, 1: 0}, lifetime)
    assert (prices[0], prices[1]) == (-MAX_PRICE, MAX_PRICE)


def test_a_popular_prefix_leaves_a_replica_whose_load_stays_above_the_mean() -> None:
    """Four requests above the bound are not worth computing 500 tokens again, but they are if that goes on."""
    choice, loads = ReplicaChoice(), {0: 18, 1: 12, 2: 12, 3: 12}
    mean = sum(loads.values()) / len(loads)
    for number in loads:
        choice.ring.add(number)
        choice.index.set_capacity(number, 1 << 20)
    popular = prompt_keys(ids(*range(500)), b"")
    choice.index.record(popular, 0)
    chosen = []
    for _ in range(40):
        chosen.append(choice.choose(popular, mean, lambda number: Candidate(loads[number], 64)))
        choice.prices.observe(loads, sum(loads.values()))
    assert set(chosen[:10]) == {0}
    assert 0 not in chosen[30:]


def test_tokenizers_agree_on_a_new_prefix_without_asking_each_other() -> None:
    """The values are those of any process: strings have another hash in each."""
    candidates: dict[int, Candidate | None] = {number: Candidate(2, 64) for number in range(4)}
    found = [choose(candidates, ids(*range(key, key + 16)), {}) for key in range(12)]
    assert found == [1, 2, 1, 1, 2, 1, 0, 2, 0, 0, 0, 1]


def test_few_prefixes_move_when_a_replica_comes_or_goes() -> None:
    ring, keys = HashRing(), [bytes([key, other]) for key in range(40) for other in range(10)]
    for number in range(10):
        ring.add(number)
    before = [list(ring.walk(key)) for key in keys]
    assert all(sorted(one) == list(range(10)) for one in before)
    ring.add(10)
    assert sum(next(ring.walk(key)) != one[0] for key, one in zip(keys, before, strict=True)) < len(keys) // 5
    ring.remove(10)
    assert [list(ring.walk(key)) for key in keys] == before
    ring.remove(3)
    assert [list(ring.walk(key)) for key in keys] == [[number for number in one if number != 3] for one in before]
    for number in range(10):
        ring.remove(number)
    assert list(ring.walk(b"")) == []


def test_a_replica_that_was_retired_gets_no_request() -> None:
    schedulers = Schedulers(lambda peer: b"")
    for number in range(3):
        peer = PeerId("scheduler", number, b"boot")
        replica = schedulers.at(Place("", number))
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
        schedulers.remove(chosen.place)
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
                view.connect(view.at(Place("", number)), peer, hello(peer), 0.0)
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
        seen = view[Place("", number)]
        seen.requests[rid] = request
        self._live.append((self.replicas[number].add(prompt, new), seen, rid))

    def step(self) -> None:
        """A step of each replica."""
        for number, one in enumerate(self.replicas):
            one.step()
            for _, message in one.received:
                if isinstance(message, Tokens):
                    for seen in (view[Place("", number)] for view in self.views):
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
    hit_rates: dict[str, list[float]] = {"one cache": [], "in turn": [], "by the rule": []}
    imbalances = []
    for seed in range(7, 17):
        turns = count()
        routed = RoutedLoad(2, by_rule)
        hit_rates["one cache"].append(RoutedLoad(1, lambda views, request: 0).run(seed))
        hit_rates["in turn"].append(RoutedLoad(2, lambda views, request, turns=turns: next(turns) % 2).run(seed))
        hit_rates["by the rule"].append(routed.run(seed))
        means = [fmean(loads) for loads in zip(*routed.loads, strict=True)]
        imbalances.append(max(means) / fmean(means))
    one_cache, in_turn, by_the_rule = map(fmean, hit_rates.values())
    print(hit_rates, imbalances)
    assert by_the_rule > 0.95 * one_cache
    assert in_turn < 0.9 * by_the_rule
    assert max(imbalances) < 1.1


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
