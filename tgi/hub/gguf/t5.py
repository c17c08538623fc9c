"""Encoder-decoder models of architecture t5 (T5, T5 v1.1, flan-t5, mT5) in Hugging Face's terms."""

from typing import Any

from tgi.hub.gguf.conversion_plan import (
    KNOWN,
    MAX_LAYERS,
    ConversionPlan,
    Metadata,
    TargetTensor,
    refuse_unknown_keys,
    require_tensors,
)
from tgi.hub.gguf.reader import GGUFFile

T5 = "t5"
MIN_BUCKETS = 4  # in the encoder one direction has half of them, and half of these are for one distance each
MAX_DISTANCE = 128  # of all published models; files lack it
# Part of a layer -> its number in the layer, its name there, and the tensors of it: names in the file and in the
# result, shapes by D all heads, H hidden state, I MLP.
_ATTENTION = (("q", "q", "DH"), ("k", "k", "DH"), ("v", "v", "DH"), ("o", "o", "HD"))
_MLP = (("ffn_down", "wo", "HI"),)
_GATED = (*_MLP, ("ffn_gate", "wi_0", "IH"), ("ffn_up", "wi_1", "IH"))
_PLAIN = (*_MLP, ("ffn_up", "wi", "IH"))
# Keys that any kind of model has; the bias of cross-attention is in old checkpoints and nothing reads it.
_UNUSED = {"dec.blk.0.cross_attn_rel_b.weight"}


def plan_t5(file: GGUFFile) -> ConversionPlan:
    """Checks that the file has a complete model. Raises UserError otherwise. Its weights become plain numbers."""
    metadata, tensors = Metadata(file), file.tensors
    refuse_unknown_keys(file, T5, KNOWN | {"attention.relative_buckets_count"})

    def number(key: str, default: int | None = None) -> int:
        return metadata.positive(f"{T5}.{key}", default)

    hidden, inner, heads = number("embedding_length"), number("feed_forward_length"), number("attention.head_count")
    head_dim = number("attention.key_length", max(1, hidden // heads))
    layers = {"enc": number("block_count")}
    layers["dec"] = number("decoder_block_count", layers["enc"])
    for key, count in (("block_count", layers["enc"]), ("decoder_block_count", layers["dec"])):
        if count > MAX_LAYERS:
            raise metadata.wrong(f"{T5}.{key}", count, f"at most {MAX_LAYERS}")
    if (of_values := number("attention.value_length", head_dim)) != head_dim:
        raise metadata.wrong(f"{T5}.attention.value_length", of_values, f"the length of keys, {head_dim},")
    buckets = number("attention.relative_buckets_count")
    if buckets < MIN_BUCKETS:
        raise metadata.wrong(f"{T5}.attention.relative_buckets_count", buckets, f"at least {MIN_BUCKETS}")
    if buckets >= 2 * MAX_DISTANCE:
        raise metadata.wrong(f"{T5}.attention.relative_buckets_count", buckets, f"less than {2 * MAX_DISTANCE}")
    vocab_size = metadata.vocabulary_size()
    gated, tied = "enc.blk.0.ffn_gate.weight" in tensors, "output.weight" not in tensors
    end = metadata.integer("tokenizer.ggml.eos_token_id", 1)
    pad = metadata.integer("tokenizer.ggml.padding_token_id", 0)
    start = metadata.integer(f"{T5}.decoder_start_token_id", pad)
    if start >= vocab_size:
        raise metadata.wrong(f"{T5}.decoder_start_token_id", start, f"an id below {vocab_size}")
    config: dict[str, Any] = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": vocab_size,
        "d_model": hidden,
        "d_ff": inner,
        "d_kv": head_dim,
        "num_heads": heads,
        "num_layers": layers["enc"],
        "num_decoder_layers": layers["dec"],
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": MAX_DISTANCE,
        "layer_norm_epsilon": metadata.number(f"{T5}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": tied,
        # Of T5 as first published, also where its checkpoint has the head twice.
        "scale_decoder_outputs": tied or not gated,
        "n_positions": number("context_length", 512),
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "bfloat16",
    }
    sizes = {"D": heads * head_dim, "H": hidden, "I": inner}
    wanted = [TargetTensor("token_embd.weight", "shared.weight", (vocab_size, hidden))]
    if not tied:
        wanted.append(TargetTensor("output.weight", "lm_head.weight", (vocab_size, hidden)))
    for part, whole in (("enc", "encoder"), ("dec", "decoder")):
        parts = [("attn", "SelfAttention"), ("ffn", "DenseReluDense")]
        parts[1:1] = [("cross_attn", "EncDecAttention")] if part == "dec" else []
        for layer in range(layers[part]):
            for at, (stored, own) in enumerate(parts):
                prefix, place = f"{part}.blk.{layer}.", f"{whole}.block.{layer}.layer.{at}."
                wanted.append(TargetTensor(f"{prefix}{stored}_norm.weight", f"{place}layer_norm.weight", (hidden,)))
                named = [(f"{stored}_{one}", name, shape) for one, name, shape in _ATTENTION]
                for source, name, shape in named if stored != "ffn" else _GATED if gated else _PLAIN:
                    rows, columns = (sizes[size] for size in shape)
                    wanted.append(
                        TargetTensor(f"{prefix}{source}.weight", f"{place}{own}.{name}.weight", (rows, columns))
                    )
        bias = f"{whole}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        wanted.append(TargetTensor(f"{part}.blk.0.attn_rel_b.weight", bias, (buckets, heads)))
        wanted.append(TargetTensor(f"{part}.output_norm.weight", f"{whole}.final_layer_norm.weight", (hidden,)))
    require_tensors(file, T5, wanted, _UNUSED)
    return ConversionPlan(config, wanted, plain=True)
