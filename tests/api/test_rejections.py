"""Rejected requests: status and bytes of the response, and the order of the checks. Texts are those of TGI."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.conftest import Front, openai_error, request
from tgi.api import errors
from tgi.api.body_reader import BodyReader
from tgi.api.json_body import JsonBody
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.shapes.native import GenerateParameters, GenerateRequest
from tgi.api.validation import COMPLETION_RULES, OPENAI_RULES, RULES_AFTER_ADMISSION, RULES_BEFORE_ADMISSION, Rule

SHAPE = "Failed to deserialize the JSON body into the target type: "
SYNTAX = "Failed to parse the request body as JSON: "
PATHS = ["/", "/generate", "/generate_stream", "/tokenize"]


@pytest.mark.parametrize("path", PATHS)
def test_content_type(front: Front, path: str) -> None:
    for kind in (None, "text/plain", "application/jsonx", "application/x-www-form-urlencoded"):
        reply = front.post(path, "{}", content_type=kind)
        assert reply.status == 415
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert reply.body == b"Expected request with `Content-Type: application/json`"
    for kind in ("application/json; charset=utf-8", "application/cloudevents+json", "Application/JSON"):
        assert front.post(path, '{"inputs":"x"}', content_type=kind).status == 200


@pytest.mark.parametrize("kind", ["video_url", "input_video", "input_audio", "audio_url", "file"])
def test_other_media_are_refused_by_their_type(front: Front, kind: str) -> None:
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]}]}
    response = {"input": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}
    for path, body in (("/v1/chat/completions", chat), ("/chat_tokenize", chat), ("/v1/responses", response)):
        reply = front.post(path, json.dumps(body))
        assert reply.status == 422
        assert f"`{kind}` parts are not supported: models read text and images here" in reply.body.decode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"inputs":"x"', b'{"inputs":"x"} x', b"nope", b'{"inputs":"\xff"}', b"[" * 99999]
)
def test_not_json(front: Front, path: str, body: bytes) -> None:
    reply = front.post(path, body)
    assert reply.status == 400
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.body.decode().startswith(SYNTAX)


@pytest.mark.parametrize("digits", [40, 400, 4000, 5000])
@pytest.mark.parametrize("body", ['{{"inputs":{}}}', '{{"inputs":"x","parameters":{{"seed":{}}}}}'])
def test_the_text_about_a_long_number_is_short(body: str, digits: int) -> None:
    with pytest.raises(errors.Rejection) as raised:
        JsonBody(GenerateRequest).decode(body.format("9" * digits).encode())
    assert raised.value.status == (422 if digits < 5000 else 400)
    assert len(raised.value.message) < 200


@pytest.mark.parametrize("text", [b"\xff", b"a\xc3", b"\xed\xa0\x80"])
@pytest.mark.parametrize(
    "body", [b'{"inputs":"%s"}', b'{"inputs":1,"x":"%s"}', b'{"inputs":"x","parameters":{"stop":["%s"]}}']
)
def test_text_that_is_not_utf8_is_rejected(body: bytes, text: bytes) -> None:
    with pytest.raises(errors.Rejection, match=f"^{SYNTAX}'utf-8' codec can't decode") as raised:
        JsonBody(GenerateRequest).decode(body % text)
    assert raised.value.status == 400


@pytest.mark.parametrize("received", [False, True])
def test_bodies_over_the_limit_are_rejected_however_they_come(received: bool) -> None:
    """`received`: as a whole before the limit is checked."""

    async def chunks(size: int) -> AsyncIterator[bytes]:
        for _ in range(size):
            yield b"x"

    async def read(size: int, limited: bool = True) -> bytes:
        return await BodyReader(limit=10, timeout_seconds=60).read(chunks(size), limited=limited, received=received)

    assert asyncio.run(read(10)) == b"x" * 10
    assert asyncio.run(read(11, limited=False)) == b"x" * 11
    with pytest.raises(errors.Rejection) as raised:
        asyncio.run(read(11))
    assert raised.value.status == 413


def test_syntax_is_checked_before_shape(front: Front) -> None:
    assert front.post("/generate", '{"inputs":1,').status == 400


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{}", "missing field `inputs` at line 1 column 2"),
        ('{\n "x": 1\n}', "missing field `inputs` at line 3 column 1"),
        ("[]", "invalid type: sequence, expected struct GenerateRequest at line 1 column 2"),
        ('{"inputs":1}', "inputs: invalid type: integer `1`, expected a string at line 1 column 11"),
        ('{"inputs":null}', "inputs: invalid type: null, expected a string at line 1 column 14"),
        (
            '{"inputs":"x","parameters":{"top_p":"a"}}',
            'parameters.top_p: invalid type: string "a", expected f32 at line 1 column 39',
        ),
        (
            '{"inputs":"x","parameters":{"max_new_tokens":-1}}',
            "parameters.max_new_tokens: invalid value: integer `-1`, expected u32 at line 1 column 47",
        ),
        (
            '{"inputs":"x","parameters":{"max_new_tokens":1.5}}',
            "parameters.max_new_tokens: invalid type: floating point `1.5`, expected u32 at line 1 column 48",
        ),
        (
            '{"inputs":"é","parameters":{"top_k":2147483648}}',
            "parameters.top_k: invalid value: integer `2147483648`, expected i32 at line 1 column 47",
        ),
        (
            '{"inputs":"x","parameters":{"seed":18446744073709551616}}',
            "parameters.seed: invalid value: integer `18446744073709551616`, expected u64 at line 1 column 55",
        ),
        (
            '{"inputs":"x","parameters":{"temperature":1e39}}',
            "parameters.temperature: invalid value: floating point `1e+39`, expected f32 at line 1 column 46",
        ),
        (
            '{"inputs":"x","parameters":{"stop":["a",1]}}',
            "parameters.stop[1]: invalid type: integer `1`, expected a string at line 1 column 41",
        ),
        (
            '{"inputs":"x","parameters":{"details":"yes"}}',
            'parameters.details: invalid type: string "yes", expected a boolean at line 1 column 43',
        ),
        (
            '{"inputs":"x","parameters":[]}',
            "parameters: invalid type: sequence, expected struct GenerateParameters at line 1 column 29",
        ),
        (
            '{"inputs":"x","parameters":{"grammar":{"type":"xml","value":1}}}',
            "parameters.grammar.type: unknown variant `xml`, expected one of `choice`, `grammar`, `json`, "
            "`json_object`, `json_schema`, `regex`, `text` at line 1 column 51",
        ),
    ],
)
def test_wrong_shape(front: Front, body: str, text: str) -> None:
    reply = front.post("/generate", body)
    assert reply.status == 422
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.body.decode() == SHAPE + text


def test_wrong_entry_of_an_object(front: Front) -> None:
    reply = front.post("/v1/chat/completions", '{"messages":[],"logit_bias":{"7":null}}')
    assert reply.status == 422
    text = f"{SHAPE}logit_bias: invalid entry: Expected `float`, got `null` at line 1 column 38"
    assert json.loads(reply.body) == openai_error(422, "validation", text, "logit_bias")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ('"stop_token_ids":[-1]', "stop_token_ids[0]: invalid value: integer `-1`, expected u32"),
        ('"stop_token_ids":["a"]', 'stop_token_ids[0]: invalid type: string "a", expected u32'),
        ('"bad_words":"a"', 'bad_words: invalid type: string "a", expected a sequence'),
    ],
)
def test_lists_of_ids_and_words(front: Front, field: str, text: str) -> None:
    reply = front.post("/v1/completions", f'{{"prompt":"x",{field}}}')
    assert reply.status == 422
    error = json.loads(reply.body)["error"]
    assert error["message"].startswith(SHAPE + text)
    assert error["param"] == text.partition(":")[0]


def test_stream_is_a_boolean_at_the_root(front: Front) -> None:
    for value in ("1", '"true"'):
        reply = front.post("/", f'{{"inputs":"x","stream":{value}}}')
        assert reply.status == 422
        assert reply.body.decode().startswith(f"{SHAPE}stream: invalid type: ")
        assert "expected a boolean at line 1 column" in reply.body.decode()


def test_unknown_fields_are_ignored(front: Front) -> None:
    body = '{"inputs":"x","model":3,"parameters":{"colour":"red","stop":[]}}'
    assert front.post("/generate", body).status == 200


def test_size_is_limited_while_reading(serve: Any) -> None:
    front = serve(payload_limit=100)
    body = '{"inputs":"' + "x" * 87 + '"}'
    assert len(body) == 100
    assert front.post("/generate", body).status == 200
    text = b"Failed to buffer the request body: length limit exceeded"
    reply = front.post("/generate", body + " ")
    assert (reply.status, reply.body) == (413, text)
    assert reply.headers["access-control-allow-origin"] == "*"
    # A body that never ends is cut off, without a content-length to warn of it.
    with front.connect() as connection:
        head = {"content-type": "application/json", "transfer-encoding": "chunked"}
        connection.sendall(request("POST", "/generate", b"", head) + b"80\r\n" + b"x" * 128 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_body_over_the_limit_that_is_sent_before_the_response(serve: Any) -> None:
    front = serve(payload_limit=100)
    with front.connect() as connection:
        head = {"content-type": "application/json", "content-length": str(8 << 20), "connection": "close"}
        connection.sendall(request("POST", "/generate", b"x" * (8 << 20), head))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_headers_have_a_limit(front: Front) -> None:
    with front.connect() as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):  # it may close while we still send
            for _ in range(1000):
                connection.sendall(b"x-more: " + b"y" * 1000 + b"\r\n")
            answer = connection.recv(65536)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert front.get("/health").status == 200


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_upgrade_header_is_ignored_and_the_body_is_read(front: Front, cut: int) -> None:
    body = b'{"inputs":"x"}'
    head = {
        "connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAAB",
        "content-type": "application/json", "content-length": str(len(body)),
    }  # fmt: skip
    data = request("POST", "/generate", body, head).replace(b"connection: close\r\n", b"", 1)
    with front.connect() as connection:
        for part in (data[: len(data) - cut], data[len(data) - cut :]):
            connection.sendall(part)
            time.sleep(0.02)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(request("GET", "/health", b"", {}))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_number_out_of_range_without_a_path(front: Front) -> None:
    reply = front.post("/generate", '{"inputs":"x","parameters":{"temperature":1e400}}')
    assert reply.status == 400
    assert b"$[" not in reply.body


def test_paths_and_methods(front: Front) -> None:
    reply = front.get("/nothing")
    assert (reply.status, reply.body, reply.headers["content-length"]) == (404, b"", "0")
    assert "content-type" not in reply.headers
    reply = front.get("/generate")
    assert (reply.status, reply.body, reply.headers["allow"]) == (405, b"", "POST")
    reply = front.post("/info", "{}")
    assert (reply.status, reply.body, reply.headers["allow"]) == (405, b"", "GET,HEAD")
    assert front.post("/generate/", "{}").status == 404


def test_options_are_answered_for_browsers(front: Front) -> None:
    for path in ("/generate", "/nothing"):
        reply = front.get(path, "OPTIONS", origin="http://a")
        assert (reply.status, reply.body) == (200, b"")
        assert reply.headers["access-control-allow-methods"] == "GET,POST"
        assert reply.headers["access-control-allow-headers"] == "content-type,authorization"
        assert reply.headers["access-control-allow-origin"] == "*"


def test_allowed_origins(serve: Any) -> None:
    front = serve(cors_allow_origin=("http://a", "http://b"))
    assert front.get("/health", origin="http://b").headers["access-control-allow-origin"] == "http://b"
    assert "access-control-allow-origin" not in front.get("/health", origin="http://c").headers
    assert "access-control-allow-origin" not in front.get("/health").headers


def test_keys(serve: Any) -> None:
    front = serve(api_key=("One", "two"))
    for path in PATHS:
        for value in ("", "Bearer", "Bearer one", "Bearer Onex", "One", "Basic One"):
            reply = front.post(path, "not json", None, authorization=value)
            assert (reply.status, reply.body) == (401, b"")
            assert reply.headers["access-control-allow-origin"] == "*"
        assert front.post(path, "not json", None).status == 401
        assert front.post(path, "{}", None, authorization="Bearer One").status == 415
        assert front.post(path, '{"inputs":"x"}', authorization="bearer two").status == 200
    for path in ("/", "/health", "/ping", "/info", "/metrics"):
        assert front.get(path).status == 200
    assert front.post("/nothing", "{}").status == 404


def detail(front: Front, path: str, inputs: str, parameters: dict[str, Any]) -> str:
    """The text of the validation error without its prefix; "" if the request succeeds."""
    reply = front.post(path, json.dumps({"inputs": inputs, "parameters": parameters}))
    if reply.status == 200:
        return ""
    assert reply.status == 422
    error = json.loads(reply.body)
    assert error["error_type"] == "validation"
    assert error["error"].startswith("Input validation error: ")
    return str(error["error"].removeprefix("Input validation error: "))


# (inputs, parameters, text): each request breaks the rule of its text, and rules that are checked later.
LATER = {"top_k": 0, "max_new_tokens": 0, "stop": ["a"] * 5, "top_n_tokens": 6, "truncate": 0}
ORDER: list[tuple[str, dict[str, Any], str]] = [
    ("", {"best_of": 2, "repetition_penalty": 0, "stop": ["a"] * 5}, "you must use sampling when `best_of` is > 1"),
    ("", {"temperature": 0, "repetition_penalty": 0, **LATER}, "`temperature` must be strictly positive"),
    ("", {"repetition_penalty": 0, "frequency_penalty": 3, **LATER}, "`repetition_penalty` must be strictly positive"),
    ("", {"frequency_penalty": 2.5, "top_p": 0, **LATER}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("", {"top_p": 1.5, "typical_p": 0, **LATER}, "`top_p` must be > 0.0 and < 1.0"),
    ("", {"typical_p": 0, **LATER}, "`typical_p` must be > 0.0 and < 1.0"),
    ("", {"min_p": 1.5, **LATER}, "`min_p` must be >= 0.0 and <= 1.0"),
    ("", {"min_p": -0.1, **LATER}, "`min_p` must be >= 0.0 and <= 1.0"),
    ("", LATER, "`top_k` must be strictly positive"),
    ("", {**LATER, "top_k": 1}, "`max_new_tokens` must be strictly positive"),
    (
        "",
        {"min_new_tokens": 3, "max_new_tokens": 2, "stop": ["a"] * 5},
        "`min_new_tokens` must be <= `max_new_tokens`. Given: 3 and 2",
    ),
    ("", {"stop": ["a"] * 5, "top_n_tokens": 6}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ("", {"seed": 0, "best_of": 2, "do_sample": True, "top_n_tokens": 6}, "`seed` must not be set when `best_of` > 1"),
    ("", {"top_n_tokens": 6, "truncate": 0}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ("", {"truncate": 0}, "`inputs` cannot be empty"),
    ("x", {"truncate": 0, "adapter_id": "a"}, "`truncate` must be strictly positive and less than 2047. Given: 0"),
    ("x", {"truncate": 2048}, "`truncate` must be strictly positive and less than 2047. Given: 2048"),
    ("x", {"truncate": 2047}, ""),
    ("x", {"best_of": 2, "min_p": 0.5}, ""),
]


@pytest.mark.parametrize(("inputs", "parameters", "text"), ORDER)
def test_order_of_rules(front: Front, inputs: str, parameters: dict[str, Any], text: str) -> None:
    assert detail(front, "/generate", inputs, parameters) == text


def test_rules_before_admission(front: Front) -> None:
    stream = "`best_of` != 1 is not supported when streaming tokens"
    for best_of in (0, 2):
        assert detail(front, "/generate_stream", "", {"best_of": best_of}) == stream
    assert detail(front, "/generate_stream", "", {"decoder_input_details": True}) == (
        "`decoder_input_details` == true is not supported when streaming tokens"
    )
    assert detail(front, "/generate", "", {"best_of": 3}) == "`best_of` must be > 0 and <= 2. Given: 3"


def test_best_of_if_max_best_of_is_1(serve: Any) -> None:
    front = serve(max_best_of=1)
    assert detail(front, "/generate", "", {"best_of": 2}) == "`best_of` != 1 is not allowed for this endpoint"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"adapter_id": "{ask}"}, "`adapter_id` {ask} not found"),
    ],
)
def test_unknown_adapter_is_rejected(front: Front, parameters: dict[str, Any], text: str) -> None:
    assert detail(front, "/generate", "x", parameters) == text


BIASED = '{"42": -100}'


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"frequency_penalty": -2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"frequency_penalty": -2.0}, ""),
        ({"presence_penalty": -2.5}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
        ({"presence_penalty": 2}, ""),
        ({"logit_bias": {"7": 100.5}}, "`logit_bias` values must be >= -100.0 and <= 100.0"),
        ({"logit_bias": {"7": -101}}, "`logit_bias` values must be >= -100.0 and <= 100.0"),
        *(
            ({"logit_bias": {key: 1}}, f"`logit_bias` must name tokens by their ids, as in {BIASED}")
            for key in ("", "a", "-1", "+1", " 1", "1.0", "1_0", "01", "\u0661", "9" * 5000)
        ),
        ({"logit_bias": {"7": 1, "512": 1}}, "`logit_bias` must name token ids < 512. Given: 512"),
        ({"logit_bias": {"9999999999": 1}}, "`logit_bias` must name token ids < 512. Given: 9999999999"),
        ({"logit_bias": {str(token): 0 for token in range(1025)}}, "`logit_bias` supports up to 1024 tokens"),
        ({"logit_bias": {str(token): 100 for token in range(512)}}, ""),
        ({"logit_bias": [1.0] * 2000}, ""),
        ({"min_tokens": 3, "max_tokens": 2}, "`min_new_tokens` must be <= `max_new_tokens`. Given: 3 and 2"),
        ({"min_tokens": 2, "max_tokens": 2, "ignore_eos": None}, ""),
        ({"min_tokens": 2000}, ""),
        ({"typical_p": 1.5}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 0.95}, ""),
        ({"min_p": 1.01}, "`min_p` must be >= 0.0 and <= 1.0"),
        ({"min_p": -1}, "`min_p` must be >= 0.0 and <= 1.0"),
        ({"min_p": 1}, ""),
        ({"stop_token_ids": [1, 512]}, "`stop_token_ids` must be token ids < 512. Given: 512"),
        ({"stop_token_ids": [*range(129)]}, "`stop_token_ids` supports up to 128 token ids"),
        ({"stop_token_ids": [*range(128)]}, ""),
        ({"bad_words": ["a"] * 257}, "`bad_words` supports up to 256 words of 4096 characters in all"),
        ({"bad_words": ["a", "b" * 4096]}, "`bad_words` supports up to 256 words of 4096 characters in all"),
        ({"bad_words": ["a" * 16] * 256}, ""),
        ({"bad_words": ["a", ""]}, "`bad_words` must not hold words that are empty or white space"),
        ({"bad_words": [" \n"]}, "`bad_words` must not hold words that are empty or white space"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})],
)
def test_rules_of_openai_routes(
    front: Front, path: str, body: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    reply = front.post(path, json.dumps(body | fields))
    if not text:
        assert reply.status == 200
        return
    assert reply.status == 422
    param = next(iter(fields))
    assert json.loads(reply.body) == openai_error(422, "validation", f"Input validation error: {text}", param)


@pytest.mark.parametrize(
    "line", ["GET /x", "GET /x HTTP/0.9", "GET /x HTTP/2.0", "CONNECT /generate HTTP/1.1",
             "CONNECT a:443 HTTP/1.1"],
)  # fmt: skip
def test_other_http_versions_and_connect_are_rejected(front: Front, line: str) -> None:
    reply = front.raw(f"{line}\r\nhost: test\r\nconnection: close\r\n\r\n".encode())
    assert (reply.status, reply.body) == (400, b"Invalid HTTP request received.")


def test_lone_surrogate_is_named(front: Front) -> None:
    for body in ('{"inputs":"\\ud83d"}', '{"inputs":"x","parameters":{"stop":["\\ud83d"]}}'):
        reply = front.post("/generate", body)
        assert reply.status == 400
        assert b"lone leading surrogate in hex escape at line 1 column" in reply.body


# --- the format of errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [RULES_BEFORE_ADMISSION, RULES_AFTER_ADMISSION, OPENAI_RULES, COMPLETION_RULES])
def test_param_of_a_rule_is_a_request_field(rules: list[Rule]) -> None:
    native = {*GenerateParameters.__struct_fields__, "inputs", "logit_bias", "prompt", "stop_token_ids"}
    openai = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    for rule in rules:
        if rule.param is not None:
            assert rule.param.partition(".")[0] in (
                native if rules in (RULES_BEFORE_ADMISSION, RULES_AFTER_ADMISSION) else openai
            ), rule.message
            assert f"`{rule.param}`" in rule.message or "`" not in rule.message


@pytest.mark.parametrize("shape", [ChatRequest(messages=[]), CompletionRequest(prompt="")])
def test_names_map_native_fields_to_openai_fields(shape: ChatRequest | CompletionRequest) -> None:
    native = {*GenerateParameters.__struct_fields__, "inputs"}
    assert {*shape.names} <= native
    assert {*shape.names.values()} <= {*shape.__struct_fields__}


def test_internal_error_has_the_format_of_its_route(front: Front, monkeypatch: Any) -> None:
    monkeypatch.setattr(front.router.admission, "acquire_permits", lambda count: 1 / 0)
    reply = front.post("/v1/completions", '{"prompt":"x"}')
    assert json.loads(reply.body) == openai_error(500, "internal", "Internal server error")
    reply = front.post("/generate", '{"inputs":"x"}')
    assert reply.body == b'{"error":"Internal server error","error_type":"internal"}'


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/chat", "/v1/%7Bask%7D", "/v1/%C3"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unknown_paths_below_v1(front: Front, path: str, method: str) -> None:
    reply = front.get(path, method)
    assert (reply.status, reply.headers["content-type"]) == (404, "application/json")
    error = json.loads(reply.body)
    message = error["error"]["message"]
    assert error == openai_error(404, "not_found", message)
    assert message.startswith(f"There is no route {method} /v1")
    assert front.get("/v10/x").body == b""


@pytest.mark.parametrize("end", errors.PATHS_OF_OTHERS)
def test_paths_of_other_servers_name_the_path_to_use(front: Front, end: str) -> None:
    """Also with a prefix, such as that of Azure's deployments, or /v1 twice."""
    here = errors.PATHS_OF_OTHERS[end]
    for path in (end, f"{end}/", f"/openai{end}"):
        reply = front.post(path, "{}")
        assert (reply.status, reply.headers["content-type"]) == (404, "application/json")
        message = json.loads(reply.body)["error"]["message"]
        assert json.loads(reply.body) == openai_error(404, "not_found", message)
        assert message.startswith(f"There is no route POST {path}. ")
        assert f"Use {here}" in message
    assert not here or front.get(here).status in (200, 405), "the path exists"
    twice = json.loads(front.post(f"/v1/v1{end}", "{}").body)["error"]["message"]
    anthropic = here == "/v1/messages"
    base = "the base URL of Anthropic's clients does not end" if anthropic else "the base URL of OpenAI's clients ends"
    assert not here.startswith("/v1") or f"{base} in /v1." in twice


def test_browsers_get_a_page_at_the_root_and_probes_do_not(front: Front) -> None:
    page = front.get("/", accept="text/html,*/*;q=0.8")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for accept in ("*/*", "application/json"):
        probe = front.get("/", accept=accept)
        assert (probe.status, probe.body) == (200, b"")


def test_repeated_slashes_before_v1(front: Front) -> None:
    """Clients whose base URL ends in a slash send them."""
    assert front.get("//v1/models").status == 200


def test_slashes_at_the_end_of_paths_below_v1(front: Front) -> None:
    assert front.get("/v1/models/").status == front.get("//v1/models/m//").status == 200
    assert front.post("/v1/completions/", '{"prompt":"x"}').status == 200
    assert front.post("/generate/", '{"inputs":"x"}').status == 404
    for reply in (front.get("//v1/nope"), front.post("//v1/completions", "{}"), front.get("//v1/completions")):
        assert json.loads(reply.body)["error"]["code"] == reply.status
    assert front.get("//generate").body == b""


@pytest.mark.parametrize(("value", "found"), [("true", "boolean `true`"), ("1", "integer `1`"), ("[]", "sequence")])
def test_json_schema_of_another_type(front: Front, value: str, found: str) -> None:
    reply = front.post("/v1/completions", f'{{"prompt":"x","guided_json":{value}}}')
    assert (reply.status, json.loads(reply.body)["error"]["param"]) == (422, "guided_json")
    assert f"guided_json: invalid type: {found}, expected an object or a string at" in reply.body.decode()


def test_unknown_http_method(front: Front) -> None:
    reply = front.get("/v1/completions", "LINK")
    assert json.loads(reply.body) == openai_error(400, "bad_request", "Invalid HTTP method")
    reply = front.get("/generate", "LINK")
    assert (reply.status, reply.body) == (400, b"")


def test_vertex_routes_below_v1_keep_tgis_errors(serve: Any) -> None:
    predict, health = "/v1/endpoints/1/deployedModels/2:predict", "/v1/endpoints/1/deployedModels/2"
    front = serve(up=False, aip_predict_route=predict, aip_health_route=health)
    for reply in (front.get(health), front.post(predict, '{"instances":[{"inputs":"x"}]}')):
        assert (reply.status, reply.body) == (503, b'{"error":"unhealthy","error_type":"healthcheck"}')
        assert reply.headers["x-startup-stage"] == "starting tokenizers"
    reply = front.post(predict, "{")
    assert (reply.status, reply.headers["content-type"]) == (400, "text/plain; charset=utf-8")
