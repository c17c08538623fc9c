"""DecoderModel: one implementation for all model families; what differs between them is data in DecoderConfig.

On our CPU kernels, a model without experts runs as a program (see decoder_layer.write_program); everywhere else, layer
by layer on tensors.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.microkernel.messages.kv_groups import ONE_FULL_GROUP
from tgi.worker.attention.cpu_kernels import CpuKernelAttention
from tgi.worker.attention.image_states import ImageStates, program_rows
from tgi.worker.attention.interface import (
    AttentionBackend,
    ForwardBatch,
    KVCacheSpec,
    TransformingBackend,
    state_rows,
)
from tgi.worker.cpu_kernels.kernels import WHOLE_VOCABULARY, CpuKernels, VocabularyShards
from tgi.worker.cpu_kernels.program import ImageStep, Program, StateStep, image_step, state_step
from tgi.worker.decoder_config import DecoderConfig
from tgi.worker.distributed.communicator import Communicator
from tgi.worker.distributed.sharding import Shard, local_config, shard_decoder, whole_model
from tgi.worker.distributed.shared_memory import SharedMemoryCommunicator
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.greedy import (
    FindGreedyTokens,
    GreedyTokens,
    block_columns,
    block_maxima,
    find_greedy_tokens,
    find_greedy_tokens_by_block,
    merge_block_maxima,
)
from tgi.worker.head_logits import HeadLogits, VocabularyShard
from tgi.worker.layers.linear import Linear, choose_row_counts
from tgi.worker.layers.mlp import Experts, MixtureOfExperts, Mlp
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.rotary import RotaryEmbedding
from tgi.worker.lora.deltas import LoraDeltas
from tgi.worker.lora.launched_deltas import LaunchedDeltas, adapter_table, padded_weights, tiles_of_spans
from tgi.worker.lora.packed_deltas import PackedDeltas, PackedWeights
from tgi.worker.lora.projections import projection_parts, projection_shapes
from tgi.worker.lora.weights import LoraWeights, compute_dtype, read_adapter
from tgi.worker.models.decoder_layer import (
    DecoderLayer,
    DecoderStep,
    DecoderWeights,
    InputWeights,
    run_layer,
    run_streams,
    write_program,
)
from tgi.worker.models.interface import LogitsReader, PreparedDecode, WeightFootprint
from tgi.worker.state_cache import StateSpec, StateTensor


class DecoderModel:
    """Implements Model.

    `kernels` are our CPU kernels, `gpu` our GPU kernels; None = torch's. `scales` are KVCacheSpec.cache_scales. With
    `communicator` this is one rank of several, and `weights` are those of `shard`, a part of the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels | None = None,
        gpu: GpuKernels | None = None,
        scales: tuple[tuple[float, float], ...] = (),
        shard: Shard | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self._shard = whole_model(config) if shard is None else shard
        self._communicator = communicator
        self.whole_config, config = config, local_config(config, self._shard)
        self._taps: tuple[int, ...] = ()
        self._hidden_reader: Callable[[Tensor], None] | None = None
        self.hidden_size = config.hidden
        self.vocab_size = config.vocab_size
        self.scored = config.vocab_size - config.unscored  # ids from here on have no logits of their own
        self.context_length = config.context_length
        self.image_bytes = config.image_bytes(dtype.itemsize)
        self.kv = KVCacheSpec(
            layers=len(config.attention_layers),
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            sliding_windows=tuple(config.attention_windows),
            softcap=config.attention_cap,
            cpu_kernels=kernels,
            gpu_kernels=gpu,
            cache_scales=scales,
            value_dim=None if config.latent is None else config.latent.rank,
            sinks=tuple(
                layer.attention.sinks
                for layer in weights.layers
                if layer.attention is not None and layer.attention.sinks is not None
            ),
            state=_state_spec(config, dtype),
            shapes=tuple(config.head_shapes) if len(set(config.head_shapes)) > 1 else (),
            chunked=frozenset(at for at, number in enumerate(config.attention_layers) if config.layers[number].chunked),
            slopes=torch.tensor(config.alibi, device=device) if config.alibi else None,
        )
        self.footprint = weights.footprint
        self.device = device
        self.cuda_graph_obstacle = None if gpu is not None else "torch's kernels need the contexts on the host"
        if any(isinstance(mlp, MixtureOfExperts) for layer in weights.layers for mlp in layer.mlps):
            self.cuda_graph_obstacle = "the host sorts the tokens by their experts"
        by_torch = find_greedy_tokens if communicator is None else find_greedy_tokens_by_block
        self.find_greedy_tokens: FindGreedyTokens = by_torch if kernels is None else kernels.greedy_tokens
        self._config = config
        self._gpu = gpu
        self._logits_options = config.logit_scale, config.logit_cap
        self._weights = weights
        self._rotaries = [RotaryEmbedding(rope, device, kernels or gpu) for rope in config.ropes]
        # Logits of each rank.
        self._vocabulary_widths = [
            len(shard_decoder(self.whole_config, rank, self._shard.ranks).vocabulary)
            for rank in range(self._shard.ranks)
        ]
        self._vocabulary_shards = WHOLE_VOCABULARY
        if isinstance(communicator, SharedMemoryCommunicator):
            self._vocabulary_shards = VocabularyShards(communicator.handle, tuple(self._vocabulary_widths))
        shards = self._vocabulary_shards
        written = config, weights, self._rotaries, self.kv, communicator, shards
        self._write_program = partial(write_program, *written)
        self._program = self._write_program()
        self._image_program: Program | None = None  # made when a step needs it: its buffers take memory of their own
        # Rounded to the model's dtype, as transformers does.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        linears = [linear for layer in weights.layers for linear in layer_linears(layer)]
        linears += [] if weights.layer_inputs is None else [weights.layer_inputs.projection]
        linears += [] if weights.streams is None else [*weights.streams.to, *weights.streams.back]
        self._row_counts = choose_row_counts([*linears, weights.head])
        # For LoRA on torch's kernels: per layer, the matrix with the activation, without its epilogue. Made on demand.
        self._without_epilogue: list[Linear | None] = []
        self._adapter_dtype = compute_dtype(dtype, device)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None) -> Tensor:
        return self.forward_head(batch, attention, reader).float32()

    def forward_head(
        self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None
    ) -> HeadLogits:
        hidden = self.forward_hidden(batch, attention)
        self.read_hidden(hidden[: len(batch.tokens)], reader)
        return self.head(hidden, batch.logits_indices)

    def forward_hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """The hidden states before the last norm, with those that are tapped in further columns: [rows, (1 + taps) *
        hidden], of which the first T belong to the batch."""
        hidden, _, tapped = self._run_layers(batch, attention)
        return hidden if tapped is None else torch.cat((hidden, tapped), 1)

    def head(self, hidden: Tensor, indices: Tensor) -> HeadLogits:
        """The logits of the rows `indices` of `hidden`, as of `forward_head`."""
        if self.kv.gpu_kernels is None:
            return HeadLogits(self._logits(hidden, indices))
        shard = None
        if self._communicator is not None:
            shard = VocabularyShard(self._communicator, self._vocabulary_widths)
        return HeadLogits(self._weights.head(self._head_input(hidden, indices)), *self._logits_options, shard)

    def read_hidden(self, hidden: Tensor, reader: LogitsReader | None) -> None:
        """Gives what `forward_hidden` returned of the T tokens of a step to `reader`, and to that of `tap_hidden`."""
        if reader is not None:
            for block in reader.blocks:
                reader.read_logits(self._logits(hidden, block))
        if self._hidden_reader is not None:
            tapped = hidden[:, self.hidden_size :]
            self._hidden_reader(tapped if self._taps else self._weights.norm(hidden))

    def forward_greedy(
        self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None
    ) -> GreedyTokens:
        hidden, greedy, tapped = self._run_layers(batch, attention, batch.logits_indices)
        states = hidden if tapped is None else torch.cat((hidden, tapped), 1)
        self.read_hidden(states[: len(batch.tokens)], reader)
        if greedy is not None:
            return greedy
        x = self._head_input(hidden, batch.logits_indices)
        if self._communicator is not None and self._vocabulary_shards is WHOLE_VOCABULARY:
            if (kernels := self.kv.cpu_kernels) is not None:
                return kernels.greedy_tokens(self._logits(hidden, batch.logits_indices))
            blocks = block_maxima(self._weights.head.logits(x, *self._logits_options))
            widths = [block_columns(width) for width in self._vocabulary_widths]
            return merge_block_maxima(self._communicator.all_gather(blocks, widths))
        return self._weights.head.greedy_tokens(x, *self._logits_options, self._vocabulary_shards)

    def prepare_decode(self, batch: ForwardBatch, attention: AttentionBackend) -> PreparedDecode | None:
        program = self._program_for(batch)
        if program is None or not isinstance(attention, CpuKernelAttention) or self._hidden_reader is not None:
            return None
        hidden = torch.empty(len(batch.tokens), self._config.hidden, dtype=self.kv.dtype)
        calls = [self._weights.embedding.prepare_lookup(batch.tokens, hidden)]
        if self._weights.embedding.partial:
            assert self._communicator is not None
            calls.append(partial(self._communicator.all_reduce, hidden))
        if self._embedding_scale != 1.0:
            calls.append(partial(hidden.mul_, self._embedding_scale))
        if (norm := self._weights.embedding_norm) is not None:
            calls.append(partial(norm.normalize_in_place, hidden))
        if self._weights.positions is not None:
            calls.append(partial(self._add_positions, hidden, batch.positions))
        layer_inputs = None
        if (of_layers := self._weights.layer_inputs) is not None:
            layer_inputs = of_layers(batch.tokens, hidden)
            calls.append(partial(_write_inputs, of_layers, batch.tokens, hidden, layer_inputs))
        turns = batch.positions if batch.rope_positions is None else batch.rope_positions
        angles = self._angles(turns, batch.page_table.shape[-1] * attention.page_size)
        rows = attention.plan(batch).rows[0]
        ready = program.prepare(
            *(hidden, turns, angles, attention.caches, attention.kv_form, rows, None, batch.logits_indices),
            _program_state(batch, attention),
            layer_inputs,
            _program_images(batch),
        )
        assert ready.best is not None
        return PreparedDecode(batch, (*calls, partial(program.run, ready)), ready.best)

    def tap_hidden(self, layers: tuple[int, ...], reader: Callable[[Tensor], None]) -> None:
        """From now on `reader` receives of each step the hidden states [T, len(layers) * hidden] before these layers,
        in this order; the number of all layers stands for those after the last. Without layers, the output [T, hidden]
        of the last norm."""
        self._taps, self._hidden_reader = layers, reader
        self._program, self._image_program = self._write_program(layers), None

    def run_inputs(self, batch: ForwardBatch, attention: AttentionBackend, inputs: Tensor) -> Tensor:
        """The hidden states [T, hidden] after the layers, where `inputs` [T, hidden] take the place of the embedding.
        With joins_embedding they are [T, 2 * hidden]: what attention reads first, and the hidden states."""
        return self._run_layers(batch, attention, inputs=inputs)[0][: len(batch.tokens)]

    def last_norm(self, hidden: Tensor) -> Tensor:
        """The last norm of hidden states [n, hidden]."""
        return self._weights.norm(hidden)

    def head_logits(self, normed: Tensor) -> Tensor:
        """Logits float32 [n, vocab] of outputs [n, hidden] of the last norm."""
        logits = self._weights.head.logits(normed, *self._logits_options)
        return logits if self._communicator is None else self._communicator.all_gather(logits, self._vocabulary_widths)

    def load_adapter(self, directory: Path) -> LoraWeights | PackedWeights:
        weights = read_adapter(directory, self.whole_config, self._adapter_dtype, self.device)
        if self._communicator is not None:
            weights = weights.select_part(projection_parts(self.whole_config, self._shard))
        return self.prepare_adapter(weights)

    def prepare_adapter(self, weights: LoraWeights) -> LoraWeights | PackedWeights:
        """Converts an adapter to the format that this model computes with."""
        if self.kv.cpu_kernels is not None:
            return PackedWeights(weights, projection_shapes(self._config), self.kv.dtype)
        if not self._without_epilogue:
            activated = [_activated_linear(layer.mlp) for layer in self._weights.layers]
            bare = [None if linear is None else linear.without_epilogue() for linear in activated]
            choose_row_counts([linear for linear in bare if linear is not None])
            self._without_epilogue = bare
        if self._gpu is not None:
            weights = padded_weights(weights)
            weights.table = adapter_table(weights, self.device)
        return weights

    def _run_layers(
        self,
        batch: ForwardBatch,
        attention: AttentionBackend,
        logits_indices: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, GreedyTokens | None, Tensor | None]:
        """Runs embedding, which `inputs` may replace, and layers: the hidden states [rows, hidden], of which the first
        T belong to the batch, and those that are tapped [rows, taps * hidden], if there are taps.

        A program also computes the greedy tokens at `logits_indices`. Pads the tokens once, to a row count that all
        linear layers accept.
        """
        count = batch.tokens.shape[0]
        pad = (0, self._row_counts.padded(count) - count)
        turns = batch.positions if batch.rope_positions is None else batch.rope_positions
        tokens, positions, turns = (F.pad(x, pad) if pad[1] else x for x in (batch.tokens, batch.positions, turns))
        angles = self._angles(turns, max(batch.context_lens_host))
        hidden = self.embed(tokens) if inputs is None else F.pad(inputs, (0, 0, *pad))
        joined = None
        if self._config.joins_embedding:
            joined, hidden = (part.contiguous() for part in hidden.chunk(2, 1))
        if batch.images is not None:
            hidden.index_copy_(0, batch.images.indices, batch.images.embeddings)
            if self._weights.layer_inputs is not None:
                tokens = tokens.index_fill(0, batch.images.indices, self._weights.layer_inputs.image_id)
        if self._weights.positions is not None:
            self._add_positions(hidden, positions)
        layer_inputs = None if self._weights.layer_inputs is None else self._weights.layer_inputs(tokens, hidden)
        tapped = hidden.new_empty(len(hidden), len(self._taps) * self.hidden_size) if self._taps else None
        plan = attention.plan(batch)
        deltas = self._deltas(batch, len(tokens)) if batch.lora_spans or batch.adapter_tiles is not None else None
        deeper = () if batch.images is None else batch.images.deeper
        program = self._program_for(batch)
        if program is not None and isinstance(attention, CpuKernelAttention):
            adapted = deltas.adapted() if isinstance(deltas, PackedDeltas) else None
            side = layer_inputs if tapped is None else tapped
            if layer_inputs is not None and tapped is not None:
                side = torch.cat((layer_inputs, tapped), 1)
                tapped = side[:, layer_inputs.shape[1] :]
            greedy = program.run(
                program.prepare(
                    hidden,
                    angles[0][1] if angles else positions,
                    angles,
                    attention.caches,
                    attention.kv_form,
                    plan.rows[0],
                    adapted,
                    logits_indices,
                    _program_state(batch, attention),
                    side,
                    _program_images(batch),
                )
            )
        else:
            greedy = None
            step = DecoderStep(
                config=self._config,
                kv=self.kv,
                rotaries=self._rotaries,
                angles=angles,
                tokens=count,
                attention=attention,
                gpu_attention=attention if isinstance(attention, TransformingBackend) and self._gpu else None,
                plan=plan,
                deltas=deltas,
                communicator=self._communicator,
                state=state_rows(batch, attention),
                layer_inputs=layer_inputs,
                seen_images=batch.seen_images,
                joined=joined,
            )
            seen = batch.seen_images
            sees = None if seen is None else F.pad(seen.sees, (0, 0, *pad))
            streams = self._weights.streams
            hidden = hidden if streams is None else streams.split(hidden)
            for number, layer in enumerate(self._weights.layers):
                self._copy_tapped(number, hidden, tapped)
                if layer.cross is not None:
                    if sees is not None:
                        hidden = torch.where(sees, run_layer(layer, self._config, step.layer(number), hidden), hidden)
                elif layer.streams is None:
                    hidden = run_layer(layer, self._config, step.layer(number), hidden)
                else:
                    hidden = run_streams(layer, layer.streams, self._config, step.layer(number), hidden)
                if number < len(deeper):
                    assert batch.images is not None
                    hidden.index_add_(0, batch.images.indices, deeper[number])
            self._copy_tapped(len(self._weights.layers), hidden, tapped)
            hidden = hidden if streams is None else streams.merge(hidden)
        return hidden, greedy, tapped

    def _program_for(self, batch: ForwardBatch) -> Program | None:
        """The program for a step; None: it runs layer by layer."""
        if self._program is None or _program_images(batch) is None:
            return self._program
        if self._image_program is None:
            self._image_program = self._write_program(self._taps, images=True)
        return self._image_program

    def image_states(self, images: int) -> ImageStates | None:
        """Memory for what layers attend to of so many images; None: no layer attends to images."""
        config = self._config
        if not config.image_layers:
            return None
        kv = self.kv._replace(
            layers=config.image_layers, sliding_windows=(), softcap=None, groups=ONE_FULL_GROUP, stored_dtype=None
        )
        return ImageStates(kv, images, config.image_states, self.device, self._project_image)

    def _copy_tapped(self, number: int, hidden: Tensor, tapped: Tensor | None) -> None:
        """Copies the hidden states before layer `number` to their places among those that are tapped, if they are."""
        for place, tap in enumerate(self._taps):
            if tap == number and tapped is not None:
                tapped[:, place * self.hidden_size : (place + 1) * self.hidden_size] = hidden

    @torch.inference_mode()
    def _project_image(self, states: Tensor) -> list[Tensor]:
        """Keys and values [n, 2 * kv_heads, head_dim] of the states [n, hidden] of an image, for each layer that
        attends to images."""
        found = []
        count, kv_heads = len(states), self._config.kv_heads
        padded = F.pad(states, (0, 0, 0, self._row_counts.padded(count) - count))
        for layer in self._weights.layers:
            if (cross := layer.cross) is not None:
                pairs = cross.pairs(padded)
                cross.key_norm.normalize_in_place(pairs[:, : pairs.shape[1] // 2].unflatten(1, (kv_heads, -1)))
                found.append(pairs[:count].unflatten(1, (2 * kv_heads, -1)))
        return found

    def _add_positions(self, hidden: Tensor, positions: Tensor) -> None:
        """Adds the learned vectors of `positions` [rows] to `hidden`."""
        assert self._weights.positions is not None
        hidden += self._weights.positions.index_select(0, positions)

    @property
    def embeds_alone(self) -> bool:
        """Whether the embeddings of a step's tokens are all that the layers get of them."""
        return self._weights.layer_inputs is None

    def embed_batch(self, batch: ForwardBatch) -> Tensor:
        """The embeddings [T, hidden] of a step's tokens, or what they have in place of them."""
        hidden = self.embed(batch.tokens)
        if batch.images is not None:
            hidden.index_copy_(0, batch.images.indices, batch.images.embeddings)
        return hidden

    def look_up(self, tokens: Tensor) -> Tensor:
        """The embeddings [rows, hidden] of the tokens, as they are stored. Where ranks divide the embedding, each comes
        from the rank that has it, and the other ranks add zeros."""
        hidden = self._weights.embedding(tokens)
        if self._weights.embedding.partial:
            assert self._communicator is not None
            self._communicator.all_reduce(hidden)
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """The scaled and normed embeddings [rows, hidden] of the tokens."""
        hidden = self.look_up(tokens)
        hidden = hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale
        return hidden if self._weights.embedding_norm is None else self._weights.embedding_norm(hidden)

    def _angles(self, positions: Tensor, longest: int) -> list[tuple[Tensor, Tensor]]:
        """RotaryEmbedding.angles of each rope, at positions [rows] or [3, rows] below `longest`."""
        heads = self.kv.heads + max((shape.kv_heads for shape in self._config.head_shapes), default=0)
        return [rotary.angles(positions, longest, heads) for rotary in self._rotaries]

    def with_layers(
        self, config: DecoderConfig, layers: list[DecoderLayer], norm: Norm, size: WeightFootprint
    ) -> "DecoderModel":
        """A decoder of other layers and another last norm, for `run_inputs`: whole on each of several ranks. `size` is
        what they take."""
        weights = self._weights._replace(layers=layers, norm=norm, positions=None, footprint=size)
        weights = weights._replace(layer_inputs=None, streams=None)
        return DecoderModel(config, weights, self.kv.dtype, self.device, self.kv.cpu_kernels, self.kv.gpu_kernels)

    def _deltas(self, batch: ForwardBatch, rows: int) -> LoraDeltas | PackedDeltas | LaunchedDeltas:
        shapes, kernels = projection_shapes(self._config), self.kv.cpu_kernels
        if kernels is not None:
            return PackedDeltas(batch.lora_spans, rows, shapes, kernels)
        bare = self._without_epilogue
        if self._gpu is not None:
            tiles = batch.adapter_tiles or tiles_of_spans(
                batch.lora_spans, rows, self._adapter_dtype, self.device, self._gpu.batch_invariant
            )
            return LaunchedDeltas(tiles, shapes, bare, self._gpu)
        return LoraDeltas(batch.lora_spans, shapes, bare, self._adapter_dtype, self.device)

    def _logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Logits float32 [n, vocab] of the rows `indices` of `hidden`."""
        logits = self._weights.head.logits(self._head_input(hidden, indices), *self._logits_options)
        if self._communicator is None:
            return logits
        return self._communicator.all_gather(logits, self._vocabulary_widths)

    def _head_input(self, hidden: Tensor, indices: Tensor) -> Tensor:
        chosen = hidden.index_select(0, indices)
        return self._weights.norm(chosen[:, : self.hidden_size].contiguous() if self._taps else chosen)


def _state_spec(config: DecoderConfig, dtype: torch.dtype) -> StateSpec | None:
    if config.recurrent is None:
        return None
    kept = config.recurrent.state
    tensors = {name: StateTensor(one.shape, torch.float32 if one.wide else dtype) for name, one in kept.items()}
    return StateSpec((tensors,) * config.recurrent_layers)


def _program_images(batch: ForwardBatch) -> ImageStep | None:
    """What a program gets of a step's images, besides embeddings."""
    if (seen := batch.seen_images) is not None:
        return image_step((seen.sees, seen.states.addresses, program_rows(seen)), None, ())
    if batch.images is not None and batch.images.deeper:
        return image_step(None, batch.images.indices, batch.images.deeper)
    return None


def _program_state(batch: ForwardBatch, attention: AttentionBackend) -> StateStep | None:
    """The state of a step's rows for a program."""
    rows = state_rows(batch, attention)
    return None if rows is None else state_step(rows.cache.tensors, rows.cache.slot_bytes, rows.slots, rows.kept)


def _activated_linear(mlp: Mlp | Experts | None) -> Linear | None:
    """The layer of an MLP whose epilogue is the activation. None for experts, for which LoRA is not supported."""
    return mlp.gate or mlp.up if isinstance(mlp, Mlp) else None


def _write_inputs(weights: InputWeights, tokens: Tensor, hidden: Tensor, out: Tensor) -> None:
    out.copy_(weights(tokens, hidden))


def layer_linears(layer: DecoderLayer) -> list[Linear]:
    """All linear layers of a decoder layer."""
    mlps, found = [], []
    if layer.recurrence is not None:
        found += [layer.recurrence.input, *layer.recurrence.mixer.linears, layer.recurrence.output]
    if (attention := layer.attention) is not None:
        latent = attention.latent
        queries = () if latent is None else (latent.query_down, latent.query)
        found += [one for one in (attention.qkv, attention.output, attention.output_gate, *queries) if one is not None]
    if (cross := layer.cross) is not None:
        found += [cross.query, cross.pairs, cross.output]
    if layer.layer_input is not None:
        found += [layer.layer_input.down, layer.layer_input.up]
    for part in (layer.streams, layer.residual):
        found += [one for one in part or () if isinstance(one, Linear)]
    for mlp in layer.mlps:
        if isinstance(mlp, Mlp):
            mlps.append(mlp)
            continue
        mlps += list(mlp.experts) if isinstance(mlp, MixtureOfExperts) else []
        found.append(mlp.router.linear)
        if (shared := mlp.shared) is not None:
            mlps.append(shared.mlp)
            found += [] if shared.gate is None else [shared.gate]
    return [*found, *(linear for mlp in mlps for linear in mlp if isinstance(linear, Linear))]
