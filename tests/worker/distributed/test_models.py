"""Every family of DecoderModel on several ranks against one rank, on torch's kernels or on our own."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.benchmarks.rank_processes import RankCall, Ranks, rank_group
from tests.families import STRUCTURES, in_depth, with_variants
from tests.models import model as make
from tests.models import vision_model
from tests.worker.batches import Row, make_batch
from tests.worker.cpu_kernels.available import VARIANTS, load_variant, our_kernels
from tests.worker.driving import Drawn, drive, make_engine
from tests.worker.loras import make_adapter
from tests.worker.quantization.checkpoints import Gptq, write
from tests.worker.test_decode_fast_path import CountingFastPath
from tests.worker.test_draft_heads import build, small_head, with_mtp
from tests.worker.test_fake_worker import slot, step
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.attention import build_attention
from tgi.worker.attention.image_states import Run
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.distributed.communicator import Communicator
from tgi.worker.engine.engine import PendingStep
from tgi.worker.lora.registry import load_adapters
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.families import FAMILIES
from tgi.worker.models.loader import build_model, read_model_spec

pytestmark = pytest.mark.slow

LENGTHS = (60, 1, 17)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with rank_group(2, __name__) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with rank_group(4, __name__) as ranks:
        yield ranks


def load(directory: Path, native: bool | str, dtype: str, quantize: str | None, call: RankCall | None) -> DecoderModel:
    """The model of a rank, or the whole one, on torch's kernels, on our own, or on the variant `native` of these."""
    if isinstance(native, str):
        kernels = load_variant(native, 1)
    else:
        kernels = our_kernels(read_model_spec(directory, dtype, quantize)) if native else None
    communicator = None if call is None else call.communicator(kernels)
    found = build_model(
        directory, dtype, "cpu", lambda stage, percent: None, False, kernels, quantize, communicator=communicator
    )
    assert isinstance(found, DecoderModel)
    return found


def logits(call: RankCall | None, *options: Any) -> list[torch.Tensor]:
    """Of three prompts in one batch, of each alone, and of a decode step after them; and the greedy logprobs."""
    model = load(*options, call)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]
    pages = [list(range(4 * row, 4 * row + 4)) for row in range(len(prompts))]
    attention = build_attention(model.kv, 20, CPU, state_slots=21)
    first = [Row(ids, 0, own) for ids, own in zip(prompts, pages, strict=True)]
    second = [Row([7], len(ids), own) for ids, own in zip(prompts, pages, strict=True)]
    with torch.inference_mode():
        together = model.forward(make_batch(first, attention.page_size), attention)
        decoded = model.forward(make_batch(second, attention.page_size), attention)
        model.forward(make_batch(first, attention.page_size), attention)  # for the state of recurrent layers
        greedy = model.forward_greedy(make_batch(second, attention.page_size), attention)
        assert greedy.ids.tolist() == decoded.argmax(-1).tolist()
        # The ranks exchange block maxima, which are those of the joined logits.
        joined = model.find_greedy_tokens(decoded)
        assert all(torch.equal(*both) for both in zip(greedy, joined, strict=True))
        alone = [model.forward(make_batch([row], attention.page_size), attention) for row in first]
    return [together, torch.cat(alone), decoded, greedy.logprobs]


def check(
    ranks: Ranks, directory: Path, native: bool | str, dtype: str = "float32", quantize: str | None = None
) -> None:
    """Asserts that all ranks have the same bits, alone and in a batch, and agree with one rank; in bfloat16, which
    rounds the parts of a sum, within the precision of that type."""
    options = directory, native, dtype, quantize
    found = ranks.call(f"{__name__}.logits", *options)
    for other in found[1:]:
        assert all(torch.equal(mine, its) for mine, its in zip(found[0], other, strict=True))
    together, alone, decoded, logprobs = found[0]
    assert torch.equal(together, alone)
    expected = logits(None, *options)
    tolerance = 1e-4 if dtype == "float32" else 0.25
    for mine, one in zip((together, alone, decoded), expected, strict=False):
        torch.testing.assert_close(mine.log_softmax(-1), one.log_softmax(-1), rtol=0, atol=tolerance)
    torch.testing.assert_close(logprobs, expected[3], rtol=0, atol=tolerance)


# The kinds of layers, and what is divided in other ways: one KV head, joined matrices, norms across heads, parallel
# blocks, shared and dense experts, and both groups of layers in one.
DIVIDED = (
    *("llama", "phi3", "gpt_bigcode", "gpt_neox", "falcon", "cohere2", "olmo2", "starcoder2", "minimax_m2"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "hunyuan_v1_moe", "deepseek_v2", "qwen3_5_moe_text", "olmo_hybrid"),
    *("nemotron_h", "falcon_h1", "granitemoehybrid"),
)


@pytest.mark.parametrize(("kind", "native"), with_variants(in_depth(FAMILIES, (*DIVIDED, *STRUCTURES)), (False, True)))
def test_families(kind: str, native: bool, two: Ranks) -> None:
    check(two, make(kind), native)


def exchanged(call: RankCall, directory: Path) -> tuple[list[int], int, bool]:
    """The bytes of each exchange of a greedy step of three rows on torch's kernels, and the number of sums."""
    model = load(directory, False, "float32", None, call)
    gathered, reduced = [], []
    gather, reduce = call.gloo.all_gather, call.gloo.all_reduce

    def all_gather(x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        gathered.append(len(x) * sum(widths) * x.itemsize)
        return gather(x, widths)

    def all_reduce(x: torch.Tensor) -> None:
        reduced.append(x.numel())
        reduce(x)

    call.gloo.all_gather, call.gloo.all_reduce = all_gather, all_reduce  # type: ignore[method-assign]
    try:
        attention = build_attention(model.kv, 20, CPU)
        rows = [Row([5, 6], 0, [row]) for row in range(3)]
        with torch.inference_mode():
            model.forward_greedy(make_batch(rows, attention.page_size), attention)
    finally:
        del call.gloo.all_gather, call.gloo.all_reduce
    return gathered, len(reduced), load(directory, True, "float32", None, call)._weights.embedding.partial


def test_greedy_rows_exchange_block_maxima_and_each_rank_has_the_embedding(two: Ranks) -> None:
    """Not so on our kernels if it is also the output head: it is divided then, and its results are added up."""
    for tie in (False, True):
        directory = make("llama", tie=tie, layers=2)
        for gathered, reduced, divided in two.call(f"{__name__}.exchanged", directory):
            assert gathered == [3 * 512 // 32 * 12]
            assert (reduced, divided) == (2 * 2, tie)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_four_ranks(native: bool, four: Ranks) -> None:
    """With 4 query heads and 2 KV heads, two ranks have the same KV head. Each computes both groups of Mamba2."""
    check(four, make("llama"), native)
    check(four, make("qwen3_moe"), native)
    check(four, make("falcon_h1"), native)


def seeing_images(call: RankCall | None, *options: Any) -> torch.Tensor:
    """Logits of a prompt whose last tokens see two images, next to one that sees none."""
    model = load(*options, call)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 500, (40,), generator=generator).tolist()
    features = [torch.randn(count, 64, generator=generator) for count in (20, 33)]
    states = model.image_states(4)
    assert states is not None
    images = states.find((b"a", b"b"), lambda: [states.project(one) for one in features])
    attention = build_attention(model.kv, 20, CPU)
    rows = [Row(ids[:17], 0, [1, 2]), Row(ids, 0, [3, 4, 5])]
    seen = states.seen([Run(40), Run(17, images, 53)])
    batch = make_batch(rows, attention.page_size)._replace(seen_images=seen)
    with torch.inference_mode():
        return model.forward(batch, attention)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_cross_attention_to_images(native: bool, two: Ranks) -> None:
    options = vision_model("mllama"), native, "float32", None
    found = two.call(f"{__name__}.seeing_images", *options)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], seeing_images(None, *options), rtol=0, atol=1e-4)


def test_a_lesser_instruction_set(two: Ranks) -> None:
    if (variant := "avx2 float32") not in VARIANTS:
        pytest.skip("a processor of another kind")
    check(two, make("llama"), variant)
    check(two, make("gemma2"), variant)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_an_uneven_division(native: bool, two: Ranks) -> None:
    """3 KV heads and 100 inner columns."""
    check(two, make("llama", heads=9, kv_heads=3, hidden=144, intermediate=100), native)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("tie", [False, True])
def test_a_vocabulary_that_ends_within_a_block(tie: bool, native: bool, two: Ranks, four: Ranks) -> None:
    directory = make("llama", vocab=530, tie=tie)
    check(two, directory, native)
    check(four, directory, native)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_of_equal_logits_the_lowest_id_is_taken(native: bool, two: Ranks, tmp_path: Path) -> None:
    """Tokens of both ranks have the same weight, and others its negative, so that one of the two kinds is highest."""
    directory = Path(shutil.copytree(make("llama"), tmp_path / "model"))
    weights = load_file(directory / "model.safetensors")
    head, chosen = torch.zeros_like(weights["lm_head.weight"]), weights["lm_head.weight"][100].clone()
    head[[7, 33, 290, 511]], head[[40, 255, 256, 270]] = chosen, -chosen
    save_file(weights | {"lm_head.weight": head}, directory / "model.safetensors", {"format": "pt"})
    check(two, directory, native)
    _, _, decoded, _ = logits(None, directory, native, "float32", None)
    assert set(decoded.argmax(-1).tolist()) <= {7, 40}


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_bfloat16(native: bool, two: Ranks) -> None:
    check(two, make("llama"), native, "bfloat16")


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_at_load(quantize: str, native: bool, two: Ranks) -> None:
    check(two, make("llama", hidden=128, intermediate=192), native, "float32", quantize)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_quantized_checkpoint(native: bool, two: Ranks, tmp_path: Path) -> None:
    written = write("llama", Gptq(bits=4, size=64), tmp_path, hidden=128, intermediate=192)
    check(two, written.directory, native)


class GlooCall(RankCall):
    """Ranks that compute on our kernels and share no memory."""

    def communicator(self, kernels: CpuKernels | None, own_core: bool = False) -> Communicator:
        """See RankCall."""
        return self.gloo


def logits_over_gloo(call: RankCall, *options: Any) -> list[torch.Tensor]:
    return logits(GlooCall(*call), *options)


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("gemma2", "bfloat16"), ("qwen3_moe", "float32")])
def test_gloo_and_shared_memory_give_the_same_bits(kind: str, dtype: str, two: Ranks) -> None:
    options = make(kind), True, dtype, None
    (shared, _), gloo = two.call(f"{__name__}.logits", *options), two.call(f"{__name__}.logits_over_gloo", *options)
    for found in gloo:
        assert all(torch.equal(*both) for both in zip(found, shared, strict=True))


def generated(call: RankCall | None, directory: Path, adapter: Path, native: bool) -> list[Drawn]:
    """Greedy, sampled and adapted requests in one engine, with drafts and prompts in chunks."""
    engine = make_engine(load(directory, native, "float32", None, call))
    load_adapters(engine.adapters, (("a", str(adapter)),))
    (digest,) = (one.digest for one in engine.adapters.loaded_adapters)
    adapted = SamplingParams(3, adapter="a", adapter_digest=digest)
    samplings = [SamplingParams(0), SamplingParams(1, do_sample=True, top_n=3), adapted]
    prompts = [[7, 9, 30, 41, 5], [8] * 20, [100, 3]]
    return drive(engine, prompts, 8, samplings, chunk=7, stagger=1, guess=lambda row, drawn: [7, 9])


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_sampling_adapters_and_drafts(native: bool, two: Ranks, tmp_path: Path) -> None:
    directory = make("llama")
    adapter = make_adapter(tmp_path / "adapter", directory)
    first, second = two.call(f"{__name__}.generated", directory, adapter, native)
    assert first == second
    expected = generated(None, directory, adapter, native)
    assert [one.ids for one in first] == [one.ids for one in expected]
    for mine, one in zip(first, expected, strict=True):
        assert mine.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def proposed(
    call: RankCall | None, directory: Path, eagle3: Path | None, native: bool
) -> tuple[list[int], list[Drawn]]:
    """Drafts of a head on a prompt, one after the other, and tokens of requests with its drafts."""
    served, head = build(directory, native, "float32", eagle3, call)
    engine, known = make_engine(served, draft=head), list(range(20, 52))
    engine.collect(engine.launch(step(1, [(0, 0, 32, 1)], [slot(0, known)], [(0, page) for page in range(3)])))
    pending = engine.launch(step(2, [(0, 32, 1, 1)], drafts=[6]))
    assert isinstance(pending, PendingStep)
    assert pending.drafts is not None
    drafts: list[int] = pending.drafts.ids.tolist()
    engine.collect(pending)
    samplings = [SamplingParams(0), SamplingParams(1, do_sample=True, top_n=3), SamplingParams(2)]
    prompts = [[7, 9, 30, 41, 5], [8] * 20, [100, 3]]
    return drafts, drive(engine, prompts, 12, samplings, chunk=7, stagger=1, guess=lambda row, drawn: 3)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_heads_that_draft(kind: str, native: bool, two: Ranks, tmp_path: Path) -> None:
    """Each rank has all of the head, and a part of the output head, and of an embedding that is tied to it."""
    directory, eagle3 = tmp_path / "model", None
    if kind == "llama":
        directory = make("llama", layers=6, tie=True)
        eagle3 = small_head(tmp_path / "head", directory, scored=512)
        remove_head(eagle3)
    else:
        with_mtp(kind, directory)
    first, second = two.call(f"{__name__}.proposed", directory, eagle3, native)
    assert first == second
    drafts, drawn = proposed(None, directory, eagle3, native)
    assert first[0] == drafts
    assert [one.ids for one in first[1]] == [one.ids for one in drawn]


def remove_head(eagle3: Path) -> None:
    """Has the head score by the output head of the model."""
    weights = load_file(eagle3 / "model.safetensors")
    save_file({name: one for name, one in weights.items() if "lm_head" not in name}, eagle3 / "model.safetensors")


def streaks(call: RankCall, directory: Path, quantize: str | None) -> tuple[list[Drawn], list[Drawn], int]:
    """Tokens of greedy and sampled requests, first by steps that build a batch, then by an engine with the decode fast
    path, and the number of its fast steps."""
    model = load(directory, True, "auto", quantize, call)
    batched, engine = make_engine(model, pages=64), make_engine(model, pages=64)
    CountingFastPath(batched, never=True)
    watched = CountingFastPath(engine)
    drawn: list[list[Drawn]] = [[], []]
    for samplings in ([SamplingParams(0)] * 3, [SamplingParams(0), SamplingParams(3, do_sample=True)]):
        prompts = [[7, 9, 30, 41, 5], [8] * 20, [100, 3]][: len(samplings)]
        for found, one in zip(drawn, (batched, engine), strict=True):
            found += drive(one, prompts, 40, samplings, 23, 12)
    return drawn[0], drawn[1], watched.fast_steps


@pytest.mark.parametrize(("kind", "tie", "quantize"), [("llama", True, "int4"), ("gemma2", False, None)])
def test_the_decode_fast_path(kind: str, tie: bool, quantize: str | None, two: Ranks) -> None:
    directory = make(kind, tie=tie, dtype="bfloat16", hidden=128, intermediate=192)
    first, second = two.call(f"{__name__}.streaks", directory, quantize)
    assert first == second
    batched, fast, steps = first
    assert fast == batched
    assert steps > 10
