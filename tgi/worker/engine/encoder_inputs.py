"""The inputs of an encoder-decoder model in the slots, and what its encoder adds to a batch.

The prompt of a request is the ids of its input, and one id that the decoder starts with. The encoder computes an input
as a whole in each step that has tokens of it; the prefix cache may have found its first pages.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.microkernel.messages.protocol import UNDIVIDED_IMAGES, ImageSegment
from tgi.worker.attention.image_states import ImageStates
from tgi.worker.attention.interface import EncoderRows, ForwardBatch
from tgi.worker.device_copies import copy_columns_to_device
from tgi.worker.vision.prompt_images import TowerWork

Ints = NDArray[np.int64]


class EncoderInputs:
    """Implements PromptParts with an encoder: `encode` computes hidden states [n, hidden] of ids int64 [n]."""

    undivided = UNDIVIDED_IMAGES  # an input is one segment of its prompt
    encodes_prompt = True
    shifts = False
    states: ImageStates | None = None
    slices = 1
    weight_bytes = 0  # those of the model include them

    def __init__(self, encode: Callable[[Tensor], Tensor]) -> None:
        self._encode = encode
        self._inputs: dict[int, Ints] = {}
        self._work = TowerWork()

    def take_work(self) -> TowerWork:
        work, self._work = self._work, TowerWork()
        return work

    def reset(self) -> None:
        self._inputs.clear()

    def discard(self, slot: int) -> None:
        self._inputs.pop(slot, None)

    def assign(self, slot: int, images: Sequence[ImageSegment], ids: Ints) -> None:
        self._inputs[slot] = ids[:-1]

    def concern(self, slots: Ints, starts: Ints) -> bool:
        return True

    def computes(self, slots: Ints, starts: Ints) -> bool:
        return True

    def place(self, slots: Ints, faults: dict[int, str]) -> bool:
        return False

    def advance(self, slot: int, index: int, slices: int, faults: dict[int, str]) -> None:
        """An input is computed with its prompt."""

    def shift(self, slot: int) -> int:
        return 0

    def add_to(self, batch: ForwardBatch, slots: Ints, starts: Ints, faults: dict[int, str]) -> ForwardBatch:
        lengths: list[int] = []
        hidden: list[Tensor] = []
        for slot, start, count in zip(slots.tolist(), starts.tolist(), batch.query_lens_host, strict=True):
            ids = self._inputs[slot]
            lengths.append(len(ids))
            if start < len(ids):
                began = time.monotonic()
                (column,) = copy_columns_to_device((ids,), batch.tokens.device)
                hidden.append(self._encode(column)[start : start + count])
                took = int(1e6 * (time.monotonic() - began))
                self._work = TowerWork(self._work.positions + len(ids), self._work.us + took)
        return batch._replace(encoder=EncoderRows(lengths, torch.cat(hidden) if hidden else None))
