"""The output head on the CPU kernels: greedy tokens have the same bits with and without stored logits."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.cases import each_case
from tests.worker.cpu_kernels.available import VARIANTS, load_variant, numbers
from tgi.worker.cpu_kernels.kernels import CpuKernels, PackedWeight
from tgi.worker.greedy import GreedyTokens, find_greedy_tokens
from tgi.worker.quantization.quantize import quantize_weight

ROWS = (0, 1, 2, 15, 17, 32, 33, 64, 100)


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return load_variant(request.param)


def same(found: GreedyTokens, expected: Sequence[Tensor]) -> bool:
    """Bit for bit; NaN equals NaN."""
    return all(
        torch.equal(one.nan_to_num(1e30), other.nan_to_num(1e30)) for one, other in zip(found, expected, strict=True)
    )


@each_case("size", [512, 1003, 3, 48])
def test_greedy_tokens_and_their_logprobs(kernels: CpuKernels, size: int) -> None:
    scores = 5 * torch.randn(40, size, generator=torch.Generator().manual_seed(1))
    scores[1, size // 2 :] = -torch.inf
    scores[2] = 7.5
    scores[3, 2] = scores[3, 1] = 90.0
    scores[4, -1] = 1e8
    found = kernels.greedy_tokens(scores)
    exact = find_greedy_tokens(scores.double())
    assert torch.equal(found.ids, exact.ids)
    assert found.ids[2:5].tolist() == [0, 1, size - 1]
    assert torch.equal(found.highest, scores.amax(-1))
    assert (found.logprobs - exact.logprobs).abs().max() < 2e-6
    for row in range(len(scores)):
        assert same(kernels.greedy_tokens(scores[row : row + 1]), [part[row : row + 1] for part in found])


def test_nan_is_never_the_greedy_token(kernels: CpuKernels) -> None:
    scores = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    clean = scores[0].clone()
    clean[:40] = -torch.inf
    scores[0, :40] = torch.nan
    scores[1] = torch.nan
    scores[2] = -torch.inf
    scores[3, 66] = torch.inf
    found = kernels.greedy_tokens(scores)
    assert same(kernels.greedy_tokens(clean[None]), [part[:1] for part in found])
    assert found.ids[1:4].tolist() == [0, 0, 66]
    assert found.logprobs.isnan().tolist() == [False, True, True, True, False]
    assert same(kernels.greedy_tokens(scores[4:]), [part[4:] for part in found])


def heads(kernels: CpuKernels, outputs: int, inputs: int) -> list[PackedWeight]:
    """A packed weight of each kind; some rows are equal."""
    weight = numbers(outputs, inputs, dtype=kernels.dtype)
    weight[outputs // 2] = weight[2] = 3 * weight[1]
    return [
        kernels.pack_weight(weight),
        *(kernels.pack_weight(quantize_weight(weight, form)) for form in ("int8", "int4")),
    ]


@pytest.mark.parametrize(("outputs", "inputs"), [(512, 64), (1003, 320), (7, 64)])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.0625, None), (1.0, 30.0), (0.5, 2.0)])
def test_the_greedy_head_matches_the_greedy_tokens_of_its_logits(
    kernels: CpuKernels, outputs: int, inputs: int, scale: float, cap: float | None
) -> None:
    x = numbers(ROWS[-1], inputs, seed=1, dtype=kernels.dtype)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2))
    x[5] = 0  # all logits are the bias
    for weight, plus in zip(heads(kernels, outputs, inputs), (None, bias, None), strict=True):
        scores = kernels.logits(x, weight, plus, scale, cap)
        sums = kernels.linear(x, weight, plus, wide=True).double() * scale
        expected = sums if cap is None else (sums / cap).tanh() * cap
        assert (scores - expected).abs().max() < 1e-5 * max(1.0, cap or 1.0)
        best = kernels.greedy_tokens(scores)
        for count in ROWS:
            assert same(kernels.greedy_head(x[:count], weight, plus, scale, cap), [part[:count] for part in best])
            assert torch.equal(kernels.logits(x[:count], weight, plus, scale, cap), scores[:count])


def test_the_greedy_head_treats_nan_as_greedy_tokens_does(kernels: CpuKernels) -> None:
    weight, x = numbers(100, 64, dtype=kernels.dtype), numbers(4, 64, seed=1, dtype=kernels.dtype)
    weight[10] = torch.inf
    x[2] = torch.nan
    packed = kernels.pack_weight(weight)
    scores = kernels.logits(x, packed, None, 1.0, None)
    assert same(kernels.greedy_head(x, packed, None, 1.0, None), kernels.greedy_tokens(scores))


def test_the_memory_of_freed_logits_is_reused(kernels: CpuKernels) -> None:
    packed, x = kernels.pack_weight(numbers(100, 64, dtype=kernels.dtype)), numbers(9, 64, seed=1, dtype=kernels.dtype)
    first = kernels.logits(x, packed, None, 1.0, None)
    some, place, kept = first[3:5], first.data_ptr(), first[3:5].clone()
    del first
    assert kernels.logits(-x, packed, None, 1.0, None).data_ptr() != place
    assert torch.equal(some, kept)
    place = kernels.logits(x, packed, None, 1.0, None).data_ptr()
    assert kernels.logits(x[:3], packed, None, 1.0, None).data_ptr() == place
