"""The worker process with a tiny model: loads, serves, and reports user errors."""

import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import model
from tests.tops import split_tops
from tests.worker.cpu_kernels.available import library
from tests.worker.driving import drive, make_engine
from tests.worker.test_fake_worker import good, slot, step
from tests.worker.test_loop import TIMEOUT, Scheduler
from tests.worker.test_sampling import bias
from tgi.microkernel.errors import FATAL, UserError
from tgi.microkernel.host import rundir
from tgi.microkernel.messages.codec import unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import LastExit, Status, Step, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.observability.progress import WorkerFacts
from tgi.microkernel.processes.child import ChildProcess, ProcessSpec
from tgi.microkernel.processes.process import fatal_error_path
from tgi.microkernel.recovery.exit_causes import OUT_OF_MEMORY
from tgi.microkernel.settings.table import Settings
from tgi.worker.engine import startup
from tgi.worker.engine.startup import PAGES_FILE, start_engine
from tgi.worker.models.loader import build_model
from tgi.worker.sampling.watermark import Watermark

pytestmark = pytest.mark.slow

PROMPT = [9, 8, 7, 6, 5, 4, 3]


def end(child: ChildProcess) -> int | None:
    """The exit code, or None if the process does not end."""
    deadline = time.monotonic() + TIMEOUT
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return child.poll()


def test_a_worker_process_computes_what_the_engine_computes(tmp_path: Path) -> None:
    rundir.create_run_dir(tmp_path)
    directory = model("llama")
    settings = Settings(
        dtype="bfloat16",
        max_batch_size=4,
        max_total_tokens=64,
        watermark_gamma=0.3,
        watermark_delta=5.0,
        disable_custom_kernels=True,
        model_dir=directory,
        run_dir=tmp_path,
    )
    sampling = SamplingParams(7, temperature=0.8, top_p=0.95, top_n=3, choice=1, typical_p=0.95, frequency_penalty=0.5)
    sampling = sampling._replace(
        count_penalty=0.5, presence_penalty=-0.5, watermark=True, **bias({3: -100.0, 511: 4.0})
    )
    served = build_model(directory, "bfloat16", "cpu", lambda stage, percent: None)
    local = make_engine(served, mark=Watermark(served.vocab_size, torch.device("cpu"), 0.3, 5.0))
    (want,) = drive(local, [PROMPT], 6, [sampling])
    scheduler = Scheduler(tmp_path)
    child = ChildProcess(ProcessSpec("worker", 0), settings)
    try:
        scheduler.until(lambda message: isinstance(message, Status) and message.stage == "loading weights")
        limits = scheduler.ready().limits
        assert limits is not None
        assert (limits.pages, limits.max_batch_total_tokens, limits.max_total_tokens) == (16, 256, 64)
        assert (limits.vocab_size, limits.dtype, limits.device) == (512, "bfloat16", "cpu")
        (state,) = [state for state in rundir.read_states(tmp_path) if state.state == "ready"]
        facts = WorkerFacts(**{name: state.facts[name] for name in WorkerFacts._fields})
        assert facts.weight_bytes == served.footprint.bytes > 0
        assert (facts.weight_bits, facts.dtype, facts.device) == (16.0, "bfloat16", "cpu")
        assert (facts.kv_cache_tokens, facts.max_total_tokens, facts.max_batch_size) == (256, 64, 4)
        assert facts.kv_cache_bytes == 256 * 2 * served.kv.layers * served.kv.kv_heads * served.kv.head_dim * 2
        assert re.fullmatch(r"torch's \(.+\), \d+ threads?", facts.kernels)
        steps = [step(1, [(3, 0, 7, 1)], [slot(3, PROMPT, encode(sampling))], [(3, 5)])]
        steps += [step(number, [(3, number + 5, 1, 1)]) for number in range(2, 7)]
        scheduler.send(*steps)
        results = [scheduler.result() for _ in steps]
        assert [token for result in results for token in good(result)] == want.ids
        assert [value for result in results for value in unpack_float32(result.logprobs)] == want.logprobs
        assert [top for result in results for top in split_tops(result)] == want.tops
        child.signal(signal.SIGTERM)
        assert end(child) == 0
    finally:
        child.signal(signal.SIGKILL)
        child.close()
        scheduler.link.close()


def test_a_user_error_ends_the_worker_without_a_restart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rundir.create_run_dir(tmp_path)
    settings = Settings(model_dir=Path("/nowhere"), run_dir=tmp_path)
    child = ChildProcess(ProcessSpec("worker", 0), settings)
    try:
        assert end(child) == FATAL
    finally:
        child.signal(signal.SIGKILL)
        child.close()
    assert "/nowhere is not a directory" in fatal_error_path(tmp_path, "worker-0").read_text()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_device_that_is_not_there_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no CUDA device"):
        start_engine(Settings(model_dir=model("llama"), run_dir=tmp_path, device="cuda"), lambda stage, percent: None)


def test_more_tokens_than_the_models_context_are_rejected(tmp_path: Path) -> None:
    settings = Settings(model_dir=model("llama"), run_dir=tmp_path, device="cpu", max_total_tokens=4000)
    with pytest.raises(UserError, match="at most 2048 tokens"):
        start_engine(settings, lambda stage, percent: None)


def test_an_8_bit_kv_cache_is_rejected_on_cpu(tmp_path: Path) -> None:
    settings = Settings(model_dir=model("llama"), run_dir=tmp_path, device="cpu", kv_cache_dtype="fp8_e4m3fn")
    with pytest.raises(UserError, match=r"`kv_cache_dtype` is fp8_e4m3fn.* for GPUs.* Leave out --kv-cache-dtype,"):
        start_engine(settings, lambda stage, percent: None)


def test_a_draft_model_with_recurrent_layers_is_rejected(tmp_path: Path) -> None:
    models = {"model_dir": model("llama"), "draft_model_dir": model("lfm2")}
    settings = Settings(**models, run_dir=tmp_path, device="cpu", speculate=2)
    with pytest.raises(UserError, match="A model with recurrent layers cannot draft"):
        start_engine(settings, lambda stage, percent: None)


def test_a_draft_model_computes_in_the_type_of_the_served_model(tmp_path: Path) -> None:
    draft = model("llama", dtype="float16")
    settings = Settings(
        model_dir=model("llama", dtype="float32"), draft_model_dir=draft, speculate=2, run_dir=tmp_path, device="cpu"
    )
    engine = start_engine(settings, lambda stage, percent: None)
    assert engine._draft_runner is not None
    assert engine._draft_runner._model.kv.dtype is torch.float32


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_the_kv_cache_on_cpu_may_have_another_type(stored: str, tmp_path: Path) -> None:
    library()
    values = {"model_dir": model("llama", dtype="bfloat16"), "run_dir": tmp_path, "device": "cpu"}
    engine = start_engine(Settings(**values, kv_cache_dtype=stored), lambda stage, percent: None)
    assert engine._attention._kv.cache_dtype is getattr(torch, stored)
    torchs = Settings(**values, kv_cache_dtype=stored, disable_custom_kernels=True)
    with pytest.raises(UserError, match="which only our own CPU kernels support"):
        start_engine(torchs, lambda stage, percent: None)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_worker_starts_with_the_models_of_its_predecessor(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library()
    monkeypatch.setattr(startup, "_shared", None)
    directory = shutil.copytree(model(family), tmp_path / "model")
    settings = Settings(model_dir=directory, run_dir=tmp_path, device="cpu")
    stages: list[str] = []
    left = []
    first = start_engine(settings, lambda stage, percent: stages.append(stage), share=lambda: left.append(len(stages)))
    assert left == [stages.index("warming up")]
    (want,) = drive(first, [PROMPT], 6)
    stages.clear()
    causes = (("was killed by SIGKILL", True, True), ("was killed by SIGSEGV", False, False))
    for cause, outside, kept in (*causes, (OUT_OF_MEMORY, True, False)):
        last_exit = LastExit(b"boot", cause, outside)
        next_one = start_engine(
            settings, lambda stage, percent: stages.append(stage), share=lambda: left.append(0), last_exit=last_exit
        )
        assert startup.keeps_pages(last_exit) is kept
        assert next_one.page_memory is not None
        assert any(part.any() for part in next_one.page_memory) is kept
        state = next_one._attention.state
        assert (state is None) == (family == "llama")
        assert state is None or any(part.any() for part in state.tensors) is kept
        assert drive(next_one, [PROMPT], 6) == [want]
    assert (len(left), stages) == (1, [])
    (directory / "config.json").write_text((directory / "config.json").read_text() + " ")
    with pytest.raises(SystemExit):
        start_engine(settings, lambda stage, percent: None)


@pytest.mark.parametrize("least", [{"max_batch_prefill_tokens": 1}, {"max_total_tokens": 2}, {"max_batch_size": 1}])
def test_the_smallest_limits_are_enough_to_start(least: dict[str, int], tmp_path: Path) -> None:
    values = {"max_batch_size": 4, "max_total_tokens": 64, "speculate": 4} | least
    settings = Settings(model_dir=model("llama"), run_dir=tmp_path, device="cpu", **values)
    limits = start_engine(settings, lambda stage, percent: None).limits
    assert all(getattr(limits, name) == value for name, value in least.items())


def test_steps_of_all_sizes_are_run_to_compile_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(build_model(model("llama"), "float32", "cpu", lambda stage, percent: None), slots=8, pages=8)
    launch, sizes, given = engine.launch, [], []

    def recorded(step: Step) -> Any:
        sizes.append(unpack_int32(step.counts))
        given.append(step.slots)
        return launch(step)

    monkeypatch.setattr(engine, "launch", recorded)
    startup.warm_up_sizes(engine, engine.limits, 6, 4096)
    assert {len(counts) for counts in sizes if set(counts) == {1}} == {1, 2, 4, 6}
    assert {counts[0] for counts in sizes if len(counts) == 1} >= {1, 2, 4, 8, 16, 32, 64}
    assert max(map(max, sizes)) + 2 == 8 * engine.limits.page_size
    assert next(rows for rows, slots in zip(sizes, given, strict=True) if slots and slots[0].prompt_logprobs_from) == [
        8 * engine.limits.page_size - 2
    ]  # the longest chunk is run with all that takes memory


def test_a_restarted_worker_has_as_many_pages_as_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits hold for a deployment's life: a worker that finds a little less memory free does not come up smaller."""
    settings = Settings(model_dir=model("llama"), run_dir=tmp_path, max_batch_size=4096, device="cpu")

    def pages(free: int) -> int:
        monkeypatch.setattr(startup, "available_memory", lambda: free)
        return start_engine(settings, lambda stage, percent: None).limits.pages

    first = pages(100 << 20)
    assert pages(90 << 20) == first
    (tmp_path / PAGES_FILE).unlink()  # another deployment
    assert pages(90 << 20) < first
