"""T5Config: the numbers of an encoder-decoder model as data, without torch. See t5.py for what it computes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError
from tgi.worker.models.config_reader import EPILOGUES


class T5Config(NamedTuple):
    """The numbers of a model, read from config.json."""

    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    encoder_layers: int
    decoder_layers: int
    activation: str  # an epilogue of layers.linear.Linear
    gated: bool  # the MLP has a gate
    epsilon: float
    buckets: int  # of distances
    max_distance: int  # from this one on all share the last bucket
    output_scale: float  # of the hidden states that the head gets


def read_t5_config(config: dict[str, Any]) -> T5Config:
    """The T5Config of a parsed config.json. Raises UserError if it asks for something that is not implemented, and
    KeyError if a key is missing."""
    first, _, last = config.get("feed_forward_proj", "relu").rpartition("-")
    activation = "gelu_new" if (first, last) == ("gated", "gelu") else last
    if first not in ("", "gated") or activation not in EPILOGUES:
        raise UserError(
            f"feed_forward_proj {config['feed_forward_proj']!r} of config.json is not supported; expected one of "
            f"{', '.join(EPILOGUES)}, or gated- before it."
        )
    buckets = config.get("relative_attention_num_buckets", 32)
    max_distance = config.get("relative_attention_max_distance", 128)
    if buckets < 4 or buckets // 2 >= max_distance:
        raise UserError(
            f"config.json asks for {buckets} buckets of distances up to {max_distance} (relative_attention_num_buckets,"
            " relative_attention_max_distance); at least 4 were expected, and less than twice the distance."
        )
    hidden = config["d_model"]
    # T5 v1.1 does not scale. transformers writes scale_decoder_outputs, older versions mean it by this key.
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    return T5Config(
        vocab_size=config["vocab_size"],
        hidden=hidden,
        intermediate=config["d_ff"],
        heads=config["num_heads"],
        head_dim=config["d_kv"],
        encoder_layers=config["num_layers"],
        decoder_layers=config.get("num_decoder_layers") or config["num_layers"],
        activation=EPILOGUES[activation],
        gated=first == "gated",
        epsilon=config.get("layer_norm_epsilon", 1e-6),
        buckets=buckets,
        max_distance=max_distance,
        output_scale=hidden**-0.5 if scaled else 1.0,
    )


def t5_shapes(config: T5Config, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of each tensor of the checkpoint. `tied`: the head is the embedding."""
    hidden, inner, heads = config.hidden, config.intermediate, config.heads * config.head_dim
    yield "shared.weight", (config.vocab_size, hidden)
    if not tied:
        yield "lm_head.weight", (config.vocab_size, hidden)
    attention = {"q": (heads, hidden), "k": (heads, hidden), "v": (heads, hidden), "o": (hidden, heads)}
    ups = ("wi_0", "wi_1") if config.gated else ("wi",)
    mlp = {**dict.fromkeys(ups, (inner, hidden)), "wo": (hidden, inner)}
    parts = {"SelfAttention": attention, "EncDecAttention": attention, "DenseReluDense": mlp}
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        yield f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (config.buckets, config.heads)
        yield f"{side}.final_layer_norm.weight", (hidden,)
        own = [part for part in parts if side == "decoder" or part != "EncDecAttention"]
        for layer in range(layers):
            for number, part in enumerate(own):
                prefix = f"{side}.block.{layer}.layer.{number}."
                yield f"{prefix}layer_norm.weight", (hidden,)
                yield from ((f"{prefix}{part}.{name}.weight", shape) for name, shape in parts[part].items())
