"""Imports a GGUF file in a child process, so that what conversion loads into memory goes with it."""

import json
import logging
import subprocess
import tempfile
from pathlib import Path

from tgi.hub.cache import Progress, building
from tgi.kernel import interpreter
from tgi.kernel.errors import UserError

log = logging.getLogger(__name__)

# What the child imports besides what every role does.
NEEDED = ("gguf", "numpy", "transformers")


def import_gguf(file: Path, directory: Path, progress: Progress) -> None:
    """Makes the model directory `directory` from a GGUF file: bf16 safetensors, configuration, tokenizer, which all
    programs read.

    `directory` must not exist, or be empty. It appears whole, or not at all with a UserError.
    """
    with building(Path(directory)) as temporary:
        fill(Path(file), temporary, progress, packed=False)


def fill(file: Path, directory: Path, progress: Progress, *, packed: bool) -> None:
    """Runs the child that fills `directory`, if `packed` with weights in the file's own bits, which only our workers
    read. It ends when this process does. Raises UserError if it fails."""
    interpreter.require(NEEDED, "Importing a GGUF file")
    command = interpreter.command("tgi.hub.gguf.convert", str(file.absolute()), str(directory.absolute()))
    command += ["packed"] if packed else []
    with tempfile.TemporaryFile("w+") as complaints:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=interpreter.environment(),
            text=True,
        )
        refused = None
        with child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    kind, *words = json.loads(line)
                    if kind == "refused":
                        refused = words[0]
                    else:
                        progress(*words)
            except BaseException:
                child.kill()
                raise
        complaints.seek(0)
        said = complaints.read().strip()
    if refused is not None:
        raise UserError(refused)
    if child.returncode:
        log.debug("The importing process said: %s", said)
        last = said.rpartition("\n")[2] or f"it ended with status {child.returncode}"
        raise UserError(f"Importing {file} failed: {last}.")
