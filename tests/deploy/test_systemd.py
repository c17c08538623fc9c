"""deploy/systemd/tgi.service agrees with the program, and systemd accepts it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.shapes import DEPLOY, settings_of
from tests.deploy.test_kubernetes import MORE_VARIABLES, VARIABLES
from tgi import INTERRUPTED
from tgi.microkernel.processes.supervisor import ROLE_GRACE_SECONDS
from tgi.server import ROLES

UNIT = DEPLOY / "systemd" / "tgi.service"
SERVICE = re.findall(r"^(\w+)=(.*)$", UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0], re.M)


def test_the_program_accepts_its_settings_and_has_the_time_to_drain() -> None:
    options = dict(SERVICE)
    environment = dict(pair.split("=", 1) for name, value in SERVICE if name == "Environment" for pair in value.split())
    assert set(environment) <= VARIABLES | MORE_VARIABLES | {"HOME"}
    settings = settings_of(options["ExecStart"].split(), environment)
    drain = settings.graceful_termination_timeout + (len(ROLES) - 1) * ROLE_GRACE_SECONDS
    assert float(options["TimeoutStopSec"]) >= drain
    assert environment["TGI_RUN"].startswith(f"/run/{options['RuntimeDirectory']}/")
    for name in ("HF_HOME", "XDG_CACHE_HOME", "HOME"):
        assert environment[name] == f"/var/cache/{options['CacheDirectory']}"
    assert (options["KillMode"], options["OOMPolicy"]) == ("mixed", "continue")
    assert str(INTERRUPTED) not in options["RestartPreventExitStatus"].split()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "tgi.service"
    # A program that exists, in place of that of the installation.
    unit.write_text(UNIT.read_text().replace("ExecStart=/opt/tgi/bin/tgi", f"ExecStart={shutil.which('true')}"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("KillMode=", "KilMode="))
    assert "KilMode" in subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True).stderr
