"""The model's own processor, of transformers: the tensors that an image becomes, and the ids that stand for it in a
prompt."""

import hashlib
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL.Image import Image

from tgi.hub.vision import VisionConfig
from tgi.media.fetcher import ImageError
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import IMAGE_DIGEST_BYTES

# What a processor returns of its text, besides the ids.
OF_TEXT = ("attention_mask", "token_type_ids", "mm_token_type_ids", "labels", "cross_attention_mask")
CONFIGURATION = ("preprocessor_config.json", "processor_config.json", "tokenizer.json", "config.json")


class ProcessedImage(NamedTuple):
    """What the worker and the prompt get of an image."""

    prompt_ids: bytes  # int32
    tensors: dict[str, Any]  # numpy arrays, by the names of the model's arguments


def keep_torch_out() -> None:
    """Has transformers believe that torch is not installed, which it would import: 340 MB and seconds. To be called in
    a process that needs its processors alone, before it is imported."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would tell every user that torch is missing


# Families that divide an image into tiles only if it is the only one of a prompt, by model_type.
TILES_IF_ALONE = frozenset(("llava_onevision",))


class ImageProcessor:
    """Processes the images of one model, each alone. What becomes of it does not depend on the others of its prompt,
    except by `several`: whether there are others."""

    def __init__(self, directory: Path, vision: VisionConfig) -> None:
        """Raises UserError if transformers has no processor for this model that needs no torchvision, or its files do
        not fit."""
        self._token = vision.image_token
        self._tiles_if_alone = vision.model_type in TILES_IF_ALONE
        try:
            self._processor = _load(directory, vision.model_type)
            own = self._processor.image_token
        except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = next((line for line in str(error).splitlines() if line), type(error).__name__).rstrip(".")
            raise UserError(
                f"The image processor of {directory} cannot be loaded: {reason}. An image processor of transformers "
                "that needs no torchvision was expected, with all of its files. Start with --media-workers 0 to serve "
                "the model without images."
            ) from error
        if vision.model_type == "mllama":
            self._processor.bos_token = ""  # which it would put behind an image
        if own != self._token:
            raise UserError(
                f"The image processor of {directory} has the image token {own!r}, and config.json {self._token!r}. "
                "Correct one of them, or start with --media-workers 0, which serves the model without images."
            )
        self._configuration = _configuration_digest(directory)

    def digest(self, data: bytes, detail: str, several: bool = False) -> bytes:
        """The name of what this processor makes of an encoded image."""
        arguments = b"%d %b" % (several and self._tiles_if_alone, detail.encode())
        key = hashlib.blake2b(self._configuration + arguments, digest_size=32).digest()
        return hashlib.blake2b(data, key=key, digest_size=IMAGE_DIGEST_BYTES).digest()

    def process(self, image: Image, several: bool = False) -> ProcessedImage:
        """Raises ImageError for an image that the model does not take."""
        if several and self._tiles_if_alone:  # as the first one of two
            ids, tensors = self.process_all([image, image])
            return ProcessedImage(ids[: len(ids) // 2], {name: value[:1] for name, value in tensors.items()})
        return self.process_all([image])

    def process_all(self, images: list[Image]) -> ProcessedImage:
        """The same of images that follow each other."""
        try:
            found = self._processor(
                text=self._token * len(images), images=images, add_special_tokens=False, return_tensors="np"
            )
        except ValueError as error:  # of sizes and shapes
            raise ImageError(f"the model's image processor refuses the image: {error}") from error
        ids = np.asarray(found["input_ids"]).reshape(-1).tolist()
        tensors = {
            name: np.ascontiguousarray(value)
            for name, value in found.items()
            if name != "input_ids" and name not in OF_TEXT
        }
        return ProcessedImage(pack_column(INT32, ids), tensors)


def _load(directory: Path, model_type: str) -> Any:
    """The processor, without the parts for video and audio, which would need torchvision."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = _processor_class(directory)
    cls = getattr(transformers, name, None)
    if cls is None:  # it comes with the model as code
        cls = getattr(transformers, name := PROCESSOR_MAPPING_NAMES[model_type])
    if getattr(cls, "is_dummy", False):  # for lack of torchvision
        # PixtralProcessor, which takes a function from the module of the image processor that needs it.
        family = name.removesuffix("Processor").lower()
        package = f"transformers.models.{family}"
        sys.modules[f"{package}.image_processing_{family}"] = import_module(f"{package}.image_processing_pil_{family}")
        cls = getattr(import_module(f"{package}.processing_{family}"), name)
    module = sys.modules[cls.__module__]
    if getattr(module, "num2words", "") is None:  # SmolVLM's asks for this package, for videos alone
        module.num2words = str  # type: ignore[attr-defined]

    from tgi.media.pil_processors import PIL_PROCESSORS

    image_processor = PIL_PROCESSORS.get(model_type)

    class OfImages(cls):  # type: ignore[misc, valid-type]
        """The processor of a model with images alone."""

        @classmethod
        def _get_arguments_from_pretrained(cls, path: Any, processor_dict: Any = None, **kwargs: Any) -> list[Any]:
            parts = {
                "image_processor": lambda: (
                    transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
                    if image_processor is None
                    else image_processor.from_pretrained(path)
                ),
                "tokenizer": lambda: transformers.AutoTokenizer.from_pretrained(path),
            }
            return [parts.get(name, lambda: None)() for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """Parts may be missing."""
            return type(argument)

    OfImages.__name__ = cls.__name__
    return OfImages.from_pretrained(directory)


def _processor_class(directory: Path) -> str:
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = directory / name
        if path.is_file() and isinstance(found := json.loads(path.read_text()).get("processor_class"), str):
            return found
    return ""


def _configuration_digest(directory: Path) -> bytes:
    """Of all that decides what becomes of an image."""
    import transformers

    digest = hashlib.blake2b(transformers.__version__.encode(), digest_size=32)
    for name in CONFIGURATION:
        path = directory / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(b"%d " % len(content) + content)
    return digest.digest()
