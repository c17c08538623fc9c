#!/usr/bin/env python
"""Compares a tiny random model of each of transformers' causal model types with transformers itself, in float32.

    scripts/check_families.py              # all types: about three minutes
    scripts/check_families.py phimoe gptj
    scripts/check_families.py --table      # the table of docs/models.md
    scripts/check_families.py --variants   # the tests of families, each with all kernels, types and numbers of ranks

For each type one line: right (with the largest difference of logprobs), refused (with the sentence), WRONG, or not made
(the default configuration with small sizes gives no tiny model). Exits with 1 if a type is wrong or fails without a
sentence.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.make_model import fill
from tests.worker.batches import Row, make_batch
from tgi.hub.model_config import read_model_config
from tgi.microkernel.errors import UserError
from tgi.worker.attention import build_attention
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.loader import build_model

VOCAB, PROMPT, LAYERS = 96, 70, 4
MAX_PARAMETERS = 4_500_000
# fmt: off
SMALL: dict[str, Any] = {  # values of configuration entries, where a type has them
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_key_value_heads"), 2),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    "head_dim": 16, "rotary_dim": 8, "floor_scale": 10, "vocab_size": VOCAB, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
# fmt: on
# Tried in this order until a model can be made: some types want the size of a head spelt out, or their own.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 8},
    {"head_dim": 8, "num_key_value_heads": 4},
    {"head_dim": None},
)
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 8}
FURTHER: dict[str, dict[str, Any]] = {  # entries of single types
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **MAMBA2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "shared_intermediate_size": 16,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8},
        "moe_shared_expert_intermediate_size": 16,
    },
    # As many keys as values: transformers saves thirds of a convolution.
    "olmo_hybrid": {
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 0.5, "kv_n_heads": 2, "rope_theta": 500000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "phimoe": {"sliding_window": 24},
    "xmod": {"default_language": "en_XX"},
}
# The tests of which a run has one variant of each family (tests/families.py).
VARIED = (
    *("tests/worker/test_families.py", "tests/worker/test_planning.py", "tests/worker/test_images.py"),
    *("tests/worker/cpu_kernels/test_models.py", "tests/worker/cpu_kernels/test_program.py"),
    "tests/worker/distributed/test_models.py",
)
RESULTS = (  # title, and how the lines begin and end
    ("agree, built-in decoder", "right", "built-in decoder"),
    ("agree, transformers' code", "right", "transformers' code"),
    ("refused at start", "refused", ""),
    ("no tiny model could be made", "not made", ""),
    ("wrong", ("WRONG", "FAILS"), ""),
)


def small_config(kind: str, variant: dict[str, Any]) -> Any:
    """The default configuration of a type with small sizes."""
    text = transformers.CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    defaults, aliases = text.to_dict(), text.attribute_map
    small = {aliases.get(key, key): value for key, value in SMALL.items()}
    values = {key: value for key, value in small.items() if defaults.get(key) is not None}
    given = {key: value for key, value in variant.items() if value is not None}
    return type(text)(
        **{key: value for key, value in values.items() if key not in variant} | given | FURTHER.get(kind, {})
    )


def make(kind: str, directory: Path, ids: list[int]) -> torch.Tensor:
    """Saves a tiny random model of a type. Returns transformers' logprobs of a prompt [prompt, vocab].

    Raises ValueError if no variant can be made.
    """
    reason = ""
    for variant in VARIANTS:
        try:
            config = small_config(kind, variant)
            with torch.device("meta"):
                count = sum(one.numel() for one in transformers.AutoModelForCausalLM.from_config(config).parameters())
            if count > MAX_PARAMETERS:
                raise ValueError(f"{count} parameters")
            network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            fill(network, seed=1)
            network.save_pretrained(directory)
            reference = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            )
            with torch.inference_mode():
                return reference.eval()(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        except Exception as error:  # whatever a type's code raises for sizes that it does not expect
            reason = reason or f"{type(error).__name__} {error}"
    raise ValueError(reason)


def check(kind: str, directory: Path) -> str:
    """The line of a type."""
    ids = torch.randint(3, VOCAB - 1, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    try:
        expected = make(kind, directory, ids)
    except ValueError as error:
        return f"not made: {' '.join(str(error).split())[:120]}"
    try:
        read_model_config(directory)
        model = build_model(directory, "float32", "cpu", lambda stage, percent: None)
    except UserError as error:
        return f"refused: {' '.join(str(error).split())}"
    attention = build_attention(model.kv, 30, torch.device("cpu"), state_slots=31)
    steps = [(ids, 0)] + [(ids[start:end], start) for start, end in ((0, 40), (40, 41), (41, 69), (69, PROMPT))]
    worst = 0.0
    for number, (tokens, start) in enumerate(steps):
        rows = [Row(ids[::-1][:20], 0, range(10, 15))] * (number % 2) + [Row(tokens, start, range(10))]
        logprobs = model.forward(make_batch(rows), attention)[-1].log_softmax(-1)
        worst = max(worst, float((logprobs - expected[start + len(tokens) - 1]).abs().max()))
    code = "the built-in decoder" if isinstance(model, DecoderModel) else "transformers' code"
    return f"{'right' if worst < 1e-3 else 'WRONG'}: {worst:.0e} through {code}"


def main() -> None:
    """Parses the command line, checks and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="TYPE")
    parser.add_argument("--table", action="store_true", help="print lists of types by result")
    parser.add_argument("--variants", action="store_true", help="run all variants of the tests of families instead")
    arguments = parser.parse_args()
    if arguments.variants:
        command, root = [sys.executable, "-P", "-m", "pytest", *VARIED], Path(__file__).resolve().parents[1]
        sys.exit(subprocess.run(command, cwd=root, env=os.environ | {"TGI_ALL_VARIANTS": "1"}).returncode)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    found: dict[str, str] = {}
    for kind in arguments.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as directory:
            try:
                found[kind] = check(kind, Path(directory))
            except Exception as error:
                found[kind] = f"FAILS: {type(error).__name__} {error}"
        if not arguments.table:
            print(f"{kind}: {found[kind]}", flush=True)
    if arguments.table:
        print(table(found))
    if any(line.startswith(("WRONG", "FAILS")) for line in found.values()):
        sys.exit(1)


def table(found: dict[str, str]) -> str:
    """The types by result, in Markdown."""
    rows = ["| result | types |", "|---|---|"]
    for title, start, end in RESULTS:
        if kinds := [kind for kind, line in found.items() if line.startswith(start) and line.endswith(end)]:
            rows.append(f"| {title}: {len(kinds)} | {', '.join(kinds)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
