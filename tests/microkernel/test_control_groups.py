"""Limits of control groups (v1 and v2, of the group itself and those around it) and of the process."""

import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from tgi.microkernel.host.control_groups import memory_left_in_groups, oom_kills, usable_cpus

MB = 1 << 20
V2 = "40 31 0:38 {root} {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {root} {mount} rw,relatime - cgroup cgroup rw,memory,cpu"
OTHER = "37 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd"
HOST_V2 = [OTHER, V2], "1:name=systemd:/\n0::/system.slice/tgi.service"  # of systemd
HOST_V1 = [OTHER, V1], "9:name=systemd:/\n4:memory,cpu:/system.slice/tgi.service\n0::/"


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def limited(directory: Path, version: int, limit: object, used: int, cached: int = 0) -> None:
    """Writes a group's files, in MB."""
    given = limit if isinstance(limit, str) else int(limit) * MB  # type: ignore[call-overload]
    if version == 2:
        stat = f"anon 5\ninactive_file {cached * MB}"
        write(directory, memory__max=given, memory__current=used * MB, memory__stat=stat)
    else:
        stat = f"inactive_file 5\ntotal_inactive_file {cached * MB}"
        given = 0x7FFFFFFFFFFFF000 if given == "max" else given
        write(directory, memory__limit_in_bytes=given, memory__usage_in_bytes=used * MB, memory__stat=stat)


def process(tmp_path: Path, mounts: list[str], groups: str, root: str = "/") -> Path:
    """The directory in /proc of a process in these groups; the file system of the groups is tmp_path/cgroup."""
    lines = [line.format(root=root, mount=tmp_path / "cgroup") for line in mounts]
    write(tmp_path / "proc", mountinfo="\n".join(lines), cgroup=groups)
    return tmp_path / "proc"


@pytest.mark.parametrize(("version", "place"), [(2, HOST_V2), (1, HOST_V1)], ids=["v2", "v1"])
def test_the_tightest_of_the_own_group_and_those_around_it_counts(
    version: int, place: tuple[list[str], str], tmp_path: Path
) -> None:
    own = process(tmp_path, *place)
    slice_, unit = tmp_path / "cgroup" / "system.slice", tmp_path / "cgroup" / "system.slice" / "tgi.service"
    unit.mkdir(parents=True)
    assert memory_left_in_groups(own) == inf
    limited(slice_, version, "max", 900)
    limited(unit, version, 600, 200, cached=50)  # MemoryMax=
    assert memory_left_in_groups(own) == 450 * MB
    limited(slice_, version, 1000, 900)
    assert memory_left_in_groups(own) == 100 * MB
    if version == 2:
        write(unit, memory__high=210 * MB)
        assert memory_left_in_groups(own) == 60 * MB
    assert (usable_cpus(own), oom_kills(own)) == (inf, None)
    if version == 2:
        write(unit, cpu__max="150000 100000", memory__events="oom 4\noom_kill 3")
        write(slice_, cpu__max="max 100000")
    else:
        write(unit, cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000, memory__oom_control="under_oom 0\noom_kill 3")
        write(slice_, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert (usable_cpus(own), oom_kills(own)) == (1.5, 3)


@pytest.mark.parametrize(
    ("mounts", "groups", "root"),
    [
        ([V2], "0::/", "/"),  # a container with a namespace of its own
        ([V1], "4:memory:/docker/abc", "/docker/abc"),  # one without
        ([V1], "4:memory:/", "/docker/abc"),
        ([V2], "0::/../other", "/"),  # the process was moved out of the namespace
    ],
)
def test_containers(tmp_path: Path, mounts: list[str], groups: str, root: str) -> None:
    limited(tmp_path / "cgroup", 2 if mounts == [V2] else 1, 300, 100)
    assert memory_left_in_groups(process(tmp_path, mounts, groups, root)) == 200 * MB


@pytest.mark.parametrize(
    ("mounts", "groups"), [([], "0::/"), ([OTHER], "4:memory:/x"), ([V2], ""), (["odd"], "0::/"), ([V2], "0::/gone")]
)
def test_no_limit_is_known(tmp_path: Path, mounts: list[str], groups: str) -> None:
    assert memory_left_in_groups(process(tmp_path, mounts, groups)) == inf
    assert memory_left_in_groups(tmp_path / "nothing") == inf


LIMITED = """
import resource, sys
from tgi.microkernel.host.control_groups import available_memory
kind = getattr(resource, sys.argv[1])
resource.setrlimit(kind, (int(sys.argv[2]), resource.RLIM_INFINITY))
left = available_memory()
block = bytearray(left - (4 << 20))
try:
    more = bytearray(8 << 20)
except MemoryError:
    print(left)
"""


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what a process has mapped")
def test_the_limits_of_the_process_count(kind: str) -> None:
    limit = 500 * MB
    done = subprocess.run([sys.executable, "-c", LIMITED, kind, str(limit)], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < limit
