"""Measures the gain of speculative decoding: the same requests in turn to servers with and without `--speculate`.

    scripts/bench speculation [--speculate 4] [--concurrency 1,8] [-- more arguments for `tgi up`]

Three tasks: copying a text of the prompt, which suits n-grams; writing a story, with few matches; and sampling the
same at random, where drafts are right by chance. Each round asks both servers, and the first one alternates. The gain
is the ratio of tokens/s in a round; prints medians over the rounds. Greedy and seeded outputs of both servers must be
equal, which is checked.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tgi.microkernel.settings.options import count, counts

TEXT = """The old bridge at the end of our street was built in 1874 by two brothers from the north. They had carried
every stone from the quarry behind the hill, nearly four miles away, with a cart and a patient grey horse. When the
river rose in the spring of 1902, all other bridges of the valley were lost; only theirs stayed where it was. Since then
people here say of something that will last: it has the brothers in it. In summer children jump from its middle arch
into the cold water, and in winter the baker sells hot chestnuts where the toll house used to be. Last year the town
wanted to replace it with a wider one of concrete, but nine hundred people signed a letter, and so it was repaired."""
TASKS = {
    "copy": f"Repeat the following text word by word:\n\n{' '.join(TEXT.split())}",
    "story": "Write a story about a bridge, two brothers and a river.",
    "random": "Write a story about a bridge, two brothers and a river.",
}


class Server:
    """A running `tgi up`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def generate(self, task: str, number: int, tokens: int) -> tuple[int, str]:
        """Number of tokens and their text. Each number has its own prompt."""
        inputs = f"<|im_start|>user\n{number}. {TASKS[task]}<|im_end|>\n<|im_start|>assistant\n"
        parameters: dict[str, Any] = {"max_new_tokens": tokens, "details": True}
        if task == "random":
            parameters |= {"do_sample": True, "temperature": 1.0, "seed": number}
        body = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
        asked = urllib.request.Request(f"{self.url}/generate", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            got = json.load(answer)
        return got["details"]["generated_tokens"], got["generated_text"]

    def count(self, name: str) -> float:
        """A counter of /metrics; 0 without a sample."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


@contextmanager
def running(arguments: list[str]) -> Iterator[Server]:
    """A context with a ready server with these arguments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(port)
    command = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
    with tempfile.TemporaryDirectory(prefix="tgi-") as run:
        environ = os.environ | {"TGI_RUN": str(Path(run) / "run")}
        process = subprocess.Popen([*command, *arguments], env=environ, stdout=subprocess.DEVNULL)
        try:
            while True:
                if process.poll() is not None:
                    sys.exit(f"The server ended with code {process.returncode}.")
                try:
                    server.generate("story", 0, 2)
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.1)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


async def ask(server: Server, task: str, numbers: range, tokens: int) -> tuple[float, list[str]]:
    """Tokens/s of concurrent requests, and their texts."""
    begin = time.perf_counter()
    answers = await asyncio.gather(*(asyncio.to_thread(server.generate, task, n, tokens) for n in numbers))
    seconds = time.perf_counter() - begin
    return sum(count for count, _ in answers) / seconds, [text for _, text in answers]


def compare(servers: list[Server], task: str, at_once: int, arguments: argparse.Namespace) -> str:
    """One line of the table: `servers` are without and with drafts."""
    rates: list[list[float]] = [[], []]
    drafted, accepted = (servers[1].count(name) for name in ("tgi_draft_tokens", "tgi_accepted_draft_tokens"))
    for number in range(arguments.rounds):
        numbers = range(1 + number * at_once, 1 + (number + 1) * at_once)
        said = {}
        for which in islice(cycle((0, 1)), number % 2, number % 2 + 2):
            rate, said[which] = asyncio.run(ask(servers[which], task, numbers, arguments.tokens))
            rates[which].append(rate)
        if said[0] != said[1]:
            sys.exit(f"The servers do not say the same: {said[0]!r} and {said[1]!r}")
    drafted = servers[1].count("tgi_draft_tokens") - drafted
    accepted = servers[1].count("tgi_accepted_draft_tokens") - accepted
    gain = statistics.median(fast / slow for slow, fast in zip(*rates, strict=True))
    share = f"{accepted:.0f} of {drafted:.0f}"
    without, with_drafts = map(statistics.median, rates)
    return f"{task:<8} {at_once:>8} {without:>10.1f} {with_drafts:>10.1f} {gain:>6.2f} {share:>14}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculate", type=count, default=4)
    parser.add_argument("--concurrency", type=counts, default="1", help="requests at once, comma separated")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma separated")
    parser.add_argument("--tokens", type=count, default=160, help="of each answer, at most")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("server", nargs="*", help="more arguments for both servers, after --")
    arguments = parser.parse_args()
    tasks = arguments.tasks.split(",")
    if unknown := set(tasks) - set(TASKS):
        parser.error(f"argument --tasks: {', '.join(sorted(unknown))} is not known; there are {', '.join(TASKS)}")
    with ExitStack() as stack:
        drafts = ["--speculate", str(arguments.speculate)]
        servers = [stack.enter_context(running([*arguments.server, *more])) for more in ([], drafts)]
        print(f"{'task':<8} {'requests':>8} {'without/s':>10} {'with/s':>10} {'gain':>6} {'accepted':>14}")
        for at_once in arguments.concurrency:
            for task in tasks:
                print(compare(servers, task, at_once, arguments), flush=True)
