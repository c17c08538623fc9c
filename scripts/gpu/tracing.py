"""Where the time of steps goes: a trace by torch's profiler, and a table of the kernels that take longest."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from scripts.driving import flow
from tgi.kernel.messages import Step
from tgi.worker.engine import TorchEngine

MOST = 25  # kernels in the table
WIDE = 100  # characters of a name


def kernel_table(engine: TorchEngine, steps: Iterable[Step], file: Path) -> list[str]:
    """Computes steps two at a time and writes a trace of them, for chrome://tracing or ui.perfetto.dev. The lines of a
    table of what took longest: kernels and copies on a GPU, torch's operations on CPU, without our own."""
    cuda = engine.limits.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    steps = list(steps)
    with profile(activities=activities) as profiler:
        flow(engine, steps)
        if cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    where = DeviceType.CUDA if cuda else DeviceType.CPU
    spent: dict[str, tuple[float, int]] = {}
    for event in profiler.key_averages():
        if event.device_type == where and not event.is_user_annotation:
            micros = event.self_device_time_total if cuda else event.self_cpu_time_total
            spent[event.key] = (micros / len(steps), event.count)
    whole = sum(micros for micros, _ in spent.values()) or 1.0
    lines = ["| kernel | calls a step | µs a step | share |", "|---|---|---|---|"]
    for name, (micros, calls) in sorted(spent.items(), key=lambda item: -item[1][0])[:MOST]:
        short = name.replace("|", "/")[:WIDE]
        lines.append(f"| `{short}` | {calls / len(steps):.1f} | {micros:.1f} | {micros / whole:.1%} |")
    return lines
