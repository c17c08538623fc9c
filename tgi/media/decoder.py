"""Decodes images: PNG, JPEG, WebP and GIF (its first frame) to RGB, within limits that are checked before any pixel."""

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from tgi.media.fetcher import ImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
EXPECTED = "PNG, JPEG, WebP or GIF was expected"
# The longest side of a picture, and OpenAI's size of one with `detail: low`.
MAX_SIDE, LOW_DETAIL_SIDE = 32_768, 512
# Processors that scale the shorter side to a size would make gigabytes of a line.
MAX_ASPECT = 200
ORIENTATION = 0x0112  # in EXIF
# The beginning of files that are taken for images and are none, after white space and in lower case.
OTHERS = {b"<svg": "SVG", b"<?xml": "SVG", b"<!doctype svg": "SVG", b"%pdf": "PDF", b"<!doctype html": "HTML",
          b"<html": "HTML"}  # fmt: skip
SNIFFED_BYTES = 256


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """The picture of a file as RGB: upright, the first frame, on white where it is transparent. Raises ImageError."""
    head = data[:SNIFFED_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, name in OTHERS.items():
        if head.startswith(start):
            raise ImageError(f"{name} is not served: {EXPECTED}")
    try:
        with warnings.catch_warnings():
            # Pillow's own limit of pixels, which it also checks for the frames and tiles within a file.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            Image.MAX_IMAGE_PIXELS = max_pixels
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels or max(width, height) > MAX_SIDE:
                    raise ImageError(_too_large(max_pixels, f"it has {width} x {height}"))
                if max(width, height) > MAX_ASPECT * min(width, height):
                    raise ImageError(f"an image may be {MAX_ASPECT} times as long as wide: it has {width} x {height}")
                image.load()
                return _to_rgb(_upright(image))
    except ImageError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ImageError(_too_large(max_pixels, "a frame of it has more")) from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"the file is of no known format: {EXPECTED}") from error
    except MemoryError as error:
        raise ImageError("there is not enough memory for the image. Send a smaller one") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and others
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ImageError(f"the file is damaged or cut off: {reason}") from error


def with_detail(image: Image.Image, detail: str) -> Image.Image:
    """The image as OpenAI's `detail` asks for it: with "low" at most 512 pixels wide and high."""
    if detail == "low" and max(image.size) > LOW_DETAIL_SIDE:
        image.thumbnail((LOW_DETAIL_SIDE, LOW_DETAIL_SIDE), Image.Resampling.BICUBIC)
    return image


def _too_large(max_pixels: int, given: str) -> str:
    return f"an image may have {max_pixels} pixels, and {MAX_SIDE} on a side: {given}"


def _upright(image: Image.Image) -> Image.Image:
    """Turns the image as EXIF says. Cameras write EXIF that cannot be read in full: it says nothing then."""
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # as in decode
        return image
    if orientation not in range(2, 9):
        return image
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    copy = image.copy()
    copy.info.pop("exif", None)
    copy._exif = exif  # what getexif returns: this entry alone
    return ImageOps.exif_transpose(copy)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):  # 16 bits of grey, which PIL would clip
        pixels = np.asarray(image, dtype=np.float32)
        image = Image.fromarray((pixels / 257 if image.mode.startswith("I") else pixels).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")
