"""Whole models with the GPU kernels, in Triton's interpreter, compared with torch's kernels."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import model as make
from tests.worker.batches import Row, make_batch, moved
from tests.worker.gpu_kernels.count_operations import counted
from tests.worker.loras import make_adapter
from tgi.worker.attention import cuda_attention
from tgi.worker.attention.interface import ForwardBatch
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.layers.head_products import HeadProducts
from tgi.worker.lora.deltas import AdapterSpan
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model
from tgi.worker.state_cache import StateCache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_split")]

CPU = torch.device("cpu")
GPU = GpuKernels((9, 0))
# Norms of heads, gelu and norms behind parts; layer norms, neighbouring pairs and one input for both parts; a bias, no
# gate; part of a head turned, joined matrices; experts; layers of transformers; latent attention; clamped and learned
# activations; convolutions; the delta rule; ALiBi; attention in chunks; heads of two sizes with normed values, and with
# keys of earlier layers.
KINDS = {  # with the number of layers: where all are of one kind, one is enough
    **{"gemma3_text": 2, "cohere": 2, "starcoder2": 1, "phi3": 1, "qwen3_moe": 1, "persimmon": 1, "ministral3": 1},
    **{"hunyuan_v1_dense": 1, "dots1": 2, "qwen2_moe": 1, "deepseek_v2": 2, "gpt_oss": 2, "apertus": 1, "mistral4": 1},
    **{"lfm2": 2, "qwen3_next": 3, "bloom": 1, "llama4_text": 3, "gemma4_text": 5, "gemma3n_text": 5},
}


def load(directory: Path, gpu: GpuKernels | None, device: str = "cpu", dtype: str = "float32") -> Model:
    return build_model(directory, dtype, device, lambda stage, percent: None, gpu=gpu)


def logprobs(model: Model, adapters: tuple[Any, ...] = (None, None)) -> Tensor:
    """Logits after two prompts, [2, vocab]."""
    attention = cuda_attention(model.kv, 12, CPU)
    if model.kv.state is not None:
        attention.state = StateCache(model.kv.state, 6, CPU)
    batch = make_batch([Row([5, 9, 3, 7, 7], 0, range(4)), Row([8, 30], 0, range(4, 8))], attention.page_size)
    spans = [AdapterSpan(one, *ends) for one, ends in zip(adapters, ((0, 5), (5, 7)), strict=True) if one is not None]
    return model.forward(batch._replace(lora_spans=spans), attention).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_matches_torch(kind: str) -> None:
    directory = make(kind, layers=KINDS[kind])
    ours, torchs = (load(directory, gpu) for gpu in (GPU, None))
    torch.testing.assert_close(logprobs(ours), logprobs(torchs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("targets", [("gate_proj", "up_proj", "down_proj", "q_proj"), ("up_proj",)])
def test_adapters_change_gate_and_up_before_the_activation(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Rows with and without an adapter. A row without has the same bits as alone."""
    directory = make("llama", layers=1)
    path = make_adapter(tmp_path / "adapter", directory, targets=targets)
    ours, torchs = (load(directory, gpu) for gpu in (GPU, None))
    for adapted in ((True, False), (True, True)):
        found, expected = (
            logprobs(model, tuple(adapter if one else None for one in adapted))
            for model, adapter in ((model, model.load_adapter(path)) for model in (ours, torchs))
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
        assert adapted[1] or torch.equal(found[1], logprobs(ours)[1])
    assert (logprobs(ours)[0] - found[0]).abs().max() > 0.1


class Absent:
    """Attention without any operation."""

    page_size = 16
    state = None

    def __init__(self, model: Model) -> None:
        self._shape = model.kv.heads, model.kv.result_dim

    def plan(self, batch: ForwardBatch) -> None:
        return None

    def write_and_attend(self, plan: None, layer: int, qkv: Tensor, scale: float) -> Tensor:
        return qkv.new_empty(len(qkv), *self._shape)

    def transform_and_attend(self, plan: None, layer: int, qkv: Tensor, scale: float, transform: Any) -> Tensor:
        return self.write_and_attend(plan, layer, qkv, scale)


def of_a_layer(kind: str, gpu: GpuKernels | None, adapters: Path | None = None) -> Counter[str]:
    """The operations of one more layer in a decode step, without attention. `adapters`: a directory for those of the
    two rows."""
    batch = make_batch([Row([5], 3, [0]), Row([8], 9, [1])])
    there = moved(batch, "meta")
    found = []
    for layers in (3, 2):
        directory = make(kind, layers=layers)
        model = load(directory, gpu, "meta", "bfloat16")
        if adapters is not None:
            paths = (make_adapter(adapters / f"{layers}-{rank}", directory, rank) for rank in (4, 70))
            spans = [AdapterSpan(model.load_adapter(path), row, row + 1) for row, path in enumerate(paths)]
            there = there._replace(lora_spans=spans)
        step = partial(model.forward, there, Absent(model))
        counted(step)  # creates what is cached
        found.append(counted(step))
    return found[0] - found[1]


def test_a_layer_takes_few_operations_besides_attention() -> None:
    """Norms and products: attention adds two launches. 21 of torch's operations."""
    ours = {"mm": 2, "addmm_": 2, "_norm": 2, "_gated_activation": 1}
    assert of_a_layer("llama", GPU) == of_a_layer("qwen3", GPU) == ours
    assert of_a_layer("llama", None).total() == 21


def test_adapters_take_four_launches_in_a_layer(tmp_path: Path) -> None:
    """One for each group of projections, whatever the adapters of the rows and their ranks."""
    ours = {"mm": 2, "addmm_": 2, "_norm": 2, "_gated_activation": 1, "_add_lora": 4}
    assert of_a_layer("llama", GPU, tmp_path / "llama") == ours
    assert of_a_layer("phi3", GPU, tmp_path / "phi3") == ours
    assert of_a_layer("llama", None, tmp_path / "torch").total() > 100


def test_new_kinds_of_layers_take_few_operations() -> None:
    """Latent attention: three products before it and one behind it, two of the heads, two copies of what these keep,
    and three norms; attention adds two launches. With experts, a shared one too. An MLP with a learned activation: one
    launch for that."""
    experts = {"_choose": 1, "_grouped_matmul": 2, "_combine": 1, "_gated_activation": 1, "add": 1, "add_": 1}
    latent = {"mm": 3 + 3, "addmm_": 1, "bmm": 2, "copy_": 2, "_norm": 4}
    assert of_a_layer("deepseek_v3", GPU) == experts | latent
    assert of_a_layer("apertus", GPU) == {"mm": 2, "addmm_": 2, "_norm": 2, "_plain_activation": 1}


def test_products_of_heads_are_written_where_they_are_needed() -> None:
    """As on a GPU: without tiles."""
    weight, x, last = random_tensor(CPU, 3, 10, 6), random_tensor(CPU, 5, 3 * 8, seed=1), random_tensor(CPU, 5, 12)
    found, expected = (HeadProducts(weight, 2, None, any_rows)(x, last) for any_rows in (True, False))
    torch.testing.assert_close(found, expected)


def test_experts_take_six_launches() -> None:
    """With the router and without the residual; a seventh for more tokens than one program sorts. Nothing is read by
    the host: the device "meta" has nothing to read."""
    ours = {"mm": 2, "addmm_": 1, "add": 1, "_norm": 2, "_choose": 1, "_grouped_matmul": 2, "_combine": 1}
    assert of_a_layer("qwen3_moe", GPU) == ours
