"""Arbitrary bodies on every route that has one: always a documented response, never a 500 or none."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from inspect import get_annotations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.bodies import NUMBER, WORDS, anything, nearly, right, with_long_list, with_number, written_with
from tests.api.conftest import Front, Reply, openai_error, request, standard
from tgi.api.errors import REJECTION_TYPES
from tgi.api.operations import KSERVE, OPERATIONS
from tgi.api.shapes import cloud
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.shapes.native import CompatGenerateRequest
from tgi.microkernel.settings.table import Settings

pytestmark = pytest.mark.fuzz

ROUTES: dict[str, type[msgspec.Struct]] = {
    operation.path.format(model="m", version="1", conversation_id="conv_0"): operation.request
    for operation in OPERATIONS + KSERVE
    if operation.request is not None
}
# The alternatives of the two routes with untagged bodies.
SAGEMAKER = (CompatGenerateRequest, ChatRequest, CompletionRequest)
VERTEX = (cloud.GenerateVertexInstance, ChatRequest)
# 429: more generations than free permits. 404: an unknown adapter to unload.
DOCUMENTED = {200, 400, 404, 413, 422, 429}
ERROR_TYPES = {
    400: set(),
    404: {"not_found"},
    413: set(),
    422: {
        "validation", "template_error", "tool_error", "suffix not supported", "batch size exceeded", "utf8",
        "length mismatch", "Input validation error",
    },
    429: {"overloaded"},
}  # fmt: skip
ANTHROPIC_TYPES = {
    400: {"invalid_request_error"},
    404: {"not_found_error"},
    413: {"request_too_large"},
    429: {"rate_limit_error"},
}
KSERVE_INFER = "/v2/models/m/versions/1/infer"
DEEP = 10_000
MEGABYTES = "é" * 1_000_000

# Of each of some two hundred tests; TGI_FUZZ_EXAMPLES asks for more.
EXAMPLES = int(os.environ.get("TGI_FUZZ_EXAMPLES", "12"))
unhurried = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
quick = settings(suppress_health_check=unhurried, max_examples=EXAMPLES)
on_each_route = pytest.mark.parametrize("path", ROUTES)
# The first route of each request type: fields are decoded and checked by the type, whatever the route.
FIRST_ROUTES = {kind: path for path, kind in reversed(ROUTES.items())}.values()
on_each_type = pytest.mark.parametrize("path", FIRST_ROUTES)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    """A front end with all routes. It must still answer after all tests."""
    with tempfile.TemporaryDirectory(prefix="tgi") as folder:
        every = Settings(validation_workers=1, hostname="127.0.0.1", kserve=True, allow_adapter_updates=True)
        front = Front(every, Path(folder), standard)
        front.start()
        front.tokenizers[0].start()
        front.until_ready()
        yield front
        assert front.get("/health").status == 200
        assert front.post("/generate", '{"inputs":"a"}').status == 200
        assert front.router.in_flight == 0
        front.stop()


def bodies(path: str, make: Callable[[Any], st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """The bodies that `make` creates for the request type of a route."""
    shape: Any = ROUTES[path]
    if shape is cloud.SagemakerRequest:
        return st.one_of([make(one) for one in SAGEMAKER])
    if shape is cloud.VertexRequest:
        return st.fixed_dictionaries({"instances": st.lists(st.one_of([make(one) for one in VERTEX]), max_size=3)})
    return make(shape)


def check_response(path: str, reply: Reply) -> None:
    """Checks a response, which conforms to the document (Front.post). An error is text or JSON of a known type; below
    /v1 it always has OpenAI's format, below /v1/messages Anthropic's."""
    assert reply.status in DOCUMENTED, reply.body
    if reply.status == 200:
        return
    if path.startswith("/v1/messages"):
        body = json.loads(reply.body)
        assert body["type"] == "error"
        assert body["error"]["type"] in ANTHROPIC_TYPES[reply.status]
        assert body["error"]["message"]
        assert body["request_id"] == reply.headers["x-request-id"]
    elif path.startswith("/v1/"):
        body = json.loads(reply.body)
        error = body["error"]
        assert body == openai_error(reply.status, body["error_type"], error["message"], error["param"])
        assert error["message"]
        assert body["error_type"] in ERROR_TYPES[reply.status] | {REJECTION_TYPES.get(reply.status)}
    elif reply.headers["content-type"] == "application/json":
        assert json.loads(reply.body)["error_type"] in ERROR_TYPES[reply.status]
    else:
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert reply.body


def written(body: Any) -> bytes:
    """JSON with NaN and Infinity. Lone surrogates are sometimes escaped, sometimes not."""
    escaped = json.dumps(body)
    return json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass") if len(escaped) % 2 else escaped.encode()


@on_each_route
def test_arbitrary_json(front: Front, path: str) -> None:
    @quick
    @given(anything)
    def sent(body: Any) -> None:
        check_response(path, front.post(path, written(body)))

    sent()


@on_each_route
def test_bodies_of_the_right_shape(front: Front, path: str) -> None:
    check_bodies(front, path, right)


@on_each_type
def test_bodies_of_nearly_the_right_shape(front: Front, path: str) -> None:
    check_bodies(front, path, nearly)


def check_bodies(front: Front, path: str, make: Callable[[Any], st.SearchStrategy[Any]]) -> None:
    @quick
    @given(bodies(path, make))
    def sent(body: Any) -> None:
        check_response(path, front.post(path, written(body)))

    sent()


@on_each_route
def test_arbitrary_bytes(front: Front, path: str) -> None:
    @quick
    @given(st.binary(max_size=40) | st.text(alphabet='{}[]",:0e1-\\u ainpt', max_size=40).map(str.encode))
    def sent(body: bytes) -> None:
        check_response(path, front.post(path, body))

    sent()


def declared(path: str) -> set[tuple[str, str]]:
    """The fields of a route's body, each with the class that declares it."""
    shape: Any = ROUTES[path]
    return {
        (name, next(base.__qualname__ for base in one.__mro__[::-1] if name in get_annotations(base)))
        for one in (SAGEMAKER if shape is cloud.SagemakerRequest else [shape])
        for name in one.__struct_fields__
    }


def first_fields(paths: Iterable[str]) -> dict[str, list[str]]:
    """Of each route the fields that no body of a route before it has from the same class."""
    seen: set[tuple[str, str]] = set()
    found = {}
    for path in paths:
        found[path] = sorted({name for name, _ in declared(path) - seen})
        seen |= declared(path)
    return found


FIRST_FIELDS = first_fields([*FIRST_ROUTES][::-1])

# No JSON, and further forms of the same types.
VARIANTS = [
    "[" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "NaN", "-Infinity", "01", "0x10",
    '"\\udc00\\ud800"', '"\x01"', '"\\x"',
    "[" + "0," * 5000 + "0]", "-" + "9" * 5000, "1e-99999", *map(json.dumps, WORDS),
]  # fmt: skip
VALUES = [
    "[" * DEEP + "]" * DEEP, "[[[]]]", "[]", "{}", "null", "9" * 5000, "1e99999", "0." + "1" * 5000, '"\\ud800"', '""',
    '"\\u0000"', "[" + '{"role":"user","content":"a"},' * 1000 + '{"role":"user","content":"a"}]',
]  # fmt: skip


@on_each_type
def test_extreme_values_of_each_field(front: Front, path: str) -> None:
    """As the value of each field, with the first type that has it, and of unknown fields."""
    right = '"inputs":"a","messages":[],"prompt":"a","instances":[],"id":"","outputs":[]'
    everywhere = [*FIRST_FIELDS[path], "__proto__", ""]
    # What is no JSON is found before the type of a field matters: in a few places.
    for places, extremes in ((everywhere, VALUES), ([min(declared(path))[0], ""], VARIANTS)):
        for name in places:
            for number, extreme in enumerate(extremes):
                fields = [f'"{name}":{extreme}', right]
                check_response(path, front.post(path, f"{{{','.join(fields[:: 1 if number % 2 else -1])}}}"))


# The limits of int32, uint32, int64 and uint64, or one beyond, and decimals that no float holds.
EXTREMES = [
    *map(str, (2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**63 - 1, 2**63, -(2**63) - 1, 2**64)),
    "0", "-1", "4.0", "1e308", "9" * 5000, "-" + "9" * 5000, "0." + "1" * 5000, "1e99999",
]  # fmt: skip
LONG_EXTREMES = [number for number in EXTREMES if len(number) > 1000 or number == "1e99999"]
# Of the front end's thread, for one request: whatever it has more than this is missing to all others.
MAX_CPU_SECONDS = 2
LONG = 20_000


class CpuClock:
    """The processor time that a front end takes for each request."""

    def __init__(self, front: Front) -> None:
        self._clock = time.pthread_getcpuclockid(front.thread_id)
        self._before = self._now()

    def _now(self) -> float:
        return time.clock_gettime(self._clock)

    def check(self, case: object) -> None:
        """Fails if it took too much since the last call."""
        before, self._before = self._before, self._now()
        assert self._before - before < MAX_CPU_SECONDS, str(case)[:500]


def numbered(path: str) -> Iterator[tuple[Any, str]]:
    """Bodies of a route with a number in each place of one, and for each name of a map that may be a number; and the
    member with the number, which bodies of other types may have, too."""
    kinds = {cloud.SagemakerRequest: SAGEMAKER, cloud.VertexRequest: VERTEX}.get(ROUTES[path], (ROUTES[path],))
    for kind in kinds:
        for body in with_number(msgspec.inspect.type_info(kind)):
            member = next(item for item in body.items() if NUMBER in json.dumps(item))
            yield {"instances": [body]} if ROUTES[path] is cloud.VertexRequest else body, json.dumps(member)


# By member, one of the routes that have it.
FIRST_NUMBERS = {member: path for path in FIRST_ROUTES for _, member in numbered(path)}


@on_each_type
def test_a_number_costs_nothing_before_its_limit_is_checked(front: Front, path: str) -> None:
    """All extremes in one of the types that have the member, the long ones in all."""
    clock = CpuClock(front)
    for body, member in numbered(path):
        for number in EXTREMES if FIRST_NUMBERS[member] == path else LONG_EXTREMES:
            text = written_with(body, number)
            check_response(path, front.post(path, text))
            clock.check(text)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions", KSERVE_INFER])
def test_a_long_list_costs_no_more_than_reading_it(front: Front, path: str) -> None:
    """In each place of a list or a map, of right items, and with a wrong item at its end."""
    clock = CpuClock(front)
    for body in with_long_list(msgspec.inspect.type_info(ROUTES[path]), LONG):
        check_response(path, front.post(path, json.dumps(body)))
        clock.check(body)


@pytest.mark.parametrize(
    "value",
    ["0." + "1" * LONG * 4, "-" + "1" * LONG * 4 + ".5", '4.5,"a":"' + '\\"' * LONG * 4],
    ids=["digits", "whole", "text"],
)
def test_a_long_decimal_or_open_string_is_read_once(front: Front, value: str) -> None:
    """Where an integer is expected: `4.0` is accepted, so decimals are looked for in the body."""
    clock = CpuClock(front)
    reply = front.post("/generate", f'{{"inputs":"a","parameters":{{"seed":{value}}}}}')
    assert reply.status in (400, 422)
    clock.check(value)


@pytest.mark.parametrize("instance", [{"inputs": "a"}, {"messages": []}, 1])
def test_many_instances_are_not_decoded(front: Front, instance: Any) -> None:
    clock = CpuClock(front)
    reply = front.post("/vertex", json.dumps({"instances": [instance] * LONG * 5}))
    assert (reply.status, b"at most 128 texts" in reply.body) == (422, True)
    clock.check(instance)


@pytest.mark.parametrize("name", ["x-request-timeout", "last-event-id", "x-request-id", "traceparent", "authorization"])
def test_numbers_in_headers(front: Front, name: str) -> None:
    clock = CpuClock(front)
    for number in [*EXTREMES, "nan", "inf", "1_0"]:
        for path, body in (("/generate_stream", '{"inputs":"a"}'), ("/v1/completions", '{"prompt":"a"}')):
            reply = front.post(path, body, **{name.replace("-", "_"): number})
            check_response(path, reply)
            clock.check(number)


@pytest.mark.parametrize("number", [*EXTREMES, hex(2**63)[2:], "f" * 5000])
def test_numbers_in_the_framing(front: Front, number: str) -> None:
    """As Content-Length and as the length of a chunk: the client sends less and leaves."""
    clock = CpuClock(front)
    for length, content in (("content-length", b"{"), ("transfer-encoding", number.encode() + b"\r\n{")):
        fields = {"content-type": "application/json", length: number if length == "content-length" else "chunked"}
        with front.connect() as connection:
            connection.sendall(request("POST", "/generate", content, fields))
        assert front.get("/health").status == 200
        clock.check(number)


@on_each_route
def test_bodies_around_the_size_limit(front: Front, path: str) -> None:
    """Just under and just over the limit."""
    for text in (MEGABYTES[:-200], MEGABYTES):
        value = json.dumps(text, ensure_ascii=False)
        if text is not MEGABYTES:
            for name in ("inputs", "prompt", "unknown", "id"):
                check_response(path, front.post(path, f'{{"{name}":{value}}}'))
        reply = front.post(path, f'{{"messages":[{{"role":"user","content":{value}}}]}}')
        check_response(path, reply)
        assert (reply.status == 413) == (len(text) > len(MEGABYTES) - 20)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat_tokenize", "/invocations", "/vertex"])
def test_deep_values_of_chats(front: Front, path: str) -> None:
    """Schemas, arguments and template variables may be any JSON, nested as deeply as the parser allows."""
    for depth in (10, 300, 900, 1100, DEEP):
        deep = "[" * depth + "]" * depth
        for field in (
            f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{deep}}}}}]',
            f'"chat_template_kwargs":{{"a":{deep}}}',
            f'"response_format":{{"type":"json_object","value":{deep}}}',
            f'"unknown":{deep}',
        ):
            chat = f'{{"messages":[{{"role":"user","content":"a"}}],{field}}}'
            check_response(path, front.post(path, f'{{"instances":[{chat}]}}' if path == "/vertex" else chat))
