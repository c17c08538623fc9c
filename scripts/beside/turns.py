"""Servers in turn on the same models and workloads, several rounds: ours, a peer, the next peer, ours again."""

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from scripts.beside.models import Model
from scripts.beside.peers import Counted, Peer
from scripts.beside.servers import Failed, Server
from scripts.beside.streams import BadStream, Stream, burst, median
from scripts.beside.workloads import FIRST, Words, Workload


class Measured(NamedTuple):
    """One repetition of a workload."""

    tokens_s: float  # tokens of all streams by the time from the first request to the last byte
    ttft_ms: float  # from a request to the first piece of its text; median of the streams
    itl_ms: float  # from the first piece of text to the last, by tokens; mean of the streams
    cpu_us: float  # CPU time of all the server's processes for each token


@dataclass
class Record:
    """What one server showed with one model, over all rounds. What failed says why, by workload, "" being all."""

    first_s: list[float] = field(default_factory=list)  # from the command to the first token
    memory_mb: list[float] = field(default_factory=list)  # after the workloads
    workloads: dict[str, list[Measured]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


Records = dict[str, dict[str, Record]]  # by model, then server


def compare(chosen: list[Model], servers: list[Peer], rounds: int, repetitions: int, logs: Path) -> Records:
    """Each round of each model gives every server its turn, with all of the model's workloads.

    What servers print goes to files in `logs`. All servers of a round get the same prompts.
    """
    logs.mkdir(parents=True, exist_ok=True)
    records: Records = {model.name: {server.name: Record() for server in servers} for model in chosen}
    for model in chosen:
        words = Words(model.tokenizer)
        for number in range(rounds):
            seeds = [f"{time.time_ns()} {repetition}" for repetition in range(repetitions)]
            for server in servers:
                record = records[model.name][server.name]
                if "" not in record.failed:
                    told(f"{model.name}, round {number + 1} of {rounds}: {server.name}")
                    turn(server, model, words, seeds, record, logs / f"{server.name}-{model.name}.log")
    return records


def turn(peer: Peer, model: Model, words: Words, seeds: list[str], record: Record, log: Path) -> None:
    """Starts a server, measures it on each of the model's workloads once for each seed, ends it; into `record`."""
    try:
        with peer.start(model, log) as server:
            server.wait(peer.path, peer.body(words.prompts(FIRST, "start")[0][0], 1))
            measure(peer, server, words, FIRST, "first")
            record.first_s.append(server.first)
            for name, workload in model.workloads.items():
                if name not in record.failed:
                    try:
                        found = [measure(peer, server, words, workload, f"{name} {seed}") for seed in seeds]
                        record.workloads.setdefault(name, []).extend(found)
                    except (BadStream, OSError) as error:
                        record.failed[name] = f"{error}{server.said()}"
                        told(f"{peer.name}, {name}: {record.failed[name]}")
            record.memory_mb.append(server.memory())
    except (Failed, BadStream, OSError) as error:
        record.failed[""] = str(error)
        told(f"{peer.name}: {error}")


def measure(peer: Peer, server: Server, words: Words, workload: Workload, seed: str) -> Measured:
    """One repetition. BadStream if a stream had another number of tokens than was asked for."""
    prompts, before = words.prompts(workload, seed)
    if before:
        burst(server.port, peer.path, [peer.body(before, 1)])
    spent = server.cpu()
    streams = burst(server.port, peer.path, [peer.body(prompt, workload.tokens_out) for prompt in prompts])
    spent = server.cpu() - spent
    return figures(streams, [peer.read(stream) for stream in streams], workload, spent)


def figures(streams: list[Stream], counts: list[Counted], workload: Workload, cpu: float) -> Measured:
    """What a repetition's streams and `cpu` seconds come to."""
    wanted = (workload.shared + workload.tokens_in, workload.tokens_out)
    # A server may go on for the rest of a character.
    if wrong := [got for got in counts if got.tokens_in != wanted[0] or not 0 <= got.tokens_out - wanted[1] <= 4]:
        raise BadStream(f"{wrong[0].tokens_in} tokens in, {wrong[0].tokens_out} out; asked for were {wanted}")
    if any(not got.times for got in counts):
        raise BadStream("a stream without text")
    tokens = sum(got.tokens_out for got in counts)
    seconds = max(stream.ended for stream in streams) - min(stream.sent for stream in streams)
    return Measured(
        tokens / seconds,
        1e3 * median([got.times[0] - stream.sent for stream, got in zip(streams, counts, strict=True)]),
        1e3 * statistics.mean((got.times[-1] - got.times[0]) / max(got.tokens_out - 1, 1) for got in counts),
        1e6 * cpu / tokens,
    )


def told(line: str) -> None:
    """Progress goes beside the figures."""
    print(line, file=sys.stderr, flush=True)
