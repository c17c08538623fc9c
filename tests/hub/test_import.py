"""Import of GGUF files: a file written from a model is converted back to that model."""

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import _type_traits, dequantize
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Sequence, Split
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from scripts.make_gguf import add, write_gguf, write_t5_gguf
from scripts.make_model import LATENT_YARN
from tests.dequantized import plain_weights
from tests.models import model, t5_model
from tests.worker.batches import prefill
from tgi.hub.gguf import reader, weights
from tgi.hub.gguf.conversion_plan import TargetTensor
from tgi.hub.gguf.convert import convert
from tgi.hub.gguf.tokenizer import REFUSED, SPLITS, complete_tokenizer
from tgi.hub.model_config import read_model_config, read_sampling_defaults
from tgi.hub.resolver import import_gguf
from tgi.microkernel.errors import UserError
from tgi.worker.attention import build_attention
from tgi.worker.models.loader import build_model
from tgi.worker.models.t5_config import read_t5_config

pytestmark = pytest.mark.slow

TEXTS = [
    "The capital of France is Paris.",
    "In 1984 there were 365 days; 3.14159 isn't 22/7",
    "  spaces\n\n\tand   tabs  ",
    "今天天气很好 😀👍🏽 crème brûlée Привет",
    "<|bos|><|user|>\nhello<|eos|>\n<|assistant|>\n",
    "",
]


def quiet(stage: str, percent: float, size: int = 0) -> None:
    pass


def imported(source: Path, directory: Path) -> Path:
    directory.mkdir()
    convert(source, directory, quiet)
    return directory


def logits(directory: Path, ids: list[int]) -> torch.Tensor:
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0]


def decoded(directory: Path) -> torch.Tensor:
    """Logits after a prompt, of our decoder in float32."""
    found = build_model(directory, "float32", "cpu", lambda stage, percent: None)
    return prefill(
        found, build_attention(found.kv, 20, found.device, state_slots=30), list(range(5, 60)), list(range(20))
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [False, True])
def test_float32_weights_are_rounded_to_bfloat16(kind: str, tie: bool, tmp_path: Path) -> None:
    original = model(kind, tie=tie)
    result = imported(write_gguf(original, tmp_path / "m.gguf"), tmp_path / "out")
    before, after = load_file(original / "model.safetensors"), load_file(result / "model.safetensors")
    assert set(after) == set(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.to(torch.bfloat16)), name
    config, made = (json.loads((d / "config.json").read_text()) for d in (original, result))
    for key in ("model_type", "architectures", "tie_word_embeddings", "rms_norm_eps", "vocab_size", "rope_parameters"):
        assert made[key] == config[key], key
    assert made["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_imported_model_computes_the_same_logits(kind: str, tmp_path: Path) -> None:
    original = model(kind, dtype="bfloat16")
    result = imported(write_gguf(original, tmp_path / "m.gguf"), tmp_path / "out")
    ids = list(range(5, 60))
    assert torch.equal(logits(result, ids), logits(original, ids))


# Values that llama.cpp assumes, so that GGUF files do not contain them.
HYBRID = (("time_step_min", 0.001), ("n_group", 1), ("topk_group", 1))
FACTORS = ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "embedding_multiplier")
FOLDED = (  # into the weights
    *((name, 1.0) for name in (*FACTORS, "ssm_in_multiplier", "ssm_out_multiplier", "lm_head_multiplier")),
    *(("mlp_multipliers", [1.0] * 2), ("ssm_multipliers", [1.0] * 5), ("time_step_limit", (0.0, 1e9))),
    ("mamba_norm_before_gate", False),
)
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], "long_factor": [float(n) for n in range(1, 7)]},
    **{"attention_factor": 1.25, "partial_rotary_factor": 0.75, "factor": 32.0},
}
GRANTED: dict[str, dict[str, Any]] = {
    "phi3": {},
    "phi3/longrope": {
        "more": (("rope_parameters", LONGROPE), ("original_max_position_embeddings", 64), ("sliding_window", None))
    },
    "granite": {},
    "gemma": {"tie": True},
    "gemma2": {"tie": True, "head_dim": 24, "more": (("query_pre_attn_scalar", 24),)},
    "gemma3_text": {
        **{"tie": True, "layers": 6, "head_dim": 32},
        "more": (("sliding_window_pattern", 6), ("query_pre_attn_scalar", 32)),
    },
    "gemma3n_text": {"tie": True, "more": (("num_hidden_layers", 5),)},
    "olmo2": {},
    "smollm3": {"layers": 4, "more": (("no_rope_layer_interval", 4),)},
    "cohere": {"tie": True},
    "starcoder2": {"tie": True, "more": (("sliding_window", None),)},
    "mixtral": {},
    "qwen3_moe": {"more": (("mlp_only_layers", None),)},
    "olmoe": {},
    "seed_oss": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "arcee": {},
    "glm4": {},
    "cohere2": {"tie": True, "layers": 4, "more": (("sliding_window_pattern", 4),)},
    "lfm2": {"tie": True},
    "lfm2_moe": {"tie": True, "more": (("routed_scaling_factor", 1.0),)},
    "nemotron_h": {"more": (*HYBRID, ("layers_block_type", ["linear_attention", "moe", "full_attention", "moe"]))},
    "nemotron_h/dense": {
        "more": (*HYBRID, ("layers_block_type", ["mlp", "linear_attention", "full_attention", "mlp"]))
    },
    "qwen2_moe": {"more": (("mlp_only_layers", None), ("norm_topk_prob", False))},
    "exaone4": {},
    "mpt": {"more": (("attn_config", {"clip_qkv": 0.8}),)},
    "mamba2": {"more": (("time_step_limit", (0.0, 1e9)),)},
    "falcon_h1": {"more": FOLDED},
    "falcon_h1/plain": {"more": (*FOLDED, ("mamba_rms_norm", False))},
    "deepseek_v2": {"more": (("rope_parameters", LATENT_YARN | {"mscale": 0.7}),)},
    "deepseek_v3": {"more": (("rope_parameters", LATENT_YARN | {"mscale": 0.7}),)},
    "glm4_moe_lite": {"more": (("attention_bias", False),)},
    "deepseek_v3/kv_b": {"more": (("rope_parameters", LATENT_YARN | {"mscale": 0.7}),)},
    "qwen3_5_text": {},
    "dots1": {},
    "glm4_moe": {},
    "exaone_moe": {},
    "ernie4_5_moe": {},
    "minimax_m2": {},
    "hunyuan_v1_moe": {},
    "ministral3": {},
    "olmo3": {"layers": 4},
    "stablelm": {},
    "nemotron": {},
    "glm": {},
    "glm/joint": {},
    "qwen2/joint": {},
    "llama/joint": {},
    "phi": {},
    "stablelm/12b": {"more": (("use_parallel_residual", True), ("qk_layernorm", True))},
    "apertus": {"more": (("rope_parameters", {"rope_type": "default", "rope_theta": 12000000.0}),)},
    "bamba": {"more": (("time_step_limit", (0.0, 1e9)),)},
}


@pytest.mark.parametrize("kind", GRANTED)
def test_every_model_family_is_converted_back(kind: str, tmp_path: Path) -> None:
    original = model(kind.partition("/")[0], dtype="bfloat16", **GRANTED[kind])
    absorbed, joint = not kind.endswith("/kv_b"), kind.endswith("/joint")
    source = write_gguf(original, tmp_path / "m.gguf", absorbed=absorbed, joint=joint)
    result = imported(source, tmp_path / "out")
    before, after = load_file(original / "model.safetensors"), load_file(result / "model.safetensors")
    assert set(after) == set(before) - ({"lm_head.weight"} if "tie" in GRANTED[kind] else set())
    for name, tensor in after.items():
        assert torch.equal(before[name], tensor), name
    ids = list(range(5, 60))
    assert torch.equal(logits(result, ids), logits(original, ids))


DENSE = (  # Gemma 4 E2B
    *(("enable_moe_block", False), ("num_experts", None), ("attention_k_eq_v", False)),
    *(("num_global_key_value_heads", None), ("hidden_size_per_layer_input", 32)),
)
LLAMA4 = (  # Maverick, of fewer layers
    *(("moe_layers", [1, 3]), ("no_rope_layers", [1, 1, 1, 0]), ("attention_chunk_size", 8192)),
    *(("floor_scale", 8192), ("attn_scale", 0.1), ("layer_types", None)),
)
MISTRAL4_YARN = LATENT_YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
FALCON_7B = (("new_decoder_architecture", False), ("multi_query", True))
WIDE = (("num_hidden_layers", 5), ("hidden_size_per_layer_input", 32))
DELTA = (("layer_types", ["linear_attention"] * 3 + ["full_attention"]), ("mlp_only_layers", None))


@pytest.mark.parametrize(
    ("kind", "block", "options", "fused"),
    [
        *((kind, block, {"tie": True}, False) for kind in ("gpt2", "bloom") for block in ("BF16", "Q8_0")),
        ("gpt_neox", "BF16", {}, False),
        ("gpt_neox", "Q8_0", {"more": (("use_parallel_residual", False),)}, False),
        ("falcon", "BF16", {"tie": True}, False),
        ("falcon", "Q8_0", {"tie": True, "kv_heads": 1, "more": FALCON_7B}, False),
        ("gpt_bigcode", "BF16", {"tie": True}, False),
        ("dbrx", "Q8_0", {}, False),
        ("qwen3_next", "BF16", {"layers": 4, "more": DELTA}, False),
        ("qwen3_next", "Q8_0", {"layers": 4, "more": DELTA}, True),
        ("qwen3_5_moe_text", "BF16", {}, False),
        ("qwen3_5_moe_text", "Q8_0", {"more": (("linear_value_head_dim", 32),)}, True),
        ("gemma4_text", "BF16", {"tie": True}, True),
        ("gemma4_text", "Q8_0", {"tie": True, "more": WIDE}, False),
        ("llama4_text", "BF16", {"layers": 4, "more": LLAMA4}, False),
        ("llama4_text", "Q8_0", {"layers": 4, "intermediate": 128, "more": LLAMA4}, False),
        ("gemma4_text", "BF16", {"tie": True, "more": DENSE}, False),
        ("gemma3n_text", "Q8_0", {"tie": True, "more": WIDE}, False),
        ("deepseek_v3", "Q8_0", {}, False),
        ("mistral4", "BF16", {"more": (("rope_parameters", MISTRAL4_YARN),)}, False),
        ("mistral4", "Q8_0", {}, False),
        ("granitemoe", "BF16", {}, False),
    ],
)
def test_families_with_other_names_of_tensors(
    kind: str, block: str, options: dict[str, Any], fused: bool, tmp_path: Path
) -> None:
    """By which the decoder reads rows and columns in the order that files have. Quantized weights equal those of the
    import that rounds them, and the decoder computes with all their bits."""
    original = model(kind, dtype="bfloat16", **options)
    source = write_gguf(original, tmp_path / "m.gguf", block, fused=fused)
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", quiet, packed=True)
    if block != "BF16":
        expected = load_file(imported(source, tmp_path / "plain") / "model.safetensors")
        exact = plain_weights(load_file(tmp_path / "out" / "model.safetensors"), torch.float32)
        assert set(exact) == set(expected)
        assert all(exact[name].to(torch.bfloat16).equal(tensor) for name, tensor in expected.items())
        save_file(exact, tmp_path / "plain" / "model.safetensors")
    wanted, found = (decoded(one) for one in (original if block == "BF16" else tmp_path / "plain", tmp_path / "out"))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["t5", "flan-t5", "mt5"])
def test_encoder_decoder_models(kind: str, tmp_path: Path) -> None:
    original = t5_model(kind, dtype="bfloat16", max_distance=128)
    result = imported(write_t5_gguf(original, tmp_path / "m.gguf"), tmp_path / "out")
    before, after = (load_file(one / "model.safetensors") for one in (original, result))
    assert set(after) == set(before)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    configs = [json.loads((one / "config.json").read_text()) for one in (original, result)]
    wanted, found = map(read_t5_config, configs)
    assert found == wanted
    assert read_model_config(result).decoder_start == 0
    texts = ["What is the answer?", "  Paris,  Tokyo\n today ", "naïf", ""]
    tokenizers = [Tokenizer.from_file(str(one / "tokenizer.json")) for one in (original, result)]
    for text in texts:
        wanted_ids, ids = (one.encode(text).ids for one in tokenizers)
        assert ids == wanted_ids
        assert tokenizers[1].decode(ids) == tokenizers[0].decode(ids)
    network = transformers.AutoModelForSeq2SeqLM.from_pretrained
    given = {"input_ids": torch.arange(3, 40)[None], "decoder_input_ids": torch.tensor([[0, 7, 9]])}
    with torch.no_grad():
        one, other = (network(path, dtype=torch.float32)(**given).logits for path in (original, result))
    assert torch.equal(one, other)


def test_mistral_large_3_is_a_deepseek2_whose_weights_of_experts_are_normed(tmp_path: Path) -> None:
    yarn = LATENT_YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    original = model("mistral4", dtype="bfloat16", more=(("rope_parameters", yarn),))
    keys = {"temperature_scale": 0.3, "temperature_length": yarn["original_max_position_embeddings"]}
    metadata = {f"deepseek2.attention.{key}": value for key, value in keys.items()}
    source = write_gguf(original, tmp_path / "m.gguf", "BF16", metadata, name_of_architecture="deepseek2")
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", quiet, packed=True)
    assert torch.equal(decoded(tmp_path / "out"), decoded(original))


def charsmap() -> list[int]:
    """SentencePiece's table of a normalization that replaces A by B: a double array, with one path, and the text."""
    units = [0] * 513
    units[0] = 256 << 10  # to the children
    units[256 ^ ord("A")] = (256 ^ ord("A") ^ 512) << 10 | 1 << 8 | ord("A")  # the key ends here, with unit 512
    return list(struct.pack("<I513I", 4 * len(units), *units) + b"B\0")


def test_encoder_decoder_models_keep_no_codes(tmp_path: Path) -> None:
    """They are computed with plain weights: an import to serve dequantizes them without rounding."""
    original = t5_model("flan-t5", max_distance=128)
    of_text = {"remove_extra_whitespaces": True, "precompiled_charsmap": charsmap()}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in of_text.items()}
    file = write_t5_gguf(original, tmp_path / "m.gguf", "Q4_0", metadata)
    (tmp_path / "out").mkdir()
    convert(file, tmp_path / "out", quiet, packed=True)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    tensor = reader.read_gguf(file).tensors["enc.blk.0.attn_o.weight"]
    exact = dequantize(np.frombuffer(tensor.data, np.uint8).reshape(len(tensor.data) // 18, 18), tensor.type)
    found = load_file(tmp_path / "out" / "model.safetensors")["encoder.block.0.layer.0.SelfAttention.o.weight"]
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("  Paris,  A ").ids == tokenizer.encode("Paris, B").ids
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy().reshape(-1), exact.reshape(-1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"t5.block_count": 3}, "lacks the tensor 'enc.blk.2"),
        ({"t5.decoder_block_count": 2}, "has tensors that a t5 model does not use, such as 'dec.blk.2"),
        ({"t5.attention.value_length": 8}, "value_length' is '8'; the length of keys, 16, was expected"),
        ({"t5.attention.scale": 0.5}, "'t5.attention.scale' set, which import does not know"),
        ({"t5.attention.relative_buckets_count": 3}, "at least 4 was expected"),
        ({"t5.attention.relative_buckets_count": 256}, "less than 256 was expected"),
        ({"t5.decoder_start_token_id": 2**31}, "is '2147483648'; an id below"),
        ({"tokenizer.ggml.scores": None}, "neither merges nor scores"),
    ],
)
def test_encoder_decoder_models_that_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        imported(write_t5_gguf(t5_model("t5"), tmp_path / "m.gguf", metadata=change), tmp_path / "out")


@pytest.mark.parametrize(("quantization", "error"), [("F16", 0.002), ("BF16", 0.01), ("Q8_0", 0.02), ("Q4_0", 0.15)])
def test_quantized_weights_are_within_the_quantization_error(quantization: str, error: float, tmp_path: Path) -> None:
    original = model("llama")
    result = imported(write_gguf(original, tmp_path / "m.gguf", quantization), tmp_path / "out")
    before, after = load_file(original / "model.safetensors"), load_file(result / "model.safetensors")
    for name, tensor in before.items():
        largest = tensor.abs().amax(dim=-1, keepdim=True)
        assert (after[name].float() - tensor).abs().div(largest).max() <= error + 0.004, name


@pytest.mark.parametrize("block", sorted(_type_traits, key=int), ids=lambda block: block.name)
def test_every_block_type_is_dequantized(block: GGMLQuantizationType, tmp_path: Path) -> None:
    size, stored = GGML_QUANT_SIZES[block]
    columns = max(256, size)
    raw = np.random.default_rng(0).integers(0, 60, (6, columns // size * stored), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = [TargetTensor("x", "y", (6, columns))]
    weights.write_weights(
        reader.read_gguf(tmp_path / "m.gguf"), wanted, tmp_path / "y.safetensors", lambda done, size: None
    )
    expected = torch.from_numpy(np.asarray(dequantize(raw, block), np.float32)).reshape(6, columns)
    assert expected.abs().sum() > 0
    assert torch.equal(load_file(tmp_path / "y.safetensors")["y"], expected.to(torch.bfloat16))


def test_a_large_tensor_is_converted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = model("llama")
    source = write_gguf(original, tmp_path / "m.gguf", "Q8_0")
    whole = imported(source, tmp_path / "whole")
    monkeypatch.setattr(weights, "PIECE", 192)  # three rows, so that pieces are not aligned with heads
    assert (imported(source, tmp_path / "pieces") / "model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()


def test_rounding_to_bfloat16_equals_that_of_torch() -> None:
    values = torch.randn(100_000) * torch.logspace(-30, 30, 100_000)
    values = torch.cat([values, torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3.3e38])])
    mine = torch.from_numpy(weights.bfloat16(values.numpy()).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(mine, values.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_tokenizer_equals_the_original(kind: str, tmp_path: Path) -> None:
    original = model(kind)
    result = imported(write_gguf(original, tmp_path / "m.gguf"), tmp_path / "out")
    before, after = (Tokenizer.from_file(str(d / "tokenizer.json")) for d in (original, result))
    assert after.get_vocab_size() == before.get_vocab_size()
    for text in TEXTS:
        ids = before.encode(text).ids
        assert after.encode(text).ids == ids, text
        assert after.decode(ids, skip_special_tokens=False) == text
    card, source = read_model_config(result), read_model_config(original)
    assert card.chat_templates == source.chat_templates
    assert card.eos_token_ids == source.eos_token_ids == (2,)
    assert (card.bos_token, card.eos_token) == ("<|bos|>", "<|eos|>")
    assert after.decode([1, 2], skip_special_tokens=True) == ""


def test_digits_are_split_as_the_file_specifies(tmp_path: Path) -> None:
    source = write_gguf(model("llama"), tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": "smollm"})
    tokenizer = Tokenizer.from_file(str(imported(source, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.encode("1984").tokens == ["1", "9", "8", "4"]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("deepseek-llm", "He said: 1984\n世界", ["He", "Ġsaid", ":", "Ġ", "1984", "Ċ", "ä¸ĸçķĮ"]),
        ("deepseek-coder", "x1 = 23;", ["x", "1", "Ġ=Ġ", "2", "3", ";"]),
        ("deepseek-v3", "In 12345 days: #tag 世界", ["In", "Ġ", "123", "45", "Ġdays", ":", "Ġ#", "tag", "Ġ", "ä¸ĸçķĮ"]),
        ("falcon", "a+b 12345", ["a", "+", "b", "Ġ", "123", "45"]),
        ("viking", "one, 12", ["one", ",", "Ġ", "1", "2"]),
        ("poro-chat", "one, 12", ["one", ",", "Ġ12"]),
        ("glm4", "I'LL 12345", ["I", "'LL", "Ġ", "123", "45"]),
        ("stablelm2", "I'LL 12", ["I", "'LL", "Ġ", "1", "2"]),
        ("minerva-7b", "a 12", ["a", "Ġ", "1", "2"]),
        ("bailingmoe2", "I'LL 12", ["I", "'LL", "Ġ", "1", "2"]),
        ("seed-coder", "a;\n1", ["a", ";", "Ċ", "1"]),
        ("exaone-moe", "two words 1", ["twoĠwords", "Ġ", "1"]),
        ("ufakzeka", "Ali'nin 1", ["Ali", "'nin", "Ġ", "1"]),
        ("a.x-4.0", "it's 12", ["it", "'s", "Ġ12"]),
        (
            "kimi-k2",
            "HelloWorld中文abc I'LL 12345",
            [
                *("Hello", "World", "ä¸Ńæĸĩ", "abc", "ĠI'LL", "Ġ", "123", "45"),
            ],
        ),
        (
            "superbpe",
            "By the way 12345678, 2½ 345½1234",
            [
                *("ByĠtheĠwayĠ", "12", "345", "678", ",Ġ", "2Â½", "Ġ", "345Â½1", "234"),
            ],
        ),
        ("youtu", "aB中，ㄅ 12", ["a", "B", "ä¸Ń", "ï¼Į", "ãĦħ", "Ġ", "1", "2"]),
        ("afmoe", "x12345 中ไ: #tag", ["x", "12", "345", "Ġ", "ä¸Ń", "à¹Ħ", ":", "Ġ#", "tag"]),
        ("chameleon", "a  12!?", ["a", "ĠĠ", "1", "2", "!", "?"]),
        ("tiny_aya", "aB 1234567 12345b", ["a", "B", "Ġ", "1", "234", "567", "Ġ", "123", "45", "b"]),
        ("cohere2moe", "I'LL 1234", ["I'LL", "Ġ", "1", "234"]),
        ("laguna", "I'LL;\n\n12", ["I", "'LL", ";", "ĊĊ", "1", "2"]),
        ("minicpm5", "I'LL 12345", ["I", "'LL", "Ġ", "123", "45"]),
        ("jais-2", "a       b 1234", ["a", "ĠĠĠĠ", "ĠĠ", "Ġb", "Ġ", "123", "4"]),
        ("spark2_5", "a; \n123 中", ["a", ";", "ĠĊ", "1", "2", "3", "Ġ", "ä¸Ń"]),
        ("hy_v4", "In 12345", ["In", "Ġ", "123", "45"]),
        *((name, "7" * 20_000 + " a", ["77", *["777"] * 6666, "Ġa"]) for name in ("tiny_aya", "afmoe", "superbpe")),
        ("tiny_aya", "½½" + "7" * 20_000 + "a", ["Â½Â½7", *["777"] * 6666, "7", "a"]),
        ("glm5", "I'LL 12345", ["I", "'LL", "Ġ", "123", "45"]),
        ("roberta-bpe", "it's 12", ["it", "'s", "Ġ12"]),
        ("granite-embed-multi-97m", "HelloWorld 1234", ["Hello", "World", "Ġ", "123", "4"]),
    ],
)
def test_texts_are_split_as_the_name_of_the_pre_tokenizer_says(name: str, text: str, pieces: list[str]) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": []}
    tokenizer = Tokenizer(BPE())
    complete_tokenizer(reader.GGUFFile(Path("m"), metadata, {}), tokenizer, GGUF_PRE_TOKENIZER_SPLITS)
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("tiny_aya", (r"\d{1,3}(?=(?:\d{3})*\b)", *SPLITS["tiny_aya"][1:])),
        ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ],
)
def test_digits_are_cut_where_the_published_patterns_cut_them(name: str, original: tuple[str, ...]) -> None:
    published, ours = (
        Sequence([Split(Regex(pattern), "isolated") for pattern in patterns]) for patterns in (original, SPLITS[name])
    )
    choice = random.Random(0)
    for _ in range(3000):
        text = "".join(
            choice.choice("1727٣９½Ⅻ²a_中\u0301 ,\nB") * choice.randint(1, 9) for _ in range(choice.randint(1, 8))
        )
        assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text), text


@pytest.mark.parametrize(("kind", "pre"), [("gemma4", None), ("gpt2", "gemma4"), ("gpt2", "sarvam-moe")])
def test_characters_are_merged_over_the_whole_text(kind: str, pre: str | None, tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*"ab▁\n", "ab", "▁ab", "ab▁", "\n\n", "  "]
    merges = ["a b", "▁ ab", "ab ▁", "\n \n"]
    metadata = {
        **{"tokenizer.ggml.model": kind, "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens + letters},
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 3, *[6] * 256, *[1] * 8, 4],
        **{"tokenizer.ggml.merges": merges, "tokenizer.ggml.unknown_token_id": 3, "tokenizer.ggml.bos_token_id": 2},
        **{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False},
    }
    source = write_gguf(model("llama"), tmp_path / "m.gguf", metadata=metadata)
    tokenizer = Tokenizer.from_file(str(imported(source, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(tokens) + len(letters)
    text = "ab ab\n\na<|turn>b   é"
    # as llama.cpp 0.5.0
    assert tokenizer.encode(text, add_special_tokens=False).tokens == [
        *("ab", "▁ab", "\n\n", "a", "<|turn>", "b", "▁▁", "▁", "<0xC3>", "<0xA9>"),
    ]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False).removeprefix("<bos>") == text
    assert tokenizer.encode("a").tokens == ([] if pre == "sarvam-moe" else ["<bos>"]) + ["a"]


@pytest.mark.parametrize("name", ["whitespace", "nonesuch"])
def test_a_pre_tokenizer_that_is_not_computed_is_refused_with_the_reason(name: str) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": []}
    reason = REFUSED.get(name, "splits text in the unknown way 'nonesuch'")
    with pytest.raises(UserError, match=re.escape(reason)):
        complete_tokenizer(reader.GGUFFile(Path("m"), metadata, {}), Tokenizer(BPE()), GGUF_PRE_TOKENIZER_SPLITS)


def test_bos_is_added_as_the_file_specifies(tmp_path: Path) -> None:
    added = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    source = write_gguf(model("llama"), tmp_path / "m.gguf", metadata=added)
    tokenizer = Tokenizer.from_file(str(imported(source, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.encode("a").tokens == ["<|bos|>", "a", "<|eos|>"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


@pytest.mark.parametrize("prefix", [None, False])
def test_a_sentencepiece_vocabulary_is_converted(prefix: bool | None, tmp_path: Path) -> None:
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-1000.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": None,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    result = imported(write_gguf(model("llama"), tmp_path / "m.gguf", metadata=metadata), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(result / "tokenizer.json"))
    if prefix is None:
        assert tokenizer.encode("hello hello").tokens == ["<s>", "▁hello", "▁hello"]
        assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    else:
        assert tokenizer.encode("hello hello").tokens == ["<s>", "hello", "▁hello"]
        assert tokenizer.encode("é</s>hell").tokens == ["<s>", "<0xC3>", "<0xA9>", "</s>", "hell"]
        assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"
    assert tokenizer.decode(tokenizer.encode("hello é").ids) == "hello é"


def test_several_end_of_turn_tokens(tmp_path: Path) -> None:
    source = write_gguf(model("llama"), tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 4})
    assert read_model_config(imported(source, tmp_path / "out")).eos_token_ids == (2, 4)


@pytest.mark.parametrize(("kind", "name"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")])
def test_the_text_part_of_models_that_see_images(kind: str, name: str, tmp_path: Path) -> None:
    original = model(kind, dtype="bfloat16", **GRANTED.get(kind, {}))
    metadata = {f"{name}.rope.dimension_sections": [24, 20, 20, 0]}
    source = write_gguf(original, tmp_path / "m.gguf", metadata=metadata, name_of_architecture=name)
    before, after = (load_file(d / "model.safetensors") for d in (original, imported(source, tmp_path / "out")))
    assert set(after) == set(before)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind


@pytest.mark.parametrize("scaled", [True, False])
def test_phimoe_has_the_factor_of_the_published_model(
    scaled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files lack the factor of the rotary embedding, and have another one, by which llama.cpp computes."""
    factors = {f"{sort}_factor": [1.0 + step / 4 for step in range(8)] for sort in ("short", "long")}
    scales = dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if scaled:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors, **scales}
    original = model("phimoe", dtype="bfloat16", more=(("rope_parameters", rope), ("sliding_window", 24)))
    with caplog.at_level("WARNING"):
        import_gguf(write_gguf(original, tmp_path / "m.gguf"), tmp_path / "out", quiet)
    said = [message for logger, _, message in caplog.record_tuples if logger.startswith("tgi.")]
    assert said == [
        f"{tmp_path / 'm.gguf'}: the file lacks the factor of the rotary embedding (short_mscale and long_mscale); "
        "1.243163121016122 is assumed, that of Phi-3.5-MoE."
    ] * int(scaled)
    before, after = (load_file(place / "model.safetensors") for place in (original, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    ids = list(range(5, 60))
    expected = logits(original, ids)
    assert torch.equal(logits(tmp_path / "out", ids), expected)
    torch.testing.assert_close(decoded(tmp_path / "out").flatten(), expected[-1], rtol=1e-4, atol=1e-4)


def test_layers_for_multi_token_prediction_are_not_read(tmp_path: Path) -> None:
    original = model("qwen3_5_text", dtype="bfloat16")
    metadata = {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1}
    tensor = {"blk.3.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}
    result = imported(write_gguf(original, tmp_path / "m.gguf", metadata=metadata, extra=tensor), tmp_path / "out")
    assert set(load_file(result / "model.safetensors")) == set(load_file(original / "model.safetensors"))
    assert json.loads((result / "config.json").read_text())["num_hidden_layers"] == 3
    tensor["blk.4.nextn.eh_proj.weight"] = tensor["blk.3.nextn.eh_proj.weight"]
    with pytest.raises(UserError, match=r"does not use, such as 'blk\.4\.nextn\.eh_proj\.weight'"):
        imported(write_gguf(original, tmp_path / "m.gguf", metadata=metadata, extra=tensor), tmp_path / "more")


def test_a_split_file_is_read_whole_from_any_part(tmp_path: Path) -> None:
    original = model("llama", dtype="bfloat16")
    whole = reader.read_gguf(write_gguf(original, tmp_path / "m.gguf", "BF16"))
    parts = [tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    tensors = [*whole.tensors.values()]
    for number, path in enumerate(parts):
        writer = GGUFWriter(path, "llama")
        for key, value in (whole.metadata | {"split.no": number, "split.count": 3}).items():
            if number == 0 or key.startswith("split."):
                add(writer, key, value)
        for tensor in tensors[number::3]:
            raw = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], -1)
            writer.add_tensor(tensor.name, raw, raw_dtype=tensor.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    result = imported(parts[1], tmp_path / "out")
    ids = list(range(5, 60))
    assert torch.equal(logits(result, ids), logits(original, ids))
    parts[2].rename(tmp_path / "kept.gguf")
    with pytest.raises(UserError, match=r"m-00003-of-00003\.gguf does not exist"):
        reader.read_gguf(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(UserError, match="is not part 3 of 3"):
        reader.read_gguf(parts[0])


def test_an_end_of_turn_token_that_the_file_does_not_name(tmp_path: Path) -> None:
    given = write_gguf(model("llama"), tmp_path / "m.gguf")
    tokens = reader.read_gguf(given).metadata["tokenizer.ggml.tokens"]
    tokens[5] = "<|im_end|>"
    source = write_gguf(model("llama"), tmp_path / "n.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    assert read_model_config(imported(source, tmp_path / "out")).eos_token_ids == (2, 5)


def test_recommended_sampling_is_kept(tmp_path: Path) -> None:
    keys = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 0}
    metadata = {f"general.sampling.{key}": value for key, value in keys.items()}
    result = imported(write_gguf(model("llama"), tmp_path / "m.gguf", metadata=metadata), tmp_path / "out")
    assert read_sampling_defaults(result) == (0.6, 20, 0.95, 0.05, 1.1, None)


def test_rope_scaling_is_kept(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 512}
    for name, metadata, limit in (("linear", linear, 8192), ("yarn", yarn, 2048)):
        result = imported(write_gguf(model("llama"), tmp_path / f"{name}.gguf", metadata=metadata), tmp_path / name)
        scaling = json.loads((result / "config.json").read_text())["rope_parameters"]
        assert scaling["rope_type"] == name
        assert scaling["factor"] == 4.0
        assert read_model_config(result).max_position_embeddings == limit


@pytest.mark.parametrize(("factor", "high"), [(8.0, 4.0), (16.0, 1.0)])
def test_llama_3_rope_scaling_is_recognized(factor: float, high: float, tmp_path: Path) -> None:
    """That of Llama 3.1 and of Llama 4 Scout."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }
    original = model("llama", head_dim=32)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(torch.arange(0, 32, 2) / 32)
    divisors = (plain / scaled).numpy().astype(np.float32)
    metadata = {"llama.rope.freq_base": 500000.0}
    source = write_gguf(original, tmp_path / "m.gguf", metadata=metadata, extra={"rope_freqs.weight": divisors})
    result = imported(source, tmp_path / "out")
    assert json.loads((result / "config.json").read_text())["rope_parameters"] == scaling
    odd = write_gguf(
        original, tmp_path / "o.gguf", extra={"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)}
    )
    with pytest.raises(UserError, match="unknown way"):
        imported(odd, tmp_path / "odd")


def test_import_runs_in_a_child_process_and_creates_a_complete_directory(tmp_path: Path) -> None:
    stages: list[tuple[object, ...]] = []
    source = write_gguf(model("qwen3"), tmp_path / "m.gguf", "Q8_0")
    import_gguf(source, tmp_path / "out", lambda *told: stages.append(told))
    read_model_config(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]
    assert stages[-3][:2] == ("importing weights", 100)
    assert stages[-1] == ("importing tokenizer", 100)


def test_import_does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="exists already"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out", quiet)
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
