"""Row-wise kernels in Triton's interpreter, compared with torch.

Both compute in float32. The interpreter cuts bfloat16 off where a GPU rounds: a unit in the last place, 1 / 128, apart.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import each_case
from tgi.worker.activations import ACTIVATIONS, FACTORED, gated
from tgi.worker.decoder_config import RopeConfig
from tgi.worker.gpu_kernels.attention_arguments import Rotation
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.rotary import RotaryEmbedding

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
GPU = GpuKernels((9, 0))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def near(found: Tensor, expected: Tensor, roundings: int = 1) -> None:
    assert found.dtype == expected.dtype
    tolerance = roundings * {torch.bfloat16: 1 / 128, torch.float16: 1 / 1024, torch.float32: 2e-6}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 4)


@each_case("dtype", DTYPES)
@each_case("centred", [False, True])
def test_norms_match_torch(centred: bool, dtype: torch.dtype) -> None:
    """Whole rows of any length with a mean far from 0, and parts of rows with scales of their own."""
    for size in (7, 64, 300):
        x = (4 * random_tensor(CPU, 3, size) + 2).to(dtype)
        for bias in (None, random_tensor(CPU, size, seed=2)) if centred else (None,):
            norm = Norm(random_tensor(CPU, size, seed=1), bias, 1e-5, centred)
            near(norm._replace(kernels=GPU)(x), norm(x))
    for shape in ((3, 20), (9, 256)):
        parts = random_tensor(CPU, 2, *shape, dtype=dtype)
        norm = Norm(random_tensor(CPU, *shape, seed=1), None, 1e-6, centred)
        near(norm._replace(kernels=GPU)(parts), norm(parts))
        assert norm._replace(kernels=GPU)(parts[:0]).shape == (0, *shape)


@each_case("shape", [(60,), (3, 20)])
def test_a_norm_in_place_changes_no_other_columns(shape: tuple[int, ...]) -> None:
    norm = Norm(random_tensor(CPU, *shape, seed=1), None, 1e-6, False)
    found, expected = (random_tensor(CPU, 4, 100, dtype=torch.bfloat16) for _ in range(2))
    norm._replace(kernels=GPU).normalize_in_place(found[:, 9:69].unflatten(1, shape))
    norm.normalize_in_place(expected[:, 9:69].unflatten(1, shape))
    near(found, expected)
    assert torch.equal(found[:, 69:], random_tensor(CPU, 4, 100, dtype=torch.bfloat16)[:, 69:])


@each_case("dtype", DTYPES)
@each_case(
    ("heads", "dim", "head_dim", "neighbours", "normed"),
    [(7, 16, 16, False, False), (7, 12, 20, True, True), (7, 2, 8, False, True), (36, 128, 128, True, False)],
)
def test_queries_and_keys_are_normalized_rotated_and_written(
    heads: int, dim: int, head_dim: int, neighbours: bool, normed: bool, dtype: torch.dtype
) -> None:
    """A whole head or its first elements, at any position, and more heads than one program has."""
    kv, positions, slots = 2, torch.tensor([0, 5, 2049, 5]), torch.tensor([40, 3, 16, 17])
    qkv, rope = (
        random_tensor(CPU, 4, heads + 2 * kv, head_dim, dtype=dtype),
        RopeConfig(dim, {"rope_theta": 10000.0}, neighbours),
    )
    norm = Norm(random_tensor(CPU, heads + kv, head_dim, seed=4), None, 1e-6, False)
    given = norm.of_heads(after_rotation=False)
    assert given is not None
    expected, rotary = qkv.float().clone(), RotaryEmbedding(rope, CPU)
    if normed:
        norm.normalize_in_place(expected[:, : heads + kv])
    rotary.rotate(expected, heads + kv, rotary.angles(positions, 2050, heads + kv))
    keys, values = (torch.zeros(3, 16, kv, head_dim, dtype=dtype) for _ in range(2))
    angles = RotaryEmbedding(rope, CPU, GPU).angles(positions, 2050, heads + kv)
    query = GPU.rotate_and_write_kv(
        *(qkv, keys, values, slots, (1.0, 1.0), Rotation(*angles, neighbours)),
        given if normed else None,
    )
    near(query, expected[:, :heads].to(dtype))
    near(keys.flatten(0, 1)[slots], expected[:, heads : heads + kv].to(dtype))
    assert torch.equal(values.flatten(0, 1)[slots], qkv[:, heads + kv :])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@each_case("dtype", DTYPES)
@each_case("then", ACTIVATIONS)
def test_gated_activation_matches_torch(then: str, dtype: torch.dtype) -> None:
    """The activation is rounded before the multiplication. Far from 0 it is 0 or the number itself."""
    gate, up = random_tensor(CPU, 3, 1030, dtype=dtype), random_tensor(CPU, 3, 1030, dtype=dtype, seed=1)
    gate[0, :7] = torch.tensor([0, -0.0, 100, -100, 30000, -30000, 1e-6], dtype=dtype)
    up[0, :3] = torch.tensor([8, -8, 20], dtype=dtype)
    gate[1, :3] = 9
    found = GPU.gated_activation(torch.cat((gate, up), 1), then)
    near(found, gated(then, gate, up), roundings=2)
    assert GPU.gated_activation(found[:0], then).shape == (0, 515)
    near(GPU.activation(gate, then), ACTIVATIONS[then](gate))


@each_case("dtype", DTYPES)
def test_activations_without_a_gate_and_sigmoid_gates_match_torch(dtype: torch.dtype) -> None:
    x, y = (4 * random_tensor(CPU, 3, 1030, dtype=dtype, seed=seed) for seed in (1, 2))
    x[0, :5] = torch.tensor([0, 1e-7, -1e-7, 40, -40], dtype=dtype)
    for then, function in FACTORED.items():
        linear = Linear(torch.eye(1030, dtype=dtype), None, then, gpu=GPU, factors=(0.4, 0.7))
        near(linear(x), function(x, 0.4, 0.7))
    near(GPU.sigmoid_gate(x, y.clone()), (y.float() * x.float().sigmoid()).to(dtype))


@each_case("bias", [False, True])
def test_gate_and_up_are_one_layer(bias: bool) -> None:
    first, second = random_tensor(CPU, 24, 16), random_tensor(CPU, 24, 16, seed=1)
    offsets = random_tensor(CPU, 48, seed=2) if bias else None
    linear = Linear(first, offsets, "silu", gated=second, gpu=GPU)
    x = random_tensor(CPU, 5, 16, seed=3)
    left, right = F.linear(x, torch.cat((first, second)), offsets).chunk(2, 1)
    torch.testing.assert_close(linear(x), F.silu(left) * right)
    torch.testing.assert_close(linear.without_epilogue()(x), torch.cat((left, right), 1))
