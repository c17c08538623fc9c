"""Measures decode and prefill on a GPU next to its peaks, and the cost of the host between steps.

    scripts/bench gpu [--rows 1,8,64,256] [--context 512] [--prefill 8192] [--quantize int8]
        [--trace FILE] [--json FILE] [--device cpu --shape two-layer]

The model has the layers of Llama-3.2-1B, or of another shape, and random weights, which are made on the device. The
worker's own start-up builds it. There is no scheduler: the next step is always available. Times are medians over the
rounds, and shares are relative to what this device has just reached:

- the floor of a decode step is the time to read the weights of all matrices once, and the keys and values of the
  contexts, at the rate of reading a large tensor;
- "device" is the time of a step without waits: the GPU sleeps until all of it is launched;
- "step" is the time between the ends of two steps with two in flight, as in the worker's loop, and "launch" the
  host's time to launch one. "between" is the share of time from the end of a step to the start of the next, by
  events; "idle" is 1 - device / step, which includes waits within steps;
- steps with prompt chunks or drafts are measured with CUDA graphs and without, so that a step with decode rows and a
  chunk can be compared with its parts;
- steps with LoRA adapters are measured next to the same ones without;
- a prefill of T tokens is 2 W T + 2 L H T (T + 1) + 2 H V floating point operations: W weights in the matrices of L
  layers of width H, each of whose queries attends to all previous keys, and V logits once.
"""

import argparse
import gc
import importlib.metadata
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from scripts.benchmarks.engine_driver import Alone, Flow, Requests, collected, flow, joined
from scripts.benchmarks.lora import add_adapters
from scripts.benchmarks.shapes import CONFIG, SHAPES, matrices, stored, write_config
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import Step
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.settings.loading import load_settings
from tgi.microkernel.settings.options import boolean, count, counts, flag
from tgi.microkernel.settings.table import OPTIONS, Settings
from tgi.server import nvidia_smi
from tgi.worker.attention import page_bytes
from tgi.worker.engine import startup
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.models.decoder import DecoderModel

log = logging.getLogger(__name__)

# Settings with the same flags as `tgi up`.
TAKEN = (
    "dtype",
    "device",
    "quantize",
    "kv_cache_dtype",
    "cuda_graphs",
    "batch_invariant",
    "disable_custom_kernels",
    "max_batch_prefill_tokens",
)
PAGE = 64  # tokens; the largest page of any device
TRACED = 8  # steps
NOT_HELD = """* The GPU did not sleep until the whole step was launched: a launch waits for it, or a step has more
kernels than a stream can queue (about a thousand). These steps may have waited for the host."""


# --- decode steps and long prompts ---


WARM = 4  # warm-up steps
SPARE = 32  # extra tokens per request beyond the measured ones


def longest(context: int, rounds: int) -> int:
    """The maximum length of a request that starts with `context` tokens."""
    return context + (1 + DRAFTS) * rounds + SPARE


class Decode(NamedTuple):
    """Decode steps with `rows` rows, in milliseconds."""

    rows: int
    recorded: bool
    read: float  # bytes
    device: float
    held: bool  # whether the GPU slept until the whole step was launched
    flow: Flow


# Rows that sample, by the name in the table.
SAMPLINGS = {
    "greedy": SamplingParams(0),
    "temperature 0.8": SamplingParams(1, temperature=0.8),
    "top_k 50": SamplingParams(1, top_k=50),
    "top_p 0.9": SamplingParams(1, top_p=0.9),
    "repetition_penalty 1.1": SamplingParams(1, do_sample=True, repetition_penalty=1.1),
}


class Sampling(NamedTuple):
    """Decode steps of `rows` rows that all sample alike, in milliseconds."""

    rows: int
    name: str
    flow: Flow


def samplings(engine: TorchEngine, numbers: Sequence[int], context: int, rounds: int) -> list[Sampling]:
    """The time of steps by the parameters of their rows."""
    found = []
    for rows in numbers:
        for name, params in SAMPLINGS.items():
            engine.reset()
            each = [params._replace(seed=row) for row in range(rows)]
            requests = Requests(engine, range(rows), context, longest(0, rounds), each)
            flow(engine, requests.prompts())
            flow(engine, requests.steps(WARM))
            found.append(Sampling(rows, name, flow(engine, requests.steps(rounds))))
    return found


def _decode(engine: TorchEngine, rows: int, recorded: bool, context: int, rounds: int) -> Decode:
    """Half of the steps measured alone come before the others and half after them, so that mean context lengths are
    equal."""
    model = engine._model
    assert isinstance(model, DecoderModel)
    engine.reset()
    requests, alone = Requests(engine, range(rows), context, longest(0, rounds)), Alone(engine)
    flow(engine, requests.prompts())
    flow(engine, requests.steps(WARM))
    before = alone.measure(requests, -(-rounds // 2))
    flowing = flow(engine, requests.steps(rounds))
    measured = before + alone.measure(requests, -(-rounds // 2))
    kept: Any = engine._attention  # knows the type of keys and values
    token = page_bytes(kept._kv, model.device) / kept.page_size
    read = stored((model._weights.layers, model._weights.head), rows) + rows * (context + WARM + rounds) * token
    return Decode(rows, recorded, read, statistics.median(measured), alone.works, flowing)


def decodes(engine: TorchEngine, numbers: Sequence[int], context: int, rounds: int) -> list[Decode]:
    """For each number of rows: with a CUDA graph, if there is one, and without."""
    found, recordings = [], engine._decode_graphs
    for rows in numbers:
        if recordings and max(recordings._sizes) >= rows:
            found.append(_decode(engine, rows, True, context, rounds))
        engine._decode_graphs = None
        found.append(_decode(engine, rows, False, context, rounds))
        engine._decode_graphs = recordings
    return found


MIXED_ROWS, DRAFTED_ROWS, DRAFTS = 64, 16, 3
CHUNKS = (64, 256, 512, 2048)


class Mixed(NamedTuple):
    """A step with a prompt chunk or drafts, in milliseconds."""

    name: str
    recorded: float | None  # with CUDA graphs, if there are any
    computed: float  # without
    # Of decode rows with a chunk: its time, with CUDA graphs if there are any, divided by those of a step of the rows
    # and one of the chunk together. At most 1.1 is wanted.
    of_parts: float | None = None


def mixed_steps(engine: TorchEngine, context: int, rounds: int) -> list[Mixed]:
    """Decode rows, chunks of a new prompt, both in one step, and rows with drafts; the latter one step at a time, since
    the next one depends on what is accepted."""
    limits, graphs = engine.limits, engine._decode_graphs
    rows, few = min(MIXED_ROWS, limits.max_batch_size - 1), min(DRAFTED_ROWS, limits.max_batch_size)
    chunks = [
        tokens
        for tokens in CHUNKS
        if rows + tokens <= limits.max_batch_prefill_tokens
        and tokens < limits.max_total_tokens
        and (rows + 1) * -(-(tokens + 1) // limits.page_size) <= limits.pages
    ]
    works: dict[str, Callable[[], float]] = {f"{rows} rows": partial(_flow_of, engine, rows, 0, context, rounds)}
    for tokens in chunks:
        works[f"a chunk of {tokens}"] = partial(_flow_of, engine, 0, tokens, context, rounds)
        works[f"{rows} rows, a chunk of {tokens}"] = partial(_flow_of, engine, rows, tokens, context, rounds)
    works[f"{few} rows with {DRAFTS} drafts"] = partial(_drafted, engine, few, context, rounds)
    found = {name: None if graphs is None else work() for name, work in works.items() if rows}
    engine._decode_graphs = None
    mixed = {name: Mixed(name, recorded, works[name]()) for name, recorded in found.items()}
    engine._decode_graphs = graphs
    taken = {name: one.computed if one.recorded is None else one.recorded for name, one in mixed.items()}
    for tokens in chunks if rows else []:
        chunk, both = f"a chunk of {tokens}", f"{rows} rows, a chunk of {tokens}"
        mixed[both] = mixed[both]._replace(of_parts=taken[both] / (taken[f"{rows} rows"] + taken[chunk]))
    return list(mixed.values())


# Rows that decode (0: one long prompt), adapters that they share, and their rank.
ADAPTED = (0, 1, 16), (1, 1, 16), (1, 1, 64), (64, 1, 16), (64, 16, 16), (64, 16, 64), (256, 32, 16)
ADAPTED_PROMPT = 2048


class Adapted(NamedTuple):
    """Decode steps whose rows share some LoRA adapters in turn, or a prompt with one, in milliseconds."""

    rows: int
    tokens: int  # of each row
    adapters: int
    rank: int
    step: float
    plain: float  # of the same step without adapters


def adapted_steps(engine: TorchEngine, context: int, rounds: int) -> list[Adapted]:
    """Steps with adapters of all projections next to those without. Everything else is as without, also the graphs."""
    engine.reset()
    limits, plain, found = engine.limits, dict[int, float](), []
    cases = [case for case in ADAPTED if case[0] <= limits.max_batch_size]
    samplings = {
        rank: add_adapters(engine, rank, max(number for _, number, of in cases if of == rank))
        for rank in {rank for _, _, rank in cases}
    }
    prompt = min(ADAPTED_PROMPT, limits.max_batch_prefill_tokens, limits.max_total_tokens - 2)
    for rows, number, rank in cases:
        few = max(1, rows)
        measure = partial(_decode_flow if rows else _prompt_flow, engine, context if rows else prompt, rounds)
        if rows not in plain:
            plain[rows] = measure([SamplingParams(0)] * few)
        step = measure([samplings[rank][row % number] for row in range(few)])
        found.append(Adapted(few, 1 if rows else prompt, number, rank, step, plain[rows]))
    engine.reset()
    for each in samplings.values():
        for params in each:
            engine.adapters.remove_adapter(params.adapter)
    return found


def _decode_flow(engine: TorchEngine, context: int, rounds: int, each: list[SamplingParams]) -> float:
    engine.reset()
    requests = Requests(engine, range(len(each)), context, longest(0, rounds), each)
    flow(engine, requests.prompts())
    flow(engine, requests.steps(WARM))
    return flow(engine, requests.steps(rounds)).step


def _prompt_flow(engine: TorchEngine, tokens: int, rounds: int, each: list[SamplingParams]) -> float:
    times = []
    for _ in range(rounds + 1):
        engine.reset()
        times.append(flow(engine, Requests(engine, range(1), tokens, 1, each).prompts()).whole)
    return statistics.median(times[1:])


def _flow_of(engine: TorchEngine, rows: int, tokens: int, context: int, rounds: int) -> float:
    """Steps of decode rows, with a chunk each of another new prompt in the slot after theirs."""
    engine.reset()
    decoding = Requests(engine, range(rows), context, longest(0, rounds)) if rows else None
    if decoding is not None:
        flow(engine, decoding.prompts())
    begun = iter(range(WARM + rounds))

    def step() -> Step:
        chunk = next(iter(Requests(engine, range(rows, rows + 1), tokens, 1).prompts())) if tokens else None
        one = None if decoding is None else decoding.next()
        joined_step = one if chunk is None else chunk if one is None else joined(one, chunk)
        assert joined_step is not None
        return joined_step._replace(number=next(begun))

    flow(engine, (step() for _ in range(WARM)))
    return flow(engine, (step() for _ in range(rounds))).step


def _drafted(engine: TorchEngine, rows: int, context: int, rounds: int) -> float:
    engine.reset()
    spare = (1 + DRAFTS) * rounds
    requests = Requests(engine, range(rows), context, spare)
    flow(engine, requests.prompts())
    drafts, draft_ids = pack_column(INT32, [DRAFTS] * rows), pack_column(INT32, [1] * DRAFTS * rows)
    starts, times = [context] * rows, []
    for _ in range(rounds):
        step = requests.next()._replace(starts=pack_column(INT32, starts), drafts=drafts, draft_ids=draft_ids)
        began = time.perf_counter()
        result = collected(engine, engine.launch(step))
        times.append(1e3 * (time.perf_counter() - began))
        starts = [start + kept for start, kept in zip(starts, result.counts, strict=True)]
    return statistics.median(times)


def prefill(engine: TorchEngine, tokens: int, rounds: int) -> float:
    """Milliseconds from the start of a prompt's first step to the end of its last."""
    found: list[float] = []
    for _ in range(rounds + 1):
        engine.reset()
        found.append(flow(engine, Requests(engine, range(1), tokens, 1).prompts()).whole)
    return statistics.median(found[1:])


def prefill_flop(config: dict[str, Any], tokens: int) -> float:
    """Floating point operations of a prompt: two per token and weight, four per query and element of a previous key
    (its value is summed too), and the output head once."""
    layers: int = config["num_hidden_layers"]
    hidden: int = config["hidden_size"]
    scored: int = hidden * config["vocab_size"]
    weights = layers * sum(outputs * inputs for outputs, inputs in matrices(config).values())
    queries, _ = matrices(config)["self_attn.q_proj"]
    return 2.0 * (weights * tokens + layers * queries * tokens * (tokens + 1) + scored)


# --- peaks of the device, with torch's own operations ---


CALLS = 4  # measured together, so that gaps between calls do not count
READ = {"cuda": 2 << 30, "cpu": 64 << 20}  # bytes, far larger than caches
EDGE = {"cuda": 8192, "cpu": 512}  # rows and columns of matrices


class Peaks(NamedTuple):
    """Peaks of one device."""

    read: float  # bytes/s
    how: str  # how `read` was measured
    product: float  # FLOP/s in bfloat16
    edge: int  # of the matrices; 0: given by --peak-tflops


def find_peaks(device: torch.device, rounds: int) -> Peaks:
    """Medians over the rounds. Needs 4 GiB of GPU memory during the measurement."""
    edge = EDGE[device.type]
    one, other = (torch.randn(edge, edge, device=device).to(torch.bfloat16) for _ in range(2))
    product = 2 * edge**3 / _seconds(lambda: torch.mm(one, other), device, rounds)
    return Peaks(*max(_reads(device, rounds)), product, edge)


def _reads(device: torch.device, rounds: int) -> list[tuple[float, str]]:
    """Bytes/s of fast reading operations."""
    size = READ[device.type]
    memory = torch.ones(size // 4, device=device)
    copy = torch.empty_like(memory)
    summed = size / _seconds(memory.sum, device, rounds)
    copied = 2 * size / _seconds(lambda: copy.copy_(memory), device, rounds)
    return [(summed, f"a sum over {size >> 20} MiB"), (copied, f"a copy of {size >> 20} MiB, read and written")]


def _seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median seconds of one call on the device."""
    measure = _on_gpu if device.type == "cuda" else _on_cpu
    measure(work)  # warm-up
    return statistics.median(measure(work) for _ in range(rounds)) / CALLS


def _on_gpu(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _on_cpu(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        work()
    return time.perf_counter() - began


# --- the trace ---


MOST = 25  # kernels in the table
WIDE = 100  # characters of a name


def kernel_table(engine: TorchEngine, steps: Iterable[Step], file: Path) -> list[str]:
    """Runs steps with two in flight and writes a trace for chrome://tracing or ui.perfetto.dev. Returns the lines of a
    table of the slowest kernels and copies on a GPU, or torch operations on CPU (without our kernels)."""
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


# --- the report ---


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
    """Device and software versions."""
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
    """The worker's settings. Raises UserError for unsupported ones."""
    decoding = longest(options.context, options.rounds)
    most = max(decoding, max(options.prefill) + 1) + 1
    found = load_settings({name: getattr(options, name) for name in TAKEN} | {"load_format": "dummy"}, {})
    return replace(
        found,
        model_dir=directory,
        run_dir=directory,
        max_total_tokens=most,
        max_batch_size=max(options.rows),
        max_batch_total_tokens=max(max(options.rows) * (decoding + PAGE), most, found.max_batch_prefill_tokens or 0),
    )


def taken(name: str) -> Callable[[str], Any]:
    """A parser of one setting. Raises ArgumentTypeError with the setting's message."""

    def read(text: str) -> Any:
        try:
            return OPTIONS[name].parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def output_file(text: str) -> Path:
    """A writable file. Raises ArgumentTypeError."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a directory that exists")
    return path


def parsed() -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=counts, default="1,8,64,256")
    parser.add_argument("--context", type=count, default=512, help="tokens of each request when it begins to decode")
    parser.add_argument("--prefill", type=counts, default="2048,8192", help="tokens of the long prompts")
    parser.add_argument("--rounds", type=count, default=40)
    parser.add_argument("--peak-tflops", type=count, help="of the datasheet, in place of what is measured")
    parser.add_argument("--trace", type=output_file, metavar="FILE", help="trace decode steps of the first of --rows")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to a file, too")
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
    print(f"\nDecode behind {options.context} tokens\n")
    found = decodes(engine, options.rows, options.context, options.rounds)
    print(*decode_table(found, peaks), "", sep="\n")
    if not all(one.held for one in found):
        print(f"{NOT_HELD}\n")
    print("Steps by how their rows sample\n")
    print("| rows | parameters | step ms | launch ms |\n|---|---|---|---|")
    sampled = samplings(engine, sorted({options.rows[0], options.rows[-1]}), options.context, options.rounds)
    for one in sampled:
        print(f"| {one.rows} | {one.name} | {one.flow.step:.3f} | {one.flow.launch:.3f} |")
    print("\nPrompts\n\n| tokens | steps | ms | tokens/s | TFLOP/s | of the peak |\n|---|---|---|---|---|---|")
    prefills = []
    for tokens in options.prefill:
        spent, flop = prefill(engine, tokens, min(options.rounds, 10)) / 1e3, prefill_flop(config, tokens)
        steps = -(-tokens // engine.limits.max_batch_prefill_tokens)
        prefills.append({"tokens": tokens, "ms": 1e3 * spent, "share": flop / spent / peaks.product})
        print(
            f"| {tokens} | {steps} | {1e3 * spent:.2f} | {tokens / spent:,.0f} | {flop / spent / 1e12:.2f} | "
            f"{flop / spent / peaks.product:.1%} |"
        )
    print("\nSteps with prompt chunks and drafts\n")
    print("| step | with CUDA graphs ms | without ms | of its parts as steps |\n|---|---|---|---|")
    mixed = mixed_steps(engine, options.context, options.rounds // 2)
    for step in mixed:
        recorded = "–" if step.recorded is None else f"{step.recorded:.3f}"
        parts = "" if step.of_parts is None else f"{step.of_parts:.0%}"
        print(f"| {step.name} | {recorded} | {step.computed:.3f} | {parts} |")
    print("\nSteps with LoRA adapters of all projections\n")
    print("| rows | tokens | adapters | rank | step ms | without ms | ratio |\n|---|---|---|---|---|---|---|")
    adapted = adapted_steps(engine, options.context, options.rounds // 2)
    for with_adapters in adapted:
        *sizes, step_ms, plain = with_adapters
        print(f"| {' | '.join(map(str, sizes))} | {step_ms:.3f} | {plain:.3f} | {step_ms / plain:.3f} |")
    if options.json:
        figures = {
            "machine": machine(device),
            "peaks": peaks._asdict(),
            "decode": [one._asdict() | {"flow": one.flow._asdict()} for one in found],
            "sampling": [one._asdict() | {"flow": one.flow._asdict()} for one in sampled],
            "prefill": prefills,
            "mixed": [one._asdict() for one in mixed],
            "adapted": [one._asdict() for one in adapted],
        }
        options.json.write_text(json.dumps(figures, indent=1))
    if options.trace:
        rows = options.rows[0]
        engine.reset()
        requests = Requests(engine, range(rows), options.context, TRACED)
        flow(engine, requests.prompts())
        lines = kernel_table(engine, requests.steps(TRACED), options.trace)
        print(f"\nWhere the time of decode steps of {rows} rows goes (all of it: {options.trace})\n", *lines, sep="\n")


def main() -> None:
    """Parses the command line, measures and prints."""
    options = parsed()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # shows which kernels compute
    with tempfile.TemporaryDirectory(prefix="tgi-") as directory:
        try:
            chosen = settings(options, Path(directory))
            config = CONFIG | SHAPES[options.shape] | {"max_position_embeddings": chosen.max_total_tokens}
            write_config(config, Path(directory))
            engine = startup.start_engine(chosen, lambda stage, percent: None)
            gc.collect()
            gc.freeze()  # as the worker's loop does
            report(engine, config, options)
        except UserError as error:
            sys.exit(str(error))
        except torch.OutOfMemoryError as error:
            sys.exit(f"The GPU's memory does not suffice: {error}. Lower --rows or --context.")
