"""Turns a checkpoint into the decoder's weights, one layer at a time, so that they exist once."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgi.worker.checkpoint import Checkpoint
from tgi.worker.layers.mlp import Experts, Mlp
from tgi.worker.layers.norm import Norm
from tgi.worker.linear import Linear
from tgi.worker.models.config import DecoderConfig
from tgi.worker.models.decoder import Layer, Weights
from tgi.worker.native.kernels import Kernels

Part = tuple[str, int]  # what the checkpoint calls a matrix, and its outputs
EMBEDDING = "model.embed_tokens"


def embedding(checkpoint: Checkpoint, config: DecoderConfig) -> Tensor:
    """The embedding as it lies in the file."""
    return checkpoint.tensor(f"{EMBEDDING}.weight", config.vocab_size, config.hidden)


class WeightReader:
    """Reads the weights that a config asks for. Raises UserError naming what is missing or of another shape."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernels = kernels

    def weights(self, progress: Callable[[int], None]) -> Weights:
        """All weights. `progress` is told percents."""
        config = self._config
        layers = []
        for number in range(len(config.layers)):
            layers.append(self._layer(number))
            progress(100 * len(layers) // len(config.layers))
        tied = config.tied or "lm_head.weight" not in self._checkpoint
        return Weights(
            embedding=embedding(self._checkpoint, config).to(self._device),
            layers=layers,
            norm=self._norm("model.norm", config.hidden),
            head=self._linear(False, config.hidden, (EMBEDDING if tied else "lm_head", config.vocab_size)),
        )

    def _layer(self, number: int) -> Layer:
        config, names, prefix = self._config, self._config.names, f"model.layers.{number}."
        heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv = ((prefix + names.query, heads), (prefix + names.key, kv_heads), (prefix + names.value, kv_heads))
        query_norm, key_norm = prefix + names.query_norm, prefix + names.key_norm
        over_all = config.query_key_norm == "all"

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self._norm(prefix + name, config.hidden)

        attention_after = norm(names.attention_after)
        return Layer(
            attention_before=norm(names.attention_before),
            qkv=self._linear(config.qkv_bias, config.hidden, *qkv),
            head_norm=self._head_norm(query_norm, key_norm) if config.query_key_norm in ("head", "each") else None,
            query_norm=self._norm(query_norm, heads) if over_all else None,
            key_norm=self._norm(key_norm, kv_heads) if over_all else None,
            output=self._linear(
                config.output_bias, heads, (prefix + names.output, config.hidden), then=self._last(attention_after)
            ),
            attention_after=attention_after,
            mlp_before=norm(names.mlp_before),
            mlp=self._experts(prefix) if config.layers[number].routed else self._dense(prefix),
            mlp_after=norm(names.mlp_after),
        )

    def _last(self, after: Norm | None) -> str:
        """What the last matrix of a part does to its result: it adds the residual, where nothing comes between."""
        return "add" if after is None and self._config.residual_scale == 1.0 else "none"

    def _dense(self, prefix: str) -> Mlp:
        names = self._config.names
        last = "none" if names.mlp_after else self._last(None)
        return self._mlp(prefix, (names.gate, names.up, names.down), self._config.intermediate, last)

    def _mlp(self, prefix: str, names: tuple[str, str, str], inner: int, last: str) -> Mlp:
        config = self._config
        gate, up, down = (
            (prefix + name, outputs) for name, outputs in zip(names, (inner, inner, config.hidden), strict=True)
        )
        return Mlp(
            *self._gate_and_up(gate, up),
            down=self._linear(config.mlp_bias, inner, down, then=last),
        )

    def _gate_and_up(self, gate: Part, up: Part) -> tuple[Linear | None, Linear]:
        config = self._config
        if not config.gated:
            return None, self._linear(config.mlp_bias, config.hidden, up, then=config.activation)
        first, second = self._matrices(config.mlp_bias, config.hidden, gate, up)
        return Linear(*first, config.activation, self._kernels), Linear(*second, "mul", self._kernels)

    def _experts(self, prefix: str) -> Experts:
        config, names, experts = self._config, self._config.names, self._config.experts
        assert experts is not None
        each = (names.expert_gate, names.expert_up, names.expert_down)

        def expert(number: int) -> Mlp:
            gate, up, down = (name.format(number) for name in each)
            return self._mlp(prefix, (gate, up, down), experts.intermediate, "none")

        return Experts(
            router=self._linear(False, config.hidden, (prefix + names.router, experts.count)),
            experts=[expert(number) for number in range(experts.count)],
            chosen=experts.chosen,
            normalized=experts.normalized,
        )

    def _scales(self, name: str, *shape: int) -> Tensor:
        found = self._checkpoint.tensor(f"{name}.weight", *shape).to(self._device, torch.float32, copy=True)
        return found + self._config.norm_offset if self._config.norm_offset else found

    def _norm(self, name: str, size: int) -> Norm:
        config = self._config
        bias = None
        if config.norm_bias:
            bias = self._checkpoint.tensor(f"{name}.bias", size).to(self._device, torch.float32, copy=True)
        return Norm(self._scales(name, size), bias, config.norm_epsilon, config.norm_centred, self._kernels)

    def _head_norm(self, query: str, key: str) -> Norm:
        """Scales of each head, [heads + kv_heads, head_dim]."""
        config = self._config
        scales = []
        for name, heads in ((query, config.heads), (key, config.kv_heads)):
            stored = (heads, config.head_dim) if config.query_key_norm == "each" else (config.head_dim,)
            scales.append(self._scales(name, *stored).expand(heads, -1))
        return Norm(torch.cat(scales), None, config.norm_epsilon, config.norm_centred, self._kernels)

    def _linear(self, bias: bool, inputs: int, *parts: Part, then: str = "none") -> Linear:
        """One linear layer from the matrices of `parts`, one above the other."""
        weights, biases = zip(*self._matrices(bias, inputs, *parts), strict=True)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return Linear(weight, torch.cat(biases) if bias else None, then, self._kernels)

    def _matrices(self, bias: bool, inputs: int, *parts: Part) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of each part. Parts of one name lie in one tensor, one above the other."""
        weights = self._stacked("weight", parts, inputs)
        biases = self._stacked("bias", parts) if bias else [None] * len(parts)
        return list(zip(weights, biases, strict=True))

    def _stacked(self, kind: str, parts: tuple[Part, ...], *columns: int) -> list[Tensor]:
        names, rows = [name for name, _ in parts], [outputs for _, outputs in parts]
        if len(set(names)) == 1:
            found = self._checkpoint.tensor(f"{names[0]}.{kind}", sum(rows), *columns).split(rows)
        else:
            found = tuple(self._checkpoint.tensor(f"{name}.{kind}", n, *columns) for name, n in parts)
        return [tensor.to(self._device, self._dtype) for tensor in found]
