"""Whole engines with the GPU kernels' attention, in Triton's interpreter, compared with torch's attention."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import model as make
from tests.models import vision_model
from tests.worker.batches import Row, make_batch, moved
from tests.worker.driving import Drawn, drive, make_engine
from tests.worker.gpu_kernels.count_operations import counted
from tests.worker.gpu_kernels.test_cuda_graphs import Again, Tapes
from tests.worker.loras import ALL, make_adapter
from tests.worker.test_images import COUNT, Harness, agrees, expected, prompt
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.attention.interface import KVCacheSpec
from tgi.worker.engine import cuda_graphs
from tgi.worker.engine.cuda_graphs import GraphKey
from tgi.worker.engine.engine import GraphCaptureConfig
from tgi.worker.engine.startup import WARMUP_SAMPLING_PARAMS, warm_up
from tgi.worker.gpu_kernels import paged_attention
from tgi.worker.gpu_kernels.attention_arguments import HeadTransform, Rotation
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.lora.registry import load_adapters
from tgi.worker.models.loader import build_model

CPU, PAGES = torch.device("cpu"), 24
GPU = GpuKernels((8, 0))
PROMPTS = [[5, 9, 3], [7] * 15, [1]]  # pages have 16 tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_split"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]


def drawn(kind: str, stored: torch.dtype | None, gpu: GpuKernels | None) -> list[Drawn]:
    """Rows come one by one, cross pages and end. With our kernels, steps are recorded and have four rows."""
    model = build_model(make(kind, layers=2), "float32", "cpu", lambda stage, percent: None)
    attention = CudaAttention(model.kv._replace(gpu_kernels=gpu, stored_dtype=stored), PAGES, CPU)
    recording = None if gpu is None else GraphCaptureConfig(Again(), attention, [4])
    engine = make_engine(model, slots=4, pages=PAGES, attention=attention, recording=recording)
    assert engine.capture_decode_graphs() == (gpu is not None)  # one graph serves contexts of every length
    return drive(
        engine, PROMPTS, 3, [SamplingParams(0), SamplingParams(1, do_sample=True), SamplingParams(0)], stagger=1
    )


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("gemma2", None),  # sliding windows and softcap
        # A cache of 8 bits holds other numbers wherever two results are rounded to different sides, and one unit in the
        # last place of bfloat16 is enough for that. float32 leaves such differences no room.
        ("llama", torch.float8_e4m3fn),
    ],
)
def test_an_engine_generates_the_tokens_of_torch(
    kind: str, stored: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "MAX_SPLITS", 2)
    for ours, torchs in zip(drawn(kind, stored, GPU), drawn(kind, stored, None), strict=True):
        assert ours.ids == torchs.ids
        assert ours.logprobs == pytest.approx(torchs.logprobs, abs=1e-4)


def test_an_engine_samples_from_the_logits_of_the_head_as_torch_does() -> None:
    """With all our kernels, in steps that are recorded and not, for greedy rows, limits and all logits processors;
    compared with torch's sampling from float32 logits. gemma2 caps its logits."""
    found = []
    samplings = [SamplingParams(0), SamplingParams(1, True, top_p=0.8, temperature=0.7), WARMUP_SAMPLING_PARAMS]
    samplings[2] = samplings[2]._replace(watermark=False)
    for gpu in (GPU, None):
        model = build_model(make("gemma2", layers=2), "bfloat16", "cpu", lambda stage, percent: None, gpu=GPU)
        attention = CudaAttention(model.kv, PAGES, CPU)
        model.kv = model.kv._replace(gpu_kernels=gpu)  # of the engine and the head alone
        recording = GraphCaptureConfig(Again(), attention, [4])
        engine = make_engine(model, slots=4, pages=PAGES, attention=attention, recording=recording)
        engine.capture_decode_graphs()
        found.append(drive(engine, [[5, 9, 3], [7] * 29, [1]], 2, samplings, stagger=1))
    for ours, torchs in zip(*found, strict=True):
        assert ours.ids == torchs.ids
        assert ours.logprobs == pytest.approx(torchs.logprobs, abs=1e-4)


@pytest.mark.parametrize("drafts", [1, 3])
def test_warm_up_covers_the_draft_model(drafts: int) -> None:
    """Including single tokens, which need a kernel of their own."""
    model, seen, gpu = (
        build_model(make("llama", layers=1), "float32", "cpu", lambda stage, percent: None),
        [],
        GpuKernels((8, 0)),
    )
    attend = gpu.paged_attention

    def counting(*arguments: Any, **named: Any) -> None:
        seen.append(arguments)
        attend(*arguments, **named)

    gpu.paged_attention = counting  # type: ignore[assignment]
    engine = make_engine(model, slots=2, pages=PAGES, draft=model)
    assert engine._draft_runner is not None
    engine._draft_runner._attention = CudaAttention(model.kv._replace(gpu_kernels=gpu), PAGES, CPU)
    warm_up(engine, engine.limits, 2, 20, drafts, True)
    assert seen


def test_attention_of_a_layer_takes_two_launches() -> None:
    """And no copies, for any type of cache."""
    there = torch.device("meta")
    kv = KVCacheSpec(1, 4, 2, 64, torch.bfloat16, gpu_kernels=GPU, stored_dtype=torch.float8_e5m2)
    attention = CudaAttention(kv, PAGES, there)
    batch = make_batch([Row([5], 3, [0]), Row([8], 9, [1])])
    plan = attention.plan(moved(batch, "meta"))
    qkv = torch.empty(2, 8, 64, dtype=torch.bfloat16, device=there)
    transform = HeadTransform(Rotation(torch.empty(9, 2, 64, device=there), batch.positions, False))
    assert counted(lambda: attention.transform_and_attend(plan, 0, qkv, 0.1, transform)) == {
        "_rotate_and_write_kv": 1,
        "_attend": 1,
    }


@pytest.mark.parametrize("kind", ["deepseek_v2", "lfm2", "qwen3_5_text", "mamba2"])
def test_latent_and_recurrent_layers_generate_the_tokens_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one chunk and of several, decode rows next to them, and right and wrong drafts, in steps that are
    recorded and padded. On torch's kernels no step is recorded."""
    monkeypatch.setattr(cuda_graphs, "USES_BEFORE_CAPTURE", 1)
    monkeypatch.setattr(cuda_graphs, "chunk_sizes", lambda most: [most])
    found: list[list[Drawn]] = []
    prompts, samplings = [[5, 9, 3], [7] * 20], [SamplingParams(0)] * 2
    options: dict[str, Any] = {} if kind == "lfm2" else {"layers": 1 if kind == "mamba2" else 2}
    if kind == "qwen3_5_text":
        heads = ("linear_num_key_heads", 1), ("linear_num_value_heads", 2)
        options["more"] = (("layer_types", ["linear_attention", "full_attention"]), *heads)
    for gpu in (GPU, None):
        model = build_model(make(kind, **options), "float32", "cpu", lambda stage, percent: None, gpu=gpu)
        assert (model.cuda_graph_obstacle is None) == (gpu is not None)
        attention, tapes = CudaAttention(model.kv, PAGES, CPU), Tapes()
        recording = GraphCaptureConfig(tapes, attention, [4], 19) if gpu is not None else None
        engine = make_engine(model, slots=4, pages=PAGES, attention=attention, recording=recording)
        assert (engine.capture_decode_graphs() > 0) == (gpu is not None)
        found.append(drive(engine, prompts, 3, samplings, chunk=18, stagger=1))
        if gpu is not None:
            assert engine._decode_graphs is not None
            drafted = drive(engine, prompts, 3, samplings, guess=lambda at, drawn: [found[0][at].ids[drawn] + at])
            assert [one.ids for one in drafted] == [one.ids for one in found[0]]
            assert {(key.tokens, key.drafted) for key in engine._decode_graphs._graphs} == {
                (0, False), (19, False), (4, True),
            }  # fmt: skip
    for ours, torchs in zip(*found, strict=True):
        assert ours.ids == torchs.ids
        assert ours.logprobs == pytest.approx(torchs.logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["qwen2_vl", "mllama"])
def test_steps_behind_images_are_recorded(kind: str, tmp_path: Path) -> None:
    """Their rotary positions are shifted, or their layers attend to images. The slots' next requests have another image
    and none."""
    directory, tapes = vision_model(kind), Tapes()
    prompts = [prompt(kind, tmp_path, 1, 1), prompt(kind, tmp_path, 2)]
    harness = Harness(directory, tmp_path, gpu=GPU, capturer=tapes)
    running = harness.start()
    for order in (prompts, prompts[::-1]):
        played = tapes.played
        answers = [running.add(one.ids, COUNT, one.images) for one in order]
        running.run()
        for served, one in zip(answers, order, strict=True):
            agrees(served, expected(directory, one))
        assert tapes.played > played + 1
    assert harness.engine._decode_graphs is not None
    crosses = harness.images.tower.family.crosses
    assert {key.seeing for key in harness.engine._decode_graphs._graphs} == {False, crosses}


# Features of inner layers and positions with three axes; tokens that see later ones.
@pytest.mark.parametrize(("kind", "chunk"), [("qwen3_vl", 24), ("gemma3", 40)])
def test_chunks_with_images_are_recorded(
    kind: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to decode rows, and alone."""
    monkeypatch.setattr(cuda_graphs, "USES_BEFORE_CAPTURE", 1)
    monkeypatch.setattr(cuda_graphs, "chunk_sizes", lambda most: [most])
    directory = vision_model(kind)
    prompts = [prompt(kind, tmp_path, 2), prompt(kind, tmp_path, 1, 1)]
    harness = Harness(directory, tmp_path, gpu=GPU, capturer=Tapes(), chunk=chunk, captured=chunk)
    running = harness.start()
    answers = [running.add(one.ids, COUNT, one.images) for one in prompts]
    running.run()
    for served, one in zip(answers, prompts, strict=True):
        agrees(served, expected(directory, one))
    assert harness.engine._decode_graphs is not None
    assert {key.embedded for key in harness.engine._decode_graphs._graphs} == {False, True}


def test_steps_with_adapters_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of two ranks and none in one step, prompts or not, whose slots later rows with another adapter and
    without one get. Compared with torch's products of each adapter."""
    monkeypatch.setattr(cuda_graphs, "USES_BEFORE_CAPTURE", 1)
    monkeypatch.setattr(cuda_graphs, "chunk_sizes", lambda most: [most])
    directory, found = make("llama", layers=1), []
    for gpu in (GPU, None):
        model = build_model(directory, "float32", "cpu", lambda stage, percent: None, gpu=gpu)
        attention, tapes = CudaAttention(model.kv, PAGES, CPU), Tapes()
        recording = GraphCaptureConfig(tapes, attention, [3], 28) if gpu is not None else None
        engine = make_engine(model, slots=3, pages=PAGES, attention=attention, recording=recording)
        for name, rank, targets in (("a", 4, ALL), ("b", 20, ("q_proj", "v_proj"))):
            path = make_adapter(tmp_path / name, directory, rank, targets, seed=rank)
            load_adapters(engine.adapters, ((name, str(path)),))
        digests = {one.name: one.digest for one in engine.adapters.loaded_adapters}
        assert (engine.capture_decode_graphs() > 0) == (gpu is not None)
        for names in (("a", None, "b"), (None, "b", "a")):
            samplings = [SamplingParams(0, adapter=name or "", adapter_digest=digests.get(name, b"")) for name in names]
            found.append(drive(engine, [[5, 9, 3], [7] * 20, [1, 2]], 3, samplings))
        if gpu is not None:
            assert engine._decode_graphs is not None
            prompts = [GraphKey(rows, rank, 28, 28) for rows, rank in ((0, 32), (3, 0))]
            assert sorted(engine._decode_graphs._graphs) == [prompts[0], GraphKey(3), prompts[1], GraphKey(3, 32)]
            assert tapes.played == 4 + 2 * 3  # each once to be checked, and the steps
    for ours, torchs in zip(found[0] + found[1], found[2] + found[3], strict=True):
        assert ours.ids == torchs.ids
        assert ours.logprobs == pytest.approx(torchs.logprobs, abs=1e-4)
