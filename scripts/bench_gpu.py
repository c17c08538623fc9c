#!/usr/bin/env python
"""Shows how close the worker comes to what a GPU can do: decode, prefill, and what the host costs between steps.

    .venv/bin/python -m scripts.bench_gpu [--rows 1,8,64,256] [--context 512] [--prefill 8192] [--quantize int8]
        [--trace FILE] [--device cpu --shape two-layer]

The model has the layers of Llama-3.2-1B, or of another shape, and random weights, which are written to a temporary
directory (2.5 GB; TMPDIR says where) and read by the worker's own start. There is no scheduler: the next step is always
there. Times are medians over the rounds, and shares are of what this device has just done:

- the floor of a decode step is the time in which it reads the weights of all matrices once, and the keys and values of
  the contexts, at the rate at which it reads a large tensor;
- "device" is what a step takes that waits for nothing: the GPU sleeps until all of it is launched;
- "step" is the time from the end of one to the end of the next, of which two are under way at a time as in the worker's
  loop, and "launch" what the host needs to start one. "between" is the share of all the time that lies between the
  end of a step and the begin of the next, by the events around them; "idle" is 1 - device / step, which has the waits
  within steps too;
- a prefill of T tokens is 2 W T + 2 L H T (T + 1) + 2 H V floating point operations: W weights in the matrices of L
  layers of width H, each of whose queries meets the keys before it, and V tokens that are scored once.
"""

import argparse
import gc
import importlib.metadata
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scripts.driving import Requests, flow
from scripts.gpu.measures import Decode, decodes, longest, prefill, prefill_flop
from scripts.gpu.peaks import Peaks, find_peaks
from scripts.gpu.tracing import kernel_table
from scripts.shapes import CONFIG, SHAPES, write_model
from tgi.kernel.arguments import load
from tgi.kernel.errors import UserError
from tgi.kernel.option import boolean, count, counts, flag
from tgi.kernel.settings import OPTIONS, Settings
from tgi.runtime import nvidia_smi
from tgi.worker import start
from tgi.worker.engine import TorchEngine

log = logging.getLogger(__name__)

# Settings that this takes as `tgi up` does.
TAKEN = (
    "dtype",
    "device",
    "quantize",
    "kv_cache_dtype",
    "cuda_graphs",
    "disable_custom_kernels",
    "max_batch_prefill_tokens",
)
PAGE = 64  # tokens; no device has larger ones
TRACED = 8  # steps
NOT_HELD = """* The GPU did not sleep until all of a step was launched: a launch waits for it, or a step has more
kernels than a stream takes ahead (about a thousand). So these steps may have waited for the host."""


def decode_table(found: list[Decode], peaks: Peaks) -> list[str]:
    """The lines of a table in Markdown."""
    titles = "rows|CUDA graph|GB to read|floor ms|device ms|floor / device|step ms|launch ms|between|idle"
    lines = [f"| {titles.replace('|', ' | ')} |", "|---" * (titles.count("|") + 1) + "|"]
    for one in found:
        floor, (step, launch, _, between) = 1e3 * one.read / peaks.read, one.flow
        shares = ["–", "–"]
        if between is not None:
            shares = [f"{between:.1%}", f"{1 - one.device / step:.1%}" if one.held else "?"]
        lines.append(
            f"| {one.rows} | {'yes' if one.recorded else 'no'} | {one.read / 1e9:.3f} | {floor:.3f} | {one.device:.3f}"
            f"{'' if one.held else '*'} | {floor / one.device:.1%} | {step:.3f} | {launch:.3f} | {' | '.join(shares)} |"
        )
    return lines


def machine(device: torch.device) -> str:
    """What computes, by which software."""
    try:
        triton = f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        triton = "no triton"
    software = f"torch {torch.__version__}, {triton}"
    if device.type != "cuda":
        return f"CPU, {os.cpu_count()} cores; {software}"
    card = torch.cuda.get_device_properties(device)
    driver = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()[0]
    size = f"{card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
    return f"{card.name}, {size}; driver {driver}, CUDA {torch.version.cuda}, {software}"


def settings(options: argparse.Namespace, directory: Path) -> Settings:
    """What the worker starts with. Raises UserError for what cannot be had."""
    decoding = longest(options.context, options.rounds)
    most = max(decoding, options.prefill + 1) + 1
    found = load({name: getattr(options, name) for name in TAKEN}, {})
    return replace(
        found,
        model_dir=directory,
        run_dir=directory,
        max_total_tokens=most,
        max_batch_size=max(options.rows),
        max_batch_total_tokens=max(max(options.rows) * (decoding + PAGE), most, found.max_batch_prefill_tokens or 0),
    )


def taken(name: str) -> Callable[[str], Any]:
    """Reads one of the settings. Raises ArgumentTypeError in the setting's words."""

    def read(text: str) -> Any:
        try:
            return OPTIONS[name].parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def trace_file(text: str) -> Path:
    """A file that can be written. Raises ArgumentTypeError in words."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a directory that exists")
    return path


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=counts, default="1,8,64,256")
    parser.add_argument("--context", type=count, default=512, help="tokens of each request when it begins to decode")
    parser.add_argument("--prefill", type=count, default=8192, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=count, default=40)
    parser.add_argument("--peak-tflops", type=count, help="of the datasheet, in place of what is measured")
    parser.add_argument("--trace", type=trace_file, metavar="FILE", help="trace decode steps of the first of --rows")
    for name in TAKEN:
        option = OPTIONS[name]
        bare = {"nargs": "?", "const": True} if option.read is boolean else {}
        parser.add_argument(flag(name), type=taken(name), help=option.help, **bare)  # type: ignore[arg-type]
    return parser.parse_args()


def report(engine: TorchEngine, config: dict[str, Any], options: argparse.Namespace) -> None:
    """Measures and prints, table by table."""
    device = engine._model.device
    print(f"{machine(device)}\n")
    peaks = find_peaks(device, options.rounds)
    print(f"It reads {peaks.read / 1e9:,.0f} GB/s ({peaks.how}),")
    print(f"and multiplies {peaks.product / 1e12:,.2f} TFLOP/s (random matrices of {peaks.edge}² in bfloat16).")
    if options.peak_tflops:
        peaks = peaks._replace(product=1e12 * options.peak_tflops)
        print(f"Shares of the peak are of {options.peak_tflops} TFLOP/s, as told.")
    print(f"\nDecode behind {options.context} tokens; wanted are 80 % of the floor at 1 row, and less than 3 % idle\n")
    found = decodes(engine, options.rows, options.context, options.rounds)
    print(*decode_table(found, peaks), "", sep="\n")
    if not all(one.held for one in found):
        print(f"{NOT_HELD}\n")
    spent, flop = prefill(engine, options.prefill, options.rounds) / 1e3, prefill_flop(config, options.prefill)
    steps = -(-options.prefill // engine.limits.max_batch_prefill_tokens)
    print(f"A prompt of {options.prefill} tokens, {flop / 1e12:.4g} TFLOP; wanted are 50 % of the peak\n")
    print("| steps | ms | tokens/s | TFLOP/s | of the peak |\n|---|---|---|---|---|")
    print(
        f"| {steps} | {1e3 * spent:.2f} | {options.prefill / spent:,.0f} | {flop / spent / 1e12:.2f} | "
        f"{flop / spent / peaks.product:.1%} |"
    )
    if options.trace:
        rows = options.rows[0]
        engine.reset()
        requests = Requests(engine, range(rows), options.context, TRACED)
        flow(engine, requests.prompts())
        lines = kernel_table(engine, requests.steps(TRACED), options.trace)
        print(f"\nWhere the time of decode steps of {rows} rows goes (all of it: {options.trace})\n", *lines, sep="\n")


def main() -> None:
    options = parsed()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # which kernels compute
    with tempfile.TemporaryDirectory(prefix="tgi-") as directory:
        try:
            chosen = settings(options, Path(directory))
            config = CONFIG | SHAPES[options.shape] | {"max_position_embeddings": chosen.max_total_tokens}
            device = start._device(chosen.device)
            log.info("writing random weights to %s", directory)
            write_model(config, Path(directory), device)
            engine = start.start_engine(chosen, lambda stage, percent: None)
            gc.collect()
            gc.freeze()  # as the worker's loop does
            report(engine, config, options)
        except UserError as error:
            sys.exit(str(error))
        except torch.OutOfMemoryError as error:
            sys.exit(f"The GPU's memory does not suffice: {error}. Lower --rows or --context.")


if __name__ == "__main__":
    main()
