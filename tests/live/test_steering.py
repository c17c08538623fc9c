"""OpenAI's penalties and biases through a whole tree, with a real model: they hold, and go on counting after a loss."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.live.server import Server
from tests.models import model

PENALTIES: dict[str, Any] = {
    "frequency_penalty": 0.4,
    "presence_penalty": 0.6,
    "typical_p": 0.9,
    "temperature": 0.8,
    "seed": 5,
}
BODY: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 60, "logprobs": 0}


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """The logprobs of one completion: its tokens and their probabilities."""
    answer = server.client.post("/v1/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]  # type: ignore[no-any-return]


def stream(server: Server, act: Callable[[], Any], after: int, **fields: Any) -> dict[str, Any]:
    """The same streamed; `act` is called beside it once `after` tokens have come."""
    tokens: list[str] = []
    logprobs: list[float] = []
    acting = threading.Thread(target=act)
    with server.client.stream("POST", "/v1/completions", json=BODY | fields | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                tokens += choices[0]["logprobs"]["tokens"]
                logprobs += choices[0]["logprobs"]["token_logprobs"]
                if len(tokens) == after:
                    acting.start()
    acting.join()
    return {"tokens": tokens, "token_logprobs": logprobs}


def test_they_hold_and_survive_losses(tmp_path: Path) -> None:
    arguments = ("--model-id", str(model("llama")), "--dtype", "bfloat16", "--validation-workers", "1")
    with Server(tmp_path / "run", *arguments) as server:
        server.start().ready()
        (likeliest,) = server.generate(BODY["prompt"], max_new_tokens=1)["details"]["tokens"]
        fields = {**PENALTIES, "logit_bias": {str(likeliest["id"]): 1.5}}
        want = complete(server, **fields)
        assert want["tokens"] != complete(server, seed=PENALTIES["seed"])["tokens"]
        for victim in ("worker-0", "tokenizer-0"):
            got = stream(server, lambda name=victim: server.kill(name), 15, **fields)
            assert (got["tokens"], got["token_logprobs"]) == (want["tokens"], want["token_logprobs"]), victim
        banned = complete(server, temperature=0, logit_bias={str(likeliest["id"]): -100}, max_tokens=1)
        assert banned["tokens"] != [likeliest["text"]]
        forced = complete(server, temperature=2, logit_bias={str(likeliest["id"]): 100}, max_tokens=5)
        assert forced["tokens"] == [likeliest["text"]] * 5
