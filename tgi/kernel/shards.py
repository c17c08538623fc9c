"""How many devices a model is to be spread over. More than one is understood and refused: it is not built yet."""

import logging
import subprocess
from collections.abc import Mapping

from tgi.kernel.errors import UserError
from tgi.kernel.settings import Settings

log = logging.getLogger(__name__)

# The variables that name the devices a container may use; the first that is set counts.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
EVERY = ("all", "void")  # values of NVIDIA_VISIBLE_DEVICES that name no device


def refuse_shards(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raises UserError where several shards are asked for, or none; in TGI's words where it has some."""
    sharded, count = settings.sharded == "true", settings.num_shard
    if sharded and count is None:
        count = visible_devices(environ)
        if count <= 1:
            raise UserError(f"not enough cuda devices: `sharded` is true but only found {count} CUDA devices")
    elif sharded and count is not None and count <= 1:
        raise UserError("Invalid argument: `sharded` is true but `num_shard` <= 1")
    if count == 0:
        raise UserError("Invalid argument: `num_shard` cannot be < 1")
    if count is not None and count > 1 and settings.quantize == "exl2":
        raise UserError("Invalid argument: Sharding is currently not supported with `exl2` quantization")
    if count is not None and count > 1:
        raise UserError(
            f"Invalid argument: `num_shard` is {count}, but a model cannot be spread over several devices yet. "
            "Use --num-shard 1 and a model that fits one device."
        )


def visible_devices(environ: Mapping[str, str]) -> int:
    """The devices that the environment lets this process use."""
    named = next((environ[name] for name in VISIBLE if environ.get(name, "").strip()), "")
    if named.strip() not in EVERY:
        return len(named.split(",")) if named else 0
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("nvidia-smi cannot count the devices: %s", error)
        return 0
    return len(listing.stdout.splitlines())


def warn_of_idle_devices(settings: Settings, environ: Mapping[str, str]) -> None:
    """TGI would use all devices that it sees if it is not told otherwise."""
    seen = next((environ[name] for name in VISIBLE if environ.get(name, "").strip()), "").split(",")
    if settings.sharded is None and settings.num_shard is None and settings.device != "cpu" and len(seen) > 1:
        log.warning("%d devices are visible and one is used: a model cannot be spread over several yet", len(seen))
