"""Mixtures of experts on the GPU kernels, in Triton's interpreter, compared with torch and with the loop over experts.

Products are compared in float16: the interpreter cannot multiply bfloat16.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.models import model as make
from tests.worker.gpu_kernels.test_models import GPU
from tests.worker.quantization.weights import random_floats, random_weight, random_whole
from tgi.worker.decoder_config import RouterConfig
from tgi.worker.distributed.sharding import shard_decoder
from tgi.worker.gpu_kernels.routing import FEW_TOKENS, MANY_TILES, combine, most_blocks, route
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import GroupedExperts, MixtureOfExperts, Mlp, Router
from tgi.worker.models.loader import build_model, read_model_spec
from tgi.worker.models.stacked_experts import open_checkpoint
from tgi.worker.models.weight_loader import DecoderWeightLoader
from tgi.worker.quantization.weight import QuantizedWeight, Weight, as_plain, stack_weights

pytestmark = pytest.mark.slow

CPU, HALF, SINGLE = torch.device("cpu"), torch.float16, torch.float32
HIDDEN, INNER = 64, 96
NORMALIZED = RouterConfig(normalized=True)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "config", "block"),
    [
        (2, 128, 8, NORMALIZED, 16),
        (1, 4, 2, NORMALIZED, 16),
        (FEW_TOKENS, 6, 3, RouterConfig(scale=2.5), 2),
        (FEW_TOKENS + 1, 6, 6, RouterConfig("sigmoid", normalized=True), 16),
        (100, 128, 8, NORMALIZED, 64),
        (FEW_TOKENS * MANY_TILES + 1, 3, 1, RouterConfig(), 128),
        (30, 160, 6, RouterConfig("softmax", groups=8, top_groups=3, scale=16.0), 16),
        (30, 128, 8, RouterConfig("softmax", normalized=True, biased=True), 16),
        (7, 24, 8, RouterConfig("sigmoid", True, True, groups=8, top_groups=4, scale=2.5), 16),
    ],
)
def test_routing_matches_torch(tokens: int, experts: int, top_k: int, config: RouterConfig, block: int) -> None:
    logits = random_tensor(CPU, tokens, experts, dtype=SINGLE if tokens % 2 else HALF)
    if logits.dtype is HALF:  # without equal ones, of which torch chooses any
        logits = torch.argsort(logits, 1).argsort(1).to(HALF) / 16 - 2
    bias = random_tensor(CPU, experts, seed=4) if config.biased else None
    found = route(logits, bias, config, top_k, block)
    weights, chosen = Router(Linear(torch.eye(experts)), bias, config, top_k).choose(logits.float())
    torch.testing.assert_close(found.weights, weights)
    order = chosen.view(-1).argsort(stable=True)
    assert found.tokens.tolist() == (order // top_k).tolist()
    assert found.positions.view(-1)[order].tolist() == list(range(tokens * top_k))
    loads = torch.bincount(chosen.view(-1), minlength=experts)
    ends = loads.cumsum(0).tolist()
    assert found.ends.tolist() == ends
    held = [
        (expert, row)
        for expert, (end, load) in enumerate(zip(ends, loads.tolist(), strict=True))
        for row in range(end - load, end, block)
    ]
    assert len(found.block_experts) == most_blocks(tokens * top_k, experts, block)
    assert list(zip(found.block_experts.tolist(), found.block_rows.tolist(), strict=True))[: len(held)] == held
    assert set(found.block_experts[len(held) :].tolist()) <= {-1}
    parts = random_tensor(CPU, tokens * top_k, 600, seed=1)
    expected = (parts[found.positions.long()] * weights[:, :, None]).sum(1)
    torch.testing.assert_close(combine(parts, found), expected, rtol=1e-5, atol=1e-5)


def test_the_most_blocks_are_needed_by_some_loads() -> None:
    """And no loads need more."""
    for rows, experts, block in ((3, 4, 2), (9, 3, 4), (40, 3, 4)):
        needed = [
            sum(-(-load // block) for load in (one, other, rows - one - other))
            for one in range(rows + 1)
            for other in range(rows + 1 - one)
        ]
        assert max(needed) == most_blocks(rows, min(experts, 3), block)


@pytest.mark.parametrize(("tokens", "dtype"), [(3, SINGLE), (FEW_TOKENS + 3, HALF), (4, torch.bfloat16)])
def test_equal_and_broken_logits_choose_different_experts(tokens: int, dtype: torch.dtype) -> None:
    """So that the sorted rows are complete, whatever a broken token computes. Of equal ones the first are chosen."""
    logits = torch.zeros(tokens, 5, dtype=dtype)
    logits[1], logits[2, 3] = math.nan, math.inf
    found = route(logits, None, NORMALIZED, 2, 4)
    assert sorted(found.positions.view(-1).tolist()) == list(range(2 * tokens))
    assert found.ends.tolist() == [tokens, 2 * tokens - 1, 2 * tokens - 1, 2 * tokens, 2 * tokens]
    assert found.weights[0].tolist() == [0.5, 0.5]
    assert found.weights[2].tolist() == [1, 0]


def mixtures(
    weights: Callable[[int, int, int], Weight],
    dtype: torch.dtype,
    experts: int,
    top_k: int,
    then: str = "silu",
    inner: int = INNER,
    hidden: int = HIDDEN,
) -> tuple[GroupedExperts, MixtureOfExperts]:
    """The same experts, with weights of this kind and plain ones computed one by one in float32. `weights` makes a
    weight [outputs, inputs] from a seed."""
    router = random_tensor(CPU, experts, hidden, dtype=dtype) / 16
    made = [
        (weights(inner, hidden, 3 * at), weights(inner, hidden, 3 * at + 1), weights(hidden, inner, 3 * at + 2))
        for at in range(experts)
    ]

    def plain(weight: Weight, epilogue: str = "none") -> Linear:
        return Linear(as_plain(weight, SINGLE), epilogue=epilogue)

    grouped = GroupedExperts(
        router=Router(Linear(router, gpu=GPU), None, NORMALIZED, top_k),
        up=stack_weights([weight for gate, up, _ in made for weight in (gate, up)], dtype),
        down=stack_weights([down for _, _, down in made], dtype),
        activation=then,
        gated=True,
        shared=None,
        partial_sum=False,
        kernels=GPU,
    )
    each = [Mlp(plain(gate, then), plain(up, "mul"), plain(down)) for gate, up, down in made]
    return grouped, MixtureOfExperts(Router(plain(router), None, NORMALIZED, top_k), each, None)


def plain_weights(dtype: torch.dtype) -> Callable[[int, int, int], Weight]:
    return lambda outputs, inputs, seed: random_tensor(CPU, outputs, inputs, dtype=dtype, seed=seed) / inputs**0.5


def grouped_weights(bits: int, group: int, shifted: bool) -> Callable[[int, int, int], Weight]:
    def weights(outputs: int, inputs: int, seed: int) -> QuantizedWeight:
        made = random_weight(outputs, inputs, bits, group, shifted, seed)
        return made if made.shifts is None else made._replace(shifts=made.shifts / 4)

    return weights


def near(found: Tensor, expected: Tensor, rounded: bool = False) -> None:
    """Inner values and the outputs of experts are rounded to the type of x, which the expected ones are not. `rounded`:
    inputs were to 8-bit floats."""
    tolerance = 0.06 if rounded else 2**-8 if found.dtype is HALF else 1e-5
    assert (found.float() - expected).norm() <= tolerance * expected.norm()


KINDS: dict[str, tuple[Callable[[int, int, int], Weight], torch.dtype]] = {
    "16 bits": (plain_weights(HALF), HALF),
    "fp8": (random_floats, HALF),
    "int8": (lambda outputs, inputs, seed: random_whole(outputs, inputs, 8, seed), HALF),
    "int4": (lambda outputs, inputs, seed: random_whole(outputs, inputs, 4, seed), HALF),
    "int8 in groups": (grouped_weights(8, 32, True), HALF),
    "int4 in groups": (grouped_weights(4, 128, False), HALF),
    "int4 in 32 bits": (lambda outputs, inputs, seed: random_whole(outputs, inputs, 4, seed), SINGLE),
    "int4 with shifts": (grouped_weights(4, 16, True), HALF),
}


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_experts_match_the_loop(kind: str) -> None:
    """For one token, with experts without any, and for more than a tile has. A row has the same bits whatever its
    neighbours choose. Many rows are multiplied with 8-bit floats as such."""
    make_weight, dtype = KINDS[kind]
    hidden, inner = (128, 256) if kind == "int4 in groups" else (HIDDEN, INNER)  # groups of 128
    grouped, loop = mixtures(make_weight, dtype, 3, 2, "gelu_tanh" if kind == "fp8" else "silu", inner, hidden)
    for tokens in (1, 105 if kind == "fp8" else 12 if dtype is SINGLE else 42):
        x = random_tensor(CPU, tokens, hidden, dtype=dtype, seed=tokens)
        found = grouped(x, tokens)
        near(found, loop(x.float(), tokens), rounded=kind == "fp8" and tokens > 1)
        other = torch.cat([x[:1], x[1:].flip(0) * -1])
        assert torch.equal(grouped(other, tokens)[0], found[0])


def test_an_expert_with_all_tokens_and_experts_without_any() -> None:
    grouped, loop = mixtures(plain_weights(SINGLE), SINGLE, 4, 1)
    x = random_tensor(CPU, 1, HIDDEN).repeat(40, 1)
    found = grouped(x, 40)
    near(found, loop(x, 40))
    assert torch.equal(found, found[:1].expand(40, -1))


@pytest.mark.parametrize(("kind", "ranks"), [("mixtral", 1), ("qwen3_moe", 2), ("gpt_oss", 2)])
def test_the_experts_of_a_checkpoint_match_the_loop(kind: str, ranks: int) -> None:
    """Those of all ranks, added up."""
    spec = read_model_spec(make(kind), "float32", None)
    assert spec.decoder is not None

    def computed(ours: Sequence[bool]) -> list[Tensor]:
        found = []
        for rank in range(ranks):
            assert spec.decoder is not None
            shard = shard_decoder(spec.decoder, rank, ranks)
            for one in ours:
                with open_checkpoint(make(kind), spec.decoder) as checkpoint, torch.inference_mode():
                    source = spec.scheme.source(checkpoint)
                    gpu = GPU if one else None
                    loader = DecoderWeightLoader(source, spec.decoder, shard, SINGLE, CPU, None, gpu)
                    weights = loader.load(lambda percent: None)
                experts = weights.layers[0].mlp
                assert isinstance(experts, GroupedExperts if one else MixtureOfExperts)
                assert experts.partial_sum == (ranks > 1)
                x = random_tensor(CPU, 9, spec.decoder.hidden)
                found.append(experts(x, 9))
        return found

    torch.testing.assert_close(sum(computed([True])), sum(computed([False])), rtol=1e-4, atol=1e-5)


def test_a_model_with_grouped_experts_can_be_captured() -> None:
    """Without our kernels, the host reads the loads of the experts."""
    found = [
        build_model(make("mixtral"), "float32", "cpu", lambda stage, percent: None, gpu=gpu) for gpu in (GPU, None)
    ]
    assert [model.cuda_graph_obstacle is None for model in found] == [True, False]
