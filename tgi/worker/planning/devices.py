"""The devices of --devices: how many of which kind, and the memory of each."""

import re
from typing import NamedTuple

from tgi.microkernel.errors import UserError

GB = 10**9


class DeviceKind(NamedTuple):
    """A product. Sizes are the vendor's in GB of 10^9 bytes; drivers report about that or a little more."""

    sizes: tuple[int, ...]
    float8: bool  # whether it multiplies 8-bit floats: compute capability 8.9 or more


KINDS = {
    "T4": DeviceKind((15,), False),  # 16 GB, of which error correction takes a part
    "V100": DeviceKind((16, 32), False),
    "A10": DeviceKind((24,), False),
    "A10G": DeviceKind((24,), False),
    "A40": DeviceKind((48,), False),
    "A100": DeviceKind((40, 80), False),
    "RTX3090": DeviceKind((24,), False),
    "RTX4090": DeviceKind((24,), True),
    "L4": DeviceKind((24,), True),
    "L40": DeviceKind((48,), True),
    "L40S": DeviceKind((48,), True),
    "H100": DeviceKind((80,), True),
    "H200": DeviceKind((141,), True),
    "B200": DeviceKind((180,), True),
}
PART = re.compile(r"(?:(?P<count>\d+)\s*[x×*]\s*)?(?P<device>[^,]+)", re.IGNORECASE)
SIZED = re.compile(r"(?:(?P<name>.*?)[-:])?(?P<size>\d+(?:\.\d+)?)\s*GB", re.IGNORECASE)
MAX_DEVICES = 10_000


class Devices(NamedTuple):
    """Some devices of one kind. A CPU counts as a device: the memory of a host, or of a NUMA node."""

    number: int
    name: str
    bytes: int  # memory of each
    float8: bool
    is_cpu: bool = False

    @property
    def type(self) -> str:
        return "cpu" if self.is_cpu else "cuda"


def parse_devices(text: str) -> list[Devices]:
    """The devices of "8xH100", "2xA100-40GB,1xL4", "4x80GB" or "cpu:64GB". Raises UserError for anything else."""
    return [_parse(part.strip()) for part in text.split(",")]


def _parse(text: str) -> Devices:
    found = PART.fullmatch(text)
    if found is None:
        raise _unknown(text)
    count, device = int(found["count"] or 1), found["device"].strip()
    if not 1 <= count <= MAX_DEVICES:
        raise UserError(f"--devices has {text!r}: a number of devices from 1 to {MAX_DEVICES} was expected.", code=2)
    sized = SIZED.fullmatch(device)
    name = (device if sized is None else sized["name"] or "").upper()
    size = None if sized is None else float(sized["size"])
    if size == 0:
        raise UserError(f"--devices has {text!r}: a memory above 0 GB was expected.", code=2)
    if name == "CPU":
        if size is None:
            raise UserError("--devices has a cpu without its memory: give it as cpu:64GB.", code=2)
        return Devices(count, f"cpu:{size:g}GB", int(size * GB), False, is_cpu=True)
    if not name and size is not None:
        return Devices(count, f"{size:g}GB", int(size * GB), True)
    kind = KINDS.get(name)
    if kind is None:
        raise _unknown(device)
    if size is None and len(kind.sizes) > 1:
        names = " or ".join(f"{name}-{one}GB" for one in kind.sizes)
        raise UserError(f"--devices has {device!r}, which comes in several sizes: say {names}.", code=2)
    if size is not None and len(kind.sizes) > 1:
        name = f"{name}-{size:g}GB"
    return Devices(count, name, int((size or kind.sizes[0]) * GB), kind.float8)


def _unknown(device: str) -> UserError:
    return UserError(
        f"--devices has {device!r}, which is not a known device: {', '.join(KINDS)}. For any other, give the memory of "
        "each: 8xH100,4x80GB,cpu:64GB.",
        code=2,
    )
