"""Models for benchmarks: layer shapes of known models, with random weights."""

import json
from itertools import chain, islice, product
from itertools import count as numbers
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import GroupedExperts, MixtureOfExperts

# Defaults of all shapes: SmolLM2-135M.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "135m": {},
    "0.5b": {  # Qwen2.5-0.5B
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1b": {  # Llama-3.2-1B
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "8b": {  # Llama-3.1-8B
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {  # 12 of the 48 layers of Qwen3-30B-A3B
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "two-layer": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


def matrices(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The matrices of a layer that a token is multiplied with: checkpoint name -> (outputs, inputs). Of experts, those
    of one, with the width of all that a token chooses."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    if "num_experts" in config:
        inner = config["moe_intermediate_size"] * config["num_experts_per_tok"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = head_dim * config["num_attention_heads"], head_dim * config["num_key_value_heads"]
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write_tokenizer(vocabulary: int, directory: Path) -> None:
    """Writes a byte-level BPE tokenizer of that many ids, at least 256: the bytes, then pairs, triples and so on of
    lower-case letters, each of which the letters before it and its last letter merge to. Every id decodes to text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {character: number for number, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    words = chain.from_iterable(map("".join, product(ascii_lowercase, repeat=length)) for length in numbers(2))
    for word in islice(words, vocabulary - len(alphabet)):
        ids[word] = len(ids)
        merges.append((word[:-1], word[-1]))
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[-1]['content'] }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))


def write_config(config: dict[str, Any], directory: Path) -> None:
    """Writes the config.json of a model whose weights --load-format dummy makes."""
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))


def stored(part: Any, rows: int | None = None) -> int:
    """Bytes of the weights of linear layers in any format, of one or of all in a tuple or list, without norms. With
    `rows`, only of as many experts as so many tokens are expected to choose, if all experts are as probable."""
    if isinstance(part, Linear):
        return stored(part._weight)
    if isinstance(part, MixtureOfExperts | GroupedExperts) and rows is not None:
        always = stored(part.router) + stored(part.shared)
        chosen = 1 - (1 - part.router.top_k / part.router.linear.outputs) ** rows
        return always + round(chosen * (stored(part) - always))
    if isinstance(part, (tuple, list)) and not hasattr(part, "nbytes"):
        return sum(stored(one, rows) for one in part)
    return int(getattr(part, "nbytes", 0))
