"""The files of an adapter as peft writes them, and a name for their content."""

import hashlib
from pathlib import Path

from tgi.kernel.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIGEST_BYTES = 16
BLOCK = 1 << 20
# Bytes that a config and the list of a file's tensors may have: some thousand modules each. To read much larger ones
# would hold up the steps.
LARGEST_CONFIG, LARGEST_HEADER = 1 << 20, 4 << 20


def digest_of(directory: Path) -> bytes:
    """Names what is in an adapter's files, wherever they lie. Raises UserError where there is no adapter."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        if not (directory / CONFIG).is_file():
            raise UserError(f"{directory} has no {CONFIG}, so it is no LoRA adapter.")
        for name, check in ((CONFIG, _check_config), (WEIGHTS, _check_header)):
            path = directory / name
            if not path.is_file():
                continue  # whoever reads it says so
            check(path)
            digest.update(f"{name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
    except OSError as error:
        raise UserError(f"The adapter in {directory} cannot be read: {error}.") from error
    return digest.digest()


def _check_config(path: Path) -> None:
    size = path.stat().st_size
    if size > LARGEST_CONFIG:
        raise UserError(
            f"{path} has {size} bytes. No config of an adapter is that large: {LARGEST_CONFIG} are the most."
        )


def _check_header(path: Path) -> None:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if not 0 < header <= min(LARGEST_HEADER, path.stat().st_size - 8):
        raise UserError(
            f"{path} does not begin as the safetensors file of an adapter: a header of {header} bytes is announced, "
            f"and {LARGEST_HEADER} are the most. It is incomplete or damaged: fetch the adapter again."
        )
