"""Reads the file of an image: the tensors that the model's processor returned for it, as safetensors."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgi.hub.vision_towers import VisionFamily
from tgi.microkernel.messages.protocol import MAX_IMAGE_FILE_BYTES, ImageSegment, valid_file_name
from tgi.worker.vision.received_images import received_path

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


class BadImage(Exception):
    """An image that cannot be computed; the message says why."""


class ImageFiles(NamedTuple):
    """Where a worker finds the files of images."""

    directory: Path  # of the media processes of its host
    site: str = ""  # whose directory that is, as Hello.site
    received: Path = Path()  # of images of other hosts, see received_images

    def read(self, image: ImageSegment, family: VisionFamily, only: str = "") -> dict[str, Tensor]:
        """As read_image."""
        if image.site not in ("", self.site):
            return read_image(received_path(self.received, image.digest), family, only)
        if not valid_file_name(image.name):
            raise BadImage(f"{image.name!r} is not the name of a file of the media directory")
        return read_image(self.directory / image.name, family, only)


def read_image(path: Path, family: VisionFamily, only: str = "") -> dict[str, Tensor]:
    """The tensors of the image that the family's tower takes, on the host; `only` the one of this name. Raises BadImage
    if the file is missing, damaged or not as expected."""
    try:
        if (size := os.stat(path).st_size) > MAX_IMAGE_FILE_BYTES:
            raise BadImage(f"the file of an image has {size} bytes, at most {MAX_IMAGE_FILE_BYTES} are read")
        with safe_open(path, framework="pt") as file:
            wanted = {only} if only else family.tensors.keys()
            found = {key: file.get_tensor(key) for key in file.keys() if key in wanted}  # noqa: SIM118  # not a dict
    except FileNotFoundError as error:
        raise BadImage("the file of an image is gone") from error
    except (SafetensorError, OSError) as error:
        raise BadImage(f"the file of an image cannot be read: {error}") from error
    for key in wanted:
        if key not in found and key not in family.optional:
            raise BadImage(f"the file of an image has no tensor {key!r}")
    for key, tensor in found.items():
        if tensor.ndim != family.tensors[key] or not tensor.numel() or tensor.dtype not in DTYPES:
            raise BadImage(
                f"{key!r} of an image is {tensor.dtype} {list(tensor.shape)}, where {family.tensors[key]} dimensions "
                "were expected"
            )
    return found
