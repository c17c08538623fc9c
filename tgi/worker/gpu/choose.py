"""Says whether our own kernels compute on the GPU: those of every module, or none."""

import importlib
import importlib.util
import logging
import os
from collections.abc import Sequence

import torch

from tgi.kernel.errors import UserError
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.load import Recipe

log = logging.getLogger(__name__)

# The modules that have kernels, each with a `trial(device)` that raises unless they compute there what torch does.
MODULES = (
    "tgi.worker.gpu.norm",
    "tgi.worker.gpu.turn",
    "tgi.worker.gpu.gate",
    "tgi.worker.gpu.product",
    "tgi.worker.gpu.float8",
    "tgi.worker.gpu.keep",
    "tgi.worker.gpu.attend",
)


def find_gpu(recipes: Sequence[Recipe], device: str) -> tuple[Gpu | None, str]:
    """Our kernels, if they can compute any of these models there ("cpu", "cuda"), or None and why they cannot."""
    if device != "cuda":
        return None, "they are for GPUs"
    if all(recipe.decoder is None for recipe in recipes):
        return None, "the model runs through transformers"
    if importlib.util.find_spec("triton") is None:
        log.warning("computing with torch's kernels, which are slower than our own: triton is not installed")
        return None, "triton is not installed"
    return tried(torch.device(device), torch.cuda.get_device_capability())


def tried(
    device: torch.device, capability: tuple[int, int], modules: Sequence[str] = MODULES
) -> tuple[Gpu | None, str]:
    """Our kernels, if those of all modules pass their trials there, or None and which one failed, also as a warning.
    Raises UserError where one of them breaks the GPU, so that nothing can compute on it any more."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton warns that it will be asked for one day
    for name in modules:
        try:
            importlib.import_module(name).trial(device)
        except Exception as error:  # whatever a compiler, a driver or Triton itself raises
            reason = f"our own fail in {name.rpartition('.')[2]}: {type(error).__name__}: {error}"
            _need_usable(device, reason)
            log.warning("computing with torch's kernels: %s", reason)
            return None, reason
    return Gpu(capability), ""


def _need_usable(device: torch.device, reason: str) -> None:
    """CUDA gives a process up where a kernel reads or writes what is not its own."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        raise UserError(
            f"The GPU cannot be used any more, since {reason}. Start with --disable-custom-kernels."
        ) from error
