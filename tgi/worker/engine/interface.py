"""What the worker loop expects of an engine, what an engine expects of towers and encoders, and the errors that engines
raise."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tgi.microkernel.messages.protocol import DeploymentLimits, HeldPages, ImageSegment, Step, StepResult
from tgi.worker.attention.interface import ForwardBatch
from tgi.worker.lora.registry import AdapterRegistry
from tgi.worker.vision.prompt_images import TowerWork


class Engine(Protocol):
    """Computes steps, which are launched and collected in order."""

    limits: DeploymentLimits
    adapters: AdapterRegistry

    def reset(self) -> None:
        """Removes all requests. The content of the KV pages stays."""

    def held_pages(self) -> list[HeldPages]:
        """The full pages of each slot, without those that another slot has overwritten. To be called while no step is
        in flight."""

    def prefault_memory(self) -> bool:
        """Prepares memory that later steps will need, for a few milliseconds, while the worker is idle. False: nothing
        is left to prepare."""

    def release_memory(self) -> None:
        """Gives back memory that an idle worker does not need."""

    def launch(self, step: Step) -> Any:
        """Starts a step and returns it as pending. A device without a queue of its own computes the step here."""

    def is_done(self, pending: Any) -> bool:
        """Whether `collect` would return without waiting."""

    def collect(self, pending: Any) -> StepResult:
        """Waits for the step and returns its result."""


class PromptParts(Protocol):
    """The parts of prompts that something before the model computes as a whole: images, or the inputs of an encoder."""

    encodes_prompt: bool  # all of each prompt but its last token is such a part, with or without an ImageSegment

    @property
    def undivided(self) -> str:
        """DeploymentLimits.undivided of this model."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that are not the model's own."""

    def take_work(self) -> TowerWork:
        """What was computed since the last call."""

    def reset(self) -> None:
        """Removes all requests."""

    def discard(self, slot: int) -> None:
        """Another request gets this slot."""

    def assign(self, slot: int, images: Sequence[ImageSegment], ids: NDArray[np.int64]) -> None:
        """A request with these parts and prompt ids gets the slot. Raises BadImage."""

    def concern(self, slots: NDArray[np.int64], starts: NDArray[np.int64]) -> bool:
        """Whether `add_to` adds something to a batch with rows of `slots` [R] that begin at positions `starts` [R]."""

    def add_to(
        self, batch: ForwardBatch, slots: NDArray[np.int64], starts: NDArray[np.int64], faults: dict[int, str]
    ) -> ForwardBatch:
        """The batch, whose rows are of `slots` [R] and begin at positions `starts` [R], with what is computed for it. A
        slot gets a fault if one of its parts cannot be computed."""


class Poisoned(Exception):
    """The device or the process cannot recover: the worker must exit, and its supervisor starts another."""


class OutOfMemory(Exception):
    """A step did not find the memory that it needs. The content of the KV pages that it did not write stays."""


class BadStep(Exception):
    """A step that does not match the state of its slots; the text names the fault."""
