"""Images on every route, from hostile hosts and in hostile files: a whole server with the scripted worker."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL.Image import Image
from PIL.PngImagePlugin import PngInfo

from scripts.make_vision_model import IMAGE_TOKENS
from tests.live.faults import sitecustomize as faults
from tests.live.server import Server, python_path
from tests.live.test_crash_isolation import FAULTS, restarts
from tests.media.pictures import data_url, encoded, noise, png_header
from tests.media.test_fetcher import HostileServer, respond
from tests.models import vision_model
from tgi.media.processor import _load as load_processor
from tgi.microkernel.host.rundir import media_directory
from tgi.microkernel.recovery.crash_isolation import QUARANTINE_STRIKES

pytestmark = pytest.mark.live

CHAT = "/v1/chat/completions"
TOKENS = 16  # of an image
PERMITS = 4
URL = data_url(encoded(noise()))
OTHER = data_url(encoded(noise(100, 30, seed=1), "JPEG"), "jpeg")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model-id", str(vision_model("llava")), "--worker", "scripted", "--validation-workers", "1")
    flags += (
        "--allow-private-image-hosts",
        "localhost",
        "--image-fetch-timeout",
        "60",
        "--max-image-pixels",
        "1000000",
    )
    flags += ("--max-images", "3", "--max-concurrent-requests", str(PERMITS), "--hang-timeout", "3")
    with Server(tmp_path_factory.mktemp("images") / "run", *flags, env=python_path(FAULTS)) as server:
        server.start().wait_until_ready()
        assert [*media_directory(server.run_directory).glob("*.safetensors")]  # a ready server has loaded an image
        yield server


@pytest.fixture
def host() -> Iterator[HostileServer]:
    host = HostileServer()
    yield host
    host.ended.set()
    host.listener.close()


def image(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def links(server: Server) -> list[str]:
    return [path.name for path in media_directory(server.run_directory).glob("api-*")]


def anthropic(*blocks: Any) -> dict[str, Any]:
    return {"max_tokens": 2, "messages": [{"role": "user", "content": [*blocks]}]}


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PROMPT, INPUT = ("usage", "prompt_tokens"), ("usage", "input_tokens")
# Path and body, with the images in it, and where the answer says how long the prompt is.
FORMS: dict[str, tuple[str, dict[str, Any], int, tuple[Any, ...]]] = {
    "parts": (CHAT, chat("See ", image(URL), " and ", image(OTHER, detail="low")), 2, PROMPT),
    "a string as image_url": (CHAT, chat({"type": "image_url", "image_url": URL}), 1, PROMPT),
    "several choices": (CHAT, chat("See ", image(URL), n=3), 1, PROMPT),
    "input_image in a chat": (CHAT, chat("See", {"type": "input_image", "image_url": URL}), 1, PROMPT),
    "a tool's result": (
        CHAT,
        {"max_tokens": 2, "messages": [
            {"role": "user", "content": "Look"}, {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "It is"}, image(URL)]},
        ]},
        1, PROMPT,
    ),
    "responses": (
        "/v1/responses",
        {"max_output_tokens": 2, "input": [
            {"role": "user", "content": [
                {"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": URL},
            ]},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": OTHER}]},
        ]},
        2, INPUT,
    ),
    "messages": (
        "/v1/messages",
        {"max_tokens": 2, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "See"}, BLOCK, {"type": "text", "text": "this"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [BLOCK]}]},
        ]},
        2, INPUT,
    ),
    "count_tokens": (
        "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [BLOCK]}]}, 1, ("input_tokens",),
    ),
    "native": (
        "/generate",
        {"inputs": f"See ![]({URL}) and ![]({OTHER})", "parameters": {"max_new_tokens": 2, "details": True}},
        2, ("details", "prefill"),
    ),
    "completions": ("/v1/completions", {"prompt": f"See ![]({URL})", "max_tokens": 2}, 1, PROMPT),
    "chat_tokenize": ("/chat_tokenize", chat(image(URL), "?"), 1, ("tokenize_response",)),
    "tokenize": ("/tokenize", {"inputs": f"![]({URL})"}, 1, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_counts_the_tokens_of_its_images(server: Server, name: str) -> None:
    path, body, images, place = FORMS[name]
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: Any = response.json()
    if name == "native":
        found = int(response.headers["x-prompt-tokens"])
    for key in place if name != "native" else ():
        found = found[key]
    length = found if isinstance(found, int) else len(found)
    if isinstance(found, list):
        assert sum(token["text"] == IMAGE_TOKENS[0] for token in found) == TOKENS * images
    assert TOKENS * images <= length < TOKENS * images + 80
    assert links(server) == []


def test_streams_and_the_cache(server: Server) -> None:
    """The same image again is found by its content, and no answer begins before it is loaded."""
    body = chat("What is this? ", image(URL), stream=True)
    with server.client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        assert response.read().endswith(b"data: [DONE]\n\n")
    files = {path.name for path in media_directory(server.run_directory).glob("*.safetensors")}
    server.client.post(CHAT, json=body | {"stream": False}).raise_for_status()
    assert {path.name for path in media_directory(server.run_directory).glob("*.safetensors")} == files


REFUSED = {
    "no image": (data_url(b"hello"), "the file is of no known format: PNG, JPEG, WebP or GIF was expected"),
    "svg": (data_url(b"<svg/>", "svg+xml"), "SVG is not served: PNG, JPEG, WebP or GIF was expected"),
    "a bomb": (data_url(png_header(60_000, 60_000)), "an image may have 1000000 pixels, and 32768 on a side"),
    "truncated": (data_url(encoded(noise())[:-100]), "the file is damaged or cut off"),
    "no base64": ("data:image/png;base64,???", "the data URL is not valid base64"),
    "another scheme": ("file:///etc/passwd", "a URL that begins with https://HOST or http://HOST was expected"),
    "loopback": ("http://127.0.0.1:9/a.png", "127.0.0.1 has no public address"),
    "metadata": ("http://169.254.169.254/latest/meta-data", "169.254.169.254 has no public address"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(server: Server, name: str, stream: bool) -> None:
    url, reason = REFUSED[name]
    response = server.client.post(CHAT, json=chat(image(URL), image(url), stream=stream))
    assert response.status_code == 422
    error = response.json()["error"]["message"]
    assert error.startswith(f"Input validation error: image 2 of 2 cannot be used: {reason}")
    native = server.client.post("/generate_stream" if stream else "/generate", json={"inputs": f"![]({url})"})
    assert native.status_code == 422
    assert native.json()["error"].startswith(f"Input validation error: the image cannot be used: {reason}")
    assert links(server) == []


def test_bounds_come_before_cost(server: Server, host: HostileServer) -> None:
    url = host.url(host="localhost")
    for body, reason in (
        (chat(*[image(url)] * 4), "a prompt may have 3 images. Given: 4"),
        (chat(image(url, detail="huge")), "`detail` of image 1 must be auto, low or high"),
        (chat(image(url), temperature=-1), "`temperature`"),
    ):
        response = server.client.post(CHAT, json=body)
        assert (response.status_code, reason in response.text) == (422, True)
    text = f"a {IMAGE_TOKENS[0]} in a text"
    response = server.client.post(CHAT, json=chat(text, image(URL)))
    assert response.status_code == 422
    assert "the prompt has 2 times '<image>', which stands for an image, and 1 images" in response.text
    assert host.requests == []


def test_a_host_is_asked_when_there_is_a_permit(server: Server, host: HostileServer) -> None:
    """Slow hosts hold the permits of their own requests, and no other request waits for them. A client that leaves
    gives its permit back."""
    picture = respond(encoded(noise()))

    def slow(connection: socket.socket) -> None:
        host.ended.wait(60)
        picture(connection)

    host.answer = slow
    body = chat(image(host.url(host="localhost")))
    with ThreadPoolExecutor(PERMITS) as pool:
        waiting = [pool.submit(server.client.post, CHAT, json=body | {"seed": n}) for n in range(PERMITS - 1)]
        server.wait_until(lambda: len(host.requests) == PERMITS - 1, "the host is asked")
        server.client.post(CHAT, json=chat("Text alone")).raise_for_status()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json=body | {"seed": 98}, timeout=1, trust_env=False)
        server.wait_until(lambda: len(host.requests) == PERMITS, "the host is asked")
        text = {"inputs": "x", "parameters": {"max_new_tokens": 1}}
        server.wait_until(lambda: server.client.post("/generate", json=text).status_code == 200, "a permit is free")
        last = pool.submit(server.client.post, CHAT, json=body | {"seed": 97})
        server.wait_until(lambda: len(host.requests) == PERMITS + 1, "the host is asked")
        assert server.client.post(CHAT, json=body | {"seed": 99}).status_code == 429
        time.sleep(0.2)
        assert len(host.requests) == PERMITS + 1
        host.ended.set()
        assert [one.result().status_code for one in (*waiting, last)] == [200] * PERMITS
    assert links(server) == []


def test_a_killed_media_process_loses_no_request(server: Server, host: HostileServer) -> None:
    answered = threading.Event()
    picture = respond(encoded(noise(seed=7)))

    def first_waits(connection: socket.socket) -> None:
        if len(host.requests) == 1:
            answered.wait(60)
        picture(connection)

    host.answer = first_waits
    with ThreadPoolExecutor(1) as pool:
        body = chat(image(host.url(host="localhost")), image(OTHER))
        waiting = pool.submit(server.client.post, CHAT, json=body)
        server.wait_until(lambda: host.requests, "the host is asked")
        server.kill("media-0")
        assert waiting.result().status_code == 200
    answered.set()
    assert links(server) == []


@pytest.mark.parametrize(
    ("text", "cause"),
    [(faults.CRASHES_DECODER, "was killed by SIGSEGV"), (faults.HANGS_DECODER, "made no progress and was killed")],
)
def test_only_the_request_with_the_poisonous_image_fails(server: Server, text: bytes, cause: str) -> None:
    info = PngInfo()
    info.add_text("comment", text.decode())
    poison = data_url(encoded(noise(), pnginfo=info))
    with ThreadPoolExecutor(PERMITS) as pool:
        fatal = pool.submit(server.client.post, CHAT, json=chat(image(poison)))
        others = []
        for seed in range(5):
            body = chat(image(data_url(encoded(noise(seed=seed + 10)))))
            others.append(pool.submit(server.client.post, CHAT, json=body).result().status_code)
        assert others == [200] * 5
        assert fatal.result().status_code == 424
        assert "while it worked on an image of this request" in fatal.result().text
    assert restarts(server, "media", cause) == QUARANTINE_STRIKES
    again = server.client.post(CHAT, json=chat(image(poison)))
    assert again.status_code == 424
    assert "in quarantine" in again.text
    assert restarts(server, "media", cause) == QUARANTINE_STRIKES
    assert server.client.post(CHAT, json=chat(image(URL))).status_code == 200
    assert links(server) == []


@pytest.fixture(scope="module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that computes, with chunks that end between images and within them."""
    flags = ("--model-id", str(vision_model("qwen2_vl")), "--validation-workers", "1")
    with Server(tmp_path_factory.mktemp("seeing") / "run", *flags, "--max-batch-prefill-tokens", "16") as server:
        yield server.start().wait_until_ready()


def test_answers_are_those_of_transformers_and_survive_every_process(computing: Server) -> None:
    pictures = [noise(90, 70), noise(200, 60, seed=1)]
    urls = [data_url(encoded(picture)) for picture in pictures]
    body = chat("See ", image(urls[0]), " and ", image(urls[1]), " now", temperature=0, max_tokens=400)
    whole = computing.client.post(CHAT, json=body).json()
    expected = transformers_answer(vision_model("qwen2_vl"), pictures, 12)
    text = whole["choices"][0]["message"]["content"]
    assert text.startswith(expected)
    assert len(expected) > 5
    again = computing.client.post(CHAT, json=body).json()
    assert again["choices"][0]["message"]["content"] == text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    for target in ("worker-0", "scheduler-0", "tokenizer-0", "media-0"):
        pieces = []
        with computing.client.stream("POST", CHAT, json=body | {"stream": True}) as response:
            for number, line in enumerate(response.iter_lines()):
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    pieces += [choice["delta"].get("content") or "" for choice in choices]
                if number == 9:
                    computing.kill(target)
        assert "".join(pieces) == text, target
    assert links(computing) == []


def transformers_answer(directory: Path, pictures: list[Image], count: int) -> str:
    """The first tokens of the greedy answer to the prompt of the test above."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    processor: Any = load_processor(directory, "qwen2_vl")
    text = "<|bos|><|user|>\nSee <image> and <image> now<|eos|>\n<|assistant|>\n"
    inputs = processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt")
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    ids = model.generate(**inputs, max_new_tokens=count, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    found: str = processor.tokenizer.decode(ids, skip_special_tokens=True)
    return found.rstrip("\ufffd")


def test_the_media_directory_goes_with_its_server(server: Server, tmp_path: Path) -> None:
    """Last: it ends the server. Of one that was killed, the next start of any server removes what is left."""
    directory = media_directory(server.run_directory)
    assert directory.is_dir()
    server.stop()
    assert not directory.exists()
