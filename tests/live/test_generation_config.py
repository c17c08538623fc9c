"""A model's generation_config.json through a whole server: it sets the defaults of /v1; native routes have TGI's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import Server
from tests.models import model

pytestmark = pytest.mark.live

QWEN3: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
TGI: dict[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1}
PROMPT = "The capital of France is"


def chat(server: Server, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": PROMPT}], "seed": 7, "max_tokens": 24, **fields}
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def complete(server: Server, **fields: Any) -> str:
    answer = server.client.post("/v1/completions", json={"prompt": PROMPT, "seed": 7, "max_tokens": 24, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def native(server: Server, **parameters: Any) -> str:
    return str(server.generate(PROMPT, seed=7, do_sample=True, max_new_tokens=24, **parameters)["generated_text"])


def test_generation_config_sets_the_sampling_defaults_of_v1(tmp_path: Path) -> None:
    directory = shutil.copytree(model("llama"), tmp_path / "model")
    config = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps(config | {"do_sample": True, **QWEN3}))
    arguments = ("--model-id", str(directory), "--dtype", "float32", "--validation-workers", "1")
    with Server(tmp_path / "run", *arguments) as server:
        server.start().wait_until_ready()
        assert server.client.get("/info").json()["generation_config"] == QWEN3
        with_defaults_of_model, with_defaults_of_tgi = chat(server, **QWEN3), chat(server, **TGI)
        assert with_defaults_of_model != with_defaults_of_tgi
        assert chat(server) == chat(server, top_p=None, temperature=None) == with_defaults_of_model
        assert complete(server) == complete(server, **QWEN3) == native(server, **QWEN3)
        assert complete(server, **TGI) == native(server)
        assert chat(server, temperature=0) == chat(server, **TGI | {"temperature": 0})
        server.kill("tokenizer-0")
        assert chat(server) == with_defaults_of_model
        server.kill("api-0")
        server.wait_until(server.is_healthy, "the new front end is ready")
        assert chat(server) == with_defaults_of_model
    with Server(tmp_path / "run", *arguments, env={"TGI_GENERATION_CONFIG": "tgi"}) as server:
        server.start().wait_until_ready()
        assert server.client.get("/info").json()["generation_config"] == {}
        assert chat(server) == chat(server, **TGI) == with_defaults_of_tgi
        assert chat(server, **QWEN3) == with_defaults_of_model
