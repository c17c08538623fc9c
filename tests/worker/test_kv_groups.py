"""Models whose layers alternate between full attention and a sliding window, or a recurrent state: the real scheduler
gives their engine the pages of each KV group, and snapshots of the state. Every answer has the bits of one group that
keeps all positions, and of a state that was never copied."""

from pathlib import Path

import pytest
import torch

from tests.models import model as make
from tests.scheduler import simulation
from tests.scheduler.simulation import Simulation
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.driving import drive, make_engine
from tests.worker.test_sampling import bias
from tgi.microkernel.messages.kv_groups import (
    GroupKind,
    KVGroup,
    cache_tokens,
    group_layers,
    make_groups,
    paged_groups,
    pages_needed,
    recurrent_group,
)
from tgi.microkernel.messages.protocol import HeldPages, Step, StepResult
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.attention import build_attention, page_size
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.loader import build_model, read_model_spec

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LONGEST, CHUNK, NEW = 320, 48, 30
# Of a few ids a text repeats itself, so that drafts are proposed, and not all of them are right.
FEW_IDS = SamplingParams(0, **bias(dict.fromkeys(range(20, 24), 100.0)))
# The sliding windows have 40 tokens. With our kernels or not.
MODELS = [("gemma2", False), ("gemma2", True), ("gemma3_text", True), ("starcoder2", True)]
MODELS += [("lfm2", True), ("qwen3_next", True), ("mamba2", True), ("falcon_h1", True)]


class RealWorker:
    """An engine with the interface of the fake worker."""

    def __init__(self, model: DecoderModel, config: FakeWorkerConfig) -> None:
        self._model, self.limits = model, config.limits()._replace(dtype="float32")
        groups = paged_groups(self.limits.groups)
        kv = model.kv._replace(groups=groups)
        self._attention = build_attention(kv, config.pages, CPU, self.limits.state_slots)
        self._engine = TorchEngine(model, self._attention, self.limits)
        self.adapters = self._engine.adapters
        self._epoch = 0

    def share_memory(self, previous: "RealWorker") -> None:
        self._attention = previous._attention
        self._engine = TorchEngine(self._model, self._attention, self.limits)
        self.adapters = self._engine.adapters

    def lose_step(self, step: Step) -> None:
        self.run_step(step)

    def reset(self) -> None:
        self._engine.reset()

    def held_pages(self) -> list[HeldPages]:
        return self._engine.held_pages()

    def run_step(self, step: Step) -> StepResult:
        if step.epoch != self._epoch:
            self._engine.reset()
            self._epoch = step.epoch
        return self._engine.collect(self._engine.launch(step))


def load(directory: Path, native: bool) -> DecoderModel:
    kernels = our_kernels(read_model_spec(directory, "float32")) if native else None
    model = build_model(directory, "float32", "cpu", lambda stage, percent: None, kernels=kernels)
    assert isinstance(model, DecoderModel)
    return model


def worker_config(model: DecoderModel, rows: float) -> FakeWorkerConfig:
    """A worker with pages for this many requests of LONGEST tokens."""
    groups, size = make_groups(model.kv.sliding_windows, LONGEST), page_size(model.kv, CPU)
    pages = int(rows * pages_needed(groups, LONGEST, CHUNK, size))
    if model.kv.state is not None:
        groups = [*groups, KVGroup(GroupKind.RECURRENT, snapshots=5, interval=2 * size, drafts=6)]
    return FakeWorkerConfig(pages, size, 4, model.vocab_size, LONGEST, CHUNK, groups=tuple(groups))


def requests() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(3, 500, (150,), generator=generator).tolist()
    lengths = (1, 40, 17, 100)
    return [
        (common if at % 2 else []) + torch.randint(3, 500, (length,), generator=generator).tolist()
        for at, length in enumerate(lengths)
    ] + [[*range(20, 260)]]


@pytest.mark.parametrize(("kind", "native"), MODELS)
def test_answers_have_the_bits_of_one_group(kind: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and batches, from the prefix cache, preempted, with drafts, after restarts of scheduler and worker."""
    model = load(make(kind), native)
    config = worker_config(model, 2.2)
    recurrent = recurrent_group(config.groups) is not None
    assert recurrent or any(group.slides for group in config.groups)
    prompts = requests()
    monkeypatch.setattr(simulation, "FailingWorker", lambda config: RealWorker(model, config))
    for changes, asked in (({}, SamplingParams(0)), ({"max_drafts": 4, "prefix_caching": not recurrent}, FEW_IDS)):
        monkeypatch.setattr(simulation, "GREEDY", asked)
        expected = drive(make_engine(model), prompts, NEW, [asked] * len(prompts))
        sim = Simulation(config, SchedulerConfig(**changes))
        sim.worker_up()
        for prompt in prompts:
            sim.add(prompt, NEW)
        for _ in range(18):
            sim.step()
        if not changes:
            sim.restart_scheduler()
            for _ in range(5):
                sim.step()
            assert sim.scheduler.counters.cache_hit_tokens > 0 or config.groups[0].slides
            sim.worker_up()
            for _ in range(18):
                sim.step()
            sim.worker_up(keeps_pages=True)
        sim.run()
        for prompt in prompts[1:]:
            sim.add(prompt, NEW)
        sim.run()
        assert len(sim.requests) == 2 * len(prompts) - 1
        for request in sim.requests:
            assert request.ids == expected[prompts.index(request.prompt)].ids
        counters = sim.scheduler.counters
        assert (counters.cache_hit_tokens > 0) is sim.scheduler.config.prefix_caching
        assert (counters.draft_tokens > counters.accepted_draft_tokens > 0) is (asked is FEW_IDS)


def test_preempted_states_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last snapshot, on our kernels."""
    model = load(make("lfm2"), native=True)
    config = worker_config(model, 1.5)
    prompts = [prompt[:40] for prompt in requests()]
    expected = drive(make_engine(model), prompts, 200)
    monkeypatch.setattr(simulation, "FailingWorker", lambda config: RealWorker(model, config))
    sim = Simulation(config)
    sim.worker_up()
    added = [sim.add(prompt, 200) for prompt in prompts]
    sim.run()
    assert [request.ids for request in added] == [one.ids for one in expected]
    counters = sim.scheduler.counters
    assert counters.preemptions > 0
    assert counters.cache_hit_tokens > 0


def test_memory_of_alternating_layers() -> None:
    """As gemma-3-27b: 62 layers, each sixth with full attention, windows of 1,024, contexts of 131,072 tokens."""
    windows = [None if (layer + 1) % 6 == 0 else 1024 for layer in range(62)]
    groups = make_groups(windows, 131072)
    assert [(group.window, len(group.layers)) for group in groups] == [(0, 10), *[(1024, 10)] * 5, (1024, 2)]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(62))
    assert group_layers(groups, 62) == 10
    layers_pages = 10 * pages_needed(groups, 131072, 256, 32)
    assert layers_pages < 0.2 * 62 * 4096
    tokens = cache_tokens(groups, 100_000, 256, 32, 131072)
    assert tokens > 5 * 100_000 * 10 / 62 * 32


@pytest.mark.parametrize(
    ("windows", "longest", "layers"),
    [
        ([None] * 4, 4096, [[]]),
        ([512] * 4, 512, [[]]),  # no request is longer than the window
        ([512] * 4, 513, [[0, 1, 2, 3]]),
        ([512, None] * 2, 4096, [[1, 3], [0, 2]]),
        ([512, 512, None] * 2, 4096, [[2, 5], [0, 1], [3, 4]]),
        ([None] * 7 + [512] * 8, 4096, [[*range(7)], [*range(7, 15)]]),  # one empty place instead of six
    ],
)
def test_groups_of_layers(windows: list[int | None], longest: int, layers: list[list[int]]) -> None:
    assert [group.layers for group in make_groups(windows, longest)] == layers


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 100])
def test_a_request_never_holds_more_than_is_counted(window: int) -> None:
    """Whatever the chunks: the pages of the window and of a step."""
    group, size = KVGroup("sliding", window), 16
    for step in (1, 15, 16, 17, 48):
        most = group.most_pages(10_000, step, size)
        for start in range(0, 200):
            assert -(-(start + step) // size) - group.first_kept(start, size) <= most
            assert group.first_kept(start, size) * size <= max(0, start - window + 1)
