"""Ranks on several hosts: what they must have in common, their keys, and how the end of a group is reported."""

import os
from pathlib import Path

import pytest

from tgi.microkernel.errors import UserError
from tgi.microkernel.links import curve
from tgi.microkernel.messages.protocol import LastExit
from tgi.microkernel.settings.loading import load_settings
from tgi.microkernel.settings.table import Settings
from tgi.worker.distributed.group_memory import create_offer, open_memory
from tgi.worker.engine.host_group import group_exit, shared_settings

KILLED = LastExit(b"own", "was killed by SIGKILL", outside=True)
FOLLOWED = LastExit(b"own", "ended with code 0", outside=True)
CRASHED = LastExit(b"other", "was killed by SIGSEGV", outside=False)
GROUP = {"group": "tcp://192.0.2.1:3200", "num_shard": 2, "keys": "host.key"}


def test_a_group_ends_by_the_fault_of_the_rank_that_crashed() -> None:
    assert group_exit(None, {1: CRASHED}) is None
    assert group_exit(KILLED, {1: FOLLOWED, 2: None}) == KILLED
    report = group_exit(FOLLOWED, {1: FOLLOWED, 2: CRASHED})
    assert report == LastExit(b"own", "ended with rank 2, which was killed by SIGSEGV", outside=False)
    own_fault = CRASHED._replace(boot=b"own")
    assert group_exit(own_fault, {1: FOLLOWED}) == own_fault


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 1}, "without `group`"),
        (GROUP | {"keys": None}, "without `keys`"),
        (GROUP | {"num_shard": 1}, "must be < `num_shard`"),
        (GROUP | {"rank": 2}, "must be < `num_shard`"),
        (GROUP | {"replicas": 2}, "must be 1 with `group`"),
    ],
)
def test_contradictory_settings_are_refused(given: dict[str, object], message: str) -> None:
    assert load_settings(GROUP | {"rank": 1}, {}).rank == 1
    with pytest.raises(UserError, match=message):
        load_settings(given, {})


def test_adapters_are_compared_by_content(tmp_path: Path) -> None:
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"22")):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + weights)
    first, same, other = (shared_settings(Settings(adapters=(("x", str(tmp_path / name)),))) for name in "abc")
    assert first == same != other
    assert shared_settings(Settings(dtype="float32")) != shared_settings(Settings())


def test_all_ranks_have_the_key_of_the_hosts(tmp_path: Path) -> None:
    scheduler, host, *_ = curve.create_keys(tmp_path)
    listening, connecting = curve.load_group_keys(host)
    assert connecting.secret == listening.secret
    assert listening.accepted == {connecting.server}
    assert connecting.server != curve.load_host_keys(host).server
    with pytest.raises(UserError, match="--group needs that of a host"):
        curve.load_group_keys(scheduler)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory of other processes is found in Linux's /proc")
def test_memory_is_opened_only_if_it_is_that_of_the_offer() -> None:
    memory, offer = create_offer()
    other, other_offer = create_offer()
    opened = open_memory(offer)
    os.pwrite(opened, b"shared", 0)
    assert os.pread(memory, 6, 0) == b"shared"
    with pytest.raises(FileNotFoundError, match="another process"):
        open_memory(offer._replace(file=other_offer.file))  # as in another PID namespace
    for file in (opened, memory, other):
        os.close(file)
    with pytest.raises(FileNotFoundError):
        open_memory(offer)
