"""Prompts that end in a vector: pairs, token types and truncation, compared with transformers' tokenizers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from scripts.make_pooling_model import VOCAB
from tests.models import pooling_model
from tgi.hub.model_config import read_model_config
from tgi.hub.pooling import PoolingConfig, read_pooling_config
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import Generate, PoolingInput
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.chat import ChatRenderer
from tgi.tokenizer.encoder import NO_TEXT, NO_VECTORS, EncodedPrompt, PromptEncoder, PromptRejection
from tgi.tokenizer.vocabulary import Vocabulary

LONG = "The capital of France is Paris, and the capital of Japan is Tokyo. " * 3
SHORT = "What is the answer?"


@pytest.fixture(scope="module")
def directory() -> Path:
    return pooling_model("bert")


@pytest.fixture(scope="module")
def pooling(directory: Path) -> PoolingConfig:
    found = read_pooling_config(directory)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def encoder(directory: Path, pooling: PoolingConfig) -> PromptEncoder:
    config = read_model_config(directory)
    return PromptEncoder(Vocabulary.load(config), ChatRenderer.load(config), pooling=pooling)


def generate(text: str, pooling: PoolingInput | None, ids: tuple[int, ...] = ()) -> Generate:
    return Generate(1, text, SamplingParams(0), 0, pooling=pooling, input_ids=pack_column(INT32, ids))


def ids_of(encoder: PromptEncoder, text: str, pooling: PoolingInput, ids: tuple[int, ...] = ()) -> list[int]:
    prompt = encoder.encode_generate(generate(text, pooling, ids))
    assert isinstance(prompt, EncodedPrompt), prompt
    assert prompt.token_count == len(prompt.ids) // 4
    return unpack_int32(prompt.ids)


def rejection(encoder: PromptEncoder, message: Generate) -> str:
    rejected = encoder.encode_generate(message)
    assert isinstance(rejected, PromptRejection)
    return rejected.message


@pytest.mark.parametrize("limit", [None, 4, 20, 40])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pair", [None, SHORT, LONG])
@pytest.mark.parametrize("text", [SHORT, LONG])
def test_ids_are_those_of_transformers(
    directory: Path, encoder: PromptEncoder, text: str, pair: str | None, side: str, limit: int | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, truncation_side=side)
    options: dict[str, Any] = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
    wanted = tokenizer(text, pair, return_token_type_ids=True, **options)
    expected = [token + VOCAB * kind for token, kind in zip(wanted["input_ids"], wanted["token_type_ids"], strict=True)]
    found = ids_of(encoder, text, PoolingInput(pair, limit, side == "left"))
    if pair is None or limit is None:
        assert found == expected
    else:  # of two texts of one length, either may lose the last token
        assert len(found) == len(expected)
        assert [token for token in found if token % VOCAB < 3] == [token for token in expected if token % VOCAB < 3]


def test_zero_truncates_to_what_the_model_was_trained_for(
    directory: Path, encoder: PromptEncoder, pooling: PoolingConfig
) -> None:
    assert len(ids_of(encoder, LONG * 40, PoolingInput(truncate=0))) == pooling.max_tokens
    few = PromptEncoder(encoder._vocabulary, encoder._chats, pooling=replace(pooling, max_tokens=7))
    assert len(ids_of(few, LONG, PoolingInput(truncate=0))) == 7


def test_token_ids_and_prompts(encoder: PromptEncoder) -> None:
    assert ids_of(encoder, "", PoolingInput(), (5, 9, 7)) == [5, 9, 7]
    assert ids_of(encoder, "", PoolingInput(truncate=2), (5, 9, 7)) == [5, 9]
    assert ids_of(encoder, "", PoolingInput(truncate=2, keep_end=True), (5, 9, 7)) == [9, 7]
    assert ids_of(encoder, SHORT, PoolingInput(prompt="query")) == ids_of(
        encoder, "The question: " + SHORT, PoolingInput()
    )
    assert rejection(encoder, generate("", PoolingInput(), (VOCAB,))).endswith(f">= 0 and < {VOCAB}")
    assert "is not one of the model's prompts: query" in rejection(encoder, generate("a", PoolingInput(prompt="x")))


def test_requests_of_the_other_kind_are_refused(encoder: PromptEncoder) -> None:
    assert rejection(encoder, generate("a", None)) == NO_TEXT
    generating = PromptEncoder(encoder._vocabulary, encoder._chats)
    assert rejection(generating, generate("a", PoolingInput())) == NO_VECTORS
