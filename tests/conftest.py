"""Models that many tests share."""

from pathlib import Path

import pytest

from tests.models import model


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    return model("llama")
