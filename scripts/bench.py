"""Measures a `tgi up` over HTTP: start, TTFT, inter-token latency, tokens/s, CPU time and memory per process.

    scripts/bench                             the demo model
    scripts/bench --model-id DIR              any model
    scripts/bench --scripted --concurrency 64 the stack alone, with the scripted worker

Every repetition uses new prompts, so the prefix cache does not help. Medians over the repetitions are printed.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

SOME_TEXT = """river mountain city answer question evening water people walk light number theory music history science
garden table window letter ocean bridge forest engine market doctor teacher winter summer morning story picture road"""
WORDS = SOME_TEXT.split()


class Stream(NamedTuple):
    """One streamed request: when it was sent and when each event came, in seconds."""

    sent: float
    events: list[float]


def prompt(seed: int, words: int) -> str:
    """Text that no other seed gives."""
    rng = random.Random(seed)
    return f"{seed}: " + " ".join(rng.choice(WORDS) for _ in range(words))


async def stream(port: int, text: str, inputs: int, outputs: int) -> Stream:
    """One POST /generate_stream over a connection of its own."""
    body = json.dumps({"inputs": text, "parameters": {"max_new_tokens": outputs, "truncate": inputs}}).encode()
    head = (
        "POST /generate_stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    sent = time.perf_counter()
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    events: list[float] = []
    tail = b""
    while True:
        data = await reader.read(1 << 16)
        if not data:
            break
        now = time.perf_counter()
        tail += data
        events += [now] * tail.count(b"data: ")
        tail = tail[-5:]  # shorter than what is counted, so nothing is counted twice
    writer.close()
    return Stream(sent, events)


async def burst(port: int, concurrency: int, seed: int, inputs: int, outputs: int) -> list[Stream]:
    """`concurrency` streams at once."""
    texts = [prompt(seed * 1000 + k, inputs) for k in range(concurrency)]
    return await asyncio.gather(*(stream(port, text, inputs, outputs) for text in texts))


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def measure(port: int, concurrency: int, arguments: argparse.Namespace, tree: list[psutil.Process]) -> dict[str, Any]:
    """Medians over the repetitions of one concurrency."""
    rows = []
    for repetition in range(arguments.repetitions):
        before = cpu(tree)
        begin = time.perf_counter()
        seed = concurrency * 100 + repetition + random.randrange(1 << 20) * 10000
        streams = asyncio.run(burst(port, concurrency, seed, arguments.input_tokens, arguments.output_tokens))
        seconds = time.perf_counter() - begin
        tokens = sum(len(s.events) for s in streams)
        gaps = [b - a for s in streams for a, b in zip(s.events, s.events[1:], strict=False)]
        spent = {name: after - before[name] for name, after in cpu(tree).items()}
        stack = sum(value for name, value in spent.items() if "worker" not in name)
        rows.append({
            "tokens/s": tokens / seconds,
            "ttft ms": 1e3 * median([s.events[0] - s.sent for s in streams if s.events]),
            "itl ms": 1e3 * statistics.mean(gaps) if gaps else float("nan"),
            "stack CPU us/token": 1e6 * stack / max(tokens, 1),
            "tokens": tokens,
            **{f"CPU us/token, {name}": 1e6 * value / max(tokens, 1) for name, value in spent.items()},
        })  # fmt: skip
    return {key: median([row[key] for row in rows]) for key in rows[0]}


def cpu(tree: list[psutil.Process]) -> dict[str, float]:
    """CPU seconds spent so far, by process title."""
    return {" ".join(p.cmdline()).strip(): cpu_seconds(p) for p in tree}


def cpu_seconds(process: psutil.Process) -> float:
    """Of all threads. On Linux from the clock that each process has (clock_getcpuclockid(3)): its accounting by ticks,
    ten milliseconds each, says little of processes that wake up for a token and sleep again."""
    if sys.platform == "linux":
        return time.clock_gettime((~process.pid << 3) | 2)
    return sum(process.cpu_times()[:2])


def start(arguments: argparse.Namespace, run: str) -> tuple[subprocess.Popen[bytes], int, float]:
    """The server, its port, and the seconds from the command to the first streamed token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
    if arguments.model_id:
        command += ["--model-id", arguments.model_id]
    if arguments.scripted:
        command += ["--worker", "scripted"]
    command += arguments.server
    begin = time.perf_counter()
    # Its messages (a download's progress, a refusal) go to this terminal; standard output is for the figures.
    server = subprocess.Popen(command, env=os.environ | {"TGI_RUN": run}, stdout=subprocess.DEVNULL)
    first = 0.0
    while not first:
        if server.poll() is not None:
            sys.exit(f"The server ended with code {server.returncode}.")
        try:
            got = asyncio.run(stream(port, "Hello", 16, 1))
        except OSError:
            got = Stream(0.0, [])
        if got.events:
            first = time.perf_counter() - begin
        else:
            time.sleep(0.02)
    return server, port, first


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", help="model to serve; default: the demo model")
    parser.add_argument("--scripted", action="store_true", help="the stack alone: a worker without a model")
    parser.add_argument("--concurrency", default="1,8,32", help="streams at once, comma separated")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("server", nargs="*", help="more arguments for `tgi up`, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tgi-") as run:
        server, port, first = start(arguments, str(Path(run) / "run"))
        try:
            tree = psutil.Process(server.pid).children(recursive=True)
            asyncio.run(burst(port, 2, 1, 16, 8))  # first use of every path
            results = {n: measure(port, n, arguments, tree) for n in map(int, arguments.concurrency.split(","))}
            memory = {" ".join(p.cmdline()).strip(): p.memory_info().rss / 2**20 for p in tree}
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    report(arguments, first, results, memory)


def report(arguments: argparse.Namespace, first: float, results: dict[int, Any], memory: dict[str, float]) -> None:
    """Prints what was measured."""
    if arguments.json:
        print(json.dumps({"first_token_s": first, "concurrency": results, "memory_mb": memory}))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{arguments.input_tokens} tokens in, {arguments.output_tokens} out, median of {arguments.repetitions}\n")
    print(f"first streamed token {first:.2f} s after the command\n")
    print(f"{'streams':>8} {'tokens/s':>10} {'TTFT ms':>10} {'ITL ms':>10} {'stack CPU µs/token':>20}")
    for n, row in results.items():
        print(
            f"{n:>8} {row['tokens/s']:>10.0f} {row['ttft ms']:>10.1f} {row['itl ms']:>10.2f} "
            f"{row['stack CPU us/token']:>20.0f}"
        )
    print("\nCPU µs/token" + " " * 8 + "".join(f"{f'{n} streams':>12}" for n in results) + "      memory")
    for title, size in memory.items():
        spent = "".join(f"{row[f'CPU us/token, {title}']:>12.1f}" for row in results.values())
        print(f"{title:<20}{spent} {size:>8.0f} MB")
    print(f"{'together':<20}{' ' * 12 * len(results)} {sum(memory.values()):>8.0f} MB")


if __name__ == "__main__":
    main()
