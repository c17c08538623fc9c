"""Measures what a delay between hosts adds to a stream: three hosts on an emulated network, a worker without a model.

    scripts/bench links [--step-ms 20] [--tokens 120] [--delays 0,10,50] [--repetitions 3]

The front end with the tokenizers, the scheduler, and the worker run on hosts of their own. The delay, in milliseconds
and one way, holds on one of the two links. Prints the median time to the first token and between two tokens, in
milliseconds. Needs root, since it makes network namespaces.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.serving import ROUTE, bodies
from scripts.benchmarks.streams import BadStream, burst, median
from scripts.make_model import make_model
from scripts.reliability.network import Host, Network, missing_here
from tgi.microkernel.settings.options import count

PORT, HTTP_PORT = 3100, 3000
LINKS = (("front", "scheduler"), ("scheduler", "worker"))
PATIENCE_SECONDS = 60.0


@contextlib.contextmanager
def deployment(network: Network, directory: Path, step_us: int) -> Iterator[Host]:
    """Starts all processes. Yields the host of the front end, which listens on loopback, when it has sent a token."""
    make_model("llama", directory / "model")
    command = [sys.executable, "-m", "tgi"]
    subprocess.run([*command, "keys", "new", str(directory / "keys")], check=True, capture_output=True)
    address = f"tcp://{network['scheduler'].address}:{PORT}"
    connect = ["--connect", address, "--keys", str(directory / "keys" / "host.key")]
    listen = ["--listen", address, "--keys", str(directory / "keys" / "scheduler.key")]
    worker = ["--worker", "scripted", "--scripted-step-us", str(step_us)]
    front = ["--hostname", "127.0.0.1", "--port", str(HTTP_PORT)]
    commands = [
        ("scheduler", ["scheduler", *listen]),
        ("worker", ["worker", *connect, *worker]),
        ("front", ["tokenizer", *connect, *front]),
        ("front", ["api", *front]),
    ]
    processes, log = [], subprocess.DEVNULL
    try:
        for name, arguments in commands:
            run = {"TGI_RUN": str(directory / name), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
            full = [*command, *arguments, "--model-id", str(directory / "model")]
            processes.append(network[name].run(subprocess.Popen, full, env=run, stdout=log, stderr=log))
        end = time.monotonic() + PATIENCE_SECONDS
        while not stream(network["front"], 1):
            if time.monotonic() > end:
                sys.exit(f"no token after {PATIENCE_SECONDS:g} s")
            time.sleep(0.2)
        yield network["front"]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def stream(host: Host, tokens: int) -> list[float]:
    """Seconds from the request to each token of a stream; empty if there is no server yet."""
    try:
        (got,) = host.run(burst, HTTP_PORT, ROUTE, bodies(1, 0, 16, tokens), PATIENCE_SECONDS)
        return [event.time - got.sent for event in got.events()]
    except (OSError, BadStream):
        return []


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=count, default=120)
    parser.add_argument("--delays", default="0,10,50", help="milliseconds, with commas")
    parser.add_argument("--repetitions", type=count, default=3)
    arguments = parser.parse_args()
    if reason := missing_here():
        sys.exit(f"cannot emulate a network: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="tgi-links-") as directory,
        Network("front", "scheduler", "worker") as network,
        deployment(network, Path(directory), int(1000 * arguments.step_ms)) as host,
    ):
        print("delayed link        delay  first token  between tokens")
        for link in LINKS:
            for delay in arguments.delays.split(","):
                network.reset()
                network.change_between(*link, delay=float(delay) / 1000)
                stream(host, 20)
                runs = [run for _ in range(arguments.repetitions) if len(run := stream(host, arguments.tokens)) > 1]
                first = 1000 * median([run[0] for run in runs])
                between = 1000 * median([(run[-1] - run[0]) / (len(run) - 1) for run in runs])
                print(f"{'-'.join(link):<18}{float(delay):7.1f}{first:13.1f}{between:16.1f}", flush=True)


if __name__ == "__main__":
    main()
