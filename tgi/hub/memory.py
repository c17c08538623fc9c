"""How much memory a second model needs next to the one that is served, and how much there is."""

import subprocess
from pathlib import Path

import psutil

from tgi.hub.weight_files import weight_files
from tgi.microkernel.errors import UserError
from tgi.microkernel.host.control_groups import SELF, memory_left_in_groups
from tgi.microkernel.settings.table import Settings

# Of a worker besides its weights: torch, activations, and a KV cache for some requests.
WORKER_BYTES = 512 << 20
# Numbers without these units are bytes.
GIGABYTE, MEBIBYTE = 1e9, 1 << 20


def require_memory(settings: Settings, device: str, process: Path = SELF) -> None:
    """Raises UserError if the model of these settings does not fit next to what uses the device now.

    `device` is "cpu", or the name of a GPU; `process` the directory in /proc of the server's supervisor. This is an
    estimate: weights take as much as their files, in float32 twice that.
    """
    needed, free = needed_bytes(settings), free_bytes(device, process)
    if device in ("cpu", "none", ""):  # each replica has a GPU of its own, but all of them share the host
        needed *= settings.replicas
    if free is not None and needed > free:
        raise UserError(
            f"{settings.model_id} needs about {needed / GIGABYTE:.1f} GB next to the model that is served, and "
            f"{free / GIGABYTE:.1f} GB are free. Give --drain-first: the server then ends the running model first and "
            "answers 503 until the new one is ready."
        )


def needed_bytes(settings: Settings) -> int:
    """An estimate of what a worker with these settings allocates."""
    directories = [settings.model_dir, *([settings.draft_model_dir] if settings.draft_model_dir else [])]
    stored = sum(path.stat().st_size for directory in directories for path in weight_files(directory))
    return WORKER_BYTES + stored * (2 if settings.dtype == "float32" else 1)


def free_bytes(device: str, process: Path = SELF) -> float | None:
    """The free memory of a device, for a process (its directory in /proc); None if it is not known."""
    if device in ("cpu", "none", ""):
        return min(float(psutil.virtual_memory().available), memory_left_in_groups(process))
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        return max(int(line) for line in done.stdout.split()) * MEBIBYTE
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
