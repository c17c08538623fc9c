"""Image files for the tests."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """A picture in RGB."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def png_header(width: int, height: int) -> bytes:
    """A PNG that says that it has this size, and has no more than that."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    parts = [
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        chunk(b"IDAT", zlib.compress(bytes(1000))),
        chunk(b"IEND", b""),
    ]
    return b"".join([b"\x89PNG\r\n\x1a\n", *parts])
