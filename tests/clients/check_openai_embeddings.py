"""The openai package: embeddings, which it asks for as base64."""

import math
import os

import openai
import pytest

CLIENT = openai.OpenAI(base_url=f"{os.environ['TGI_EMBEDDINGS_URL']}/v1", api_key="none", max_retries=0)
TEXTS = ["The capital of France is Paris.", "A river runs through the city.", "x"]


def test_embeddings_of_texts_and_of_token_ids() -> None:
    found = CLIENT.embeddings.create(model="any", input=TEXTS)
    assert [one.index for one in found.data] == [0, 1, 2]
    assert found.usage.total_tokens == found.usage.prompt_tokens > 0
    for one in found.data:
        assert math.fsum(number * number for number in one.embedding) == pytest.approx(1, abs=1e-5)
    floats = CLIENT.embeddings.create(model="any", input=TEXTS[0], encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(found.data[0].embedding, abs=1e-7)
    assert len(CLIENT.embeddings.create(model="any", input=[[5, 6, 7], [8]], dimensions=16).data[1].embedding) == 16


def test_errors_are_those_of_openai() -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="`dimensions` must be > 0"):
        CLIENT.embeddings.create(model="any", input="a", dimensions=100_000)
    with pytest.raises(openai.NotFoundError, match="it makes embeddings: use /v1/embeddings"):
        CLIENT.chat.completions.create(model="any", messages=[{"role": "user", "content": "a"}])
