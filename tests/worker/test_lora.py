"""LoRA deltas: equal to merged weights, and the same bits in any batch."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import model as make
from tests.worker.batches import Row, make_batch
from tests.worker.loras import make_adapter, merge
from tgi.worker.attention import build_attention
from tgi.worker.lora.deltas import AdapterSpan
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model

CPU = torch.device("cpu")
LENGTHS = (37, 1, 12, 70, 5, 9)
KINDS = ("llama", "qwen2", "phi3", "gemma2", "starcoder2", "granite", "olmo2", "cohere")


def load(directory: Path, dtype: str = "float32") -> Model:
    return build_model(directory, dtype, "cpu", lambda stage, percent: None)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def run(model: Model, rows: list[tuple[Any, list[int]]], sizes: list[int] | None = None) -> Tensor:
    """Logits [rows, vocab] after prompts with their adapters, all at once; or a single one in chunks."""
    attention = build_attention(model.kv, 60, CPU)
    longest = max(len(ids) for _, ids in rows)
    cuts = [0, *torch.tensor(sizes).cumsum(0).tolist()] if sizes else [0, longest]
    found = torch.empty(0)
    for start, stop in pairwise(cuts):
        chosen = [
            (adapter, Row(ids[start:stop], start, range(8 * at, 8 * at + 8))) for at, (adapter, ids) in enumerate(rows)
        ]
        batch = make_batch([row for _, row in chosen], attention.page_size)
        bounds = pairwise(batch.cu_query_lens.tolist())
        spans = [
            AdapterSpan(adapter, *ends)
            for (adapter, _), ends in zip(chosen, bounds, strict=True)
            if adapter is not None
        ]
        found = model.forward(batch._replace(lora_spans=spans), attention)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_equal_merged_weights(kind: str, tmp_path: Path) -> None:
    directory = make(kind)
    adapter = make_adapter(tmp_path / "adapter", directory, lora_alpha=6)
    ours = load(directory)
    merged = load(merge(tmp_path / "merged", directory, adapter, {"": 6 / 4}))
    loaded = ours.load_adapter(adapter)
    assert loaded.groups == {"attention", "output", "inner", "down"}
    found = run(ours, [(loaded, ids) for ids in prompts()])
    expected = run(merged, [(None, ids) for ids in prompts()])
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-4)
    plain = run(ours, [(None, ids) for ids in prompts()])
    assert ((plain.log_softmax(-1) - found.log_softmax(-1)).abs().amax(1) > 0.1).all()


SETTINGS: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({"use_rslora": True, "lora_alpha": 3}, {"": 3 / 2}),
    ({"targets": ("q_proj", "v_proj"), "dtype": torch.bfloat16, "lora_alpha": 8}, {"": 2.0}),
    ({"targets": ("up_proj",), "target_modules": r".*\.(up|side)_proj"}, {"": 1.0}),
    ({"targets": ("gate_proj", "o_proj"), "layers": [1]}, {"": 1.0}),
    (
        {"ranks": {"k_proj": 2, "layers.1.mlp.down_proj": 7}, "lora_alpha": 5, "alpha_pattern": {"q_proj": 9}},
        {"k_proj": 5 / 2, "layers.1.mlp.down_proj": 5 / 7, "q_proj": 9 / 4, "": 5 / 4},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "scales"), SETTINGS, ids=["rslora", "few", "pattern", "layers", "ranks"])
def test_scales_ranks_and_modules_are_those_of_the_config(
    options: dict[str, Any], scales: dict[str, float], tmp_path: Path
) -> None:
    directory = make("llama")
    adapter = make_adapter(tmp_path / "adapter", directory, **options)
    ours = load(directory)
    merged = load(merge(tmp_path / "merged", directory, adapter, scales))
    loaded = ours.load_adapter(adapter)
    found = run(ours, [(loaded, ids) for ids in prompts()])
    expected = run(merged, [(None, ids) for ids in prompts()])
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-4)


BITS = [("llama", "float32", 1), ("llama", "bfloat16", 2), ("phi3", "float16", 1), ("starcoder2", "bfloat16", 1)]


@pytest.mark.parametrize(("kind", "dtype", "threads"), BITS)
def test_bits_do_not_depend_on_chunks_and_other_rows(kind: str, dtype: str, threads: int, tmp_path: Path) -> None:
    torch.set_num_threads(threads)
    directory = make(kind)
    model = load(directory, dtype)
    attention = ("q_proj", "v_proj", "qkv_proj")
    adapters = [
        model.load_adapter(make_adapter(tmp_path / "a", directory, 16, seed=1)),
        model.load_adapter(make_adapter(tmp_path / "b", directory, 5, seed=2)),
        model.load_adapter(make_adapter(tmp_path / "c", directory, 64, attention, seed=3)),
        model.load_adapter(make_adapter(tmp_path / "d", directory, 8, ("down_proj", "c_proj"), seed=4, layers=[1])),
        None,
        None,
    ]
    rows = list(zip(adapters, prompts(), strict=True))
    alone = torch.cat([run(model, [row]) for row in rows])
    assert torch.equal(run(model, rows), alone)
    for chosen in ([5, 3, 0], [4, 2], [2, 3]):
        assert torch.equal(run(model, [rows[at] for at in chosen]), alone[chosen]), chosen
    # The same prompt under all, the same adapter under all.
    others = [(adapter, rows[0][1]) for adapter in adapters]
    assert torch.equal(run(model, others)[0], alone[0])
    same = [(adapters[0], ids) for _, ids in rows]
    assert torch.equal(run(model, same)[0], alone[0])
    for at, sizes in ((0, [20, 1, 15, 1]), (3, [1, 62, 7])):
        assert torch.equal(run(model, [rows[at]], sizes), alone[at : at + 1]), sizes
