"""The self-test that decides whether GPUs add up in symmetric memory, on two ranks over gloo; no GPU runs here."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from scripts.benchmarks.rank_processes import RankCall, Ranks, rank_group
from tgi.worker.distributed.symmetric_memory import agreed, self_test

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with rank_group(2, __name__) as ranks:
        yield ranks


def outcome(call: RankCall, fault: str) -> tuple[str, bool]:
    """What the self-test says of a sum with this fault, and whether the ranks agree on it."""

    def all_reduce(x: Tensor) -> None:
        if fault == "no sum" and x.numel() > 8000:
            return
        call.gloo.all_reduce(x)
        if call.gloo.rank == 1 and fault == "an error":
            raise RuntimeError("the memory is not mapped")
        if call.gloo.rank == 1 and fault == "other bits":
            x[0] += x[0] * 2**-7

    reason = self_test(all_reduce, torch.device("cpu"))
    return reason, agreed(not reason)


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ("", ("", "")),
        ("no sum", ("are off by", "are off by")),
        ("other bits", ("", "differ from those of the first rank")),
        ("an error", ("", "the memory is not mapped")),
    ],
)
def test_ranks_agree_on_what_is_used(fault: str, reasons: tuple[str, str], two: Ranks) -> None:
    for (found, agree), expected in zip(two.call(f"{__name__}.outcome", fault), reasons, strict=True):
        assert expected in found
        assert bool(found) == bool(expected)
        assert agree == (not fault)
