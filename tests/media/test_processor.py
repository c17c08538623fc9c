"""What each family's processor makes of one image, and the whole prompt against transformers' processor on a chat."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL.Image import Image

from tests.media.pictures import noise
from tests.models import vision_model
from tgi.hub.model_config import read_model_config
from tgi.hub.vision import read_vision_config
from tgi.hub.vision_towers import VISION_FAMILIES
from tgi.media.processor import ImageProcessor, _load
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.protocol import Generate, ImageInput
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.chat import ChatRenderer
from tgi.tokenizer.encoder import EncodedPrompt, PromptEncoder
from tgi.tokenizer.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

PICTURES = [noise(90, 70), noise(90, 70, seed=1), noise(90, 70, seed=2)]
# Idefics2's processor puts a space between an image and a word, which is not done here: its texts begin with one.
CHAT = (
    b'{"messages":[{"role":"user","content":[{"type":"text","text":"Compare "},{"type":"image"},{"type":"text","text":'
    b'" and\\n"},{"type":"image"}]},{"role":"assistant","content":"They differ."},{"role":"user","content":[{"type":'
    b'"image"},{"type":"text","text":" And this?"}]}]}'
)
ONE = b'{"messages":[{"role":"user","content":[{"type":"image"},{"type":"text","text":" What is it?"}]}]}'


@pytest.mark.parametrize(("chat", "pictures"), [(CHAT, PICTURES), (ONE, PICTURES[:1]), (ONE, [noise(200, 60)])])
@pytest.mark.parametrize("kind", [*sorted(VISION_FAMILIES), "pixtral"])
def test_prompt_and_tensors_are_those_of_transformers(kind: str, chat: bytes, pictures: list[Image]) -> None:
    """Each image is processed alone; transformers gets all at once, and the text of the chat's template."""
    directory = vision_model(kind)
    config = read_model_config(directory, weights=False)
    vision = read_vision_config(config)
    processor = ImageProcessor(directory, vision)
    made = [processor.process(picture, len(pictures) > 1) for picture in pictures]
    images = [ImageInput(bytes([at]) * 16, one.prompt_ids, f"image-{at}") for at, one in enumerate(made)]
    chats = ChatRenderer.load(config, image_token=vision.image_token)
    encoder = PromptEncoder(
        Vocabulary.load(config), chats, image_token=vision.image_token, images_first=vision.images_first
    )
    prompt = encoder.encode_generate(Generate(1, "", SamplingParams(0), chat=chat, images=images))
    assert isinstance(prompt, EncodedPrompt)

    theirs: Any = _load(directory, config.model_type)
    text = chats.render_chat(chat).text
    expected = theirs(text=[text], images=pictures, add_special_tokens=False, return_tensors="np")
    assert unpack_int32(prompt.ids) == expected["input_ids"][0].tolist()
    for image, segment in zip(images, prompt.images, strict=True):
        assert (segment.digest, segment.name) == (image.digest, image.name)
    family = VISION_FAMILIES[vision.model_type]
    for name in made[0].tensors:
        assert made[0].tensors[name].ndim == family.tensors[name]
        if name != "batch_num_images":
            whole = expected[name]
            axis = int(whole.shape[0] < sum(one.tensors[name].shape[0] for one in made))  # 1: a list for each prompt
            np.testing.assert_array_equal(np.concatenate([one.tensors[name] for one in made], axis), whole)
    assert family.tensors.keys() - made[0].tensors.keys() <= {*family.optional}


# Digests of what the processors of transformers 5.23 make of noise with torchvision 0.28, in sizes where both round in
# the same way: in others a few pixels differ by one or two levels of 255.
RECORDED = [
    ("llama4", (672, 336), (3, 3, 336, 336), "8d18d9898c0b2e29"),
    ("llama4", (336, 336), (1, 3, 336, 336), "dec2db043c5b584a"),
    ("lfm2_vl", (1024, 1024), (5, 1024, 768), "2e677f476de5a123"),
    ("lfm2_vl", (480, 320), (1, 1024, 768), "3e22c9adeb754f52"),
    ("gemma4_unified", (960, 672), (1, 280, 6912), "9c6e8a9e3f159e95"),
]


@pytest.mark.parametrize(("kind", "size", "shape", "digest"), RECORDED)
def test_pixels_are_those_of_torchvision(kind: str, size: tuple[int, int], shape: tuple[int, ...], digest: str) -> None:
    from tgi.media.pil_processors import PIL_PROCESSORS

    pixels = PIL_PROCESSORS[kind]()([noise(*size)], return_tensors="np")["pixel_values"]
    assert pixels.shape == shape
    levels = np.rint(pixels * np.float32(255)).astype(np.int16)
    assert hashlib.blake2b(levels.tobytes(), digest_size=8).hexdigest() == digest


# Sizes, and what the same processors make of them: rows and columns of tiles, or (lfm2_vl) the number of tiles, and
# rows and columns of the patches of the last one.
SIZES = [(100, 80), (640, 480), (900, 300), (37, 500), (1100, 400)]
OTHER_SIZES = [(100, 80), (1200, 800), (2000, 400), (37, 500), (700, 1100)]


@pytest.mark.parametrize(
    ("kind", "options", "sizes", "expected"),
    [
        ("llama4", {}, SIZES, [(1, 1), (2, 2), (1, 3), (2, 1), (2, 4)]),
        ("llama4", {"resize_to_max_canvas": True}, SIZES, [(4, 4), (3, 4), (2, 6), (14, 1), (2, 6)]),
        ("lfm2_vl", {}, OTHER_SIZES, [(1, 16, 18), (7, 26, 38), (6, 14, 70), (1, 60, 6), (7, 40, 24)]),
    ],
)
def test_tiles_are_those_of_torchvision(
    kind: str, options: dict[str, bool], sizes: list[tuple[int, int]], expected: list[tuple[int, ...]]
) -> None:
    from tgi.media.pil_processors import PIL_PROCESSORS

    process, found = PIL_PROCESSORS[kind](**options), []
    for size in sizes:
        made = process([noise(*size)], return_tensors="np")
        if kind == "llama4":
            found.append((*made["aspect_ratios"][0].tolist(),))
        else:
            found.append((len(made["spatial_shapes"]), *made["spatial_shapes"][-1].tolist()))
    assert found == expected


def test_what_needs_torchvision_is_refused_in_words(tmp_path: Path) -> None:
    for path in vision_model("llava").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Lfm2VlImageProcessor"}')
    with pytest.raises(UserError, match=r"Lfm2VlImageProcessor.*needs no torchvision was expected.*--media-workers 0"):
        ImageProcessor(tmp_path, read_vision_config(read_model_config(tmp_path, weights=False)))


def test_the_digest_depends_on_content_and_detail() -> None:
    directory = vision_model("llava")
    processor = ImageProcessor(directory, read_vision_config(read_model_config(directory, weights=False)))
    digests = {processor.digest(data, detail) for data in (b"a", b"b") for detail in ("", "low")}
    assert len(digests) == 4
    assert {len(one) for one in digests} == {16}
    assert processor.digest(b"a", "") in digests


def test_files_that_do_not_fit_are_refused_in_words(tmp_path: Path) -> None:
    directory = vision_model("llava")
    vision = read_vision_config(read_model_config(directory, weights=False))
    with pytest.raises(UserError, match=r"has the image token '<image>', and config.json '<other>'"):
        ImageProcessor(directory, vision._replace(image_token="<other>"))
    with pytest.raises(UserError, match=r"cannot be loaded: .*--media-workers 0"):
        ImageProcessor(tmp_path, vision)
