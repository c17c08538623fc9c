"""The command `llm`, with this server in its extra-openai-models.yaml: prompts, conversations, tools, schemas."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from llm.cli import cli

from tests.clients.served import GUARDED_URL, KEY, RESULT, call, script

MODELS = [
    {
        "model_id": model,
        "model_name": "local",
        "api_base": f"{GUARDED_URL}/v1",
        "api_key_name": "tgi",
        "supports_tools": True,
        "supports_schema": True,
        **more,
    }
    for model, more in {"chat": {}, "whole": {"can_stream": False}}.items()
]
FUNCTION = (
    'def weather(city: str, days: int = 1) -> str:\n    "The weather"\n    return f"sunny in {city}, {days} days"'
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llm")
    (directory / "extra-openai-models.yaml").write_text(json.dumps(MODELS))  # JSON is YAML
    (directory / "keys.json").write_text(json.dumps({"tgi": KEY}))
    return directory


def llm(home: Path, *arguments: str) -> str:
    """What the command prints. It runs in this process: its imports take a second."""
    done = CliRunner().invoke(cli, arguments, env={"LLM_USER_PATH": str(home)}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return str(done.stdout).strip()


def test_prompt_and_conversation(home: Path) -> None:
    assert llm(home, "-m", "chat", "-s", "Be brief.", "-o", "temperature", "0.5", script("Hello.", RESULT)) == "Hello."
    assert llm(home, "-c", "And you?") == "And you?"


@pytest.mark.parametrize("model", ["chat", "whole"])
def test_tools(home: Path, model: str) -> None:
    told = script(call("weather", city="Paris", days=2), f"It is {RESULT}.")
    assert llm(home, "-m", model, "--functions", FUNCTION, told) == "It is sunny in Paris, 2 days."


def test_schema(home: Path) -> None:
    written = '{"name": "Rex", "age": 3}'
    assert llm(home, "-m", "chat", "--schema", "name, age int", script(written)) == written
