"""How models are divided among ranks."""

from dataclasses import replace

import pytest
import torch

from tests.models import model as make
from tgi.microkernel.errors import UserError
from tgi.worker.distributed.sharding import Shard, shard_decoder, whole_model
from tgi.worker.models.loader import read_model_spec
from tgi.worker.quantization.quantize import quantize_weight
from tgi.worker.quantization.weight import QuantizedWeight, as_plain, select_part

LLAMA = read_model_spec(make("llama"), "float32").decoder
assert LLAMA is not None


def shards(ranks: int, heads: int, kv_heads: int, intermediate: int = 100) -> list[Shard]:
    assert LLAMA is not None
    config = replace(LLAMA, heads=heads, kv_heads=kv_heads, intermediate=intermediate)
    return [shard_decoder(config, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(1, 4, 2), (2, 9, 3), (3, 9, 3), (2, 8, 8), (4, 8, 2), (8, 8, 1)]
)
def test_every_head_column_and_token_has_one_rank(ranks: int, heads: int, kv_heads: int) -> None:
    found = shards(ranks, heads, kv_heads)
    assert [head for shard in found for head in shard.heads] == list(range(heads))
    assert {head for shard in found for head in shard.kv_heads} == set(range(kv_heads))
    assert [column for shard in found for column in shard.inner] == list(range(100))
    assert LLAMA is not None
    assert [token for shard in found for token in shard.vocabulary] == list(range(LLAMA.vocab_size))
    for shard in found:
        # Queries stay with the KV head that they read.
        per_kv_head = heads // kv_heads
        assert {head // per_kv_head for head in shard.heads} == set(shard.kv_heads)
        assert len(shard.heads) % len(shard.kv_heads) == 0


def test_inner_columns_are_divided_in_large_blocks() -> None:
    assert [shard.inner for shard in shards(2, 4, 2, 384)] == [range(128), range(128, 384)]
    assert [shard.inner for shard in shards(2, 4, 2, 192)] == [range(64), range(64, 192)]


@pytest.mark.parametrize(("ranks", "heads", "kv_heads", "intermediate"), [(4, 9, 3, 100), (8, 4, 2, 100), (2, 4, 2, 1)])
def test_models_that_cannot_be_divided_are_rejected(ranks: int, heads: int, kv_heads: int, intermediate: int) -> None:
    with pytest.raises(UserError, match=f"cannot be divided among {ranks} ranks"):
        shards(ranks, heads, kv_heads, intermediate)


def test_a_vocabulary_is_divided_in_whole_blocks_of_maxima() -> None:
    assert LLAMA is not None
    config = replace(LLAMA, vocab_size=530)
    found = [shard_decoder(config, rank, 2).vocabulary for rank in range(2)]
    assert found == [range(256), range(256, 530)]
    with pytest.raises(UserError, match="A vocabulary of 530 tokens cannot be divided among 18 ranks"):
        shard_decoder(replace(config, heads=18, kv_heads=18), 0, 18)


def test_attention_whose_norm_needs_all_heads_is_not_divided() -> None:
    assert LLAMA is not None
    config = replace(LLAMA, query_key_norm="all")
    for rank in range(2):
        shard = shard_decoder(config, rank, 2)
        assert (shard.heads, shard.kv_heads) == (whole_model(config).heads, whole_model(config).kv_heads)
        assert not shard.divides_attention


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_parts_of_quantized_weights(form: str) -> None:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(1))
    stored = quantize_weight(weight, form)
    expected = as_plain(stored, torch.float32)[8:20, 32:96]
    part = select_part(stored, range(8, 20), range(32, 96), torch.float32)
    assert isinstance(part, QuantizedWeight)
    assert torch.equal(as_plain(part, torch.float32), expected)
    odd = select_part(stored, range(24), range(3, 50), torch.float32)
    assert torch.equal(as_plain(odd, torch.float32), as_plain(stored, torch.float32)[:, 3:50])


def test_parts_of_grouped_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (8, 64), generator=generator, dtype=torch.uint8)
    scales, shifts = (torch.rand(8, 2, generator=generator).half() for _ in range(2))
    stored = QuantizedWeight(codes, scales, shifts)  # 128 inputs in groups of 64
    for inputs in (range(64), range(32, 96), range(16, 112), range(8, 64)):
        part = select_part(stored, range(8), inputs, torch.float32)
        assert isinstance(part, QuantizedWeight) == (inputs.start % 16 == 0)
        expected = as_plain(stored, torch.float32)[:, inputs.start : inputs.stop]
        assert torch.equal(as_plain(part, torch.float32), expected)
