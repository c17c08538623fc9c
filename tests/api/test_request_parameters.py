"""Parameters of OpenAI's routes: what reaches the tokenizer, and what the log shows of them."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front
from tests.parameters import accepted
from tgi.api import request_metrics
from tgi.api.request_parameters import RequestedSampling, sent_biases
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.shapes.parameters import OPENAI
from tgi.microkernel.messages.codec import unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import Generate, decode, encode
from tgi.microkernel.messages.sampling_params import SAMPLED_BY, SamplingParams

CHAT = {"messages": [{"role": "user", "content": "x"}]}
ROUTES = pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)]
)
MANY = {"frequency_penalty": 0.5, "presence_penalty": -2, "logit_bias": {"511": -100, "0": 0.25, "7": 100}, "seed": 3}


def asked(front: Front, path: str, body: dict[str, Any]) -> list[Generate]:
    """The messages that reach the tokenizer for this request."""
    tokenizer = front.tokenizers[0]
    while not tokenizer.received.empty():
        tokenizer.received.get()
    assert front.post(path, json.dumps(body)).status == 200
    return [tokenizer.next(Generate) for _ in range(body.get("n", 1))]


@ROUTES
def test_openai_penalties_and_biases_have_fields_of_their_own(front: Front, path: str, body: dict[str, Any]) -> None:
    (message,) = asked(front, path, body | MANY)
    sampling = message.sampling
    assert (sampling.count_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -2.0, 0.0)
    pairs = dict(zip(unpack_int32(sampling.bias_ids), unpack_float32(sampling.biases), strict=True))
    assert pairs == {511: -100.0, 0: 0.25, 7: 100.0}
    assert decode(encode(sampling)) == sampling


@ROUTES
def test_choices_have_the_same_parameters(front: Front, path: str, body: dict[str, Any]) -> None:
    first, second = [message.sampling for message in asked(front, path, body | MANY | {"n": 2})]
    assert second == first._replace(choice=1)


@ROUTES
@pytest.mark.parametrize(
    "nothing", [{}, {"logit_bias": [5.0, 1.0]}, {"logit_bias": {}, "presence_penalty": 0}], ids=str
)
def test_neutral_fields_give_neutral_params(
    front: Front, path: str, body: dict[str, Any], nothing: dict[str, Any]
) -> None:
    (message,) = asked(front, path, body | nothing | {"seed": 1})
    assert message.sampling == SamplingParams(1, do_sample=True)


@ROUTES
def test_min_tokens_and_ignore_eos(front: Front, path: str, body: dict[str, Any]) -> None:
    (message,) = asked(front, path, body | {"min_tokens": 4, "ignore_eos": True})
    assert (message.sampling.min_new_tokens, message.ignore_eos) == (4, True)
    (message,) = asked(front, path, body | {"min_tokens": 0, "ignore_eos": None})
    assert (message.sampling.min_new_tokens, message.ignore_eos) == (0, False)


@ROUTES
@pytest.mark.parametrize(
    "limit",
    [{"top_p": 1}, *({OPENAI[name].name: value} for name in SAMPLED_BY for value in accepted(name))],
    ids=str,
)
def test_temperature_0_is_greedy_with_any_other_parameter(
    front: Front, path: str, body: dict[str, Any], limit: dict[str, Any]
) -> None:
    fields = limit | {"temperature": 0, "seed": 1, "presence_penalty": 0.5}
    (message,) = asked(front, path, body | fields)
    assert message.sampling == SamplingParams(1, presence_penalty=0.5)
    assert not message.sampling.samples


@ROUTES
def test_parameters_of_vllm(front: Front, path: str, body: dict[str, Any]) -> None:
    fields = {
        "min_p": 0.25,
        "stop_token_ids": [7, 511, 7],
        "bad_words": ["no", " never"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    (message,) = asked(front, path, body | fields | {"seed": 1})
    assert message.sampling == SamplingParams(1, do_sample=True, min_p=0.25)
    assert (unpack_int32(message.stop_token_ids), message.bad_words) == ([7, 511, 7], ["no", " never"])
    assert (message.hide_stop, message.skip_special_tokens) == (False, False)
    for nothing in ({}, dict.fromkeys(fields), {"stop_token_ids": [], "bad_words": [], "skip_special_tokens": True}):
        (message,) = asked(front, path, body | nothing)
        assert (message.stop_token_ids, message.bad_words) == (b"", [])
        assert (message.hide_stop, message.skip_special_tokens) == (True, True)


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest(prompt="x", **fields)


def test_floats_are_rounded_to_float32() -> None:
    request = completion(presence_penalty=0.1, frequency_penalty=2.00000001, logit_bias={"1": 0.1})
    single = 0.10000000149011612
    sampling = RequestedSampling.from_openai(request, 0)
    assert sampling.given == {"do_sample": True, "top_n": 0, "count_penalty": 2.0, "presence_penalty": single}
    assert sampling.logit_bias == {1: single}


def test_biases_in_an_array_have_no_effect() -> None:
    assert RequestedSampling.from_openai(completion(logit_bias=[0.1]), 0).logit_bias == {}
    assert sent_biases(completion(logit_bias={"a": 1.0})) == {"a": 1.0}


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 0}, "do_sample", False),
        ({"temperature": 0}, "temperature", None),
        ({}, "do_sample", True),
        ({"top_p": 1.0}, "top_p", 1.0),
        ({"top_k": 0}, "top_k", None),
        ({"top_k": -1}, "top_k", None),
        ({"top_k": -2}, "top_k", -2),  # for the rules to refuse
        ({"typical_p": 1}, "typical_p", 1),
        ({"min_p": 0}, "min_p", 0),
        ({"min_p": 0.5}, "min_p", 0.5),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
    ],
)
def test_given_parameters(fields: dict[str, object], name: str, value: object) -> None:
    assert RequestedSampling.from_openai(completion(**fields), 0).given.get(name) == value


def test_penalties_alone_do_not_make_a_request_sample() -> None:
    assert not SamplingParams(1, frequency_penalty=1.0, count_penalty=1.0, presence_penalty=1.0, biases=b"1234").samples
    assert SamplingParams(1, typical_p=0.99).samples


def test_the_log_has_counts_in_place_of_biases_stop_ids_and_words(front: Front) -> None:
    fields = {"stop_token_ids": [1, 2], "bad_words": ["secret"], "temperature": 0.2}
    (message,) = asked(front, "/v1/completions", {"prompt": "x"} | MANY | fields)
    logged = json.loads(json.dumps(request_metrics.logged_parameters(message)))
    assert (logged["logit_bias"], logged["stop_token_ids"], logged["bad_words"]) == (3, 2, 1)
    assert (logged["count_penalty"], logged["presence_penalty"], logged["typical_p"]) == (0.5, -2.0, 1.0)
    assert logged["temperature"] == 0.2
