"""Decides whether the CPU kernels compute the models of this worker, and loads them if so."""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from tgi.worker.cpu_kernels.build import KernelsUnavailable, Progress, build_library, require_instruction_set
from tgi.worker.cpu_kernels.kernels import MAX_HEAD_DIM, CpuKernels
from tgi.worker.host_cpu import threads_from_environment, usable_cores
from tgi.worker.mixers.interface import MixerConfig

log = logging.getLogger(__name__)


class _DecoderConfig(Protocol):
    """What is needed of decoder_config.DecoderConfig."""

    @property
    def widest_head(self) -> int: ...

    @property
    def recurrent(self) -> MixerConfig | None: ...


class CpuModelCandidate(Protocol):
    """What is needed of a model to decide; models.loader.ModelSpec has it."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        ...

    @property
    def decoder(self) -> _DecoderConfig | None:
        """None: the model runs through transformers."""


def select_cpu_kernels(
    models: Sequence[CpuModelCandidate], device: str, progress: Progress | None = None
) -> tuple[CpuKernels | None, str]:
    """The CPU kernels if they can compute all of these models on this device, or None and the reason. All or none,
    since models that share KV pages share their layout. Logs a warning where the processor is capable and something
    else is missing. `progress` is called if the kernels are compiled.

    With the CPU kernels torch has little left to compute, and gets one thread: more would spin next to the kernels'
    threads and cost more than they gain."""
    if device != "cpu":
        return None, "they are for CPU"
    try:
        element = _element(models)
        require_instruction_set()
        for model in models:
            _require_fit(model)
    except KernelsUnavailable as reason:
        return None, str(reason)
    threads = threads_from_environment() or usable_cores()
    try:
        found = CpuKernels(build_library(element, progress=progress), threads, models[0].dtype)
    except KernelsUnavailable as reason:
        log.warning("computing with torch's kernels, which are slower than our own: %s", reason)
        return None, str(reason)
    torch.set_num_threads(1)
    return found, ""


def _element(models: Sequence[CpuModelCandidate]) -> str:
    """The element type of all these models. Raises KernelsUnavailable if they differ."""
    found = {str(model.dtype).removeprefix("torch.") for model in models}
    if len(found) > 1:
        raise KernelsUnavailable(f"the models run in different types: {', '.join(sorted(found))}")
    return found.pop()


def _require_fit(model: CpuModelCandidate) -> None:
    """Raises KernelsUnavailable if the CPU kernels cannot compute this model."""
    config = model.decoder
    if config is None:
        raise KernelsUnavailable("the model is not computed by the built-in decoder")
    if config.widest_head > MAX_HEAD_DIM:
        raise KernelsUnavailable(f"the model's head_dim of {config.widest_head} is over {MAX_HEAD_DIM}")
    if config.recurrent is not None and (obstacle := config.recurrent.kernel_obstacle):
        raise KernelsUnavailable(obstacle)
