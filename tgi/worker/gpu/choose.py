"""Says whether our own kernels compute on the GPU."""

import importlib.util
import logging

import torch

from tgi.worker.gpu.kernels import Gpu

log = logging.getLogger(__name__)


def find_gpu(device: str) -> Gpu | None:
    """Our kernels, if they can compute there ("cpu", "cuda"). What is chosen is logged."""
    if device != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        log.info("computing with torch's kernels: there is no triton, in which our own are written")
        return None
    gpu = Gpu(torch.cuda.get_device_capability())
    log.info("computing with our own kernels, for compute capability %d.%d", *gpu.capability)
    return gpu
