"""OpenAI's SDK against this server: the synchronous client, then the asynchronous one, then errors."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.clients.served import ANSWER, GUARDED_URL, KEY, MESSAGES, PROMPT, QUESTION, SYSTEM, URL

GREEDY: dict[str, Any] = {"model": "tgi", "temperature": 0, "max_tokens": 12}
CHAT = {"messages": MESSAGES, **GREEDY}
CAPITAL = {"type": "object", "properties": {"capital": {"enum": ["Paris", "London"]}}, "required": ["capital"]}
WEATHER = "<|im_start|>user\nIs snow cold or hot?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def run_async(use: Callable[[AsyncOpenAI], Any]) -> Any:
    """Runs a coroutine function with an asynchronous client."""

    async def main() -> Any:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await use(client)

    return asyncio.run(main())


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def finish_reasons(chunks: list[Any], index: int = 0) -> list[str | None]:
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.index == index]


# Chat


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "stop")
    assert ANSWER in choice.message.content
    assert "<|im_end|>" not in choice.message.content
    assert choice.logprobs is None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def counts(usage: Any) -> tuple[int, int]:
    """Without cached_tokens, which depend on earlier requests."""
    return usage.prompt_tokens, usage.completion_tokens


def test_chat_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    chunks = list(client.chat.completions.create(stream=True, **CHAT))
    assert text_of(chunks) == whole.choices[0].message.content
    assert ANSWER in text_of(chunks)
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert finish_reasons(chunks) == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[0].id != whole.id
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_stream_with_usage(client: OpenAI) -> None:
    usage = client.chat.completions.create(**CHAT).usage
    *chunks, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **CHAT)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert last.choices == []
    assert counts(last.usage) == counts(usage)
    assert last.usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    assert last.usage.completion_tokens_details.reasoning_tokens == 0


def test_chat_length(client: OpenAI) -> None:
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        answer = client.chat.completions.create(model="tgi", messages=MESSAGES, temperature=0, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("extra", "fits"),
    [
        ({"guided_choice": ["Paris", "London"]}, {"Paris", "London"}.__contains__),
        ({"structured_outputs": {"choice": ["Paris", "London"]}}, {"Paris", "London"}.__contains__),
        ({"guided_regex": "[A-Z][a-z]{1,9}!"}, re.compile("[A-Z][a-z]{1,9}!").fullmatch),
        ({"structured_outputs": {"regex": "[A-Z][a-z]{1,9}!"}}, re.compile("[A-Z][a-z]{1,9}!").fullmatch),
        ({"guided_grammar": 'root ::= "In " ("Paris" | "London")'}, re.compile("In (Paris|London)").fullmatch),
        ({"guided_json": CAPITAL}, lambda text: set(json.loads(text)) == {"capital"}),
        ({"structured_outputs": {"json": CAPITAL}}, lambda text: set(json.loads(text)) == {"capital"}),
    ],
)
def test_guided_as_in_vllm(client: OpenAI, extra: dict[str, Any], fits: Callable[[str], object]) -> None:
    request = {"model": "tgi", "messages": MESSAGES, "temperature": 0, "max_tokens": 40, "extra_body": extra}
    [choice] = client.chat.completions.create(**request).choices
    assert choice.finish_reason == "stop"
    assert fits(choice.message.content)
    assert text_of(list(client.chat.completions.create(stream=True, **request))) == choice.message.content
    request["extra_body"] = extra | {"guided_json": {"type": "array"}, "guided_regex": "a"}
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.chat.completions.create(**request)
    assert "only one of" in caught.value.response.text


def test_chat_choices(client: OpenAI) -> None:
    request = {"model": "tgi", "messages": MESSAGES, "max_tokens": 8, "temperature": 1.5, "seed": 11, "n": 3}
    answer = client.chat.completions.create(**request)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1, "choices draw their own numbers"
    chunks = list(client.chat.completions.create(stream=True, **request))
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert [[reason for reason in finish_reasons(chunks, index) if reason] for index in range(3)] == [
        [choice.finish_reason] for choice in answer.choices
    ]


@pytest.mark.parametrize("stop", ["France", ["nothing", "of Fra"]], ids=str)
def test_chat_stops_before_the_stop_string(client: OpenAI, stop: Any) -> None:
    answer = client.chat.completions.create(stop=stop, **CHAT)
    expected = "The capital of " if stop == "France" else "The capital "
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")
    chunks = list(client.chat.completions.create(stop=stop, stream=True, **CHAT))
    assert text_of(chunks) == expected
    assert finish_reasons(chunks)[-1] == "stop"


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(logprobs=True, top_logprobs=3, **CHAT)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    assert b"".join(bytes(token.bytes) for token in tokens).decode().startswith(answer.choices[0].message.content)
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
        assert token.top_logprobs[2].logprob <= token.top_logprobs[1].logprob <= token.logprob <= 0
    chunks = list(client.chat.completions.create(logprobs=True, top_logprobs=3, stream=True, **CHAT))
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in logprobs if part for token in part.content] == tokens


def test_chat_of_several_turns_and_parts(client: OpenAI) -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello. What do you want to know?"},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ]
    answer = client.chat.completions.create(**GREEDY, messages=messages)
    assert ANSWER in answer.choices[0].message.content


def test_chat_stream_helper(client: OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    options = {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1}
    with client.chat.completions.stream(**CHAT, **options) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    content = whole.choices[0].message.content
    assert "".join(event.delta for event in events if event.type == "content.delta") == content
    assert [event.content for event in events if event.type == "content.done"] == [content]
    assert {event.type for event in events} >= {"chunk", "logprobs.content.delta", "logprobs.content.done"}
    [choice] = final.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", content, "stop")
    assert counts(final.usage) == counts(whole.usage)
    assert len(choice.logprobs.content) == whole.usage.completion_tokens


def test_chat_stream_helper_with_choices(client: OpenAI) -> None:
    # A stop string that always occurs: the helper rejects choices that end by length.
    request = {"model": "tgi", "messages": MESSAGES, "temperature": 0, "stop": ["France"], "n": 2}
    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion()
    assert [(choice.index, choice.message.role, choice.message.content) for choice in final.choices] == [
        (0, "assistant", "The capital of "),
        (1, "assistant", "The capital of "),
    ]


def test_chat_with_parameters_of_vllm(client: OpenAI) -> None:
    def token_id(text: str) -> int:
        (token,) = client.with_options(base_url=URL).post(
            "/tokenize", cast_to=object, body={"inputs": text, "add_special_tokens": False}
        )
        return int(token["id"])

    certain = {**CHAT, "temperature": 1.5, "seed": 1}  # all other tokens are far less likely
    answer = client.chat.completions.create(**certain, extra_body={"min_p": 1.0})
    assert ANSWER in answer.choices[0].message.content
    stops = {"stop_token_ids": [token_id(" France")]}
    answer = client.chat.completions.create(**CHAT, extra_body=stops)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("The capital of", "stop")
    chunks = list(client.chat.completions.create(stream=True, **CHAT, extra_body=stops))
    assert (text_of(chunks), finish_reasons(chunks)[-1]) == ("The capital of", "stop")
    answer = client.chat.completions.create(**CHAT, extra_body={"bad_words": [ANSWER]})
    assert ANSWER not in answer.choices[0].message.content
    for refused in ({"min_p": 2}, {"stop_token_ids": [10**9]}, {"bad_words": [""]}):
        with pytest.raises(openai.UnprocessableEntityError) as rejection:
            client.chat.completions.create(**CHAT, extra_body=refused)
        assert next(iter(refused)) in rejection.value.response.text


# Completions


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    [choice] = answer.choices
    assert ANSWER in choice.text
    assert "<|im_end|>" not in choice.text
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion_streamed(client: OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(prompt=PROMPT, stream=True, **GREEDY, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert finish_reasons(chunks) == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert (last.choices, counts(last.usage)) == ([], counts(whole.usage))


def test_completions_of_several_prompts(client: OpenAI) -> None:
    alone = [client.completions.create(prompt=prompt, **GREEDY) for prompt in (PROMPT, WEATHER)]
    together = client.completions.create(prompt=[PROMPT, WEATHER], **GREEDY)
    texts = [answer.choices[0].text for answer in alone]
    assert [(choice.index, choice.text) for choice in together.choices] == list(enumerate(texts))
    assert together.usage.total_tokens == sum(answer.usage.total_tokens for answer in alone)
    chunks: list[Completion] = list(client.completions.create(prompt=[PROMPT, WEATHER], stream=True, **GREEDY))
    streamed = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_completion_choices_stand_in_the_order_of_prompts(client: OpenAI) -> None:
    answer = client.completions.create(prompt=[PROMPT, WEATHER], n=2, echo=True, **GREEDY | {"max_tokens": 1})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(answer.choices, (PROMPT, PROMPT, WEATHER, WEATHER), strict=True):
        assert choice.text.startswith(prompt)


def test_completion_stops_before_the_stop_string(client: OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, stop="France", **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("The capital of ", "stop")


def test_completion_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, logprobs=2, stop="France", **GREEDY)
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens).startswith(choice.text)
    assert logprobs.text_offset[1] - logprobs.text_offset[0] == len(logprobs.tokens[0])
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values()) <= 0


def test_completion_echoes_the_prompt(client: OpenAI) -> None:
    prompt = "The capital of France is"
    request = {"prompt": prompt, "echo": True, **GREEDY, "max_tokens": 2}
    answer = client.completions.create(**request)
    assert answer.choices[0].text == f"{prompt} {ANSWER}."
    chunks = list(client.completions.create(stream=True, **request))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    told = client.completions.create(logprobs=1, **request).choices[0]
    columns = told.logprobs
    assert told.text == answer.choices[0].text
    assert columns.token_logprobs[0] is None
    assert columns.top_logprobs[0] is None
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.top_logprobs) == len(columns.text_offset)
    assert len(columns.tokens) == answer.usage.total_tokens
    for logprob, top in zip(columns.token_logprobs[1:], columns.top_logprobs[1:], strict=True):
        assert logprob <= max(top.values()) <= 0
    for token, begin in zip(columns.tokens, columns.text_offset, strict=True):
        assert told.text[begin:].startswith(token)
    chunks = list(client.completions.create(stream=True, logprobs=1, **request))
    assert [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens] == columns.tokens


def ids_of(text: str) -> list[int]:
    """POST /tokenize, for which the SDK has no method."""
    body, headers = json.dumps({"inputs": text}).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/tokenize", body, headers), timeout=60) as answer:
        return [token["id"] for token in json.load(answer)]


def test_completion_of_token_ids_and_a_score(client: OpenAI) -> None:
    """A prompt's logprobs without generation; text and token ids give the same result."""
    prompts = [ids_of(PROMPT), ids_of(WEATHER)]
    score = {"echo": True, "logprobs": 1, "max_tokens": 0}
    answer = client.completions.create(model="tgi", prompt=prompts, **score)
    assert [choice.text for choice in answer.choices] == [PROMPT, WEATHER]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage.completion_tokens == 0
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [len(one) for one in prompts]
    assert answer.choices == client.completions.create(model="tgi", prompt=[PROMPT, WEATHER], **score).choices
    [chunk] = client.completions.create(model="tgi", prompt=prompts[0], stream=True, **score)
    assert chunk.choices[0] == answer.choices[0]
    [text, same] = [client.completions.create(prompt=prompt, **GREEDY).choices for prompt in (PROMPT, prompts[0])]
    assert text == same


def test_unsupported_fields_are_rejected_by_name(client: OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as rejection:
        client.chat.completions.create(messages=MESSAGES, modalities=["audio"], **GREEDY)
    assert "`modalities` is not supported by this server" in rejection.value.response.text
    client.chat.completions.create(
        messages=MESSAGES, user="u", store=False, service_tier="auto", extra_body={"colour": "red"}, **GREEDY
    )
    client.chat.completions.create(messages=MESSAGES, reasoning_effort="low", verbosity="low", **GREEDY)


# Models


def test_models(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert model.object == "model"
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError) as rejection:
        client.models.retrieve("gpt-17")
    assert (rejection.value.message, rejection.value.param) == ("Error code: 404 - Model not found", "model")
    with pytest.raises(openai.NotFoundError, match="There is no route POST /v1/moderations"):
        client.moderations.create(input="Hi")
    without_v1 = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    with pytest.raises(openai.NotFoundError, match="Use /v1/chat/completions; the base URL"):
        without_v1.chat.completions.create(model="tgi", messages=[{"role": "user", "content": "Hi"}])


# The asynchronous client


def test_async_chat() -> None:
    answer = run_async(lambda client: client.chat.completions.create(**CHAT))
    assert ANSWER in answer.choices[0].message.content


def test_async_chat_streamed() -> None:
    async def use(client: AsyncOpenAI) -> list[ChatCompletionChunk]:
        return [chunk async for chunk in await client.chat.completions.create(stream=True, **CHAT)]

    assert ANSWER in text_of(run_async(use))


def test_async_chat_stream_helper() -> None:
    async def use(client: AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(**CHAT) as stream:
            return await stream.get_final_completion()

    message = run_async(use).choices[0].message
    assert message.role == "assistant"
    assert ANSWER in message.content


def test_async_chats_at_once() -> None:
    async def use(client: AsyncOpenAI) -> list[Any]:
        return await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(4)))

    assert all(ANSWER in answer.choices[0].message.content for answer in run_async(use))


def test_async_completion() -> None:
    async def streamed(client: AsyncOpenAI) -> str:
        chunks = await client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    answer = run_async(lambda client: client.completions.create(prompt=PROMPT, **GREEDY))
    assert ANSWER in answer.choices[0].text
    assert run_async(streamed) == answer.choices[0].text


def test_async_models() -> None:
    async def use(client: AsyncOpenAI) -> list[str]:
        return [model.id async for model in client.models.list()]

    assert len(run_async(use)) == 1


# Errors

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
# Reason -> (fields of the request, text of the exception, its `param`).
REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "temperature": (
        {"temperature": -1}, "Input validation error: `temperature` must be strictly positive", "temperature"
    ),
    "top_p": ({"top_p": 1.5}, "Input validation error: `top_p` must be > 0.0 and < 1.0", "top_p"),
    "type": (
        {"seed": "x"},
        'Failed to deserialize the JSON body into the target type: seed: invalid type: string "x", expected u64 at ',
        "seed",
    ),
    "too long": ({"messages": [{"role": "user", "content": "Hi " * 10_000}]}, "Input validation error: `inputs`", None),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}]},
        "Input validation error: `image_url` parts are not supported",
        "messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("reason", REFUSED)
def test_rejections_have_their_exception_class_and_text(client: OpenAI, reason: str, stream: bool) -> None:
    fields, text, param = REFUSED[reason]
    with pytest.raises(openai.UnprocessableEntityError) as rejection:
        client.chat.completions.create(**CHAT | fields, stream=stream)
    assert f"Error code: 422 - {text}" in str(rejection.value)
    assert (rejection.value.type, rejection.value.param, rejection.value.code) == ("validation", param, "422")
    if "messages" not in fields:
        with pytest.raises(openai.UnprocessableEntityError) as rejection:
            client.completions.create(prompt=PROMPT, **GREEDY | fields, stream=stream)
        assert f"Error code: 422 - {text}" in str(rejection.value)


def test_async_rejections_have_their_exception_class() -> None:
    fields, text, _ = REFUSED["temperature"]
    with pytest.raises(openai.UnprocessableEntityError, match=text):
        run_async(lambda client: client.chat.completions.create(**CHAT | fields))


def test_a_missing_key_is_rejected() -> None:
    with OpenAI(base_url=f"{GUARDED_URL}/v1", api_key=KEY) as client:
        assert client.completions.create(model="tgi", prompt="Hi", max_tokens=1).choices
    with OpenAI(base_url=f"{GUARDED_URL}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="The API key is missing or wrong"):
            client.completions.create(model="tgi", prompt="Hi", max_tokens=1)
        with pytest.raises(openai.AuthenticationError, match="The API key is missing or wrong"):
            client.chat.completions.create(model="tgi", messages=MESSAGES, max_tokens=1, stream=True)
