"""How a decoder is divided among the ranks of a tensor parallel group.

After Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019: a
rank has some of the attention heads and some of the inner columns of each MLP, so the last matrix of either part gives
a partial sum, which the ranks add up. The vocabulary is divided, too. Norms, the router of experts and the residual
stream are the same on all ranks.
"""

from dataclasses import replace
from typing import NamedTuple

from tgi.microkernel.errors import UserError
from tgi.worker.decoder_config import DecoderConfig
from tgi.worker.mixers.gated_delta import GatedDeltaConfig
from tgi.worker.mixers.mamba2 import Mamba2Config
from tgi.worker.mixers.short_conv import ShortConvConfig

# Inner columns are divided in blocks of the largest of these sizes that leaves each rank one: quantized weights have
# scales for groups of inputs, and kernels compute tiles.
BLOCKS = (128, 64, 32, 16, 8, 4, 2, 1)
# The vocabulary is divided in blocks of this size, for which CPU kernels find maxima (cpu_kernels/argmax.h).
VOCABULARY_BLOCK = 32


class Shard(NamedTuple):
    """What one rank computes. Heads, columns and tokens have the numbers of the whole model."""

    rank: int
    ranks: int
    heads: range  # query heads
    kv_heads: range  # where there are fewer than ranks, several ranks have the same one
    inner: range  # columns between the matrices of a dense MLP
    expert_inner: range  # the same of each expert
    shared_inner: range  # and of the shared expert
    vocabulary: range  # tokens whose embedding and logits are computed
    # Attention is computed on every rank where a norm needs all heads at once. Its results are then complete.
    divides_attention: bool
    # Channels of the short convolutions, key heads of the delta rule, or groups of Mamba2.
    recurrent: range = range(0)


def whole_model(config: DecoderConfig) -> Shard:
    """The shard of a single rank: everything."""
    return shard_decoder(config, 0, 1)


def shard_decoder(config: DecoderConfig, rank: int, ranks: int) -> Shard:
    """The shard of one of `ranks` ranks. Raises UserError if the model cannot be divided among them."""
    divided = config.query_key_norm != "all" and bool(config.attention_layers)
    heads, kv_heads = _shard_heads(config, rank, ranks) if divided else (range(config.heads), range(config.kv_heads))
    experts = config.experts
    shared = 0 if experts is None else experts.shared_intermediate
    return Shard(
        rank=rank,
        ranks=ranks,
        heads=heads,
        kv_heads=kv_heads,
        inner=_shard_columns(config.intermediate, rank, ranks) if config.intermediate else range(0),
        expert_inner=range(0) if experts is None else _shard_columns(experts.intermediate, rank, ranks),
        shared_inner=_shard_columns(shared, rank, ranks) if shared else range(0),
        vocabulary=_shard_vocabulary(config.vocab_size, rank, ranks),
        divides_attention=divided,
        recurrent=_shard_recurrent(config, rank, ranks),
    )


def layer_kv_heads(config: DecoderConfig, shard: Shard, layer: int) -> range:
    """The KV heads of a layer that a shard has."""
    kv_heads = config.head_shape(layer).kv_heads
    if kv_heads == config.kv_heads or not shard.divides_attention:
        return shard.kv_heads if kv_heads == config.kv_heads else range(kv_heads)
    heads, own = _shard_heads(replace(config, kv_heads=kv_heads), shard.rank, shard.ranks)
    if heads != shard.heads:
        raise UserError(
            f"The model has layers of {config.kv_heads} and of {kv_heads} KV heads, which cannot both be divided among "
            f"{shard.ranks} ranks. Choose a --num-shard that divides both."
        )
    return own


def layer_inner(config: DecoderConfig, shard: Shard, layer: int) -> range:
    """The inner columns of a layer's dense MLP that a shard has: all of them where the activation needs all."""
    inner = config.inner(layer)
    if config.layers[layer].sparse_above is not None:
        return range(inner)
    return shard.inner if inner == config.intermediate else _shard_columns(inner, shard.rank, shard.ranks)


def local_config(config: DecoderConfig, shard: Shard) -> DecoderConfig:
    """The model as the rank of this shard computes it. Its vocabulary remains whole."""
    experts = config.experts
    layers = tuple(
        layer._replace(
            kv_heads=layer.kv_heads and len(layer_kv_heads(config, shard, number)),
            intermediate=layer.intermediate and len(layer_inner(config, shard, number)),
        )
        for number, layer in enumerate(config.layers)
    )
    return replace(
        config,
        layers=layers,
        alibi=config.alibi[shard.heads.start : shard.heads.stop],
        heads=len(shard.heads),
        kv_heads=len(shard.kv_heads),
        intermediate=len(shard.inner),
        experts=None
        if experts is None
        else replace(experts, intermediate=len(shard.expert_inner), shared_intermediate=len(shard.shared_inner)),
        recurrent=None if config.recurrent is None else config.recurrent.part(shard.recurrent),
    )


def _shard_heads(config: DecoderConfig, rank: int, ranks: int) -> tuple[range, range]:
    """Query heads and KV heads of a rank. The queries of a KV head stay together if there are enough KV heads."""
    queries = config.heads // config.kv_heads  # of each KV head
    if ranks <= config.kv_heads:
        kv_heads = _share(config.kv_heads, rank, ranks)
        return range(kv_heads.start * queries, kv_heads.stop * queries), kv_heads
    sharing = ranks // config.kv_heads  # ranks of each KV head
    if ranks % config.kv_heads or queries % sharing:
        raise UserError(
            f"The model has {config.heads} query heads and {config.kv_heads} KV heads, which cannot be divided among "
            f"{ranks} ranks. Choose a --num-shard of at most {config.kv_heads}, or a multiple of it that divides "
            f"{config.heads}."
        )
    each = queries // sharing
    kv_head = rank // sharing
    return range(rank * each, (rank + 1) * each), range(kv_head, kv_head + 1)


def _shard_recurrent(config: DecoderConfig, rank: int, ranks: int) -> range:
    """Shard.recurrent of a rank."""
    recurrent = config.recurrent
    if recurrent is None:
        return range(0)
    if isinstance(recurrent, ShortConvConfig):
        return _shard_columns(recurrent.channels, rank, ranks)
    if isinstance(recurrent, Mamba2Config):  # the norm of the result needs all heads of a group
        return _share(recurrent.groups, rank, ranks) if recurrent.groups >= ranks else range(recurrent.groups)
    assert isinstance(recurrent, GatedDeltaConfig)
    if recurrent.key_heads < ranks:
        raise UserError(
            f"The model has {recurrent.key_heads} key heads in its recurrent layers, which cannot be divided among "
            f"{ranks} ranks. Choose a --num-shard of at most {recurrent.key_heads}."
        )
    return _share(recurrent.key_heads, rank, ranks)


def _shard_columns(columns: int, rank: int, ranks: int) -> range:
    """The inner columns of a rank."""
    if columns < ranks:
        raise UserError(
            f"An MLP with {columns} inner columns cannot be divided among {ranks} ranks. Lower --num-shard."
        )
    block = next(size for size in BLOCKS if columns % size == 0 and columns // size >= ranks)
    blocks = _share(columns // block, rank, ranks)
    return range(blocks.start * block, blocks.stop * block)


def _shard_vocabulary(tokens: int, rank: int, ranks: int) -> range:
    """The tokens of a rank."""
    blocks = _share(-(-tokens // VOCABULARY_BLOCK), rank, ranks)
    if not blocks:
        raise UserError(
            f"A vocabulary of {tokens} tokens cannot be divided among {ranks} ranks in blocks of {VOCABULARY_BLOCK}. "
            "Lower --num-shard."
        )
    return range(blocks.start * VOCABULARY_BLOCK, min(tokens, blocks.stop * VOCABULARY_BLOCK))


def _share(count: int, rank: int, ranks: int) -> range:
    """The share of a rank in 0 .. count - 1; shares differ by at most one."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)
