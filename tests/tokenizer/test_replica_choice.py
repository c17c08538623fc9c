"""The choice of a replica: the longest prefix, a fair load, adapters; the hit rate on a load with shared prefixes."""

from array import array
from collections.abc import Callable
from itertools import count
from random import Random

import pytest

from tests.scheduler.simulated_tokenizers import SubmittedRequest
from tests.scheduler.simulation import Simulation
from tests.tokenizer.harness import API, LIMITS, hello
from tgi.microkernel.link import PeerId, Place
from tgi.microkernel.protocol import Generate, Status
from tgi.microkernel.sampling_params import SamplingParams
from tgi.tokenizer.encoder import EncodedPrompt
from tgi.tokenizer.replica_choice import BLOCK_TOKENS, Candidate, PrefixHistory, choose_replica, prompt_keys
from tgi.tokenizer.request import TokenizerRequestState
from tgi.tokenizer.schedulers import Schedulers
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig


def ids(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def test_prompts_match_in_whole_blocks_from_the_first_token_on() -> None:
    history = PrefixHistory()
    history.record(prompt_keys(ids(*range(40)), b""))
    assert history.matched_tokens(prompt_keys(ids(*range(40)), b"")) == 2 * BLOCK_TOKENS
    assert history.matched_tokens(prompt_keys(ids(*range(20)), b"")) == BLOCK_TOKENS
    assert history.matched_tokens(prompt_keys(ids(*range(16), *range(50, 70)), b"")) == BLOCK_TOKENS
    assert history.matched_tokens(prompt_keys(ids(1, *range(40)), b"")) == 0
    assert history.matched_tokens(prompt_keys(ids(*range(16, 32)), b"")) == 0  # the second block, without the first
    assert history.matched_tokens(prompt_keys(b"", b"")) == 0
    history.clear()
    assert history.matched_tokens(prompt_keys(ids(*range(40)), b"")) == 0


def test_prompts_of_another_adapter_do_not_match_but_its_use_counts() -> None:
    history = PrefixHistory()
    history.record(prompt_keys(ids(*range(40)), b"first"))
    same, other = prompt_keys(ids(*range(50, 90)), b"first"), prompt_keys(ids(*range(40)), b"other")
    assert history.matched_tokens(same) > 0
    assert history.matched_tokens(other) == history.matched_tokens(prompt_keys(ids(*range(40)), b"")) == 0


def test_a_history_forgets_what_was_used_least_recently() -> None:
    history = PrefixHistory(capacity=2)
    first, second, third = (prompt_keys(ids(*range(start, start + 16)), b"") for start in (0, 100, 200))
    for prompt in (first, second, first, third):
        history.record(prompt)
    assert [history.matched_tokens(prompt) for prompt in (first, second, third)] == [16, 0, 16]


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([Candidate(0, 4, 0, 64), Candidate(1, 5, 64, 64)], {1}),
        ([Candidate(0, 0, 0, 64), Candidate(1, 9, 64, 64)], {0}),  # 64 tokens are not worth sharing it with nine more
        ([Candidate(0, 0, 0, 64), Candidate(1, 3, 2000, 64)], {1}),
        ([Candidate(0, 0, 0, 256), Candidate(1, 80, 100_000, 256)], {0}),  # however long a prompt is
        ([Candidate(0, 9, 2000, 64), Candidate(1, 9, 5000, 64)], {1}),
        ([Candidate(0, 8, 32, 64), Candidate(1, 1, 32, 64)], {1}),
        ([Candidate(0, 3, 0, 64), Candidate(1, 3, 0, 64)], {0, 1}),
        ([Candidate(0, 31, 0, 64), Candidate(1, 30, 0, 64)], {0, 1}),  # an excess of this size is none
        ([Candidate(0, 4, 5000, 4), Candidate(1, 3, 0, 4)], {1}),  # it would wait for a slot
        ([Candidate(0, 5, 0, 4), Candidate(1, 4, 0, 4)], {1}),
    ],
)
def test_the_best_replica(candidates: list[Candidate], chosen: set[int]) -> None:
    found = {choose_replica(candidates, bytes([beginning])) for beginning in range(40)}
    assert found == chosen
    assert found == {choose_replica(candidates[::-1], bytes([beginning])) for beginning in range(40)}


def test_tokenizers_agree_on_a_new_prefix_without_asking_each_other() -> None:
    """The values are those of any process: strings have another hash in each."""
    chosen = [choose_replica([Candidate(number, 2, 0, 64) for number in range(4)], bytes([key])) for key in range(12)]
    assert chosen == [0, 3, 2, 1, 0, 1, 3, 0, 2, 2, 2, 0]


# --- hit rate ---------------------------------------------------------------------------------------------------------

GROUPS, PREFIX, SUFFIX, REQUESTS, AT_ONCE, TOKENIZERS, PAGES = 40, 192, 24, 800, 24, 2, 800


class RoutedLoad:
    """Requests of GROUPS groups with a common prefix each, which TOKENIZERS tokenizers send to real schedulers with
    `replicas` times PAGES / `replicas` pages of KV cache."""

    def __init__(self, replicas: int, choose: Callable[[list[Schedulers], TokenizerRequestState], int]) -> None:
        config = FakeWorkerConfig(pages=PAGES // replicas, page_size=16, slots=64, max_total_tokens=512)
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
        self.loads: list[list[int]] = []
        self._report()

    def _report(self) -> None:
        for view in self.views:
            for replica, one in zip(view, self.replicas, strict=True):
                load = one.scheduler
                limits = LIMITS._replace(pages=one.worker_config.pages, max_batch_size=one.worker_config.slots)
                view.set_status(replica, Status(True, True, "", 100, limits, load.queued, load.running))

    def run(self) -> float:
        """The share of the prompt tokens that the prefix caches had."""
        random, rids = Random(7), count()
        prefixes = [[random.randrange(300) for _ in range(PREFIX)] for _ in range(GROUPS)]
        live: list[tuple[SubmittedRequest, Schedulers, int, int]] = []
        ended, sent, turn = [], 0, 0
        while sent < REQUESTS or live:
            while sent < REQUESTS and len(live) < AT_ONCE:
                group = min(int(random.expovariate(3 / GROUPS)), GROUPS - 1)
                prompt = prefixes[group] + [random.randrange(300) for _ in range(SUFFIX)]
                view, rid = self.views[sent % TOKENIZERS], next(rids)
                request = TokenizerRequestState(rid, API, Generate(rid, "", SamplingParams(5)), 0.0)
                request.set_prompt(EncodedPrompt(ids(*prompt), len(prompt), 0))
                number = self._choose([view], request)
                view[Place("", number)].requests[rid] = request
                live.append((self.replicas[number].add(prompt, random.randint(4, 30)), view, number, rid))
                sent += 1
            for one in self.replicas:
                one.step()
            for entry in [one for one in live if one[0].end is not None]:
                live.remove(entry)
                ended.append(entry[0].end)
                del entry[1][Place("", entry[2])].requests[entry[3]]
            turn += 1
            if turn % 10 == 0:
                self._report()
            self.loads.append([one.scheduler.queued + one.scheduler.running for one in self.replicas])
        assert len(ended) == REQUESTS
        return sum(end.cached_tokens for end in ended) / (REQUESTS * (PREFIX + SUFFIX))


def by_rule(views: list[Schedulers], request: TokenizerRequestState) -> int:
    replica = views[0].choose(request, 0.0)
    assert replica is not None
    return replica.number


def test_the_hit_rate_is_that_of_one_large_cache() -> None:
    turns = count()
    one_cache = RoutedLoad(1, lambda views, request: 0).run()
    in_turn = RoutedLoad(2, lambda views, request: next(turns) % 2).run()
    routed = RoutedLoad(2, by_rule)
    hit_rate = routed.run()
    busy = [max(loads) / (sum(loads) / 2) for loads in routed.loads if sum(loads) >= AT_ONCE // 2]
    print(f"hit rate: one cache {one_cache:.3f}, in turn {in_turn:.3f}, by the rule {hit_rate:.3f}")
    print(f"load of the busier replica: {sum(busy) / len(busy):.2f} of the mean")
    assert hit_rate > 0.95 * one_cache
    assert in_turn < 0.9 * hit_rate
    assert sum(busy) / len(busy) < 1.25
