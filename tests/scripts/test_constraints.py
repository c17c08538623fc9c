"""constraints.txt against the package index, whose metadata alone is read: every Python and platform that the server
supports finds a version and a wheel of everything, dependencies of torch's CUDA build included."""

import hashlib
import os
import re
import subprocess
import sysconfig
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# As uv names them; glibc and macOS of the oldest systems that all wheels support.
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31", "aarch64-apple-darwin")
MACOS = "14.0"
# Libraries that torch's builds for CUDA pin themselves; a build for another CUDA has others.
OF_TORCH = re.compile(r"(nvidia|cuda)-")
# An older set on which the source tree runs, too.
OLDER = ("torch==2.11.*", "triton==3.6.*", "transformers==5.17.*")
UNREACHABLE = 2  # uv's exit code; 1 means that there is no solution
SECONDS = 300  # of one resolution, which takes one or two


def requirements() -> str:
    """What `pip install .[dev]` asks for. Named without the project, which uv would have to build."""
    files = [(ROOT / "requirements" / name).read_text() for name in ("base.txt", "worker.txt")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return "\n".join([*files, *(line for extra in extras.values() for line in extra if "tgi-server[" not in line)])


def resolve(python: str, platform: str, constraints: str) -> "subprocess.CompletedProcess[str]":
    """Resolves from the index alone: uv reads no configuration of pip's, such as folders with wheels."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never", "MACOSX_DEPLOYMENT_TARGET": MACOS}
    environment |= {"UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "2"}
    command = [Path(sysconfig.get_path("scripts")) / "uv", "pip", "compile", "-", "--only-binary", ":all:", "--quiet"]
    command += ["--python-version", python, "--python-platform", platform, "--no-header", "--no-annotate"]
    command += ["--constraints", constraints]
    return subprocess.run(
        command, input=requirements(), env=environment, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT
    )


def found(resolved: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    """Name -> version."""
    if resolved.returncode == UNREACHABLE:
        assert "CI" not in os.environ, f"The package index cannot be reached: {resolved.stderr}"
        pytest.skip(resolved.stderr)
    assert resolved.returncode == 0, resolved.stderr
    return dict(line.split("==") for line in resolved.stdout.split())


@pytest.fixture
def passed() -> Path:
    """Exists if this test has passed with the same content before: an index keeps what it has."""
    content = Path(__file__).read_bytes() + CONSTRAINTS.read_bytes() + requirements().encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tgi-tests" / "constraints"
    return cache / hashlib.sha256(content).hexdigest()


def test_every_platform_finds_what_is_pinned(tmp_path: Path, passed: Path) -> None:
    if passed.exists():
        return
    older = tmp_path / "older.txt"
    older.write_text("\n".join(OLDER))
    # Every Python on one platform, and the newest on each: wheels for it come last.
    cases = [
        (python, platform, str(CONSTRAINTS))
        for python in PYTHONS
        for platform in PLATFORMS
        if platform == PLATFORMS[0] or python == PYTHONS[-1]
    ]
    with ThreadPoolExecutor(4) as pool:
        *all_resolved, with_older = pool.map(lambda case: resolve(*case), [*cases, ("3.12", PLATFORMS[0], str(older))])
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE))
    pinned = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    asked = set()
    for (_, platform, _), resolved in zip(cases, all_resolved, strict=True):
        versions = found(resolved)
        own = {name: version for name, version in versions.items() if not OF_TORCH.match(name)}
        assert own.items() <= pinned.items(), "a package without a pin"
        assert ("triton" in own) is ("linux" in platform), "the builds of Linux are for CUDA"
        asked |= set(own)
    assert asked == set(pinned), "a pin that nothing needs"
    assert found(with_older)["torch"].startswith("2.11.")
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()
