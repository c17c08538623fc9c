"""Measures the scheduler and the engine in one process, without HTTP, tokenizer and links, under requests at once.

    scripts/bench offline --model DIR [--requests 256] [--device cuda] [-- flags of tgi up]

The weights are random (--load-format dummy). The requests are those of `scripts/bench stack`, with random ids. The last
line is a JSON object.
"""

import argparse
import gc
import json
import random
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks.http_load import Load, loads
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import PROTOCOL, Add, End, FinishReason, Hello, Status, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.settings.loading import load_settings
from tgi.microkernel.settings.options import count
from tgi.microkernel.settings.table import OPTIONS, Settings
from tgi.scheduler.main import GC_THRESHOLD
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.startup import start_engine

WORKER, TOKENIZER = PeerId("worker", 0, b"worker"), PeerId("tokenizer", 0, b"tokenizer")


class Offline(NamedTuple):
    """A load on the scheduler and the engine alone."""

    seconds: float
    tokens_per_s: float
    steps: int
    step_ms: float  # mean


def prompt_ids(load: Load, vocabulary: int) -> list[int]:
    """Random ids of that many tokens."""
    return random.Random(load.seed).choices(range(vocabulary), k=load.inputs)


def run_offline(engine: TorchEngine, load: Sequence[Load]) -> Offline:
    """Requests at once. Raises AssertionError if one does not end with its last token."""
    engine.reset()
    limits, scheduler = engine.limits, Scheduler(SchedulerConfig())
    for peer in (TOKENIZER, WORKER):
        scheduler.handle(Hello(PROTOCOL, *peer), peer, time.monotonic())
    scheduler.handle(Status(True, True, "ready", 100, limits), WORKER, time.monotonic())
    adds = [
        Add(
            number,
            pack_column(INT32, prompt_ids(one, limits.vocab_size)),
            one.outputs,
            encode(SamplingParams(0)),
        )
        for number, one in enumerate(load)
    ]
    began = time.monotonic()
    for add in adds:
        scheduler.handle(add, TOKENIZER, began)
    in_flight: deque[Any] = deque()
    ended = steps = 0
    while ended < len(load):
        now = time.monotonic()
        while (step := scheduler.plan(now)) is not None:
            in_flight.append(engine.launch(step))
            steps += 1
        if in_flight:
            result = engine.collect(in_flight.popleft())
            assert not result.error
            scheduler.handle(result, WORKER, time.monotonic())
        for _, message in scheduler.outgoing():
            if isinstance(message, End):
                assert message.reason == FinishReason.LENGTH, message
                ended += 1
        scheduler.commit()
    seconds = time.monotonic() - began
    return Offline(seconds, sum(one.outputs for one in load) / seconds, steps, 1e3 * seconds / steps)


def settings_of(flags: Sequence[str], directory: Path, device: str, run: Path) -> Settings:
    """The worker's settings. `flags` are pairs of a flag of `tgi up` and its value."""
    given: dict[str, Any] = {"device": device, "load_format": "dummy"}
    for name, value in zip(flags[::2], flags[1::2], strict=True):
        setting = name.removeprefix("--").replace("-", "_")
        given[setting] = OPTIONS[setting].parse(value)
    return replace(load_settings(given, {}), model_dir=directory, run_dir=run)


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a directory with config.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=count, default=256)
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of requests")
    parser.add_argument("flags", nargs="*", help="flags of `tgi up` with their values, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tgi-") as run:
        settings = settings_of(arguments.flags, arguments.model, arguments.device, Path(run))
        engine = start_engine(settings, lambda stage, percent: None)
        gc.collect()
        gc.freeze()  # as the worker's loop does
        gc.set_threshold(GC_THRESHOLD)
        run_offline(engine, loads(arguments.requests, arguments.scale / 4, seed=3))  # first use of every path
        print(json.dumps(run_offline(engine, loads(arguments.requests, arguments.scale))._asdict()))


if __name__ == "__main__":
    main()
