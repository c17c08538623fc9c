"""A model from a GGUF file computes the same bits with packed and with bfloat16 weights."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from scripts.make_gguf import write_gguf
from tests.models import model as make
from tests.worker.batches import Row, make_batch
from tests.worker.cpu_kernels.available import our_kernels
from tgi.hub.gguf import reader
from tgi.hub.gguf.convert import convert
from tgi.microkernel.errors import UserError
from tgi.worker.attention import build_attention
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.layers.linear import Linear
from tgi.worker.models.decoder import DecoderModel, layer_linears
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model, read_model_spec

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def mixed(name: str) -> str:
    return "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"


@cache
def imported(place: Path, kind: str, block: str, packed: bool) -> Path:
    source = place / f"{kind}-{block}.gguf"
    if not source.is_file():
        sizes = {"hidden": 256, "intermediate": 512} if block == "K" else {"hidden": 128, "intermediate": 192}
        write_gguf(make(kind, tie=kind == "llama", dtype="bfloat16", **sizes), source, mixed if block == "K" else block)
    directory = place / f"{kind}-{block}-{packed}"
    directory.mkdir()
    convert(source, directory, lambda *told: None, packed=packed)
    return directory


def load(directory: Path, dtype: str, native: bool) -> Model:
    kernels = our_kernels(read_model_spec(directory, dtype)) if native else None
    return build_model(directory, dtype, "cpu", lambda stage, percent: None, kernels=kernels)


def logits(model: Model, lengths: Sequence[int] = (90, 1, 17)) -> torch.Tensor:
    """Logits after some prompts of up to 100 tokens, [prompts, vocab]."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in lengths]
    attention = build_attention(model.kv, 20 * len(lengths) + 40, model.device)
    rows = [Row(ids, 0, list(range(20 * row, 20 * row + 20))) for row, ids in enumerate(prompts)]
    return model.forward(make_batch(rows, attention.page_size), attention)


@pytest.mark.parametrize("native", [True, False], ids=["ours", "torch"])
@pytest.mark.parametrize(
    ("kind", "block"), [("llama", "Q8_0"), ("llama", "Q4_0"), ("llama", "Q4_1"), ("mixtral", "Q4_1")]
)
def test_logits_match_the_dequantized_file(place: Path, kind: str, block: str, native: bool) -> None:
    """To the bit where weights are rounded to bfloat16 before the product; our FMA engine does not round them."""
    models = [load(imported(place, kind, block, way), "bfloat16", native) for way in (True, False)]
    packed, plain = map(logits, models)
    if models[0].kv.cpu_kernels is not None and not models[0].kv.cpu_kernels.dot_engine:
        assert (packed - plain).norm() < 0.03 * plain.norm()
    else:
        assert torch.equal(packed, plain)


@pytest.mark.parametrize("block", ["Q8_0", "Q4_0", "Q4_1", "BF16"])
def test_a_model_takes_hardly_more_memory_than_its_file(place: Path, block: str) -> None:
    """On our own kernels: the packed weights, of which the head is the embedding too, so nothing of the directory stays
    mapped, whatever tokens come."""
    source, directory = place / "large.gguf", place / f"large-{block}"
    write_gguf(make("llama", hidden=256, intermediate=2048, tie=True), source, block)
    stored = sum(len(tensor.data) for tensor in reader.read_gguf(source).tensors.values())
    directory.mkdir()
    convert(source, directory, lambda *told: None, packed=True)
    model = load(directory, "bfloat16", native=True)
    assert isinstance(model, DecoderModel)
    packed = sum(layer._weight.memory.nbytes for layer in all_linears(model))
    assert 0.95 * stored < packed < 1.02 * stored
    model._weights.embedding(torch.arange(model.vocab_size))
    assert mapped(directory) == 0


def all_linears(model: DecoderModel) -> list[Linear]:
    found = [model._weights.head]
    for layer in model._weights.layers:
        found += layer_linears(layer)
    return found


def mapped(directory: Path) -> int:
    """Bytes of the directory's files that are resident in this process."""
    found, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counted = str(directory) in line
        elif counted and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.parametrize("native", [True, False], ids=["ours", "torch"])
def test_mixed_k_types_lose_little_compared_with_bfloat16(place: Path, native: bool) -> None:
    """As such files are: values and what leads out of an MLP in Q6_K, the rest in Q4_K. What is taken for exact has
    the rounded weights of the plain import, and so favours that. Many prompts: of a few, what is off depends on
    single roundings; so the median."""
    packed, plain = (load(imported(place, "qwen2", "K", way), "bfloat16", native) for way in (True, False))
    exact, *others = (
        logits(model, range(1, 100, 4))
        for model in (load(imported(place, "qwen2", "K", False), "float32", False), packed, plain)
    )
    off, allowed = ((other - exact).norm(dim=-1).median() for other in others)
    assert 0 < off < 1.6 * allowed


def test_packed_weights_are_never_left_to_transformers(place: Path, tmp_path: Path) -> None:
    config = json.loads((imported(place, "llama", "Q8_0", True) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "tanh"}))
    with pytest.raises(UserError, match="runs through transformers"):
        read_model_spec(tmp_path, "auto")


def test_float32_uses_unrounded_weights(place: Path) -> None:
    exact, rounded = (logits(load(imported(place, "llama", "Q8_0", way), "float32", False)) for way in (True, False))
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() < 0.02 * rounded.norm()


@pytest.mark.parametrize("block", ["Q8_0", "K", "F16"])
def test_float16_is_closer_to_float32_than_bfloat16(place: Path, block: str) -> None:
    """On the kernels that are selected for each type on this machine."""
    directory = imported(place, "llama", block, True)
    exact, half, brain = (
        logits(load_selected(directory, dtype), range(1, 100, 8)) for dtype in ("float32", "float16", "bfloat16")
    )
    off, allowed = ((other - exact).norm(dim=-1).median() for other in (half, brain))
    assert 0 < 3 * off < allowed


def load_selected(directory: Path, dtype: str) -> Model:
    kernels, _ = select_cpu_kernels([read_model_spec(directory, dtype)], "cpu")
    return build_model(directory, dtype, "cpu", lambda stage, percent: None, kernels=kernels)
