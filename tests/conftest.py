"""Fixtures and settings of all tests: models, shared servers, markers, a directory for metrics."""

import atexit
import gc
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.models import demo_model as demo
from tests.models import model
from tgi.microkernel.observability import metrics
from tgi.worker.host_cpu import CPU_VARIABLE, configure_thread_waiting, limit_instruction_set, request_reproducible_mkl

if TYPE_CHECKING:
    from tests.live.server import SharedServers

# As in a worker, before torch is imported: waiting threads do not spin while servers on the same machine compute, sums
# are reproducible, and TGI_CPU limits the instruction set of the tests as it limits that of the servers they start.
configure_thread_waiting()
limit_instruction_set(os.environ.get(CPU_VARIABLE) or None)
request_reproducible_mkl()
# Without a GPU Triton interprets its kernels (tests/worker/gpu_kernels). The variable must be set before Triton is
# imported, which importing torch may do.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# The markers of files (pytestmark); the tests of a file without one are "fast".
MARKERS = ("live", "slow", "fuzz", "gpu")
MARKED = re.compile(rf"^pytestmark = \[?\s*pytest\.mark\.(?:{'|'.join(MARKERS)})\b", re.MULTILINE)

# Characters of the reason why a test failed, in the list at the end.
MAX_REASON = 200

# Collecting makes hundreds of thousands of objects that stay; searching them for garbage takes a tenth of the time.
gc.disable()
# From then on a search each so many new objects, and among older ones after ten of these. With Python's own 700 a tenth
# of the time of the tests goes into searches, which find little.
GC_THRESHOLDS = (10_000, 10, 10)

# No deadline per example: tests must not fail because the machine is busy. TGI_FUZZ_EXAMPLES asks for more examples.
hypothesis.settings.register_profile(
    "tests", deadline=None, max_examples=int(os.environ.get("TGI_FUZZ_EXAMPLES", "50"))
)
hypothesis.settings.load_profile("tests")

# The directory of metrics in this process, except where a test sets another.
SAMPLES = tempfile.TemporaryDirectory(prefix="tgi-metrics-")
metrics.use_directory(Path(SAMPLES.name))


@pytest.fixture
def samples_here(tmp_path: Path) -> Iterator[Path]:
    """Directs the samples of this process to tmp_path for one test."""
    store = metrics._process.store
    assert store is not None
    metrics.use_directory(tmp_path)
    yield tmp_path
    metrics.use_directory(store.directory)


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    return model("llama")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The model that is served by default; fetched on first use."""
    return demo()


@pytest.fixture(scope="session")
def shared_server() -> "Iterator[SharedServers]":
    """shared_server(*flags): a ready server that all tests of this process with the same flags share."""
    from tests.live.server import SharedServers  # imports httpx, which few tests need

    servers = SharedServers()
    yield servers
    servers.end_all()


def pytest_collection_finish() -> None:
    """Leaves what collecting has made out of all searches for garbage, also out of those in which pytest looks for
    unraisable exceptions at the end. Python's own search when it ends includes it; otherwise Triton reports leaks."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    atexit.register(gc.unfreeze)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Lists what failed, a line each, as the last lines of all: a log of CI may show no more than its end."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for report in [*reporter.getreports("failed"), *reporter.getreports("error")] if reporter else ():
        reason = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
        first = next(iter(reason.splitlines()), "")
        reporter.write_line(f"failed: {report.nodeid}: {first[:MAX_REASON]}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast` and `-m live`, files that have no such test are not imported at all, nor is the conftest.py of a
    directory without such a file: that takes most of the time of collecting."""
    wanted = config.option.markexpr
    files = [*collection_path.rglob("test_*.py")] if collection_path.is_dir() else [collection_path]
    if wanted not in ("fast", "live") or not all(file.name.startswith("test_") for file in files):
        return None
    return None if any(_has_tests(file, wanted) for file in files) else True


def _has_tests(file: Path, marker: str) -> bool:
    text = file.read_text()
    return not MARKED.search(text) if marker == "fast" else "pytest.mark.live" in text


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of files without a marker "fast"."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in MARKERS):
            item.add_marker("fast")
