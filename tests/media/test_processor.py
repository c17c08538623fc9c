"""What each family's processor makes of one image, and the whole prompt against transformers' processor on a chat."""

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
