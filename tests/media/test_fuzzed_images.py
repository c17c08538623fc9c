"""Damaged files of every kind give a picture or a rejection in words, never anything else."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from tests.media.pictures import encoded, noise
from tgi.media.decoder import FORMATS, decode
from tgi.media.fetcher import ImageError

pytestmark = pytest.mark.fuzz

FILES = [encoded(noise(), kind) for kind in FORMATS]
FILES.append(encoded(noise(), "GIF", save_all=True, append_images=[noise(seed=1)]))
FILES.append(encoded(noise().convert("CMYK"), "JPEG"))


@given(st.data(), st.sampled_from(FILES))
def test_damaged_files(data: DataObject, file: bytes) -> None:
    changed = bytearray(file)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(1, 4))] = data.draw(st.binary(max_size=4))
    with suppress(ImageError):
        assert decode(bytes(changed), 1_000_000).mode == "RGB"
