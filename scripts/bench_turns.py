#!/usr/bin/env python
"""Measures how long the second turn of a chat waits for its first token, behind histories of several lengths.

    .venv/bin/python -m scripts.bench_turns [--model 135m] [--history 128,512,2048,3840] [--new 64] [--repetitions 5]

A turn sends the whole text again: the history and so many new tokens. Printed are medians, in milliseconds: of the
first turn, which nobody has asked before; of the second; and of a prompt of the new tokens alone. What the second takes
beyond the last is what the history still costs: its text is encoded, its pages are looked up and attended to, and the
page in which it ends is computed again.
"""

import argparse
import random
import sys
import time

from scripts.bench import ROUTE
from scripts.beside import models
from scripts.beside.servers import Server, free_port
from scripts.beside.streams import burst, median
from scripts.beside.workloads import Words
from tgi.kernel.option import count, counts


def first_token(server: Server, text: str) -> float:
    """Milliseconds from the request to the first token."""
    stream = burst(server.port, ROUTE, [{"inputs": text, "parameters": {"max_new_tokens": 1}}])[0]
    return 1e3 * (stream.events()[0].time - stream.sent)


def measure(server: Server, words: Words, history: int, new: int, seed: str) -> tuple[float, float, float]:
    """The first turn, the second, and the new tokens alone, once."""
    draw = random.Random(seed)
    text = words.text(history, draw)
    return (
        first_token(server, text),
        first_token(server, text + words.text(new, draw)),
        first_token(server, words.text(new, draw)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=models.MADE, default="135m")
    parser.add_argument("--history", type=counts, default=(128, 512, 2048, 3840), help="tokens, comma separated")
    parser.add_argument("--new", type=count, default=64, help="tokens")
    parser.add_argument("--repetitions", type=count, default=5)
    parser.add_argument("server", nargs="*", help="more arguments for `tgi up`, after --")
    options = parser.parse_args()
    model = models.made(options.model)
    words, port = Words(model.tokenizer), free_port()
    up = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
    with Server([*up, "--model-id", str(model.directory), *options.server], {}, port) as server:
        server.wait(ROUTE, {"inputs": "a", "parameters": {"max_new_tokens": 1}})
        measure(server, words, options.new, options.new, f"{time.time_ns()} first")
        print(f"{'history':>8} {'first turn':>12} {f'and {options.new} more':>12} {f'{options.new} alone':>12}")
        for history in options.history:
            seeds = [f"{time.time_ns()} {number}" for number in range(options.repetitions)]
            found = [measure(server, words, history, options.new, seed) for seed in seeds]
            print(f"{history:>8}" + "".join(f" {median([*column]):>12.1f}" for column in zip(*found, strict=True)))


if __name__ == "__main__":
    main()
