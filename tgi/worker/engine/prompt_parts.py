"""What an engine expects of vision towers and encoders."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tgi.microkernel.messages.protocol import ImageSegment
from tgi.worker.attention.image_states import ImageStates
from tgi.worker.attention.interface import ForwardBatch
from tgi.worker.vision.prompt_images import TowerWork


class PromptParts(Protocol):
    """The parts of prompts that something before the model computes as a whole: images, or the inputs of an encoder."""

    encodes_prompt: bool  # all of each prompt but its last token is such a part, with or without an ImageSegment

    @property
    def shifts(self) -> bool:
        """Whether `shift` is ever other than 0."""

    @property
    def undivided(self) -> str:
        """DeploymentLimits.undivided of this model."""

    @property
    def slices(self) -> int:
        """DeploymentLimits.tower_slices of this model."""

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

    states: ImageStates | None  # None: no layers attend to images

    def computes(self, slots: NDArray[np.int64], starts: NDArray[np.int64]) -> bool:
        """Whether such a batch needs more than shifts of its positions and what `place` does; captured steps have those
        alone."""

    def place(self, slots: NDArray[np.int64], faults: dict[int, str]) -> bool:
        """Prepares `states` for a captured step with rows of `slots` [R]. Whether any of them sees an image. A slot
        gets a fault if an image cannot be computed."""

    def advance(self, slot: int, index: int, slices: int, faults: dict[int, str]) -> None:
        """Computes the next `slices` slices of an image of a slot. The slot gets a fault if that is not possible."""

    def shift(self, slot: int) -> int:
        """What the rotary embedding adds to the positions of a slot after its last part."""

    def add_to(
        self, batch: ForwardBatch, slots: NDArray[np.int64], starts: NDArray[np.int64], faults: dict[int, str]
    ) -> ForwardBatch:
        """The batch, whose rows are of `slots` [R] and begin at positions `starts` [R], with what is computed for it. A
        slot gets a fault if one of its parts cannot be computed."""
