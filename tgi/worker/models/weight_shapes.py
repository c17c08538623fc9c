"""The weights of a decoder as shapes: what weight_loader.py loads for a shard, derived without torch or files."""

from collections.abc import Iterator

from tgi.worker.decoder_config import DecoderConfig, ExpertsConfig, LatentConfig, Mixer, TensorNames
from tgi.worker.distributed.sharding import Shard, layer_inner, layer_kv_heads, whole_model
from tgi.worker.models.draft_head_config import DraftHeadConfig
from tgi.worker.quantization.weight_forms import EMBEDDING, HEAD, POSITIONS
from tgi.worker.tensor_shapes import MatrixShape, VectorShape

VALUE_NORM = "self_attn.v_norm"  # no tensor of the checkpoint has this name


def matrices(config: DecoderConfig, shard: Shard) -> Iterator[MatrixShape]:
    """All matrices, those of the layers first. A tied output head is the embedding; only the embedding is listed."""
    for number, layer in enumerate(config.layers):
        if layer.recurs:
            assert config.recurrent is not None
            name = f"model.layers.{number}.{config.names.mixer}"
            yield from config.recurrent.matrices(config.hidden, shard.recurrent, name)
        yield from _layer_matrices(config, shard, number)
    vocabulary, hidden = len(shard.vocabulary), range(config.hidden)
    looked_up = vocabulary if config.tied else config.vocab_size
    yield MatrixShape(EMBEDDING, config.vocab_size, config.hidden, looked_up, hidden)
    if rows := config.learned_positions:
        yield MatrixShape(POSITIONS, rows, config.hidden, rows, hidden, quantizable=False)
    if inputs := config.layer_inputs:
        columns, names = inputs.width * len(config.layers), config.names
        yield MatrixShape(names.input_embedding, inputs.vocab_size, columns, inputs.vocab_size, range(columns))
        yield MatrixShape(names.input_projection, columns, config.hidden, columns, hidden)
    for number in range(config.streams.count - 1 if config.streams else 0):
        for name in (config.names.stream_split, config.names.stream_merge):
            yield MatrixShape(name.format(number), config.hidden, config.hidden, config.hidden, hidden)
    if not config.tied:
        yield MatrixShape(HEAD, config.vocab_size - config.unscored, config.hidden, vocabulary, hidden)


def head_matrices(head: DraftHeadConfig) -> Iterator[MatrixShape]:
    """All matrices of a head that drafts, with the embedding that an EAGLE-3 head may have."""
    config, names = head.decoder, head.names
    for number in range(len(config.layers)):
        yield from _layer_matrices(config, whole_model(config), number)
    rows, fused = config.hidden, len(head.taps) * head.target_hidden
    for name, inputs in ((names.projection, 2 * config.hidden), (names.fusion, fused)):
        if name is not None:
            yield MatrixShape(name, rows, inputs, rows, range(inputs))
    for name, rows in ((EMBEDDING, config.vocab_size), (HEAD, head.scored)) if head.scored else ():
        yield MatrixShape(name, rows, config.hidden, rows, range(config.hidden))


def head_vectors(head: DraftHeadConfig) -> Iterator[VectorShape]:
    """All norms and biases of a head that drafts."""
    config, names = head.decoder, head.names
    yield from vectors(config, whole_model(config))
    for name in (names.embedding_norm, names.hidden_norm):
        if name is not None:
            yield from _norm(config, name)
    each = len(head.taps) * head.target_hidden // max(1, len(names.fusion_norms))
    for name in names.fusion_norms:
        yield VectorShape(f"{name}.weight", each, each, True)


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
            yield from _query_key_norms(config, shard, number, prefix)
            if config.sinks:
                yield VectorShape(prefix + names.sinks, config.heads, len(shard.heads), True)
        if layer.sees_images:
            for name, heads in ((names.cross_query_norm, shard.heads), (names.cross_key_norm, shard.kv_heads)):
                held = len(heads) * config.head_dim  # expanded over the heads
                yield VectorShape(f"{prefix}{name}.weight", config.head_dim, held, True)
            for name in (names.cross_gate, names.cross_mlp_gate):  # kept on the host
                yield VectorShape(prefix + name, 1, 0, True)
        if layer.recurs:
            assert config.recurrent is not None
            place = shard.recurrent, prefix + names.mixer
            yield from config.recurrent.vectors(config.hidden, *place, shard.rank == 0)
        for matrix in _layer_matrices(config, shard, number):
            yield from _bias(config, shard, matrix, matrix.name.removeprefix(prefix))
        if config.activation == "xielu":
            for end in ("alpha_p", "alpha_n", "beta", "eps"):  # kept on the host
                yield VectorShape(f"{prefix}{names.activation}.{end}", 1, 0, True)
        experts = config.experts
        if experts is not None and config.layers[number].routed:
            yield from _expert_vectors(config, experts, prefix)
        if config.layer_inputs is not None:
            yield from _norm(config, prefix + names.input_after)
        if config.streams is not None:
            yield from _norm(config, prefix + names.stream_norm)
            if config.streams.scaled:
                yield VectorShape(prefix + names.stream_scale, config.hidden, config.hidden, True)
        if config.residual_rank:
            yield from _norm(config, prefix + names.residual_after)
        if config.layer_scales:
            yield VectorShape(prefix + names.scale, 1, 0, True)  # kept on the host
    yield from _norm(config, names.last_norm)
    if config.embedding_norm:
        yield from _norm(config, names.embedding_norm)
    if inputs := config.layer_inputs:  # held expanded over the layers
        yield VectorShape(f"{names.input_norm}.weight", inputs.width, inputs.width * len(config.layers), True)
    if config.unscored:
        yield VectorShape(f"{HEAD}.bias", 0, len(shard.vocabulary), False)
    if config.head_bias:
        yield VectorShape(f"{HEAD}.bias", config.vocab_size, len(shard.vocabulary), False)


def _expert_vectors(config: DecoderConfig, experts: ExpertsConfig, prefix: str) -> Iterator[VectorShape]:
    names = config.names
    if experts.router.biased:
        yield VectorShape(prefix + names.router_bias, experts.count, experts.count, True)
    if experts.router.expert_scaled:
        yield VectorShape(prefix + names.router_expert_scale, experts.count, experts.count, True)
    if experts.parallel:
        yield VectorShape(prefix + names.router_input_scale, config.hidden, config.hidden, True)
        for name in (names.dense_after, names.experts_before, names.experts_after):
            yield from _norm(config, prefix + name)


def _layer_matrices(config: DecoderConfig, shard: Shard, number: int) -> Iterator[MatrixShape]:
    """Those besides a recurrent mixer's."""
    layer, names, prefix = config.layers[number], config.names, f"model.layers.{number}."
    if layer.attends and config.latent is not None:
        yield from _latent_attention(config, config.latent, shard, prefix)
    elif layer.attends:
        yield from _attention_matrices(config, shard, number, prefix)
    if layer.sees_images:
        yield from _cross_matrices(config, shard, prefix)
    if layer.has_mlp:
        yield from _mlp_matrices(config, shard, number, prefix)
    if inputs := config.layer_inputs:
        hidden = range(config.hidden)
        yield MatrixShape(prefix + names.input_down, inputs.width, config.hidden, inputs.width, hidden)
        yield MatrixShape(prefix + names.input_up, config.hidden, inputs.width, config.hidden, range(inputs.width))
    if config.streams is not None:
        for name, outputs, width in (
            (names.stream_router, config.streams.count, config.hidden),
            (names.stream_prediction, config.streams.count**2, config.streams.count),
            (names.stream_correction, config.streams.count, config.streams.count),
        ):
            yield MatrixShape(prefix + name, outputs, width, outputs, range(width), quantizable=False)
    if rank := config.residual_rank:
        yield MatrixShape(prefix + names.residual_left, rank, config.hidden, rank, range(config.hidden))
        yield MatrixShape(prefix + names.residual_right, config.hidden, rank, config.hidden, range(rank))


def _attention_matrices(config: DecoderConfig, shard: Shard, number: int, prefix: str) -> Iterator[MatrixShape]:
    names, hidden, layer = config.names, config.attention_inputs(number), config.layers[number]
    (kv_heads, dim), own = config.head_shape(number), layer_kv_heads(config, shard, number)
    if config.output_gate:
        yield MatrixShape(prefix + names.query, config.heads * dim, hidden, len(shard.heads) * dim, range(hidden))
    # Keys that are values, too, are held twice.
    keys = MatrixShape(
        prefix + names.key,
        kv_heads * dim,
        hidden,
        len(own) * dim * (2 if layer.keys_as_values else 1),
        range(hidden),
        stack=prefix + "qkv",
    )
    yield keys._replace(name=prefix + names.query, outputs=config.heads * dim, local_outputs=len(shard.heads) * dim)
    if layer.shares is None:
        yield keys
        if not layer.keys_as_values:
            yield keys._replace(name=prefix + names.value)
    queries = range(shard.heads.start * dim, shard.heads.stop * dim)
    yield MatrixShape(prefix + names.output, config.hidden, config.heads * dim, config.hidden, queries)


def _cross_matrices(config: DecoderConfig, shard: Shard, prefix: str) -> Iterator[MatrixShape]:
    names, hidden, dim = config.names, config.hidden, config.head_dim
    heads, kv_heads = config.heads * dim, config.kv_heads * dim
    queries, keys = range(shard.heads.start * dim, shard.heads.stop * dim), len(shard.kv_heads) * dim
    yield MatrixShape(prefix + names.cross_query, heads, hidden, len(queries), range(hidden))
    for name in (names.cross_key, names.cross_value):
        yield MatrixShape(prefix + name, kv_heads, hidden, keys, range(hidden), stack=prefix + "cross")
    yield MatrixShape(prefix + names.cross_output, hidden, heads, hidden, queries)


def _mlp_matrices(config: DecoderConfig, shard: Shard, number: int, prefix: str) -> Iterator[MatrixShape]:
    names, hidden = config.names, config.hidden
    experts = config.experts
    if not config.layers[number].routed or (experts is not None and experts.parallel):
        parts = (names.gate, names.up, names.down)
        yield from _mlp(config, prefix, parts, config.inner(number), layer_inner(config, shard, number))
    if not config.layers[number].routed:
        return
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


def _query_key_norms(config: DecoderConfig, shard: Shard, number: int, prefix: str) -> Iterator[VectorShape]:
    """Each weight is held expanded over the heads; norms without weights have ones."""
    layer, names, (kv_heads, dim) = config.layers[number], config.names, config.head_shape(number)
    own = layer_kv_heads(config, shard, number)
    scaled = config.query_key_norm_scaled
    if config.query_key_norm is None or (layer.rope is None and not scaled):
        return
    parts = [(names.query_norm, config.heads, shard.heads), (names.key_norm, kv_heads, own)]
    for name, heads, local in parts[:1] if layer.shares is not None else parts:
        stored = dim if config.query_key_norm == "head" else heads * dim
        held = heads * dim if config.query_key_norm == "all" else len(local) * dim
        if "{}" in name:
            for head in range(heads):
                yield VectorShape(f"{prefix}{name.format(head)}.weight", dim, dim * (head in local), True)
            continue
        yield VectorShape(f"{prefix}{name}.weight", stored if scaled else 0, held, True)
    if config.value_norm and layer.shares is None:
        yield VectorShape(f"{prefix}{VALUE_NORM}.weight", 0, len(own) * dim, True)


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
