"""What many tests share: models, and a place for the samples of metrics."""

import gc
import os
import tempfile
from pathlib import Path

import hypothesis
import pytest

from tests.models import demo_model as demo
from tests.models import model
from tgi.kernel import metrics
from tgi.worker.processor import CPU, hold, keep_order
from tgi.worker.threads import wait_shortly

# As a worker does, before anything imports torch: threads of these tests do not spin while servers beside them compute,
# sums come in one order, and TGI_CPU holds these tests, as it holds the servers that they start, to an instruction set.
wait_shortly()
hold(os.environ.get(CPU) or None)
keep_order()
# Without a GPU Triton interprets its kernels (tests/worker/gpu). It must know before anything imports it, which torch
# does at times.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# No test fails because the machine is busy.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# Where no test says otherwise.
SAMPLES = tempfile.TemporaryDirectory(prefix="tgi-metrics-")
metrics.use(Path(SAMPLES.name))


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    return model("llama")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real model that is served by default; fetched on the first use."""
    return demo()


def pytest_unconfigure() -> None:
    """What loops froze in this process is to be found when Python ends, or Triton tells of leaks."""
    gc.unfreeze()
