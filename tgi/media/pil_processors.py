"""Image processors of families for which transformers has one for torchvision alone: what these make of an image, with
PIL and numpy. Imports transformers."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, PILImageResampling, SizeDict
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.processing_utils import ImagesKwargs

Pixels = NDArray[Any]  # [3, height, width]


class Gemma4UnifiedImageProcessor(Gemma4ImageProcessorPil):  # type: ignore[misc]
    """As Gemma 4's, but neighbouring patches are one patch from the beginning."""

    def _preprocess(self, images: list[Pixels], *, patch_size: int, pooling_kernel_size: int, **given: Any) -> Any:
        merged = patch_size * pooling_kernel_size
        return super()._preprocess(images=images, patch_size=merged, pooling_kernel_size=1, **given)


class Llama4Arguments(ImagesKwargs, total=False):  # type: ignore[call-arg, misc]
    """Entries of preprocessor_config.json."""

    max_patches: int
    resize_to_max_canvas: bool


class Llama4ImageProcessor(PilBackend):  # type: ignore[misc]
    """Puts an image on a canvas of up to `max_patches` tiles, whose lower right is left black, and adds the whole image
    as the last tile if there are several. Pixels are rounded to bfloat16, in which they are computed."""

    valid_kwargs = Llama4Arguments
    resample = PILImageResampling.BILINEAR
    image_mean = image_std = (0.5, 0.5, 0.5)
    size = {"height": 336, "width": 336}  # an attribute that the base class reads
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    max_patches = 16
    resize_to_max_canvas = False

    def _preprocess(
        self,
        images: list[Pixels],
        *,
        size: SizeDict,
        resample: Any,
        rescale_factor: float,
        image_mean: Sequence[float],
        image_std: Sequence[float],
        max_patches: int,
        resize_to_max_canvas: bool,
        **given: Any,
    ) -> Any:
        if not (given["do_resize"] and given["do_rescale"] and given["do_normalize"] and size.height == size.width):
            raise ValueError("an image of llama4 is resized to square tiles, rescaled and normalized")
        side, tiles, ratios = int(size.height), [], []
        levels = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(rescale_factor))
        for image in images:
            shape = (image.shape[1], image.shape[2])
            rows, columns = _canvas(shape, side, max_patches, resize_to_max_canvas)
            bound = canvas = (rows * side, columns * side)
            if not resize_to_max_canvas:  # an image is not made larger than a tile
                bound = (min(max(shape[0], side), canvas[0]), min(max(shape[1], side), canvas[1]))
            height, width = (max(one, 1) for one in _within(shape, bound))
            resized = self.resize(image, SizeDict(height=height, width=width), resample=resample)
            padding = ((0, 0), (0, canvas[0] - height), (0, canvas[1] - width))
            parts = [*_tiles(np.pad(resized, padding), rows, columns)]
            if len(parts) > 1:
                parts.append(self.resize(image, size, resample=resample))
            tiles += parts
            ratios.append([rows, columns])
        mean, std = (np.array(one, np.float32)[:, None, None] for one in (image_mean, image_std))
        pixels = _bfloat16(_bfloat16(levels[np.stack(tiles)] - _bfloat16(mean)) / _bfloat16(std))
        return BatchFeature({"pixel_values": pixels, "aspect_ratios": np.array(ratios)}, given["return_tensors"])


def _canvas(shape: tuple[int, int], side: int, most: int, largest: bool) -> tuple[int, int]:
    """Rows and columns of the canvas of up to `most` tiles of this side on which an image becomes larger by as little
    as possible (or, if `largest`, by as much), or else smaller by as little; of several the one with fewest tiles."""
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in (one for one in range(1, count + 1) if count % one == 0):
            by_ratio.setdefault(rows * rows / count, []).append((rows, count // rows))
    grids = np.array([grid for same in by_ratio.values() for grid in same])
    scales = ((grids * side).astype(np.float32) / np.array(shape, np.float32)).min(axis=1)
    larger = scales[scales >= 1]
    best = (larger.max() if largest else larger.min()) if len(larger) else scales.max()
    chosen = grids[scales == best]
    rows, columns = chosen[chosen.prod(axis=1).argmin()].tolist()
    return rows, columns


def _within(shape: tuple[int, int], bound: tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image of this shape, as large as fits."""
    (height, width), (most_high, most_wide) = shape, bound
    by_height, by_width = most_high / height, most_wide / width
    if by_width < by_height:
        return min(math.floor(height * by_width), most_high), most_wide
    return most_high, min(math.floor(width * by_height), most_wide)


def _tiles(image: Pixels, rows: int, columns: int) -> Pixels:
    """[rows * columns, 3, height, width] of an image, row by row."""
    channels, height, width = image.shape
    parts = image.reshape(channels, rows, height // rows, columns, width // columns).transpose(1, 3, 0, 2, 4)
    return parts.reshape(rows * columns, channels, height // rows, width // columns)


def _bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest numbers that bfloat16 has."""
    bits = numbers.astype(np.float32).view(np.uint32)
    return cast("NDArray[np.float32]", ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))


class Lfm2VlArguments(ImagesKwargs, total=False):  # type: ignore[call-arg, misc]
    """Entries of preprocessor_config.json."""

    downsample_factor: int
    do_image_splitting: bool
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool
    min_image_tokens: int
    max_image_tokens: int
    encoder_patch_size: int
    tile_size: int
    max_pixels_tolerance: float
    return_row_col_info: bool


class Lfm2VlImageProcessor(PilBackend):  # type: ignore[misc]
    """Resizes an image to whole tokens, and divides a large one into tiles, with the whole image as the last one. A
    tile is a list of patches, padded to the length of the longest possible one."""

    valid_kwargs = Lfm2VlArguments
    model_input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    resample = PILImageResampling.BILINEAR
    image_mean, image_std = IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
    size = {"height": 512, "width": 512}  # which the base class wants to see
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    downsample_factor = 2
    do_image_splitting = use_thumbnail = True
    min_tiles, max_tiles = 2, 10
    min_image_tokens, max_image_tokens = 64, 256
    encoder_patch_size = 16
    tile_size = 512
    max_pixels_tolerance = 2.0
    return_row_col_info = False

    def _preprocess(
        self,
        images: list[Pixels],
        *,
        resample: Any,
        rescale_factor: float,
        image_mean: Sequence[float],
        image_std: Sequence[float],
        downsample_factor: int,
        do_image_splitting: bool,
        min_tiles: int,
        max_tiles: int,
        use_thumbnail: bool,
        min_image_tokens: int,
        max_image_tokens: int,
        encoder_patch_size: int,
        tile_size: int,
        max_pixels_tolerance: float,
        return_row_col_info: bool,
        **given: Any,
    ) -> Any:
        if not (given["do_rescale"] and given["do_normalize"]):
            raise ValueError("an image of lfm2_vl is rescaled and normalized")
        if min_tiles > max_tiles:
            raise ValueError(f"min_tiles is {min_tiles} and max_tiles {max_tiles}")
        patch, unit = encoder_patch_size, encoder_patch_size * downsample_factor  # pixels of a patch, and of a token
        longest = max_image_tokens * downsample_factor**2
        if do_image_splitting:
            longest = max(longest, (tile_size // patch) ** 2)
        rows: list[Pixels] = []
        lengths, shapes = [], []
        information: dict[str, list[Any]] = {"image_rows": [], "image_cols": [], "image_sizes": []}
        for image in images:
            height, width = image.shape[1:]
            whole = _whole_tokens(height, width, unit, min_image_tokens, max_image_tokens)
            down, across = 1, 1
            rounded = max(patch, round(height / unit) * unit) * max(patch, round(width / unit) * unit)
            if do_image_splitting and max_tiles > 1 and rounded > max_image_tokens * unit**2 * max_pixels_tolerance:
                down, across = _tile_grid(height, width, min_tiles, max_tiles, tile_size)
                large = SizeDict(height=down * tile_size, width=across * tile_size)
                tiles = [*_tiles(self.resize(image, large, resample=resample), down, across)]
            else:
                tiles = []
            if not tiles or (use_thumbnail and down * across > 1):
                tiles.append(self.resize(image, SizeDict(height=whole[0], width=whole[1]), resample=resample))
            for tile in tiles:
                pixels = self.normalize(self.rescale(tile, rescale_factor), image_mean, image_std)
                high, wide = pixels.shape[1] // patch, pixels.shape[2] // patch
                parts = pixels.reshape(3, high, patch, wide, patch).transpose(1, 3, 2, 4, 0).reshape(high * wide, -1)
                rows.append(np.pad(parts, ((0, longest - len(parts)), (0, 0))))
                lengths.append(len(parts))
                shapes.append([high, wide])
            for name, value in zip(information, (down, across, list(whole)), strict=True):
                information[name].append(value)
        mask = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int32)
        found = {"pixel_values": np.stack(rows), "pixel_attention_mask": mask, "spatial_shapes": np.array(shapes)}
        return BatchFeature(found | (information if return_row_col_info else {}), given["return_tensors"])


def _whole_tokens(height: int, width: int, unit: int, fewest: int, most: int) -> tuple[int, int]:
    """Height and width of the image in whole tokens of `unit` pixels, of which it gets `fewest` to `most`."""
    high, wide = (max(unit, round(one / unit) * unit) for one in (height, width))
    if high * wide > most * unit**2:
        shrink = math.sqrt(height * width / (most * unit**2))
        high, wide = (max(unit, math.floor(one / shrink / unit) * unit) for one in (height, width))
    elif high * wide < fewest * unit**2:
        grow = math.sqrt(fewest * unit**2 / (height * width))
        high, wide = (math.ceil(one * grow / unit) * unit for one in (height, width))
    return high, wide


def _tile_grid(height: int, width: int, fewest: int, most: int, side: int) -> tuple[int, int]:
    """Rows and columns of the tiles: the grid whose ratio is the nearest to the image's; of several the last one, in
    the order of their tiles, of which the image fills more than half."""
    grids = {
        (across, down)
        for count in range(fewest, most + 1)
        for across in range(1, count + 1)
        for down in range(1, count + 1)
        if fewest <= across * down <= most
    }
    best, nearest = (1, 1), math.inf
    for across, down in sorted(grids, key=math.prod):
        distance = abs(width / height - across / down)
        if distance < nearest or (distance == nearest and height * width > 0.5 * side * side * across * down):
            best, nearest = (down, across), distance
    return best


# By model_type.
PIL_PROCESSORS: dict[str, Any] = {
    "gemma4_unified": Gemma4UnifiedImageProcessor,
    "lfm2_vl": Lfm2VlImageProcessor,
    "llama4": Llama4ImageProcessor,
}
