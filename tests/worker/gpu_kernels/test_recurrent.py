"""The delta rule in Triton's interpreter: what its self-test, which test_selection.py runs, does not cover."""

import pytest
import torch
from torch import Tensor

from tgi.worker.cpu_kernels.recurrent import DeltaRule
from tgi.worker.gpu_kernels.causal_conv import random_rows
from tgi.worker.gpu_kernels.delta_rule import CHUNK, delta_rule, reference_delta_rule
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.state_cache import StateTensor

pytestmark = pytest.mark.slow

CPU, HEADS, SIZE = torch.device("cpu"), 2, 24
TOKENS = 2 * CHUNK + 5


def rule_of(decay: float, most: float = 1.0) -> DeltaRule:
    ones = torch.ones(HEADS)
    return DeltaRule((1, HEADS, SIZE, SIZE), decay * ones, ones, torch.ones(SIZE), 1e-6, most)


def columns() -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; z; b and a."""
    widths = (2 + HEADS) * SIZE, HEADS * SIZE, 2 * HEADS
    return tuple(random_tensor(CPU, TOKENS, width, seed=width) for width in widths)  # type: ignore[return-value]


@pytest.mark.parametrize("most", [1.0, 2.0])
@pytest.mark.parametrize("decay", [1e-4, 0.5, 40.0])
def test_chunks_of_equal_keys_are_stable(decay: float, most: float) -> None:
    """The systems of chunks are farthest from diagonal where all keys are equal and nothing decays, and their factors
    span the most where nearly everything does. A chunk is at most a few times as far from float64 as single tokens."""
    x, z, ba = columns()
    x[:, SIZE : 2 * SIZE] = x[0, SIZE : 2 * SIZE]
    ba[:, :HEADS] = 8  # beta is almost `most`
    rows = random_rows(CPU, [TOKENS], [TOKENS + 3], matrix=StateTensor((HEADS, SIZE, SIZE), torch.float32))
    (state,) = rows.cache.tensors
    single, matrix, rule = state[1].clone(), state[1].double(), rule_of(decay, most)
    found = delta_rule(rule, x, z, ba, state, rows)
    tokens = reference_delta_rule(rule, x, z, ba, single)
    wide = DeltaRule(rule.sizes, *(column.double() for column in rule[1:4]), rule.epsilon, rule.most)
    expected = reference_delta_rule(wide, x.double(), z.double(), ba.double(), matrix)
    for chunks, each, exact in ((found, tokens, expected), (state[1], single, matrix)):
        bound = 4 * (each - exact).abs().max().item() + 1e-5
        torch.testing.assert_close(chunks.double(), exact, rtol=1e-4, atol=bound)


def test_a_row_has_the_same_bits_in_any_chunks_if_that_is_asked_for() -> None:
    x, z, ba = columns()
    found = []
    for cuts in ([TOKENS], [1, 40, TOKENS - 41]):
        matrix = StateTensor((HEADS, SIZE, SIZE), torch.float32)
        cache = random_rows(CPU, [TOKENS], [TOKENS], matrix=matrix).cache
        (state,), begin, parts = cache.tensors, 0, []
        for count in cuts:
            own = slice(begin, begin + count)
            begin += count
            rows = random_rows(CPU, [count], [begin], matrix=matrix)._replace(cache=cache)
            parts.append(delta_rule(rule_of(0.5), x[own], z[own], ba[own], state, rows, batch_invariant=True))
        found.append((torch.cat(parts), state[1].clone()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
