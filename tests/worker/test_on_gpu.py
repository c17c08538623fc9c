"""Tests that need a GPU: our kernels, CUDA graphs, copies. Skipped without one."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import model, vision_model
from tests.worker import test_images as images
from tests.worker.batches import Row, make_batch, moved
from tests.worker.driving import Drawn, drive
from tests.worker.loras import make_adapter
from tests.worker.quantization.weights import random_float4, random_floats, random_weight, random_whole
from tests.worker.test_draft_heads import with_mtp
from tests.worker.test_sampling import sampling_batch
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.settings.table import MTP, Settings
from tgi.worker.activations import ACTIVATIONS, gated
from tgi.worker.attention import build_attention
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.attention.interface import KVCacheSpec
from tgi.worker.checkpoint import RandomCheckpoint
from tgi.worker.decoder_config import RopeConfig, RouterConfig
from tgi.worker.device_copies import StagedCopies
from tgi.worker.engine import cuda_graphs, startup
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.startup import WARMUP_SAMPLING_PARAMS, start_engine
from tgi.worker.gpu_kernels import flash_attention
from tgi.worker.gpu_kernels.attention_arguments import Rotation
from tgi.worker.gpu_kernels.grouped_matmul import choose_tile
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.lora_arguments import AdapterTiles, PlanShape, padded_rank, write_plan
from tgi.worker.gpu_kernels.selection import self_tested_kernels
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.head_logits import HeadLogits
from tgi.worker.layers.linear import KERNEL_MAX_ROWS_FP8, Linear, find_product
from tgi.worker.layers.mlp import GroupedExperts, Router
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.rotary import RotaryEmbedding
from tgi.worker.lora.deltas import AdapterSpan
from tgi.worker.models.loader import build_model
from tgi.worker.quantization import float8
from tgi.worker.quantization.weight import QuantizedWeight, Weight, as_plain
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
    pytest.mark.gpu,
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
    engine = started(kind, dtype, run, device, graphs, drafts, **more)
    recorded = device == GPU and graphs != (0,) and not more.get("disable_custom_kernels")
    assert bool(engine._decode_graphs and len(engine._decode_graphs)) == recorded
    guess = (lambda row, drawn: drafts) if drafts else None
    return drive(engine, PROMPTS, 12, [*SAMPLINGS, SamplingParams(0)], stagger=2, guess=guess)


def started(
    kind: str, dtype: str, run: Path, device: str, graphs: tuple[int, ...], drafts: int = 0, **more: Any
) -> TorchEngine:
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
    return start_engine(settings, lambda stage, percent: None)


@pytest.fixture(scope="module")
def gpu() -> GpuKernels:
    found, reason = self_tested_kernels(torch.device(GPU), torch.cuda.get_device_capability())
    assert found is not None, reason
    return found


@pytest.mark.parametrize("rank", [16, 64, 200])
@pytest.mark.parametrize("tokens", [1, 64, 256, 3000])
def test_adapters_of_a_captured_launch_are_what_torch_computes(gpu: GpuKernels, tokens: int, rank: int) -> None:
    """The plan changes from replay to replay: many programs wait for what others compute, or have nothing to do.

    These tests are the first of this file, since no interpreter shows what they do. It runs one program after the
    other; here programs wait while others of their grid have not begun (of 3000 tokens there are more than a GPU runs
    at a time, and products on another stream take their places), read sums of other multiprocessors as soon as the
    counters say that they are complete, and find counters of zero at each replay.
    """
    there, dtype, widths = torch.device(GPU), torch.bfloat16, (4096, 1024, 1000)
    columns = tuple((at, start, width) for at, (start, width) in enumerate(zip((0, 4096, 5120), widths, strict=True)))
    pairs = [
        [
            tuple(
                random_tensor(there, *shape, dtype=dtype, seed=7 * adapter + at) / 16
                for shape in ((4096, own), (own, width))
            )
            for at, width in enumerate(widths)
        ]
        for adapter, own in enumerate((8, rank, rank, 24))
    ]
    addresses = [[(a.data_ptr(), b.data_ptr(), len(b)) for a, b in of_one] for of_one in pairs]
    table, shape = torch.tensor(addresses, device=there)[:, None], PlanShape.of(tokens, tokens, dtype, False)
    x, y = random_tensor(there, tokens, 4096, dtype=dtype), random_tensor(there, tokens, 6120, dtype=dtype, seed=1)
    plan, found = torch.zeros(shape.length, dtype=torch.int64, device=there), y.clone()

    def run() -> None:
        found.copy_(y)
        gpu.add_lora(x, found, AdapterTiles.of(table, plan, shape, padded_rank(rank), dtype), 0, columns)

    run()
    replay = cuda_graphs.CudaGraphCapturer().capture(run)
    generator, other = np.random.default_rng(rank), torch.cuda.Stream()
    large = random_tensor(there, 4096, 4096, dtype=dtype)
    torch.cuda.synchronize()
    for turn in range(40):
        owners = generator.integers(-1, len(pairs), tokens) if turn % 4 else np.full(tokens, turn // 4 % 5 - 1)
        host = np.zeros(shape.length, np.int64)
        write_plan(host, owners, shape)
        plan.copy_(torch.from_numpy(host))
        with torch.cuda.stream(other):
            for _ in range(4 * (turn % 2)):
                torch.mm(large, large)
        replay()
        if turn % 8 < 2:
            expected, of_tokens = y.float(), torch.from_numpy(owners).to(there)
            for adapter, of_one in enumerate(pairs):
                own = of_tokens == adapter
                for (_, start, width), (a, b) in zip(columns, of_one, strict=True):
                    expected[own, start : start + width] += (x[own].float() @ a.float()).to(dtype).float() @ b.float()
            torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.05)


def test_kernels_pass_their_trials(gpu: GpuKernels) -> None:
    """Otherwise a worker does not use the kernels, and neither do the engines below."""
    assert gpu.capability == torch.cuda.get_device_capability()


@pytest.mark.parametrize("library", flash_attention.LIBRARIES, ids=lambda library: library.name)
def test_a_library_for_long_prompts_passes_its_trial(library: flash_attention.Library, gpu: GpuKernels) -> None:
    """Where it is installed and for this GPU. The log has the times of it and of our own kernel."""
    if gpu.capability[0] not in library.capabilities:
        pytest.skip(f"{library.name} is not for this GPU")
    chosen = flash_attention.PromptAttention(library, pytest.importorskip(library.module))
    flash_attention.self_test(chosen, flash_attention.Heads(32, 8, 128, 16, torch.bfloat16), torch.device(GPU))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_gpu_samples_the_same_tokens_as_a_cpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; with and without CUDA graphs, also of prompts and drafts, and with torch's kernels only."""
    monkeypatch.setattr(cuda_graphs, "USES_BEFORE_CAPTURE", 1)
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
    ("kind", "cache"),
    [
        ("llama", None),
        ("gemma2", None),
        ("qwen3_moe", None),
        ("deepseek_v3", None),
        ("lfm2", None),
        ("qwen3_5_text", None),
        ("mamba2", None),
        ("gemma4_text", None),
        ("gemma3n_text", None),
        ("llama", "fp8_e4m3fn"),
        ("deepseek_v3", "fp8_e4m3fn"),
        ("gemma2", "fp8_e5m2"),
    ],
)
def test_replayed_steps_sample_the_same_tokens(kind: str, cache: str | None, tmp_path: Path) -> None:
    """In bfloat16, with our kernels and torch's. Where two tokens have nearly equal logits, the texts may diverge."""
    plain = drawn(kind, "bfloat16", tmp_path / "plain", GPU, (0,), kv_cache_dtype=cache)
    recorded = drawn(kind, "bfloat16", tmp_path / "recorded", GPU, (), kv_cache_dtype=cache)
    for one, other in zip(plain, recorded, strict=True):
        same = next((at for at, pair in enumerate(zip(one.ids, other.ids, strict=True)) if len(set(pair)) > 1), 12)
        assert same > 0
        assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=0.1)


def test_a_layer_for_multi_token_prediction_is_replayed(tmp_path: Path) -> None:
    """The layer's graphs and those of its model, with experts, give the tokens of steps without graphs."""
    directory, found = with_mtp("deepseek_v3", tmp_path / "model"), []
    for graphs in ((), (0,)):
        run = tmp_path / f"run{len(graphs)}"
        run.mkdir()
        settings = Settings(
            model_dir=directory,
            run_dir=run,
            dtype="float32",
            device=GPU,
            cuda_graphs=graphs,
            draft_model_id=MTP,
            speculate=3,
            max_batch_size=8,
            max_total_tokens=1000,
            max_batch_total_tokens=8000,
        )
        engine = start_engine(settings, lambda stage, percent: None)
        assert engine._draft_runner is not None
        assert (engine._draft_runner.graphs is None) == bool(graphs)
        found.append(drive(engine, PROMPTS, 12, [*SAMPLINGS, SamplingParams(0)], stagger=2, guess=lambda row, drawn: 3))
    assert [one.ids for one in found[0]] == [one.ids for one in found[1]]


# A plain tower, features of inner layers and positions with three axes, tokens that see later ones, cross-attention.
@pytest.mark.parametrize("kind", ["llava", "qwen3_vl", "gemma3", "mllama"])
def test_steps_with_images_are_replayed(
    kind: str, gpu: GpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks with tokens of images next to decode rows, and decode steps behind them, as transformers computes."""
    monkeypatch.setattr(cuda_graphs, "USES_BEFORE_CAPTURE", 1)
    monkeypatch.setattr(cuda_graphs, "chunk_sizes", lambda most: [most])
    prompts = [images.prompt(kind, tmp_path, 2), images.prompt(kind, tmp_path, 1, 1)]
    capturer, directory = cuda_graphs.CudaGraphCapturer(), vision_model(kind)
    more = {"gpu": gpu, "capturer": capturer, "device": torch.device(GPU)}
    harness = images.Harness(directory, tmp_path, chunk=40, captured=40, **more)
    running = harness.start()
    answers = [running.add(one.ids, images.COUNT, one.images) for one in prompts]
    running.run()
    for served, one in zip(answers, prompts, strict=True):
        ids, logprobs = images.expected(directory, one)
        assert served.ids == ids
        assert served.logprobs == pytest.approx(logprobs, abs=0.01)
    assert harness.engine._decode_graphs is not None
    keys = harness.engine._decode_graphs._graphs
    assert any(key.seeing if kind == "mllama" else key.embedded for key in keys)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mamba2"])
def test_batch_invariant_rows_have_the_same_bits_in_any_batch(kind: str, tmp_path: Path) -> None:
    """Alone, in steps with others, behind prompts, in recorded steps and not."""
    engine = started(kind, "bfloat16", tmp_path / "run", GPU, (), batch_invariant=True)
    samplings = [SamplingParams(0), *SAMPLINGS[:2], SamplingParams(3, top_p=0.8), SamplingParams(0)]
    together = drive(engine, PROMPTS, 12, samplings, stagger=2)
    engine._decode_graphs = None
    for prompt, sampling, expected in zip(PROMPTS, samplings, together, strict=True):
        (alone,) = drive(engine, [prompt], 12, [sampling])
        assert (alone.ids, alone.logprobs) == (expected.ids, expected.logprobs)
    chunked = drive(engine, PROMPTS, 12, samplings, chunk=17)
    assert [(one.ids, one.logprobs) for one in chunked] == [(one.ids, one.logprobs) for one in together]


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
            rope, at = RopeConfig(128, {"rope_theta": 500000.0}, neighbours), torch.arange(tokens, device=there)
            rotary, expected = RotaryEmbedding(rope, there), qkv.clone()
            rotary.rotate(expected, 40, rotary.angles(at, tokens, 40))
            keys, values = (torch.zeros(188, 16, 8, 128, dtype=dtype, device=there) for _ in range(2))
            angles = RotaryEmbedding(rope, there, gpu).angles(at, tokens, 40)
            query = gpu.rotate_and_write_kv(qkv, keys, values, at, (1.0, 1.0), Rotation(*angles, neighbours))
            near(query, expected[:, :32])
            near(keys.flatten(0, 1)[:tokens], expected[:, 32:40])
            near(values.flatten(0, 1)[:tokens], qkv[:, 40:])
        left, right = random_tensor(there, tokens, 2 * 8192, dtype=dtype).chunk(2, 1)
        for then in ACTIVATIONS:
            near(gpu.gated_activation(torch.cat((left, right), 1), then), gated(then, left, right), roundings=2)


# Queries and contexts: decode rows, drafts, a chunk behind a context, a prompt.
ROWS = {"decode": [(1, 1), (1, 16), (1, 17), (1, 1000), (1, 5000)], "mixed": [(1, 700), (5, 90), (300, 1000), (65, 65)]}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "kept"),
    [
        (32, 8, 128, torch.bfloat16, None),
        (32, 8, 128, torch.bfloat16, torch.float8_e4m3fn),
        (14, 2, 64, torch.float16, torch.float8_e5m2),
        (16, 16, 256, torch.bfloat16, None),
        (16, 16, 256, torch.float32, None),
        (32, 1, 80, torch.float16, None),
        (16, 2, 512, torch.bfloat16, None),
        (8, 1, 512, torch.bfloat16, torch.float8_e4m3fn),
        (32, 1, 80, torch.bfloat16, torch.float8_e5m2),
        (14, 2, 64, torch.float32, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("rows", ROWS)
def test_attention_is_what_torch_computes(
    gpu: GpuKernels, rows: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kept: torch.dtype | None
) -> None:
    """Of short contexts and long ones, with windows and caps."""
    there = torch.device(GPU)
    tolerance = {torch.bfloat16: 1 / 128, torch.float16: 1 / 512, torch.float32: 1e-4}[dtype]
    pages = [-(-length // 16) for _, length in ROWS[rows]]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).split(pages)
    given = [Row([0] * n, length - n, own.tolist()) for (n, length), own in zip(ROWS[rows], order, strict=True)]
    batch = moved(make_batch(given, 16), GPU)
    qkv = random_tensor(there, len(batch.tokens), heads + 2 * kv_heads, head_dim, dtype=dtype)
    places = torch.arange(16 * sum(pages), device=there)
    known = random_tensor(there, len(places), heads + 2 * kv_heads, head_dim, dtype=dtype, seed=1)
    for window, cap in ((None, None), (400, None), (None, 5.0)):
        kv = KVCacheSpec(1, heads, kv_heads, head_dim, dtype, (window,), cap, stored_dtype=kept)
        found = []
        for kernels in (gpu, None):
            attention = CudaAttention(kv._replace(gpu_kernels=kernels), sum(pages), there)
            attention._caches[0].write(known, places, kv.layer_scales(0))
            found.append(attention.write_and_attend(attention.plan(batch), 0, qkv, 0.1))
        largest = float(found[1].abs().max())
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance * largest)


def test_real_vocabularies_are_sampled_as_torch_does(gpu: GpuKernels) -> None:
    """256 rows of 128,256 tokens with all mixtures of limits, and a row alone. A token may differ where two perturbed
    logits are within rounding."""
    there, rows, vocab = torch.device(GPU), 256, 128256
    limits: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 1000, "top_p": 0.7}]
    samplings = [
        SamplingParams(row, row % 6 > 0, temperature=(0.7, 1.0, 1.5)[row % 3], **limits[row % 5]) for row in range(rows)
    ]
    batch, noise = sampling_batch(samplings, [[1] * (row + 1) for row in range(rows)]), Noise(vocab, there)
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


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "qwen3", "cohere", "starcoder2", "qwen3_moe", "gpt_oss", "apertus", "deepseek_v3", "lfm2"),
        *("qwen3_next", "mamba2", "falcon_h1", "gemma4_text", "gemma3n_text"),
    ],
)
def test_models_with_our_kernels_are_what_torch_computes(gpu: GpuKernels, kind: str) -> None:
    batch = make_batch([Row(list(range(5, 75)), 0, range(8)), Row([8, 30], 0, range(8, 16))])
    there = moved(batch, GPU)
    found = []
    for ours in (gpu, None):
        made = build_model(model(kind), "float32", GPU, lambda stage, percent: None, gpu=ours)
        found.append(made.forward(there, build_attention(made.kv, 20, made.device, 10)).log_softmax(-1))
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
    """A row's bits do not depend on the others of a launch with the same tile."""
    there = torch.device(GPU)
    forms = [random_whole(4112, 4096, 8), random_whole(1040, 4096, 4), random_weight(4112, 4096, 4, 128, True)]
    forms += [random_weight(1040, 4096, 4, 32, False), random_weight(1040, 4096, 8, 16, True)]
    forms += [random_float4(4112, 4096, 32), random_float4(1040, 4096, 16)]
    floats = float8.stays_float8_on(there)
    if floats:
        assert float8.has_float8_matmul(there)
        forms += [random_floats(4112, 4096), random_floats(1040, 14336)]
        forms.append(forms[-1]._replace(scales=forms[-1].scales.repeat(1, 112)))  # of blocks of 128 inputs
    for weight in (form.to(there) for form in forms):
        outputs, inputs = weight.shape
        multiply = find_product(weight, random_tensor(there, outputs, dtype=dtype), dtype, gpu)
        x = random_tensor(there, 300, inputs, dtype=dtype, seed=1)
        expected = multiply_exactly(x, weight) + random_tensor(there, outputs)
        for rows in (1, 5, 16, 17, 64, 300):
            found = multiply(x[:rows]).float()
            rounded = weight.floating and weight.scales.shape[1] == 1 and rows > KERNEL_MAX_ROWS_FP8
            assert (found - expected[:rows]).norm() <= (0.04 if rounded else 0.004) * expected[:rows].norm()
            if rows <= KERNEL_MAX_ROWS_FP8:
                assert torch.equal(found[:1], multiply(x[:1]).float())


def multiply_exactly(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return (x.double() @ weight.dequantized(torch.float32).double().t()).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "int8", "int4", "int4 in groups", "mxfp4", "fp8"])
def test_experts_are_what_torch_computes(gpu: GpuKernels, kind: str, dtype: torch.dtype) -> None:
    """With real sizes, for tiles of all sizes. A token's bits depend on its own experts alone."""
    there, experts, hidden, inner = torch.device(GPU), 16, 1024, 384
    if kind == "fp8" and not float8.stays_float8_on(there):
        pytest.skip("needs a GPU that multiplies 8-bit floats")

    def made(outputs: int, inputs: int) -> Weight:
        if kind == "fp8":
            return random_floats(outputs, inputs).to(there)
        if kind == "mxfp4":
            return random_float4(outputs, inputs, 32).to(there)
        if kind == "plain":
            return random_tensor(there, outputs, inputs, dtype=dtype) / inputs**0.5
        weight = random_weight(outputs, inputs, 4, 128, True) if "groups" in kind else None
        return (weight or random_whole(outputs, inputs, int(kind[3:4]))).to(there)

    up, down = made(experts * 2 * inner, hidden), made(experts * hidden, inner)
    router = random_tensor(there, experts, hidden, dtype=dtype) / 32
    chooser = Router(Linear(router, gpu=gpu), None, RouterConfig(normalized=True), 2)
    mixture = GroupedExperts(chooser, up, down, "silu", True, None, False, gpu)
    wide = [as_plain(weight, torch.float32).chunk(experts) for weight in (up, down)]
    for tokens in (1, 30, 200, 3000):
        x = random_tensor(there, tokens, hidden, dtype=dtype, seed=tokens)
        found = mixture(x, tokens)
        weights, chosen = mixture.router.linear(x).float().softmax(-1).topk(2)
        expected = torch.zeros(tokens, hidden, device=there)
        for expert, (first, last) in enumerate(zip(*wide, strict=True)):
            rows, choice = (chosen == expert).nonzero(as_tuple=True)
            left, right = (x[rows].float() @ first.t()).chunk(2, 1)
            part = (ACTIVATIONS["silu"](left) * right).to(dtype).float() @ last.t()
            expected.index_add_(0, rows, part * (weights / weights.sum(1, keepdim=True))[rows, choice, None])
        rounded = choose_tile(up, dtype, 2 * tokens, experts).floats
        assert (found.float() - expected).norm() <= (0.06 if rounded else 0.006) * expected.norm()
        other = torch.cat([x[:1], -x[1:].flip(0)])
        assert torch.equal(mixture(other, tokens)[0], found[0])


@pytest.mark.parametrize(("kind", "quantize"), [("llama", "int4"), ("llama", "fp8"), ("qwen3_moe", "int4")])
def test_replayed_quantized_steps_sample_the_same_tokens(kind: str, quantize: str, tmp_path: Path) -> None:
    if quantize == "fp8" and not float8.stays_float8_on(torch.device(GPU)):
        pytest.skip("needs a GPU that multiplies 8-bit floats")
    plain = drawn(kind, "bfloat16", tmp_path / "plain", GPU, (0,), quantize=quantize)
    recorded = drawn(kind, "bfloat16", tmp_path / "recorded", GPU, (), quantize=quantize)
    for one, other in zip(plain, recorded, strict=True):
        assert one.ids[:1] == other.ids[:1]
        assert one.logprobs[:1] == pytest.approx(other.logprobs[:1], abs=0.1)


def test_a_restarted_worker_does_not_measure_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same limits; another deployment measures."""
    settings = Settings(model_dir=model("llama"), run_dir=tmp_path, device=GPU, max_batch_size=8, max_total_tokens=500)
    first = start_engine(settings, lambda stage, percent: None).limits
    monkeypatch.setattr(startup, "_measure_step", None)
    assert start_engine(settings, lambda stage, percent: None).limits == first
    (tmp_path / startup.PAGES_FILE).unlink()
    with pytest.raises(TypeError):
        start_engine(settings, lambda stage, percent: None)


def test_weights_are_copied_through_pinned_memory() -> None:
    copies, values = StagedCopies(torch.device(GPU), size=1 << 16), torch.randn(1000, 333).bfloat16()
    assert all(torch.equal(copies.copy(one).cpu(), one) for one in (values, values[:, 1:], values))
    dummy = RandomCheckpoint(torch.device(GPU))
    made = [dummy.tensor("a.weight", 64, 128) for _ in range(2)]
    assert made[0].is_cuda
    assert torch.equal(*made)
