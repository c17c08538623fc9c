"""The file of an image, which a media process writes and a worker reads: the tensors of the model's processor as
safetensors, and what they are as metadata."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

# In the metadata, as hexadecimal digits.
PROMPT_IDS, DIGEST, CHECKSUM = "prompt_ids", "digest", "checksum"


def encode_image(digest: bytes, prompt_ids: bytes, tensors: dict[str, Any]) -> bytes:
    """The content of the file of an image with this digest. `tensors`: numpy arrays."""
    metadata = {PROMPT_IDS: prompt_ids.hex(), DIGEST: digest.hex(), CHECKSUM: _checksum(tensors)}
    content: bytes = save(tensors, metadata)
    return content


def read_prompt_ids(path: Path) -> bytes:
    """The ids that stand for the image in a prompt."""
    with safe_open(path, framework="numpy") as file:
        return bytes.fromhex(file.metadata()[PROMPT_IDS])


def image_fault(path: Path, digest: bytes) -> str:
    """Why a file that has come from another host is not that of this image, in words; "" if it is."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError, TypeError) as error:
        return f"it cannot be read: {error}"
    if metadata.get(DIGEST) != digest.hex():
        return "it is that of another image"
    return "" if metadata.get(CHECKSUM) == _checksum(tensors) else "its checksum does not match"


def _checksum(tensors: dict[str, Any]) -> str:
    found = blake2b(digest_size=16)
    for name, array in sorted(tensors.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes() if not array.flags.c_contiguous else memoryview(array.reshape(-1)).cast("B"))
    return found.hexdigest()
