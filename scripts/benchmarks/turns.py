"""Measures the time to first token of a chat's second turn, for histories of several lengths.

    scripts/bench turns [--model 135m] [--history 128,512,2048,3840] [--new 64]
        [--message 128] [--repetitions 5]

A turn sends the whole text again: the history and the new tokens. A history looks like a template's output: a special
token before each message of `--message` tokens. Prints medians in milliseconds: of the first turn, which is new; of
the second; and of a prompt of the new tokens alone. The difference of the last two is the cost of the history: its
text is segmented, its pages are looked up and attended to, and its last page is computed again.
"""

import argparse
import json
import random
import sys
import time

from scripts.benchmarks import workloads
from scripts.benchmarks.servers import Failed, Server, free_port
from scripts.benchmarks.serving import ROUTE
from scripts.benchmarks.streams import BadStream, burst, median
from scripts.benchmarks.workloads import Words
from tgi.microkernel.settings.options import count, counts


def first_token(server: Server, text: str) -> float:
    """Milliseconds from the request to the first token."""
    stream = burst(server.port, ROUTE, [{"inputs": text, "parameters": {"max_new_tokens": 1}}])[0]
    return 1e3 * (stream.events()[0].time - stream.sent)


def chat(words: Words, mark: str, tokens: int, message: int, draw: random.Random) -> str:
    """A text of that many tokens; every `message`-th token is `mark`."""
    sizes = [message] * (tokens // message) + [tokens % message] * (tokens % message > 0)
    return "".join(mark + words.text(size - 1, draw) for size in sizes)


def measure(
    server: Server, words: Words, mark: str, history: int, options: argparse.Namespace, seed: str
) -> list[float]:
    """Measures the first turn, the second, and the new tokens alone, once."""
    draw = random.Random(seed)
    text = chat(words, mark, history, options.message, draw)
    asked = (
        text,
        text + chat(words, mark, options.new, options.new, draw),
        chat(words, mark, options.new, options.new, draw),
    )
    return [first_token(server, one) for one in asked]


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=workloads.MADE, default="135m")
    parser.add_argument("--history", type=counts, default=(128, 512, 2048, 3840), help="tokens, comma separated")
    parser.add_argument("--new", type=count, default=64, help="tokens")
    parser.add_argument("--message", type=count, default=128, help="tokens of a message of the history")
    parser.add_argument("--repetitions", type=count, default=5)
    parser.add_argument("server", nargs="*", help="more arguments for `tgi up`, after --")
    options = parser.parse_args()
    model = workloads.made(options.model)
    words, port = Words(model.tokenizer), free_port()
    mark = next(one["content"] for one in json.loads(model.tokenizer.read_text())["added_tokens"] if one["special"])
    up = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
    lines = [f"{'history':>8} {'first turn':>12} {f'and {options.new} more':>12} {f'{options.new} alone':>12}"]
    try:
        with Server([*up, "--model-id", str(model.directory), *options.server], {}, port) as server:
            server.wait(ROUTE, {"inputs": "a", "parameters": {"max_new_tokens": 1}})
            measure(server, words, mark, options.new, options, f"{time.time_ns()} first")
            for history in options.history:
                seeds = [f"{time.time_ns()} {number}" for number in range(options.repetitions)]
                found = [measure(server, words, mark, history, options, seed) for seed in seeds]
                lines.append(
                    f"{history:>8}" + "".join(f" {median([*column]):>12.1f}" for column in zip(*found, strict=True))
                )
    except (Failed, BadStream) as error:
        sys.exit(f"The server failed: {error}")
    print(*lines, sep="\n")  # after the server's output
