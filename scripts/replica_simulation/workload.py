"""The requests of a load: what their prompts have in common, their lengths, and when they arrive."""

from array import array
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import log
from random import Random
from typing import NamedTuple

from tgi.microkernel.messages.codec import INT32, pack_column

# Ids of the tokens that the simulated worker draws, of system prompts, and of what is said by one request only.
DRAWN_ID, FIRST_PROMPT_ID = 0, 1
VOCAB_SIZE = 2**31 - 1


class Lengths(NamedTuple):
    """A log-normal distribution of token counts, cut off at both ends."""

    median: float
    sigma: float  # of the logarithm
    least: int
    most: int

    def draw(self, random: Random) -> int:
        """A token count."""
        return max(self.least, min(self.most, round(random.lognormvariate(log(self.median), self.sigma))))


class Mix(NamedTuple):
    """What a load consists of. Shares are shares of the requests."""

    unshared: float = 0.25  # prompts that have nothing in common with others
    turns: float = 0.4  # turns of conversations; the rest are single requests with a system prompt
    mean_turns: float = 4.0  # per conversation: the first has a system prompt, later ones all that was said before
    think_seconds: float = 5.0  # from the end of a turn to the next one
    zipf: float = 1.0  # the k-th system prompt is used 1 / k ** zipf as often as the first
    burst_every: float = 4.0  # mean seconds from a burst to the next
    burst_seconds: float = 0.4  # mean length of a burst
    burst_factor: float = 2.0  # of the rate of arrivals; half of what a burst adds has the same system prompt
    system: Lengths = Lengths(200, 0.8, 32, 2000)
    message: Lengths = Lengths(30, 1.0, 4, 1500)
    unshared_prompt: Lengths = Lengths(80, 1.2, 16, 3500)
    answer: Lengths = Lengths(40, 0.8, 1, 400)
    most_history: int = 2000  # tokens after which a conversation ends

    @property
    def most_tokens(self) -> int:
        """What the longest prompt and its answer can have."""
        shared = max(self.system.most, self.most_history) + self.message.most
        return max(shared, self.unshared_prompt.most) + self.answer.most


class Prompt(NamedTuple):
    """A request before it is sent."""

    ids: bytes  # int32
    answer: int  # tokens
    turns_left: int  # of its conversation, after this one


class Workload:
    """Draws prompts and the times of their arrival from a seed."""

    def __init__(self, mix: Mix, rate: float, system_prompts: int, seed: int) -> None:
        """`rate`: mean arrivals per second, bursts included."""
        self._mix = mix
        self._random = random = Random(seed)
        calm = mix.burst_every / (mix.burst_every + mix.burst_seconds)
        self._calm_rate = rate / (calm + (1 - calm) * mix.burst_factor)
        self._burst: bytes | None = None  # the system prompt of the burst that goes on
        self._changes_at = random.expovariate(1 / mix.burst_every)
        self._said = FIRST_PROMPT_ID - 1  # ids used so far
        self._system = [self._text(mix.system) for _ in range(system_prompts)]
        self._weights = list(accumulate((k + 1) ** -mix.zipf for k in range(system_prompts)))
        self._follow_ups: deque[tuple[bytes, int]] = deque()  # what was said, turns left; the oldest first
        # Follow-up turns are this share of the turns; as many conversations wait as think time and rate make of it.
        self._thinking = int(rate * mix.turns * (1 - 1 / mix.mean_turns) * mix.think_seconds)
        self.now = 0.0  # the time of the latest arrival

    def next_arrival(self) -> float:
        """Moves to the time of the next arrival, and returns it. Arrivals are Poisson, with another rate in bursts."""
        random, mix = self._random, self._mix
        while True:
            rate = self._calm_rate * (1.0 if self._burst is None else mix.burst_factor)
            arrival = self.now + random.expovariate(rate)
            if arrival < self._changes_at:
                self.now = arrival
                return arrival
            self.now = self._changes_at
            self._burst = random.choice(self._system) if self._burst is None else None
            length = mix.burst_every if self._burst is None else mix.burst_seconds
            self._changes_at += random.expovariate(1 / length)

    def draw(self) -> Prompt:
        """The request that arrives now."""
        random, mix = self._random, self._mix
        answer = mix.answer.draw(random)
        if self._burst is not None and random.random() < 0.5 * (1 - 1 / mix.burst_factor):
            return Prompt(self._burst + self._text(mix.message), answer, 0)
        kind = random.random()
        if kind < mix.unshared:
            return Prompt(self._text(mix.unshared_prompt), answer, 0)
        if kind >= mix.unshared + mix.turns:
            return Prompt(self._system_prompt() + self._text(mix.message), answer, 0)
        if len(self._follow_ups) > self._thinking:
            said, left = self._follow_ups.popleft()
            return Prompt(said + self._text(mix.message), answer, left - 1)
        more = 0
        while random.random() < 1 - 1 / mix.mean_turns:
            more += 1
        return Prompt(self._system_prompt() + self._text(mix.message), answer, more)

    def ended(self, prompt: Prompt) -> None:
        """A request has got its answer: if its conversation goes on, the next turn follows."""
        said = prompt.ids + pack_column(INT32, [DRAWN_ID]) * prompt.answer
        if prompt.turns_left and len(said) <= array(INT32).itemsize * self._mix.most_history:
            self._follow_ups.append((said, prompt.turns_left))

    def _text(self, lengths: Lengths) -> bytes:
        """Ids that no other text has."""
        self._said += 1
        return pack_column(INT32, [self._said]) * lengths.draw(self._random)

    def _system_prompt(self) -> bytes:
        return self._system[bisect(self._weights, self._random.random() * self._weights[-1])]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the sorted values lies; 0 if there are none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
