"""Tiny random models for the tests, created once and kept in the temporary directory.

    from tests.models import model
    directory = model("llama", dtype="bfloat16", seed=3)

The keyword arguments are those of scripts/make_model.py. Treat the directory as read-only: other tests share it.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from scripts import make_model as maker
from tgi.hub.resolver import model_directory


def model(kind: str, **options: Any) -> Path:
    """The directory of a model of `kind`, created on first use. Other processes never see an incomplete one."""
    script = Path(maker.__file__).read_bytes()
    key = hashlib.sha256(script + repr((kind, sorted(options.items()))).encode()).hexdigest()[:16]
    store = Path(tempfile.gettempdir()) / f"tgi-test-models-{os.getuid()}"
    directory = store / f"{kind}-{key}"
    if directory.is_dir():
        return directory
    store.mkdir(mode=0o700, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=store))
    try:
        maker.make_model(kind, building, **options)
        building.rename(directory)
    except OSError:
        if not directory.is_dir():  # otherwise another process finished first
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


def demo_model() -> Path:
    """The directory of the model that is served by default, fetched and imported on first use."""
    return model_directory(None)
