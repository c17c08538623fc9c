"""OpenAI's SDK with pictures, against a model that names what is in them."""

from typing import Any

from openai import OpenAI

from tests.clients.seeing.pictures import URL, check_answers, check_example

GREEDY: dict[str, Any] = {"model": "tgi", "temperature": 0, "max_tokens": 12}


def test_pictures() -> None:
    with OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60) as client:
        create = client.chat.completions.create
        check_answers(lambda chat: create(messages=chat, **GREEDY).choices[0].message.content)

        def streamed(chat: list[Any]) -> str:
            chunks = create(messages=chat, stream=True, **GREEDY)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        check_answers(streamed)


def test_the_example_of_the_docs() -> None:
    check_example("openai")
