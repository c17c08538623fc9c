"""Every vision family against transformers in float32: alone, batched, chunked, cached, preempted and resumed."""

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from scripts.make_vision_model import IMAGE_TOKEN_ID
from tests.models import vision_model as make
from tests.worker.scheduled import ScheduledEngine
from tgi.hub.vision_towers import VISION_FAMILIES, vision_family
from tgi.microkernel.messages.protocol import DeploymentLimits, ImageSegment
from tgi.worker.attention import build_attention
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.models.loader import build_model, read_model_spec
from tgi.worker.vision.prompt_images import PromptImages
from tgi.worker.vision.tower import load_tower

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
COUNT = 6  # generated tokens


class Picture(NamedTuple):
    """What a family's processor returns for an image: its tensors, and the ids that stand for it."""

    tensors: dict[str, Tensor]
    ids: list[int]


def plain(seed: int, tokens: int, *shape: int, **more: Tensor) -> Picture:
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Picture({"pixel_values": pixels, **more}, [IMAGE_TOKEN_ID] * tokens)


# For each family its pictures by number.
PICTURES: dict[str, Any] = {
    "llava": lambda seed: plain(seed, 16, 1, 3, 56, 56),
}
assert PICTURES.keys() == VISION_FAMILIES.keys()


class Prompt(NamedTuple):
    """Ids with images in them."""

    ids: list[int]
    images: list[ImageSegment]
    pictures: list[Picture]


def prompt(kind: str, media: Path, seed: int, *numbers: int) -> Prompt:
    """Text, then for each of the pictures `numbers` the picture and more text."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(6, 400, (length,), generator=generator).tolist()

    ids, images, pictures = text(5), [], []
    for number in numbers:
        picture = PICTURES[kind](number)
        digest = hashlib.blake2b(b"%d" % number, digest_size=16).digest()
        name = f"{digest.hex()}.safetensors"
        save_file(picture.tensors, media / name)
        images.append(ImageSegment(len(ids), len(picture.ids), digest, name))
        pictures.append(picture)
        ids += picture.ids + text(7)
    return Prompt(ids, images, pictures)


@cache
def reference(directory: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


def expected(directory: Path, given: Prompt) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers and their logprobs, each from the whole text before it."""
    names = given.pictures[0].tensors.keys() if given.pictures else ()
    tensors = {name: torch.cat([one.tensors[name] for one in given.pictures]) for name in names}
    ids, found, logprobs = list(given.ids), [], []
    for _ in range(COUNT):
        types = torch.tensor([[int(token == IMAGE_TOKEN_ID) for token in ids]])
        more = {"mm_token_type_ids": types} if VISION_FAMILIES[kind_of(directory)].rope else {}
        with torch.inference_mode():
            model = reference(directory)
            logits = model(input_ids=torch.tensor([ids]), use_cache=False, **tensors, **more).logits[0, -1]
        row = logits.float().log_softmax(-1)
        found.append(int(row.argmax()))
        logprobs.append(float(row.max()))
        ids.append(found[-1])
    return found, logprobs


def kind_of(directory: Path) -> str:
    return str(reference(directory).config.model_type)


class Harness:
    """An engine of a model, whose images are in a directory."""

    def __init__(
        self, directory: Path, media: Path, *, pages: int = 64, slots: int = 8, chunk: int = 512, native: bool = False
    ) -> None:
        from tests.worker.cpu_kernels.available import our_kernels

        kernels = our_kernels(read_model_spec(directory, "float32")) if native else None
        model = build_model(directory, "float32", "cpu", lambda stage, percent: None, kernels=kernels)
        family = vision_family(directory)
        assert family is not None
        self.images = PromptImages(load_tower(directory, family, torch.float32, CPU), media, 1 << 20)
        attention = build_attention(model.kv, pages, CPU, slots + 1)
        size = attention.page_size
        limits = DeploymentLimits(
            pages * size, pages * size - 1, pages * size, chunk, slots, pages, size, model.vocab_size, "float32", "cpu"
        )
        self.engine = TorchEngine(model, attention, limits, images=self.images)

    def start(self) -> ScheduledEngine:
        self.engine.reset()
        return ScheduledEngine(self.engine)


def agrees(served: Any, wanted: tuple[list[int], list[float]]) -> None:
    assert served.end is not None
    assert (served.end.reason, served.end.message) == ("length", "")
    assert served.ids == wanted[0]
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(served.logprobs, wanted[1], strict=True))


@pytest.mark.parametrize("kind", VISION_FAMILIES)
def test_family(kind: str, tmp_path: Path) -> None:
    directory = make(kind)
    prompts = [prompt(kind, tmp_path, 1, 1), prompt(kind, tmp_path, 2, 2, 3), prompt(kind, tmp_path, 3)]
    prompts += [prompt(kind, tmp_path, 4, 3, 3)]
    wanted = [expected(directory, one) for one in prompts]
    for native in (False, True):
        harness = Harness(directory, tmp_path, native=native)
        for one, answer in zip(prompts, wanted, strict=True):
            alone = harness.start()
            served = alone.add(one.ids, COUNT, one.images)
            alone.run()
            agrees(served, answer)
        together = harness.start()
        served_together = [together.add(one.ids, COUNT, one.images) for one in prompts]
        together.run()
        for served, answer in zip(served_together, wanted, strict=True):
            agrees(served, answer)
        assert harness.images.cache.computed == 3
