"""Measures the latency that the processes around a worker add to each token of one stream.

    scripts/bench latency [--step-ms 5] [--tokens 500] [--repetitions 3] [--model-id DIR]

Front end, tokenizer and scheduler are separate processes; the worker is this program, which is also the client, so one
clock measures both ends. The worker has no model: it receives a step, sleeps, and sends the token. Prints milliseconds:

- up: from sending a token in the worker to reading its event in the client, through scheduler, tokenizer and front end;
- down: from sending the request to the worker's first step;
- turn: the worker's idle time between two steps. The scheduler runs one step ahead, so this should be the time to
  receive a message that has already arrived.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from scripts.benchmarks.servers import free_port
from scripts.benchmarks.serving import ROUTE, bodies
from scripts.benchmarks.streams import BadStream, Stream, burst, median
from scripts.make_model import make_model
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.protocol import PROTOCOL, Hello, Status, Step
from tgi.microkernel.settings.options import count
from tgi.worker.fake_worker.fake_worker import FakeWorker, FakeWorkerConfig

PATIENCE_SECONDS = 60.0


class Worker(threading.Thread):
    """A worker on the scheduler's link that records when it received each step and sent each token."""

    def __init__(self, run: Path, step_seconds: float) -> None:
        super().__init__(daemon=True)
        self.got: list[float] = []
        self.sent: list[float] = []
        self.stopping = False
        self._link = Link.connect(f"ipc://{run}/sched-0.back", Hello(PROTOCOL, "worker", 0, os.urandom(8)))
        self._seconds = step_seconds
        self._scripted = FakeWorker(FakeWorkerConfig(slots=8))

    def run(self) -> None:
        """Runs until stopped."""
        while not self.stopping:
            self._link.socket.poll(100)
            for peer, message in self._link.receive():
                if isinstance(message, Hello):
                    self._link.send(peer, Status(True, True, "ready", 100, self._scripted.limits))
                elif isinstance(message, Step):
                    self.got.append(time.perf_counter())
                    result = self._scripted.run_step(message)
                    time.sleep(self._seconds)
                    self.sent.append(time.perf_counter())
                    self._link.send(peer, result)
                self._link.flush()
        self._link.close()


def ready(port: int) -> None:
    """Waits for the first token."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            burst(port, ROUTE, bodies(1, 0, 16, 4), PATIENCE_SECONDS)[0].events()
            return
        except (OSError, BadStream):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def told(name: str, seconds: list[float]) -> None:
    """Prints a line of the table."""
    ordered = sorted(seconds)
    print(f"{name:<6} {1e3 * median(ordered):>10.3f} {1e3 * ordered[int(len(ordered) * 0.99)]:>10.3f}")


def measure(port: int, worker: Worker, seed: int, tokens: int) -> tuple[list[float], float, list[float]]:
    """Seconds of one stream: up per token, down, and per turn."""
    worker.got.clear()
    worker.sent.clear()
    stream: Stream = burst(port, ROUTE, bodies(1, seed, 16, tokens))[0]
    times = [event.time for event in stream.events()]
    # One more step may follow the last token; it is ignored.
    up = [there - sent for sent, there in zip(worker.sent, times, strict=False)]
    turns = [got - sent for sent, got in zip(worker.sent, worker.got[1:], strict=False)]
    return up, worker.got[0] - stream.sent, turns[: tokens - 1]


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tokens", type=count, default=500)
    parser.add_argument("--repetitions", type=count, default=3)
    parser.add_argument("--model-id", type=Path, help="whose tokenizer; default: that of a model made for it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tgi-") as place:
        directory, run, port = options.model_id or Path(place) / "model", Path(place) / "run", free_port()
        if options.model_id is None:
            make_model("llama", directory)
        common = ["--hostname", "127.0.0.1", "--port", str(port), "--model-id", str(directory)]
        roles = [
            subprocess.Popen([sys.executable, "-m", "tgi", role, *common], env=os.environ | {"TGI_RUN": str(run)})
            for role in ("scheduler", "tokenizer", "api")
        ]
        worker = Worker(run, options.step_ms / 1e3)
        worker.start()
        try:
            ready(port)
            found = [measure(port, worker, 1 + number, options.tokens) for number in range(options.repetitions)]
        finally:
            for role in roles:
                role.terminate()
            for role in roles:
                role.wait()
            worker.stopping = True
            worker.join()
    ups, downs, turns = zip(*found, strict=True)
    print(f"steps of {options.step_ms:g} ms\n{'':<6} {'median':>10} {'p99':>10}")
    told("up", [*itertools.chain(*ups)])
    told("down", [*downs])
    told("turn", [*itertools.chain(*turns)])
