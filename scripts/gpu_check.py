"""Checks and measures this server on a machine with a GPU, in one command of at most eight minutes.

    scripts/gpu-check [--out DIR] [--only tests,1b,...] [--device cpu --shape two-layer]

It needs the packages of the worker and pytest, and no network. Each section is a command of its own with a time limit,
so one that fails leaves the others their time. Logs and figures go to DIR (by default $OUT, else a temporary
directory); the table of all sections comes last.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple


class Section(NamedTuple):
    """A command, run as `python -m ...`. `{out}` in an argument becomes the directory of results."""

    name: str
    arguments: list[str]
    seconds: int  # limit


def sections(device: str, shapes: list[str]) -> list[Section]:
    """What is run, in this order. Timings come after the tests, which compute in several processes at once."""
    place = ["--device", device]
    tests = ["pytest", "-q", "-p", "no:cacheprovider", "--timeout", "100", "-n", "8", "tests/worker/test_on_gpu.py"]
    chaos = ["--worker", "torch", "--clients", "64", "--seconds", "20", "--signals", "KILL", "--roles", "worker"]
    chaos += ["--interval", "10", "--requests", "64"]
    return [
        Section("tests", tests, 150),
        *(
            Section(shape, ["scripts.benchmarks", "gpu", *place, "--shape", shape, *SIZES.get(shape, []),
                            "--json", f"{{out}}/{shape}.json"], 100)
            for shape in shapes
        ),
        Section("kill", ["scripts.reliability.chaos", *chaos, "--", *place], 120),
    ]  # fmt: skip


SIZES = {
    "two-layer": ["--rows", "1,3", "--context", "40", "--prefill", "100", "--rounds", "3"],
    "30b-a3b": ["--rows", "1,8,64", "--rounds", "10"],
    "1b": ["--rounds", "20"],
    "8b": ["--rounds", "20"],
}


class Outcome(NamedTuple):
    """How a section ended."""

    name: str
    ended: str
    seconds: float
    log: Path


def run(section: Section, out: Path) -> Outcome:
    """Runs a section; its output goes to a log."""
    log, began = out / f"{section.name}.log", time.monotonic()
    command = [sys.executable, "-m", *(argument.replace("{out}", str(out)) for argument in section.arguments)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(section.seconds)
            ended = "passed" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            ended = f"stopped after {section.seconds} s"
    return Outcome(section.name, ended, time.monotonic() - began, log)


def main() -> None:
    """Parses the command line, runs the sections, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"))
    parser.add_argument("--only", default="", help="names of sections, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="1b,8b,30b-a3b")
    options = parser.parse_args()
    out = Path(options.out or tempfile.mkdtemp(prefix="tgi-gpu-check-"))
    chosen = sections(options.device, options.shape.split(","))
    if options.only:
        chosen = [one for one in chosen if one.name in options.only.split(",")]
    found = []
    for section in chosen:
        found.append(run(section, out))
        tail = found[-1].log.read_text(errors="replace").splitlines()[-TAIL:]
        print(f"=== {section.name}: {found[-1].ended}, {found[-1].seconds:.0f} s", *tail, "", sep="\n", flush=True)
    figures: dict[str, Any] = {one.name: {"ended": one.ended, "seconds": round(one.seconds, 1)} for one in found}
    (out / "gpu-check.json").write_text(json.dumps(figures, indent=1))
    print("| section | ended | s |\n|---|---|---|")
    print(*(f"| {one.name} | {one.ended} | {one.seconds:.0f} |" for one in found), sep="\n")
    sys.exit(any(one.ended != "passed" for one in found))


TAIL = 45  # lines of a section's output that are printed


if __name__ == "__main__":
    main()
