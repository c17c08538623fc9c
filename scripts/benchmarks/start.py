"""Start and return: the time from the command to the first token, from kill -9 of the worker to the next one, and to
the first token of a long prompt that an earlier life of the server has computed.

    scripts/bench start [--model-id MODEL] [--starts 3] [--prefix 4000] [-- --dtype bfloat16]

Without --model-id the demo model. The parts are the stages of each process, from the log, and the processor time of
each process up to the first token: on few cores the sum of these is what a start takes. The server keeps KV pages in a
directory (--prefix-cache-dir), which is empty at the first start; the file cache of the system is what it is. The
prompt has about `--prefix` tokens. All streams are greedy, and compared with the first one.
"""

import argparse
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from scripts.benchmarks.http_load import ROUTE
from scripts.benchmarks.servers import Server, free_port
from scripts.benchmarks.streams import Stream, burst
from tgi.microkernel.host import rundir
from tgi.microkernel.settings.options import count

WORDS = [
    "the",
    "a",
    "river",
    "stone",
    "house",
    "light",
    "cloud",
    "green",
    "walk",
    "time",
    "number",
    "paper",
    "city",
    "water",
    "old",
    "new",
    "small",
    "field",
    "page",
]
STAGES = re.compile(r"(\S+-\d+) has started in (.*)")
TOKENS = 40  # of each stream; the worker is killed in the middle
WRITING_SECONDS = 3.0  # for pages that are still being written when the streams have ended


class Start(NamedTuple):
    """One life of the server, in seconds."""

    first_token: float
    known_prompt: float  # to the first token of the long prompt, which the life before has computed
    new_prompt: float  # and of another one of its length
    return_: float  # from kill -9 of the worker to the next token of the stream
    ids: list[int]  # of the stream whose worker was killed


def request(tokens: int, seed: int) -> dict[str, Any]:
    """A prompt of about so many tokens."""
    choice = random.Random(seed)
    prompt = " ".join(choice.choice(WORDS) for _ in range(tokens))
    return {"inputs": prompt, "parameters": {"max_new_tokens": TOKENS}}


def first_token(stream: Stream) -> float:
    """The time to first token."""
    return stream.events()[0].time - stream.sent


def kill_worker(run: Path) -> float:
    """Sends SIGKILL to the worker. Returns when, by time.perf_counter."""
    worker = next(state for state in rundir.read_states(run) if state.role == "worker")
    os.kill(worker.pid, signal.SIGKILL)
    return time.perf_counter()


def live(arguments: argparse.Namespace, directory: Path, log: Path, number: int) -> Start:
    """Starts the server, measures, and ends it."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
    command += ["--log-level", "debug", "--prefix-cache-dir", str(directory), *arguments.flags]
    if arguments.model_id is not None:
        command += ["--model-id", arguments.model_id]
    with Server(command, {}, port, log) as server:
        server.wait(ROUTE, request(2, 0))
        print(f"\nstart {number}: first token {server.first:.2f} s after the command", flush=True)
        for process in psutil.Process(server.process.pid).children(recursive=True):
            times = process.cpu_times()
            print(f"  {' '.join(process.cmdline())[:60]:<30} {times.user + times.system:5.2f} s of processor time")
        (known,) = burst(port, ROUTE, [request(arguments.prefix, 1)])
        (other,) = burst(port, ROUTE, [request(arguments.prefix, 100 + number)])
        whole = known.events()[-1].time - known.events()[0].time
        killed: list[float] = []
        timer = threading.Timer(
            first_token(other) / 10 + whole / 2, lambda: killed.append(kill_worker(server.run_directory))
        )
        timer.start()
        (resumed,) = burst(port, ROUTE, [request(arguments.prefix, 1)])
        timer.join()
        gap = max(pairwise(resumed.events()), key=lambda pair: pair[1].time - pair[0].time)
        time.sleep(WRITING_SECONDS)
    for name, stages in STAGES.findall(log.read_text(errors="replace")):
        print(f"  {name}: {stages}")
    ids = [event.data["token"]["id"] for event in resumed.events()]
    if ids != [event.data["token"]["id"] for event in known.events()]:
        sys.exit("The stream whose worker was killed differs from the undisturbed one.")
    return Start(server.first, first_token(known), first_token(other), gap[1].time - killed[0], ids)


def main() -> None:
    """Prints the parts of each start, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", help="unset: the demo model")
    parser.add_argument("--starts", type=count, default=3)
    parser.add_argument("--prefix", type=count, default=4000, help="tokens of the long prompt")
    parser.add_argument("flags", nargs="*", help="further flags of `tgi up`, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tgi-start-") as store:
        log = Path(store) / "log"
        lives = [live(arguments, Path(store) / "pages", log, number) for number in range(1, arguments.starts + 1)]
    if any(one.ids != lives[0].ids for one in lives):
        sys.exit("The streams of two starts differ.")
    later = lives[1:] or lives
    rows = {
        "command to first token": [one.first_token for one in later],
        f"first token of a new prompt of {arguments.prefix} tokens": [one.new_prompt for one in later],
        "first token of one that is known from before the start": [one.known_prompt for one in later],
        "kill -9 of the worker to the next token": [one.return_ for one in later],
    }
    print("\n| from the second start on, s | median | all |\n|---|---|---|")
    for name, values in rows.items():
        print(f"| {name} | {statistics.median(values):.2f} | {', '.join(f'{value:.2f}' for value in values)} |")


if __name__ == "__main__":
    main()
