"""EncoderModel: BERT and its relatives, whose every token sees the whole text. What differs between the families is
data: names of tensors, where the norms stand, and how positions are encoded.

A layer computes, with f the activation,

    x = a1(x + output(attention(a0(x))))
    x = m1(x + down(f(up(m0(x)))))          or, gated, down(f(gate(m0(x))) * up(m0(x)))

where the norms a0 and m0 (before, ModernBERT) or a1 and m1 (after, BERT) may be absent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgi.microkernel.errors import UserError
from tgi.worker.attention.interface import KVCacheSpec
from tgi.worker.attention.packed import ALL, PackedAttention, PackedSequences
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.decoder_config import RopeConfig
from tgi.worker.layers.linear import Linear, choose_row_counts
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.rotary import RotaryEmbedding
from tgi.worker.models.config_reader import EPILOGUES
from tgi.worker.models.interface import WeightFootprint

SLIDING = "sliding_attention"


class EncoderFamily(NamedTuple):
    """Names of a family's tensors. Those of a layer follow `layer` with its number; matrices of one name are fused."""

    prefixes: tuple[str, ...]  # of all names in checkpoints with a head on top
    word: str
    position: str | None  # None: rotary embedding
    kind: str | None  # token types
    norm: str  # of the embeddings
    layer: str
    qkv: tuple[str, ...]
    output: str
    up: str
    down: str
    attention_before: str | None = None
    attention_after: str | None = None
    mlp_before: str | None = None
    mlp_after: str | None = None
    final: str | None = None
    gated: bool = False
    offset_positions: bool = False  # positions begin after the id of padding


BERT = EncoderFamily(
    prefixes=("bert.", "roberta."),
    word="embeddings.word_embeddings",
    position="embeddings.position_embeddings",
    kind="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
    attention_after="attention.output.LayerNorm",
    mlp_after="output.LayerNorm",
)
ROBERTA = BERT._replace(offset_positions=True)
MODERNBERT = EncoderFamily(
    prefixes=("model.",),
    word="embeddings.tok_embeddings",
    position=None,
    kind=None,
    norm="embeddings.norm",
    layer="layers.{}.",
    qkv=("attn.Wqkv",),
    output="attn.Wo",
    up="mlp.Wi",
    down="mlp.Wo",
    attention_before="attn_norm",
    mlp_before="mlp_norm",
    final="final_norm",
    gated=True,
)
# By model_type; hub.pooling.ENCODERS has the same.
ENCODER_FAMILIES = {
    "bert": BERT,
    "camembert": ROBERTA,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "modernbert": MODERNBERT,
}


class EncoderConfig(NamedTuple):
    """The numbers of an encoder, read from config.json."""

    family: EncoderFamily
    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    layers: int
    activation: str  # an epilogue of layers.linear.Linear
    epsilon: float
    positions: int
    first_position: int
    types: int  # token types; 0: none
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]  # per layer: positions on each side that a query sees; None: all
    ropes: tuple[RopeConfig, ...]  # of layers without a window, and of those with one; empty: none

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads


class EncoderLayer(NamedTuple):
    """The weights of one layer. `output` and `down` add the residual in their epilogue."""

    attention_before: Norm | None
    qkv: Linear
    output: Linear
    attention_after: Norm | None
    mlp_before: Norm | None
    gate: Linear | None  # where gate and up are not fused
    up: Linear
    down: Linear
    mlp_after: Norm | None


def layer_linears(layer: EncoderLayer) -> list[Linear]:
    """All linear layers of an encoder layer."""
    return [one for one in (layer.qkv, layer.output, layer.gate, layer.up, layer.down) if one is not None]


def read_encoder_config(config: dict[str, Any]) -> EncoderConfig:
    """The EncoderConfig of a parsed config.json. Raises UserError if it asks for something that is not implemented, and
    KeyError if a key is missing."""
    kind = config["model_type"]
    family = ENCODER_FAMILIES[kind]
    absolute = config.get("position_embedding_type") or "absolute"
    if family.position is not None and absolute != "absolute":
        raise UserError(f"position_embedding_type {absolute!r} is not supported for {kind}; absolute is.")
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu"
    if activation not in EPILOGUES:
        raise UserError(f"hidden_act {activation!r} is not supported for {kind}; one of {', '.join(EPILOGUES)} is.")
    layers = config["num_hidden_layers"]
    modern = family is MODERNBERT
    windows, ropes = _windows_and_ropes(config, layers) if modern else ((None,) * layers, ())
    bias = bool(config.get("attention_bias")) if modern else True
    return EncoderConfig(
        family=family,
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        layers=layers,
        activation=EPILOGUES[activation],
        epsilon=config.get("norm_eps", 1e-5) if modern else config.get("layer_norm_eps", 1e-12),
        positions=config.get("max_position_embeddings", 512),
        first_position=config.get("pad_token_id", 1) + 1 if family.offset_positions else 0,
        types=0 if modern else config.get("type_vocab_size", 2),
        norm_bias=bool(config.get("norm_bias")) if modern else True,
        attention_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")) if modern else True,
        windows=windows,
        ropes=ropes,
    )


def _windows_and_ropes(config: dict[str, Any], layers: int) -> tuple[tuple[int | None, ...], tuple[RopeConfig, ...]]:
    """ModernBERT's local layers, and the frequencies of both kinds of layers."""
    every = config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or [SLIDING if index % every else "full_attention" for index in range(layers)]
    window = config.get("local_attention", 128) // 2
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    parameters = config.get("rope_parameters") or {}

    def rope(kind: str, older: str, theta: float) -> RopeConfig:
        given = parameters.get(kind) or {}
        return RopeConfig(head_dim, {"rope_theta": config.get(older) or theta} | given)

    ropes = rope("full_attention", "global_rope_theta", 160000.0), rope(SLIDING, "local_rope_theta", 10000.0)
    return tuple(window if kind == SLIDING else None for kind in kinds), ropes


class EncoderModel:
    """An encoder: hidden states of packed sequences. `kernels` are our CPU kernels; None = torch's."""

    def __init__(
        self,
        config: EncoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels | None,
        progress: Callable[[int], None],
        tokens: int,
    ) -> None:
        """Loads the weights, and reserves memory for `tokens` tokens at once. Raises UserError naming a tensor that is
        missing or has another shape."""
        self.hidden = config.hidden
        self.dtype, self.device = dtype, device
        self._config, self._kernels = config, kernels
        self._checkpoint = checkpoint
        prefixes, word = config.family.prefixes, config.family.word
        self._prefix = next((one for one in prefixes if f"{one}{word}.weight" in checkpoint), "")
        self._bytes = self._parameters = 0
        family = config.family
        self._word = self._table(family.word, config.vocab_size)
        self._positions = None if family.position is None else self._table(family.position, config.positions)
        self._types = None
        if family.kind is not None and config.types:
            self._types = self._table(family.kind, config.types)
        self._norm = self._load_norm(family.norm)
        self._layers = []
        for number in range(config.layers):
            self._layers.append(self._load_layer(family.layer.format(number), number))
            progress(100 * (number + 1) // config.layers)
        self._final = None if family.final is None else self._load_norm(family.final)
        self.footprint = WeightFootprint(self._bytes, self._parameters)
        self.context_length = config.positions - config.first_position
        self._rotaries = [RotaryEmbedding(rope, device, kernels) for rope in config.ropes]
        kv = KVCacheSpec(
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.heads,
            head_dim=config.head_dim,
            dtype=dtype,
            sliding_windows=tuple(None if window is None else window + 1 for window in config.windows),
            cpu_kernels=kernels,
        )
        self._attention = PackedAttention(kv, [ALL if one is None else one for one in config.windows], tokens)
        self._scale = config.head_dim**-0.5
        choose_row_counts([linear for layer in self._layers for linear in layer_linears(layer)])

    def hidden_states(self, batch: PackedSequences) -> Tensor:
        """The last hidden states [T, hidden]. Ids from the vocabulary's size on are of the second token type."""
        config, tokens = self._config, batch.tokens
        kinds = tokens // config.vocab_size
        x = self._word.index_select(0, tokens - kinds * config.vocab_size).to(self.dtype)
        if self._types is not None:
            x += self._types.index_select(0, kinds)
        if self._positions is not None:
            x += self._positions.index_select(0, batch.positions + config.first_position)
        x = self._norm(x)
        plan = self._attention.plan(batch)
        heads = 2 * config.heads  # queries and keys are rotated
        angles = [rotary.angles(batch.positions, batch.longest, heads) for rotary in self._rotaries]
        for number, layer in enumerate(self._layers):
            normed = x if layer.attention_before is None else layer.attention_before(x)
            qkv = layer.qkv(normed).view(len(x), 3 * config.heads, config.head_dim)
            if self._rotaries:
                rope = int(config.windows[number] is not None)
                self._rotaries[rope].rotate(qkv, heads, angles[rope])
            mixed = self._attention.write_and_attend(plan, number, qkv, self._scale)
            x = layer.output(mixed, x)
            if layer.attention_after is not None:
                x = layer.attention_after(x)
            normed = x if layer.mlp_before is None else layer.mlp_before(x)
            inner = layer.up(normed) if layer.gate is None else layer.up(normed, layer.gate(normed))
            x = layer.down(inner, x)
            if layer.mlp_after is not None:
                x = layer.mlp_after(x)
        return x if self._final is None else self._final(x)

    # --- loading ------------------------------------------------------------------------------------------------------

    def _load_layer(self, prefix: str, number: int) -> EncoderLayer:
        config, family, hidden, inner = (
            self._config,
            self._config.family,
            self._config.hidden,
            self._config.intermediate,
        )

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self._load_norm(prefix + name)

        # The first layer of ModernBERT has no norm before attention: the embeddings have one.
        before = family.attention_before
        first = before is not None and number == 0 and f"{self._prefix}{prefix}{before}.weight" not in self._checkpoint
        gate = None
        weight, bias = self._matrix(prefix + family.up, inner * (2 if family.gated else 1), hidden, config.mlp_bias)
        if not family.gated:
            up = self._linear(weight, bias, config.activation)
        elif self._kernels is not None:
            up = self._linear(weight[:inner], bias, config.activation, weight[inner:])
        else:
            biases = (None, None) if bias is None else bias.split(inner)
            gate = self._linear(weight[:inner], biases[0], config.activation)
            up = self._linear(weight[inner:], biases[1], "mul")
        return EncoderLayer(
            attention_before=None if first else norm(before),
            qkv=self._linear(*self._stacked(prefix, family.qkv, 3 * hidden), "none"),
            output=self._linear(*self._matrix(prefix + family.output, hidden, hidden, config.attention_bias), "add"),
            attention_after=norm(family.attention_after),
            mlp_before=norm(family.mlp_before),
            gate=gate,
            up=up,
            down=self._linear(*self._matrix(prefix + family.down, hidden, inner, config.mlp_bias), "add"),
            mlp_after=norm(family.mlp_after),
        )

    def _stacked(self, prefix: str, names: tuple[str, ...], outputs: int) -> tuple[Tensor, Tensor | None]:
        """The matrices of these names, one after the other along the outputs."""
        config = self._config
        parts = [
            self._matrix(prefix + name, outputs // len(names), config.hidden, config.attention_bias) for name in names
        ]
        biases = [bias for _, bias in parts if bias is not None]
        return torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None

    def _matrix(self, name: str, outputs: int, inputs: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = self._tensor(f"{name}.weight", outputs, inputs)
        return weight, self._tensor(f"{name}.bias", outputs) if bias else None

    def _linear(self, weight: Tensor, bias: Tensor | None, epilogue: str, gated: Tensor | None = None) -> Linear:
        for one in (weight, gated):
            if one is not None:
                self._bytes += one.nbytes
                self._parameters += one.numel()
        if self._kernels is not None:
            weight = self._kernels.supported_weight(weight)
            gated = None if gated is None else self._kernels.supported_weight(gated)
        else:
            weight = weight.to(self.dtype)
        bias = None if bias is None else bias.to(self.dtype)
        return Linear(weight, bias, epilogue, self._kernels, self.dtype, gated)

    def _table(self, name: str, rows: int) -> Tensor:
        """An embedding; on CPU it stays in the mapped file unless its type is another."""
        table = self._tensor(f"{name}.weight", rows, self._config.hidden)
        self._bytes += table.nbytes
        self._parameters += table.numel()
        return table.to(self.dtype)

    def _load_norm(self, name: str) -> Norm:
        config, size = self._config, self._config.hidden
        older = f"{self._prefix}{name}.gamma" in self._checkpoint  # as TensorFlow's checkpoints name them
        weight = self._tensor(f"{name}.{'gamma' if older else 'weight'}", size)
        bias = self._tensor(f"{name}.{'beta' if older else 'bias'}", size) if config.norm_bias else None
        wide = [None if one is None else one.to(torch.float32) for one in (weight, bias)]
        assert wide[0] is not None
        return Norm(wide[0], wide[1], config.epsilon, True, self._kernels)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.tensor(self._prefix + name, *shape).to(self.device)
