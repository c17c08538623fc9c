"""OpenAI's penalties and biases: what goes down, under every route that takes them, and what the log says of it."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front
from tgi.api import accounting
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.steering import NONE, Steering, biases
from tgi.kernel.messages import Generate, Sampling, decode, encode
from tgi.kernel.pack import floats, ints

CHAT = {"messages": [{"role": "user", "content": "x"}]}
ROUTES = pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)]
)
MANY = {"frequency_penalty": 0.5, "presence_penalty": -2, "logit_bias": {"511": -100, "0": 0.25, "7": 100}, "seed": 3}


def asked(front: Front, path: str, body: dict[str, Any]) -> list[Generate]:
    """What goes down for this request."""
    tokenizer = front.tokenizers[0]
    while not tokenizer.received.empty():
        tokenizer.received.get()
    assert front.post(path, json.dumps(body)).status == 200
    return [tokenizer.next(Generate) for _ in range(body.get("n", 1))]


@ROUTES
def test_openais_penalties_are_not_tgis(front: Front, path: str, body: dict[str, Any]) -> None:
    (message,) = asked(front, path, body | MANY)
    sampling = message.sampling
    assert (sampling.count_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -2.0, 0.0)
    pairs = dict(zip(ints(sampling.bias_ids), floats(sampling.biases), strict=True))
    assert pairs == {511: -100.0, 0: 0.25, 7: 100.0}
    assert decode(encode(sampling)) == sampling


@ROUTES
def test_every_choice_has_them(front: Front, path: str, body: dict[str, Any]) -> None:
    first, second = [message.sampling for message in asked(front, path, body | MANY | {"n": 2})]
    assert second == first._replace(choice=1)


@ROUTES
@pytest.mark.parametrize(
    "nothing", [{}, {"logit_bias": [5.0, 1.0]}, {"logit_bias": {}, "presence_penalty": 0}], ids=str
)
def test_nothing_asked_nothing_sent(front: Front, path: str, body: dict[str, Any], nothing: dict[str, Any]) -> None:
    (message,) = asked(front, path, body | nothing | {"seed": 1})
    assert message.sampling == Sampling(1, do_sample=True)


@ROUTES
def test_least_lengths_and_texts_without_an_end(front: Front, path: str, body: dict[str, Any]) -> None:
    (message,) = asked(front, path, body | {"min_tokens": 4, "ignore_eos": True})
    assert (message.sampling.min_new_tokens, message.ignore_eos) == (4, True)
    (message,) = asked(front, path, body | {"min_tokens": 0, "ignore_eos": None})
    assert (message.sampling.min_new_tokens, message.ignore_eos) == (0, False)


@ROUTES
@pytest.mark.parametrize(
    "limit", [{"top_p": 0.5}, {"top_k": 5}, {"typical_p": 0.5}, {"min_p": 0.5}, {"top_p": 1}], ids=str
)
def test_temperature_0_is_greedy_whatever_the_limits_are(
    front: Front, path: str, body: dict[str, Any], limit: dict[str, Any]
) -> None:
    (message,) = asked(front, path, body | limit | {"temperature": 0, "seed": 1, "presence_penalty": 0.5})
    assert message.sampling == Sampling(1, presence_penalty=0.5)
    assert not message.sampling.samples


@ROUTES
def test_vllms_parameters(front: Front, path: str, body: dict[str, Any]) -> None:
    fields = {
        "min_p": 0.25,
        "stop_token_ids": [7, 511, 7],
        "bad_words": ["no", " never"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    (message,) = asked(front, path, body | fields | {"seed": 1})
    assert message.sampling == Sampling(1, do_sample=True, min_p=0.25)
    assert (ints(message.stop_token_ids), message.bad_words) == ([7, 511, 7], ["no", " never"])
    assert (message.hide_stop, message.skip_special_tokens) == (False, False)
    for nothing in ({}, dict.fromkeys(fields), {"stop_token_ids": [], "bad_words": [], "skip_special_tokens": True}):
        (message,) = asked(front, path, body | nothing)
        assert (message.stop_token_ids, message.bad_words) == (b"", [])
        assert (message.hide_stop, message.skip_special_tokens) == (True, True)


def test_floats_are_rounded_as_all_parameters_are() -> None:
    request = CompletionRequest(prompt="x", presence_penalty=0.1, frequency_penalty=2.00000001, logit_bias={"1": 0.1})
    single = 0.10000000149011612
    assert Steering.of(request) == Steering(2.0, single, {1: single})
    assert Steering.of(CompletionRequest(prompt="x", logit_bias=[0.1])) == NONE
    assert biases(CompletionRequest(prompt="x", logit_bias={"a": 1.0})) == {"a": 1.0}


def test_penalties_alone_do_not_make_a_request_sample() -> None:
    assert not Sampling(1, frequency_penalty=1.0, count_penalty=1.0, presence_penalty=1.0, biases=b"1234").samples
    assert Sampling(1, typical_p=0.99).samples


def test_the_log_tells_how_many_biases_there_are(front: Front) -> None:
    fields = {"stop_token_ids": [1, 2], "bad_words": ["secret"], "temperature": 0.2}
    (message,) = asked(front, "/v1/completions", {"prompt": "x"} | MANY | fields)
    logged = json.loads(json.dumps(accounting._parameters(message)))
    assert (logged["logit_bias"], logged["stop_token_ids"], logged["bad_words"]) == (3, 2, 1)
    assert (logged["count_penalty"], logged["presence_penalty"], logged["typical_p"]) == (0.5, -2.0, 1.0)
    assert logged["temperature"] == 0.2
