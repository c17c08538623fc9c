"""The routes of SageMaker, Vertex AI and KServe."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front, two_tokens
from tgi.api import app
from tgi.api.service import Service
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import End, FinishReason, Generate
from tgi.microkernel.settings.table import Settings

SHAPE = "Failed to deserialize the JSON body into the target type: "
INCOMPLETE = b'{"error":"Incomplete generation","error_type":"Incomplete generation"}'


def ends(reason: str, message: str = "") -> Any:
    """Answers every request with this end."""
    return lambda request: [End(request.rid, reason, message)]


# --- SageMaker --------------------------------------------------------------------------------------------------------


def test_invocations_answer_as_three_routes(front: Front) -> None:
    bodies = {
        "/": '{"inputs":"x"}',
        "/v1/chat/completions": '{"messages":[{"role":"user","content":"x"}]}',
        "/v1/completions": '{"prompt":"x"}',
    }
    for path, body in bodies.items():
        for stream in ("false", "true"):
            asked = f'{body[:-1]},"stream":{stream}}}'
            mine, theirs = front.post("/invocations", asked), front.post(path, asked)
            assert mine.status == theirs.status == 200
            assert {*mine.headers} == {*theirs.headers}
            assert mine.headers["content-type"] == theirs.headers["content-type"]
            assert without_stamp(mine.body) == without_stamp(theirs.body)


def without_stamp(body: bytes) -> list[Any]:
    """The JSON of a response or of its events, without ids and times, and with the usage that TGI has."""
    parts = body.decode().split("\n\n") if body.startswith(b"data: ") else [body.decode()]
    read = [json.loads(part.removeprefix("data: ")) for part in parts if part and part != "data: [DONE]"]
    for item in read:
        if isinstance(item, dict) and item.get("usage"):
            item["usage"] = {key: item["usage"][key] for key in item["usage"] if not key.endswith("_details")}
    return [
        {k: v for k, v in item.items() if k not in ("id", "created") and (k, v) != ("usage", None)}
        if isinstance(item, dict)
        else item
        for item in read
    ]


def test_a_body_with_inputs_and_messages_is_native(front: Front) -> None:
    reply = front.post("/invocations", '{"messages":[{"role":"user","content":"x"}],"inputs":"y"}')
    assert json.loads(reply.body) == [{"generated_text": "y a"}]


@pytest.mark.parametrize("body", ["{}", '{"inputs":1}', '{"messages":[{"role":"user"}]}', '{"prompt":[]}', "[]", "1"])
def test_an_invocation_of_no_known_shape_is_rejected(front: Front, body: str) -> None:
    reply = front.post("/invocations", body)
    assert (reply.status, reply.headers["content-type"]) == (422, "text/plain; charset=utf-8")
    assert reply.body.decode() == SHAPE + "data did not match any variant of untagged enum SagemakerRequest"


def test_invocations_reject_what_every_route_rejects(front: Front) -> None:
    assert front.post("/invocations", '{"inputs":').status == 400
    assert front.post("/invocations", '{"inputs":"x"}', content_type="text/plain").status == 415
    reply = front.post("/invocations", '{"inputs":""}')
    assert (reply.status, json.loads(reply.body)["error_type"]) == (422, "validation")


# --- Vertex AI --------------------------------------------------------------------------------------------------------


def test_vertex(front: Front) -> None:
    chat = '{"messages":[{"role":"user","content":"x"}],"stream":true,"n":2}'
    reply = front.post("/vertex", f'{{"instances":[{{"inputs":"é"}},{chat},{{"inputs":"x","parameters":null}}]}}')
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == b'{"predictions":[" a"," a"," a"]}'
    assert [name for name in reply.headers if name.startswith("x-")] == ["x-request-id"]


def test_vertex_requests_reach_the_tokenizer(serve: Any) -> None:
    seen: list[Generate] = []

    def answer(request: Generate) -> list[Any]:
        seen.append(request)
        return two_tokens(request)

    front = serve(answer)
    parameters = '{"max_new_tokens":7,"seed":3,"temperature":-1,"top_k":2,"stop":["x"],"truncate":1,"best_of":2}'
    assert front.post("/vertex", f'{{"instances":[{{"inputs":"x","parameters":{parameters}}}]}}').status == 200
    (request,) = seen
    assert (request.inputs, request.max_new_tokens, request.stop_strings, request.truncate) == ("x", 7, [], None)
    assert (request.sampling.seed, request.sampling.do_sample, request.sampling.top_k) == (3, True, 0)


def test_predictions_are_in_the_order_of_the_instances(serve: Any) -> None:
    waiting: list[Generate] = []

    def answer(request: Generate) -> list[Any]:
        """Answers both requests at once, the later one first."""
        waiting.append(request)
        if len(waiting) < 2:
            return []
        return [
            m._replace(text=r.inputs) if isinstance(m, End) else m for r in reversed(waiting) for m in two_tokens(r)
        ]

    reply = serve(answer).post("/vertex", '{"instances":[{"inputs":"one"},{"inputs":"two"}]}')
    assert reply.body == b'{"predictions":["one","two"]}'


def test_vertex_without_instances(front: Front) -> None:
    reply = front.post("/vertex", '{"instances":[]}')
    assert reply.status == 422
    assert reply.body == b'{"error":"Input validation error","error_type":"Input validation error"}'


def test_an_instance_of_no_known_shape_is_rejected(front: Front) -> None:
    for wrong in ("{}", "1", '{"inputs":1}', '{"messages":[{"role":"user"}]}', '{"inputs":"x","parameters":[]}'):
        reply = front.post("/vertex", f'{{"instances":[{{"inputs":"x"}},{wrong}]}}')
        assert reply.status == 422
        assert reply.body.decode() == (
            SHAPE + "instances[1]: data did not match any variant of untagged enum VertexInstance"
        )
    assert front.post("/vertex", '{"instances":1}').body.decode().startswith(SHAPE + "instances: invalid type")
    assert front.post("/vertex", "{}").body.decode().startswith(SHAPE + "missing field `instances`")
    assert front.post("/vertex", '{"instances":[{]}').status == 400


TEMPLATE = b'{"error":"Template error: no","error_type":"template_error"}'


@pytest.mark.parametrize(
    ("reason", "status", "body"),
    [
        (FinishReason.FAILED, 500, INCOMPLETE),
        (FinishReason.CANCELLED, 500, INCOMPLETE),
        (FinishReason.TEMPLATE, 422, TEMPLATE),
    ],
)
def test_failures_of_vertex(serve: Any, reason: FinishReason, status: int, body: bytes) -> None:
    reply = serve(ends(reason, "no")).post("/vertex", '{"instances":[{"inputs":"x"},{"inputs":"y"}]}')
    assert (reply.status, reply.body) == (status, body)


def test_vertex_acquires_a_permit_for_each_instance(serve: Any) -> None:
    front = serve(lambda request: None, max_concurrent_requests=2)
    two = '{"instances":[{"inputs":"x"},{"inputs":"y"}]}'
    body = b'{"inputs":"x"}'
    head = (
        f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with front.connect() as waiting:
        waiting.sendall(head.encode() + body)
        front.tokenizers[0].next(Generate)
        assert front.post("/vertex", two).status == 429
    three = front.post("/vertex", '{"instances":[{"inputs":"x"},{"inputs":"y"},{"inputs":"z"}]}')
    assert three.status == 422
    assert b"at most 2 texts can be generated at once. Given: 3" in three.body


def test_configured_vertex_paths(serve: Any) -> None:
    predict = "/v1/endpoints/1/deployedModels/2:predict"
    front = serve(aip_predict_route=predict, aip_health_route="/up", api_key=("secret",))
    assert front.get("/up").status == front.get("/up", "HEAD").status == 200
    assert front.post(predict, '{"instances":[{"inputs":"x"}]}').body == b'{"predictions":[" a"]}'
    assert front.post("/vertex", '{"instances":[{"inputs":"x"}]}').status == 401


def test_configured_vertex_paths_may_be_the_existing_ones(serve: Any) -> None:
    front = serve(aip_predict_route="/vertex", aip_health_route="/")
    assert front.get("/").status == 200
    assert front.post("/", '{"inputs":"x"}').status == 200
    assert front.post("/vertex", '{"instances":[{"inputs":"x"}]}').status == 200


@pytest.mark.parametrize(
    "routes", [{"aip_predict_route": "/generate"}, {"aip_health_route": "/info"}, {"aip_health_route": "up"}]
)
def test_configured_vertex_paths_that_are_in_use_or_invalid_are_rejected(front: Front, routes: dict[str, str]) -> None:
    service = Service(Settings(**routes), front.router, "m", "", front.service.run_dir)
    with pytest.raises(UserError, match="AIP_"):
        app.build(service)


# --- KServe -----------------------------------------------------------------------------------------------------------

INFER = "/v2/models/m/versions/1/infer"


def asked(*texts: bytes, outputs: int | None = None, **more: Any) -> str:
    """An inference request."""
    inputs = [{"name": "i", "shape": [1, len(text)], "datatype": "BYTES", "data": list(text)} for text in texts]
    names = [{"name": f"o{index}"} for index in range(len(texts) if outputs is None else outputs)]
    return json.dumps({"id": "7", "inputs": inputs, "outputs": names, **more})


def test_kserve_is_off_by_default(front: Front) -> None:
    assert (
        front.get("/v2").status == front.get("/v2/health/live").status == front.post(INFER, asked(b"x")).status == 404
    )


def test_kserve_metadata(serve: Any) -> None:
    front = serve(kserve=True)
    metadata = front.get("/v2")
    told = b'{"name":"text-generation-inference","version":"3.3.6","extensions":["health","models","metrics"]}'
    assert metadata.body == told
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/a/versions/2/ready"):
        reply = front.get(path)
        assert (reply.status, reply.headers["content-type"], reply.body) == (200, "application/json", b'{"live":true}')
        assert front.get(path, "HEAD").status == 200
    reply = front.get("/v2/models/a/versions/2")
    assert reply.body == b'{"name":"a","version":"2","extensions":["infer","ready"]}'
    assert "/v2/health/live" in json.loads(front.get("/api-doc/openapi.json").body)["paths"]


def test_kserve_inference(serve: Any) -> None:
    seen: list[Generate] = []

    def answer(request: Generate) -> list[Any]:
        seen.append(request)
        return two_tokens(request)

    front = serve(answer, kserve=True)
    reply = front.post(INFER, asked("é".encode(), b"x"))
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    output = '{{"name":"{}","shape":[1,2],"datatype":"BYTES","data":[32,97]}}'
    assert reply.body.decode() == f'{{"id":"7","outputs":[{output.format("o0")},{output.format("o1")}]}}'
    assert [request.inputs for request in seen] == ["é", "x"]
    assert all(request.sampling.do_sample for request in seen)
    full = front.post(INFER, asked(b"x", parameters={"return_full_text": True, "best_of": 2, "do_sample": True}))
    assert json.loads(full.body)["outputs"][0]["data"] == [*b"x a"]
    assert front.post(INFER, asked()).body == b'{"id":"7","outputs":[]}'


def test_kserve_rejections(serve: Any) -> None:
    front = serve(kserve=True)
    reply = front.post(INFER, asked(b"x", outputs=2))
    mismatch = b'{"error":"Inputs and outputs length mismatch","error_type":"length mismatch"}'
    assert (reply.status, reply.body) == (422, mismatch)
    reply = front.post(INFER, asked(b"ab\xff"))
    assert reply.status == 422
    assert json.loads(reply.body) == {
        "error": "invalid utf-8 sequence of 1 bytes from index 2",
        "error_type": "utf8",
    }
    reply = front.post(INFER, asked(b"x").replace("[120]", "[300]"))
    assert reply.status == 422
    assert b"inputs[0].data[0]: invalid value: integer `300`, expected u8" in reply.body


def test_failures_of_kserve(serve: Any) -> None:
    reply = serve(ends(FinishReason.FAILED), kserve=True).post(INFER, asked(b"x"))
    assert (reply.status, reply.body) == (500, INCOMPLETE)
