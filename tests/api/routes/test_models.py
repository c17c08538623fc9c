"""GET /v1/models and /v1/models/{model}."""

import json
from typing import Any

from tests.api.conftest import Front, openai_error

MODEL = b'{"id":"m","object":"model","created":0,"owned_by":"m"}'


def test_list_of_models(front: Front) -> None:
    reply = front.get("/v1/models")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == b'{"object":"list","data":[' + MODEL + b"]}"
    assert front.get("/v1/models", "HEAD").body == b""


def test_one_model(front: Front) -> None:
    reply = front.get("/v1/models/m")
    assert (reply.status, reply.headers["content-type"], reply.body) == (200, "application/json", MODEL)


def test_an_unknown_model(front: Front) -> None:
    for path in ("/v1/models/x", "/v1/models/m/x"):
        reply = front.get(path)
        assert reply.status == 404
        assert json.loads(reply.body) == openai_error(404, "not_found", "Model not found", "model")


def test_model_names_with_slashes(serve: Any) -> None:
    front = serve(model_id="HuggingFaceTB/SmolLM2-135M-Instruct")
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB%2FSmolLM2-135M-Instruct"):
        reply = front.get(f"/v1/models/{name}")
        assert reply.status == 200
        assert reply.body.startswith(b'{"id":"HuggingFaceTB/SmolLM2-135M-Instruct"')
