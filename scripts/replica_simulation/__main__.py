"""The command line of `scripts/simulate replicas`, and its report."""

import argparse
import gc
import resource
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from scripts.replica_simulation.fleet import (
    Figures,
    FleetConfig,
    InTurn,
    Policy,
    Product,
    ShortestQueue,
    StepTimes,
    simulate,
)
from scripts.replica_simulation.workload import Mix
from tgi.microkernel.settings.options import count, integer, number
from tgi.scheduler.main import GC_THRESHOLD
from tgi.tokenizer.replica_choice import BLOCK_TOKENS

Value = TypeVar("Value")

# Assumed, not measured: an 8B model in bfloat16 on an H100 SXM, from its data sheet. A step reads 16 GB of weights at
# 3.35 TB/s, and some more: 7 ms. A prompt token takes 2 * 8e9 operations at half of 990 TFLOP/s: 32 us. A position has
# 128 KB of keys and values: 0.04 us. 20 us per row for sampling and the host.
ASSUMED_H100_8B = StepTimes(fixed=7e-3, row=2e-5, token=3.2e-5, position=3.9e-8)

# Figures need some requests after the warm-up; with more load than this, requests only wait.
LEAST_REQUESTS, MOST_LOAD = 100, 10
LEAST_PAGES = -(-Mix().most_tokens // BLOCK_TOKENS)

POLICIES: dict[str, type[Policy]] = {"product": Product, "turns": InTurn, "shortest": ShortestQueue}

HELP = """\
Simulates many replicas on virtual time: the schedulers and the tokenizers' choice are the product's, the workers take
the time of a cost model. `product` is that choice; `turns` takes the replicas in turn; `shortest` is a perfect balancer
without regard to caches, which knows the number of requests at each replica at any time.

"hit rate" is the share of prompt tokens that were found in a prefix cache, and "one cache" what a single cache with the
pages of all replicas would have found. "load" is the most requests, running and waiting, that a replica has, over the
mean of all replicas, each averaged over the time from the end of the warm-up (the first fifth of the requests) to the
last arrival; "work" is the same for computed tokens. "TTFT" is from the choice to the end of the step that draws the
first token. "choice" is CPU time of this process.

A quarter of the requests have unshared prompts, 40 % are turns of conversations, the others have one of twice as many
system prompts as replicas, by Zipf's law. Arrivals are Poisson, with twice the rate in bursts, in which every fourth
request has the same system prompt.
"""


class Row(NamedTuple):
    """A line of the report."""

    policy: str
    figures: Figures
    cpu_seconds: float

    def text(self) -> str:
        """The columns under HEADER."""
        one, cpu = self.figures, 1e6 * self.cpu_seconds / self.figures.requests
        return (
            f"{self.policy:<9} {one.hit_rate:>8.1%} {one.one_cache_hit_rate:>9.1%} {1e3 * one.first_token(0.5):>8.0f} "
            f"{1e3 * one.first_token(0.99):>8.0f} {one.load_imbalance:>6.2f} {one.work_imbalance:>6.2f} "
            f"{sum(one.loads) / len(one.loads):>10.1f} {one.virtual_seconds:>9.1f} "
            f"{1e6 * one.choice_seconds / one.requests:>10.0f} {cpu:>11.0f}"
        )


HEADER = (
    f"{'':<9} {'hit rate':>8} {'one cache':>9} {'TTFT p50':>8} {'p99, ms':>8} {'load':>6} {'work':>6} "
    f"{'mean load':>10} {'virtual s':>9} {'choice, us':>10} {'CPU us/req.':>11}"
)


def _read(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A parser of a setting as one of an argument, whose error says what is expected."""

    def read(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _step_times(text: str) -> StepTimes:
    """Raises ValueError if the text is not up to four numbers."""
    values = [number(part) for part in text.split(",")]
    if not 3 <= len(values) <= 4 or min(values) < 0 or values[0] == 0:
        raise ValueError("give FIXED,ROW,TOKEN or FIXED,ROW,TOKEN,POSITION in seconds, such as 0.008,0.002,0.001")
    return StepTimes(*values)


def main() -> None:
    """Prints a row per policy."""
    parser = argparse.ArgumentParser(
        prog="scripts/simulate replicas", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=_read(count), default=20)
    parser.add_argument("--requests", type=_read(count), default=8000, help=f"at least {LEAST_REQUESTS}")
    parser.add_argument("--tokenizers", type=_read(count), default=8)
    parser.add_argument(
        "--load", type=_read(number), default=0.7, help="share of the capacity with one cache and full batches"
    )
    parser.add_argument("--slots", type=_read(count), default=128, help="requests that a replica computes at once")
    parser.add_argument(
        "--pages",
        type=_read(count),
        default=4096,
        help=f"of {BLOCK_TOKENS} tokens, of each replica; at least {LEAST_PAGES}, for the longest request",
    )
    parser.add_argument("--prefill-tokens", type=_read(count), default=2048, help="prompt tokens of a step, at most")
    parser.add_argument("--policies", default="product,turns,shortest", help="comma separated")
    parser.add_argument("--seed", type=_read(integer), default=0)
    parser.add_argument(
        "--step-times",
        type=_read(_step_times),
        default=ASSUMED_H100_8B,
        metavar="FIXED,ROW,TOKEN[,POSITION]",
        help="seconds of a step, and of each of its decode rows, prompt tokens and positions; default: an assumed H100 "
        "with an 8B model",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.policies.split(",")) - POLICIES.keys():
        parser.error(f"there is no policy {', '.join(unknown)}; choose from {', '.join(POLICIES)}")
    if arguments.requests < LEAST_REQUESTS:
        parser.error(f"--requests is {arguments.requests}; give at least {LEAST_REQUESTS}")
    if arguments.pages < LEAST_PAGES:
        parser.error(f"--pages is {arguments.pages}; the longest request needs {LEAST_PAGES}")
    if not 0 < arguments.load <= MOST_LOAD:
        parser.error(f"--load is {arguments.load:g}; give a number above 0 and at most {MOST_LOAD}")
    times: StepTimes = arguments.step_times
    source = "assumed for an 8B model on an H100, not measured" if times is ASSUMED_H100_8B else "given"
    config = FleetConfig(
        arguments.replicas, arguments.tokenizers, arguments.slots, arguments.pages, times, arguments.prefill_tokens
    )
    gc.set_threshold(4 * GC_THRESHOLD)
    print(
        f"{config.replicas} replicas, {config.tokenizers} tokenizers, {arguments.requests:,} requests, load "
        f"{arguments.load:g}, seed {arguments.seed}\nstep times ({source}): {1e3 * times.fixed:.2f} ms + "
        f"{1e6 * times.row:.1f} us per row + {1e6 * times.token:.1f} us per prompt token + "
        f"{1e6 * times.position:.3f} us per position\n\n{HEADER}",
        flush=True,
    )
    for name in arguments.policies.split(","):
        began = time.process_time()
        figures = simulate(config, POLICIES[name](), Mix(), arguments.load, arguments.requests, arguments.seed)
        print(Row(name, figures, time.process_time() - began).text(), flush=True)
    print(f"\nmemory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB")


if __name__ == "__main__":
    main()
