"""What the system allows this process: the limits of its control groups (cgroup v1 and v2) and of the process itself.

A container, a systemd unit (MemoryMax=, CPUQuota=) and a job scheduler limit a group of processes. Each limit of a
group holds for the groups in it, too. Linux only: elsewhere there are no limits.
"""

import contextlib
import resource
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import NamedTuple

SELF = Path("/proc/self")


class ControlGroup(NamedTuple):
    """A control group of a process."""

    version: int
    directory: Path

    def number(self, file: str) -> float:
        """The number in a file; infinity for "max", and if there is none."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.directory / file).read_text())
        return inf

    def statistic(self, file: str, name: str) -> int | None:
        """The value of a line `NAME VALUE` of a file; None if there is none."""
        with contextlib.suppress(OSError, ValueError):
            for line in (self.directory / file).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
        return None


def control_groups(controller: str, process: Path = SELF) -> list[ControlGroup]:
    """The group of a process (its directory in /proc) for "memory" or "cpu", then those around it as far as they can be
    seen; none where the controller is not used."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        found = [(1, path) for _, names, path in groups if controller in names.split(",")]
        found += [(2, path) for number, names, path in groups if (number, names) == ("0", "")]
        version, path = found[0]
        root, mounted = _mount(controller, version, process)
        inside = path == root or path.startswith(f"{root.rstrip('/')}/")
        directory = mounted / path[len(root) :].strip("/") if inside else mounted
        above = [one for one in directory.parents if one.is_relative_to(mounted)]
        return [ControlGroup(version, one) for one in (directory, *above)]
    return []


def _mount(controller: str, version: int, process: Path) -> tuple[str, Path]:
    """Which group the file system of a controller shows, and where. Raises ValueError if it is not mounted."""
    for line in (process / "mountinfo").read_text().splitlines():
        place, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if (kind == "cgroup2" and version == 2) or (kind == "cgroup" and controller in options.split(",")):
            _, _, _, root, directory, *_ = place.split(" ")
            return root, Path(directory)
    raise ValueError(f"no file system of the controller {controller}")


def memory_left_in_groups(process: Path = SELF) -> float:
    """Bytes that the control groups of a process may still use, cached files that can be dropped not counted; infinity
    without a limit."""
    return min((limit - used for limit, used in _memory(process)), default=inf)


def _memory(process: Path) -> Iterator[tuple[float, float]]:
    """The limit of each group, and what it uses."""
    for group in control_groups("memory", process):
        limits, used, cached = (
            (("memory.max", "memory.high"), "memory.current", "inactive_file")
            if group.version == 2
            else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, usage = min(map(group.number, limits)), group.number(used)
        if limit < inf and usage < inf:
            yield limit, usage - (group.statistic("memory.stat", cached) or 0)


def memory_left_in_process() -> float:
    """Bytes that this process may still map by its own limits (ulimit -v, ulimit -d); infinity without one."""
    left = inf
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = [int(word) for word in (SELF / "statm").read_text().split()]
        for kind, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            limit, _ = resource.getrlimit(kind)
            if limit != resource.RLIM_INFINITY:
                left = min(left, limit - used * resource.getpagesize())
    return left


def available_memory() -> int:
    """Bytes that this process can still allocate: the least that the host, the control groups and the limits of the
    process leave."""
    import psutil  # absent while the kernels are built for an installation

    host = psutil.virtual_memory().available
    return int(max(0, min(host, memory_left_in_groups(), memory_left_in_process())))


def usable_cpus(process: Path = SELF) -> float:
    """How many CPUs the quotas of the control groups of a process allow; infinity without one."""
    return min(map(_cpus, control_groups("cpu", process)), default=inf)


def _cpus(group: ControlGroup) -> float:
    if group.version == 1:
        quota, period = group.number("cpu.cfs_quota_us"), group.number("cpu.cfs_period_us")
        return quota / period if 0 < quota < inf else inf
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, (group.directory / "cpu.max").read_text().split())
        return quota / period
    return inf  # no file, or "max"


def oom_kills(process: Path = SELF) -> int | None:
    """How many processes of the control group of a process the kernel has ended for lack of memory; None if that is not
    known."""
    for group in control_groups("memory", process)[:1]:
        return group.statistic("memory.events" if group.version == 2 else "memory.oom_control", "oom_kill")
    return None
