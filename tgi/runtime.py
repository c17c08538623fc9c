"""What --env shows: the machine and the software that the server runs on."""

import platform
import subprocess

from tgi import __version__
from tgi.kernel.settings import Settings


def report(settings: Settings) -> str:
    """Several lines, in the order of TGI's report."""
    lines = [
        "Runtime environment:",
        f"Target: {platform.machine()}-{platform.system().lower()}",
        f"Version: {__version__} on Python {platform.python_version()}",
        f"Commit sha: {settings.git_sha or 'N/A'}",
        f"Docker label: {settings.docker_label or 'N/A'}",
        f"nvidia-smi: {_nvidia_smi()}",
    ]
    return "\n".join(lines)


def _nvidia_smi() -> str:
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return "N/A"
    return "\n" + done.stdout if done.returncode == 0 else "N/A"
