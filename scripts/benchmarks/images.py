"""Measures the time to first token of requests with an image, next to other servers with the same weights.

    scripts/bench images [--against llama.cpp,transformers] [--requests 1,8] [--rounds 3]

A model of Gemma 3's kind with random weights in bfloat16: a SigLIP tower of about 100 million parameters, which sees
1,024 patches of 448 x 448 pixels and makes 256 tokens of them, and a text part with the layers of SmolLM2-135M.
llama.cpp reads it as a pair of GGUF files, its vision part in float16; `transformers serve` and this server read its
directory.

In each round each server in turn gets `--requests` requests at once, each with an image of its own and a short
question, and answers one token. Prints medians over the rounds: of the time to the first token, to the last of the
first tokens, and the CPU seconds of all processes of a server for each request; last the ratios to the best other one.
"""

import argparse
import base64
import io
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from scripts.benchmarks import peers, workloads
from scripts.benchmarks.servers import Failed, Server, free_port
from scripts.benchmarks.streams import BadStream, burst
from scripts.make_gguf import write_gguf_pair
from scripts.make_vision_model import GEMMA3_448, make_vision_model
from tgi.microkernel.settings.options import count, counts
from tgi.worker.host_cpu import usable_cores

ROUTE = "/v1/chat/completions"
SIDE = 448
LONGEST = 2048  # tokens of a request on servers that have to know


def model() -> Path:
    """The model's directory, made on first use."""

    def make(path: Path) -> None:
        make_vision_model("gemma3", path, dtype="bfloat16", larger=GEMMA3_448)
        template = json.loads((path / "tokenizer_config.json").read_text())["chat_template"]
        (path / "chat_template.jinja").write_text(template)  # where processors have theirs

    return workloads.whole(workloads.PEERS_DIRECTORY / "models" / "gemma3-448", make)


def gguf_files() -> tuple[Path, Path]:
    """The same as GGUF files: of the text part, and of the vision part."""

    def make(path: Path) -> None:
        path.mkdir()
        write_gguf_pair(model(), path / "model.gguf", path / "mmproj-model.gguf", half=True)

    directory = workloads.whole(workloads.PEERS_DIRECTORY / "models" / "gemma3-448-gguf", make)
    return directory / "model.gguf", directory / "mmproj-model.gguf"


def ours(port: int, requests: int) -> tuple[list[str | Path], dict[str, str]]:
    """The command of this server, and its environment."""
    up = (sys.executable, "-P", "-m", "tgi", "up", "--model-id", model(), "--log-level", "warn")
    return [*up, "--hostname", "127.0.0.1", "--port", str(port)], {"PYTHONPATH": str(workloads.ROOT)}


def llama_cpp(port: int, requests: int) -> tuple[list[str | Path], dict[str, str]]:
    """The same of llama-server."""
    file, mmproj = gguf_files()
    threads = str(usable_cores())
    limits = ("--parallel", str(requests), "--ctx-size", str(requests * LONGEST), "--threads", threads, "--jinja")
    where = ("--host", "127.0.0.1", "--port", str(port), "--offline")
    return [peers.llama_cpp() / "llama-server", "--model", file, "--mmproj", mmproj, *limits, *where], {}


def transformers(port: int, requests: int) -> tuple[list[str | Path], dict[str, str]]:
    """The same of transformers serve."""
    python = peers.environment("transformers")
    how = ("--dtype", "bfloat16", "--device", "cpu", "--attn-implementation", "sdpa", "--host", "127.0.0.1")
    command: list[str | Path] = [python.parent / "transformers", "serve", model(), *how, "--port", str(port)]
    return command, {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}


SERVERS: dict[str, Callable[[int, int], tuple[list[str | Path], dict[str, str]]]] = {
    "ours": ours,
    "llama.cpp": llama_cpp,
    "transformers": transformers,
}


def image(draw: random.Random) -> str:
    """A data URL of a PNG of SIDE * SIDE pixels: soft noise, another one each time."""
    noise = np.random.default_rng(draw.getrandbits(64)).integers(0, 256, (28, 28, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def body(draw: random.Random, images: int = 1) -> dict[str, Any]:
    """A request with images that no other one has."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image(draw)}} for _ in range(images)]
    parts.append({"type": "text", "text": f"{draw.random()}: What is this?"})
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0, "stream": True}


class Round(NamedTuple):
    """What a server needed for some requests at once, in seconds."""

    first: float  # the median of the times to the first token
    last: float  # until all had it
    cpu: float  # of all its processes, for each request


def measure(server: Server, requests: int, draw: random.Random) -> Round:
    """Sends the requests. Raises BadStream."""
    bodies = [body(draw) for _ in range(requests)]
    before = server.cpu()
    streams = burst(server.port, ROUTE, bodies)
    spent = server.cpu() - before
    for one in streams:
        if not one.events():
            raise BadStream("a stream without events")
    times = [one.ended - one.sent for one in streams]
    return Round(statistics.median(times), max(times), spent / requests)


def rows(name: str, requests: int, found: list[Round], best: list[float] | None) -> Iterator[str]:
    """A row of the table. `best`: what the best other server needed."""
    figures = [statistics.median(column) for column in zip(*found, strict=True)]
    ratios = "" if best is None else ", ".join(f"{own / other:.2f}" for own, other in zip(figures, best, strict=True))
    times = f"{1e3 * figures[0]:.0f} | {1e3 * figures[1]:.0f} | {figures[2]:.2f}"
    yield f"| {name} | {requests} | {times} | {ratios} |"


def start(name: str, requests: int) -> Server:
    """Starts a server without waiting. Raises Failed."""
    port = free_port()
    command, environ = SERVERS[name](port, requests)
    (logs := workloads.PEERS_DIRECTORY / "logs").mkdir(parents=True, exist_ok=True)
    return Server([str(word) for word in command], environ, port, logs / f"images-{name}.log")


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="llama.cpp,transformers", help="other servers, comma separated")
    parser.add_argument("--requests", type=counts, default=(1, 8), help="requests at once, comma separated")
    parser.add_argument("--rounds", type=count, default=3)
    options = parser.parse_args()
    names = ["ours", *filter(None, options.against.split(","))]
    if unknown := set(names) - SERVERS.keys():
        parser.error(f"--against knows {', '.join(list(SERVERS)[1:])}, not {', '.join(sorted(unknown))}")
    draw = random.Random()
    found: dict[tuple[str, int], list[Round]] = {}
    with ExitStack() as stack:
        servers = {}
        for name in names:
            try:
                servers[name] = stack.enter_context(start(name, max(options.requests)))
                servers[name].wait(ROUTE, body(draw, images=0))
                measure(servers[name], 1, draw)
            except (Failed, BadStream) as error:
                servers.pop(name, None)
                print(f"{name} failed: {error}", file=sys.stderr)
        for _ in range(options.rounds):
            for requests in options.requests:
                for name, server in servers.items():
                    try:
                        one = measure(server, requests, draw)
                        found.setdefault((name, requests), []).append(one)
                        said = f"{1e3 * one.first:.0f} ms, {one.cpu:.2f} CPU s per request"
                    except BadStream as error:
                        said = str(error)
                    print(f"{name}, requests at once: {requests}: {said}", file=sys.stderr, flush=True)
    print("| server | requests | TTFT, ms | last, ms | CPU s per request | of the best other |")
    print("|---|---|---|---|---|---|")
    for requests in options.requests:
        others = [
            [statistics.median(column) for column in zip(*found[name, requests], strict=True)]
            for name in names[1:]
            if (name, requests) in found
        ]
        best = [min(column) for column in zip(*others, strict=True)] if others else None
        for name in names:
            if (name, requests) in found:
                print(*rows(name, requests, found[name, requests], best if name == "ours" else None), sep="\n")
    if "ours" not in servers:
        sys.exit("This server failed.")


if __name__ == "__main__":
    main()
