"""Files that processes map into memory have no holes: a write to one ends the process where the disk is full."""

import subprocess
import sys
from pathlib import Path

from tgi.microkernel.admission.permits import Permits
from tgi.microkernel.admission.token_rates import TokenRates
from tgi.microkernel.host.mapped_file import map_file
from tgi.microkernel.observability.flight_recorder import RingRecorder
from tgi.microkernel.observability.metric_store import FILE_BYTES, SUMS, MetricStore, fold_ended_processes
from tgi.microkernel.processes.process import Heartbeat
from tgi.microkernel.recovery.work_register import WorkRegister


def test_every_file_has_its_disk_space_before_it_is_written(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "api-0.beat")
    WorkRegister.open(tmp_path / "api-0.work")
    RingRecorder(tmp_path / "flight" / "api-0.ring")
    Permits(tmp_path / "permits", limit=10_000)
    TokenRates(tmp_path / "token-rates")
    store = MetricStore(tmp_path)
    for number in range(1000):  # more than fit into a new file
        store.number(SUMS, "tgi_request_count", (str(number),)).inc()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) == 6
    assert max(path.stat().st_size for path in tmp_path.glob("*.db")) > FILE_BYTES
    for path in files:
        assert path.stat().st_blocks * 512 >= path.stat().st_size, path


def test_a_file_is_never_shortened(tmp_path: Path) -> None:
    longer = map_file(tmp_path / "file", 8192)
    longer[8191] = 1
    shorter = map_file(tmp_path / "file", 4096)
    shorter[0] = 2
    assert (longer[0], longer[8191]) == (2, 1)
    assert (tmp_path / "file").stat().st_size == 8192


# No file of the process can grow, as where the disk is full.
FULL_DISK = """
import resource, sys
from pathlib import Path
from tgi.microkernel.observability.metric_store import SUMS, MetricStore
from tgi.microkernel.admission.permits import Permits
from tgi.microkernel.admission.token_rates import TokenRates
directory = Path(sys.argv[1])
store = MetricStore(directory)
store.number(SUMS, "tgi_request_count", ()).inc()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for number in range(1000):
    store.number(SUMS, "tgi_request_failure", (str(number),)).inc()
store.number(SUMS, "tgi_request_count", ()).inc()
permits = Permits(directory / "permits", limit=2)
print(permits.acquire(), permits.acquire(), permits.acquire())
rates = TokenRates(directory / "token-rates")
rates.charge(7, 60, 120)
print(rates.wait_seconds(7, 60) > 50)
"""


def test_a_process_works_on_where_the_disk_is_full(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True True False\nTrue\n"), done.stderr
    assert done.stderr.count("metrics are missing") == 1
    assert fold_ended_processes(tmp_path, [int(path.stem.partition("_")[2]) for path in tmp_path.glob("sums_*.db")])
