"""Says whether a model is computed by our own kernels, and by which library."""

import logging

import torch

from tgi.worker.models.config import DecoderConfig
from tgi.worker.native.build import Unavailable, library
from tgi.worker.native.kernels import DEPTH, WIDEST_HEAD, Kernels
from tgi.worker.threads import usable_cores

log = logging.getLogger(__name__)


def find_kernels(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """Our kernels, if they can compute this model here; what is chosen is logged."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return None
    try:
        if fault := _misfit(config):
            raise Unavailable(fault)
        found = Kernels(library(), usable_cores())
    except Unavailable as reason:
        log.info("the model runs on torch's kernels: %s", reason)
        return None
    log.info("the model runs on our own kernels, with %d threads", usable_cores())
    return found


def _misfit(config: DecoderConfig) -> str:
    """What our kernels cannot compute of a model; "" if there is nothing."""
    sizes = {"hidden": config.hidden, "intermediate": config.intermediate, "head_dim": config.head_dim}
    if config.experts is not None:
        sizes["width of an expert"] = config.experts.intermediate
    for name, size in sizes.items():
        if size % DEPTH:
            return f"its {name} of {size} is no multiple of {DEPTH}"
    if config.head_dim > WIDEST_HEAD:
        return f"its head_dim of {config.head_dim} is over {WIDEST_HEAD}"
    return ""
