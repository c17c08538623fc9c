"""Says whether models are computed by our own kernels on CPU, and with which library."""

import logging
from collections.abc import Sequence

import torch

from tgi.worker.load import Recipe
from tgi.worker.models.config import DecoderConfig
from tgi.worker.native.build import Unavailable, library, need_processor
from tgi.worker.native.kernels import DEPTH, WIDEST_HEAD, Kernels
from tgi.worker.threads import named_threads, usable_cores

log = logging.getLogger(__name__)


def find_kernels(recipes: Sequence[Recipe], device: str) -> tuple[Kernels | None, str]:
    """Our kernels, if they can compute all of these models here (models that share pages have to share their layout),
    or None and why they cannot, with a warning where the processor could and something else is missing. With them torch
    has little left to do, and does it on one thread: others that spin beside those of the kernels would cost more than
    they bring."""
    if device != "cpu":
        return None, "they are for CPU"
    try:
        need_processor()
        for recipe in recipes:
            _need_fit(recipe)
    except Unavailable as reason:
        return None, str(reason)
    threads = named_threads() or usable_cores()
    try:
        found = Kernels(library(), threads)
    except Unavailable as reason:
        log.warning("computing with torch's kernels, which are slower than our own: %s", reason)
        return None, str(reason)
    torch.set_num_threads(1)
    return found, ""


def _need_fit(recipe: Recipe) -> None:
    """Raises Unavailable if our kernels cannot compute a model."""
    config = recipe.decoder
    if config is None:
        raise Unavailable("the model runs through transformers")
    if recipe.dtype is not torch.bfloat16:
        raise Unavailable(f"the model runs in {str(recipe.dtype).removeprefix('torch.')}, they are for bfloat16")
    for name, size in _sizes(config).items():
        if size % DEPTH:
            raise Unavailable(f"the model's {name} of {size} is no multiple of {DEPTH}")
    if config.head_dim > WIDEST_HEAD:
        raise Unavailable(f"the model's head_dim of {config.head_dim} is over {WIDEST_HEAD}")


def _sizes(config: DecoderConfig) -> dict[str, int]:
    """The lengths of what is multiplied."""
    sizes = {"hidden size": config.hidden, "intermediate size": config.intermediate, "head_dim": config.head_dim}
    if config.experts is not None:
        sizes["width of an expert"] = config.experts.intermediate
    return sizes
