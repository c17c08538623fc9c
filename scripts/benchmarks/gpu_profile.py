"""Shows where the host's time of decode steps goes, and the GPU's.

    scripts/bench gpu-profile [--shape 1b] [--rows 1,256] [--trace DIR] [--device cpu --shape two-layer]

For each number of rows: the host's functions during steps that are launched one by one, without CUDA graphs, and during
steps with them, by cProfile; then the kernels of ten steps with graphs, by torch's profiler. Before that, the host's
time for single calls: a kernel of torch, one of Triton, pinned memory, an event. cProfile itself takes about a
microsecond per call, so the times of many small functions are too long; "unprofiled" is the time without it.
"""

import argparse
import cProfile
import gc
import io
import json
import logging
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from scripts.benchmarks import gpu
from scripts.benchmarks.engine_driver import Requests, flow
from scripts.benchmarks.shapes import CONFIG, SHAPES, write_config
from tgi.microkernel.settings.options import count, counts, flag
from tgi.microkernel.settings.table import OPTIONS
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.startup import start_engine

STEPS = 10
LINES = 28  # of a profile
CALLS = 300  # of one function


def per_call(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of the host's time for a call, the median of parts of CALLS calls."""
    found = []
    for _ in range(5):
        _wait(device)
        began = time.perf_counter()
        for _ in range(CALLS // 5):
            call()
        found.append(1e6 * (time.perf_counter() - began) / (CALLS // 5))
    _wait(device)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def single_calls(engine: TorchEngine) -> dict[str, float]:
    """The host's time for calls that a step consists of, in microseconds."""
    device = engine._model.device
    x, weight = (torch.ones(8, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {
        "torch.empty": lambda: torch.empty(8, 64, device=device),
        "torch.add": lambda: torch.add(x, weight),
        "torch.mm": lambda: torch.mm(x, weight.T),
        "index_select": lambda: x.index_select(0, rows),
    }
    rows = torch.zeros(8, dtype=torch.int64, device=device)
    if device.type == "cuda":
        calls["a new event"] = lambda: torch.cuda.Event(enable_timing=True)
        calls["a recorded event"] = lambda: torch.cuda.Event(enable_timing=True).record()
        calls["pinned memory of 4 kB"] = lambda: torch.empty(1024, pin_memory=True)
        host = torch.zeros(1024)
        calls["pin_memory()"] = host.pin_memory
        kernels = engine._model.kv.gpu_kernels
        if kernels is not None:
            scales = torch.ones(64, device=device)
            calls["Triton: norm"] = lambda: kernels.norm(x, scales, None, 1e-5, False)
    with torch.inference_mode():
        for call in calls.values():
            call()
        return {name: per_call(call, device) for name, call in calls.items()}


def host_profile(engine: TorchEngine, rows: int, context: int) -> tuple[float, float, str]:
    """Milliseconds of launching a step, unprofiled and profiled, and the lines of the profile."""
    engine.reset()
    requests = Requests(engine, range(rows), context, 4 * STEPS)
    flow(engine, requests.prompts())
    flow(engine, requests.steps(4))
    plain = flow(engine, requests.steps(STEPS)).launch
    profiler = cProfile.Profile()
    profiler.enable()
    profiled = flow(engine, requests.steps(STEPS)).launch
    profiler.disable()
    text = io.StringIO()
    found = pstats.Stats(profiler, stream=text).strip_dirs()
    found.sort_stats("tottime").print_stats(LINES)
    found.sort_stats("cumtime").print_stats(LINES)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    return plain, profiled, "\n".join(lines)


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=counts, default="1,256")
    parser.add_argument("--context", type=count, default=512)
    parser.add_argument("--prefill", type=counts, default="512")
    parser.add_argument("--rounds", type=count, default=STEPS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    parser.add_argument("--trace", type=Path, default=None, metavar="DIR", help="where traces are written")
    for name in gpu.TAKEN:
        parser.add_argument(flag(name), type=gpu.taken(name), help=OPTIONS[name].help)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory(prefix="tgi-") as store:
        directory = Path(store)
        chosen = gpu.settings(options, directory)
        write_config(CONFIG | SHAPES[options.shape] | {"max_position_embeddings": chosen.max_total_tokens}, directory)
        engine = start_engine(chosen, lambda stage, percent: None)
        gc.collect()
        gc.freeze()
        print(f"{gpu.machine(engine._model.device)}\n\n| the host's time for a call | µs |\n|---|---|")
        calls = single_calls(engine)
        print(*(f"| {name} | {spent:.1f} |" for name, spent in calls.items()), sep="\n")
        launches = {}
        graphs = engine._decode_graphs
        for rows in options.rows:
            for name, used in (("without graphs", None), ("with graphs", graphs)):
                if name == "with graphs" and graphs is None:
                    continue
                engine._decode_graphs = used
                plain, profiled, lines = host_profile(engine, rows, options.context)
                launches[f"{rows} rows {name}"] = plain
                print(f"\n{rows} rows, {name}: launch {plain:.2f} ms unprofiled, {profiled:.2f} ms profiled\n{lines}")
            engine._decode_graphs = graphs
            engine.reset()
            requests = Requests(engine, range(rows), options.context, 2 * STEPS)
            flow(engine, requests.prompts())
            trace = (options.trace or directory) / f"steps-{rows}.json"
            print(f"\n{rows} rows, kernels of {STEPS} steps\n")
            print(*gpu.kernel_table(engine, requests.steps(STEPS), trace), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"calls_us": calls, "launch_ms": launches}, indent=1))


if __name__ == "__main__":
    main()
