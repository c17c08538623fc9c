"""The weights of a decoder as shapes: what weight_loader.py loads for a shard, derived without torch or files."""

from collections.abc import Iterator

from tgi.worker.decoder_config import DecoderConfig, LatentConfig, Mixer, TensorNames
from tgi.worker.distributed.sharding import Shard
from tgi.worker.quantization.weight_forms import EMBEDDING, HEAD, POSITIONS
from tgi.worker.tensor_shapes import MatrixShape, VectorShape


def matrices(config: DecoderConfig, shard: Shard) -> Iterator[MatrixShape]:
    """All matrices, those of the layers first. A tied output head is the embedding; only the embedding is listed."""
    for number, layer in enumerate(config.layers):
        if layer.recurs:
            assert config.recurrent is not None
            name = f"model.layers.{number}.{config.names.mixer}"
            yield from config.recurrent.matrices(config.hidden, shard.recurrent, name)
        yield from _attention_and_mlp(config, shard, number)
    vocabulary, hidden = len(shard.vocabulary), range(config.hidden)
    yield MatrixShape(EMBEDDING, config.vocab_size, config.hidden, vocabulary, hidden)
    if rows := config.learned_positions:
        yield MatrixShape(POSITIONS, rows, config.hidden, rows, hidden, quantizable=False)
    if not config.tied:
        yield MatrixShape(HEAD, config.vocab_size, config.hidden, vocabulary, hidden)


def vectors(config: DecoderConfig, shard: Shard) -> Iterator[VectorShape]:
    """All norms and biases."""
    names = config.names
    for number, layer in enumerate(config.layers):
        prefix, names = f"model.layers.{number}.", config.layer_names(number)
        mixing = names.attention_before if layer.mixer != Mixer.NONE else None
        for name in (mixing, names.attention_after, names.mlp_before if layer.has_mlp else None, names.mlp_after):
            if name is not None:
                yield from _norm(config, prefix + name)
        if layer.attends:
            if config.latent is not None:
                yield from _latent_norms(config.latent, config.names, prefix)
            yield from _query_key_norms(config, shard, prefix)
            if config.sinks:
                yield VectorShape(prefix + names.sinks, config.heads, len(shard.heads), True)
        if layer.recurs:
            assert config.recurrent is not None
            place = shard.recurrent, prefix + names.mixer
            yield from config.recurrent.vectors(config.hidden, *place, shard.rank == 0)
        for matrix in _attention_and_mlp(config, shard, number):
            yield from _bias(config, shard, matrix, matrix.name.removeprefix(prefix))
        if config.activation == "xielu":
            for end in ("alpha_p", "alpha_n", "beta", "eps"):  # kept on the host
                yield VectorShape(f"{prefix}{names.activation}.{end}", 1, 0, True)
        experts = config.experts
        if experts is not None and experts.router.biased and config.layers[number].routed:
            yield VectorShape(prefix + names.router_bias, experts.count, experts.count, True)
    yield from _norm(config, names.last_norm)
    if config.head_bias:
        yield VectorShape(f"{HEAD}.bias", config.vocab_size, len(shard.vocabulary), False)


def _attention_and_mlp(config: DecoderConfig, shard: Shard, number: int) -> Iterator[MatrixShape]:
    layer, prefix = config.layers[number], f"model.layers.{number}."
    if layer.attends and config.latent is not None:
        yield from _latent_attention(config, config.latent, shard, prefix)
    elif layer.attends:
        yield from _attention_matrices(config, shard, prefix)
    if layer.has_mlp:
        yield from _mlp_matrices(config, shard, number, prefix)


def _attention_matrices(config: DecoderConfig, shard: Shard, prefix: str) -> Iterator[MatrixShape]:
    names, hidden, dim = config.names, config.hidden, config.head_dim
    if config.output_gate:
        yield MatrixShape(prefix + names.query, config.heads * dim, hidden, len(shard.heads) * dim, range(hidden))
    for name, heads, local in (
        (names.query, config.heads, shard.heads),
        (names.key, config.kv_heads, shard.kv_heads),
        (names.value, config.kv_heads, shard.kv_heads),
    ):
        yield MatrixShape(prefix + name, heads * dim, hidden, len(local) * dim, range(hidden), stack=prefix + "qkv")
    queries = range(shard.heads.start * dim, shard.heads.stop * dim)
    yield MatrixShape(prefix + names.output, hidden, config.heads * dim, hidden, queries)


def _mlp_matrices(config: DecoderConfig, shard: Shard, number: int, prefix: str) -> Iterator[MatrixShape]:
    names, hidden = config.names, config.hidden
    if not config.layers[number].routed:
        parts = (names.gate, names.up, names.down)
        yield from _mlp(config, prefix, parts, config.intermediate, shard.inner)
        return
    experts = config.experts
    assert experts is not None
    if experts.shared_intermediate:
        yield from _mlp(config, prefix, names.shared_parts, experts.shared_intermediate, shard.shared_inner)
    if experts.shared_gated:
        yield MatrixShape(prefix + names.shared_gate, 1, hidden, 1, range(hidden), quantizable=False)
    yield MatrixShape(prefix + names.router, experts.count, hidden, experts.count, range(hidden), quantizable=False)
    for expert in range(experts.count):
        each = (names.expert_gate, names.expert_up, names.expert_down)
        gate, up, down = (name.format(expert) for name in each)
        yield from _mlp(config, prefix, (gate, up, down), experts.intermediate, shard.expert_inner)


def _latent_attention(config: DecoderConfig, latent: LatentConfig, shard: Shard, prefix: str) -> Iterator[MatrixShape]:
    names, hidden, heads, local = config.names, config.hidden, config.heads, len(shard.heads)
    query, inputs = names.query, hidden
    if latent.query_rank is not None:
        query, inputs = names.query_up, latent.query_rank
        yield MatrixShape(prefix + names.query_down, inputs, hidden, inputs, range(hidden))
    yield MatrixShape(prefix + query, heads * latent.query_dim, inputs, local * latent.query_dim, range(inputs))
    yield MatrixShape(prefix + names.latent_down, latent.key_dim, hidden, latent.key_dim, range(hidden))
    each = latent.nope_dim + latent.value_dim
    shape = heads * each, latent.rank, local * each, range(latent.rank)
    yield MatrixShape(prefix + names.latent_up, *shape, quantizable=False)
    values = range(shard.heads.start * latent.value_dim, shard.heads.stop * latent.value_dim)
    yield MatrixShape(prefix + names.output, hidden, heads * latent.value_dim, hidden, values)


def _latent_norms(latent: LatentConfig, names: TensorNames, prefix: str) -> Iterator[VectorShape]:
    for name, size in ((names.query_down_norm, latent.query_rank), (names.latent_norm, latent.rank)):
        if size is not None:
            yield VectorShape(f"{prefix}{name}.weight", size, size, True)


def _mlp(
    config: DecoderConfig, prefix: str, names: tuple[str, str, str], inner: int, local: range
) -> Iterator[MatrixShape]:
    gate, up, down = names
    for name in (gate, up) if config.gated else (up,):
        yield MatrixShape(prefix + name, inner, config.hidden, len(local), range(config.hidden))
    yield MatrixShape(prefix + down, config.hidden, inner, config.hidden, local)


def _norm(config: DecoderConfig, name: str) -> Iterator[VectorShape]:
    yield VectorShape(f"{name}.weight", config.hidden, config.hidden, True)
    if config.norm_bias:
        yield VectorShape(f"{name}.bias", config.hidden, config.hidden, True)


def _query_key_norms(config: DecoderConfig, shard: Shard, prefix: str) -> Iterator[VectorShape]:
    """Each weight is held expanded over the heads."""
    if config.query_key_norm is None:
        return
    names, dim = config.names, config.head_dim
    parts = (names.query_norm, config.heads, shard.heads), (names.key_norm, config.kv_heads, shard.kv_heads)
    for name, heads, local in parts:
        stored = dim if config.query_key_norm == "head" else heads * dim
        held = heads * dim if config.query_key_norm == "all" else len(local) * dim
        yield VectorShape(f"{prefix}{name}.weight", stored, held, True)


def _bias(config: DecoderConfig, shard: Shard, matrix: MatrixShape, name: str) -> Iterator[VectorShape]:
    names = config.names
    if name in (names.latent_up, names.query_up) or (config.latent is not None and name == names.query):
        present = False
    elif name in (names.query, names.key, names.value, names.query_down, names.latent_down):
        present = config.qkv_bias
    elif name == names.router:
        present = config.experts is not None and config.experts.router.logit_bias
    else:
        present = config.output_bias if name == names.output else config.mlp_bias and matrix.quantizable
    if present:
        # Where the ranks add up partial sums, the first one adds the bias.
        held = shard.rank == 0 or len(matrix.local_inputs) == matrix.inputs
        yield VectorShape(f"{matrix.name}.bias", matrix.outputs, matrix.local_outputs if held else 0, False)
