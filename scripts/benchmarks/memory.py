"""Memory of the worker by type of weights and KV cache, next to its bound: 1.15 x weights + KV cache + 150 MB (Linux).

    scripts/bench memory [--model 135m] [--only bfloat16,Q4_1] [--cpu avx2] [--mappings 10]

Serves the model in each type, sends 8 prompts of 128 tokens for 64 tokens each and then one of 2,048, and reads
/proc/PID/smaps of the worker, at once and when it has been idle for a while. In MB of 2^20 bytes:

- weights: the matrices of the model, as the worker reports them, and pages of the checkpoint: an embedding that is no
  packed matrix too is read from the mapped file
- KV: pages of the KV cache that have memory, prefaulted ones included; the worker leaves its KV cache out of core
  dumps, which distinguishes these mappings
- RSS: resident memory, shared pages included; PSS: the same with shared pages divided among their processes; peak: the
  largest RSS so far
- bound, and how far RSS without clean pages of libraries is from it, also when idle
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks import workloads
from scripts.benchmarks.servers import Failed, Server, free_port
from scripts.benchmarks.serving import ROUTE
from scripts.benchmarks.streams import BadStream, burst
from scripts.benchmarks.workloads import Model, Words, Workload
from tgi.microkernel.host import rundir
from tgi.microkernel.settings.options import count
from tgi.worker.host_cpu import CPU_VARIABLE
from tgi.worker.instruction_sets import BY_NAME

MB = 2**20
IDLE_SECONDS = 5.0  # until the worker has prefaulted memory for further requests, and given back what it can
LOAD = (Workload(8, 128, 64), Workload(1, 2048, 16))
# The first line of a mapping in smaps: its addresses, permissions, offset, device, inode and file.
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \d+ *(.*)")
CHECKPOINT = ".safetensors"
NOT_DUMPED = "dd"  # among the VmFlags of a mapping: left out of core dumps


class Case(NamedTuple):
    """A model in one type. `block` is the block type of its GGUF file; without, the model directory is served."""

    name: str
    flags: tuple[str, ...] = ()
    block: str = ""


CASES = (
    *(Case(name, ("--dtype", name)) for name in ("bfloat16", "float16", "float32")),
    Case("float32, bfloat16 cache", ("--dtype", "float32", "--kv-cache-dtype", "bfloat16")),
    Case("float32, int8 cache", ("--dtype", "float32", "--kv-cache-dtype", "int8")),
    Case("bfloat16, int8 cache", ("--dtype", "bfloat16", "--kv-cache-dtype", "int8")),
    *(Case(name, ("--quantize", name)) for name in ("int8", "int4")),
    *(Case(name, (), name) for name in workloads.FORMATS),
    *(Case(f"{name}, float32", ("--dtype", "float32"), name) for name in ("Q8_0", "Q4_1")),
    Case(workloads.DEMO),
)


class Memory(NamedTuple):
    """The memory of a worker, in bytes."""

    weights: int
    kv_cache: int
    rss: int
    reclaimable: int  # of it: clean pages of libraries, which the system takes back when it needs memory
    pss: int
    peak: int

    @property
    def bound(self) -> float:
        """What the worker may use at most."""
        return 1.15 * self.weights + self.kv_cache + 150 * MB

    @property
    def excess(self) -> float:
        """How far it is above the bound, without what the system can take back."""
        return self.rss - self.reclaimable - self.bound


class Mapping(NamedTuple):
    """A mapping of a process's address space: its file, if any, and its lines of smaps."""

    file: str
    permissions: str
    flags: list[str]
    sizes: dict[str, int]  # in bytes


def worker_memory(run: Path) -> Memory:
    """The memory of the worker of the server with this run directory."""
    worker = next(state for state in rundir.read_states(run) if state.role == "worker")
    found = list(mappings(worker.pid))
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return Memory(
        weights=worker.facts["weight_bytes"] + sum(one.sizes["Rss"] for one in found if one.file.endswith(CHECKPOINT)),
        kv_cache=sum(one.sizes["Rss"] for one in found if not one.file and NOT_DUMPED in one.flags),
        rss=sum(one.sizes["Rss"] for one in found),
        reclaimable=sum(
            one.sizes["Private_Clean"] + one.sizes["Shared_Clean"]
            for one in found
            if one.file and not one.file.endswith(CHECKPOINT)
        ),
        pss=sum(one.sizes["Pss"] for one in found),
        peak=1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]),
    )


def mappings(pid: int) -> Iterator[Mapping]:
    """The mappings of a process."""
    file = permissions = ""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := MAPPING.fullmatch(line):
            (permissions, file), sizes = found.groups(), {}
        elif line.startswith("VmFlags:"):
            yield Mapping(file, permissions, line.split()[1:], sizes)
        elif line.endswith(" kB"):
            name, _, value = line.partition(":")
            sizes[name] = 1024 * int(value.split()[0])


def largest(pid: int, limit: int) -> list[str]:
    """The mappings with the most resident memory, those of a file and permission as one."""
    resident: Counter[str] = Counter()
    for one in mappings(pid):
        private = "KV cache" if NOT_DUMPED in one.flags else "large pages" if "hg" in one.flags else "other memory"
        resident[f"{Path(one.file).name or private}, {one.permissions}"] += one.sizes["Rss"]
    return [f"    {size / MB:>8.1f}  {name}" for name, size in resident.most_common(limit)]


def load(server: Server, words: Words) -> None:
    """Sends the requests of LOAD."""
    for workload in LOAD:
        prompts, _ = words.prompts(workload, str(time.time_ns()))
        parameters = {"max_new_tokens": workload.tokens_out, "ignore_eos_token": True}
        burst(server.port, ROUTE, [{"inputs": text, "parameters": parameters} for text in prompts])


def gguf(model: Model, block: str) -> Path:
    """The model as a GGUF file in this block type. As llama.cpp does, it has Q5_0 instead of Q4_K where the number of
    inputs is not a multiple of 256."""
    from scripts.make_gguf import write_gguf

    config = json.loads((model.directory / "config.json").read_text())

    def of_matrix(name: str) -> str:
        inputs = config["intermediate_size" if "ffn_down" in name else "hidden_size"]
        return "Q5_0" if block == "Q4_K" and inputs % 256 else block

    file = workloads.PEERS_DIRECTORY / "models" / f"{model.name}-{block}-python.gguf"
    return workloads.whole(file, lambda path: write_gguf(model.directory, path, of_matrix))


def measure(case: Case, model: Model, options: argparse.Namespace) -> tuple[Memory, Memory, list[str]]:
    """Starts a server and sends it requests. Returns its worker's memory after them and when idle, and its largest
    mappings after them."""
    port = free_port()
    up = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(port), *case.flags]
    if case.name == workloads.DEMO:
        served = workloads.demo()
        up += ["--model-id", str(served.gguf)]
    else:
        served = model
        up += ["--model-id", str(gguf(model, case.block) if case.block else model.directory)]
    with Server(up + options.server, {}, port, Path(os.devnull)) as server:
        server.wait(ROUTE, {"inputs": "a", "parameters": {"max_new_tokens": 1}})
        load(server, Words(served.tokenizer))
        after = worker_memory(server.run_directory)
        worker = next(state for state in rundir.read_states(server.run_directory) if state.role == "worker")
        where = largest(worker.pid, options.mappings)
        time.sleep(IDLE_SECONDS)
        return after, worker_memory(server.run_directory), where


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=workloads.MADE, default="135m")
    parser.add_argument("--only", help="cases whose name begins with one of these words, comma separated")
    parser.add_argument("--cpu", choices=BY_NAME, help="hold the server to this instruction set")
    parser.add_argument("--mappings", type=count, default=0, help="also print this many of the largest mappings")
    parser.add_argument("server", nargs="*", help="more arguments for `tgi up`, after --")
    options = parser.parse_args()
    if options.cpu:
        os.environ[CPU_VARIABLE] = options.cpu
    model = workloads.made(options.model)
    titles = ("weights", "KV", "RSS", "libraries", "PSS", "peak", "bound", "over", "idle")
    print(f"{'':<26}" + "".join(f"{title:>9}" for title in titles))
    for case in CASES:
        if options.only and not case.name.startswith(tuple(options.only.split(","))):
            continue
        try:
            found, idle, where = measure(case, model, options)
        except (Failed, BadStream) as error:
            sys.exit(f"The server failed: {error}")
        columns = (*found, found.bound, found.excess, idle.excess)
        print(f"{case.name:<26}" + "".join(f"{one / MB:>9.0f}" for one in columns))
        print(*where, sep="\n", end="\n" if where else "", flush=True)


if __name__ == "__main__":
    main()
