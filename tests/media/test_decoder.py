"""Files of every kind to RGB, and those that are refused."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.media.pictures import encoded, noise, png_header
from tgi.media.decoder import MAX_SIDE, decode, with_detail
from tgi.media.fetcher import ImageError

MAX_PIXELS = 1_000_000
NOISE = noise()
GREY16 = Image.fromarray(np.linspace(0, 65535, 1200).astype(np.uint16).reshape(30, 40))
HALF = noise()
HALF.putalpha(Image.fromarray(np.full((30, 40), 128, dtype=np.uint8)))
PALETTE = Image.new("P", (40, 30), 1)
PALETTE.putpalette([9, 9, 9, 10, 200, 30])


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(NOISE, exif=exif)


FRAMES = encoded(noise(seed=1), "GIF", save_all=True, append_images=[noise(seed=2)])
PIXELS = {
    "png": (encoded(NOISE), NOISE),
    "webp": (encoded(NOISE, "WEBP", lossless=True), NOISE),
    "first frame": (FRAMES, Image.open(io.BytesIO(encoded(noise(seed=1), "GIF"))).convert("RGB")),
    "16 bits of grey": (encoded(GREY16), Image.fromarray((np.asarray(GREY16) // 257).astype(np.uint8)).convert("RGB")),
    "grey": (encoded(NOISE.convert("L")), NOISE.convert("L").convert("RGB")),
    "half transparent": (encoded(HALF), Image.blend(NOISE, Image.new("RGB", (40, 30), "white"), 127 / 255)),
    "transparent palette": (encoded(PALETTE, transparency=1), Image.new("RGB", (40, 30), "white")),
    "palette": (encoded(PALETTE), Image.new("RGB", (40, 30), (10, 200, 30))),
    "EXIF says: rotated by 90 degrees": (turned(6), NOISE.transpose(Image.Transpose.ROTATE_270)),
    "EXIF says: mirrored": (turned(2), NOISE.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
    "EXIF cannot be read": (encoded(NOISE, exif=b"Exif\0\0nonsense"), NOISE),
}


@pytest.mark.parametrize("name", PIXELS)
def test_pixels(name: str) -> None:
    data, expected = PIXELS[name]
    found = decode(data, MAX_PIXELS)
    assert (found.mode, found.size) == ("RGB", expected.size)
    assert np.abs(np.asarray(found, dtype=int) - np.asarray(expected, dtype=int)).max() <= 1


def test_cmyk_and_ordinary_jpeg() -> None:
    flat = Image.new("RGB", (40, 30), (200, 30, 90))
    for image in (flat, flat.convert("CMYK")):
        found = np.asarray(decode(encoded(image, "JPEG", quality=95), MAX_PIXELS), dtype=int)
        assert np.abs(found - (200, 30, 90)).max() <= 3


REFUSED = {
    "too many pixels": (png_header(1001, 1000), "may have 1000000 pixels"),
    "decompression bomb": (png_header(60_000, 60_000), "may have 1000000 pixels"),
    "too wide": (png_header(MAX_SIDE + 1, 1), f"{MAX_SIDE} on a side"),
    "a line": (png_header(2001, 10), "200 times as long as wide: it has 2001 x 10"),
    "frame larger than the screen": (FRAMES[:6] + b"\xff\xff\xff\xff" + FRAMES[10:], "may have 1000000 pixels"),
    "truncated png": (encoded(NOISE)[:-200], "damaged or cut off"),
    "truncated jpeg": (encoded(NOISE, "JPEG")[:-200], "damaged or cut off"),
    "truncated webp": (encoded(NOISE, "WEBP")[:-200], "damaged or cut off"),
    "no pixels": (png_header(100, 100), "damaged or cut off"),
    "svg": (b'  <svg xmlns="http://www.w3.org/2000/svg"/>', "SVG is not served"),
    "svg with a declaration": (b'\xef\xbb\xbf<?xml version="1.0"?><svg/>', "SVG is not served"),
    "pdf": (b"%PDF-1.7 ...", "PDF is not served"),
    "a page": (b"<!DOCTYPE html><html>", "HTML is not served"),
    "tiff": (encoded(NOISE, "TIFF"), "no known format"),
    "eps": (encoded(NOISE, "EPS"), "no known format"),
    "nothing": (b"", "no known format"),
    "text": (b"hello", "no known format: PNG, JPEG, WebP or GIF was expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(ImageError, match=reason):
        decode(data, MAX_PIXELS)


def test_low_detail_is_small() -> None:
    large = noise(2000, 1000)
    assert with_detail(large.copy(), "low").size == (512, 256)
    assert with_detail(large, "high").size == (2000, 1000)
    assert with_detail(NOISE, "low").size == NOISE.size
