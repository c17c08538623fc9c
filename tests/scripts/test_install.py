"""scripts/install.py and uv_install.py, with pip, uv and a local package index."""

import hashlib
import os
import platform
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from scripts.install import DRIVER_FILES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SIZE = 6_000_000


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


def publish(index: Path, name: str, version: str, tag: str = "py3-none-any") -> None:
    """Adds a wheel of SIZE bytes to an index."""
    module = name.replace("-", "_")
    wheel = index / name / f"{module}-{version}-{tag}.whl"
    wheel.parent.mkdir(parents=True)
    about = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(f"{module}.py", f"version = {version!r}")
        packed.writestr(f"{module}.bin", os.urandom(SIZE))
        packed.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        packed.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        packed.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (wheel.parent / "index.html").write_text(f'<a href="{quote(wheel.name)}#sha256={digest}">{wheel.name}</a>')


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an index with the packages big-one and torch; that of builds of torch for the CPU is below /cpu."""
    folder = tmp_path_factory.mktemp("index")
    publish(folder, "big-one", "1.5")
    publish(folder, "torch", "2.13.0", f"py3-none-linux_{platform.machine()}")
    publish(folder / "cpu", "torch", "2.13.0+cpu", f"py3-none-linux_{platform.machine()}")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def install(index: str, place: Path, package: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A second index that does not exist: pip warns of it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | variables
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": f"file://{place}/no"}
    command = [sys.executable, "-P", str(ROOT / "scripts" / "install.py"), "--no-cache-dir", "--target", str(place)]
    return subprocess.run([*command, package], env=environment, cwd=place.parent, capture_output=True, text=True)


def test_the_download_is_shown_in_megabytes(index: str, tmp_path: Path) -> None:
    (tmp_path / "tgi").mkdir()  # neither this nor pip.py is imported
    (tmp_path / "pip.py").write_text("raise SystemExit('imported from the current directory')")
    done = install(index, tmp_path / "place", "big-one")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "place" / "big_one.bin").stat().st_size == SIZE
    first, *_, last_of_fetching, installing, end = done.stderr.splitlines()
    assert first.startswith("pip: fetching big_one 1.5, ")
    assert last_of_fetching.startswith("pip: fetching big_one 1.5, 6.0 MB in ")
    assert installing == "pip: installing 1 package"
    assert end.startswith("Installed 1 package in ")
    assert end.endswith(" s; 6.0 MB were fetched.")
    assert "WARNING" not in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no build of torch is for CUDA")
@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cpu"])
def test_a_build_for_cuda_is_announced_and_torch_index_avoids_it(index: str, tmp_path: Path, build: str) -> None:
    variables = {"TORCH_INDEX": f"{index}/cpu"} if "cpu" in build else {}
    # A PATH without nvidia-smi. Where there is a driver the advice is left out.
    done = install(index, tmp_path / "place", "torch==2.13.0", PATH=str(tmp_path), **variables)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "place" / "torch.py").read_text() == f"version = {build!r}"
    announced = "pip: this torch comes with NVIDIA's CUDA libraries: about " in done.stderr
    assert announced is (build == "2.13.0")
    assert f"pip: fetching torch {build}, " in done.stderr
    if announced and not any(map(os.path.exists, DRIVER_FILES)):
        assert "TORCH_INDEX=URL" in done.stderr.partition("fetching torch")[0], "said before it is fetched"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no build of torch is for CUDA")
@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cpu"])
def test_uv_uses_the_indexes_of_pip_and_torch_index(index: str, tmp_path: Path, build: str) -> None:
    """Also an index of its configuration file that a variable overrides."""
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://127.0.0.1:9\n[install]\nno-deps = true\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment = kept | {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_INDEX_URL": index, "UV_NO_CACHE": "1"}
    if "cpu" in build:
        environment["TORCH_INDEX"] = f"{index}/cpu"
    command = [
        sys.executable,
        "-P",
        str(ROOT / "scripts" / "uv_install.py"),
        "--target",
        str(tmp_path / "place"),
        "torch",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "place" / "torch.py").read_text() == f"version = {build!r}"


def test_a_failure_of_pip_shows_its_whole_output(index: str, tmp_path: Path) -> None:
    done = install(index, tmp_path / "place", "small-one")
    assert done.returncode == 1
    assert "Looking in indexes: " in done.stderr
    assert "ERROR: No matching distribution found for small-one" in done.stderr
    assert "Installed" not in done.stderr


def test_sigterm_ends_pip_too_and_removes_its_temporary_directory(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "TMPDIR": str(tmp_path)}
        environment["PIP_INDEX_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-P", str(ROOT / "scripts" / "install.py"), "--target", str(tmp_path), "big-one"]
        with subprocess.Popen(command, env=environment) as installing:
            silent.accept()[0].close()  # pip connects, and will retry
            (pip,) = psutil.Process(installing.pid).children()
            installing.terminate()
        assert installing.returncode == 130
        assert not pip.is_running()
    assert not list(tmp_path.glob("tgi-install-*"))


def test_only_python_is_needed() -> None:
    """It runs in an empty environment."""
    command = [
        sys.executable,
        "-P",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import scripts.install",
    ]
    assert subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stderr == ""
