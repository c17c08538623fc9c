"""Request fields that are not implemented: those that would change an answer are rejected, others are accepted."""

import json
import logging
from typing import Any

import msgspec
import pytest

from tests.api.conftest import Front
from tgi.api import rejected_fields
from tgi.api.errors import ApiError
from tgi.api.rejected_fields import BOTH, IGNORED_FIELDS, REJECTED_FIELDS, FieldChecker
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.completions import CompletionRequest

CHECKED = {shape: FieldChecker(shape) for shape in BOTH}
PAIRS = [
    (shape, name, neutral) for one in REJECTED_FIELDS for shape in one.bodies for name, neutral in one.fields.items()
]
# Values that are not neutral for any field, unless listed as such.
VALUES: list[Any] = [True, False, 7, "other", [5], {"a": 1}]


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejected_fields, "_unknown_field_log", rejected_fields.UnknownFieldLog())


@pytest.mark.parametrize(("shape", "name", "neutral"), PAIRS)
def test_only_neutral_values_are_accepted(shape: type[msgspec.Struct], name: str, neutral: tuple[Any, ...]) -> None:
    for value in (None, *neutral):
        CHECKED[shape].check(json.dumps({name: value}).encode())
    for value in VALUES:
        if value not in neutral:
            with pytest.raises(
                ApiError, match=f"^Input validation error: `{name}` is not supported by this server$"
            ) as raised:
                CHECKED[shape].check(json.dumps({"a": 1, name: value}).encode())
            assert raised.value.param == name


def test_rejected_ignored_and_known_fields_are_disjoint() -> None:
    for shape in BOTH:
        rejected = [name for one, name, _ in PAIRS if one is shape]
        assert len(rejected) == len(set(rejected))
        assert not {*rejected} & {*shape.__struct_encode_fields__}
        assert not IGNORED_FIELDS & {*shape.__struct_encode_fields__, *rejected}


@pytest.mark.parametrize("shape", BOTH)
def test_fields_without_effect_are_accepted(shape: type[msgspec.Struct], caplog: pytest.LogCaptureFixture) -> None:
    CHECKED[shape].check(json.dumps(dict.fromkeys([*IGNORED_FIELDS, *shape.__struct_encode_fields__], 1)).encode())
    assert not caplog.records


def test_unknown_names_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for body in ({"colour": 1, "user": "u"}, {"colour": 2, "a\nb": {"n": 1}}, {"colour": None}):
        CHECKED[ChatRequest].check(json.dumps(body).encode())
        CHECKED[CompletionRequest].check(json.dumps(body).encode())
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["'colour'", "'a\\nb'"]


def test_unknown_members_of_objects_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "strange": 1, "function": {"name": "f", "parameters": {"x": 1}, "strict": True, "o": 1}}
    form = {"type": "json_schema", "colour": 1, "json_schema": {"name": "n", "schema": {"z": 1}, "strict": True}}
    options = {"include_usage": True, "include_obfuscation": False, "more": 1}
    body = {"tools": [tool], "tool_choice": {"function": {"name": "f"}, "also": 1}, "response_format": form}
    CHECKED[ChatRequest].check(json.dumps({**body, "stream_options": options}).encode())
    for plain in ({"tool_choice": "auto", "tools": None}, {"tools": [tool] * 3}):
        CHECKED[ChatRequest].check(json.dumps(plain).encode())
    (record,) = caplog.records
    names = ["response_format.colour", "stream_options.more", "tool_choice.also", "tools.function.o", "tools.strange"]
    assert record.getMessage().rpartition(": ")[2] == ", ".join(map(ascii, names))


def test_the_log_of_unknown_names_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    for begin in range(0, 400, 40):
        CHECKED[ChatRequest].check(json.dumps({f"{at:03}" * 1000: 1 for at in range(begin, begin + 40)}).encode())
    assert sum(record.getMessage().count("'") // 2 for record in caplog.records) == rejected_fields.MAX_LOGGED
    assert max(len(record.getMessage()) for record in caplog.records) < 40 * (rejected_fields.MAX_NAME + 4) + 100


ROUTES = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/invocations", {"prompt": "x"}),
    ("/invocations", {"messages": [{"role": "user", "content": "x"}]}),
    ("/vertex", {"instances": [{"messages": [{"role": "user", "content": "x"}]}]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_route_with_these_bodies_rejects_them(front: Front, path: str, body: dict[str, Any]) -> None:
    for value, status in ((True, 422), (False, 200)):
        sent = json.loads(json.dumps(body))
        (sent["instances"][0] if "instances" in sent else sent)["use_beam_search"] = value
        reply = front.post(path, json.dumps(sent))
        assert reply.status == status
        if status == 422:
            assert b"`use_beam_search` is not supported by this server" in reply.body


def test_native_routes_ignore_what_they_do_not_know(front: Front) -> None:
    body = {"inputs": "x", "use_beam_search": True, "parameters": {"use_beam_search": True}}
    assert front.post("/generate", json.dumps(body)).status == 200


@pytest.mark.parametrize("rest", [b'"\xff":1', b'"use_beam_search":"\xff"'])
def test_invalid_utf8_in_an_unknown_field_is_a_400(front: Front, rest: bytes) -> None:
    reply = front.post("/v1/completions", b'{"prompt":"x",%s}' % rest)
    assert reply.status == 400
    assert json.loads(reply.body)["error"]["message"].startswith("Failed to parse the request body as JSON: ")
