"""Programs compute the same bits as their operations called one by one."""

from pathlib import Path

import pytest
import torch

from tests.families import STRUCTURES, in_depth
from tests.models import vision_model
from tests.worker.batches import Row, make_batch
from tests.worker.cpu_kernels.available import EMULATED, our_kernels
from tests.worker.cpu_kernels.test_models import directory, load
from tests.worker.loras import make_adapter
from tgi.worker.attention import build_attention
from tgi.worker.attention.image_states import Run
from tgi.worker.attention.interface import ForwardBatch, ImageRows
from tgi.worker.cpu_kernels.program import Program
from tgi.worker.lora.deltas import AdapterSpan
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.loader import build_model, read_model_spec


class Blocks:
    """A Reader of all tokens but the first, with the logits that it gets."""

    def __init__(self, tokens: int) -> None:
        self.blocks = torch.arange(1, tokens).split(13)
        self.logits: list[torch.Tensor] = []

    def read_logits(self, logits: torch.Tensor) -> None:
        self.logits.append(logits.clone())


def decoder(kind: str) -> DecoderModel:
    model = load(kind, native=True)
    assert isinstance(model, DecoderModel)
    return model


def without_program(model: DecoderModel) -> DecoderModel:
    """The same model without a program: it calls each operation."""
    plain = object.__new__(DecoderModel)
    plain.__dict__.update(model.__dict__, _program=None)
    return plain


def steps(page_size: int) -> list[ForwardBatch]:
    """Steps: prompts of many lengths in chunks, decode rows next to chunks, and a row that samples several tokens."""
    ids = torch.randint(3, 512, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    a, b, c = list(range(10)), list(range(10, 14)), list(range(20, 30))
    prompt, chunk = (21, 35) if EMULATED else (90, 210)
    first = [Row(ids[:prompt], 0, a), Row(ids[:1], 0, b), Row(ids[7:40], 0, c)]
    second = [Row(ids[prompt : prompt + 1], prompt, a), Row(ids[200:215], 1, b), Row(ids[40 : 40 + chunk], 33, c)]
    third = [
        *(Row(ids[prompt + 1 : prompt + 6], prompt + 1, a), Row(ids[215:216], 16, b)),
        Row(ids[40 + chunk : 41 + chunk], 33 + chunk, c),
    ]
    drafted = make_batch(third, page_size)._replace(logits_indices=torch.arange(7))
    return [make_batch(first, page_size), make_batch(second, page_size), drafted]


def run(model: DecoderModel, adapters: tuple[object, ...] = ()) -> list[torch.Tensor]:
    """All logits of these steps."""
    attention = build_attention(model.kv, 30, model.device, state_slots=31)
    found = []
    for batch in steps(attention.page_size):
        reader = Blocks(len(batch.tokens))
        bounds = batch.cu_query_lens.tolist()
        spans = [
            AdapterSpan(adapter, *bounds[row : row + 2]) for row, adapter in enumerate(adapters) if adapter is not None
        ]
        inputs = batch._replace(lora_spans=spans), attention
        states = [] if attention.state is None else attention.state.tensors
        before = [tensor.clone() for tensor in states]
        logits = model.forward(*inputs, reader)
        for tensor, values in zip(states, before, strict=True):  # which the step has changed
            tensor.copy_(values)
        best = model.forward_greedy(*inputs)
        assert model.kv.cpu_kernels is not None
        assert all(map(torch.equal, best, model.kv.cpu_kernels.greedy_tokens(logits)))
        found += [logits, *reader.logits]
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# The programs of all families compute what torch's operations do (test_models.py). Here: the usual layer, fused
# projections, no gate, parallel blocks, norms behind blocks, shared experts, two norms of the input, and STRUCTURES.
RECORDED = [kind for kind in FAMILIES if kind != "gemma3n_text"]  # whose streams no program has
DENSE = ("llama", "phi3", "starcoder2", "cohere", "olmo2", "qwen2_moe", "gpt_neox")


@pytest.mark.parametrize("kind", in_depth(RECORDED, (*DENSE, *STRUCTURES)))
def test_a_program_matches_its_operations(kind: str) -> None:
    model = decoder(kind)
    assert model._program is not None
    found = run(model)
    assert same(found, run(without_program(model)))
    assert EMULATED or same(found, run(model))  # with scratch buffers of an earlier step


@pytest.mark.parametrize("kind", ["mllama", "qwen3_vl"])
def test_a_program_with_images_matches_its_operations(kind: str) -> None:
    """Layers that attend to images, which some tokens see, and features that are added behind the first layers."""
    path, generator = vision_model(kind), torch.Generator().manual_seed(4)
    kernels = our_kernels(read_model_spec(path, "float32"))
    model = build_model(path, "float32", "cpu", lambda stage, percent: None, kernels=kernels)
    assert isinstance(model, DecoderModel)

    def features(count: int) -> torch.Tensor:
        return torch.randn(count, model.hidden_size, generator=generator)

    attention = build_attention(model.kv, 30, model.device)
    batch = steps(attention.page_size)[0]
    first, second, third = batch.query_lens_host
    if (states := model.image_states(3)) is not None:
        two = [states.project(features(count)) for count in (20, 43)]
        images = states.find((b"1", b"2"), lambda: two)
        runs = [Run(10), Run(first - 10, images, 20), Run(second), Run(third, images, 63)]
        shown = batch._replace(seen_images=states.seen(runs))
    else:
        rows = ImageRows(torch.tensor([3, 4, first + 2]), features(3), (features(3), features(3)))
        shown = batch._replace(images=rows)
    found = model.forward(shown, attention)
    assert model._image_program is not None
    assert not torch.equal(found, model.forward(batch, attention))
    assert torch.equal(found, without_program(model).forward(shown, attention))
    best = model.forward_greedy(shown, attention)
    assert all(map(torch.equal, best, kernels.greedy_tokens(found)))


# Fused projections, no gate, norms after the blocks, and the usual layer.
@pytest.mark.parametrize("kind", ["llama", "phi3", "starcoder2", "gemma2"])
def test_a_program_applies_adapters(kind: str, tmp_path: Path) -> None:
    model = decoder(kind)
    all_of_it = model.load_adapter(make_adapter(tmp_path / "a", directory(kind), 16, seed=1))
    projections = ("q_proj", "v_proj", "qkv_proj")
    some_of_it = model.load_adapter(make_adapter(tmp_path / "b", directory(kind), 8, projections, seed=2))
    plain = run(model)
    batches = ((all_of_it, None, some_of_it), (None, some_of_it, None), (all_of_it, all_of_it, all_of_it))
    for adapters in batches[: 1 if EMULATED else None]:  # the first has rows of all kinds
        found = run(model, adapters)
        assert not same(found, plain)
        assert same(found, run(without_program(model), adapters))


def test_the_clock_measures_each_operation() -> None:
    model = decoder("llama")
    program, attention = model._program, build_attention(model.kv, 30, model.device, state_slots=31)
    assert isinstance(program, Program)
    layers = len(model._config.layers)
    assert program.operations.count("attention") == layers
    assert program.operations.count("linear") == 4 * layers
    program.clock = torch.zeros(len(program.operations), dtype=torch.float64)
    model.forward(steps(attention.page_size)[0], attention)
    assert (program.clock > 0).all()
