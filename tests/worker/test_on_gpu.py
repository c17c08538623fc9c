"""Tests that need a GPU: our kernels, CUDA graphs, copies. Skipped without one."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import model
from tests.worker.batches import Row, make_batch, moved
from tests.worker.driving import Drawn, drive
from tests.worker.loras import make_adapter
from tests.worker.quantization.weights import random_floats, random_weight, random_whole
from tests.worker.test_sampling import draws
from tgi.microkernel.sampling_params import SamplingParams
from tgi.microkernel.settings import Settings
from tgi.worker.activations import ACTIVATIONS
from tgi.worker.attention import build_attention, cuda
from tgi.worker.attention.cuda import LayerKVCache
from tgi.worker.attention.interface import KVCacheSpec
from tgi.worker.decoder_config import RopeConfig
from tgi.worker.engine.startup import WARMUP_SAMPLING_PARAMS, start_engine
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.selection import self_tested_kernels
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.head_logits import HeadLogits
from tgi.worker.layers.linear import KERNEL_MAX_ROWS_FP8, find_product
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.rotary import RotaryEmbedding
from tgi.worker.lora.deltas import AdapterSpan
from tgi.worker.models.loader import build_model
from tgi.worker.quantization import float8
from tgi.worker.quantization.weight import QuantizedWeight
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import sample, sample_head

GPU = "cuda"
PROMPTS = [[5, 9, 3], [7] * 20, list(range(40)), [1], [8, 8, 30, 2] * 200]
SAMPLINGS = [
    SamplingParams(0),
    SamplingParams(1, do_sample=True),
    WARMUP_SAMPLING_PARAMS._replace(watermark=False),
    SamplingParams(2, top_n=3),
]

# Where the tests of kernels run in the same process, Triton's interpreter stands for the GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(INTERPRETED, reason="Triton interprets its kernels: run this file alone"),
]


def drawn(
    kind: str,
    dtype: str,
    run: Path,
    device: str,
    graphs: tuple[int, ...],
    drafts: int = 0,
    **more: Any,
) -> list[Drawn]:
    """The tokens of an engine as a worker starts it, with drafts of a draft model that equals the served one."""
    run.mkdir()
    settings = Settings(
        model_dir=model(kind),
        run_dir=run,
        dtype=dtype,
        device=device,
        cuda_graphs=graphs,
        draft_model_dir=model(kind) if drafts else None,
        speculate=drafts,
        max_batch_size=8,
        max_total_tokens=1000,
        max_batch_total_tokens=8000,
        **more,
    )
    engine = start_engine(settings, lambda stage, percent: None)
    assert (engine._decode_graphs is not None) == (device == GPU and graphs != (0,))
    guess = (lambda row, drawn: drafts) if drafts else None
    return drive(engine, PROMPTS, 12, [*SAMPLINGS, SamplingParams(0)], stagger=2, guess=guess)


@pytest.fixture(scope="module")
def gpu() -> GpuKernels:
    found, reason = self_tested_kernels(torch.device(GPU), torch.cuda.get_device_capability())
    assert found is not None, reason
    return found


def test_kernels_pass_their_trials(gpu: GpuKernels) -> None:
    """Otherwise a worker does not use the kernels, and neither do the engines below."""
    assert gpu.capability == torch.cuda.get_device_capability()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_gpu_samples_the_same_tokens_as_a_cpu(kind: str, tmp_path: Path) -> None:
    """In float32; with and without CUDA graphs, with drafts, and with torch's kernels only."""
    expected = drawn(kind, "float32", tmp_path / "cpu", "cpu", ())
    ways: dict[str, dict[str, Any]] = {
        "plain": {"graphs": (0,)},
        "recorded": {"graphs": ()},
        "drafted": {"graphs": (), "drafts": 2},
        "torchs": {"graphs": (), "disable_custom_kernels": True},
    }
    for name, way in ways.items():
        for one, other in zip(drawn(kind, "float32", tmp_path / name, GPU, **way), expected, strict=True):
            assert one.ids == other.ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "cache"), [("llama", None), ("gemma2", None), ("llama", "fp8_e4m3fn"), ("gemma2", "fp8_e5m2")]
)
def test_replayed_steps_sample_the_same_tokens(kind: str, cache: str | None, tmp_path: Path) -> None:
    """In bfloat16, with our kernels and torch's. Where two tokens have nearly equal logits, the texts may diverge."""
    plain = drawn(kind, "bfloat16", tmp_path / "plain", GPU, (0,), kv_cache_dtype=cache)
    recorded = drawn(kind, "bfloat16", tmp_path / "recorded", GPU, (), kv_cache_dtype=cache)
    for one, other in zip(plain, recorded, strict=True):
        same = next((at for at, pair in enumerate(zip(one.ids, other.ids, strict=True)) if len(set(pair)) > 1), 12)
        assert same > 0
        assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_a_real_model_are_what_torch_computes(gpu: GpuKernels, dtype: torch.dtype) -> None:
    """For few tokens and for many."""
    there = torch.device(GPU)
    tolerance = {torch.bfloat16: 1 / 128, torch.float16: 1 / 1024, torch.float32: 2e-5}[dtype]

    def near(found: Tensor, expected: Tensor, roundings: int = 1) -> None:
        torch.testing.assert_close(found, expected, rtol=roundings * tolerance, atol=roundings * tolerance / 4)

    for tokens in (1, 3000):
        x, qkv = (
            random_tensor(there, tokens, 4096, dtype=dtype),
            random_tensor(there, tokens, 48, 128, dtype=dtype, seed=1),
        )
        norm = Norm(random_tensor(there, 4096, seed=2), random_tensor(there, 4096, seed=3), 1e-5, True)
        near(norm._replace(kernels=gpu)(x), norm(x))
        norm = Norm(random_tensor(there, 40, 128, seed=4), None, 1e-6, False)
        found, expected = qkv.clone(), qkv.clone()
        norm._replace(kernels=gpu).normalize_in_place(found[:, :40])
        norm.normalize_in_place(expected[:, :40])
        near(found, expected)
        for neighbours in (False, True):
            turned = [qkv.clone(), qkv.clone()]
            for one, kernels in zip(turned, (gpu, None), strict=True):
                rotary = RotaryEmbedding(RopeConfig(128, {"rope_theta": 500000.0}, neighbours), there, kernels)
                rotary.rotate(one, 40, rotary.angles(torch.arange(tokens, device=there), tokens, 40))
            near(*turned)
        left, right = random_tensor(there, tokens, 2 * 8192, dtype=dtype).chunk(2, 1)
        for then, activation in ACTIVATIONS.items():
            near(gpu.gated_activation(torch.cat((left, right), 1), then), activation(left) * right, roundings=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kept", [None, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64), (16, 16, 256), (32, 1, 80)])
def test_decode_attention_is_what_torch_computes(
    gpu: GpuKernels, heads: int, kv_heads: int, head_dim: int, kept: torch.dtype | None, dtype: torch.dtype
) -> None:
    """Of short contexts and long ones, with windows and caps, and the same for a row that stands alone."""
    there, contexts = torch.device(GPU), [1, 16, 17, 1000, 5000]
    tolerance = {torch.bfloat16: 1 / 128, torch.float16: 1 / 512, torch.float32: 1e-4}[dtype]
    pages = [-(-length // 16) for length in contexts]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).split(pages)
    rows = [Row([0], length - 1, own.tolist()) for length, own in zip(contexts, order, strict=True)]
    batch = moved(make_batch(rows, 16), GPU)
    qkv = random_tensor(there, len(rows), heads + 2 * kv_heads, head_dim, dtype=dtype)
    places = torch.arange(16 * sum(pages), device=there)
    written = random_tensor(there, len(places), heads + 2 * kv_heads, head_dim, dtype=dtype, seed=1)
    for window, cap in ((None, None), (4096, None), (None, 5.0)):
        kv = KVCacheSpec(1, heads, kv_heads, head_dim, dtype, (window,), cap, gpu_kernels=gpu, stored_dtype=kept)
        cache = LayerKVCache(kv, 0, sum(pages), 16, there)
        cache.write(written, places)
        together, alone = (
            gpu.paged_attention(
                qkv[at:], cache.keys, cache.values, batch.page_table[at:], batch.context_lens[at:], 0.1, window, cap
            )
            for at in (0, len(contexts) - 1)
        )
        expected = cuda.attend_padded(
            cuda.plan_padded_decode(batch, kv, 16), qkv[:, :heads].contiguous(), cache, 0.1, window, cap
        )
        largest = float(expected.abs().max())
        torch.testing.assert_close(together, expected, rtol=tolerance, atol=tolerance * largest)
        assert torch.equal(alone[0], together[-1])


def test_real_vocabularies_are_sampled_as_torch_does(gpu: GpuKernels) -> None:
    """256 rows of 128,256 tokens with all mixtures of limits, and a row alone. A token may differ where two perturbed
    logits are within rounding."""
    there, rows, vocab = torch.device(GPU), 256, 128256
    limits: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 1000, "top_p": 0.7}]
    samplings = [
        SamplingParams(row, row % 6 > 0, temperature=(0.7, 1.0, 1.5)[row % 3], **limits[row % 5]) for row in range(rows)
    ]
    batch, noise = draws(samplings, [[1] * (row + 1) for row in range(rows)]), Noise(vocab, there)
    for dtype, spread in ((torch.float32, 1.3), (torch.bfloat16, 3.0)):
        head = HeadLogits((spread * random_tensor(there, rows, vocab)).to(dtype))
        found = sample_head(head, batch, noise, gpu_sample=gpu.sample)
        expected = sample(head.float32().clone(), batch, noise)
        same = found.ids == expected.ids
        # In bfloat16 many tokens tie at the border of top-p, and we keep all of them.
        assert int(same.sum()) >= (rows - 2 if dtype is torch.float32 else rows - 8)
        tolerance = 1e-4 if dtype is torch.float32 else 0.02
        torch.testing.assert_close(found.logprobs[same], expected.logprobs[same], rtol=tolerance, atol=tolerance)
        for row in (2, 4, 5):  # the last one has no limits, so fewer launches alone
            alone = sample_head(
                head._replace(values=head.values[row : row + 1]),
                batch.select(np.array([row])),
                noise,
                gpu_sample=gpu.sample,
            )
            assert (int(alone.ids), float(alone.logprobs)) == (int(found.ids[row]), float(found.logprobs[row]))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "cohere", "starcoder2", "qwen3_moe"])
def test_models_with_our_kernels_are_what_torch_computes(gpu: GpuKernels, kind: str) -> None:
    batch = make_batch([Row(list(range(5, 75)), 0, range(8)), Row([8, 30], 0, range(8, 16))])
    there = moved(batch, GPU)
    found = []
    for ours in (gpu, None):
        made = build_model(model(kind), "float32", GPU, lambda stage, percent: None, gpu=ours)
        found.append(made.forward(there, build_attention(made.kv, 20, made.device)).log_softmax(-1))
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)


def test_adapters_give_the_same_logits_as_on_a_cpu(gpu: GpuKernels, tmp_path: Path) -> None:
    """In one row of two, before the activation and after it."""
    directory = model("llama")
    path = make_adapter(tmp_path / "adapter", directory, targets=("q_proj", "up_proj", "down_proj"))
    batch = make_batch([Row(list(range(5, 75)), 0, range(8)), Row([8, 30], 0, range(8, 16))])
    found = []
    for device, ours in (("cpu", None), (GPU, gpu), (GPU, None)):
        made = build_model(directory, "float32", device, lambda stage, percent: None, gpu=ours)
        adapted = moved(batch, device)._replace(lora_spans=[AdapterSpan(made.load_adapter(path), 0, 70)])
        found.append(made.forward(adapted, build_attention(made.kv, 20, made.device)).log_softmax(-1).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_few_bits_are_those_of_what_the_weights_stand_for(gpu: GpuKernels, dtype: torch.dtype) -> None:
    """Of few rows from their columns, a row's bits whatever its company; of many as products.py says."""
    there = torch.device(GPU)
    forms = [random_whole(4112, 4096, 8), random_whole(1040, 4096, 4), random_weight(4112, 4096, 4, 128, True)]
    forms += [random_weight(1040, 4096, 4, 32, False), random_weight(1040, 4096, 8, 16, True)]
    floats = float8.stays_float8_on(there)
    if floats:
        assert float8.has_float8_matmul(there)
        forms += [random_floats(4112, 4096), random_floats(1040, 14336)]
    for weight in (form.to(there) for form in forms):
        outputs, inputs = weight.shape
        multiply = find_product(weight, random_tensor(there, outputs, dtype=dtype), dtype, gpu)
        x = random_tensor(there, 300, inputs, dtype=dtype, seed=1)
        expected = multiply_exactly(x, weight) + random_tensor(there, outputs)
        for rows in (1, 5, 16, 17, 64, 300):
            found = multiply(x[:rows]).float()
            rounded = weight.floating and rows > KERNEL_MAX_ROWS_FP8
            assert (found - expected[:rows]).norm() <= (0.04 if rounded else 0.004) * expected[:rows].norm()
            if rows <= KERNEL_MAX_ROWS_FP8:
                assert torch.equal(found[:1], multiply(x[:1]).float())


def multiply_exactly(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return (x.double() @ weight.dequantized(torch.float32).double().t()).float()


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_replayed_quantized_steps_sample_the_same_tokens(quantize: str, tmp_path: Path) -> None:
    if quantize == "fp8" and not float8.stays_float8_on(torch.device(GPU)):
        pytest.skip("needs a GPU that multiplies 8-bit floats")
    plain = drawn("llama", "bfloat16", tmp_path / "plain", GPU, (0,), quantize=quantize)
    recorded = drawn("llama", "bfloat16", tmp_path / "recorded", GPU, (), quantize=quantize)
    for one, other in zip(plain, recorded, strict=True):
        assert one.ids[:1] == other.ids[:1]
        assert one.logprobs[:1] == pytest.approx(other.logprobs[:1], abs=0.1)
