"""TransformersModel: tokens against transformers, batch invariance of GPT-2, rejected models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from scripts.check_families import check
from scripts.make_model import fill
from tests.models import model
from tests.worker.driving import Drawn, drive, generate_with, make_engine
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.models.transformers_model import TransformersModel, build_transformers_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def quiet(stage: str, percent: int) -> None:
    """Ignores the progress."""


def build(directory: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    return build_transformers_model(directory, dtype, CPU, quiet)


def prompts(count: int, vocab: int = 512) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 2, 3, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 7, 130, 9, 5, 21, 40, 77][:count]
    return [torch.randint(6, vocab, (length,), generator=generator).tolist() for length in lengths]


def same(got: Drawn, want: Drawn) -> None:
    assert got.ids == want.ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    for own, reference in zip(got.tops, want.tops, strict=True):
        assert [logprob for _, logprob in own] in ([], pytest.approx([logprob for _, logprob in reference], abs=1e-4))
        assert [token for token, _ in own[:1]] in ([], [token for token, _ in reference[:1]])


@pytest.mark.parametrize("kind", ["persimmon", "mistral"])
def test_tokens_against_transformers(kind: str) -> None:
    directory = model(kind)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = make_engine(build(directory))
    asked = prompts(13)
    want = [generate_with(reference, prompt, 5) for prompt in asked]
    samplings = [SamplingParams(0, top_n=3 * (at % 2)) for at in range(13)]
    for prompt, one in zip(asked[::4], want[::4], strict=True):
        same(drive(engine, [prompt], 5)[0], one)
    for got, one in zip(drive(engine, asked, 5, samplings, stagger=1), want, strict=True):
        same(got, one)


@pytest.mark.parametrize(("threads", "dtype"), [(2, torch.float32), (1, torch.bfloat16)], ids=str)
def test_batch_invariance_of_the_fallback(dtype: torch.dtype, threads: int) -> None:
    engine = make_engine(build(model("persimmon"), dtype))
    asked, count = prompts(13)[2:], 6
    samplings = [
        SamplingParams(at, do_sample=at % 2 == 1, top_p=0.9 if at % 4 == 3 else 1.0, top_n=at % 3) for at in range(11)
    ]
    alone = [drive(engine, [prompt], count, [one])[0] for prompt, one in zip(asked, samplings, strict=True)]
    torch.set_num_threads(threads)
    for chunk, stagger in ((4096, 0), (5, 0), (16, 1)):
        assert drive(engine, asked, count, samplings, chunk, stagger) == alone
    # Requests resumed after preemption: their output so far is prefilled.
    resumed = [prompt + one.ids[:3] for prompt, one in zip(asked, alone, strict=True)]
    for got, one in zip(drive(engine, resumed, count - 3, samplings), alone, strict=True):
        assert got == Drawn(one.ids[3:], one.logprobs[3:], one.tops[3:])


def test_steps_that_sample_no_token() -> None:
    engine = make_engine(build(model("persimmon")))
    prompt = prompts(13)[12]
    assert drive(engine, [prompt], 3, chunk=7) == drive(engine, [prompt], 3)


def save(config: Any, directory: Path) -> Path:
    network = transformers.AutoModelForCausalLM.from_config(config)
    fill(network, seed=1)
    network.save_pretrained(directory)
    return directory


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
OTHERS = [
    transformers.GPTNeoXConfig(**SMALL, intermediate_size=64),
    transformers.PhiConfig(**SMALL, intermediate_size=64),
    transformers.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32),
    transformers.GPTBigCodeConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=200),
    transformers.Olmo2Config(**SMALL, intermediate_size=64),
    transformers.MixtralConfig(**SMALL, num_key_value_heads=1, intermediate_size=64, sliding_window=None),
    transformers.MistralConfig(**SMALL, num_key_value_heads=1, intermediate_size=64, sliding_window=24),
    transformers.Gemma2Config(**SMALL, num_key_value_heads=1, intermediate_size=64, head_dim=16, sliding_window=24),
    transformers.Cohere2Config(**SMALL, num_key_value_heads=1, intermediate_size=64, sliding_window=24),
]


@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config.model_type)
def test_other_architectures_against_transformers(config: Any, tmp_path: Path) -> None:
    directory = save(config, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    asked = prompts(8, vocab=64)[1::2]
    for got, prompt in zip(drive(make_engine(build(directory)), asked, 4, stagger=1), asked, strict=True):
        same(got, generate_with(reference, prompt, 4))


def test_unsupported_architectures_are_rejected_by_name(tmp_path: Path) -> None:
    directory = save(transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), tmp_path)
    with pytest.raises(UserError, match="mamba does not support"):
        build(directory)


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("gpt_neo", "refused: gpt_neo"),
        ("youtu", "right"),
        ("diffllama", "refused: diffllama cannot be served: over pages its logits differ from those of transformers"),
        ("doge", "refused: doge adds numbers of its own to attention scores"),
        ("bert", "refused: bert chooses the tokens that it attends to neither causally nor by a sliding window"),
        (
            "longcat_flash",
            "refused: longcat_flash cannot run over a paged cache: its code reads the weight of a linear",
        ),
        ("codegen", "refused: codegen does not support transformers' attention interface"),
    ],
)
def test_a_model_type_is_right_or_refused(kind: str, result: str, tmp_path: Path) -> None:
    """A part of scripts/check_families.py, which does all types of transformers."""
    assert check(kind, tmp_path).startswith(result)


def test_a_type_with_attention_classes_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match="falcon computes attention in classes of its own"):
        build(model("falcon", more=(("alibi", True),)))


def test_encoder_decoders_are_rejected_by_name(tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=64, d_model=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="t5 is an encoder-decoder model"):
        build(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="transformers cannot load the model"):
        build(tmp_path)


def test_an_unknown_model_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch", "architectures": ["Nonesuch"]}')
    with pytest.raises(UserError, match="Unsupported model type nonesuch"):
        build_transformers_model(tmp_path, torch.float32, torch.device("cpu"), lambda stage, percent: None)


def test_code_of_a_model_runs_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "model"
    shutil.copytree(model("llama"), directory)
    config = json.loads((directory / "config.json").read_text()) | {
        "model_type": "own_llama",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(UserError, match="runs only with --trust-remote-code"):
        build_transformers_model(directory, torch.float32, CPU, quiet)
    assert (
        build_transformers_model(directory, torch.float32, CPU, quiet, trust_code=True).vocab_size
        == config["vocab_size"]
    )
