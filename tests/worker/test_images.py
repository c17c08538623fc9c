"""Every vision family against transformers in float32: alone, batched, chunked, cached, preempted and resumed."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.make_vision_model import IMAGE_TOKEN_ID
from tests.families import in_depth, with_variants
from tests.models import vision_model as make
from tests.references import reference
from tests.worker.batches import PAGE
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.scheduled import ScheduledEngine, Served
from tgi.hub.vision_towers import VISION_FAMILIES, vision_family
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.kv_groups import ONE_FULL_GROUP, GroupKind, KVGroup, paged_groups
from tgi.microkernel.messages.protocol import MAX_DIVIDED_IMAGES, DeploymentLimits, ImageSegment
from tgi.microkernel.settings.table import Settings
from tgi.worker.attention import build_attention
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.engine.cuda_graphs import GraphCapturer
from tgi.worker.engine.engine import GraphCaptureConfig, TorchEngine
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers.rotary import inverse_frequencies
from tgi.worker.models.config_reader import read_config, read_decoder_config
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model, read_model_spec
from tgi.worker.planning.deployment_plan import read_planned_model
from tgi.worker.vision.image_file import ImageFiles
from tgi.worker.vision.prompt_images import PromptImages
from tgi.worker.vision.rope_positions import PlacedGrid, rope_positions
from tgi.worker.vision.tower import VisionTower, load_tower

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
COUNT = 6  # generated tokens


class Picture(NamedTuple):
    """What a family's processor returns for an image: its tensors, and the ids that stand for it."""

    tensors: dict[str, Tensor]
    ids: list[int]


MARK = 7  # an id between image tokens, as those that mark rows and tiles


def picture(number: int, rows: Sequence[int], *shape: int, **more: Any) -> Picture:
    """Pixels of this shape, and a mark before each row of image tokens."""
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    tensors = {
        name: torch.ones(value) if isinstance(value, tuple) else torch.tensor(value) for name, value in more.items()
    }
    marked = len(rows) > 1
    ids = [token for row in rows for token in [MARK] * marked + [IMAGE_TOKEN_ID] * row]
    return Picture({"pixel_values": pixels, **tensors}, ids)


def grid(number: int) -> Picture:
    """Two by three tokens, or three by two, of four patches each."""
    rows, columns = ((4, 6), (6, 4))[number % 2]
    return picture(number, [6], 24, 3 * 2 * 14 * 14, image_grid_thw=[[1, rows, columns]])


def tiles(number: int) -> Picture:
    return picture(number, [52], 1, 3, 3, 56, 56, image_sizes=[[56, 112]])


def masked(number: int) -> Picture:
    return picture(number, [4, 4, 4], 1, 3, 3, 56, 56, pixel_attention_mask=(1, 3, 56, 56))


def patches(number: int) -> Picture:
    """Six by six patches with their places, and four that pad."""
    places = [[x, y] for y in range(6) for x in range(6)] + 4 * [[-1, -1]]
    return picture(number, [9], 1, 40, 3 * 4 * 4, image_position_ids=[places])


def merged_patches(number: int) -> Picture:
    """Three by three, and three that pad."""
    places = [[x, y] for y in range(3) for x in range(3)] + 3 * [[-1, -1]]
    return picture(number, [9], 1, 12, 3 * 8 * 8, image_position_ids=[places])


def patch_tiles(number: int) -> Picture:
    """Four by four patches, and four by two; a token has four."""
    mask, shapes = [16 * [1], 8 * [1] + 8 * [0]], [[4, 4], [4, 2]]
    return picture(number, [4, 2], 2, 16, 3 * 4 * 4, pixel_attention_mask=mask, spatial_shapes=shapes)


def padded_tiles(number: int) -> Picture:
    """Two tiles side by side, or one, and others that pad."""
    used = 1 + number % 2
    mask = [[[1] * used + [0] * (4 - used)]]
    return picture(number, [1], 1, 1, 4, 3, 56, 56, aspect_ratio_ids=[[used]], aspect_ratio_mask=mask)


# What the processors of the families return for picture `number`.
PICTURES: dict[str, Callable[[int], Picture]] = {
    "gemma3": lambda number: picture(number, [9], 1, 3, 84, 84),
    "gemma4": patches,
    "gemma4_unified": merged_patches,
    "glm4v": grid,
    "glm4v_moe": grid,
    "idefics2": lambda number: picture(number, [6], 1, 1, 3, 56, 56, pixel_attention_mask=(1, 1, 56, 56)),
    "idefics3": masked,
    "internvl": lambda number: picture(number, [8], 2, 3, 56, 56),
    "lfm2_vl": patch_tiles,
    "llama4": lambda number: picture(number, [4, 4], 2, 3, 56, 56),
    "llava": lambda number: picture(number, [16], 1, 3, 56, 56),
    "llava_next": tiles,
    "llava_onevision": tiles,
    "mistral3": lambda number: picture(number, [3, 3], 1, 3, 56, 84, image_sizes=[[56, 84]]),
    "mllama": padded_tiles,
    "paligemma": lambda number: picture(number, [16], 1, 3, 56, 56),
    "pixtral": lambda number: picture(number, [3, 3], 1, 3, 28, 42, image_sizes=[[28, 42]]),
    "qwen2_5_vl": grid,
    "qwen2_vl": grid,
    "qwen3_5": grid,
    "qwen3_5_moe": grid,
    "qwen3_vl": grid,
    "qwen3_vl_moe": grid,
    "smolvlm": masked,
}
assert PICTURES.keys() == VISION_FAMILIES.keys() | {"pixtral"}


class Prompt(NamedTuple):
    """Ids with images in them."""

    ids: list[int]
    images: list[ImageSegment]
    pictures: list[Picture]


RECURRENT = ("qwen3_5", "lfm2_vl")  # begin the kinds with recurrent layers


def prompt(kind: str, media: Path, seed: int, *numbers: int, after: int = 0) -> Prompt:
    """Text, then for each of the pictures `numbers` the picture and more text, which `after` makes another. The last
    page has room for four tokens. States of recurrent layers are kept of longer prompts only."""

    def text(length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        found: list[int] = torch.randint(8, 400, (length,), generator=generator).tolist()
        return found

    ids, images, pictures = text(149 if kind.startswith(RECURRENT) else 21, seed), [], []
    for at, number in enumerate(numbers):
        shown = PICTURES[kind](number)
        digest = hashlib.blake2b(b"%d" % number, digest_size=16).digest()
        name = f"{digest.hex()}.safetensors"
        save_file(shown.tensors, media / name)
        images.append(ImageSegment(len(ids), len(shown.ids), digest, name))
        pictures.append(shown)
        ids += shown.ids + text(19, 100 * seed + at + after)
    return Prompt(ids + text((28 - len(ids)) % 32, seed + after), images, pictures)


# What transformers calls a column that is 1 for image tokens.
TYPES = {kind: "mm_token_type_ids" for kind, family in VISION_FAMILIES.items() if family.rope} | {
    "gemma3": "token_type_ids",
    "gemma4": "mm_token_type_ids",
    "gemma4_unified": "mm_token_type_ids",
    "paligemma": "token_type_ids",
}


def greedy_tokens(
    directory: Path, ids: list[int], images: bool, tensors: dict[str, Tensor], types: str | None, count: int, image: int
) -> tuple[list[int], list[float]]:
    """Tokens of transformers and their logprobs, each from the whole text before it. `types`: the name of the column
    that is 1 for image tokens, which have the id `image`."""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    text, found, logprobs = list(ids), [], []
    sees: list[Tensor] = []  # of mllama: which tokens see images
    for name, module in model.named_modules():
        if name.endswith("cross_attn") and images:  # which transformers computes for other tokens, too: issue 39379
            module.register_forward_hook(lambda module, inputs, result: (sees[-1] * result[0], *result[1:]))
    for _ in range(count):
        column = torch.tensor([[int(token == image) for token in text]])
        if model.config.model_type == "paligemma":  # 0 for tokens that see each other
            column = torch.ones_like(column)
            column[:, : len(ids) * images] = 0
        more = {} if types is None else {types: column}
        if model.config.model_type == "mllama" and images:
            from transformers.models.mllama import processing_mllama as masks

            used = tensors["aspect_ratio_mask"].sum(-1).tolist()
            ranges = masks.get_cross_attention_token_mask(text, image)
            seen = masks.convert_sparse_cross_attention_mask_to_dense([ranges], used, 4, len(text))
            more["cross_attention_mask"] = torch.from_numpy(seen)
            sees.append(more["cross_attention_mask"].amax((2, 3))[..., None])
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text]), use_cache=False, **tensors, **more).logits[0, -1]
        row = logits.float().log_softmax(-1)
        found.append(int(row.argmax()))
        logprobs.append(float(row.max()))
        text.append(found[-1])
    return found, logprobs


def expected(directory: Path, given: Prompt) -> tuple[list[int], list[float]]:
    kind = str(json.loads((directory / "config.json").read_text())["model_type"])
    names = given.pictures[0].tensors.keys() if given.pictures else ()
    along = 1 if kind.startswith(("idefics", "mllama", "smolvlm")) else 0
    tensors = {name: torch.cat([one.tensors[name] for one in given.pictures], along) for name in names}
    asked = given.ids, bool(given.images), tensors, TYPES.get(kind), COUNT, IMAGE_TOKEN_ID
    return reference(greedy_tokens, directory, *asked)


@lru_cache(32)
def loaded(
    directory: Path, native: bool, gpu: GpuKernels | None, device: torch.device
) -> tuple[DecoderModel, VisionTower]:
    """A model in float32, which keeps nothing of what engines compute."""
    kernels = our_kernels(read_model_spec(directory, "float32")) if native else None
    model = build_model(directory, "float32", str(device), lambda stage, percent: None, kernels=kernels, gpu=gpu)
    family = vision_family(directory)
    assert family is not None
    assert isinstance(model, DecoderModel)
    return model, load_tower(directory, family, torch.float32, device, kernels=kernels)


class Harness:
    """An engine of a model whose images are in a directory."""

    def __init__(
        self,
        directory: Path,
        media: Path,
        *,
        pages: int = 64,
        chunk: int = 512,
        kept: int = 1 << 20,
        stored: int = 4,  # of images that layers attend to
        native: bool = False,
        gpu: GpuKernels | None = None,
        capturer: GraphCapturer | None = None,
        captured: int = 0,  # tokens of chunks in captured steps
        divided: bool = True,  # whether the tower's work for an image is divided among steps
        device: torch.device = CPU,  # on another one than the CPU, `gpu` computes the model
    ) -> None:
        model, tower = loaded(directory, native, None if device == CPU else gpu, device)
        own, model.kv = model.kv, model.kv._replace(gpu_kernels=gpu)
        states, model.kv = model.image_states(stored), own
        self.images = PromptImages(tower, ImageFiles(media), kept, states)
        groups, slots = kv_groups(model), 4
        attention: Any = build_attention(
            model.kv._replace(groups=paged_groups(groups)), pages, device, slots + 1 + SNAPSHOTS
        )
        if gpu is not None and device == CPU:
            attention = CudaAttention(model.kv._replace(gpu_kernels=gpu), pages, CPU)
        capture = None if capturer is None else GraphCaptureConfig(capturer, attention, [slots], captured)
        size = attention.page_size
        total = pages * size
        limits = DeploymentLimits(
            total, total - 1, total, chunk, slots, pages, size, model.vocab_size, "float32", "cpu", groups,
            self.images.undivided, tower_slices=self.images.slices if divided else 1,
        )  # fmt: skip
        self.engine = TorchEngine(model, attention, limits, images=self.images, graph_capture=capture)
        self.engine.capture_decode_graphs()

    def start(self) -> ScheduledEngine:
        self.engine.reset()
        return ScheduledEngine(self.engine)

    @property
    def computed(self) -> int:
        """Images that the tower has computed."""
        return self.images.computed


SNAPSHOTS = 8


def kv_groups(model: Model) -> list[KVGroup]:
    """One group of full attention, and the recurrent layers, if there are any."""
    if model.kv.state is None:
        return ONE_FULL_GROUP
    recurrent = KVGroup(GroupKind.RECURRENT, page_bytes=model.kv.state.bytes, snapshots=SNAPSHOTS, interval=1024)
    return [KVGroup(page_bytes=1), recurrent]


def agrees(served: Served, wanted: tuple[list[int], list[float]]) -> None:
    assert served.end is not None
    assert (served.end.reason, served.end.message) == ("length", "")
    resumed = len(wanted[0]) - len(served.ids)
    assert served.ids == wanted[0][resumed:]
    pairs = zip(served.logprobs, wanted[1][resumed:], strict=True)
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in pairs)


@pytest.mark.parametrize(("kind", "native"), with_variants(PICTURES, (False, True)))
def test_family(kind: str, native: bool, tmp_path: Path) -> None:
    """Alone, then in a batch whose chunks end inside images; on torch's kernels or on ours."""
    directory = make(kind)
    prompts = [prompt(kind, tmp_path, 1, 1), prompt(kind, tmp_path, 2, 2, 3), prompt(kind, tmp_path, 3)]
    wanted = [expected(directory, one) for one in prompts]
    chunk = 200 if kind == "paligemma" else 11  # of which a prompt with images is computed as a whole
    harness = Harness(directory, tmp_path, native=native, chunk=chunk)
    alone = harness.start()
    for one, answer in zip(prompts, wanted, strict=True):
        served = alone.add(one.ids, COUNT, one.images)
        alone.run()
        agrees(served, answer)
        assert (harness.engine._decode_fast_path._streak is not None) == native
    assert harness.computed == 3
    together = harness.start()
    answers = [together.add(one.ids, COUNT, one.images) for one in prompts]
    together.run()
    for served, answer in zip(answers, wanted, strict=True):
        agrees(served, answer)
    assert harness.computed == 3  # their features were kept


# One of each kind: a plain tower, positions with axes, further features, recurrent layers, tokens that see later ones,
# cross-attention.
EACH = ("llava", "qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3", "mllama")


@pytest.mark.parametrize("kind", in_depth(PICTURES, EACH))
def test_prefix_cache(kind: str, tmp_path: Path) -> None:
    """Which finds an image by its content, whatever ids it has, and may end inside it."""
    directory = make(kind)
    first, other = prompt(kind, tmp_path, 1, 1), prompt(kind, tmp_path, 1, 3)
    assert first.ids == other.ids
    inside = prompt(kind, tmp_path, 1, 1, after=7)
    harness = Harness(directory, tmp_path, kept=1, stored=1)
    running = harness.start()
    size = harness.engine.limits.page_size
    before, whole = first.images[0].position // size * size, (len(first.ids) - 1) // size * size
    parted = (first.images[0].position + first.images[0].length) // size * size
    found_nothing = kind == "paligemma"  # whose prompts with images are not in the prefix cache
    for one, cached, computed in (
        (first, 0, 1),
        (first, whole, 1),
        (other, before, 2),
        (other, whole, 2),
        (inside, parted, 2 if not found_nothing and parted == first.images[0].position + first.images[0].length else 3),
        (first, whole, 3),
    ):
        served = running.add(one.ids, COUNT, one.images)
        running.run()
        agrees(served, expected(directory, one))
        assert served.end is not None
        if not kind.startswith(RECURRENT):  # whose prefixes end where a state was kept
            assert (served.end.cached_tokens, harness.computed) == (0 if found_nothing else cached, computed)
        elif cached == whole:
            assert served.end.cached_tokens


@pytest.mark.parametrize("kind", in_depth(PICTURES, EACH))
def test_preempted_and_resumed(kind: str, tmp_path: Path) -> None:
    """After a preemption, and after the loss of the scheduler or of the worker. All begin in the first step."""
    directory = make(kind)
    prompts = [prompt(kind, tmp_path, 1, 1), prompt(kind, tmp_path, 2, 2), prompt(kind, tmp_path, 4, 3)]
    wanted = [expected(directory, one) for one in prompts]
    pages = sum(-(-len(one.ids) // PAGE) for one in prompts) + 1
    harness = Harness(directory, tmp_path, pages=pages, kept=1, divided=False)
    assert harness.engine.limits.page_size == PAGE
    running = harness.start()
    answers = [running.add(one.ids, COUNT, one.images) for one in prompts]
    running.run()
    assert running.scheduler.counters.preemptions
    for served, answer in zip(answers, wanted, strict=True):
        agrees(served, answer)

    harness = Harness(directory, tmp_path, divided=False)
    running = harness.start()
    answers = [running.add(one.ids, COUNT, one.images) for one in prompts]
    running.run(steps=3)
    known = [list(served.ids) for served in answers]
    assert all(0 < len(ids) < COUNT for ids in known)
    running.restart_scheduler()
    answers = [running.add(one.ids, COUNT, one.images, ids) for one, ids in zip(prompts, known, strict=True)]
    running.run()
    for served, answer in zip(answers, wanted, strict=True):
        agrees(served, answer)
        assert served.end is not None
        assert served.end.cached_tokens or kind == "paligemma"

    running = Harness(directory, tmp_path).start()  # another worker, which has no pages
    answers = [running.add(one.ids, COUNT, one.images, ids) for one, ids in zip(prompts, known, strict=True)]
    running.run()
    for served, answer in zip(answers, wanted, strict=True):
        agrees(served, answer)


def test_resumed_in_the_middle_of_a_tower(tmp_path: Path) -> None:
    """An image of which the tower has computed a part is computed again."""
    directory = make("llava")
    given = prompt("llava", tmp_path, 1, 1)
    harness = Harness(directory, tmp_path)
    running = harness.start()
    running.add(given.ids, COUNT, given.images)
    running.run(steps=1)
    assert (harness.computed, len(harness.images.runs)) == (0, 1)
    running.restart_scheduler()
    served = running.add(given.ids, COUNT, given.images)
    running.run()
    agrees(served, expected(directory, given))
    assert (harness.computed, len(harness.images.runs)) == (1, 0)


@pytest.mark.parametrize("kind", in_depth(PICTURES, (*EACH, "pixtral", "internvl")))
def test_tower_on_our_kernels(kind: str) -> None:
    """It computes what torch does, keeps each weight once, and an image does not depend on those before it."""
    directory, family = make(kind), VISION_FAMILIES.get(kind, VISION_FAMILIES["llava"])
    kernels = our_kernels(read_model_spec(directory, "float32"))
    ours, torchs = (load_tower(directory, family, torch.float32, CPU, kernels=one) for one in (kernels, None))
    plain = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.LayerNorm)
    replaced = [name for name, layer in torchs._model.named_modules() if type(layer) in plain]
    layers = [ours._model.get_submodule(name) for name in replaced]
    assert replaced
    assert not any(type(layer) in plain for layer in layers)
    assert all(layer.weight.untyped_storage().nbytes() == 4 for layer in layers)
    assert ours.nbytes == torchs.nbytes
    first, second = (PICTURES[kind](number).tensors for number in (1, 2))
    computed = [ours.compute(tensors) for tensors in (first, second, first)]
    for found, tensors in zip(computed, (first, second), strict=False):
        wanted = torchs.compute(tensors)
        for one, other in zip((found.embeddings, *found.deeper), (wanted.embeddings, *wanted.deeper), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
    assert torch.equal(computed[0].embeddings, computed[2].embeddings)


@pytest.mark.parametrize("native", [False, True])
def test_tower_in_slices(native: bool, tmp_path: Path) -> None:
    """An image that is computed in slices, with others between, is bit for bit what one call computes; the worker
    completes what a row needs, and gives up what too many others follow."""
    directory = make("llava")
    harness = Harness(directory, tmp_path, native=native)
    tower = harness.images.tower
    prompts = [prompt("llava", tmp_path, 1, number) for number in range(MAX_DIVIDED_IMAGES + 2)]
    assert tower.slices == 4  # two layers
    read = [partial(ImageFiles(tmp_path).read, one.images[0], tower.family) for one in prompts]
    whole = [tower.compute(one()).embeddings for one in read]
    runs = [tower.begin(one) for one in read]
    assert [tower.advance(run, 2) for run in runs] == [None] * len(runs)
    for run, wanted in zip(runs, whole, strict=True):
        found = tower.advance(run, 2)
        assert found is not None
        assert torch.equal(found.embeddings, wanted)

    images, faults = harness.images, dict[int, str]()
    for slot, one in enumerate(prompts):
        images.assign(slot, one.images, np.array(one.ids))
        images.advance(slot, 0, 2, faults)
    assert images.computed == 0
    images.advance(len(prompts) - 1, 0, 2, faults)
    assert images.computed == 1
    for _ in range(2):  # of one that was given up, from its begin
        assert images.computed == 1
        images.advance(0, 0, 2, faults)
    assert images.computed == 2
    assert not faults
    (tmp_path / prompts[1].images[0].name).unlink()
    images.advance(1, 0, 2, faults)
    assert faults == {1: "the file of an image is gone"}


def test_tower_in_bfloat16() -> None:
    """It is as close to float32 as torch is."""
    directory, family, given = make("gemma3"), VISION_FAMILIES["gemma3"], PICTURES["gemma3"](1).tensors
    kernels = our_kernels(read_model_spec(directory, "bfloat16"))
    exact = load_tower(directory, family, torch.float32, CPU).compute(given).embeddings
    errors = []
    for chosen in (kernels, None):
        tower = load_tower(directory, family, torch.bfloat16, CPU, kernels=chosen)
        errors.append(float((tower.compute(given).embeddings.float() - exact).square().mean()))
    assert 0 < errors[0] < 1.5 * errors[1]


def test_images_that_follow_each_other(tmp_path: Path) -> None:
    """Tokens see those directly before the last image, too, by cross-attention; here from the first position on."""
    directory, given = make("mllama"), prompt("mllama", tmp_path, 1, 1, 2, 3)
    texts = [token for token in given.ids if token != IMAGE_TOKEN_ID]
    ids = [IMAGE_TOKEN_ID, IMAGE_TOKEN_ID, *texts[:30], IMAGE_TOKEN_ID, *texts[30:40]]
    images = [one._replace(position=at) for one, at in zip(given.images, (0, 1, 32), strict=True)]
    for native, chunk in ((False, 512), (True, 5)):
        running = Harness(directory, tmp_path, native=native, chunk=chunk).start()
        served = running.add(ids, COUNT, images)
        running.run()
        agrees(served, expected(directory, Prompt(ids, images, given.pictures)))


def test_logprobs_of_prompts_with_images_that_are_not_scored(tmp_path: Path) -> None:
    """The head of mllama has no rows for its image token, whose logprob in a prompt is therefore none. All others are
    those of transformers."""
    directory, given = make("mllama"), prompt("mllama", tmp_path, 1, 1)
    running = Harness(directory, tmp_path).start()
    served = running.add(given.ids, 1, given.images, logprobs_from=1)
    running.run()
    logprobs = dict(zip(range(1, len(given.ids)), served.prompt_logprobs, strict=True))
    place = given.images[0].position
    assert math.isnan(logprobs.pop(place))
    assert all(-100 < one < 0 for one in logprobs.values())


@pytest.mark.parametrize("divided", [False, True])
def test_faulty_files(divided: bool, tmp_path: Path) -> None:
    """End their request with the reason, and no other one."""
    directory = make("qwen2_vl")
    good = [prompt("qwen2_vl", tmp_path, 1, 1), prompt("qwen2_vl", tmp_path, 2)]
    grid = PICTURES["qwen2_vl"](2).tensors
    path = tmp_path / "faulty.safetensors"

    def missing() -> None:
        path.unlink(missing_ok=True)

    faults: list[tuple[Callable[[], object], str]] = [
        (missing, "is gone"),
        (lambda: path.write_bytes(b"\xff" * 100), "cannot be read"),
        (lambda: save_file({"pixel_values": grid["pixel_values"]}, path), "has no tensor 'image_grid_thw'"),
        (lambda: save_file({**grid, "pixel_values": torch.ones(3)}, path), "2 dimensions were expected"),
        (lambda: save_file({**grid, "image_grid_thw": torch.tensor([[1, 4, 8]])}, path), "a grid of 1 * 2 * 4 has 6"),
        (lambda: save_file({**grid, "pixel_values": torch.ones(24, 9)}, path), "cannot compute an image"),
        (lambda: save_file({**grid, "pixel_values": torch.ones(20, 1176)}, path), "cannot compute an image"),
    ]
    running = Harness(directory, tmp_path, divided=divided).start()
    for write, reason in faults:
        write()
        faulty = prompt("qwen2_vl", tmp_path, 3, 2)
        images = [one._replace(name=path.name) for one in faulty.images]
        answers = [running.add(one.ids, COUNT, one.images) for one in good]
        refused = [running.add(faulty.ids, COUNT, images) for _ in range(2)]
        running.run()
        for served in refused:
            assert served.end is not None
            assert served.end.reason == "generation"
            # One that is admitted while the other is computed finds its page of text before the image.
            assert served.end.cached_tokens in ((0, 16) if divided else (0,))
            assert reason in served.end.message
        for served, one in zip(answers, good, strict=True):
            agrees(served, expected(directory, one))


def test_the_plan_counts_the_tower() -> None:
    directory = make("qwen2_vl")
    tower = load_tower(directory, VISION_FAMILIES["qwen2_vl"], torch.float32, CPU)
    assert read_planned_model(directory, Settings()).tower == tower.nbytes
    assert read_planned_model(directory, Settings(media_workers=0)).tower == 0


def test_configuration_as_published(tmp_path: Path) -> None:
    """Those of Qwen2-VL have their text part in no part of its own."""
    directory = make("qwen2_vl")
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(flat))
    found, expected = (read_decoder_config(read_config(path)) for path in (tmp_path, directory))
    assert [(one.dim, one.axes, inverse_frequencies(one.dim, one.parameters).tolist()) for one in found.ropes] == [
        (one.dim, one.axes, inverse_frequencies(one.dim, one.parameters).tolist()) for one in expected.ropes
    ]
    assert replace(found, ropes=()) == replace(expected, ropes=())
    towers = [load_tower(path, VISION_FAMILIES["qwen2_vl"], torch.float32, CPU) for path in (tmp_path, directory)]
    given = PICTURES["qwen2_vl"](1).tensors
    assert torch.equal(*(tower.compute(given).embeddings for tower in towers))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("visual.patch_embed.proj.weight"), "1 tensors are missing"),
        (lambda tensors: tensors.update({"visual.merger.ln_q.weight": torch.ones(7)}), "have another shape"),
        (
            lambda tensors: tensors.update({"visual.merger.mlp.0.weight": torch.ones(128, 128, dtype=torch.int8)}),
            "is quantized (visual.merger.mlp.0.weight is int8)",
        ),
    ],
)
def test_vision_parts_that_cannot_be_loaded(change: Callable[[Any], object], reason: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(make("qwen2_vl"), tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    load_tower(directory, VISION_FAMILIES["qwen2_vl"], torch.float32, CPU)  # which is plain, with any text part
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=re.escape(reason)):
        load_tower(directory, VISION_FAMILIES["qwen2_vl"], torch.float32, CPU)


def test_rope_positions() -> None:
    """Those of transformers, for images anywhere in a prompt."""
    config = transformers.AutoConfig.from_pretrained(make("qwen2_vl"))
    model = transformers.Qwen2VLModel._from_config(config)
    for sizes in ([], [(1, 4, 6)], [(1, 2, 8), (1, 8, 2), (1, 4, 4)], [(3, 4, 6)]):
        types, placed = [0] * 5, []
        for frames, rows, columns in sizes:
            placed.append(PlacedGrid(len(types), frames, rows // 2, columns // 2))
            types += [1] * (frames * rows * columns // 4) + [0] * 3
        positions, delta = model.get_rope_index(
            torch.zeros(1, len(types), dtype=torch.int64), torch.tensor([types]), torch.tensor(sizes)
        )
        found = rope_positions(len(types), placed)
        assert found.prompt.tolist() == positions[:, 0].tolist()
        assert found.delta == int(delta)
        after = [len(types) + found.delta + at for at in range(2)]
        assert found.select(len(types) - 1, len(types) + 2)[:, 1:].tolist() == [after] * 3
