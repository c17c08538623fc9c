"""LoRA deltas on our own kernels: as close to merged weights as bfloat16 allows, the same bits in any batch."""

from pathlib import Path

import pytest
import torch

from tests.models import model as make
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.loras import make_adapter, merge
from tests.worker.test_lora import load, prompts, run
from tgi.worker.lora.packed_deltas import PackedWeights
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model, read_model_spec

# Fused projections, no gate, norms behind the parts, and what is usual.
KINDS = ("llama", "phi3", "starcoder2", "gemma2")


def wide(kind: str) -> Path:
    """A model of sizes that our kernels support."""
    return make(kind, hidden=128, intermediate=192)


def native(directory: Path) -> Model:
    kernels = our_kernels(read_model_spec(directory, "bfloat16"))
    return build_model(directory, "bfloat16", "cpu", lambda stage, percent: None, kernels=kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_are_as_close_to_merged_weights_as_torchs_bfloat16(kind: str, tmp_path: Path) -> None:
    directory = wide(kind)
    adapter = make_adapter(tmp_path / "adapter", directory, 40, lora_alpha=60)
    merged = load(merge(tmp_path / "merged", directory, adapter, {"": 60 / 40}))
    expected = run(merged, [(None, ids) for ids in prompts()]).log_softmax(-1)

    def off(model: Model) -> torch.Tensor:
        loaded = model.load_adapter(adapter)
        return (run(model, [(loaded, ids) for ids in prompts()]).log_softmax(-1) - expected).abs().mean()

    assert off(native(directory)) <= 1.5 * off(load(directory, "bfloat16")) + 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_chunks_and_other_rows(kind: str, tmp_path: Path) -> None:
    directory = wide(kind)
    model = native(directory)
    attention = ("q_proj", "v_proj", "qkv_proj")
    adapters = [
        model.load_adapter(make_adapter(tmp_path / "a", directory, 16, seed=1)),
        model.load_adapter(make_adapter(tmp_path / "b", directory, 5, seed=2)),
        model.load_adapter(make_adapter(tmp_path / "c", directory, 64, attention, seed=3)),
        model.load_adapter(make_adapter(tmp_path / "d", directory, 8, ("down_proj", "c_proj"), seed=4, layers=[1])),
        None,
        None,
    ]
    assert isinstance(adapters[0], PackedWeights)
    rows = list(zip(adapters, prompts(), strict=True))
    alone = torch.cat([run(model, [row]) for row in rows])
    assert torch.equal(run(model, rows), alone)
    for chosen in ([5, 3, 0], [4, 2], [2, 3]):
        assert torch.equal(run(model, [rows[at] for at in chosen]), alone[chosen]), chosen
    same = [(adapters[0], ids) for _, ids in rows]
    assert torch.equal(run(model, same)[0], alone[0])
    for at, sizes in ((0, [20, 1, 15, 1]), (3, [1, 62, 7])):
        assert torch.equal(run(model, [rows[at]], sizes), alone[at : at + 1]), sizes
