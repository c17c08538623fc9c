"""What the worker loop expects of an engine, and the errors that engines raise."""

from typing import Any, Protocol

from tgi.microkernel.messages.protocol import DeploymentLimits, HeldPages, Step, StepResult
from tgi.worker.lora.registry import AdapterRegistry


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


class Poisoned(Exception):
    """The device or the process cannot recover: the worker must exit, and its supervisor starts another."""


class OutOfMemory(Exception):
    """A step did not find the memory that it needs. The content of the KV pages that it did not write stays."""


class BadStep(Exception):
    """A step that does not match the state of its slots; the text names the fault."""
