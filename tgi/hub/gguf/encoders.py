"""Encoders of architecture bert (BERT, DistilBERT, RoBERTa, XLM-RoBERTa) and modern-bert in Hugging Face's terms."""

from typing import Any, NamedTuple

from tgi.hub.gguf.conversion_plan import (
    KNOWN,
    MAX_LAYERS,
    ConversionPlan,
    Metadata,
    TargetTensor,
    refuse_unknown_keys,
    require_tensors,
)
from tgi.hub.gguf.pooling import CLASSIFIER_MODES, FIRST, RANK, labels, modules, pooling_type
from tgi.hub.gguf.reader import GGUFFile
from tgi.hub.pooling import CLASSIFIER
from tgi.microkernel.errors import UserError

BERT, MODERN_BERT = ENCODERS = ("bert", "modern-bert")
HEAD = "cls.output.weight"  # of classifiers, which llama.cpp calls ranking
TYPES = "token_types.weight"
# Sizes: H hidden state, I MLP, 2I its two joint matrices, 3H queries, keys and values.
Block = tuple[str, str, tuple[str, ...]]  # name in the file, name in the result, shape
_BERT_LAYER: tuple[Block, ...] = (
    ("attn_q", "attention.self.query", ("H", "H")),
    ("attn_k", "attention.self.key", ("H", "H")),
    ("attn_v", "attention.self.value", ("H", "H")),
    ("attn_output", "attention.output.dense", ("H", "H")),
    ("attn_output_norm", "attention.output.LayerNorm", ("H",)),
    ("ffn_up", "intermediate.dense", ("I", "H")),
    ("ffn_down", "output.dense", ("H", "I")),
    ("layer_output_norm", "output.LayerNorm", ("H",)),
)
_MODERN_BERT_LAYER: tuple[Block, ...] = (
    ("attn_norm", "attn_norm", ("H",)),
    ("attn_qkv", "attn.Wqkv", ("3H", "H")),
    ("attn_output", "attn.Wo", ("H", "H")),
    ("ffn_norm", "mlp_norm", ("H",)),
    ("ffn_up", "mlp.Wi", ("2I", "H")),
    ("ffn_down", "mlp.Wo", ("H", "I")),
)
_KEYS_OF_MODERN_BERT = {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}
_QKV, _JOINT = ("attn_q", "attn_k", "attn_v"), "attn_qkv"


class _Kind(NamedTuple):
    """What models under the name bert differ in, by their tokenizer."""

    model_type: str
    name: str  # of the class in config.json, which begins so


_KINDS = {"bert": _Kind("bert", "Bert"), "gpt2": _Kind("roberta", "Roberta"), "t5": _Kind("xlm-roberta", "XLMRoberta")}


def plan_encoder(file: GGUFFile, architecture: str) -> ConversionPlan:
    """Checks that the file has a complete encoder. Raises UserError otherwise. Its weights become plain numbers."""
    metadata = Metadata(file)
    further = _KEYS_OF_MODERN_BERT if architecture == MODERN_BERT else set()
    refuse_unknown_keys(file, architecture, KNOWN | {"attention.causal"} | further)
    if file.metadata.get(key := f"{architecture}.attention.causal", False) is not False:
        raise metadata.wrong(key, file.metadata[key], "false, as of all encoders,")
    config = _config(metadata, architecture)
    plan = _modern_bert if architecture == MODERN_BERT else _bert
    wanted = plan(metadata, config)
    pooling, classifies = pooling_type(metadata, architecture, FIRST), HEAD in file.tensors
    if pooling == RANK and not classifies:
        raise UserError(f"{file.path} lacks the tensor {HEAD!r} of a model that ranks. Fetch or convert it again.")
    files = {} if classifies else modules(pooling, config["hidden_size"])
    require_tensors(file, architecture, wanted, set())
    return ConversionPlan(config, wanted, plain=True, files=files)


def _config(metadata: Metadata, architecture: str) -> dict[str, Any]:
    """The entries that all encoders have."""

    def number(key: str) -> int:
        return metadata.positive(f"{architecture}.{key}")

    hidden, heads, layers = number("embedding_length"), number("attention.head_count"), number("block_count")
    if layers > MAX_LAYERS:
        raise metadata.wrong(f"{architecture}.block_count", layers, f"at most {MAX_LAYERS}")
    if hidden % heads or metadata.positive(f"{architecture}.attention.head_count_kv", heads) != heads:
        raise metadata.wrong(f"{architecture}.attention.head_count", heads, f"a divisor of {hidden}, also for keys,")
    config: dict[str, Any] = {
        "vocab_size": metadata.vocabulary_size(),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": number("context_length"),
        "pad_token_id": None,
        "dtype": "float32",
    }
    if (found := metadata.file.tensors.get(HEAD)) is not None:
        config["id2label"] = labels(metadata, architecture, found.shape[0] if len(found.shape) > 1 else 1)
    return config


def _bert(metadata: Metadata, config: dict[str, Any]) -> list[TargetTensor]:
    """The tensors of a model of architecture bert, whose entries are added to `config`."""
    file, hidden = metadata.file, config["hidden_size"]
    tokenizer = metadata.string("tokenizer.ggml.model")
    kind = _KINDS.get(tokenizer)
    if kind is None:
        raise metadata.wrong("tokenizer.ggml.model", tokenizer, f"one of {', '.join(_KINDS)}")
    classifies, typed = HEAD in file.tensors, TYPES in file.tensors
    if classifies and kind.model_type == "bert":
        what = "pooler (bert.pooler.dense)" if typed else "activation of a DistilBERT"
        raise UserError(
            f"{file.path} is a classifier without the {what} between the encoder and the classes, which llama.cpp's "
            "converter leaves out. Use the model's safetensors version instead."
        )
    types = metadata.positive("tokenizer.ggml.token_type_count", 1) if typed else 1
    config |= {
        "architectures": [kind.name + (CLASSIFIER if classifies else "Model")],
        "model_type": kind.model_type,
        "hidden_act": "gelu",  # which files do not tell
        "type_vocab_size": types,
        "layer_norm_eps": metadata.number("bert.attention.layer_norm_epsilon"),
    }
    if kind.model_type != "bert":
        config["pad_token_id"] = -1  # positions begin after it, and those before the first are not in files
    prefix = "roberta." if classifies else ""
    table = f"{prefix}embeddings."
    wanted = [
        TargetTensor("token_embd.weight", f"{table}word_embeddings.weight", (config["vocab_size"], hidden)),
        TargetTensor(
            "position_embd.weight",
            f"{table}position_embeddings.weight",
            (config["max_position_embeddings"], hidden),
        ),
    ]
    zero = None if typed else 0.0  # DistilBERT has no types
    wanted.append(TargetTensor(TYPES, f"{table}token_type_embeddings.weight", (types, hidden), number=zero))
    wanted += _both("token_embd_norm", f"{table}LayerNorm", (hidden,))
    wanted += _layers(file, config, _BERT_LAYER, f"{prefix}encoder.layer.", biased=True)
    if classifies:
        wanted += _both("cls", "classifier.dense", (hidden, hidden))
        wanted += _both("cls.output", "classifier.out_proj", (len(config["id2label"]), hidden))
    return wanted


def _modern_bert(metadata: Metadata, config: dict[str, Any]) -> list[TargetTensor]:
    """The same of a ModernBERT."""
    file, hidden, layers = metadata.file, config["hidden_size"], config["num_hidden_layers"]
    classifies = HEAD in file.tensors
    if hidden // config["num_attention_heads"] % 2:
        raise metadata.wrong(f"{MODERN_BERT}.attention.head_count", config["num_attention_heads"], "heads of even size")
    window = metadata.integer(f"{MODERN_BERT}.attention.sliding_window", 0)
    every = file.metadata.get(key := f"{MODERN_BERT}.attention.sliding_window_pattern", 3)
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        slides = [bool(layer % every) for layer in range(layers)]
    elif isinstance(every, list) and len(every) == layers and all(isinstance(one, bool) for one in every):
        slides = every
    else:
        raise metadata.wrong(key, every, f"a positive number, or a list of {layers} truth values")
    thetas = {"full_attention": ("rope.freq_base", 10000.0), "sliding_attention": ("rope.freq_base_swa", 10000.0)}
    config |= {
        "architectures": ["ModernBert" + (CLASSIFIER if classifies else "Model")],
        "model_type": "modernbert",
        "hidden_activation": "gelu",
        "norm_eps": metadata.number(f"{MODERN_BERT}.attention.layer_norm_epsilon"),
        "layer_types": ["sliding_attention" if one and window else "full_attention" for one in slides],
        "local_attention": window or config["max_position_embeddings"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": metadata.number(f"{MODERN_BERT}.{key}", theta)}
            for kind, (key, theta) in thetas.items()
        },
    }
    if (key := f"{MODERN_BERT}.hidden_activation") in file.metadata:
        config["hidden_activation"] = metadata.string(key)
    scaling = file.metadata.get(key := f"{MODERN_BERT}.rope.scaling.type", "none")
    if scaling != "none":
        raise metadata.wrong(key, scaling, "none")
    prefix = "model." if classifies else ""
    table = f"{prefix}embeddings."
    wanted = [
        TargetTensor("token_embd.weight", f"{table}tok_embeddings.weight", (config["vocab_size"], hidden)),
        TargetTensor("token_embd_norm.weight", f"{table}norm.weight", (hidden,)),
        TargetTensor("output_norm.weight", f"{prefix}final_norm.weight", (hidden,)),
    ]
    # The first layer has no norm before attention: the embeddings have one.
    found = _layers(file, config, _MODERN_BERT_LAYER, f"{prefix}layers.", biased=False)
    wanted += [one for one in found if one.source != "blk.0.attn_norm.weight" or one.source in file.tensors]
    if classifies:
        pooling = metadata.integer(key := f"{MODERN_BERT}.classifier.pooling_type", 1)
        if pooling not in CLASSIFIER_MODES:
            raise metadata.wrong(key, pooling, "1 (mean) or 2 (first token)")
        config["classifier_pooling"] = CLASSIFIER_MODES[pooling]
        wanted.append(TargetTensor("cls.weight", "head.dense.weight", (hidden, hidden)))
        wanted.append(TargetTensor("cls.norm.weight", "head.norm.weight", (hidden,)))
        wanted += _both("cls.output", "classifier", (len(config["id2label"]), hidden))
    return wanted


def _both(source: str, name: str, shape: tuple[int, ...]) -> list[TargetTensor]:
    """A weight and its bias."""
    return [
        TargetTensor(f"{source}.weight", f"{name}.weight", shape),
        TargetTensor(f"{source}.bias", f"{name}.bias", shape[:1]),
    ]


def _layers(
    file: GGUFFile, config: dict[str, Any], blocks: tuple[Block, ...], prefix: str, *, biased: bool
) -> list[TargetTensor]:
    """The tensors of all layers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    sizes = {"H": hidden, "3H": 3 * hidden, "I": inner, "2I": 2 * inner}
    wanted = []
    for layer in range(config["num_hidden_layers"]):
        stored = f"blk.{layer}."
        joint = biased and f"{stored}{_JOINT}.weight" in file.tensors  # of convert_hf_to_gguf.py --fuse-qkv
        for source, name, shape in blocks:
            rows = (_QKV.index(source) * hidden, 3 * hidden) if joint and source in _QKV else None
            of_file = stored + (_JOINT if rows else source)
            full, numbers = f"{prefix}{layer}.{name}", tuple(sizes[size] for size in shape)
            wanted.append(TargetTensor(f"{of_file}.weight", f"{full}.weight", numbers, rows=rows))
            if biased:
                wanted.append(TargetTensor(f"{of_file}.bias", f"{full}.bias", numbers[:1], rows=rows))
    return wanted
