"""The end of a step on our own kernels: the best of scores has the same bits whether they are written down or not."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.worker.ours import library
from tests.worker.test_native import VARIANTS, numbers
from tgi.worker.best import Best, find_best
from tgi.worker.native.kernels import Kernels, Packed
from tgi.worker.quantization.quantize import quantized

ROWS = (0, 1, 2, 15, 17, 32, 33, 64, 100)


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(library(*VARIANTS[request.param]), 2)


def same(found: Best, expected: Sequence[Tensor]) -> bool:
    """To the bit; where there is no number, in both."""
    return all(
        torch.equal(one.nan_to_num(1e30), other.nan_to_num(1e30)) for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("size", [512, 1003, 3, 48])
def test_the_best_of_scores_and_the_logarithm_of_their_sum(kernels: Kernels, size: int) -> None:
    scores = 5 * torch.randn(40, size, generator=torch.Generator().manual_seed(1))
    scores[1, size // 2 :] = -torch.inf
    scores[2] = 7.5
    scores[3, 2] = scores[3, 1] = 90.0
    scores[4, -1] = 1e8
    found = kernels.best(scores)
    exact = find_best(scores.double())
    assert torch.equal(found.ids, exact.ids)
    assert found.ids[2:5].tolist() == [0, 1, size - 1]
    assert torch.equal(found.highest, scores.amax(-1))
    assert (found.logprobs - exact.logprobs).abs().max() < 2e-6
    for row in range(len(scores)):
        assert same(kernels.best(scores[row : row + 1]), [part[row : row + 1] for part in found])


def test_what_is_no_number_is_never_the_best(kernels: Kernels) -> None:
    scores = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    clean = scores[0].clone()
    clean[:40] = -torch.inf
    scores[0, :40] = torch.nan
    scores[1] = torch.nan
    scores[2] = -torch.inf
    scores[3, 66] = torch.inf
    found = kernels.best(scores)
    assert same(kernels.best(clean[None]), [part[:1] for part in found])
    assert found.ids[1:4].tolist() == [0, 0, 66]
    assert found.logprobs.isnan().tolist() == [False, True, True, True, False]
    assert same(kernels.best(scores[4:]), [part[4:] for part in found])


def heads(kernels: Kernels, outputs: int, inputs: int) -> list[Packed]:
    """Of each kind, with equal rows."""
    weight = numbers(outputs, inputs)
    weight[outputs // 2] = weight[2] = 3 * weight[1]
    return [kernels.pack(weight), *(kernels.pack(quantized(weight, form)) for form in ("int8", "int4"))]


@pytest.mark.parametrize(("outputs", "inputs"), [(512, 64), (1003, 320), (7, 64)])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.0625, None), (1.0, 30.0), (0.5, 2.0)])
def test_what_leaves_the_product_is_the_best_of_its_scores(
    kernels: Kernels, outputs: int, inputs: int, scale: float, cap: float | None
) -> None:
    x, bias = numbers(ROWS[-1], inputs, seed=1), torch.randn(outputs, generator=torch.Generator().manual_seed(2))
    x[5] = 0  # all scores are the bias
    for weight, plus in zip(heads(kernels, outputs, inputs), (None, bias, None), strict=True):
        scores = kernels.scores(x, weight, plus, scale, cap)
        sums = kernels.linear(x, weight, plus, wide=True).double() * scale
        expected = sums if cap is None else (sums / cap).tanh() * cap
        assert (scores - expected).abs().max() < 1e-5 * max(1.0, cap or 1.0)
        best = kernels.best(scores)
        for count in ROWS:
            assert same(kernels.head(x[:count], weight, plus, scale, cap), [part[:count] for part in best])
            assert torch.equal(kernels.scores(x[:count], weight, plus, scale, cap), scores[:count])


def test_what_is_no_number_leaves_the_product_alike(kernels: Kernels) -> None:
    weight, x = numbers(100, 64), numbers(4, 64, seed=1)
    weight[10] = torch.inf
    x[2] = torch.nan
    packed = kernels.pack(weight)
    scores = kernels.scores(x, packed, None, 1.0, None)
    assert same(kernels.head(x, packed, None, 1.0, None), kernels.best(scores))


def test_the_memory_of_scores_that_nobody_has_any_more_is_used_again(kernels: Kernels) -> None:
    packed, x = kernels.pack(numbers(100, 64)), numbers(9, 64, seed=1)
    first = kernels.scores(x, packed, None, 1.0, None)
    some, place, kept = first[3:5], first.data_ptr(), first[3:5].clone()
    del first
    assert kernels.scores(-x, packed, None, 1.0, None).data_ptr() != place
    assert torch.equal(some, kept)
    place = kernels.scores(x, packed, None, 1.0, None).data_ptr()
    assert kernels.scores(x[:3], packed, None, 1.0, None).data_ptr() == place
