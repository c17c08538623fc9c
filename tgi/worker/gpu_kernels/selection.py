"""Decides whether the GPU kernels compute the models of this worker: those of every module, or none."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from tgi.microkernel.errors import UserError
from tgi.worker.cpu_kernels.build import KernelsUnavailable, cache_directory
from tgi.worker.gpu_kernels.kernels import GpuKernels

log = logging.getLogger(__name__)

# The modules that have kernels, each with a `self_test(device)` that raises unless they compute there what torch does.
PACKAGE = "tgi.worker.gpu_kernels"
EVERY_MODEL, DECODER, INVARIANT, QUANTIZED, EXPERTS, LATENT, RECURRENT = (
    tuple(f"{PACKAGE}.{name}" for name in names.split())
    for names in (
        "kv_write paged_attention sampling",
        "norm gated_activation lora",
        "matmul",
        "quantized_matmul float8",
        "routing grouped_matmul",
        "latent_write",
        "causal_conv delta_rule ssd",
    )
)
MODULES = (*EVERY_MODEL, *DECODER, *INVARIANT, *QUANTIZED, *EXPERTS, *LATENT, *RECURRENT)
DRIVER = Path("/proc/driver/nvidia/version")


class GpuModelCandidate(Protocol):
    """What is needed of a model to decide; models.loader.ModelSpec has it."""

    @property
    def decoder(self) -> object | None:
        """None: the model runs through transformers."""

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""

    @property
    def is_quantized(self) -> bool:
        """Whether weights are quantized, in the checkpoint or at load."""

    @property
    def is_latent(self) -> bool:
        """Whether its attention is latent attention."""

    @property
    def mixer_kernels(self) -> tuple[str, ...]:
        """The modules here that its recurrent layers need."""


def needed_modules(models: Sequence[GpuModelCandidate], batch_invariant: bool) -> tuple[str, ...]:
    """The modules whose kernels these models use: compiling others for their self-tests would delay the first start."""
    modules = EVERY_MODEL
    if any(model.decoder is not None for model in models):
        modules = (*modules, *DECODER)
    if batch_invariant:
        modules = (*modules, *INVARIANT)
    if any(model.is_quantized for model in models):
        modules = (*modules, *QUANTIZED)
    if any(model.has_experts for model in models):
        modules = (*modules, *EXPERTS)
    if any(model.is_latent for model in models):
        modules = (*modules, *LATENT)
    recurrent = [f"{PACKAGE}.{name}" for model in models for name in model.mixer_kernels]
    return tuple(dict.fromkeys((*modules, *recurrent)))


def select_gpu_kernels(
    models: Sequence[GpuModelCandidate], device: str, batch_invariant: bool = False
) -> tuple[GpuKernels | None, str]:
    """The GPU kernels, if this device ("cpu", "cuda") has them, or None and the reason. A model that runs through
    transformers uses those of attention and sampling.
    Self-tests that have passed on this machine, with these versions, are not repeated: a worker that replaces another
    one is waited for."""
    if device != "cuda":
        return None, "they are for GPUs"
    if importlib.util.find_spec("triton") is None:
        log.warning("computing with torch's kernels, which are slower than our own: triton is not installed")
        return None, "triton is not installed"
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    kernels = GpuKernels(capability, batch_invariant)
    modules = needed_modules(models, batch_invariant)
    try:
        stamp = cache_directory() / f"gpu-kernels-{kernels_digest(name, modules)}.passed"
    except KernelsUnavailable as error:
        log.debug("the kernels' self-tests run at each start: %s", error)
        stamp = None
    if stamp is not None and stamp.exists():
        _set_defaults()
        return kernels, ""
    tested, reason = self_tested_kernels(torch.device(device), capability, modules)
    if tested is None:
        return None, reason
    if stamp is not None:
        stamp.touch(mode=0o600)
    return kernels, ""


def kernels_digest(device: str, modules: Sequence[str]) -> str:
    """Of all that the results of these modules' self-tests depend on: the sources, torch, Triton, the kind of GPU, the
    driver."""
    parts = [
        device.encode(),
        " ".join(modules).encode(),
        torch.__version__.encode(),
        importlib.metadata.version("triton").encode(),
    ]
    parts += [path.read_bytes() for path in (DRIVER, *sorted(Path(__file__).parent.glob("*.py"))) if path.exists()]
    return hashlib.blake2b(b"\0".join(parts), digest_size=10).hexdigest()


def self_tested_kernels(
    device: torch.device,
    capability: tuple[int, int],
    modules: Sequence[str] = MODULES,
) -> tuple[GpuKernels | None, str]:
    """The GPU kernels if all modules pass their self-tests on this device, or None and the failed one, which is also
    logged as a warning. Raises UserError if a kernel leaves the GPU unusable."""
    _set_defaults()
    for name in modules:
        try:
            importlib.import_module(name).self_test(device)
        except Exception as error:  # compilers, drivers and Triton itself raise many types
            reason = f"our own fail in {name.rpartition('.')[2]}: {type(error).__name__}: {error}"
            _require_usable(device, reason)
            log.warning("computing with torch's kernels: %s", reason)
            return None, reason
    return GpuKernels(capability), ""


def _set_defaults() -> None:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default; Triton warns where it is not set


def _require_usable(device: torch.device, reason: str) -> None:
    """Raises UserError if nothing can be computed on the device: after an illegal memory access CUDA fails every
    later call of the process."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        raise UserError(
            f"The GPU cannot be used any more, since {reason}. Start with --disable-custom-kernels."
        ) from error
