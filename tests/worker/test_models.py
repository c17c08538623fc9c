import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.families import with_variants
from tests.models import model as make
from tests.worker.batches import Row, in_chunks, make_batch, prefill
from tgi.worker.attention import build_attention
from tgi.worker.attention.interface import AttentionBackend
from tgi.worker.decoder_config import RopeConfig, UnsupportedConfig
from tgi.worker.layers.rotary import RotaryEmbedding, attention_factor, inverse_frequencies
from tgi.worker.models.config_reader import read_decoder_config
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model

pytestmark = pytest.mark.slow

KINDS = ("llama", "mistral", "qwen2", "qwen3")  # other families: test_families.py
DTYPES = ("float32", "bfloat16", "float16")
CPU = torch.device("cpu")


def load(directory: Path, dtype: str = "auto") -> Model:
    return build_model(directory, dtype, "cpu", lambda stage, percent: None)


def memory(model: Model) -> AttentionBackend:
    return build_attention(model.kv, 400, CPU)


def pages(first: int, count: int = 20) -> list[int]:
    return list(range(first, first + count))


def prompts(count: int = 8) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 7, 16, 17, 61, 128, 190][:count]
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in lengths]


def references(directory: Path, prompts: list[list[int]]) -> list[Tensor]:
    """transformers' logits of each prompt, float32 [length, vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in prompts]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize(("kind", "tie"), with_variants(KINDS, (False, True)))
def test_logprobs_equal_those_of_transformers(kind: str, tie: bool) -> None:
    directory = make(kind, tie=tie)
    loaded = load(directory)
    for ids, logits in zip(prompts(), references(directory, prompts()), strict=True):
        expected = logits.log_softmax(-1)
        found = prefill(loaded, memory(loaded), ids, pages(3)).log_softmax(-1)
        torch.testing.assert_close(found, expected[-1], rtol=0, atol=1e-4)
        assert found.argmax() == expected[-1].argmax()
        # One by one; of long prompts the first and the last tokens.
        sizes = [1] * len(ids) if len(ids) <= 17 else [*[1] * 3, len(ids) - 6, *[1] * 3]
        ends = torch.tensor(sizes).cumsum(0) - 1
        step = in_chunks(loaded, memory(loaded), ids, pages(7), sizes).log_softmax(-1)
        torch.testing.assert_close(step, expected[ends], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*(("llama", dtype) for dtype in DTYPES), *with_variants(KINDS[1:], DTYPES)]
)
def test_batch_invariance(kind: str, dtype: str) -> None:
    model = load(make(kind), dtype)
    chosen = prompts()
    alone = [prefill(model, memory(model), ids, pages(3)) for ids in chosen]

    attention = memory(model)
    together = model.forward(make_batch([Row(ids, 0, pages(20 * n)) for n, ids in enumerate(chosen)]), attention)
    assert torch.equal(together, torch.stack(alone))

    longest = chosen[-1]
    for sizes in ([*[1] * 4, 100, *[1] * 3, 83], [16] * 11 + [14], [33, 1, 5, 150, 1]):
        assert torch.equal(in_chunks(model, memory(model), longest, pages(9), sizes)[-1], alone[-1]), sizes

    # Decode rows next to a prefill chunk: the last token of each prompt, whose other tokens are in the cache.
    attention = memory(model)
    model.forward(make_batch([Row(ids[:-1], 0, pages(20 * n)) for n, ids in enumerate(chosen) if ids[:-1]]), attention)
    last = [Row(ids[-1:], len(ids) - 1, pages(20 * n)) for n, ids in enumerate(chosen)]
    mixed = model.forward(make_batch([*last[:-1], Row(longest, 0, pages(300))]), attention)
    assert torch.equal(mixed, torch.stack(alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_thread_count(dtype: str) -> None:
    directory, ids = make("qwen3"), prompts()[-1]
    one = prefill(load(directory, dtype), memory(load(directory, dtype)), ids, pages(3))
    torch.set_num_threads(2)
    model = load(directory, dtype)
    assert torch.equal(prefill(model, memory(model), ids, pages(3)), one)


def test_no_logits_for_rows_that_do_not_sample() -> None:
    model = load(make("llama"))
    ids = prompts()[-1]
    attention = memory(model)
    silent = make_batch([Row(ids[:100], 0, pages(0))])._replace(logits_indices=torch.empty(0, dtype=torch.int64))
    assert model.forward(silent, attention).shape == (0, 512)
    found = model.forward(make_batch([Row(ids[100:], 100, pages(0))]), attention)
    assert torch.equal(found[0], prefill(model, memory(model), ids, pages(3)))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "parameters",
    [
        LLAMA3,
        YARN,
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_theta": 1000000.0},
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_rotary_scalings_equal_those_of_transformers(tmp_path: Path, parameters: dict[str, Any], old: bool) -> None:
    directory = changed(make("llama"), tmp_path, **as_written(parameters, old))
    ids = prompts()[-1]
    model = load(directory)
    found = prefill(model, memory(model), ids, pages(3)).log_softmax(-1)
    (expected,) = references(directory, [ids])
    torch.testing.assert_close(found, expected[-1].log_softmax(-1), rtol=0, atol=1e-4)


def test_dynamic_scaling_equals_that_of_transformers_at_the_longest_length() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_parameters=parameters
    )
    expected, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=192)
    torch.testing.assert_close(inverse_frequencies(16, parameters), expected)
    assert attention_factor(parameters) == factor == 1.0


def as_written(parameters: dict[str, Any], old: bool) -> dict[str, Any]:
    """The rotary parameters in the format of transformers 5, or of version 4."""
    if not old:
        return {"rope_parameters": {"rope_type": "default", **parameters}}
    rest = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {"rope_parameters": None, "rope_theta": parameters["rope_theta"], "rope_scaling": rest or None}


def changed(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of the model with changes in its config."""
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    return target


def test_growth_of_the_rotary_table_keeps_its_rows() -> None:
    rotary = RotaryEmbedding(RopeConfig(16, {"rope_theta": 10000.0}), CPU)
    positions = torch.tensor([0, 5, 2000])
    before = rotary.angles(positions, 2001, 3)
    rotary.angles(torch.tensor([9000]), 9001, 3)
    after = rotary.angles(positions, 2001, 3)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_rotation_keeps_norms_and_depends_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(RopeConfig(16, {"rope_theta": 10000.0}), CPU)
    query, key = torch.randn(2, 1, 1, 16)

    def score(at: int, seen: int) -> float:
        turned = [query.clone(), key.clone()]
        for x, position in zip(turned, (at, seen), strict=True):
            rotary.rotate(x, 1, rotary.angles(torch.tensor([position]), position + 1, 1))
        torch.testing.assert_close(turned[0].norm(), query.norm())
        return float((turned[0] * turned[1]).sum())

    assert score(17, 3) == pytest.approx(score(1017, 1003), abs=1e-3)
    assert score(17, 3) != pytest.approx(score(17, 4), abs=1e-3)


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32768,
        **changes,
    }


def windows(kind: str, **changes: Any) -> list[int | None]:
    return [layer.window for layer in read_decoder_config(config_of(kind, **changes)).layers]


def test_sliding_window_of_mistral() -> None:
    assert windows("mistral", sliding_window=100) == [100, 100]
    assert windows("mistral") == [4096, 4096]
    assert windows("mistral", sliding_window=None) == [None, None]
    assert windows("mistral", sliding_window=32768) == [None, None]  # as long as the longest sequence
    assert windows("llama", sliding_window=100) == [None, None]
    assert read_decoder_config(config_of("mistral")).context_length == 32768


def test_sliding_window_of_qwen_if_enabled() -> None:
    assert windows("qwen2", sliding_window=100, max_window_layers=1) == [None, None]
    on = {"sliding_window": 100, "use_sliding_window": True}
    assert windows("qwen2", **on) == [None, None]  # from the 28th layer on
    assert windows("qwen2", **on, max_window_layers=1) == [None, 100]
    assert windows("qwen3", **on, layer_types=["sliding_attention", "full_attention"]) == [100, None]


def test_sliding_windows_of_gemma_alternate() -> None:
    three = {"num_hidden_layers": 3, "sliding_window": 100}
    assert windows("gemma2", **three) == [100, None, 100]
    assert windows("gemma3_text", **three, sliding_window_pattern=3) == [100, 100, None]
    config = read_decoder_config(config_of("gemma3_text", **three, sliding_window_pattern=3, rope_local_base_freq=77.0))
    assert [layer.rope for layer in config.layers] == [1, 1, 0]
    assert [rope.parameters["rope_theta"] for rope in config.ropes] == [1000000.0, 77.0]


def test_longrope_is_limited_to_the_original_length() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = config_of("phi3", rope_scaling=scaling, original_max_position_embeddings=4096)
    assert read_decoder_config(config).context_length == 4096


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "ntk"),
        ({"hidden_act": "tanh"}, "tanh"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "codegen"}, "codegen"),
    ],
)
def test_unsupported_config_values_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfig, match=named):
        read_decoder_config(config_of("llama", **changes))


def test_biases_of_family_and_config() -> None:
    assert read_decoder_config(config_of("qwen2")).qkv_bias
    assert not read_decoder_config(config_of("qwen2")).output_bias
    biased = read_decoder_config(config_of("llama", attention_bias=True, mlp_bias=True))
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    assert read_decoder_config(config_of("qwen3", head_dim=32)).head_dim == 32
