"""120 random requests over HTTP, one by one and concurrently, with drafts: the answers are exactly the same.

In bfloat16, so with our own kernels where the processor has them; tests/worker/test_batch_independence.py uses float32.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from tests.live.server import Server
from tests.models import model, write_adapter
from tests.parameters import accepted
from tgi.api.shapes.parameters import NATIVE, OPENAI

pytestmark = pytest.mark.live

COUNT = 120
CONCURRENCY = 64
ADAPTER = "mine"
TEXT = "The river runs through the city and nobody knows the answer, but everyone asks: what is it? 1984 Straße"
# Sampling parameters with the same name on all routes.
ON_ALL_ROUTES = {
    field.name: tuple(accepted(name))
    for name, field in NATIVE.items()
    if field.name in {other.name for other in OPENAI.values()}
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base, directory = model("llama", hidden=128, intermediate=192), tmp_path_factory.mktemp("independence")
    flags = ("--model-id", str(base), "--dtype", "bfloat16", "--max-batch-total-tokens", "2048")
    more = (
        "--draft-model-id",
        str(base),
        "--speculate",
        "1",
        "--lora-adapters",
        f"{ADAPTER}={write_adapter(directory / ADAPTER, base)}",
    )
    with Server(directory / "run", *flags, *more, "--validation-workers", "1") as server:
        yield server.start().wait_until_ready()


def random_fields(draw: Random, **values: tuple[Any, ...]) -> dict[str, Any]:
    """A few of these fields, each with one of its values."""
    return {name: draw.choice(choices) for name, choices in values.items() if draw.random() < 0.3}


def random_request(draw: Random) -> tuple[str, dict[str, Any]]:
    """A path and a body with a determined answer: sampled with a seed, or greedy."""
    text = " ".join(draw.choices(TEXT.split(), k=draw.randrange(1, 40)))
    fields = random_fields(
        draw,
        **ON_ALL_ROUTES
        | {
            "temperature": (0.5, 1.5),
            "top_k": (1, 7, 200),
            "top_p": (0.3, 0.95),
            "typical_p": (0.4, 0.9),
            "min_p": (0.02, 0.3),
            "repetition_penalty": (0.9, 1.4),
            "frequency_penalty": (-1.0, 1.5),
        },
        stop=(["e"], ["th", " a", "zzz"], ["ing the answer"]),
        ignore_eos=(True,),
    ) | {"seed": draw.getrandbits(64)}
    length, least = draw.randrange(3, 9), draw.choice([0, 0, 3])
    grammar = random_fields(
        draw, grammar=({"type": "regex", "value": "[a-z ]{1,30}"}, {"type": "json", "value": {"enum": [1, "a"]}})
    )
    if draw.random() < 0.5:
        native = (
            fields
            | grammar
            | random_fields(
                draw, watermark=(True,), truncate=(3, 9), top_n_tokens=(1, 4), do_sample=(True,), adapter_id=(ADAPTER,)
            )
        )
        native |= {"decoder_input_details": draw.random() < 0.3, "details": True, "min_new_tokens": least}
        return "/generate", {"inputs": text, "parameters": native | {"max_new_tokens": length}}
    body = fields | random_fields(
        draw,
        model=(ADAPTER,),
        n=(2, 3),
        bad_words=(["e", "th", " a"],),
        stop_token_ids=([70, 80, 90],),
        presence_penalty=(-1.0, 1.0),
        logit_bias=({"70": -100, "80": 3},),
    )
    body |= {"max_tokens": length, "min_tokens": least}
    if grammar:
        body["response_format"] = grammar["grammar"]
        if grammar["grammar"]["type"] == "json":  # an enum and bad words may leave no token, which is an error
            body.pop("bad_words", None)
    if draw.random() < 0.5:
        return "/v1/completions", {"prompt": text, **body, **random_fields(draw, logprobs=(0, 2), echo=(True,))}
    body |= random_fields(draw, logprobs=(True,))
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body}


def test_concurrent_answers_equal_those_one_by_one(server: Server) -> None:
    draw = Random(9)
    requests = [random_request(draw) for _ in range(COUNT)]

    def answer(request: tuple[str, dict[str, Any]]) -> Any:
        path, body = request
        reply = server.client.post(path, json=body)
        answered = reply.json()
        if "leave no token to go on with" in reply.text:  # bad_words and a grammar that exclude each other
            return answered
        assert reply.status_code == 200, (reply.text, request)
        if path == "/generate":
            return answered
        del answered["usage"]["prompt_tokens_details"]  # what the cache has depends on the others
        return answered["choices"], answered["usage"]

    with ThreadPoolExecutor(CONCURRENCY) as threads:
        concurrent = list(threads.map(answer, requests))
    for request, expected in zip(requests, concurrent, strict=True):
        assert answer(request) == expected, request
    assert sum("error" in one for one in concurrent if isinstance(one, dict)) < 5
    # All routes and finish reasons occurred.
    assert {path for path, _ in requests} == {"/generate", "/v1/completions", "/v1/chat/completions"}
    generated = [one for one in concurrent if isinstance(one, dict) and "error" not in one]
    finish_reasons = {one["details"]["finish_reason"] for one in generated}
    assert finish_reasons == {"length", "eos_token", "stop_sequence"}
