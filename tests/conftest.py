"""Models that many tests share."""

from pathlib import Path

import pytest

from tests.models import model


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    return model("llama")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real model that is served by default; fetched on the first use."""
    from tgi.hub.resolve import model_directory

    return model_directory(None, None, progress=lambda stage, percent: None)
