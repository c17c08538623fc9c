"""Turns a checkpoint into the decoder's weights, one layer at a time, so that they exist once."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgi.worker.batch import Footprint
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.layers.embedding import Embedding
from tgi.worker.layers.mlp import Experts, Mlp
from tgi.worker.layers.norm import Norm
from tgi.worker.linear import Linear
from tgi.worker.models.config import DecoderConfig
from tgi.worker.models.layer import Layer, Weights
from tgi.worker.native.kernels import Kernels, alike
from tgi.worker.quantization.joining import matrix
from tgi.worker.quantization.source import EMBEDDING, HEAD, Source
from tgi.worker.quantization.weight import QuantizedWeight, Weight

Part = tuple[str, int]  # what the checkpoint calls a matrix, and its outputs


def stored_embedding(source: Source, config: DecoderConfig, dtype: torch.dtype) -> Embedding:
    """The embedding as it lies in the file."""
    return Embedding(source.weight(EMBEDDING, config.vocab_size, config.hidden), dtype)


class WeightReader:
    """Reads the weights that a config asks for. Raises UserError naming what is missing or of another shape."""

    def __init__(
        self,
        source: Source,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._gpu = gpu
        self._ours = kernels or gpu
        self._bytes = self._numbers = 0

    def weights(self, progress: Callable[[int], None]) -> Weights:
        """All weights. `progress` is told percents."""
        config = self._config
        layers = []
        for number in range(len(config.layers)):
            layers.append(self._layer(number))
            progress(100 * len(layers) // len(config.layers))
        found = self._source.weight(EMBEDDING, config.vocab_size, config.hidden).to(self._device)
        tied = config.tied or f"{HEAD}.weight" not in self._source
        if tied:
            head = self._made(self._converted(found), None, "none")
        else:
            head = self._linear(False, config.hidden, (HEAD, config.vocab_size))
        embedding = Embedding(head if tied and self._kernels is not None else found, self._dtype)
        norm = self._norm("model.norm", config.hidden)
        if not tied and self._device.type != "cpu":  # there its rows are mapped, and come into memory when looked up
            self._count(found)
        return Weights(embedding, layers, norm, head, Footprint(self._bytes, self._numbers))

    def _layer(self, number: int) -> Layer:
        config, names, prefix = self._config, self._config.names, f"model.layers.{number}."
        heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv = ((prefix + names.query, heads), (prefix + names.key, kv_heads), (prefix + names.value, kv_heads))

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self._norm(prefix + name, config.hidden)

        attention_after = norm(names.attention_after)
        return Layer(
            attention_before=norm(names.attention_before),
            qkv=self._linear(config.qkv_bias, config.hidden, *qkv),
            inner_norms=self._inner_norms(prefix + names.query_norm, prefix + names.key_norm),
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
        """What an Mlp begins with: on our own kernels one layer with both weights, if they are of one form."""
        config = self._config
        if not config.gated:
            return None, self._linear(config.mlp_bias, config.hidden, up, then=config.activation)
        first, second = self._matrices(config.mlp_bias, config.hidden, gate, up)
        if self._ours is None or not alike(first[0], second[0]):
            return self._made(*first, config.activation), self._made(*second, "mul")
        biases = [bias for _, bias in (first, second) if bias is not None]
        return None, self._made(first[0], torch.cat(biases) if biases else None, config.activation, second[0])

    def _experts(self, prefix: str) -> Experts:
        names, experts = self._config.names, self._config.experts
        assert experts is not None
        each = (names.expert_gate, names.expert_up, names.expert_down)

        def expert(number: int) -> Mlp:
            gate, up, down = (name.format(number) for name in each)
            return self._mlp(prefix, (gate, up, down), experts.intermediate, "none")

        return Experts(
            router=self._router(prefix + names.router, experts.count),
            experts=[expert(number) for number in range(experts.count)],
            chosen=experts.chosen,
            normalized=experts.normalized,
        )

    def _router(self, name: str, experts: int) -> Linear:
        """Always plain: it is small, and which expert computes a token hangs on small differences."""
        weight = self._source.tensor(f"{name}.weight", experts, self._config.hidden)
        return self._made(weight.to(self._device, self._dtype), None, "none")

    def _scales(self, name: str, *shape: int) -> Tensor:
        found = self._source.tensor(f"{name}.weight", *shape).to(self._device, torch.float32, copy=True)
        return found + self._config.norm_offset if self._config.norm_offset else found

    def _norm(self, name: str, size: int) -> Norm:
        config = self._config
        bias = None
        if config.norm_bias:
            bias = self._source.tensor(f"{name}.bias", size).to(self._device, torch.float32, copy=True)
        return Norm(self._scales(name, size), bias, config.norm_epsilon, config.norm_centred, self._ours)

    def _inner_norms(self, query: str, key: str) -> tuple[Norm, ...]:
        """None; one with the scales of each head, [heads + kv_heads, head_dim]; or one over all queries and one over
        all keys."""
        config = self._config
        kind, parts = config.query_key_norm, ((query, config.heads), (key, config.kv_heads))
        if kind is None:
            return ()
        if kind == "all":
            return tuple(self._norm(name, heads * config.head_dim) for name, heads in parts)
        scales = []
        for name, heads in parts:
            stored = (heads, config.head_dim) if kind == "each" else (config.head_dim,)
            scales.append(self._scales(name, *stored).expand(heads, -1))
        return (Norm(torch.cat(scales), None, config.norm_epsilon, config.norm_centred, self._ours),)

    def _linear(self, bias: bool, inputs: int, *parts: Part, then: str = "none") -> Linear:
        """One linear layer from the matrices of `parts`, one above the other."""
        weights, biases = zip(*self._matrices(bias, inputs, *parts), strict=True)
        joined = torch.cat(biases) if bias else None
        return self._made(matrix(weights, self._dtype), joined, then)

    def _made(self, weight: Weight, bias: Tensor | None, then: str, gated: Weight | None = None) -> Linear:
        for one in (weight, gated):
            if one is not None:
                self._count(one)
        return Linear(weight, bias, then, self._kernels, self._dtype, gated, self._gpu)

    def _count(self, weight: Weight) -> None:
        """Adds a matrix to the footprint. torch has no kernels on CPU for weights in few bits: they are made plain."""
        outputs, inputs = weight.shape
        plain = isinstance(weight, QuantizedWeight) and self._device.type == "cpu" and self._kernels is None
        self._bytes += outputs * inputs * self._dtype.itemsize if plain else weight.nbytes
        self._numbers += outputs * inputs

    def _matrices(self, bias: bool, inputs: int, *parts: Part) -> list[tuple[Weight, Tensor | None]]:
        """Weight and bias of each part. Parts of one name lie in one tensor, one above the other."""
        rows = [outputs for _, outputs in parts]
        fused = len({name for name, _ in parts}) < len(parts)
        stored = [(parts[0][0], sum(rows))] if fused else parts
        weights = [self._converted(self._source.weight(name, outputs, inputs)) for name, outputs in stored]
        biases: list[Tensor | None] = [None] * len(parts)
        if bias:
            found = [self._source.tensor(f"{name}.bias", outputs) for name, outputs in stored]
            found = [tensor.to(self._device, self._dtype) for tensor in found]
            biases = list(found[0].split(rows) if fused else found)
        return list(zip(weights[0].split(rows) if fused else weights, biases, strict=True))

    def _converted(self, weight: Weight) -> Weight:
        """The weight where the model is computed; a plain one in the model's number format."""
        if isinstance(weight, QuantizedWeight):
            return weight.to(self._device)
        return weight.to(self._device, self._dtype)
