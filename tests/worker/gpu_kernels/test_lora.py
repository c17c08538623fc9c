"""Adapters of a step's tokens: how they are planned, and what one launch adds to the projections."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.cases import each_case
from tgi.worker.engine.cuda_graphs import AdapterTable
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.lora_arguments import AdapterTiles, PlanShape, padded_rank, write_plan
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.lora.launched_deltas import adapter_table, padded_weights
from tgi.worker.lora.projections import PROJECTIONS, RANK_MULTIPLE
from tgi.worker.lora.weights import LoraPair, LoraWeights

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
INPUTS, WIDTHS = 270, (70, 140)


def planned(owners: NDArray[np.int64], shape: PlanShape) -> NDArray[np.int64]:
    plan = np.zeros(shape.length, np.int64)
    write_plan(plan, owners, shape)
    return plan


@each_case(("tokens", "adapters"), [(1, 1), (5, 3), (40, 40), (256, 1), (256, 256), (300, 2), (2000, 90), (7, 0)])
def test_each_token_with_an_adapter_is_in_one_tile_of_it(tokens: int, adapters: int) -> None:
    """Rows of any length, the longest possible plan included."""
    generator = np.random.default_rng(tokens)
    bounds = np.sort(np.r_[0, generator.integers(0, tokens + 1, max(0, 2 * adapters - 1)), tokens])
    owners = np.full(tokens, -1)
    for first, stop in pairwise(bounds.tolist()):
        owners[first:stop] = generator.integers(-1, adapters)
    if adapters == tokens:
        owners = generator.permutation(tokens)
    shape = PlanShape.of(tokens, len(np.flatnonzero(np.diff(owners))) + 1, torch.bfloat16, False)
    plan, found = planned(owners, shape), np.full(tokens, -1)
    count = plan[0]
    assert count <= shape.most
    order = plan[1 + 3 * shape.most :]
    for adapter, first, stop in plan[1 : 1 + 3 * count].reshape(count, 3):
        assert 0 < stop - first <= shape.size
        assert (found[order[first:stop]] == -1).all()
        found[order[first:stop]] = adapter
    assert (found == owners).all()


def weights(rank: int, seed: int) -> LoraWeights:
    """An adapter of one layer, for two projections."""
    pairs = [
        LoraPair(random_tensor(CPU, INPUTS, rank, seed=seed) / 16, random_tensor(CPU, rank, width, seed=seed + 1))
        for width in WIDTHS
    ]
    made = padded_weights(LoraWeights([[*pairs, *[None] * (len(PROJECTIONS) - len(pairs))]]))
    made.table = adapter_table(made, CPU)
    return made


def added(owners: list[int], adapters: list[LoraWeights], x: Tensor, batch_invariant: bool) -> Tensor:
    """What one launch adds to zeros."""
    shape = PlanShape.of(len(owners), len(owners), torch.float32, batch_invariant)
    tables = torch.stack([adapter.table for adapter in adapters if adapter.table is not None])
    rank = padded_rank(max(adapter.rank for adapter in adapters))
    tiles = AdapterTiles.of(tables, torch.from_numpy(planned(np.array(owners), shape)), shape, rank, torch.float32)
    y = torch.zeros(len(owners), 220)
    columns = [(at, start, width) for at, (start, width) in enumerate(zip((0, 80), WIDTHS, strict=True))]
    GpuKernels((9, 0), batch_invariant).add_lora(x, y, tiles, 0, columns)
    return y


def test_tokens_get_the_sums_of_their_own_adapter() -> None:
    """Ranks that are no multiples, and one of several blocks."""
    adapters = [weights(3, 1), weights(70, 3)]
    owners = [1, 0, -1, *[0] * 18]
    x = random_tensor(CPU, len(owners), INPUTS, seed=9)
    found = added(owners, adapters, x, False)
    for at, owner in enumerate(owners):
        pairs = adapters[owner].layers[0][:2] if owner >= 0 else ()
        expected = torch.zeros(220)
        for pair, start in zip(pairs, (0, 80), strict=False):
            assert pair is not None
            assert len(pair.b) % RANK_MULTIPLE == 0
            expected[start : start + pair.b.shape[1]] = x[at] @ pair.a @ pair.b
        torch.testing.assert_close(found[at], expected, rtol=0, atol=2e-4)


def test_a_tokens_bits_depend_on_no_other_token_where_that_is_asked() -> None:
    """Next to more tokens, and to adapters of a higher rank."""
    adapters = [weights(8, 1), weights(40, 3)]
    x = random_tensor(CPU, 40, INPUTS, seed=9)
    alone = added([0], adapters[:1], x[7:8], True)
    among = added([1] * 7 + [0] * 20 + [1] * 13, adapters, x, True)
    assert torch.equal(alone[0], among[7])


def test_adapters_leave_their_number_with_the_last_slot_that_has_them() -> None:
    """A table of as many entries as slots holds any number of adapters, one after the other."""
    table, made = AdapterTable(2, False), [weights(rank, rank) for rank in (8, 24, 8)]
    assert table.update({0: made[0], 1: made[1]}) == 32
    numbers = table._of_slots.tolist()
    assert sorted(numbers) == [0, 1]
    assert table.update({0: made[2], 1: made[1]}) == 32  # of the highest rank so far
    assert table._of_slots.tolist() == numbers
    assert table._table is not None
    for slot, adapter in ((0, made[2]), (1, made[1])):
        assert adapter.table is not None
        assert torch.equal(table._table[numbers[slot]], adapter.table)
    table.update({1: made[1]})
    assert table._of_slots.tolist() == [-1, numbers[1]]
    assert made[2] not in table._numbers  # its memory is free
