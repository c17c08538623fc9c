"""120 random requests over HTTP, one after the other and all at once, with drafts: the same answers, to the digit.

In bfloat16, so on our own kernels where they can be had; tests/worker/test_batch_independence.py is of float32.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from tests.live.server import Server
from tests.models import model
from tests.worker.loras import make_adapter

COUNT = 120
AT_ONCE = 64
ADAPTER = "mine"
TEXT = "The river runs through the city and nobody knows the answer, but everyone asks: what is it? 1984 Straße"


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
        f"{ADAPTER}={make_adapter(directory / ADAPTER, base)}",
    )
    with Server(directory / "run", *flags, *more, "--validation-workers", "1") as server:
        yield server.start().ready()


def some(draw: Random, **values: tuple[Any, ...]) -> dict[str, Any]:
    """A few of these fields, each with one of its values."""
    return {name: draw.choice(choices) for name, choices in values.items() if draw.random() < 0.3}


def random_request(draw: Random) -> tuple[str, dict[str, Any]]:
    """A path and a body whose answer is determined: it has a seed, or is greedy."""
    text = " ".join(draw.choices(TEXT.split(), k=draw.randrange(1, 40)))
    fields = some(
        draw,
        temperature=(0.5, 1.5),
        top_k=(1, 7, 200),
        top_p=(0.3, 0.95),
        typical_p=(0.4, 0.9),
        min_p=(0.02, 0.3),
        repetition_penalty=(0.9, 1.4),
        frequency_penalty=(-1.0, 1.5),
        stop=(["e"], ["th", " a", "zzz"], ["ing the answer"]),
        ignore_eos=(True,),
    ) | {"seed": draw.getrandbits(64)}
    length, least = draw.randrange(3, 9), draw.choice([0, 0, 3])
    grammar = some(
        draw, grammar=({"type": "regex", "value": "[a-z ]{1,30}"}, {"type": "json", "value": {"enum": [1, "a"]}})
    )
    if draw.random() < 0.5:
        native = (
            fields
            | grammar
            | some(
                draw, watermark=(True,), truncate=(3, 9), top_n_tokens=(1, 4), do_sample=(True,), adapter_id=(ADAPTER,)
            )
        )
        native |= {"decoder_input_details": draw.random() < 0.3, "details": True, "min_new_tokens": least}
        return "/generate", {"inputs": text, "parameters": native | {"max_new_tokens": length}}
    body = fields | some(
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
    if draw.random() < 0.5:
        return "/v1/completions", {"prompt": text, **body, **some(draw, logprobs=(0, 2), echo=(True,))}
    body |= some(draw, logprobs=(True,))
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body}


def test_alone_and_all_at_once(server: Server) -> None:
    draw = Random(9)
    requests = [random_request(draw) for _ in range(COUNT)]

    def answer(request: tuple[str, dict[str, Any]]) -> Any:
        path, body = request
        reply = server.client.post(path, json=body)
        assert reply.status_code == 200, (reply.text, request)
        told = reply.json()
        return told if path == "/generate" else (told["choices"], told["usage"])

    with ThreadPoolExecutor(AT_ONCE) as threads:
        together = list(threads.map(answer, requests))
    for request, there in zip(requests, together, strict=True):
        assert answer(request) == there, request
    # All fields took part.
    assert {path for path, _ in requests} == {"/generate", "/v1/completions", "/v1/chat/completions"}
    ends = {one["details"]["finish_reason"] for one in together if isinstance(one, dict)}
    assert ends == {"length", "eos_token", "stop_sequence"}
