"""What a token costs a tokenizer process whose request asks for nothing special, counted in calls and instructions.

The budgets are what it costs today: see tests/api/test_cost.py.
"""

from functools import partial

from tests.counting import per_item
from tests.tokenizer.house import House, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.kernel.messages import Tokens
from tgi.kernel.pack import FLOAT32, INT32, UINT32, pack


class Streams:
    """A pool with so many requests, each of which gets the same plain token again and again."""

    def __init__(self, count: int) -> None:
        vocabulary = byte_level()
        self.house = House(vocabulary)
        rids = [self.house.ask(rid, max_new_tokens=1000).rid for rid in range(count)]
        token = ids_of("water", vocabulary)[0]
        self.tokens = Tokens(
            pack(UINT32, rids), pack(UINT32, [1] * count), pack(INT32, [token] * count), pack(FLOAT32, [-1.5] * count)
        )
        self.step()

    def step(self) -> None:
        """A step is decoded, and what came of it leaves."""
        self.house.pool.handle(self.house.scheduler, self.tokens)
        assert self.house.pool.outgoing()

    def steps(self, count: int) -> None:
        """So many, one after the other."""
        for _ in range(count):
            self.step()


def test_a_row_more_in_a_step() -> None:
    cost = per_item(lambda count: Streams(count).step)
    assert cost.within(calls=13, instructions=230), cost


def test_a_step_of_one_row() -> None:
    cost = per_item(lambda count: partial(Streams(1).steps, count))
    assert cost.within(calls=42, instructions=678), cost
