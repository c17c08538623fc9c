"""The energy of devices, from files as those of Linux' powercap and from a library with the functions of NVML."""

import subprocess
from pathlib import Path

import pytest

from tgi.microkernel.host import rundir
from tgi.microkernel.observability import metrics
from tgi.microkernel.processes.process_table import Load, Sampler
from tgi.worker import energy
from tgi.worker.energy import EnergyMeter, find_counters

# Two devices; each call counts 250 mJ more. A device of another name, or before nvmlInit_v2, is refused.
LIBRARY = """
#include <cstring>
static unsigned long long taken[2]; static bool begun;
extern "C" int nvmlInit_v2() { begun = true; return 0; }
extern "C" int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (!begun) return 1;
  if (!strcmp(uuid, "GPU-a")) { *device = &taken[0]; return 0; }
  if (!strcmp(uuid, "GPU-b")) { *device = &taken[1]; return 0; }
  return 6;
}
extern "C" int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) {
  *mj = *static_cast<unsigned long long *>(device) += 250;
  return 0;
}
"""


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages with 10 and 20 J, a part of one of them, and the board, which are not counted again."""
    zones = {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:0:0": "core", "intel-rapl:2": "psys"}
    for number, (zone, name) in enumerate(zones.items(), 1):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "energy_uj").write_text(f"{number * 10_000_000}\n")
        (tmp_path / zone / "max_energy_range_uj").write_text("50000000\n")
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    run = tmp_path / "run"
    rundir.create_run_dir(run)
    metrics.use_directory(run / "metrics")
    return tmp_path


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "nvml.cpp", tmp_path / "nvml.so"
    source.write_text(LIBRARY)
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(energy, "NVML", str(library))


def taken(run: Path) -> dict[str, float]:
    """tgi_energy_joules by source."""
    lines = [line.split() for line in metrics.render(run / "metrics").splitlines() if "energy_joules{" in line]
    return {name.split('"')[1]: float(value) for name, value in lines}


def test_packages_of_processors_are_added_up_over_overflows(powercap: Path, caplog: pytest.LogCaptureFixture) -> None:
    meter = EnergyMeter(find_counters([], packages=True))
    (powercap / "intel-rapl:0" / "energy_uj").write_text("11500000\n")
    (powercap / "intel-rapl:1" / "energy_uj").write_text("1000000\n")  # from 20 to 50, and 1 further
    meter.record()
    assert taken(powercap / "run") == {"cpu": 1.5 + 31}
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    (powercap / "intel-rapl:0" / "energy_uj").write_text("12000000\n")
    meter.record()
    meter.record()
    assert taken(powercap / "run") == {"cpu": 33}
    assert sum("no longer measured" in message for message in caplog.messages) == 1


@pytest.mark.usefixtures("nvml")
def test_gpus_are_found_by_their_uuid(powercap: Path) -> None:
    meter = EnergyMeter(find_counters(["GPU-a", "GPU-b"], packages=False))
    meter.record()
    assert taken(powercap / "run") == {"gpu": 0.5}
    assert find_counters(["GPU-c"], packages=False) == []


def test_what_cannot_be_read_is_left_out(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No NVML, and a package that only root may read; the series is absent."""
    monkeypatch.setattr(energy, "NVML", "libabsent-ml.so.1")
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    meter = EnergyMeter(find_counters(["GPU-a"], packages=True))
    meter.record()
    assert taken(powercap / "run") == {}


def test_the_load_has_joules_per_token(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = powercap / "run", [100.0]
    monkeypatch.setattr("tgi.microkernel.processes.process_table.time.monotonic", lambda: now[0])

    def load() -> Load:
        now[0] += 2
        return sampler.sample()[1]

    sampler = Sampler(run)
    assert (load().watts, load().joules_per_token) == (None, None)
    metrics.tgi_energy_joules.labels(source="gpu").inc(30)
    metrics.tgi_energy_joules.labels(source="cpu").inc(10)
    assert load().joules_per_token is None  # no tokens
    metrics.tgi_time_to_first_token_duration.observe(0.1)
    metrics.tgi_inter_token_duration.observe_all([0.1] * 79)
    found = load()
    assert found.joules_per_token == 0.5
    assert found.watts == 10.0  # of the latest seconds
