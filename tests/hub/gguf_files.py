"""Writes GGUF files from model directories, the way llama.cpp's converter does, for the import to undo."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py stores llama's q and k projections."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    model: Path,
    path: Path,
    quantization: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """`metadata` overrides keys; a value of None leaves a key out. Norms and biases stay float32."""
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    keys = {
        f"{kind}.block_count": config["num_hidden_layers"],
        f"{kind}.context_length": config["max_position_embeddings"],
        f"{kind}.embedding_length": config["hidden_size"],
        f"{kind}.feed_forward_length": config["intermediate_size"],
        f"{kind}.attention.head_count": heads,
        f"{kind}.attention.head_count_kv": kv_heads,
        f"{kind}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{kind}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        **tokenizer_metadata(model),
    }
    if config.get("head_dim"):
        keys[f"{kind}.attention.key_length"] = config["head_dim"]
        keys[f"{kind}.attention.value_length"] = config["head_dim"]
    keys |= metadata or {}
    writer = GGUFWriter(path, kind)
    for key, value in keys.items():
        add(writer, key, value)
    for name, tensor in load_file(model / "model.safetensors").items():
        values = tensor.to(torch.float32).numpy()
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = permute(values, heads if ".q_proj." in name else kv_heads)
        block = GGMLQuantizationType[quantization if values.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(values, block), raw_dtype=block)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def tokenizer_metadata(model: Path) -> dict[str, Any]:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    splits = json.dumps(tokenizer["pre_tokenizer"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if "Split" in splits else "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocabulary[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocabulary[settings["eos_token"]],
        "tokenizer.ggml.padding_token_id": vocabulary[settings["pad_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }
