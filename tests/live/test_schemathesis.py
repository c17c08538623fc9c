"""schemathesis generates requests from the OpenAPI document of a running server; every answer is validated against it.

The same few requests are generated each time. For many others:

    TGI_FUZZ_EXAMPLES=2000 .venv/bin/pytest --timeout=0 tests/live/test_schemathesis.py
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, negative_data_rejection

from tests.api.conformance import conforms
from tests.live.server import Server
from tgi.api.json_body import SHAPE
from tgi.api.operations import KSERVE, OPERATIONS, Operation

pytestmark = pytest.mark.live

EXAMPLES = int(os.environ.get("TGI_FUZZ_EXAMPLES", "0"))
ANSWER_TIMEOUT_SECONDS = 30
# Few bodies limit their tokens, so the context is short.
SHORT = (
    "--worker",
    "scripted",
    "--kserve",
    "--max-total-tokens",
    "64",
    "--validation-workers",
    "1",
    "--allow-adapter-updates",
)
KEY = "a secret"
WRONG_KEYS = [None, "", KEY, "Bearer", f"Basic {KEY}", f"Bearer x{KEY}", f"Bearer {KEY}!", f"Bearer {KEY.upper()}"]
ALL = {operation.id: operation for operation in OPERATIONS + KSERVE}
# The document that TGI's own program writes, from which clients are made.
TGI = json.loads((Path(__file__).parents[1] / "api" / "openapi-tgi.json").read_text())
POSTS = {name: operation for name, operation in ALL.items() if operation.request is not None}
# These operations validate the shape of parameters and only some values, as TGI does.
LENIENT = {"tokenize", "get_chat_tokenize", "vertex_compatibility", "kserve_infer"}

Schema, Case, Response = Any, Any, Any  # types of schemathesis
Check = Callable[[Any, Response, Case], bool | None]


def load_schema(server: Server, change: Callable[[Operation, dict[str, Any]], None] | None = None) -> Schema:
    """The server's document as a schema of schemathesis; `change` may modify each described operation."""
    document = server.client.get("/api-doc/openapi.json").json()
    for operation in ALL.values() if change else ():
        change(operation, document["paths"][operation.path][operation.method])
    return schema_of(document, server)


def schema_of(document: dict[str, Any], server: Server) -> Schema:
    """A document as a schema of schemathesis that sends to the server."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    schema.config.max_stream_events = None
    return schema


def path_of(operation: Operation) -> str:
    """Its path with an id in the place of each parameter."""
    return re.sub(r"\{\w+\}", "1", operation.path.replace("{model}", "m"))


def in_tgis_document(operation: Operation) -> bool:
    return operation.method in TGI["paths"].get(operation.path, {})


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("fuzz") / "run", "--model-id", str(tiny_llama), *SHORT) as server:
        before = pids(server.start().wait_until_ready())
        yield server
        assert pids(server) == before  # no request has cost a process


def pids(server: Server) -> dict[str, int]:
    return {name: process.pid for name, process in server.processes("ready").items()}


@pytest.fixture(scope="module")
def schema(server: Server) -> Schema:
    return load_schema(server)


def send(schema: Schema, operation: Operation, mode: GenerationMode, count: int, *wanted: Check, **call: Any) -> None:
    """Sends TGI_FUZZ_EXAMPLES or else `count` generated requests of an operation and checks the answers."""

    @settings(
        max_examples=EXAMPLES or count, derandomize=not EXAMPLES, database=None,
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(case=schema[operation.path][operation.method.upper()].as_strategy(generation_mode=mode))
    def sent(case: Case) -> None:
        if mode == GenerationMode.POSITIVE:
            case.body = without_ambiguities(case.body)
        case.call_and_validate(
            checks=[not_a_server_error, as_documented, *wanted], timeout=ANSWER_TIMEOUT_SECONDS, **call
        )

    sent()


def without_ambiguities(value: Any) -> Any:
    """The body without what a schema cannot express: 1.0 is an integer in JSON Schema and a float for TGI's parser, and
    only one of two names of a field may be present."""
    if isinstance(value, dict):
        both = {"max_tokens", "max_completion_tokens"} <= value.keys()
        return {name: without_ambiguities(member) for name, member in value.items() if not both or name != "max_tokens"}
    if isinstance(value, list):
        return [without_ambiguities(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**64 else value


class Answer:
    """A response in the form that `conforms` expects."""

    def __init__(self, response: Response) -> None:
        self.status = response.status_code
        self.headers = {name.lower(): values[0] for name, values in response.headers.items()}
        self.body = response.content


def as_documented(ctx: Any, response: Response, case: Case) -> None:
    """Status, media type and body, or the data of each event, are those of the document."""
    conforms(f"{case.method} {case.operation.path} HTTP/1.1\r\n".encode(), Answer(response), with_kserve=True)


def has_no_shape_error(ctx: Any, response: Response, case: Case) -> None:
    """A documented request may be rejected because of a rule or a limit, but not because of its shape."""
    invalid = 400 if case.operation.path.startswith("/v1/messages") else 422
    assert response.status_code in (200, 404, invalid)
    if response.status_code == invalid:
        assert response.headers["content-type"] == ["application/json"], response.content
        assert SHAPE not in response.text


@pytest.mark.parametrize("name", ALL)
def test_documented_requests(schema: Schema, name: str) -> None:
    send(schema, ALL[name], GenerationMode.POSITIVE, 3, has_no_shape_error)


@pytest.fixture(scope="module")
def tgi_schema(server: Server) -> Schema:
    return schema_of(as_openapi_3_0(TGI), server)


def as_openapi_3_0(schema: Any) -> Any:
    """TGI's document in the version that it names: there a bound is exclusive by a boolean next to it."""
    if isinstance(schema, list):
        return [as_openapi_3_0(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: as_openapi_3_0(member) for name, member in schema.items()}
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.title()}"
        if type(changed.get(exclusive)) in (int, float):
            changed |= {bound: changed[exclusive], exclusive: True}
    return changed


@pytest.mark.parametrize("name", [name for name, operation in ALL.items() if in_tgis_document(operation)])
def test_requests_of_tgis_own_document(tgi_schema: Schema, name: str) -> None:
    """It leaves out limits that TGI has: a 422 is an answer, also because of a shape."""
    send(tgi_schema, ALL[name], GenerationMode.POSITIVE, 5)


@pytest.mark.parametrize("name", POSTS)
def test_undocumented_requests(schema: Schema, name: str) -> None:
    send(schema, ALL[name], GenerationMode.NEGATIVE, 4, *(() if name in LENIENT else (negative_data_rejection,)))


def test_other_methods_give_405_on_all_paths(server: Server) -> None:
    paths: dict[str, set[str]] = {}
    for operation in ALL.values():
        paths.setdefault(path_of(operation), set()).add(operation.method.upper())
    for path, allowed in paths.items():
        allowed |= {"HEAD"} if "GET" in allowed else set()
        for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND", "QUERY"} - allowed:
            answer = server.client.request(method, path, json={"inputs": "Hello"})
            assert answer.status_code == 405, f"{method} {path}"
            assert_error_body(path, method, answer, "method_not_allowed")
            assert {*answer.headers["allow"].split(",")} == allowed, f"{method} {path}"


@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "application/xml", "application/x-www-form-urlencoded", "json"]
)
def test_other_content_types_give_415_on_all_paths(server: Server, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    for operation in POSTS.values():
        path = path_of(operation)
        answer = server.client.post(path, content=json.dumps({"inputs": "Hello"}), headers=headers)
        assert answer.status_code == 415, path
        if path.startswith("/v1/"):
            assert_error_body(path, "POST", answer, "unsupported_media_type")


def test_operations_that_require_a_key_reject_requests_without_it(tiny_llama: Path, tmp_path: Path) -> None:
    def require_key(operation: Operation, described: dict[str, Any]) -> None:
        if operation.requires_key:
            described["security"].remove({})  # the document allows for servers without keys

    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SHORT, "--api-key", KEY) as server:
        schema = load_schema(server.start().wait_until_ready(), require_key)
        for operation in ALL.values():
            headers = {"Authorization": f"Bearer {KEY}"} if operation.requires_key else {}
            send(schema, operation, GenerationMode.POSITIVE, 1, ignored_auth, is_authorized, headers=headers)
        for path in (path_of(operation) for operation in POSTS.values()):
            for key in WRONG_KEYS:
                answer = server.client.post(path, json={}, headers={"authorization": key} if key is not None else {})
                assert answer.status_code == 401, f"{path} with {key!r}"
                assert_error_body(path, "POST", answer, "unauthorized")


def assert_error_body(path: str, method: str, answer: httpx.Response, kind: str) -> None:
    """These errors have no body on TGI's routes, and OpenAI's error object on routes below /v1, or Anthropic's."""
    if path.startswith("/v1/messages") and method != "HEAD":
        kinds = {"unauthorized": "authentication_error"}
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", kinds.get(kind, "invalid_request_error"))
        return
    if method == "HEAD" or not path.startswith("/v1/"):
        assert answer.content == b"", f"{method} {path}"
        return
    body = answer.json()
    error = {"message": body["error"]["message"], "type": kind, "param": None, "code": answer.status_code}
    assert body == {"error": error, "error_type": kind}, f"{method} {path}"


def is_authorized(ctx: Any, response: Response, case: Case) -> None:
    """Requests with the key, and of operations without one, are not answered with 401."""
    assert response.status_code != 401
