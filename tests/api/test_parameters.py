"""The sampling parameters of the table on every route that has them: what reaches the tokenizer, what is refused."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front
from tests.parameters import accepted, refused
from tgi.api import float32
from tgi.api.shapes.native import GenerateParameters
from tgi.api.shapes.openai import OpenAiRequest
from tgi.api.shapes.parameters import NATIVE, OPENAI
from tgi.microkernel.messages.protocol import Generate
from tgi.microkernel.messages.sampling_params import FIELDS, NEUTRAL, PARAMETERS, SAMPLED_BY, SamplingParams

ROUTES = {
    "/generate": {"inputs": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
# (path, parameter): each parameter on each route that has it.
CASES = [
    *(("/generate", name) for name in NATIVE),
    *((path, name) for path in ROUTES if path != "/generate" for name in OPENAI),
]


def body(path: str, name: str, value: Any) -> str:
    if path == "/generate":
        return json.dumps(ROUTES[path] | {"parameters": {NATIVE[name].name: value, "seed": 1}})
    return json.dumps(ROUTES[path] | {OPENAI[name].name: value, "seed": 1})


def sent(front: Front, path: str, name: str, value: Any) -> SamplingParams:
    """What reaches the tokenizer."""
    tokenizer = front.tokenizers[0]
    while not tokenizer.received.empty():
        tokenizer.received.get()
    reply = front.post(path, body(path, name, value))
    assert reply.status == 200, reply.body
    return tokenizer.next(Generate).sampling  # type: ignore[no-any-return]


def as_sent(name: str, value: Any) -> Any:
    """The value of a request field in SamplingParams: floats are float32 numbers."""
    return float32.round_to_float32(value) if PARAMETERS[name].json_type == "f32" else value


def neutral(path: str) -> SamplingParams:
    return SamplingParams(1, do_sample=path != "/generate")


@pytest.mark.parametrize(("path", "name"), CASES)
def test_accepted_values_reach_the_tokenizer(front: Front, path: str, name: str) -> None:
    for value in accepted(name):
        sampling = sent(front, path, name, value)
        assert sampling == neutral(path)._replace(**{name: as_sent(name, value)})
        assert sampling.samples == (path != "/generate" or PARAMETERS[name].samples or name == "do_sample")


@pytest.mark.parametrize(("path", "name"), CASES)
def test_neutral_values_change_nothing(front: Front, path: str, name: str) -> None:
    field = (NATIVE if path == "/generate" else OPENAI)[name]
    allowed = PARAMETERS[name].range
    values = [None, *field.off_values, *([NEUTRAL[name]] if allowed is None or allowed.contains(NEUTRAL[name]) else [])]
    for value in values:
        got = sent(front, path, name, value)
        expected = as_sent(name, value) if value == NEUTRAL[name] else NEUTRAL[name]
        assert got == neutral(path)._replace(**{"do_sample": got.do_sample, name: expected})
        assert got.do_sample == (path != "/generate" and (name, value) not in (("temperature", 0), ("top_p", 0)))


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, name in CASES if PARAMETERS[name].range])
def test_values_outside_of_the_range_are_refused(front: Front, path: str, name: str) -> None:
    parameter = PARAMETERS[name]
    native = path == "/generate"
    allowed = parameter.range if native else parameter.openai_range
    assert allowed is not None
    for value in refused(allowed):
        reply = front.post(path, body(path, name, value))
        assert reply.status == 422
        text = f"Input validation error: {allowed.message}"
        if native:
            assert json.loads(reply.body) == {"error": text, "error_type": "validation"}
        else:
            error = {"message": text, "type": "validation", "param": OPENAI[name].name, "code": 422}
            assert json.loads(reply.body) == {"error": error, "error_type": "validation"}


def test_the_table_has_every_field_of_the_record() -> None:
    assert tuple(FIELDS) == SamplingParams._fields
    for name, parameter in PARAMETERS.items():
        assert parameter.native or parameter.openai, name
        assert parameter.effect.endswith(".")
        assert accepted(name), f"{name} needs an example that is not neutral"
        if parameter.range is not None:
            field = parameter.native or parameter.openai
            assert f"`{field.name or name}`" in parameter.range.message


def test_a_parameter_makes_a_request_sample_only_if_the_table_says_so() -> None:
    for name in PARAMETERS:
        for value in accepted(name):
            sampling = SamplingParams(1, **{name: value})
            assert sampling.samples == (name in SAMPLED_BY or name == "do_sample")
            assert not sampling.greedy().samples


def test_request_types_have_the_fields_of_the_table() -> None:
    assert {field.name for field in NATIVE.values()} <= {*GenerateParameters.__struct_fields__}
    assert {field.name for field in OPENAI.values()} <= {*OpenAiRequest.__struct_fields__}
