"""One decoder for many families of models: what differs between them is data in DecoderConfig."""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.attention.native import NativeAttention
from tgi.worker.batch import Again, Attention, Batch, KVShape, Reader
from tgi.worker.best import Best
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.layers.mlp import Experts, Mlp
from tgi.worker.layers.rotary import Rotary
from tgi.worker.linear import Linear, choose_rows
from tgi.worker.lora.deltas import Deltas
from tgi.worker.lora.packed import PackedDeltas, PackedWeights
from tgi.worker.lora.reading import read_adapter
from tgi.worker.lora.weights import LoraWeights, number_format, shapes
from tgi.worker.models.config import DecoderConfig
from tgi.worker.models.layer import Layer, Weights, run_layer
from tgi.worker.models.program import write_program
from tgi.worker.models.tensors import Step
from tgi.worker.native.kernels import Kernels


class Decoder:
    """A Model."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        gpu: Gpu | None = None,
        scales: tuple[tuple[float, float], ...] = (),
    ) -> None:
        self.vocab_size = config.vocab_size
        self.context = config.context
        windows = tuple(layer.window for layer in config.layers)
        shape = (len(config.layers), config.heads, config.kv_heads, config.head_dim, dtype)
        self.kv = KVShape(*shape, windows, config.attention_cap, kernels, gpu, scales=scales)
        self.footprint = weights.footprint
        self.device = device
        self.unrecordable = None if config.experts is None else "the host reads which experts its tokens chose"
        self._config = config
        self._scoring = config.logit_scale, config.logit_cap
        self._weights = weights
        self._rotaries = [Rotary(rope, device, kernels or gpu) for rope in config.ropes]
        self._program = write_program(config, weights, self._rotaries, self.kv)
        # As transformers does it: rounded to the number format of the weights.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        linears = [linear for layer in weights.layers for linear in _linears(layer)]
        self._rows = choose_rows([*linears, weights.head])
        # For adapters: the first matrix of each MLP, without the activation. Made when the first adapter comes.
        self._bare: list[Linear | None] = []
        self._adapter_dtype = number_format(dtype, device)

    def forward(self, batch: Batch, attention: Attention, reader: Reader | None = None) -> Tensor:
        """See Model."""
        hidden, _ = self._computed(batch, attention, reader)
        return self._logits(hidden, batch.draw_at)

    def best(self, batch: Batch, attention: Attention, reader: Reader | None = None) -> Best:
        """See Model."""
        hidden, best = self._computed(batch, attention, reader, batch.draw_at)
        if best is not None:
            return best
        return self._weights.head.best(self._drawing(hidden, batch.draw_at), *self._scoring)

    def again(self, batch: Batch, attention: Attention) -> Again | None:
        """See Model."""
        program = self._program
        if program is None or not isinstance(attention, NativeAttention):
            return None
        hidden = torch.empty(len(batch.tokens), self._config.hidden, dtype=self.kv.dtype)
        calls = [self._weights.embedding.into(batch.tokens, hidden)]
        if self._embedding_scale != 1.0:
            calls.append(partial(hidden.mul_, self._embedding_scale))
        angles = self._angles(batch.positions, batch.page_table.shape[1] * attention.page_size)
        rows = attention.plan(batch).rows
        ready = program.ready(hidden, batch.positions, angles, attention.caches, rows, None, batch.draw_at)
        assert ready.best is not None
        return Again(batch, (*calls, partial(program.run, ready)), ready.best)

    def _computed(
        self, batch: Batch, attention: Attention, reader: Reader | None, draw_at: Tensor | None = None
    ) -> tuple[Tensor, Best | None]:
        """What the layers leave of the tokens, [rows, hidden], and, from a program, the best at `draw_at`. Tokens are
        padded once here to a number of rows that the linear layers take as it is."""
        count = batch.tokens.shape[0]
        pad = (0, self._rows.padded(count) - count)
        tokens, positions = (F.pad(x, pad) if pad[1] else x for x in (batch.tokens, batch.positions))
        angles = self._angles(positions, max(batch.context_lengths))
        hidden = self._weights.embedding(tokens)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        plan = attention.plan(batch)
        deltas = self._deltas(batch, len(tokens)) if batch.adapted else None
        if self._program is not None and isinstance(attention, NativeAttention):
            adapted = deltas.adapted() if isinstance(deltas, PackedDeltas) else None
            best = self._program.run(
                self._program.ready(hidden, positions, angles, attention.caches, plan.rows, adapted, draw_at)
            )
        else:
            best = None
            step = Step(self._config, self.kv, self._rotaries, angles, count, attention, plan, deltas)
            for number, layer in enumerate(self._weights.layers):
                hidden = run_layer(layer, self._config.parallel, step.layer(number), hidden)
        if reader is not None:
            for block in reader.blocks:
                reader.read(self._logits(hidden, block))
        return hidden, best

    def _angles(self, positions: Tensor, longest: int) -> list[tuple[Tensor, Tensor]]:
        """What each rope turns tokens by, at positions [rows] below `longest`."""
        return [rotary.angles(positions, longest, self.kv.heads + self.kv.kv_heads) for rotary in self._rotaries]

    def adapter(self, directory: Path) -> LoraWeights | PackedWeights:
        """See Model."""
        return self.fitted(read_adapter(directory, self._config, self._adapter_dtype, self.device))

    def fitted(self, weights: LoraWeights) -> LoraWeights | PackedWeights:
        """An adapter as this model computes with it."""
        if self.kv.kernels is not None:
            return PackedWeights(weights, shapes(self._config))
        if not self._bare:
            firsts = [_first(layer.mlp) for layer in self._weights.layers]
            bare = [None if first is None else first.bare() for first in firsts]
            choose_rows([linear for linear in bare if linear is not None])
            self._bare = bare
        return weights

    def _deltas(self, batch: Batch, rows: int) -> Deltas | PackedDeltas:
        sizes, kernels = shapes(self._config), self.kv.kernels
        if kernels is not None:
            return PackedDeltas(batch.adapted, rows, sizes, kernels)
        count = batch.tokens.shape[0]
        return Deltas(batch.adapted, count, rows, sizes, self._bare, self._adapter_dtype, self.device)

    def _logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Of some rows of `hidden`, float32 [n, vocab]."""
        return self._weights.head.scores(self._drawing(hidden, at), *self._scoring)

    def _drawing(self, hidden: Tensor, at: Tensor) -> Tensor:
        """What the head takes of these rows."""
        return self._weights.norm(hidden.index_select(0, at))


def _first(mlp: Mlp | Experts) -> Linear | None:
    """The layer of an MLP that has the activation. None for experts, which no adapter changes."""
    return None if isinstance(mlp, Experts) else mlp.gate or mlp.up


def _linears(layer: Layer) -> list[Linear]:
    """All linear layers of a layer."""
    if isinstance(layer.mlp, Mlp):
        mlps, router = [layer.mlp], []
    else:
        mlps, router = layer.mlp.experts, [layer.mlp.router]
    inside = [linear for mlp in mlps for linear in mlp if linear is not None]
    return [layer.qkv, layer.output, *router, *inside]
