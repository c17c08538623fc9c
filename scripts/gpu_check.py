"""Checks and measures this server on a machine with a GPU, in one command of at most eight minutes.

    scripts/gpu-check [--out DIR] [--only tests,8b,stack] [--seconds 480]
    scripts/gpu-check --device cpu --shape two-layer      a rehearsal without a GPU

It needs the packages of the worker and pytest, and no network. Each section is a command of its own with a time limit,
so one that fails leaves the others their time. Logs and figures go to DIR (by default $OUT, else a temporary
directory); the table of all sections comes last.

    tests     what needs a GPU: kernels, CUDA graphs, copies
    families  every family's tiny model against transformers on the device
    SHAPE     decode and prefill of a known shape, next to the device's own rates; also with LoRA adapters
    quantized products with all kinds of quantized weights
    profile   the host's functions and the kernels of decode steps
    stack     all processes: start to first token, throughput next to the engine alone, kill -9 to next token
    peer      transformers' continuous batching on the same load
    kill      64 clients of every route while the worker is killed, answers compared
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Section(NamedTuple):
    """A command, run as `python -m ...`. `{out}` in an argument becomes the directory of results."""

    name: str
    arguments: list[str]
    seconds: int  # limit
    # A line for the table, from the section's JSON file, or from the end of its log if it writes none.
    headline: Callable[[Any], str] = str


# Options of the measurements, by shape.
SIZES = {
    "two-layer": ["--rows", "1,3", "--context", "40", "--prefill", "100", "--rounds", "3"],
    "30b-a3b": ["--rows", "1,8,64", "--rounds", "10"],
}
ROUNDS = ["--rounds", "20"]
LOADS = {
    "cuda": ["--requests", "256", "--streams", "64", "--clients", "6", "--front-ends", "2"],
    "cpu": ["--requests", "12", "--streams", "6", "--clients", "2", "--front-ends", "1", "--scale", "0.3"],
}


def sections(device: str, shapes: list[str]) -> list[Section]:
    """What is run, in this order. Timings come after the tests, which compute in several processes at once."""
    place, large = ["--device", device], "8b" if "8b" in shapes else shapes[0]
    jobs = "6" if device == "cuda" else "1"
    load = LOADS[device]
    peer_load = [*load[:2], *load[8:]]  # no streams, clients and front ends
    tests = ["-q", "-p", "no:cacheprovider", "--timeout", "100", "-n", jobs]
    chaos = ["--worker", "torch", "--clients", "64", "--seconds", "24", "--signals", "KILL", "--roles", "worker"]
    chaos += ["--interval", "12", "--requests", "64", "--logprob-tolerance", "0.001"]
    profile = ["--shape", shapes[0], *(SIZES["two-layer"][:4] if shapes[0] == "two-layer" else ["--rows", "1,256"])]

    def bench(*arguments: str) -> list[str]:
        return ["scripts.benchmarks", *arguments]

    return [
        Section("tests", ["pytest", *tests, "tests/worker/test_on_gpu.py"], 150),
        Section("families", bench("families", *place, "--jobs", jobs, "--json", "{out}/families.json"), 90, _families),
        *(
            Section(
                shape,
                bench("gpu", *place, "--shape", shape, *SIZES.get(shape, ROUNDS), "--json", f"{{out}}/{shape}.json"),
                120,
                _shape,
            )
            for shape in shapes
        ),
        Section(
            "quantized",
            bench(
                "quantized", *place, *([] if device == "cuda" else ["--rows", "1,20"]), "--json", "{out}/quantized.json"
            ),
            60,
            _quantized,
        ),
        Section(
            "profile",
            bench("gpu-profile", *place, *profile, "--trace", "{out}", "--json", "{out}/profile.json"),
            60,
            _profile,
        ),
        Section(
            "stack",
            bench("stack", *place, "--shape", large, *load, "--log", "{out}/server.log", "--json", "{out}/stack.json"),
            150,
            _stack,
        ),
        Section(
            "peer", bench("peer-gpu", *place, "--shape", large, *peer_load, "--json", "{out}/peer.json"), 100, _peer
        ),
        Section("kill", ["scripts.reliability.chaos", *chaos, "--", *place], 120),
    ]


def _families(found: Any) -> str:
    failed = [one["kind"] for one in found if not one["passed"]]
    return f"{len(found) - len(failed)} of {len(found)} as transformers" + (
        f"; not {', '.join(failed)}" if failed else ""
    )


def _shape(found: Any) -> str:
    peaks, decode = found["peaks"], found["decode"]
    graphs = any(one["recorded"] for one in decode)
    steps = [
        f"{one['rows']} rows {one['flow']['step']:.2f} ms ({1e3 * one['read'] / peaks['read'] / one['device']:.0%})"
        for one in decode
        if one["recorded"] == graphs
    ]
    launch = max(one["flow"]["launch"] for one in decode if not one["recorded"])
    prefill = [f"{one['tokens']} tokens {one['ms']:.0f} ms ({one['share']:.0%})" for one in found["prefill"]]
    mixed = [
        f"{one['name']} {one['computed'] if one['recorded'] is None else one['recorded']:.1f} ms"
        + ("" if one["of_parts"] is None else f" ({one['of_parts']:.0%} of its parts)")
        for one in found["mixed"]
    ]
    adapted = [
        f"{one['rows']} rows of {one['tokens']} with {one['adapters']} of rank {one['rank']} "
        f"{one['step'] / one['plain'] - 1:+.0%}"
        for one in found["adapted"]
    ]
    return (
        f"copy {peaks['read'] / 1e12:.2f} TB/s, product {peaks['product'] / 1e12:.0f} TFLOP/s; {', '.join(steps)}; "
        f"prefill {', '.join(prefill)}; launch without graphs {launch:.1f} ms; {', '.join(mixed)}; "
        f"adapters: {', '.join(adapted)}"
    )


def _quantized(found: Any) -> str:
    return ", ".join(f"{one['kind']} {one['rows']} rows {one['us']:.0f} µs ({one['share']:.0%})" for one in found)


def _profile(found: Any) -> str:
    launches = ", ".join(f"{name} {spent:.2f} ms" for name, spent in found["launch_ms"].items())
    return f"host's time of a step: {launches}; of a call: " + ", ".join(
        f"{name} {spent:.1f} µs" for name, spent in found["calls_us"].items()
    )


def _stack(found: Any) -> str:
    killed = found["kill"]["recovery"]
    compared = found["kill"]["compared"]
    return (
        f"start to first token {found['first token s']:.1f} s; {found['stack']['tokens_per_s']:,.0f} tokens/s, "
        f"{found['stack / engine alone']:.0%} of the engine alone; kill -9 to next token {killed['next_token']:.2f} s, "
        f"{compared['complete']} of {compared['streams']} streams complete, {compared['identical']} identical"
    )


def _peer(found: Any) -> str:
    return f"transformers {found['version']}: {found['tokens_per_s']:,.0f} tokens/s ({found['attention']})"


class Outcome(NamedTuple):
    """How a section ended."""

    name: str
    ended: str
    seconds: float
    log: Path
    figures: Any  # of its JSON file; None if it wrote none
    headline: str


TAIL = 45  # lines of a section's output that are printed


def run(section: Section, out: Path, limit: float) -> Outcome:
    """Runs a section; its output goes to a log."""
    log, began = out / f"{section.name}.log", time.monotonic()
    limit = min(section.seconds, limit)
    command = [sys.executable, "-m", *(argument.replace("{out}", str(out)) for argument in section.arguments)]
    written = out / f"{section.name}.json"
    written.unlink(missing_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit)
            ended = "passed" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            ended = f"stopped after {limit:.0f} s"
    figures = json.loads(written.read_text()) if written.exists() else None
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    headline = section.headline(figures) if figures is not None else (lines or ["no output"])[-1][:200]
    return Outcome(section.name, ended, time.monotonic() - began, log, figures, headline)


def main() -> None:
    """Parses the command line, runs the sections, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"))
    parser.add_argument("--only", default="", help="names of sections, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="1b,8b,30b-a3b")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all sections (480)")
    options = parser.parse_args()
    out = Path(options.out or tempfile.mkdtemp(prefix="tgi-gpu-check-"))
    out.mkdir(parents=True, exist_ok=True)
    chosen = sections(options.device, options.shape.split(","))
    if options.only:
        wanted = options.only.split(",")
        if unknown := [name for name in wanted if name not in [one.name for one in chosen]]:
            parser.error(f"no section {', '.join(unknown)}; there are {', '.join(one.name for one in chosen)}")
        chosen = [one for one in chosen if one.name in wanted]
    ends, found = time.monotonic() + options.seconds, []
    for section in chosen:
        left = ends - time.monotonic()
        if left < SHORTEST:
            found.append(Outcome(section.name, "no time left", 0.0, out, None, ""))
            continue
        found.append(run(section, out, left))
        tail = found[-1].log.read_text(errors="replace").splitlines()[-TAIL:]
        print(f"=== {section.name}: {found[-1].ended}, {found[-1].seconds:.0f} s", *tail, "", sep="\n", flush=True)
        write_figures(found, out)
    write_figures(found, out)
    known = {one.name: one.figures for one in found if one.figures is not None}
    print("| section | ended | s | |\n|---|---|---|---|")
    print(*(f"| {one.name} | {one.ended} | {one.seconds:.0f} | {one.headline} |" for one in found), sep="\n")
    if {"stack", "peer"} <= known.keys():
        peer = known["peer"]["tokens_per_s"]
        rates = {"engine alone": known["stack"]["engine alone"], "whole stack": known["stack"]["stack"]}
        print(*(f"{name} / peer: {one['tokens_per_s'] / peer:.2f}" for name, one in rates.items()), sep=", ")
    print(f"\nAll figures: {out}/gpu-check.json")
    sys.exit(any(one.ended != "passed" for one in found))


SHORTEST = 10.0  # seconds that a section needs at least


def write_figures(found: list[Outcome], out: Path) -> None:
    """Writes what is known so far to gpu-check.json."""
    figures = {
        one.name: {
            "ended": one.ended,
            "seconds": round(one.seconds, 1),
            "headline": one.headline,
            "figures": one.figures,
        }
        for one in found
    }
    (out / "gpu-check.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
