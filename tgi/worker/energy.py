"""Energy of the devices that a worker computes on: NVML's counters of GPUs, RAPL's of processor packages.

Both count what the whole device takes, whatever uses it, from the time on when the worker is ready. A device without a
readable counter is left out: RAPL's files can be read by root alone on most systems, and GPUs before Volta have none.
"""

import ctypes
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.observability import metrics

log = logging.getLogger(__name__)

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


class EnergyCounter(NamedTuple):
    """A counter of a device."""

    source: str  # "gpu" or "cpu": label of tgi_energy_joules
    read: Callable[[], float]  # joules since some time. Raises OSError
    range: float = 0.0  # joules after which it starts from 0 again; 0: never


class EnergyMeter:
    """Adds what some devices have taken to tgi_energy_joules."""

    def __init__(self, counters: Sequence[EnergyCounter]) -> None:
        self._latest = [(counter, counter.read()) for counter in counters]

    def record(self) -> None:
        """Reads all counters. One that cannot be read any more is left out from now on, with a warning."""
        kept = []
        for counter, before in self._latest:
            try:
                now = counter.read()
            except OSError as error:
                log.warning("the energy of a %s is no longer measured: %s", counter.source.upper(), error)
                continue
            taken = now - before + (counter.range if now < before else 0.0)
            metrics.tgi_energy_joules.labels(source=counter.source).inc(max(0.0, taken))
            kept.append((counter, now))
        self._latest = kept


def find_counters(gpus: Sequence[str], packages: bool) -> list[EnergyCounter]:
    """The counters that can be read: of GPUs with these UUIDs and, if `packages`, of all processor packages."""
    finders = [lambda: nvml_counters(gpus)] * bool(gpus) + [rapl_counters] * packages
    found = []
    for find in finders:
        try:
            found += find()
        except OSError as error:
            log.debug("energy is not measured: %s", error)
    return found


def gpu_uuids(count: int) -> list[str]:
    """The UUIDs of the first `count` GPUs that this process sees; none if it uses none."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    number = min(count, torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in range(number)]


def rapl_counters() -> list[EnergyCounter]:
    """Those of the processor packages. Raises OSError if one cannot be read."""
    found = []
    for zone in sorted(POWERCAP.glob("intel-rapl:*")):  # AMD's processors, too
        if not (zone / "name").read_text().startswith("package-"):  # a part of a package, or the whole board
            continue
        counter = EnergyCounter("cpu", _microjoules(zone / "energy_uj"), _microjoules(zone / "max_energy_range_uj")())
        counter.read()
        found.append(counter)
    return found


def _microjoules(path: Path) -> Callable[[], float]:
    return lambda: int(path.read_text()) / 1e6


def nvml_counters(uuids: Sequence[str]) -> list[EnergyCounter]:
    """Those of these GPUs. Raises OSError if NVML is not there, or one cannot be read."""
    library = ctypes.CDLL(NVML)

    def call(name: str, *arguments: object) -> None:
        if (code := getattr(library, name)(*arguments)) != 0:
            raise OSError(f"{name} of {NVML} returns error {code}")

    def counter(uuid: str) -> EnergyCounter:
        device = ctypes.c_void_p()
        call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))

        def read() -> float:
            millijoules = ctypes.c_ulonglong()
            call("nvmlDeviceGetTotalEnergyConsumption", device, ctypes.byref(millijoules))
            return millijoules.value / 1e3

        read()
        return EnergyCounter("gpu", read)

    call("nvmlInit_v2")
    return [counter(uuid) for uuid in uuids]
