"""Measures what a client with short requests notices of another client that floods the server.

    scripts/bench flood [--step-ms 20] [--slots 128] [--seconds 10] [--against generations,prompts,connections]
    scripts/bench flood --demo | --model-id MODEL

Two clients, at 127.0.0.1 and 127.0.0.2, share a server with the scripted worker, whose steps take `--step-ms`, or with
a model. The first sends a short request at a time and notes the time to its first token; the second floods the server:

- generations: 100 streams of 1,000 tokens at once, started again when they end
- prompts: 100 requests at once, each with a prompt of 4,000 tokens and one new token
- connections: 200 connections with a request of 300 tokens each, sent again at once when it is refused
- images: 16 requests at once, each with an image of 448 x 448 pixels that no other one has and one new token; the model
  must see images (`scripts/bench images` has made one in .peers/models/gemma3-448)

Prints the median and the 95th percentile of the time to the first token without and with the flood, the ratio of the
medians, and how many requests of each client got 429.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from typing import Any

from scripts.benchmarks.images import image
from scripts.benchmarks.servers import Failed
from scripts.benchmarks.serving import ROUTE, start
from tgi.microkernel.settings.options import count

LIGHT, HEAVY = "127.0.0.1", "127.0.0.2"
SETTLE_SECONDS = 2.0
IMAGES = 200  # made before the flood, which is to send each once


class Answer:
    """What became of one request."""

    def __init__(self, status: int, first_token: float) -> None:
        self.status = status
        self.first_token = first_token  # seconds until it


async def ask(port: int, address: str, data: bytes) -> Answer:
    """One stream from this client address, read to its end."""
    head = f"POST {ROUTE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        status = int((await reader.readline()).split()[1])
        while (line := await reader.readline()) and not line.startswith(b"data:"):
            pass
        first = time.perf_counter() - sent
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()
    return Answer(status, first)


def short_request() -> dict[str, Any]:
    """A request of the light client; no two have a prefix in common."""
    return {"inputs": f"{random.random()} a short question", "parameters": {"max_new_tokens": 8}}


def flood_request(kind: str) -> dict[str, Any]:
    """A request of the heavy client; with a number in place of @, no two have a prefix in common."""
    if kind == "images":
        return {"inputs": f"![]({image(random.Random())}) @", "parameters": {"max_new_tokens": 1}}
    if kind == "prompts":
        words = " ".join(str(random.randrange(1000)) for _ in range(4000))
        return {"inputs": f"@ {words}", "parameters": {"max_new_tokens": 1, "truncate": 4000}}
    tokens = 1000 if kind == "generations" else 300
    return {"inputs": "@ at length", "parameters": {"max_new_tokens": tokens}}


async def measure(port: int, kind: str, seconds: float) -> tuple[list[Answer], list[Answer]]:
    """The answers of the light and of the heavy client, with a flood of this kind, or without ("")."""
    light: list[Answer] = []
    heavy: list[Answer] = []

    bodies = itertools.cycle(
        [json.dumps(flood_request(kind)).encode() for _ in range(IMAGES if kind == "images" else 1)]
    )

    async def send_again() -> None:
        while True:
            answer = await ask(port, HEAVY, next(bodies).replace(b"@", str(random.random()).encode()))
            heavy.append(answer)
            if answer.status != 200:
                await asyncio.sleep(0.05)

    connections = {"": 0, "connections": 200, "images": 16}.get(kind, 100)
    flood = [asyncio.create_task(send_again()) for _ in range(connections)]
    await asyncio.sleep(SETTLE_SECONDS if flood else 0)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            light.append(await ask(port, LIGHT, json.dumps(short_request()).encode()))
            await asyncio.sleep(random.random() * 0.02)
    finally:
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    await asyncio.sleep(SETTLE_SECONDS if flood else 0)
    return light, heavy


def times_of(light: list[Answer]) -> list[float]:
    """Milliseconds to the first token, the shortest first."""
    return sorted(1e3 * answer.first_token for answer in light if answer.status == 200)


def row(name: str, light: list[Answer], heavy: list[Answer], alone: float) -> str:
    """A row of the table. `alone`: the median without a flood."""
    times = times_of(light)
    middle, late = (statistics.median(times), times[int(0.95 * len(times))]) if times else (float("nan"),) * 2
    refused = [sum(answer.status == 429 for answer in answers) for answers in (light, heavy)]
    ratio = f"{middle / alone:.1f}"
    return f"| {name} | {len(light)} | {middle:.0f} ms | {late:.0f} ms | {ratio} | {refused[0]} | {refused[1]} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=count, default=20)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--demo", action="store_true", help="the demo model instead of the scripted worker")
    model.add_argument("--model-id", help="this model instead of the scripted worker")
    parser.add_argument("--slots", type=count, default=128, help="requests computed concurrently")
    parser.add_argument("--seconds", type=count, default=10, help="how long each is measured")
    parser.add_argument("--against", default="generations,prompts,connections", help="kinds of floods, comma separated")
    parser.add_argument("server", nargs="*", help="more arguments for `tgi up`, after --")
    arguments = parser.parse_args()
    scripted = not arguments.demo and arguments.model_id is None
    flags = ["--max-batch-size", str(arguments.slots), "--log-level", "warn"]
    if scripted:
        flags += ["--scripted-step-us", str(1000 * arguments.step_ms)]
    options = argparse.Namespace(model_id=arguments.model_id, scripted=scripted, server=flags + arguments.server)
    served = f"Steps of {arguments.step_ms} ms" if scripted else arguments.model_id or "The demo model"
    print(f"{served}, {arguments.slots} slots\n")
    print("| flood | short requests | median TTFT | 95th percentile | of alone | 429 | 429 of the flood |")
    print("|---|---|---|---|---|---|---|")
    try:
        with start(options) as server:
            server.wait(ROUTE, short_request())
            alone = 0.0
            for kind in ("", *arguments.against.split(",")):
                light, heavy = asyncio.run(measure(server.port, kind, arguments.seconds))
                alone = alone or statistics.median(times_of(light))
                print(row(kind or "none", light, heavy, alone), flush=True)
    except Failed as error:
        sys.exit(f"The server failed: {error}")
