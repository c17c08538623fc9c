"""Whole models on the CPU kernels: as close to float32 as on torch's kernels, and the same bits in any batch."""

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import model as make
from tests.worker.batches import Row, make_batch
from tests.worker.cpu_kernels.available import EMULATED, our_kernels
from tests.worker.driving import drive, make_engine
from tests.worker.test_families import AGAINST_TRANSFORMERS
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.attention import build_attention, page_size
from tgi.worker.attention.cpu_kernels import CpuKernelAttention
from tgi.worker.cpu_kernels import selection
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model, read_model_spec

pytestmark = pytest.mark.slow

LENGTHS = (90, 1, 17, 44)  # the windows of the models have 40 tokens
# Prompts: fewer have no steady median. With experts it takes more, since those of a token may differ between types.
COMPARED, COMPARED_OF_EXPERTS = 16, 48


@cache
def directory(kind: str) -> Path:
    return make(kind, hidden=128, intermediate=192, **{"layers": 1} if EMULATED else {})


def prompts(count: int = len(LENGTHS)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (LENGTHS[number % len(LENGTHS)] for number in range(count))
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in lengths]


def load(kind: str, dtype: str = "bfloat16", native: bool = False, path: Path | None = None) -> Model:
    path = path or directory(kind)
    kernels = our_kernels(read_model_spec(path, dtype)) if native else None
    return build_model(path, dtype, "cpu", lambda stage, percent: None, kernels=kernels)


def logprobs(model: Model, count: int = COMPARED) -> torch.Tensor:
    """Logits after each of enough prompts that their mean error varies little, [prompts, vocab]."""
    attention = build_attention(model.kv, 20 * count, model.device, state_slots=20 * count + 1)
    rows = [Row(ids, 0, list(range(20 * row, 20 * row + 20))) for row, ids in enumerate(prompts(count))]
    return model.forward(make_batch(rows, attention.page_size), attention).log_softmax(-1)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "bfloat16") for kind in FAMILIES),
        *((kind, dtype) for kind in ("llama", "gemma2", "mixtral") for dtype in ("float16", "float32")),
    ],
)
def test_a_model_is_as_exact_as_with_torch_and_independent_of_the_batch(kind: str, dtype: str) -> None:
    """As exact as with torch: the families that test_families.py does not compare with transformers on our kernels."""
    ours = load(kind, dtype, native=True)
    engine = make_engine(ours, pages=64)
    assert isinstance(engine._attention, CpuKernelAttention)
    if (kind, True) not in AGAINST_TRANSFORMERS or dtype != "bfloat16":
        count = COMPARED_OF_EXPERTS if read_model_spec(directory(kind), dtype).has_experts else COMPARED
        found, exact, torchs = (logprobs(model, count) for model in (ours, load(kind, "float32"), load(kind, dtype)))
        # Of each prompt. In some, a token's experts are others than in float32.
        off, allowed = ((one - exact).abs().mean(-1).median() for one in (found, torchs))
        assert off <= 1.25 * allowed + 1e-4
    # A batch of greedy rows only computes no logits.
    samplings = [SamplingParams(0), SamplingParams(7, temperature=0.8), SamplingParams(3, top_k=5), SamplingParams(0)]
    together = drive(engine, prompts(), 5, samplings, chunk=23, stagger=1)
    alone = [drive(engine, [ids], 5, [asked])[0] for ids, asked in zip(prompts(), samplings, strict=True)]
    assert together == alone


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_weights_of_16_bits_stay_so_in_a_float32_model(stored: str, tmp_path: Path) -> None:
    """The logits are those of the widened weights, bit for bit."""
    narrow = make("llama", dtype=stored)
    tensors = load_file(narrow / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(narrow / "config.json")
    found, wide = (load("llama", "float32", native=True, path=path) for path in (narrow, tmp_path))
    assert (found.footprint.bytes, wide.footprint.bytes) == tuple(size * found.footprint.numbers for size in (2, 4))
    assert torch.equal(logprobs(found), logprobs(wide))


def test_models_that_do_not_fit_are_left_to_torch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "require_instruction_set", lambda: None)
    recipe = read_model_spec(directory("llama"), "bfloat16")
    assert recipe.decoder is not None
    large = recipe._replace(decoder=dataclasses.replace(recipe.decoder, head_dim=578))
    assert select_cpu_kernels([recipe], "cuda")[0] is None
    for recipes, reason in (
        ([recipe, large], "head_dim of 578"),
        ([recipe, read_model_spec(directory("llama"), "float32")], "in different types: bfloat16, float32"),
        ([read_model_spec(make("persimmon"), "bfloat16")], "not computed by the built-in decoder"),
    ):
        kernels, told = select_cpu_kernels(recipes, "cpu")
        assert kernels is None
        assert reason in told
    assert not caplog.messages


def test_the_page_size_differs_from_torchs() -> None:
    """So the scheduler rejects a restarted worker with other kernels, whose results differ in the last bits."""
    one, other = load("llama", native=True), load("llama")
    assert page_size(one.kv, one.device) != page_size(other.kv, other.device)
