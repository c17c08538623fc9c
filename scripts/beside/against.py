"""`scripts/bench --against ...`: this server and its peers in one run."""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from scripts.beside import gpu, install, models
from scripts.beside.models import Model
from scripts.beside.peers import PEERS, Peer, ours
from scripts.beside.servers import Failed
from scripts.beside.tables import tables
from scripts.beside.turns import Records, compare, told
from scripts.beside.workloads import STACK, WIDE
from tgi.kernel.errors import UserError
from tgi.kernel.option import count


def options(parser: argparse.ArgumentParser) -> None:
    """The flags of a comparison."""
    group = parser.add_argument_group("beside others", "All in turn, on the same models; see docs/performance.md.")
    known = f"known are {', '.join(PEERS)}"
    group.add_argument("--against", metavar="PEERS", help=f"compare with these servers, comma separated; {known}")
    group.add_argument("--models", default="135m,0.5b", help=f"of {', '.join((*models.MADE, models.DEMO))}")
    group.add_argument(
        "--gguf", type=Path, metavar="FILE", help="compare on this GGUF file instead, as those do that read it"
    )
    group.add_argument("--formats", default="", help=f"the models in these formats: {', '.join(models.FORMATS)}")
    group.add_argument("--workloads", default="", help="only these of W1 to W6 and stack")
    group.add_argument("--rounds", type=count, default=3, help="turns of each server (3)")


def run(arguments: argparse.Namespace) -> int:
    """Compares, prints tables or JSON; the exit code: 1 if this server failed, whatever others did."""
    names = listed(arguments.against, PEERS)
    need_alike([PEERS[name] for name in names])
    try:
        chosen = wanted(arguments)
    except (Failed, UserError) as error:
        sys.exit(f"The models could not be made: {error}")
    versions, peers, missing = available([PEERS[name] for name in names])
    servers = [ours(arguments=tuple(arguments.server)), *peers]
    versions = {"ours": servers[0].version()} | versions
    records = compare(chosen, servers, arguments.rounds, arguments.repetitions, models.PEERS / "logs")
    if arguments.json:
        print(json.dumps(document(arguments, versions, missing, records), indent=1))
    else:
        print(f"{machine()}; {arguments.rounds} rounds of {arguments.repetitions}; medians\n")
        print("\n".join(f"- {name}: {version}" for name, version in (versions | missing).items()))
        for model in chosen:
            print(f"\n{tables(model, records[model.name])}")
    return int(any(found["ours"].failed for found in records.values()))


def listed(text: str, known: Any = None) -> list[str]:
    """A comma separated list; the program ends with a message if a name of it is not known."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if known is not None and name not in known:
            sys.exit(f"{name!r} is not known; there are {', '.join(known)}.")
    return names


def need_alike(peers: list[Peer]) -> None:
    """The program ends with a message if there is a GPU, which this server would compute on, and a peer would not."""
    left = [peer.name for peer in peers if not peer.gpu]
    if left and gpu.found():
        sys.exit(
            f"This server would compute on the GPU, and {', '.join(left)} on CPU. Hide the GPU from all of them, with "
            "CUDA_VISIBLE_DEVICES= in the environment, or leave them out."
        )


def wanted(arguments: argparse.Namespace) -> list[Model]:
    """The models that the arguments name, made if need be. Failed if they cannot be."""
    only = listed(arguments.workloads, WIDE | STACK)
    forms = listed(arguments.formats, models.FORMATS)
    if arguments.gguf:
        chosen = [models.of_gguf(arguments.gguf)]
    else:
        names = listed(arguments.models, (*models.MADE, models.DEMO))
        chosen = [models.demo() if name == models.DEMO else models.made(name) for name in names]
        if forms:
            quantize = install.llama_cpp() / "llama-quantize"
            chosen = [models.quantized(model, form, quantize) for model in chosen for form in forms]
    return [_limited(model, only) for model in chosen]


def _limited(model: Model, only: list[str]) -> Model:
    """With these workloads alone, if any are named."""
    kept = {name: workload for name, workload in model.workloads.items() if not only or name in only}
    if not kept:
        sys.exit(f"{model.name} has none of these workloads; it has {', '.join(model.workloads)}.")
    return model._replace(workloads=kept)


def available(peers: list[Peer]) -> tuple[dict[str, str], list[Peer], dict[str, str]]:
    """The versions of the peers, those that can be installed, and why others cannot."""
    versions, there, missing = {}, [], {}
    for peer in peers:
        try:
            versions[peer.name] = peer.version()
            there.append(peer)
        except Failed as error:
            missing[peer.name] = f"not installed: {error}"
            told(f"{peer.name}: {missing[peer.name]}")
    return versions, there, missing


def document(
    arguments: argparse.Namespace, versions: dict[str, str], missing: dict[str, str], records: Records
) -> dict[str, Any]:
    """Everything that was measured, repetition by repetition."""
    return {
        "machine": machine(),
        "rounds": arguments.rounds,
        "versions": versions,
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
    return f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _processor() -> str:
    """What Linux calls the processor; elsewhere its architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
