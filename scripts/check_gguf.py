#!/usr/bin/env python
"""Compares GGUF files with llama.cpp: its converter writes them, its library computes and quantizes them.

    scripts/check_gguf.py                  # all families: about three minutes, and once the build of llama.cpp
    scripts/check_gguf.py lfm2 gpt_oss
    scripts/check_gguf.py --table          # the table of docs/models.md
    scripts/check_gguf.py --demo           # the default model's own file

Of each family a tiny random model, computed in float32 by transformers, by llama.cpp from the file that its
convert_hf_to_gguf.py writes, and by this server from the same file: logprobs at 70 positions of a prompt and at
llama.cpp's 24 greedy tokens. A line has the largest difference of this server to llama.cpp, of llama.cpp to
transformers, and whether the greedy tokens are the same. OTHER_MODELS are compared with transformers. Of the families
in WIDE also a file that llama.cpp has quantized to Q4_K_M, where llama.cpp rounds activations to 8 bits and this server
does not: the mean difference of logprobs, and how many of the 94 likeliest tokens are the same. Of models that end in a
vector (vectors:FAMILY), the largest differences of the vectors, of length 1, or of the logits of classes. Exits with 1
if float32 files differ.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.benchmarks.peers import llama_cpp_program, llama_cpp_source
from scripts.benchmarks.workloads import demo
from scripts.make_model import LATENT_YARN, make_model
from scripts.make_pooling_model import make_pooling_model
from tests.models import minilm
from tests.worker.batches import Row, make_batch
from tgi.hub.gguf.convert import convert
from tgi.hub.pooling import read_pooling_config
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import ModelTask
from tgi.worker.attention import build_attention
from tgi.worker.attention.packed import PackedSequences
from tgi.worker.engine.pooling_startup import load_pooled_model
from tgi.worker.models.loader import build_model

PROMPT, GREEDY, VOCABULARY = 70, 24, 512
Q4_K_M = 15  # the number of that type in llama.h
# Largest difference of logprobs. llama.cpp looks gelu up in a table of float16, and of the gates of Gemma 3n it takes
# the standard deviation of a sample, where the model takes that of all.
LIMIT, LIMIT_OF_GELU = 2e-4, 1e-1
GELU = ("gemma", "gemma2", "gemma3_text", "gemma4_text", "phi", "gpt2", "gpt_bigcode", "gpt_neox", "falcon")
# Which llama.cpp computes as other models, so that this server is compared with transformers: phimoe with RMS norms, a
# softmax as the router and another factor of the rotary embedding.
OTHER_MODELS = ("phimoe",)
LIMIT_OF_GELU_IN_VECTORS, LIMITS_OF_VECTORS = 1e-2, {"vectors:qwen3": 1e-5}
LIMITS = dict.fromkeys((*GELU, "bloom", "mpt", "starcoder2"), LIMIT_OF_GELU) | {"gemma3n_text": 1.0}

# The converter, with the tokenizer of tiny models, and without layers for multi-token prediction, which they lack. Its
# configurations have the entries of config.json that classes of transformers drop. One line for each line of input.
CONVERTER = """
import json, sys
source, log = sys.argv[1:]
sys.path[:0] = [source + "/gguf-py", source]
sys.stderr = open(log, "w")
import convert_hf_to_gguf as program
import conversion
from conversion import base

def kinds(kind):
    yield kind
    for one in kind.__subclasses__():
        yield from kinds(one)

def load_hparams(model, *more, **options):
    with open(f"{model}/config.json") as file:
        return json.load(file) | read(model, *more, **options)

conversion.load_all_models()
from conversion import bert
for kind in kinds(base.TextModel):
    kind.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    kind.no_mtp = True
    if not issubclass(kind, bert.BertModel):
        kind.set_vocab = base.TextModel._set_vocab_gpt2
bert.XLMRobertaModel.set_vocab = bert.RobertaModel.set_vocab
read, base.ModelBase.load_hparams = base.ModelBase.load_hparams, staticmethod(load_hparams)
for line in sys.stdin:
    model, out, *options = json.loads(line)
    sys.argv = ["convert", model, "--outfile", out, "--outtype", "f32", *options]
    try:
        program.main()
        print("converted", flush=True)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}".replace("\\n", " "), flush=True)
"""

Options = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
UNBOUNDED = ("time_step_limit", (0.0, 1e9))
# llama.cpp rounds the bounds of yarn, which the model does not; these are whole.
GPT_OSS_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10764.7, "factor": 32.0, "truncate": False},
    "original_max_position_embeddings": 64,
}
MISTRAL4_YARN = (  # queries are scaled from the 256th position on, which the converter does not write
    "rope_parameters",
    LATENT_YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 256},
)
YARN = ("rope_parameters", LATENT_YARN | {"mscale": 0.7})
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256, "factor": 8.0},
    **{"short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], "long_factor": [float(n) for n in range(1, 7)]},
    "partial_rotary_factor": 0.75,
}
PHIMOE_LONGROPE = {
    **LONGROPE,
    **{"short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0], "long_factor": [float(n) for n in range(1, 9)]},
    **dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122),
    "partial_rotary_factor": 1.0,
}
DELTA: tuple[tuple[str, Any], ...] = (
    ("layer_types", ["linear_attention"] * 3 + [FULL]),
    ("linear_value_head_dim", 24),
    ("mlp_only_layers", []),
)
GEMMA4 = (("layer_types", [SLIDING, SLIDING, FULL, SLIDING, FULL]),)
GEMMA3N = (  # llama.cpp has the number of layers with keys of their own in its code
    *(("num_hidden_layers", 20), ("layer_types", [*[SLIDING] * 4, FULL] * 4), ("num_kv_shared_layers", 0)),
    *(("activation_sparsity_pattern", [0.95] * 10 + [0.0] * 10), ("altup_num_inputs", 4), ("laurel_rank", 64)),
    *(("altup_active_idx", 0), ("hidden_size_per_layer_input", 256)),
)
NEMOTRON_H = (
    *(("time_step_min", 0.001), ("n_group", 1), ("topk_group", 1), ("mamba_head_dim", 64), ("mamba_num_heads", 2)),
    ("layers_block_type", ["linear_attention", "moe", FULL, "moe"]),
)
# The families that llama.cpp's converter writes, and options of tiny models that it and llama.cpp take.
FAMILIES: dict[str, Options] = {
    **{"llama": {}, "mistral": {}, "mixtral": {}, "qwen2": {}, "qwen3": {}, "granite": {}, "gemma": {"tie": True}},
    "ministral3": {},
    **{"llama/fused": {}, "qwen2/fused": {}, "glm4/fused": {}},  # queries, keys and values are one tensor
    "phi3": {"more": (("sliding_window", None),)},  # which llama.cpp disregards
    "phi3/longrope": {
        "more": (("sliding_window", None), ("rope_parameters", LONGROPE), ("original_max_position_embeddings", 256))
    },
    "gemma2": {"tie": True, "head_dim": 24, "more": (("query_pre_attn_scalar", 24),)},
    "gemma3_text": {
        **{"tie": True, "layers": 6, "head_dim": 32},
        "more": (("sliding_window_pattern", 6), ("query_pre_attn_scalar", 32)),
    },
    "gemma3n_text": {"tie": True, "intermediate": 2048, "more": GEMMA3N},
    "gemma4_text": {"tie": True, "more": GEMMA4},
    "gemma4_text/dense": {
        "tie": True,
        "more": (
            *(*GEMMA4, ("enable_moe_block", False), ("num_experts", None), ("top_k_experts", 0)),
            *(("attention_k_eq_v", False), ("num_global_key_value_heads", None), ("hidden_size_per_layer_input", 32)),
        ),
    },
    **{"olmo2": {}, "olmo3": {}, "seed_oss": {}, "hunyuan_v1_dense": {}, "glm4": {}, "stablelm": {}, "nemotron": {}},
    "apertus": {"more": (("rope_parameters", LLAMA3),)},
    "exaone4": {"layers": 64, "more": (("sliding_window_pattern", 4),)},
    "exaone4/1.2b": {"more": (("sliding_window", None), ("layer_types", [FULL] * 3))},
    "ernie4_5": {"more": (("use_bias", False),)},
    "glm": {"head_dim": 16},
    "smollm3": {"layers": 4, "more": (("no_rope_layer_interval", 4),)},
    "arcee": {"more": (("mlp_bias", False),)},
    "cohere": {"tie": True, "more": (("use_qk_norm", False),)},
    "cohere/plus": {"tie": True, "layers": 64},
    "cohere2": {"tie": True, "layers": 4, "more": (("sliding_window_pattern", 4),)},
    "starcoder2": {"tie": True, "more": (("sliding_window", None),)},
    "phi": {"kv_heads": 4, "intermediate": 256},
    "gpt_neox": {},
    "falcon": {"intermediate": 256},
    "falcon/7b": {
        **{"kv_heads": 1, "intermediate": 256},
        "more": (("new_decoder_architecture", False), ("multi_query", True)),
    },
    "bloom": {"tie": True},
    "mpt": {"more": (("attn_config", {"clip_qkv": 0.8}),)},
    "gpt2": {"intermediate": 256},
    "phimoe": {"more": (("rope_parameters", PHIMOE_LONGROPE), ("original_max_position_embeddings", 256))},
    "gpt_bigcode": {"intermediate": 256},
    "dbrx": {},
    "llama4_text": {
        "layers": 4,
        "more": (
            *(("moe_layers", None), ("interleave_moe_layer_step", 2), ("no_rope_layers", None)),
            *(("attention_chunk_size", 8192), ("floor_scale", 8192), ("attn_scale", 0.1)),
        ),
    },
    **{"glm4_moe": {}, "ernie4_5_moe": {}, "hunyuan_v1_moe": {}, "granitemoe": {}},
    "minimax_m2": {"more": (("rope_parameters", {"rope_theta": 1e6, "partial_rotary_factor": 0.5}),)},
    "qwen2_moe": {"more": (("mlp_only_layers", None), ("norm_topk_prob", False))},
    "qwen3_moe": {"more": (("mlp_only_layers", None),)},
    "olmoe": {"kv_heads": 4},
    "dots1": {"kv_heads": 4},
    "exaone_moe": {"layers": 4, "more": (("sliding_window_pattern", 4),)},
    "gpt_oss": {"more": (("rope_parameters", GPT_OSS_YARN),)},
    "deepseek_v2": {"more": (YARN, ("q_lora_rank", 24), ("topk_method", "greedy"), ("n_group", 1), ("topk_group", 1))},
    "deepseek_v2/lite": {
        "layers": 27,
        "more": (YARN, ("topk_method", "greedy"), ("n_group", 1), ("topk_group", 1)),
    },
    "deepseek_v3": {"more": (YARN,)},
    "mistral4": {"more": (MISTRAL4_YARN,)},
    "glm4_moe_lite": {"more": (("attention_bias", False), ("rms_norm_eps", 1e-6))},
    "lfm2": {"tie": True},
    "lfm2_moe": {"tie": True, "more": (("routed_scaling_factor", 1.0),)},
    "qwen3_next": {"layers": 4, "more": DELTA},
    "qwen3_5_text": {"layers": 4, "more": DELTA[:2]},
    "qwen3_5_moe_text": {"layers": 4, "more": DELTA[:2]},
    "mamba2": {"more": (UNBOUNDED, ("use_bias", False))},
    "nemotron_h": {"more": NEMOTRON_H},
    "bamba": {"more": (UNBOUNDED, ("rope_parameters", {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}))},
    "falcon_h1": {"more": (UNBOUNDED, ("mamba_norm_before_gate", False))},
    "falcon_h1/plain": {"more": (UNBOUNDED, ("mamba_rms_norm", False))},
    "granitemoehybrid": {"more": (UNBOUNDED,)},
    "granitemoehybrid/dense": {
        "more": (
            *(UNBOUNDED, ("num_local_experts", 0), ("num_experts_per_tok", 0)),
            ("shared_intermediate_size", 128),
        )
    },
}
# Entries of published config.json files that transformers' classes leave out, as the converter expects them.
PUBLISHED: dict[str, Options] = {
    "cohere2": {"rotary_pct": 1.0},
    "gpt_neox": {"rotary_pct": 0.25},
    "mpt": {"architectures": ["MPTForCausalLM"]},
    "gpt2": {"n_ctx": 2048},
    **{kind: {"scoring_func": "sigmoid"} for kind in ("deepseek_v3", "exaone_moe", "dots1")},
    "deepseek_v2": {"scoring_func": "softmax"},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "glm4_moe_lite": {"scoring_func": "sigmoid", "first_k_dense_replace": 1},
    "minimax_m2": {"scoring_func": "sigmoid", "rotary_dim": 64},
    "falcon_h1": {"head_dim": 16},
    "mistral4": {"architectures": ["Mistral3ForConditionalGeneration"]},
    "hunyuan_v1_moe": {"moe_intermediate_size": [128] * 3, "num_shared_expert": [1] * 3},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "llama4_text": {"architectures": ["Llama4ForConditionalGeneration"]},
    # transformers reads a top-level theta alone
    "dbrx": {"attn_config": {"clip_qkv": 1.2, "kv_n_heads": 2, "rope_theta": 10000.0}},
}
# Models that end in a vector: options of make_pooling_model. llama.cpp has in its code which layers of EmbeddingGemma
# have a window, and the factor of its scores.
POOLED: dict[str, Options] = {
    **{"bert": {}, "roberta": {}, "xlm-roberta": {}, "modernbert": {}, "qwen3": {}},
    "bert/fused": {},
    "gemma3": {"more": (("num_hidden_layers", 7), ("sliding_window_pattern", 6), ("query_pre_attn_scalar", 32))},
    **{"roberta/classes": {"classes": 1}, "xlm-roberta/classes": {"classes": 3}},
    "modernbert/classes": {"classes": 4, "more": (("classifier_pooling", "mean"),)},
    "modernbert/ranking": {"classes": 1, "more": (("classifier_pooling", "cls"),)},
    "minilm": {},  # all-MiniLM-L6-v2, with token ids
}
# What its tokenizer may cut otherwise: capitals, accents, scripts, marks, control characters, special and long words.
TEXTS = (
    *("The capital of France is Paris.", "  Crème BRÛLÉE  naïve Ångström İstanbul ẞtraße", "x\u0301e\u0301 combining"),
    *("今天天气很好，我们去公园散步。日本語の文章", "안녕하세요 세계", "Привет, МИР! Ёлка", "हिन्दी ภาษาไทย עִבְרִית عَرَبِيّ"),
    *(
        "emoji 😀👍🏽 👨‍👩‍👧‍👦 ok!",
        "Hello,world!!! don't (do) [that] $5.00 50% a_b#c @x",
        "①②③ ㎏ Ａｂｃ ﬁ ½ № ™ … “x” — ‐",
    ),
    *(
        "tabs\tand\r\nlines\x00\x07 \u200b\u00ad\ufeff",
        "[CLS] in [SEP] [MASK] [UNK] ##ing ▁",
        "a" * 120,
        "",
        "1,234.5 1e-5 -7",
    ),
)
PUBLISHED_OF_POOLED: dict[str, Options] = {"modernbert": {"layer_norm_eps": 1e-5}}
CONVERTER_OPTIONS = {"gemma3": ["--sentence-transformers-dense-modules"]}
LENGTHS = (1, 2, 33, 130)  # of texts

# Of which models 256 wide are quantized: rows of K-quants are multiples of that.
WIDE = (
    *("llama", "qwen2", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "lfm2", "qwen3_next"),
    *("granite", "phi3", "mamba2", "glm4_moe", "olmo2"),
)


class Converter:
    """llama.cpp's converter in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def convert(self, directory: Path, file: Path, *options: str) -> None:
        """With these options of the program. Raises RuntimeError with what the converter says."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(directory), str(file), *options]) + "\n")
        self._process.stdin.flush()
        if (said := self._process.stdout.readline().strip()) != "converted":
            raise RuntimeError(f"not converted: {said}")


@contextmanager
def converter(scratch: Path) -> Iterator[Converter]:
    """Starts and ends it."""
    command = [sys.executable, "-c", CONVERTER, str(llama_cpp_source()), str(scratch / "converter.log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Converter(process)
        finally:
            process.kill()


def llama(program: Path, *words: str | Path | int, ids: list[int] | None = None) -> list[int]:
    """The greedy ids that the program prints. Raises RuntimeError with what llama.cpp says."""
    given = " ".join(map(str, ids or []))
    done = subprocess.run([program, *map(str, words)], input=given, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"llama.cpp says: {done.stderr[:300]}")
    return [int(one) for one in done.stdout.split()]


def theirs(program: Path, file: Path, ids: list[int], count: int) -> tuple[list[int], Tensor]:
    """llama.cpp's greedy ids, and logprobs [prompt + count, vocabulary]."""
    out = file.with_suffix(".logits")
    greedy = llama(program, "logits", file, out, count, ids=ids)
    logits = torch.from_numpy(np.fromfile(out, np.float32)).reshape(len(ids) + count, -1)
    out.unlink()
    return greedy, logits.log_softmax(-1)


def ours(file: Path, directory: Path, ids: list[int], dtype: str = "float32") -> Tensor:
    """This server's logprobs [ids, vocabulary] of the file, which is imported into `directory`: the first half of the
    ids in one step, then one at a time."""
    directory.mkdir()
    convert(file, directory, lambda stage, percent, size=0: None, packed=True)
    model = build_model(directory, dtype, "cpu", lambda stage, percent: None)
    attention = build_attention(model.kv, 40, model.device, state_slots=41)
    rows = [Row(ids[: len(ids) // 2], 0, range(40))]
    rows += [Row([token], at, range(40)) for at, token in enumerate(ids) if at >= len(ids) // 2]
    first = make_batch(rows[:1])._replace(logits_indices=torch.arange(len(rows[0].tokens)))
    logits = [model.forward(first, attention), *(model.forward(make_batch([row]), attention) for row in rows[1:])]
    return torch.cat(logits).float().log_softmax(-1)


class Result(NamedTuple):
    """Of one family. Differences are of logprobs."""

    family: str
    refused: str = ""  # or why there is nothing to compare
    difference: float = 0.0  # the largest one, of this server to llama.cpp, or of OTHER_MODELS to transformers
    of_transformers: float = 0.0  # of llama.cpp to transformers
    same_tokens: bool = False
    quantized: tuple[float, int] | None = None  # the mean difference, and how many of the likeliest tokens are the same
    vectors: bool = False  # differences are of these

    @property
    def right(self) -> bool:
        """Whether this server computes the same."""
        if self.vectors:
            return self.same_tokens and self.difference < LIMITS_OF_VECTORS.get(self.family, LIMIT_OF_GELU_IN_VECTORS)
        limit = LIMITS.get(self.family.partition("/")[0], LIMIT)
        return not self.refused and self.difference < limit and self.same_tokens

    def cells(self) -> list[str]:
        """The columns of a table."""
        if self.refused:
            return [self.family, self.refused, "", "", ""]
        tokens = "the same" if self.same_tokens else "OTHERS"
        tokens = "" if self.vectors and self.same_tokens else tokens
        words = [self.family, f"{self.difference:.0e}", f"{self.of_transformers:.0e}", tokens]
        return [*words, "{:.3f}, {}".format(*self.quantized) if self.quantized else ""]


def check(family: str, place: Path, program: Path, writer: Converter) -> Result:
    """Compares one."""
    kind, options = family.partition("/")[0], FAMILIES[family]
    ids = torch.randint(6, 400, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    try:
        network = made(kind, place / "model", options)
        writer.convert(place / "model", place / "m.gguf", *["--fuse-qkv"] * family.endswith("/fused"))
        greedy, llamas = theirs(program, place / "m.gguf", ids, GREEDY)
        with torch.inference_mode():
            expected = network(torch.tensor([ids + greedy]), use_cache=False).logits[0].log_softmax(-1)
        found = ours(place / "m.gguf", place / "imported", ids + greedy)
    except (UserError, RuntimeError) as error:
        return Result(family, " ".join(str(error).split())[:200])
    quantized = None
    if family in WIDE:
        made(kind, place / "wide", {**options, "hidden": 256})
        writer.convert(place / "wide", place / "w.gguf")
        llama(program, "quantize", place / "w.gguf", place / "q.gguf", Q4_K_M)
        q_greedy, q_llamas = theirs(program, place / "q.gguf", ids, GREEDY)
        q_found = ours(place / "q.gguf", place / "imported-quantized", ids + q_greedy)
        same = int((q_found.argmax(-1) == q_llamas.argmax(-1)).sum())
        quantized = float((q_found - q_llamas).abs().mean()), same
    reference = expected if kind in OTHER_MODELS else llamas
    return Result(
        family,
        "",
        float((found - reference).abs().max()),
        float((llamas - expected).abs().max()),
        bool((found.argmax(-1) == reference.argmax(-1))[PROMPT - 1 : -1].all()),
        quantized,
    )


def check_pooled(family: str, place: Path, program: Path, writer: Converter) -> Result:
    """Compares a model that ends in a vector."""
    kind, _, variant = family.partition("/")
    generator, directory, file = np.random.default_rng(3), place / "model", place / "m.gguf"
    texts = [generator.integers(6, 400, length) for length in LENGTHS]
    tokenizer, same = None, True
    if kind == "minilm":
        directory = minilm()
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        texts = [np.array(tokenizer.encode(text).ids) for text in TEXTS]
    try:
        if tokenizer is None:
            make_pooling_model(kind, directory, **POOLED[family])
            path = directory / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | PUBLISHED_OF_POOLED.get(kind, {})))
        writer.convert(directory, file, *CONVERTER_OPTIONS.get(kind, ()), *["--fuse-qkv"] * (variant == "fused"))
        (place / "imported").mkdir()
        convert(file, place / "imported", lambda stage, percent, size=0: None, packed=True)
        if tokenizer is not None:
            made = Tokenizer.from_file(str(place / "imported" / "tokenizer.json"))
            same = all(made.encode(text).ids == ids.tolist() for text, ids in zip(TEXTS, texts, strict=True))
        found = pooled(place / "imported", texts)
        expected = pooled_by_transformers(directory, texts)
        llamas = []
        for text in texts:
            llama(program, "vector", file, place / "vector", found.shape[1], ids=text.tolist())
            llamas.append(torch.from_numpy(np.fromfile(place / "vector", np.float32)))
    except (UserError, RuntimeError) as error:
        return Result(family, " ".join(str(error).split())[:200])
    theirs = torch.stack(llamas)
    if "classes" not in POOLED[family]:
        found, theirs, expected = (one / one.norm(dim=1, keepdim=True) for one in (found, theirs, expected))
    to_llama, of_transformers = (float((one - theirs).abs().max()) for one in (found, expected))
    return Result(f"vectors:{family}", "", to_llama, of_transformers, same, vectors=True)


def pooled(directory: Path, texts: list[np.ndarray]) -> Tensor:
    """This server's vectors [texts, size] of a model directory."""
    pooling = read_pooling_config(directory)
    assert pooling is not None
    cpu = torch.device("cpu")
    with torch.inference_mode():
        model = load_pooled_model(directory, pooling, torch.float32, cpu, None, lambda stage, percent: None, 128)
        return model.vectors(PackedSequences.of(texts, cpu))


def pooled_by_transformers(directory: Path, texts: list[np.ndarray]) -> Tensor:
    """The same of transformers, and of the modules of sentence-transformers."""
    pooling = read_pooling_config(directory)
    assert pooling is not None
    classifies = pooling.task is ModelTask.CLASSIFY
    loader = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    network = loader.from_pretrained(directory, attn_implementation="eager").eval()
    found = []
    with torch.inference_mode():
        for text in texts:
            result = network(torch.from_numpy(text)[None])
            if classifies:
                found.append(result.logits[0])
                continue
            states = result.last_hidden_state[0]
            vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling.pooling]
            for dense in pooling.dense:
                vector = load_file(dense.directory / "model.safetensors")["linear.weight"] @ vector
            found.append(vector)
    return torch.stack(found)


def made(kind: str, directory: Path, options: Options) -> Any:
    """Writes a tiny model, with a config.json as published ones are. Returns transformers' network."""
    make_model(kind, directory, vocab=VOCABULARY, **options)
    (named,) = json.loads((directory / "config.json").read_text())["architectures"]
    network = (
        getattr(transformers, named).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    )
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | PUBLISHED.get(kind, {})))
    return network


def check_demo(scratch: Path, program: Path) -> None:
    """Compares greedy tokens of the default model's file: this server's own ones, in two types, with llama.cpp's."""
    model = demo()
    assert model.gguf is not None
    tokenizer = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    for number, text in enumerate(DEMO_PROMPTS):
        ids = tokenizer.encode(text).ids
        file = scratch / f"demo-{number}.gguf"
        file.symlink_to(model.gguf)
        greedy, llamas = theirs(program, file, ids, 64)
        print(f"{text!r}\n  llama.cpp: {tokenizer.decode(greedy)!r}")
        for dtype in ("float32", "bfloat16"):
            found = ours(file, scratch / f"demo-{number}-{dtype}", ids + greedy, dtype)
            same = (found.argmax(-1) == llamas.argmax(-1))[len(ids) - 1 : -1]
            mean = float((found - llamas).abs().mean())
            gaps = [float(llamas[len(ids) - 1 + at].topk(2).values.diff().abs()) for at in (~same).nonzero().flatten()]
            print(f"  {dtype}: {int(same.sum())} of {len(same)} tokens are llama.cpp's, mean difference {mean:.3f}")
            print(
                "".join(f"    where llama.cpp's two likeliest are {gap:.3f} apart, another one\n" for gap in gaps),
                end="",
            )


DEMO_PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a Python function that reverses a list.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nExplain why the sky is blue in three sentences.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a small village at the edge of a forest, where",
)


def main() -> None:
    """Parses the command line, checks and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--table", action="store_true", help="print a table in Markdown")
    parser.add_argument("--demo", action="store_true", help="compare the default model's file instead")
    arguments = parser.parse_args()
    known = [*FAMILIES, *(f"vectors:{name}" for name in POOLED)]
    if unknown := set(arguments.families) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    wrong = False
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        program = llama_cpp_program("llama_logits", scratch)
        if arguments.demo:
            check_demo(scratch, program)
            return
        if arguments.table:
            print(
                "| family | to llama.cpp | llama.cpp to transformers | greedy tokens | Q4_K_M |\n|---|---|---|---|---|"
            )
        with converter(scratch) as writer:
            for family in arguments.families or known:
                with tempfile.TemporaryDirectory(dir=scratch) as place:
                    compare = check_pooled if family.startswith("vectors:") else check
                    result = compare(family.removeprefix("vectors:"), Path(place), program, writer)
                cells = result.cells()
                print(f"| {' | '.join(cells)} |" if arguments.table else ", ".join(filter(None, cells)), flush=True)
                wrong = wrong or not result.right
    sys.exit(wrong)


if __name__ == "__main__":
    main()
