"""LiteLLM's proxy, with a client in front of it: run by agents.py in the environment of the proxy.

    python through_litellm.py CONFIG PROMPT FILE

For each protocol, whole and streamed, a request with a tool must give its call, and one without tools a text. Writes
the content that all calls have to FILE, and prints the text.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

SCHEMA = {"type": "object", "properties": {"content": {"type": "string"}}, "required": ["content"]}
ABOUT = {"name": "write", "description": "Writes a file"}
FUNCTION = {**ABOUT, "parameters": SCHEMA}
# The path, what holds the prompt besides the model, and the tool.
PROTOCOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("messages", {"type": "function", "function": FUNCTION}),
    "/v1/responses": ("input", {"type": "function", **FUNCTION}),
    "/v1/messages": ("messages", {**ABOUT, "input_schema": SCHEMA}),
}


def found(path: str, answer: Any) -> tuple[str, str]:
    """The text and the arguments of the calls in a whole answer, or in an event of a stream."""
    if path == "/v1/chat/completions":
        [choice] = answer["choices"] or [{"message": {}}]
        message = choice.get("message") or choice.get("delta") or {}
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        return message.get("content") or "", "".join(calls)
    if path == "/v1/responses":
        if "output" not in answer:
            whole = answer["type"] == "response.completed"
            return found(path, answer["response"]) if whole else ("", "")
        parts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(parts), "".join(item["arguments"] for item in answer["output"] if "call" in item["type"])
    if "content" not in answer:
        delta = answer.get("delta", {})
        return delta.get("text", ""), delta.get("partial_json", "")
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    return "".join(texts), "".join(json.dumps(one["input"]) for one in answer["content"] if one["type"] == "tool_use")


def answers(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """The answer, or the events of a stream."""
    with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            sys.exit(f"{path} {response.status_code} {response.read().decode()}")
        if not body["stream"]:
            yield json.loads(response.read())
            return
        for line in response.iter_lines():
            if line.startswith("data:") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data:"))


def main() -> None:
    """Ends with what is wrong if there is anything."""
    config, prompt, file = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    program = str(Path(sys.executable).parent / "litellm")
    proxy = subprocess.Popen([program, "--config", config, "--host", "127.0.0.1", "--port", port])
    headers = {"authorization": f"Bearer {os.environ['LITELLM_MASTER_KEY']}"}
    texts, contents = set(), set()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            while True:
                try:
                    client.get("/health/liveliness").raise_for_status()
                    break
                except httpx.HTTPError:
                    if proxy.poll() is not None:
                        sys.exit("the proxy has ended")
                    time.sleep(0.5)
            for path, (name, tool) in PROTOCOLS.items():
                for stream in (False, True):
                    body: dict[str, Any] = {
                        "model": "local", name: [{"role": "user", "content": prompt}], "stream": stream,
                    }  # fmt: skip
                    if path == "/v1/messages":
                        body["max_tokens"] = 1000
                    for more in ({"tools": [tool]}, {}):
                        pieces = [found(path, one) for one in answers(client, path, body | more)]
                        text, arguments = ("".join(piece) for piece in zip(*pieces, strict=True))
                        print(path, "streamed" if stream else "whole", repr(text), arguments, flush=True)
                        if more:
                            contents.add(json.loads(arguments)["content"])
                        else:
                            texts.add(text.strip())
    finally:
        proxy.terminate()
        proxy.wait()
    [content], [text] = contents, texts
    Path(file).write_text(content)
    print(text)


if __name__ == "__main__":
    main()
