"""Cost of a token in the tokenizer process for a plain request, in calls and instructions.

The ceilings are the current cost: see tests/api/test_cost.py.
"""

from functools import partial

from tests.counting import per_item
from tests.tokenizer.harness import PoolHarness, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.microkernel.codec import FLOAT32, INT32, UINT32, pack_column
from tgi.microkernel.protocol import Tokens


class Streams:
    """A pool with `count` requests, each of which receives the same ordinary token in every step."""

    def __init__(self, count: int) -> None:
        vocabulary = byte_level()
        self.harness = PoolHarness(vocabulary)
        rids = [self.harness.submit(rid, max_new_tokens=1000).rid for rid in range(count)]
        token = ids_of("water", vocabulary)[0]
        self.tokens = Tokens(
            pack_column(UINT32, rids),
            pack_column(UINT32, [1] * count),
            pack_column(INT32, [token] * count),
            pack_column(FLOAT32, [-1.5] * count),
        )
        self.step()

    def step(self) -> None:
        """Processes one step and drains its messages."""
        self.harness.pool.handle(self.harness.scheduler, self.tokens)
        assert self.harness.pool.drain_outgoing()

    def steps(self, count: int) -> None:
        """Processes `count` steps."""
        for _ in range(count):
            self.step()


def test_cost_of_one_more_row_in_a_step() -> None:
    cost = per_item(lambda count: Streams(count).step)
    assert cost.within(calls=19, instructions=291), cost


def test_cost_of_a_step_with_one_row() -> None:
    cost = per_item(lambda count: partial(Streams(1).steps, count))
    assert cost.within(calls=59, instructions=848), cost
