"""`scripts/bench --against ...`: this server and its peers in one run."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks import workloads
from scripts.benchmarks.peers import PEERS, Counted, Peer, gpu_found, llama_cpp, ours
from scripts.benchmarks.servers import Failed, Server
from scripts.benchmarks.streams import BadStream, Stream, burst, median
from scripts.benchmarks.workloads import FIRST, LENGTHS, STACK, WIDE, Model, Words, Workload
from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.options import count


class Measured(NamedTuple):
    """One repetition of a workload."""

    tokens_s: float  # tokens of all streams / time from the first request to the last byte
    ttft_ms: float  # from a request to the first piece of its text; median of the streams
    itl_ms: float  # time from the first piece of text to the last / tokens; mean of the streams
    cpu_us: float  # CPU time of all processes of the server per token


@dataclass
class Record:
    """Results of one server with one model over all rounds. `failed`: reason by workload; "" is the whole server."""

    first_s: list[float] = field(default_factory=list)  # from the command to the first token
    memory_mb: list[float] = field(default_factory=list)  # after the workloads
    workloads: dict[str, list[Measured]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


Records = dict[str, dict[str, Record]]  # by model, then server


def options(parser: argparse.ArgumentParser) -> None:
    """The flags of a comparison."""
    group = parser.add_argument_group(
        "comparison", "Servers in turn, on the same models; see docs/performance-methods.md."
    )
    known = f"known are {', '.join(PEERS)}"
    group.add_argument("--against", metavar="PEERS", help=f"compare with these servers, comma separated; {known}")
    group.add_argument("--models", default="135m,0.5b", help=f"of {', '.join((*workloads.MADE, workloads.DEMO))}")
    group.add_argument(
        "--gguf", type=Path, metavar="FILE", help="compare on this GGUF file instead, as those do that read it"
    )
    group.add_argument("--formats", default="", help=f"the models in these formats: {', '.join(workloads.FORMATS)}")
    group.add_argument("--workloads", default="", help="only these of W1 to W6, stack and 1k to 16k")
    group.add_argument("--rounds", type=count, default=3, help="turns of each server (3)")


def run(arguments: argparse.Namespace) -> int:
    """Compares and prints tables or JSON. Returns the exit code: 1 only if this server failed."""
    names = listed(arguments.against, PEERS)
    need_alike([PEERS[name] for name in names])
    try:
        chosen = wanted(arguments)
    except (Failed, UserError) as error:
        sys.exit(f"The models could not be made: {error}")
    versions, sets, servers, missing = available(
        [ours(arguments=tuple(arguments.server)), *(PEERS[name] for name in names)]
    )
    records = compare(chosen, servers, arguments.rounds, arguments.repetitions, workloads.PEERS_DIRECTORY / "logs")
    if arguments.json:
        print(json.dumps(document(arguments, versions, sets, missing, records), indent=1))
    else:
        print(f"{machine()}; {arguments.rounds} rounds of {arguments.repetitions}; medians\n")
        print("\n".join(f"- {name}: {version}" for name, version in (versions | missing).items()))
        print(f"\n{table(['', *sets], [['instruction set', *sets.values()]])}")
        for model in chosen:
            print(f"\n{tables(model, records[model.name])}")
    return int(any(found["ours"].failed for found in records.values()))


def listed(text: str, known: Any = None) -> list[str]:
    """Splits a comma-separated list; exits with a message at an unknown name."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if known is not None and name not in known:
            sys.exit(f"{name!r} is not known; there are {', '.join(known)}.")
    return names


def need_alike(peers: list[Peer]) -> None:
    """Exits with a message if this server would use a GPU and a peer would not."""
    left = [peer.name for peer in peers if not peer.gpu]
    if left and gpu_found():
        sys.exit(
            f"This server would compute on the GPU, and {', '.join(left)} on CPU. Hide the GPU from all of them, with "
            "CUDA_VISIBLE_DEVICES= in the environment, or leave them out."
        )


def wanted(arguments: argparse.Namespace) -> list[Model]:
    """The models named by the arguments, made if necessary. Raises Failed."""
    only = listed(arguments.workloads, WIDE | STACK | LENGTHS)
    forms = listed(arguments.formats, workloads.FORMATS)
    if arguments.gguf:
        chosen = [workloads.of_gguf(arguments.gguf)]
    else:
        names = listed(arguments.models, (*workloads.MADE, workloads.DEMO))
        chosen = [workloads.demo() if name == workloads.DEMO else workloads.made(name) for name in names]
        if forms:
            quantize = llama_cpp() / "llama-quantize"
            chosen = [workloads.quantized(model, form, quantize) for model in chosen for form in forms]
    return [_limited(model, only) for model in chosen]


def _limited(model: Model, only: list[str]) -> Model:
    """Restricts a model to these workloads, if any are named."""
    kept = {name: workload for name, workload in model.workloads.items() if not only or name in only}
    if not kept:
        sys.exit(f"{model.name} has none of these workloads; it has {', '.join(model.workloads)}.")
    return model._replace(workloads=kept)


def available(peers: list[Peer]) -> tuple[dict[str, str], dict[str, str], list[Peer], dict[str, str]]:
    """The versions and the instruction sets of the peers, the installed ones, and why others are not."""
    versions, sets, there, missing = {}, {}, [], {}
    for peer in peers:
        try:
            version = peer.version()
            sets[peer.name] = peer.instructions()
            versions[peer.name] = version
            there.append(peer)
        except Failed as error:
            missing[peer.name] = f"not installed: {error}"
            told(f"{peer.name}: {missing[peer.name]}")
    return versions, sets, there, missing


def document(
    arguments: argparse.Namespace,
    versions: dict[str, str],
    sets: dict[str, str],
    missing: dict[str, str],
    records: Records,
) -> dict[str, Any]:
    """All measurements, by repetition."""
    return {
        "machine": machine(),
        "rounds": arguments.rounds,
        "versions": versions,
        "instruction_sets": sets,
        "not_installed": missing,
        "models": {
            model: {
                name: {
                    "first_token_s": record.first_s,
                    "memory_mb": record.memory_mb,
                    "workloads": {w: [one._asdict() for one in found] for w, found in record.workloads.items()},
                    "failed": record.failed,
                }
                for name, record in found.items()
            }
            for model, found in records.items()
        },
    }


def machine() -> str:
    """The machine in words."""
    return f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _processor() -> str:
    """The processor's name on Linux, otherwise its architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


# --- measuring: every server in turn, on the same models and prompts ---


def compare(chosen: list[Model], servers: list[Peer], rounds: int, repetitions: int, logs: Path) -> Records:
    """Runs every server in each round of each model, with all of the model's workloads.

    Output of servers goes to files in `logs`. All servers of a round get the same prompts.
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
    """Starts a server, measures each of the model's workloads once per seed, and ends it; adds to `record`."""
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
    """One repetition. Raises BadStream if a stream has the wrong number of tokens."""
    prompts, before = words.prompts(workload, seed)
    if before:
        burst(server.port, peer.path, [peer.body(before, 1)])
    spent = server.cpu()
    streams = burst(server.port, peer.path, [peer.body(prompt, workload.tokens_out) for prompt in prompts])
    spent = server.cpu() - spent
    return figures(streams, [peer.read(stream) for stream in streams], workload, spent)


def figures(streams: list[Stream], counts: list[Counted], workload: Workload, cpu: float) -> Measured:
    """The figures of a repetition from its streams and CPU seconds."""
    wanted = (workload.shared + workload.tokens_in, workload.tokens_out)
    # A server may add tokens to complete a character.
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
    """Prints progress to standard error."""
    print(line, file=sys.stderr, flush=True)


# --- tables in Markdown ---


NOTHING = "–"


def tables(model: Model, records: dict[str, Record]) -> str:
    """The report of one model. The first record is ours; ratios are ours to the best peer's."""
    names = list(records)
    rows = [name for name in model.workloads if any(name in record.workloads for record in records.values())]
    if not rows:
        return f"## {model.name}\n\n{complaints(records)}"
    speed = _figures(rows, records, lambda measured: measured.tokens_s)
    wait = _figures(rows, records, lambda measured: measured.ttft_ms)
    spent = _figures(rows, records, lambda measured: measured.cpu_us)
    peers = names[1:]
    heads = ["", *(f"{name} tokens/s" for name in names), "ours/best", *(f"{name} TTFT ms" for name in names)]
    lines = [
        [
            f"{row}: {model.workloads[row]}",
            *_cells(speed[row]),
            ratio(speed[row], max),
            *_cells(wait[row]),
            ratio(wait[row], min),
        ]
        for row in rows
    ]
    text = f"## {model.name}\n\n{table([*heads, 'ours/best'], lines)}\n\n"
    lines = [[f"{row}: CPU µs/token", *_cells(spent[row])] for row in rows]
    lines.append(["start to first token, s", *(_number(median(record.first_s)) for record in records.values())])
    lines.append(["memory, MB", *(_number(median(record.memory_mb)) for record in records.values())])
    text += table(["", names[0], *peers], lines)
    if LENGTHS.keys() >= set(rows):
        text += f"\n\n{growth(model, rows, records)}"
    return f"{text}\n\n{said}" if (said := complaints(records)) else text


def growth(model: Model, rows: list[str], records: dict[str, Record]) -> str:
    """Cost per token by length of the context, and how much each further 1,024 positions add to it over the first half
    of the lengths and over the other. Attention reads all positions, so both numbers should be equal."""
    costs = {
        "prefill µs/token": _figures(rows, records, lambda measured: 1e3 * measured.ttft_ms),
        "decode ms/token": _figures(rows, records, lambda measured: measured.itl_ms),
    }
    lengths = {row: model.workloads[row].tokens_in for row in rows}
    costs["prefill µs/token"] = {
        row: [value / lengths[row] for value in values] for row, values in costs["prefill µs/token"].items()
    }
    heads = ["context", *(f"{name} {cost}" for cost in costs for name in records)]
    lines = [[row, *(cell for found in costs.values() for cell in _cells(found[row]))] for row in rows]
    middle = len(rows) // 2
    for first, last in ((rows[0], rows[middle]), (rows[middle], rows[-1])):
        if first != last:
            further = (lengths[last] - lengths[first]) / 1024
            pairs = [pair for found in costs.values() for pair in zip(found[first], found[last], strict=True)]
            lines.append([f"{first} to {last}, per 1k", *_cells([(end - start) / further for start, end in pairs])])
    return table(heads, lines)


def complaints(records: dict[str, Record]) -> str:
    """Failed servers and reasons."""
    return "\n".join(
        f"- {name}{f', {workload}' if workload else ''}: {why}"
        for name, record in records.items()
        for workload, why in record.failed.items()
    )


def ratio(values: list[float], best: Callable[[list[float]], float]) -> str:
    """The ratio of ours, the first value, to the best available peer."""
    ours, peers = values[0], [value for value in values[1:] if value == value]
    return f"{ours / best(peers):.2f}" if peers and ours == ours else NOTHING


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, aligned for readers of the plain text."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(_padded(line, widths))} |" for line in lines)


def _padded(line: list[str], widths: list[int]) -> list[str]:
    return [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]


def _figures(
    rows: list[str], records: dict[str, Record], figure: Callable[[Measured], float]
) -> dict[str, list[float]]:
    """Medians of a figure over the repetitions, by workload and server; nan if missing."""
    return {
        row: [median([figure(one) for one in record.workloads.get(row, [])]) for record in records.values()]
        for row in rows
    }


def _cells(values: list[float]) -> list[str]:
    return [_number(value) for value in values]


def _number(value: float) -> str:
    if value != value:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
