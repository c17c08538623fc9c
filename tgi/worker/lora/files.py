"""The files of an adapter as peft writes them, and a name for their content."""

import hashlib
from pathlib import Path

from tgi.kernel.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIGEST_BYTES = 16
BLOCK = 1 << 20


def digest_of(directory: Path) -> bytes:
    """Names what is in an adapter's files, wherever they lie. Raises UserError where there is no adapter."""
    if not (directory / CONFIG).is_file():
        raise UserError(f"{directory} has no {CONFIG}, so it is no LoRA adapter.")
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        for name in (CONFIG, WEIGHTS):
            path = directory / name
            if not path.is_file():
                continue  # whoever reads it says so
            digest.update(f"{name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
    except OSError as error:
        raise UserError(f"The adapter in {directory} cannot be read: {error}.") from error
    return digest.digest()
