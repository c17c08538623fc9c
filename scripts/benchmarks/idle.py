"""Wake-ups of a server's processes while streams and connections are open and nothing happens (Linux).

    scripts/bench idle [--count 200] [--seconds 2] [--intervals 3]

Opens `--count` connections without a request and as many streams, suspends the scripted worker, so that no stream gets
a token, and counts the voluntary context switches of all threads. Prints the fewest of the intervals for each process,
and exits with 1 if one has more than its timers explain, as a wake-up per stream or connection would be.
"""

import argparse
import os
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil

from scripts.benchmarks import workloads
from scripts.benchmarks.servers import Server, free_port
from scripts.benchmarks.serving import ROUTE
from tgi.microkernel.host import rundir
from tgi.microkernel.settings.options import count

TIMEOUT_SECONDS = 60
BODY = b'{"inputs":"Hello","parameters":{"max_new_tokens":1500}}'
STREAM = b"POST /generate_stream HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
PING = b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n"
# Two threads of each process wake up for the beats of its neighbours, two per second and direction, and the supervisor
# ten times per second after a start.
WAKE_UPS_PER_SECOND = 20


def wake_ups(process: psutil.Process) -> int:
    """The voluntary context switches of all threads of a process so far."""
    return sum(psutil.Process(thread.id).num_ctx_switches().voluntary for thread in process.threads())


def connect(port: int, request: bytes) -> socket.socket:
    """A connection whose request has the head of a response with status 200."""
    connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS)
    connection.sendall(request)
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(4096)
    if not head.startswith(b"HTTP/1.1 200"):
        sys.exit(f"The server answered {head[:200]!r}.")
    return connection


def main() -> None:
    """Prints a row for each process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=count, default=200, help="streams, and connections without a request")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of an interval")
    parser.add_argument("--intervals", type=count, default=3)
    options = parser.parse_args()
    port = free_port()
    up = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
    up += ["--model-id", str(workloads.made("two-layer").directory), "--max-concurrent-requests", str(options.count)]
    up += ["--worker", "scripted", "--scripted-step-us", "20000"]
    with Server(up, {}, port, Path(os.devnull)) as server:
        server.wait(ROUTE, {"inputs": "a", "parameters": {"max_new_tokens": 1}})
        processes = {state.name: psutil.Process(state.pid) for state in rundir.read_states(server.run_directory)}
        requests = [PING] * options.count + [STREAM % (len(BODY), BODY)] * options.count
        connections = [connect(port, request) for request in requests]
        worker = processes.pop("worker-0")
        worker.suspend()
        try:
            time.sleep(2)  # until the last tokens have been sent
            seen = [{name: wake_ups(process) for name, process in processes.items()}]
            for _ in range(options.intervals):
                time.sleep(options.seconds)
                seen.append({name: wake_ups(process) for name, process in processes.items()})
        finally:
            worker.resume()
        for connection in connections:
            connection.close()
    woken = {name: min(after[name] - before[name] for before, after in pairwise(seen)) for name in processes}
    print(f"wake-ups in {options.seconds:g} s with {options.count} idle connections and {options.count} idle streams")
    for name, number in woken.items():
        print(f"{name:<16} {number:>5}")
    if max(woken.values()) > WAKE_UPS_PER_SECOND * options.seconds + 10:
        sys.exit("More than timers explain.")


if __name__ == "__main__":
    main()
