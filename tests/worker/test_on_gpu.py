"""What only a GPU can show: the real kernels, graphs and copies. Left out where there is none."""

from pathlib import Path

import pytest
import torch

from tests.models import model
from tests.worker.driving import Drawn, drive
from tgi.kernel.messages import Sampling
from tgi.kernel.settings import Settings
from tgi.worker.start import start_engine
from tgi.worker.warm import WARM_SAMPLING

GPU = "cuda"
PROMPTS = [[5, 9, 3], [7] * 20, list(range(40)), [1], [8, 8, 30, 2] * 200]
SAMPLINGS = [Sampling(0), Sampling(1, do_sample=True), WARM_SAMPLING._replace(watermark=False), Sampling(2, top_n=3)]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def drawn(kind: str, dtype: str, run: Path, device: str, graphs: tuple[int, ...]) -> list[Drawn]:
    """What the engine draws that a worker would start."""
    run.mkdir()
    settings = Settings(
        model_dir=model(kind),
        run_dir=run,
        dtype=dtype,
        device=device,
        cuda_graphs=graphs,
        max_batch_size=8,
        max_total_tokens=1000,
        max_batch_total_tokens=8000,
    )
    engine = start_engine(settings, lambda stage, percent: None)
    assert (engine._recorded is not None) == (device == GPU and graphs != (0,))
    return drive(engine, PROMPTS, 12, [*SAMPLINGS, Sampling(0)], stagger=2)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_gpu_draws_what_a_cpu_does(kind: str, tmp_path: Path) -> None:
    """In float32; recorded and not."""
    expected = drawn(kind, "float32", tmp_path / "cpu", "cpu", ())
    for name, graphs in (("plain", (0,)), ("recorded", ())):
        for one, other in zip(drawn(kind, "float32", tmp_path / name, GPU, graphs), expected, strict=True):
            assert one.ids == other.ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_recorded_steps_draw_what_computed_ones_do(kind: str, tmp_path: Path) -> None:
    """In bfloat16, by whatever kernels there are. Where tokens are level they may part, and go on otherwise."""
    plain = drawn(kind, "bfloat16", tmp_path / "plain", GPU, (0,))
    recorded = drawn(kind, "bfloat16", tmp_path / "recorded", GPU, ())
    for one, other in zip(plain, recorded, strict=True):
        same = next((at for at, pair in enumerate(zip(one.ids, other.ids, strict=True)) if len(set(pair)) > 1), 12)
        assert same > 0
        assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=0.1)
