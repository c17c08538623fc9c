"""Measures the whole stack next to the engine alone, and a stream across the death of its worker.

    scripts/bench stack --shape 8b [--requests 256] [--json FILE] [--device cpu --shape two-layer]

A server of all processes serves a model of a known shape with random weights (--load-format dummy). Measured are

- the time from the command to the first token, and the stages of the worker's start,
- `--requests` requests at once, of lengths as in ShareGPT (in the mean 224 tokens in and 194 out, spread): output
  tokens/s and latency between tokens, and the same load in one process, with the scheduler and the engine but without
  HTTP, tokenizer and links: what the stack keeps of it,
- `--streams` streams at once whose worker gets SIGKILL in the middle: the time from the signal to the next token of any
  stream, and of the last one. Each stream is compared with the same one undisturbed: on a GPU products depend on the
  batch, so a token whose logit is close to the next one may differ, and all that follow with it.

The load comes from `--clients` processes, so that it does not measure itself.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks.http_load import (
    MEAN_INPUT,
    MEAN_OUTPUT,
    ROUTE,
    Generated,
    Load,
    body,
    loads,
    rate,
    run_load,
)
from scripts.benchmarks.servers import Server, free_port
from scripts.benchmarks.shapes import CONFIG, SHAPES, write_config, write_tokenizer
from tgi.microkernel.host import rundir
from tgi.microkernel.settings.options import count

CONTEXT = 2048
KILL_AFTER = 0.4  # of the time that the undisturbed streams take
TOLERANCE = 1e-3  # of logprobs, up to the first different token


class Comparison(NamedTuple):
    """Streams and the same ones undisturbed."""

    complete: int
    identical: int
    streams: int
    agreed: float  # share of tokens before the first difference
    logprob: float  # the largest difference of logprobs there


def compare(expected: Sequence[Generated], found: Sequence[Generated]) -> Comparison:
    """Tokens up to the first difference of each stream."""
    complete = identical = same = 0
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        complete += len(one.ids) == len(other.ids)
        agreed = next((k for k, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)) if a != b), len(one.ids))
        identical += one.ids == other.ids
        same += agreed
        pairs = zip(one.logprobs[:agreed], other.logprobs[:agreed], strict=False)
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    return Comparison(complete, identical, len(expected), same / sum(len(one.ids) for one in expected), worst)


def kill_worker(run: Path, after: float) -> float:
    """Sends SIGKILL to the worker after so many seconds. Returns when, by time.perf_counter."""
    time.sleep(after)
    worker = next(state for state in rundir.read_states(run) if state.role == "worker")
    os.kill(worker.pid, signal.SIGKILL)
    return time.perf_counter()


class Recovery(NamedTuple):
    """Times from SIGKILL of the worker, in seconds."""

    next_token: float  # to the next token of any stream
    last_stream: float  # to the next token of the last stream
    stages: str  # of the new worker


def recovery(streams: Sequence[Generated], at: float, log: str) -> Recovery:
    """Looks for the end of the longest gap of each stream: some tokens are on their way when the worker is killed."""
    resumed = [max(pairwise(one.events), key=lambda pair: pair[1].time - pair[0].time)[1].time - at for one in streams]
    return Recovery(min(resumed), max(resumed), stages(log, -1))


STAGES = re.compile(r"worker-0 has started in (.*)")


def stages(log: str, which: int) -> str:
    """The stages of a start of the worker, from the server's log."""
    found = STAGES.findall(log)
    return found[which] if found else "?"


def write_model(shape: str, directory: Path) -> None:
    """A model directory without weights."""
    config = CONFIG | SHAPES[shape] | {"max_position_embeddings": CONTEXT}
    write_config(config, directory)
    write_tokenizer(config["vocab_size"], directory)


def server_command(arguments: argparse.Namespace, directory: Path, port: int) -> list[str]:
    """The server."""
    most = max(arguments.requests, arguments.streams)
    command = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
    command += ["--model-id", str(directory), "--load-format", "dummy", "--device", arguments.device]
    command += ["--max-concurrent-requests", str(2 * most), "--api-workers", str(arguments.front_ends)]
    return [*command, "--validation-workers", str(arguments.front_ends), "--log-level", "debug", *arguments.flags]


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=count, default=256)
    parser.add_argument("--streams", type=count, default=64, help="whose worker is killed")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of requests")
    parser.add_argument("--clients", type=count, default=4, help="processes that send the requests")
    parser.add_argument("--front-ends", type=count, default=2, help="of the server, and as many tokenizers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    parser.add_argument("flags", nargs="*", help="further flags of `tgi up`, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tgi-stack-") as store:
        directory = Path(store) / "model"
        directory.mkdir()
        write_model(arguments.shape, directory)
        figures = measure(arguments, directory, arguments.log or Path(store) / "log")
        figures["engine alone"] = engine = alone(arguments, directory)
    figures["stack / engine alone"] = figures["stack"]["tokens_per_s"] / engine["tokens_per_s"]
    report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    comparison = figures["kill"]["compared"]
    sys.exit(comparison["complete"] < comparison["streams"])


def measure(arguments: argparse.Namespace, directory: Path, log: Path) -> dict[str, Any]:
    """Start, load and kill, with one server."""
    port, load = free_port(), loads(arguments.requests, arguments.scale)
    inputs, outputs = (round(arguments.scale * mean) for mean in (MEAN_INPUT, 2 * MEAN_OUTPUT))
    few = [Load(100_000 + number, inputs, outputs) for number in range(arguments.streams)]
    spawn = get_context("spawn")
    command = server_command(arguments, directory, port)
    with (
        ProcessPoolExecutor(arguments.clients, spawn) as pool,
        ThreadPoolExecutor(1) as threads,
        Server(command, {"HF_HUB_OFFLINE": "1"}, port, log) as server,
    ):
        server.wait(ROUTE, body(Load(7, 8, 1)))
        first, started = server.first, stages(log.read_text(errors="replace"), 0)
        print(f"first token {first:.2f} s after the command; worker: {started}", flush=True)
        cold = rate(run_load(pool, arguments.clients, port, loads(arguments.requests, arguments.scale / 4, seed=2)))
        print(f"first load, of a quarter of the length: {cold}", flush=True)
        whole = rate(run_load(pool, arguments.clients, port, load))
        print(f"{arguments.requests} requests: {whole}", flush=True)
        expected = run_load(pool, arguments.clients, port, few)
        killing = threads.submit(kill_worker, server.run_directory, KILL_AFTER * rate(expected).seconds)
        found = run_load(pool, arguments.clients, port, few)
        recovered = recovery(found, killing.result(), log.read_text(errors="replace"))
        compared = compare(expected, found)
        print(f"kill -9: {recovered}; {compared}", flush=True)
    return {
        "first token s": first,
        "start": started,
        "first load": cold._asdict(),
        "stack": whole._asdict(),
        "kill": {"compared": compared._asdict(), "recovery": recovered._asdict()},
    }


def alone(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The same requests on the engine alone, in a process of its own, since the GPU's memory is freed with it."""
    command = [sys.executable, "-m", "scripts.benchmarks", "offline", "--model", str(directory)]
    command += ["--device", arguments.device, "--requests", str(arguments.requests), "--scale", str(arguments.scale)]
    done = subprocess.run([*command, "--", *arguments.flags], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(figures: dict[str, Any]) -> None:
    """Prints the table."""
    stack, engine, kill = figures["stack"], figures["engine alone"], figures["kill"]
    compared, recovered = kill["compared"], kill["recovery"]
    rows = {
        "start to first token, s": f"{figures['first token s']:.2f}",
        "stages of the worker's start, s": figures["start"],
        "the first load, output tokens/s": f"{figures['first load']['tokens_per_s']:,.0f}",
        "whole stack, output tokens/s": f"{stack['tokens_per_s']:,.0f}",
        "time to first token, ms": f"{stack['first_ms']:.0f}",
        "between tokens, ms (median, p99)": f"{stack['between_ms']:.2f}, {stack['p99_ms']:.2f}",
        "engine alone, output tokens/s": f"{engine['tokens_per_s']:,.0f} ({engine['steps']} steps)",
        "whole stack / engine alone": f"{figures['stack / engine alone']:.1%}",
        "kill -9 to next token, s": f"{recovered['next_token']:.2f}",
        "until all streams go on, s": f"{recovered['last_stream']:.2f}",
        "stages of the new worker, s": recovered["stages"],
        "streams complete": f"{compared['complete']} of {compared['streams']}",
        "streams identical": f"{compared['identical']} of {compared['streams']}",
        "tokens before the first difference": f"{compared['agreed']:.1%}",
        "largest difference of a logprob there": f"{compared['logprob']:.2g} ({TOLERANCE:g} wanted)",
    }
    print("\n| whole stack | |\n|---|---|")
    print(*(f"| {name} | {value} |" for name, value in rows.items()), sep="\n")


if __name__ == "__main__":
    main()
