"""PooledDecoder: a decoder whose last hidden states are wanted instead of tokens, computed over whole texts: causal, or
with attention to both sides as in EmbeddingGemma."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tgi.worker.attention.interface import KVCacheSpec
from tgi.worker.attention.packed import ALL, PackedAttention, PackedSequences
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.distributed.sharding import whole_model
from tgi.worker.layers.linear import choose_row_counts
from tgi.worker.layers.rotary import RotaryEmbedding
from tgi.worker.models.config_reader import read_pooled_config, sees_both_sides
from tgi.worker.models.decoder import layer_linears
from tgi.worker.models.decoder_layer import DecoderStep, run_layer
from tgi.worker.models.weight_loader import DecoderWeightLoader
from tgi.worker.quantization.weight_sources import WeightSource


class BareCheckpoint(Checkpoint):
    """The checkpoint of a decoder that was saved without its head: names lack the prefix of the others."""

    PREFIX = "model."

    def __contains__(self, name: str) -> bool:
        return super().__contains__(self._own(name))

    def raw_tensor(self, name: str) -> Tensor:
        return super().raw_tensor(self._own(name))

    def _own(self, name: str) -> str:
        bare = name.removeprefix(self.PREFIX)
        return bare if super().__contains__(bare) else name


class PooledDecoder:
    """A decoder: hidden states of packed sequences. `kernels` are our CPU kernels; None = torch's."""

    def __init__(
        self,
        config: dict[str, Any],
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels | None,
        progress: Callable[[int], None],
        tokens: int,
    ) -> None:
        """Loads the weights of a parsed config.json. Raises UserError naming a tensor that is missing,
        UnsupportedConfig and KeyError as read_pooled_config."""
        both = sees_both_sides(config)
        decoder = read_pooled_config(config)
        self.hidden, self.context_length = decoder.hidden, decoder.context_length
        self.dtype, self.device = dtype, device
        self._config = decoder
        self.weights = DecoderWeightLoader(source, decoder, whole_model(decoder), dtype, device, kernels).load(progress)
        self.footprint = self.weights.footprint
        choose_row_counts([linear for layer in self.weights.layers for linear in layer_linears(layer)])
        self._rotaries = [RotaryEmbedding(rope, device, kernels) for rope in decoder.ropes]
        windows = tuple(layer.window for layer in decoder.layers)
        self._kv = KVCacheSpec(
            layers=len(decoder.layers),
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            dtype=dtype,
            sliding_windows=windows,
            softcap=decoder.attention_cap,
            cpu_kernels=kernels,
            value_dim=None if decoder.latent is None else decoder.latent.rank,
        )
        ahead = [(ALL if window is None else window - 1) if both else 0 for window in windows]
        self._attention = PackedAttention(self._kv, ahead, tokens)
        self._embedding_scale = float(torch.tensor(decoder.embedding_scale, dtype=dtype))

    def hidden_states(self, batch: PackedSequences) -> Tensor:
        """The last hidden states [T, hidden], after the last norm."""
        kv = self._kv
        x = self.weights.embedding(batch.tokens)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        step = DecoderStep(
            config=self._config,
            kv=kv,
            rotaries=self._rotaries,
            angles=[one.angles(batch.positions, batch.longest, kv.heads + kv.kv_heads) for one in self._rotaries],
            tokens=len(batch.tokens),
            attention=self._attention,  # type: ignore[arg-type]  # it plans PackedSequences
            gpu_attention=None,
            plan=self._attention.plan(batch),
            deltas=None,
            communicator=None,
        )
        for number, layer in enumerate(self.weights.layers):
            x = run_layer(layer, self._config, step.layer(number), x)
        return self.weights.norm(x)
