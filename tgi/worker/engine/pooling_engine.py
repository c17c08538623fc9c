"""The engine of a model that ends in a vector: the whole prompt is computed when the last part of it is planned."""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tgi.microkernel.errors import UserError
from tgi.microkernel.host.heap import release_freed_memory
from tgi.microkernel.messages.codec import ITEM_BYTES
from tgi.microkernel.messages.protocol import DeploymentLimits, HeldPages, Step, StepResult
from tgi.microkernel.observability.progress import WorkerFacts
from tgi.worker.attention.packed import PackedSequences
from tgi.worker.engine.interface import BadStep, Poisoned
from tgi.worker.lora.registry import AdapterRegistry

NO_TEXT = "this model generates no text"

# The vectors float32 [sequences, size] of packed sequences.
Vectors = Callable[[PackedSequences], Tensor]


class PoolingEngine:
    """Implements Engine. There is no KV cache: pages are counted by the scheduler, and their numbers are not read.

    A slot keeps the ids of its prompt. Texts that end in a step are packed one after the other, without padding, up to
    `tokens` at once; a longer one is computed alone.
    """

    page_files = None  # there are no pages

    def __init__(
        self, vectors: Vectors, size: int, limits: DeploymentLimits, device: torch.device, tokens: int
    ) -> None:
        """`size`: numbers of a vector."""
        self.limits = limits
        self.served: WorkerFacts | None = None
        self.adapters = AdapterRegistry(_refuse_adapter)
        self._vectors = vectors
        self._size = size
        self._device = device
        self._tokens = tokens
        self._slots: dict[int, np.ndarray] = {}

    def reset(self) -> None:
        self._slots.clear()

    def held_pages(self) -> list[HeldPages]:
        """None: nothing is kept of a text."""
        return []

    def prefault_memory(self) -> bool:
        """False: there is no memory to prefault."""
        return False

    def release_memory(self) -> None:
        if self._device.type == "cpu":
            release_freed_memory()

    def launch(self, step: Step) -> StepResult:
        """Computes the step. Raises BadStep where it does not match the slots, and Poisoned where the device is
        lost."""
        began = time.monotonic()
        for new in step.slots:
            self._slots[new.slot] = np.frombuffer(new.token_ids, np.int32)
        columns = (np.frombuffer(column, np.int32).tolist() for column in (step.rows, step.starts, step.counts))
        rows = list(zip(*columns, step.samples, strict=True))
        faults = [NO_TEXT if samples else "" for *_, samples in rows]
        ending = []
        for slot, start, count, samples in rows:
            if slot not in self._slots:
                raise BadStep(f"slot {slot} has no request")
            ids = self._slots[slot]
            if start < 0 or count < 1 or start + count > len(ids):
                raise BadStep(f"positions {start} to {start + count - 1} of slot {slot}, which has {len(ids)} ids")
            if start + count == len(ids) and not samples:
                ending.append(ids)
        try:
            with torch.inference_mode():
                vectors = self._compute(ending)
        except torch.AcceleratorError as error:
            raise Poisoned(str(error)) from error
        sampled = sum(step.samples)
        return StepResult(
            step.number,
            step.epoch,
            b"\1" * sampled,
            bytes(ITEM_BYTES * sampled),
            bytes(ITEM_BYTES * sampled),
            int((time.monotonic() - began) * 1e6),
            row_errors=faults if any(faults) else [],
            vectors=vectors,
        )

    def is_done(self, pending: StepResult) -> bool:
        return True

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    def _compute(self, sequences: list[np.ndarray]) -> bytes:
        """The vectors of these sequences, in order. Those of like lengths are computed together."""
        results: list[bytes] = [b""] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        while order:
            group = [order.pop()]
            tokens = len(sequences[group[0]])
            while order and tokens + len(sequences[order[-1]]) <= self._tokens:
                group.append(order.pop())
                tokens += len(sequences[group[-1]])
            packed = PackedSequences.of([sequences[index] for index in group], self._device)
            vectors = self._vectors(packed).float().cpu().numpy()
            if vectors.shape != (len(group), self._size):
                raise AssertionError(f"vectors of shape {vectors.shape} for {len(group)} texts")
            for index, vector in zip(group, vectors, strict=True):
                results[index] = vector.tobytes()
        return b"".join(results)


def _refuse_adapter(directory: object) -> None:
    raise UserError("a model that ends in a vector takes no adapters")
