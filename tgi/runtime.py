"""The machine and the software that the server runs on: what --env shows, and the header x-compute-type."""

import platform
import subprocess

from tgi import __version__
from tgi.kernel.settings import Settings

ABSENT = "N/A"
# What clients know this card as.
MISSPELT = {"nvidia-h100-80gb-hbm3": "nvidia-h100-80fb-hbm3"}


def report(settings: Settings) -> str:
    """Several lines, in the order of TGI's report."""
    lines = [
        "Runtime environment:",
        f"Target: {platform.machine()}-{platform.system().lower()}",
        f"Version: {__version__} on Python {platform.python_version()}",
        f"Commit sha: {settings.git_sha or 'N/A'}",
        f"Docker label: {settings.docker_label or 'N/A'}",
        f"nvidia-smi: {nvidia_smi()}",
    ]
    return "\n".join(lines)


def compute_type(settings: Settings) -> str:
    """TGI's name for what computes: how many GPUs, and the first one's name; without any, the name of its image."""
    names = nvidia_smi("--query-gpu=name", "--format=csv,noheader").strip()
    if settings.device == "cpu" or names == ABSENT:
        return "gpu+optimized"
    name = names.splitlines()[0].strip().lower().replace(" ", "-")
    return f"{settings.num_shard or 1}-{MISSPELT.get(name, name)}"


def nvidia_smi(*arguments: str) -> str:
    """What it prints, behind a line break; ABSENT where there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ABSENT
    return "\n" + done.stdout if done.returncode == 0 and done.stdout.strip() else ABSENT
