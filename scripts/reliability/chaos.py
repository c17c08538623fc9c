"""Disturbs a server on real processes and compares every answer with the undisturbed one.

    scripts/chaos                                  500 clients, a SIGKILL or SIGSTOP every second, for a minute
    scripts/chaos --seconds 600                    the soak: also shows memory and open files over the time
    scripts/chaos --adapter-updates --worker torch --clients 40 --seconds 90 -- --replicas 2
    scripts/chaos --clients 150 --interval 1.5 --signals KILL --roles tokenizer,scheduler,worker --seconds 300

Each client sends one request after the other, chosen from `--requests` different ones that use every feature of the
API. First each of them is answered once by the undisturbed server; that is the expected answer. Then every `--interval`
seconds a random process gets a random signal. Half of the stopped processes continue after a while; the others have to
be replaced by the server. A client whose front end was killed resumes its stream with Last-Event-ID, and sends a
request again whose answer was cut off. With `--adapter-updates` one more client loads an adapter at run time, uses it
and unloads it, again and again. Prints the longest silences that clients of streams have seen, and the number of
answers that are

    exact    equal to the undisturbed one
    close    equal but for logprobs, which differ by up to --logprob-tolerance (on a GPU products depend on the batch)
    wrong    different
    lost     refused with an error, or cut off
    hung     silent for `--patience` seconds
    orphans  requests that the server still holds, and processes that still run, when all clients have gone

and exits with 1 unless the last four are 0.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from safetensors.numpy import save_file

from scripts.benchmarks.servers import Failed, Server, free_port
from scripts.make_model import make_model
from scripts.reliability.adapter_changes import AdapterChanges
from scripts.reliability.client import Answer, Client, Outcome
from scripts.reliability.features import Asked, comparable, is_close, requests
from tgi.microkernel.host import rundir

ROLES = ("api", "tokenizer", "scheduler", "worker")
ADAPTERS = ("poems", "code")
CHANGING_ADAPTER = "tales"  # of --adapter-updates
# Requests that are asked at once for the undisturbed answers.
REFERENCE_CONCURRENCY = 64
# A stopped process continues after a random time up to this one, or never.
LONGEST_STOP_SECONDS = 6.0
SAMPLE_SECONDS = 5.0
# The server gets this long to drop what clients have left.
SETTLE_SECONDS = 20.0
SHOWN_FAULTS = 20
GOOD = ("exact", "close")  # verdicts
# How long a stream waits for its client: as long as a front end may be stopped before it is replaced, and a little.
RESUME_SECONDS = 60


class Sample(NamedTuple):
    """Resources of the server at one time."""

    seconds: float
    megabytes: float  # resident memory of all processes
    files: int  # open files of all processes


class Tally:
    """Counts answers by verdict, and keeps the silences and the first faults."""

    def __init__(self, tolerance: float = 0.0) -> None:
        """`tolerance` of logprobs."""
        self._tolerance = tolerance
        self.verdicts: Counter[str] = Counter()
        self.silences: list[float] = []
        self.resumed = 0
        self.faults: list[str] = []

    def add(self, asked: Asked, answer: Answer, expected: Any) -> None:
        """Judges one answer."""
        if asked.streams:
            self.silences.append(answer.silence)
        self.resumed += answer.connections > 1
        verdict = {Outcome.LOST: "lost", Outcome.HUNG: "hung", Outcome.COMPLETE: "wrong"}[answer.outcome]
        got: Any = answer.problem
        if answer.outcome is Outcome.COMPLETE:
            try:
                got = comparable(asked, answer)
            except (ValueError, KeyError) as error:
                got = f"{error!r} in {answer.body[-300:]!r}"
            if got == expected:
                verdict = "exact"
            elif self._tolerance and is_close(expected, got, self._tolerance):
                verdict = "close"
            elif answer.status != 200 or b'"error"' in answer.body:
                verdict = "lost"
        self.verdicts[verdict] += 1
        if verdict not in GOOD and len(self.faults) < SHOWN_FAULTS:
            self.faults.append(f"{verdict}: {asked.feature} {asked.path}: {_difference(expected, got)}")

    def add_faults(self, faults: list[str]) -> None:
        """Counts other faults as lost answers."""
        self.verdicts["lost"] += len(faults)
        self.faults += faults


class Disturber:
    """Sends random signals to random processes of a server."""

    def __init__(self, run_directory: Path, roles: list[str], signals: list[signal.Signals], seed: int) -> None:
        self.sent: Counter[str] = Counter()
        self._run = run_directory
        self._roles = roles
        self._signals = signals
        self._random = random.Random(seed)
        self._stopped: dict[int, float] = {}  # pid -> when it continues

    def strike(self) -> None:
        """Sends one signal, and continues processes whose time has come."""
        now = time.monotonic()
        for pid, due in list(self._stopped.items()):
            if now >= due:
                del self._stopped[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        states = [state for state in rundir.read_states(self._run) if state.role in self._roles]
        if not states:
            return
        target = self._random.choice(states)
        number = self._random.choice(self._signals)
        with suppress(ProcessLookupError):
            os.kill(target.pid, number)
            self.sent[f"{number.name} {target.role}"] += 1
            if number is signal.SIGSTOP and self._random.random() < 0.5:
                self._stopped[target.pid] = now + self._random.uniform(0.2, LONGEST_STOP_SECONDS)

    def finish(self) -> None:
        """Continues the processes that were to continue later."""
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def main() -> None:
    """Runs the command line. Exits with 1 if an answer is not exact, or something is left over."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="tgi-chaos-") as store:
        model = Path(arguments.model_id) if arguments.model_id else _make_model(Path(store))
        adapters = {name: Path(store) / name for name in ADAPTERS}
        changing = Path(store) / CHANGING_ADAPTER
        for seed, directory in enumerate((*adapters.values(), changing)):
            _make_adapter(directory, model, seed)
        port = free_port()
        command = _command(arguments, port, model, adapters)
        log = Path(arguments.log) if arguments.log else Path(store) / "log"
        with Server(command, {"HF_HUB_OFFLINE": "1"}, port, log) as server:
            server.wait("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 1}})
            tally, samples, sent, left = asyncio.run(_run(arguments, server, list(adapters), changing))
            run_directory = server.run_directory
        survivors = _processes(run_directory)
        for process in survivors:
            process.kill()
    print(f"signals   {', '.join(f'{name}: {count}' for name, count in sorted(sent.items())) or 'none'}")
    if silences := sorted(tally.silences):
        high = silences[int(0.99 * (len(silences) - 1))]
        print(f"silence   median {statistics.median(silences):.2f} s, p99 {high:.2f} s, longest {silences[-1]:.2f} s")
    for sample in samples if arguments.seconds >= 300 else [samples[0], samples[-1]]:
        print(f"resources {sample.seconds:5.0f} s: {sample.megabytes:.0f} MB, {sample.files} open files")
    for fault in tally.faults:
        print(f"  {fault}")
    verdicts = {name: tally.verdicts[name] for name in (*GOOD, "wrong", "lost", "hung")}
    verdicts["orphans"] = left + len(survivors)
    print(", ".join(f"{name} {count}" for name, count in verdicts.items()) + f" ({tally.resumed} retried or resumed)")
    good = sum(verdicts[name] for name in GOOD)
    sys.exit(any(count for name, count in verdicts.items() if name not in GOOD) or not good)


async def _run(
    arguments: argparse.Namespace, server: Server, adapters: list[str], changing: Path
) -> tuple[Tally, list[Sample], Counter[str], int]:
    """The undisturbed answers, then the disturbed ones. Returns also the requests that the server still holds."""
    asked = requests(arguments.requests, arguments.seed, adapters, arguments.tokens)
    expected = await _undisturbed(server.port, asked, arguments.patience)
    statuses = Counter(answer[0] for answer in expected)
    print(f"expected  {len(asked)} answers, by status: {dict(statuses)}", flush=True)
    tally = Tally(arguments.logprob_tolerance)
    changes = await _adapter_changes(arguments, server.port, changing, tally) if arguments.adapter_updates else None
    begin = time.monotonic()
    samples = [_sample(server, 0.0)]
    end = begin + arguments.seconds
    client = Client(server.port, arguments.patience, resume="api" in arguments.roles)

    async def go_on(number: int) -> None:
        rng = random.Random(arguments.seed * 1_000_003 + number)
        while time.monotonic() < end:
            chosen = rng.randrange(len(asked))
            tally.add(asked[chosen], await client.ask(asked[chosen].path, asked[chosen].body), expected[chosen])

    clients = [asyncio.create_task(go_on(number)) for number in range(arguments.clients)]
    if changes is not None:
        clients.append(asyncio.create_task(changes.run(end)))
    disturber = Disturber(server.run_directory, arguments.roles, arguments.signals, arguments.seed)
    sampled = begin
    while (now := time.monotonic()) < end:
        await asyncio.sleep(min(arguments.interval, end - now))
        disturber.strike()
        if now - sampled > SAMPLE_SECONDS:
            sampled = now
            samples.append(_sample(server, now - begin))
    disturber.finish()
    await asyncio.gather(*clients)
    if changes is not None:
        tally.add_faults(changes.faults)
        print(f"adapters  {changes.count} loads and unloads", flush=True)
    left = await _left_over(server.port)
    samples.append(_sample(server, time.monotonic() - begin))
    return tally, samples, disturber.sent, left


async def _adapter_changes(arguments: argparse.Namespace, port: int, directory: Path, tally: Tally) -> AdapterChanges:
    """The client of --adapter-updates, which knows the undisturbed answers. Raises Failed."""
    kinds = requests(arguments.requests, arguments.seed, [CHANGING_ADAPTER], arguments.tokens)
    asked = [one for one in kinds if one.feature == "adapter"]
    expected: dict[Asked, Any] = {}
    client = Client(port, arguments.patience, resume="api" in arguments.roles)
    changes = AdapterChanges(
        client, CHANGING_ADAPTER, directory, asked, lambda one, answer: tally.add(one, answer, expected[one])
    )
    await changes.load()
    expected |= zip(asked, await _undisturbed(port, asked, arguments.patience), strict=True)
    await changes.unload()
    if changes.faults:
        raise Failed(changes.faults[0])
    return changes


async def _undisturbed(port: int, asked: list[Asked], patience: float) -> list[Any]:
    """The answer of each request. Raises Failed if one is not complete."""
    client = Client(port, patience, resume=False)
    permits = asyncio.Semaphore(REFERENCE_CONCURRENCY)

    async def one(request: Asked) -> Any:
        async with permits:
            answer = await client.ask(request.path, request.body)
        if answer.outcome is not Outcome.COMPLETE or answer.status >= 500:
            raise Failed(f"{request.path} {request.body!r}: {answer.outcome} {answer.status} {answer.problem}")
        return comparable(request, answer)

    return await asyncio.gather(*(one(request) for request in asked))


async def _left_over(port: int) -> int:
    """Requests that the server holds although all clients have gone."""
    count = 0
    for _ in range(int(SETTLE_SECONDS / 0.5)):
        count = 0
        with suppress(OSError):
            page = await asyncio.to_thread(_metrics, port)
            found = re.findall(r"^tgi_(?:queue_size|batch_current_size) (\S+)$", page, re.MULTILINE)
            count = int(sum(map(float, found))) if found else 1
        if not count:
            return 0
        await asyncio.sleep(0.5)
    return count


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def _sample(server: Server, seconds: float) -> Sample:
    size = files = 0
    for process in [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children(True))]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
            size += psutil.Process(process).memory_info().rss
            files += psutil.Process(process).num_fds()
    return Sample(seconds, size / 2**20, files)


def _processes(run_directory: Path) -> list[psutil.Process]:
    """Processes that belong to this run directory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TGI_RUN") == str(run_directory):
                found.append(process)
    return found


def _difference(expected: Any, got: Any) -> str:
    """Where two values differ, in a few words."""
    one, other = (json.dumps(value, default=str) for value in (expected, got))
    place = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"...{one[max(0, place - 60) : place + 60]} became ...{other[max(0, place - 60) : place + 200]}"


def _make_model(store: Path) -> Path:
    make_model("llama", store / "model")
    return store / "model"


def _make_adapter(directory: Path, model: Path, seed: int) -> None:
    """A LoRA adapter of the query projections, with random matrices."""
    config = json.loads((model / "config.json").read_text())
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    outputs = heads * (config.get("head_dim") or hidden // heads)
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = rng.standard_normal((4, hidden), np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.standard_normal((outputs, 4), np.float32)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(described))


def _command(arguments: argparse.Namespace, port: int, model: Path, adapters: dict[str, Path]) -> list[str]:
    command = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port)]
    command += ["--model-id", str(model), "--worker", arguments.worker]
    command += ["--api-workers", str(arguments.front_ends), "--validation-workers", str(arguments.tokenizers)]
    command += ["--max-concurrent-requests", str(8 * arguments.clients), "--max-best-of", "4"]
    command += ["--lora-adapters", ",".join(f"{name}={path}" for name, path in adapters.items())]
    if arguments.adapter_updates:
        command += ["--allow-adapter-updates"]
    if "api" in arguments.roles:
        command += ["--resume-window", str(RESUME_SECONDS)]
    if arguments.worker == "scripted":
        command += ["--scripted-step-us", str(arguments.step_us)]
    return [*command, *arguments.flags]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0, help="of disturbance (60)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two signals (1)")
    parser.add_argument("--signals", default="KILL,STOP", help="KILL, STOP or both")
    parser.add_argument("--roles", default=",".join(ROLES), help="roles whose processes get signals (all)")
    parser.add_argument("--requests", type=int, default=200, help="different requests (200)")
    parser.add_argument("--tokens", type=int, default=40, help="mean tokens of an answer, about (40)")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds of silence that count as hung (120)")
    parser.add_argument("--logprob-tolerance", type=float, default=0.0, help="of an answer that counts as close (0)")
    parser.add_argument("--seed", type=int, default=0, help="of requests, signals and processes")
    parser.add_argument("--worker", choices=("scripted", "torch"), default="scripted")
    parser.add_argument("--step-us", type=int, default=50_000, help="microseconds of a scripted step (50,000)")
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--tokenizers", type=int, default=2)
    parser.add_argument("--adapter-updates", action="store_true", help="load and unload an adapter at run time")
    parser.add_argument("--model-id", default="", help="a model directory; otherwise a tiny one is made")
    parser.add_argument("--log", default="", help="file for the server's log")
    parser.add_argument("flags", nargs="*", help="further flags of `tgi up`, after --")
    arguments = parser.parse_args()
    try:
        arguments.signals = [signal.Signals[f"SIG{name.strip()}"] for name in arguments.signals.split(",")]
    except KeyError as error:
        parser.error(f"unknown signal {error}; choose from KILL, STOP")
    arguments.roles = [role.strip() for role in arguments.roles.split(",")]
    if unknown := set(arguments.roles) - set(ROLES):
        parser.error(f"unknown role {', '.join(unknown)}; choose from {', '.join(ROLES)}")
    return arguments


if __name__ == "__main__":
    main()
