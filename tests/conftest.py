"""Fixtures and settings of all tests: models, shared servers, markers by path, a directory for metrics."""

import atexit
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.models import demo_model as demo
from tests.models import model
from tgi.microkernel import metrics
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

# Marker -> prefixes of test paths. A test gets the first marker that matches, else `fast`.
MARKERS = {
    "live": ("live/", "clients/", "scripts/test_turns", "scripts/test_front_ends"),
    "gpu": ("worker/test_on_gpu",),
    "fuzz": ("property/", "api/test_any_body", "hub/test_hostile_gguf"),
    "slow": (
        "api/routes/test_adapters",
        "api/test_lifecycle",
        "api/test_readiness",
        "deploy/test_docker",
        "hub/",
        "microkernel/test_log",
        "scheduler/test_cost",
        "simulation/",
        "scripts/",
        "test_wheel",
        "tokenizer/answer/test_calls",
        "worker/cpu_kernels/test_attention",
        "worker/cpu_kernels/test_gated_linear",
        "worker/cpu_kernels/test_models",
        "worker/cpu_kernels/test_neon",
        "worker/cpu_kernels/test_vectors",
        "worker/distributed/test_models",
        "worker/gpu_kernels/",
        "worker/quantization/test_gguf",
        "worker/quantization/test_quantize",
        "worker/test_attention",
        "worker/test_amx_permission",
        "worker/test_batch_independence",
        "worker/test_draft_runner",
        "worker/test_dtype",
        "worker/test_fallback",
        "worker/test_families",
        "worker/test_host_cpu",
        "worker/test_load",
        "worker/test_main",
        "worker/test_models",
        "worker/test_planning",
        "worker/test_prompt_logprobs",
        "worker/test_quantized_models",
        "worker/test_sampling",
    ),
}

# Run first, so that no process is left with one of them while the others have nothing to do. Files that compute
# alternate with files of servers, which mostly wait.
LONGEST_FILES = (
    "live/test_operating",
    "test_wheel",
    "live/test_starting",
    "simulation/",
    "clients/",
    "worker/cpu_kernels/test_neon",
    "live/test_hung_processes",
    "live/test_network",
    "live/test_chaos",
    "worker/gpu_kernels/test_compiling",
    "live/test_hosts",
    "live/test_crash_isolation",
    "worker/distributed/test_models",
    "live/test_ray",
    "live/test_host_ranks",
    "worker/cpu_kernels/test_attention",
    "live/test_tree",
    "worker/test_planning",
    "live/test_tensor_parallel",
    "worker/test_attention",
    "live/test_grammars",
    "worker/test_models",
    "live/test_models",
    "live/test_load",
)
# The other files of servers are spread over this share of the rest: other tests use the cores while servers start, and
# no file that takes long is the last one.
SPREAD = 0.7

# Characters of the reason why a test failed, in the list at the end.
MAX_REASON = 200

# Collecting makes hundreds of thousands of objects that stay; searching them for garbage takes a tenth of the time.
gc.disable()

# No deadline per example: tests must not fail because the machine is busy.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# The directory of metrics in this process, except where a test sets another.
SAMPLES = tempfile.TemporaryDirectory(prefix="tgi-metrics-")
metrics.use_directory(Path(SAMPLES.name))


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
    gc.enable()
    atexit.register(gc.unfreeze)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Lists what failed, a line each, as the last lines of all: a log of CI may show no more than its end."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for report in [*reporter.getreports("failed"), *reporter.getreports("error")] if reporter else ():
        reason = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
        first = next(iter(reason.splitlines()), "")
        reporter.write_line(f"failed: {report.nodeid}: {first[:MAX_REASON]}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test by its path, so that `pytest -m fast` selects those that neither start servers nor take long."""
    for item in items:
        path = item.nodeid.removeprefix("tests/")
        item.add_marker(next((name for name, paths in MARKERS.items() if path.startswith(paths)), "fast"))
    turns = _turns(items)
    items.sort(key=lambda item: turns[item.path])


def _turns(items: list[pytest.Item]) -> dict[Path, float]:
    """The order of the files: less than 0 for those of LONGEST_FILES, 0 to 1 for the others."""
    turns: dict[Path, float] = {}
    others: dict[bool, list[Path]] = {False: [], True: []}  # whether they start servers
    for path, item in {item.path: item for item in items}.items():
        name = item.nodeid.removeprefix("tests/")
        longest = next((turn for turn, prefix in enumerate(LONGEST_FILES) if name.startswith(prefix)), None)
        if longest is None:
            others[item.get_closest_marker("live") is not None].append(path)
        else:
            turns[path] = longest - len(LONGEST_FILES)
    for servers, paths in others.items():
        turns |= {path: (SPREAD if servers else 1.0) * turn / len(paths) for turn, path in enumerate(paths)}
    return turns
