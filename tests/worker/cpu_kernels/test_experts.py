"""Mixtures of experts in one call: the choice, the products and the sum of each expert computed alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.cases import each_case
from tests.worker.cpu_kernels.available import EMULATED, EPSILON, VARIANTS, load_variant, numbers
from tests.worker.cpu_kernels.test_integer_linear import whole
from tests.worker.cpu_kernels.test_quantized_linear import quantized
from tests.worker.quantization.weights import random_float4
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.decoder_config import RouterConfig
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import MixtureOfExperts, Mlp, Router, SharedExpert, pack_experts
from tgi.worker.quantization.weight import Weight

pytestmark = pytest.mark.slow

EXPERTS, TOP_K, HIDDEN, INNER = 24, 4, 96, 64
RULES = {
    "softmax": RouterConfig(),
    "normalized": RouterConfig(normalized=True, scale=1.5),
    "best of groups": RouterConfig(groups=6, top_groups=2, group_best=1),
    "sparsemixer": RouterConfig("sparsemixer", jitter=0.2),
    "scaled": RouterConfig("sigmoid", scales_inputs=True, expert_scaled=True),
    "groups": RouterConfig("sigmoid", normalized=True, biased=True, groups=6, top_groups=2, scale=2.5),
}
FORMS: dict[str, Callable[[int, int], Weight]] = {
    "plain": lambda outputs, inputs: numbers(outputs, inputs, seed=outputs) / 8,
    "8 bits, groups": lambda outputs, inputs: quantized(8, 32, False, outputs, inputs),
    "4 bits, groups, shifts": lambda outputs, inputs: quantized(4, 32, True, outputs, inputs),
    "4 bits, whole": lambda outputs, inputs: whole(4, outputs, inputs),
    "MXFP4": lambda outputs, inputs: random_float4(outputs, inputs, 32),
}
ROWS = (1, 2, 7, 40) if EMULATED else (1, 2, 7, 40, 300, 1100)  # the last ones in two blocks


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return load_variant(request.param)


def mixture(
    kernels: CpuKernels, rule: RouterConfig, form: str, *, gated: bool, bias: bool, shared: bool
) -> MixtureOfExperts:
    """Experts that are computed one by one."""

    def linear(outputs: int, inputs: int, seed: int, epilogue: str = "none", gate: bool = False) -> Linear:
        weights = [kernels.supported_weight(FORMS[form](outputs, inputs)) for _ in range(2 if gate else 1)]
        added = numbers(outputs * len(weights), seed=seed, dtype=kernels.dtype) if bias else None
        return Linear(weights[0], added, epilogue, kernels, kernels.dtype, weights[1] if gate else None)

    def mlp(seed: int) -> Mlp:
        up = linear(INNER, HIDDEN, seed, ("clamped_silu" if bias else "silu") if gated else "relu2", gated)
        return Mlp(None, up, linear(HIDDEN, INNER, seed + 1))

    def small(outputs: int, seed: int) -> Linear:
        plain = kernels.supported_weight(numbers(outputs, HIDDEN, seed=seed) / 8)
        return Linear(plain, None, "none", kernels, kernels.dtype)

    torch.manual_seed(5)  # of `quantized` and `whole`
    choice_bias = numbers(EXPERTS, seed=8, dtype=torch.float32) / 8 if rule.biased else None
    scales = 1 + numbers(EXPERTS, seed=7, dtype=torch.float32) / 8 if rule.expert_scaled else None
    router = Router(small(EXPERTS, 9), choice_bias, rule, TOP_K, scales)
    always = SharedExpert(mlp(900), small(1, 10)) if shared else None
    return MixtureOfExperts(router, [mlp(10 * number) for number in range(EXPERTS)], always)


@each_case(
    ("rule", "form", "gated", "bias", "shared"),
    [
        ("softmax", "plain", True, False, False),
        ("normalized", "plain", False, True, True),
        ("groups", "plain", True, True, True),
        ("best of groups", "plain", True, False, True),
        ("sparsemixer", "plain", True, False, False),
        ("scaled", "plain", True, False, True),
        *[("normalized", form, True, False, False) for form in list(FORMS)[1:]],
    ],
)
def test_one_call_computes_the_mixture(
    kernels: CpuKernels, rule: str, form: str, gated: bool, bias: bool, shared: bool
) -> None:
    alone = mixture(kernels, RULES[rule], form, gated=gated, bias=bias, shared=shared)
    packed = pack_experts(kernels, alone.router, alone.experts, alone.shared)
    assert packed is not None
    most = max(ROWS)
    x = numbers(most, HIDDEN, seed=3, dtype=kernels.dtype) / 256  # so that float16 holds products with large codes
    # The logits of two experts may round to the same number; then either may be chosen.
    logits = alone.router.linear(x).float()
    scores = logits if alone.router.bias is None else torch.sigmoid(logits) + alone.router.bias
    distinct = scores.sort().values.diff().min(-1).values > 1e-6
    assert distinct.any()
    expected, found = alone(x, most).float(), packed(x, x)
    limit = 4 * EPSILON[kernels.dtype] * expected.abs().max()
    torch.testing.assert_close(found.float()[distinct], expected[distinct], rtol=0, atol=limit.item())
    for rows in ROWS:
        assert torch.equal(packed(x[:rows], x[:rows]), found[:rows])
    for row in range(0, 40, 3):
        one = x[row : row + 1]
        assert torch.equal(packed(one, one), found[row : row + 1])
    seen = x.flip(0).contiguous()
    torch.testing.assert_close(
        packed(x, seen).float()[distinct.flip(0)],
        alone(x, most, seen).float()[distinct.flip(0)],
        rtol=0,
        atol=limit.item(),
    )


def test_experts_of_different_formats_are_not_packed(kernels: CpuKernels) -> None:
    make = partial(mixture, kernels, RULES["softmax"], gated=True, bias=False, shared=False)
    one, other = make("plain"), make("8 bits, groups")
    experts = [*one.experts[1:], other.experts[0]]
    assert pack_experts(kernels, one.router, experts, None) is None
