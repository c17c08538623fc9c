"""Measures a `tgi up` over HTTP: start, TTFT, inter-token latency, tokens/s, CPU time and memory per process.

    scripts/bench                             the demo model
    scripts/bench --model-id DIR              any model
    scripts/bench --scripted --concurrency 64 the processes around the worker, with the fake worker
    scripts/bench --against vllm,llama.cpp    this server and others in turn, on models made for it

Every repetition uses new prompts, so the prefix cache does not help. Prints medians over the repetitions.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

from scripts.benchmarks import comparison
from scripts.benchmarks.servers import Failed, Server, cpu_seconds, free_port
from scripts.benchmarks.streams import BadStream, Stream, burst, median
from tgi.microkernel.settings.options import count, counts
from tgi.worker.host_cpu import CPU_VARIABLE
from tgi.worker.instruction_sets import BY_NAME

SOME_TEXT = """river mountain city answer question evening water people walk light number theory music history science
garden table window letter ocean bridge forest engine market doctor teacher winter summer morning story picture road"""
WORDS = SOME_TEXT.split()
ROUTE = "/generate_stream"
# Options that apply to this server only.
ALONE = ("model_id", "scripted", "concurrency", "input_tokens", "output_tokens")


def prompt(seed: int, words: int) -> str:
    """Text that is unique per seed."""
    rng = random.Random(seed)
    return f"{seed}: " + " ".join(rng.choice(WORDS) for _ in range(words))


def bodies(concurrency: int, seed: int, inputs: int, outputs: int) -> list[dict[str, Any]]:
    """`concurrency` requests with prompts truncated to `inputs` tokens."""
    parameters = {"max_new_tokens": outputs, "truncate": inputs}
    return [{"inputs": prompt(seed * 1000 + k, inputs), "parameters": parameters} for k in range(concurrency)]


def measure(server: Server, concurrency: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over the repetitions of one concurrency."""
    rows = []
    for repetition in range(arguments.repetitions):
        seed = concurrency * 100 + repetition + random.randrange(1 << 20) * 10000
        asked = bodies(concurrency, seed, arguments.input_tokens, arguments.output_tokens)
        before = cpu(server)
        begin = time.perf_counter()
        streams = burst(server.port, ROUTE, asked)
        seconds = time.perf_counter() - begin
        spent = {name: after - before.get(name, 0.0) for name, after in cpu(server).items()}
        rows.append(figures(streams, seconds, spent))
    return {key: median([row[key] for row in rows if key in row]) for key in rows[-1]}


def figures(streams: list[Stream], seconds: float, spent: dict[str, float]) -> dict[str, Any]:
    """The figures of one repetition from its streams and the CPU seconds of each process."""
    events = [[event.time for event in stream.events()] for stream in streams]
    tokens = sum(map(len, events))
    stack = sum(value for name, value in spent.items() if "worker" not in name)
    gaps = [b - a for times in events for a, b in pairwise(times)]
    return {
        "tokens/s": tokens / seconds,
        "ttft ms": 1e3 * median([times[0] - s.sent for s, times in zip(streams, events, strict=True) if times]),
        "itl ms": 1e3 * statistics.mean(gaps) if gaps else float("nan"),
        "stack CPU us/token": 1e6 * stack / max(tokens, 1),
        "tokens": tokens,
        **{f"CPU us/token, {name}": 1e6 * value / max(tokens, 1) for name, value in spent.items()},
    }


def cpu(server: Server) -> dict[str, float]:
    """CPU seconds of its processes, by process title."""
    return {name: sum(map(cpu_seconds, found)) for name, found in server.processes().items()}


def start(arguments: argparse.Namespace) -> Server:
    """Starts the server without waiting. Its messages (download progress, errors) go to this terminal."""
    port = free_port()
    command = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
    if arguments.model_id:
        command += ["--model-id", arguments.model_id]
    if arguments.scripted:
        command += ["--worker", "scripted"]
    return Server(command + arguments.server, {}, port)


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", help="model to serve; default: the demo model")
    parser.add_argument("--scripted", action="store_true", help="the stack alone: a worker without a model")
    parser.add_argument("--concurrency", type=counts, default=(1, 8, 32), help="streams at once, comma separated")
    parser.add_argument("--input-tokens", type=count, default=128)
    parser.add_argument("--output-tokens", type=count, default=128)
    parser.add_argument("--repetitions", type=count, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--cpu", choices=BY_NAME, help="hold this server and others to this instruction set")
    parser.add_argument("server", nargs="*", help="more arguments for `tgi up`, after --")
    comparison.options(parser)
    arguments = parser.parse_args()
    if arguments.cpu:
        os.environ[CPU_VARIABLE] = arguments.cpu  # read here, and by the server
    if arguments.against:
        if named := [
            f"--{name.replace('_', '-')}" for name in ALONE if getattr(arguments, name) != parser.get_default(name)
        ]:
            parser.error(f"{', '.join(named)} cannot go with --against, which has models and workloads of its own")
        sys.exit(comparison.run(arguments))
    try:
        with start(arguments) as server:
            server.wait(ROUTE, bodies(1, 0, 16, 1)[0])
            server.settle()
            burst(server.port, ROUTE, bodies(2, 1, 16, 8))  # first use of every path
            results = {n: measure(server, n, arguments) for n in arguments.concurrency}
            memory = {
                name: sum(p.memory_info().rss for p in found) / 2**20 for name, found in server.processes().items()
            }
    except (Failed, BadStream) as error:
        sys.exit(f"The server failed: {error}")
    report(arguments, server.first, results, memory)


def report(arguments: argparse.Namespace, first: float, results: dict[int, Any], memory: dict[str, float]) -> None:
    """Prints the results."""
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
