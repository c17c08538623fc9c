"""Permits: the limit is exact for concurrent processes, and killed processes release theirs."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tgi.microkernel.admission.permits import Permits

HOLDER = """
import sys
from pathlib import Path
from tgi.microkernel.admission.permits import Permits
permits = Permits(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
for line in sys.stdin:
    name, count = line.split()
    print(getattr(permits, name)(int(count)), permits.held, flush=True)
"""
# Acquires and releases in a loop. For each held permit it writes a byte to a second file without a lock: two processes
# with the same permit would overwrite each other's mark.
RACER = """
import random, sys
from pathlib import Path
from tgi.microkernel.admission.permits import Permits
folder, limit, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
permits = Permits(folder / "permits", limit, limit * (seed - 1) // 3)
marks = (folder / "marks").open("r+b", buffering=0)
rng = random.Random(seed)
taken = refused = 0

def mark(permit, old, new):
    marks.seek(permit)
    found = marks.read(1)
    assert found == bytes([old]), f"permit {permit} is marked {found}, not {old}"
    marks.seek(permit)
    marks.write(bytes([new]))

held = []
for _ in range(4000):
    if rng.random() < 0.6:
        count = rng.randint(1, 3)
        if permits.acquire(count):
            taken += 1
            for permit in permits._held[len(held):]:
                mark(permit, 0, seed)
            held = permits._held.copy()
        else:
            refused += 1
    elif held:
        count = rng.randint(1, len(held))
        for permit in held[-count:]:
            mark(permit, seed, 0)
        permits.release(count)
        held = permits._held.copy()
for permit in held:
    mark(permit, seed, 0)
print(taken, refused)
"""


class Holder:
    """A process with permits that executes commands from standard input."""

    def __init__(self, path: Path, limit: int, home: int = 0) -> None:
        self.held = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), str(limit), str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def acquire(self, count: int = 1) -> bool:
        return self._tell(f"acquire {count}") == "True"

    def release(self, count: int = 1) -> None:
        self._tell(f"release {count}")

    def _tell(self, order: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(order, file=self.process.stdin, flush=True)
        answer, held = self.process.stdout.readline().split()
        self.held = int(held)
        return answer

    def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Any]:
    holders: list[Holder] = []

    def start(limit: int, homes: list[int]) -> list[Holder]:
        holders.extend(Holder(tmp_path / "permits", limit, home) for home in homes)
        return holders

    yield start
    for holder in holders:
        holder.end()


@pytest.mark.parametrize("homes", [[0, 0, 0], [0, 33, 66], [99, 1, 50]])
@pytest.mark.parametrize("seed", [1, 2])
def test_limit_is_exact_across_processes(hold: Any, homes: list[int], seed: int) -> None:
    holders = hold(100, homes)
    rng = random.Random(seed)
    free = 100
    for _ in range(400):
        holder = rng.choice(holders)
        count = rng.randint(1, 12)
        if rng.random() < 0.55:
            assert holder.acquire(count) == (count <= free), "all or none, and all as long as they are free"
        elif holder.held:
            holder.release(min(count, holder.held))
        free = 100 - sum(one.held for one in holders)
    while free:
        assert rng.choice(holders).acquire()
        free -= 1
    assert not any(holder.acquire() for holder in holders)


def test_killed_process_releases_its_permits(hold: Any) -> None:
    one, two = hold(10, [0, 5])
    assert one.acquire(7)
    assert two.acquire(3)
    assert not two.acquire()
    one.end()
    assert two.acquire(7)
    assert not two.acquire()


def test_concurrent_processes_never_share_a_permit(tmp_path: Path) -> None:
    (tmp_path / "marks").write_bytes(bytes(20))
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), "20", str(seed)], stdout=subprocess.PIPE)
        for seed in (1, 2, 3)
    ]
    said = [racer.communicate()[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert all(int(taken) > 100 for taken, _ in said)
    assert sum(int(refused) for _, refused in said) > 0
    assert (tmp_path / "marks").read_bytes() == bytes(20)


def test_releasing_more_than_held_raises(tmp_path: Path) -> None:
    permits = Permits(tmp_path / "permits", 3)
    assert not permits.acquire(4)
    assert permits.held == 0
    assert permits.acquire(3)
    permits.release(3)
    with pytest.raises(IndexError):
        permits.release()


def test_a_light_client_gets_permits_while_another_holds_all(tmp_path: Path) -> None:
    permits = Permits(tmp_path / "permits", 16)
    assert permits.acquire(16, client=1), "a client alone gets all permits"
    assert not permits.acquire(1, client=1)
    assert permits.acquire(2, client=2), "from the reserve"
    permits.release(3, client=1)
    assert not permits.acquire(1, client=1), "it holds more than its share of the contended permits"
    assert permits.acquire(5, client=2)
    assert permits.held_by(1) == 13
    assert permits.held_by(2) == 7
    permits.release(7, client=2)
    assert permits.acquire(3, client=1), "alone again"


def test_shares_are_by_weight(tmp_path: Path) -> None:
    permits = Permits(tmp_path / "permits", 16)
    assert permits.acquire(12, client=1)
    taken = 0
    while permits.acquire(1, client=2, weight=3.0):
        taken += 1
    assert taken == 8, "up to the end of the reserve; its share is 12"
    permits.release(12, client=1)
    assert permits.acquire(4, client=2, weight=3.0)
    assert permits.acquire(4, client=1)
    assert not permits.acquire(1, client=1)


def test_shares_count_permits_of_all_processes(hold: Any, tmp_path: Path) -> None:
    (other,) = hold(16, [8])
    assert other.acquire(16)
    permits = Permits(tmp_path / "permits", 16)
    assert permits.held_by(1) == 16
    assert not permits.acquire(1, client=1)
    assert permits.acquire(1, client=2)
    other.end()
    assert permits.acquire(11, client=2), "a killed process holds nothing"
    assert permits.held_by(1) in (0, 16), "its rows are freed when permits are scarce"
    assert permits.acquire(4, client=2)
    assert permits.held_by(1) == 0


def test_any_order_of_releases_keeps_the_counts(tmp_path: Path) -> None:
    permits, rng = Permits(tmp_path / "permits", 40), random.Random(0)
    held = dict.fromkeys(range(1, 6), 0)
    for _ in range(3000):
        client = rng.choice([*held])
        if rng.random() < 0.55:
            count = rng.randint(1, 3)
            held[client] += count if permits.acquire(count, client=client) else 0
        elif held[client]:
            permits.release(1, client=client)
            held[client] -= 1
        assert held == {client: permits.held_by(client) for client in held}
        assert permits.held == sum(held.values()) <= 50
