"""Every family of DecoderModel against transformers in float32, on torch's kernels and on ours, and its batch
invariance."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scripts.make_model import fill
from tests.families import in_depth, with_variants
from tests.models import made
from tests.models import model as make
from tests.references import reference
from tests.worker.batches import Row, in_chunks, make_batch, prefill
from tests.worker.cpu_kernels.available import our_kernels
from tgi.hub import model_config
from tgi.hub.vision_towers import VISION_FAMILIES
from tgi.worker.attention import build_attention
from tgi.worker.attention.interface import AttentionBackend
from tgi.worker.checkpoint import SINGLE_FILE
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.families import FAMILIES, WITH_TEXT_PART
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model, read_model_spec

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FIRST = ("llama", "mistral", "qwen2", "qwen3")  # test_models.py tests these in more detail
OTHERS = tuple(kind for kind in FAMILIES if kind not in FIRST)
# Their results do not depend on the batch on our kernels either.
RECURRENT = (
    *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
    *("mamba2", "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid"),
)
TYPES = ("float32", "bfloat16")
LENGTHS = (90, 1, 17, 44)  # the sliding windows have 40 tokens
DECODED = 2  # tokens after each prompt, in decode steps


def load(directory: Path, dtype: str = "float32", native: bool = False) -> Model:
    kernels = our_kernels(read_model_spec(directory, dtype)) if native else None
    found = build_model(directory, dtype, "cpu", lambda stage, percent: None, kernels=kernels)
    assert isinstance(found, DecoderModel)
    return found


def memory(model: Model) -> AttentionBackend:
    return build_attention(model.kv, 100, CPU, state_slots=101)


def pages(row: int) -> list[int]:
    return list(range(20 * row, 20 * row + 20))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def logprobs_of_transformers(directory: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Logprobs of every position of each text, in float32."""
    transformers.utils.logging.disable_progress_bar()
    config = json.loads((directory / "config.json").read_text())
    (named,) = config["architectures"]
    attention = "sdpa" if config.get("alibi") else "eager"  # which would add Falcon's ALiBi twice
    loaded = getattr(transformers, named).from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
    with torch.inference_mode():
        return [loaded(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in texts]


def expected(directory: Path) -> list[tuple[list[int], torch.Tensor]]:
    """For each prompt: its ids with those of the decode steps, and the logprobs of every position from transformers."""
    texts = [ids + list(range(300 + row, 300 + row + DECODED)) for row, ids in enumerate(prompts())]
    return list(zip(texts, reference(logprobs_of_transformers, directory, texts), strict=True))


def check_against_transformers(directory: Path, native: bool = False) -> None:
    """Asserts that logprobs and greedy tokens equal those of transformers, in chunks and in a batch, and that both have
    the same bits. `native`: on our kernels."""
    loaded = load(directory, native=native)
    known = expected(directory)
    ids, logprobs = known[0]
    sizes = [50, 1, 20, 1, len(ids) - 72]
    ends = torch.tensor(sizes).cumsum(0) - 1
    chunked = in_chunks(loaded, memory(loaded), ids, pages(0), sizes, memory(loaded).page_size)
    torch.testing.assert_close(chunked.log_softmax(-1), logprobs[ends], rtol=0, atol=1e-4)
    attention = memory(loaded)
    prompt_batch = make_batch(
        [Row(ids[:-DECODED], 0, pages(row)) for row, (ids, _) in enumerate(known)], attention.page_size
    )
    found = loaded.forward(prompt_batch, attention)
    for at in range(-DECODED, 1):
        wanted = torch.stack([rows[at - 1] for _, rows in known])
        torch.testing.assert_close(found.log_softmax(-1), wanted, rtol=0, atol=1e-4)
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))
        if at < 0:
            decode_rows = [
                Row(ids[at : len(ids) + at + 1], len(ids) + at, pages(row)) for row, (ids, _) in enumerate(known)
            ]
            found = loaded.forward(make_batch(decode_rows, attention.page_size), attention)
    assert torch.equal(found[0], chunked[-1])


# On our kernels or torch's. cpu_kernels/test_models.py compares ours with torch's for the other families.
AGAINST_TRANSFORMERS = [*((kind, True) for kind in FIRST), *with_variants(OTHERS, (False, True))]


@pytest.mark.parametrize(("kind", "native"), AGAINST_TRANSFORMERS)
def test_against_transformers(kind: str, native: bool) -> None:
    """The sizes of these models are no multiples of 32: heads of 18 numbers; of 24 where 3/4 or 1/2 is rotated."""
    wide = ("phi", "phi3", "nemotron", "glm4_moe", "bamba", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    hidden = 96 if kind in wide else 72
    check_against_transformers(make(kind, hidden=hidden, intermediate=100), native)


@pytest.mark.parametrize("native", [False, True])
def test_norms_of_heads_that_are_tensors_of_their_own(native: bool) -> None:
    """As those of StableLM 2 12B."""
    changes = (("use_parallel_residual", True), ("qk_layernorm", True))
    check_against_transformers(make("stablelm", hidden=72, intermediate=100, more=changes), native)


def test_layers_of_speculation_are_not_read(tmp_path: Path) -> None:
    """They follow the last layer, under the next number, in the published weights of DeepSeek-V3 and others."""
    source = make("deepseek_v3")
    tensors = load_file(source / SINGLE_FILE)
    config = json.loads((source / "config.json").read_text())
    last, next_one = (f"model.layers.{config['num_hidden_layers'] + number}." for number in (-1, 0))
    tensors |= {name.replace(last, next_one): one.clone() for name, one in tensors.items() if name.startswith(last)}
    tensors[f"{next_one}eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2", "num_nextn_predict_layers": 1}))
    found, plain = load(tmp_path), load(source)
    assert found.footprint == plain.footprint
    ids = prompts()[0]
    assert torch.equal(prefill(found, memory(found), ids, pages(0)), prefill(plain, memory(plain), ids, pages(0)))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [9.0] * 6,
    "partial_rotary_factor": 0.75,
}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500000.0}
ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 40}),
    ("qwen2", {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1], "sliding_window": 30, "use_sliding_window": True}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": None}),
    ("gemma3_text", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}}),
    # As on the Hub: without the keys that transformers 5 adds.
    ("gemma3_text", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 500000.0}}}),
    # As DeepSeek-V2-Lite.
    ("deepseek_v2", {"topk_method": "greedy", "rope_parameters": None, "rope_theta": 20000.0}),
    ("glm4_moe_lite", {"rope_interleave": False, "n_group": 1, "topk_group": 1, "mlp_layer_types": None}),
    ("exaone4", {"layer_types": None, "sliding_window_pattern": 3}),
    ("mpt", {"attn_config": {"clip_qkv": 0.8}}),
    ("stablelm", {"use_parallel_residual": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("hunyuan_v1_dense", {"rope_parameters": ALPHA}),
    ("smollm3", {"sliding_window": 40, "use_sliding_window": True, "layer_types": None, "no_rope_layers": None}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "layer_types": ["mamba", "attention", "mamba"]}),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "ME*-ME"}),  # as on the Hub
    ("mamba2", dict.fromkeys(("max_position_embeddings", "num_attention_heads", "num_key_value_heads"))),  # the same
    ("falcon_h1", {"mamba_norm_before_gate": False, "ssm_multipliers": None}),
    (
        "olmo_hybrid",
        {"linear_allow_neg_eigval": False, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    ),
]


@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_against_transformers_with_other_settings(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source = make(kind)
    config = json.loads((source / "config.json").read_text()) | changes
    missing = {key for key, value in changes.items() if value is None and "cap" not in key}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in missing}))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    check_against_transformers(tmp_path)


# Settings on which the shapes of the weights depend.
OTHER_SHAPES: list[tuple[str, tuple[tuple[str, Any], ...]]] = [
    ("falcon", (("new_decoder_architecture", False),)),
    ("falcon", (("new_decoder_architecture", False), ("multi_query", False), ("num_kv_heads", 4), ("bias", True))),
    ("falcon", (("new_decoder_architecture", False), ("parallel_attn", False))),
    ("falcon", (("num_ln_in_parallel_attn", 1),)),
    (
        "falcon",  # falcon-rw
        (
            *(("new_decoder_architecture", False), ("multi_query", False), ("num_kv_heads", 4), ("bias", True)),
            *(("alibi", True), ("parallel_attn", False)),
        ),
    ),
    ("falcon", (("alibi", True), ("num_attention_heads", 6), ("num_kv_heads", 2), ("hidden_size", 96))),
    ("gpt_bigcode", (("multi_query", False),)),
    ("bloom", (("n_head", 6), ("hidden_size", 48))),
    ("gemma4_text", (("enable_moe_block", False), ("attention_k_eq_v", False), ("num_global_key_value_heads", None))),
    ("gemma4_text", (("hidden_size_per_layer_input", 0), ("num_kv_shared_layers", 0))),
    ("granitemoehybrid", (("num_local_experts", 0), ("mamba_n_groups", 1))),  # granite-4.0-h-micro
    (
        "granitemoehybrid",  # granite-4.0-micro
        (("num_local_experts", 0), ("layer_types", ["full_attention"] * 3), ("position_embedding_type", "rope")),
    ),
    ("falcon_h1", (("mamba_rms_norm", False), ("mamba_conv_bias", False))),
]


@pytest.mark.parametrize(("kind", "more"), OTHER_SHAPES)
def test_against_transformers_in_other_shapes(kind: str, more: tuple[tuple[str, Any], ...]) -> None:
    check_against_transformers(make(kind, more=more), native=True)


@pytest.mark.parametrize(
    ("kind", "native", "dtype"),
    [
        *((kind, False, dtype) for kind, dtype in with_variants(in_depth(OTHERS), TYPES)),
        *((kind, True, dtype) for kind, dtype in with_variants(in_depth(RECURRENT), TYPES)),
    ],
)
def test_batch_invariance(kind: str, native: bool, dtype: str) -> None:
    """Each structure in one type; the first families in all types (test_models.py), and every family in float32 with
    chunks and a batch (check_against_transformers)."""
    model = load(make(kind), dtype, native)
    size, chosen = memory(model).page_size, prompts()
    alone = [in_chunks(model, memory(model), ids, pages(3), [len(ids)], size)[0] for ids in chosen]
    attention = memory(model)
    together = model.forward(make_batch([Row(ids, 0, pages(row)) for row, ids in enumerate(chosen)], size), attention)
    assert torch.equal(together, torch.stack(alone))
    for sizes in ([70, *[1] * 20], [33, 1, 5, 50, 1]):
        assert torch.equal(in_chunks(model, memory(model), chosen[0], pages(1), sizes, size)[-1], alone[0]), sizes
    # The last token of each prompt as a decode row, next to the whole longest prompt.
    attention = memory(model)
    before = [Row(ids[:-1], 0, pages(row)) for row, ids in enumerate(chosen) if len(ids) > 1]
    model.forward(make_batch(before, size), attention)
    last = [Row(ids[-1:], len(ids) - 1, pages(row)) for row, ids in enumerate(chosen)]
    mixed = model.forward(make_batch([*last, Row(chosen[0], 0, pages(4))], size), attention)
    assert torch.equal(mixed, torch.stack([*alone, alone[0]]))


@pytest.mark.parametrize("kind", ["gemma2", "mixtral"])
def test_results_do_not_depend_on_the_thread_count(kind: str) -> None:
    directory, ids = make(kind), prompts()[0]
    one = prefill(load(directory), memory(load(directory)), ids, pages(3))
    torch.set_num_threads(2)
    model = load(directory)
    assert torch.equal(prefill(model, memory(model), ids, pages(3)), one)


# Those whose images are served are tested in test_images.py, with prompts of text alone, too.
TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
}
assert {"gemma3n", *TEXT_PARTS, *VISION_FAMILIES} == {*WITH_TEXT_PART}
assert set(RECURRENT) == set(model_config.RECURRENT_LAYERS)


def make_multimodal(kind: str, directory: Path, text: str) -> None:
    config = transformers.CONFIG_MAPPING[kind](
        text_config=transformers.AutoConfig.from_pretrained(make(text)).to_dict(),
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    fill(model, seed=5)
    model.save_pretrained(directory)
    if kind == "kimi_k25":  # as published: transformers 5.23 writes another name than it reads
        tensors = load_file(directory / SINGLE_FILE)
        renamed = {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in tensors.items()}
        save_file(renamed, directory / SINGLE_FILE, {"format": "pt"})


@pytest.mark.parametrize(("kind", "text"), [*TEXT_PARTS.items(), ("mistral3", "mistral4")])
def test_text_part_of_a_multimodal_model(kind: str, text: str) -> None:
    """Whose text part has another place in the configuration and other names of tensors."""
    source = inspect.getsource(make_multimodal) + make(text).name
    directory = made(kind, {"text": text}, make_multimodal, source.encode())
    with safe_open(directory / SINGLE_FILE, framework="pt") as file:
        assert not any(name.startswith("model.layers") for name in file.keys())  # noqa: SIM118  # not a dict
    check_against_transformers(directory)


def test_text_part_of_gemma3n(tmp_path: Path) -> None:
    """By its published names: transformers' class needs timm for the vision tower."""
    source = make("gemma3n_text")
    tensors = {
        name.replace("model.", "model.language_model."): one for name, one in load_file(source / SINGLE_FILE).items()
    }
    save_file(tensors | {"model.vision_tower.w": torch.ones(1)}, tmp_path / SINGLE_FILE)
    text = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": text}))
    found, plain, ids = load(tmp_path), load(source), prompts()[0]
    assert torch.equal(prefill(found, memory(found), ids, pages(0)), prefill(plain, memory(plain), ids, pages(0)))


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """As Qwen3.5's checkpoints on the Hub have them, with tensors of drafting layers, which are not read."""
    directory = Path(shutil.copytree(make("qwen3_5_moe_text"), tmp_path / "model"))
    weights = load_file(directory / SINGLE_FILE)
    for prefix in sorted({name.split("experts.")[0] for name in weights if ".experts." in name}):
        gate, up, down = (
            torch.stack([weights.pop(f"{prefix}experts.{expert}.{part}_proj.weight") for expert in range(6)])
            for part in ("gate", "up", "down")
        )
        weights |= {f"{prefix}experts.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}experts.down_proj": down}
    save_file(weights | {"mtp.fc.weight": torch.ones(2, 2)}, directory / SINGLE_FILE, {"format": "pt"})
    check_against_transformers(directory)
