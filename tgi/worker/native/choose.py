"""Says whether models are computed by our own kernels, and with which library."""

import logging
from collections.abc import Sequence

import torch

from tgi.worker.load import Recipe
from tgi.worker.models.config import DecoderConfig
from tgi.worker.native.build import Failed, Unavailable, library, need_processor
from tgi.worker.native.kernels import DEPTH, WIDEST_HEAD, Kernels
from tgi.worker.threads import named_threads, usable_cores

log = logging.getLogger(__name__)


def find_kernels(recipes: Sequence[Recipe], device: str) -> Kernels | None:
    """Our kernels, if they can compute all of these models here (models that share pages have to share their layout).
    What is chosen is logged. With them torch has little left to do, and does it on one thread: others that spin beside
    those of the kernels would cost more than they bring."""
    if device != "cpu":
        return None
    try:
        need_processor()
        for recipe in recipes:
            _need_fit(recipe)
        compiled, threads = library(), named_threads() or usable_cores()
        found = Kernels(compiled, threads)
    except Unavailable as reason:
        level = logging.WARNING if isinstance(reason, Failed) else logging.INFO
        log.log(level, "computing with torch's kernels: %s", reason)
        return None
    torch.set_num_threads(1)
    log.info("computing with our own kernels, on %d threads", threads)
    return found


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
