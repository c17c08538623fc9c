"""Decode of experts, latent attention and recurrent layers on CPU, next to llama.cpp on the same file.

    scripts/bench architectures [--only lfm2,gpt-oss] [--format Q8_0] [--rows 1,8,32] [--turns 3] [--clock cpu]

Four models of 0.3 to 0.8 billion random weights, written as GGUF files once; gpt-oss has experts in MXFP4 and the rest
in Q8_0. In each turn this server's engine, then llama.cpp, both from this file. llama.cpp computes the tokens that this
engine has sampled, so both compute the same tokens behind the same prompts, and choose the same experts. Times are
those of decode steps, each of one token for all rows; this engine's include sampling, which llama.cpp's do not.

llama.cpp has its weights in huge pages, as this engine has, and the fastest of its settings, flash attention or none
and each number of threads, which a first turn chooses for each number of rows.

Prints medians of tokens/s over the turns, and the median, the smallest and the largest of their ratios by turn; lines
of a shape are printed when it is measured. All shapes take about four minutes on two cores, once the files are written
and llama.cpp is built.

With `--clock cpu` both compute on one thread, where none waits for another, and seconds are those of its CPU time,
which other load disturbs less. By the clock only a quiet machine tells anything: llama.cpp's threads wait for each
other in each operation, so any other program makes them many times slower.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from scripts.benchmarks import workloads
from scripts.benchmarks.engine_driver import Requests, collected
from scripts.benchmarks.peers import llama_cpp_program
from scripts.benchmarks.servers import Failed
from scripts.benchmarks.shapes import write_tokenizer
from scripts.make_gguf import add
from tgi.hub.resolver import model_directory
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.settings.options import count, counts
from tgi.microkernel.settings.table import Settings
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.startup import start_engine
from tgi.worker.host_cpu import THREADS_VARIABLE, usable_cores

Tensors = Iterator[tuple[str, tuple[int, ...]]]  # name, shape; matrices are [..., outputs, inputs]
VOCABULARY = 32000
PAGE = 64  # tokens: a multiple of the pages of the KV cache, in which longest rows are counted


class Shape(NamedTuple):
    """What a GGUF file of a model contains."""

    hidden: int
    layers: int
    heads: int
    metadata: dict[str, Any]  # without the architecture, besides those that all files have
    layer: Any  # number of a layer -> Tensors
    last_norm: str = "output_norm"
    tied: bool = False
    experts: str = ""  # the format of experts, in place of that of the others


def _mlp(hidden: int, inner: int, end: str = "", experts: tuple[int, ...] = ()) -> Tensors:
    yield f"ffn_gate{end}.weight", (*experts, inner, hidden)
    yield f"ffn_up{end}.weight", (*experts, inner, hidden)
    yield f"ffn_down{end}.weight", (*experts, hidden, inner)


def _attention(hidden: int, queries: int, keys: int, outputs: int) -> Tensors:
    yield "attn_q.weight", (queries, hidden)
    yield "attn_k.weight", (keys, hidden)
    yield "attn_v.weight", (keys, hidden)
    yield "attn_output.weight", (hidden, outputs)


def _lfm2(layer: int) -> Tensors:
    yield from (("attn_norm.weight", (1024,)), ("ffn_norm.weight", (1024,)))
    yield from _mlp(1024, 4608)
    if LFM2_TYPES[layer] == "conv":
        yield "shortconv.conv.weight", (1024, 3)
        yield "shortconv.in_proj.weight", (3072, 1024)
        yield "shortconv.out_proj.weight", (1024, 1024)
        return
    yield from _attention(1024, 1024, 512, 1024)
    yield from (("attn_q_norm.weight", (64,)), ("attn_k_norm.weight", (64,)))


def _gpt_oss(layer: int) -> Tensors:
    yield from (("attn_norm.weight", (960,)), ("post_attention_norm.weight", (960,)), ("attn_sinks.weight", (16,)))
    for name, shape in (
        *_attention(960, 1024, 256, 1024),
        *_mlp(960, 960, "_exps", (32,)),
        ("ffn_gate_inp.weight", (32, 960)),
    ):
        yield name, shape
        yield name.replace(".weight", ".bias"), shape[:-1]


def _deepseek(layer: int) -> Tensors:
    yield from (("attn_norm.weight", (1024,)), ("ffn_norm.weight", (1024,)))
    yield from (("attn_q_a_norm.weight", (384,)), ("attn_kv_a_norm.weight", (512,)))
    yield "attn_q_a.weight", (384, 1024)
    yield "attn_q_b.weight", (8 * 192, 384)
    yield "attn_kv_a_mqa.weight", (512 + 64, 1024)
    yield "attn_k_b.weight", (8, 512, 128)
    yield "attn_v_b.weight", (8, 128, 512)
    yield "attn_output.weight", (1024, 8 * 128)
    if layer == 0:
        yield from _mlp(1024, 2816)
        return
    yield from (("ffn_gate_inp.weight", (64, 1024)), ("exp_probs_b.bias", (64,)))
    yield from _mlp(1024, 256, "_exps", (64,))
    yield from _mlp(1024, 256, "_shexp")


def _qwen3_next(layer: int) -> Tensors:
    yield from (("attn_norm.weight", (1024,)), ("post_attention_norm.weight", (1024,)))
    if layer % 4 == 3:
        yield from _attention(1024, 2 * 2048, 512, 2048)
        yield from (("attn_q_norm.weight", (256,)), ("attn_k_norm.weight", (256,)))
    else:
        yield "attn_qkv.weight", (4096, 1024)
        yield "attn_gate.weight", (2048, 1024)
        yield "ssm_conv1d.weight", (4096, 4)
        yield from (("ssm_dt.bias", (16,)), ("ssm_a", (16,)), ("ssm_norm.weight", (128,)))
        yield "ssm_ba.weight", (32, 1024)
        yield "ssm_out.weight", (1024, 2048)
    yield from (("ffn_gate_inp.weight", (128, 1024)), ("ffn_gate_inp_shexp.weight", (1024,)))
    yield from _mlp(1024, 128, "_exps", (128,))
    yield from _mlp(1024, 128, "_shexp")


LFM2_TYPES = ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]

# By the architecture's name in a GGUF file. lfm2 is LFM2-350M; the others have the proportions of gpt-oss-20b,
# DeepSeek-V3 and Qwen3-Next-80B-A3B, with fewer and smaller layers and experts.
SHAPES = {
    "lfm2": Shape(
        *(1024, 16, 16),
        {
            "attention.head_count_kv": [8 * (kind != "conv") for kind in LFM2_TYPES],
            "feed_forward_length": 4608,
            "shortconv.l_cache": 3,
        },
        _lfm2,
        "token_embd_norm",
        tied=True,
    ),
    "gpt-oss": Shape(
        *(960, 8, 16),
        {
            "attention.head_count_kv": 4,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.sliding_window": 128,
            "feed_forward_length": 960,
            "expert_feed_forward_length": 960,
            "expert_count": 32,
            "expert_used_count": 4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        _gpt_oss,
        experts="MXFP4",
    ),
    "deepseek2": Shape(
        *(1024, 12, 8),
        {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 384,
            "attention.kv_lora_rank": 512,
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 64,
            "feed_forward_length": 2816,
            "leading_dense_block_count": 1,
            "expert_feed_forward_length": 256,
            "expert_count": 64,
            "expert_used_count": 6,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
        _deepseek,
    ),
    "qwen3next": Shape(
        *(1024, 12, 8),
        {
            "attention.head_count_kv": 2,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "rope.dimension_count": 64,
            "feed_forward_length": 2816,
            "expert_feed_forward_length": 128,
            "expert_shared_feed_forward_length": 128,
            "expert_count": 128,
            "expert_used_count": 8,
            "full_attention_interval": 4,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 2048,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 16,
            "ssm.group_count": 8,
        },
        _qwen3_next,
    ),
}
# Stored in float32, as by llama.cpp's converter.
PLAIN = (
    ".bias",
    "norm.weight",
    "ffn_gate_inp.weight",
    "conv.weight",
    "conv1d.weight",
    "ssm_a",
    "attn_sinks.weight",
    "inp_shexp.weight",
)


def random_blocks(name: str, shape: tuple[int, ...], form: str, draw: np.random.Generator) -> np.ndarray:
    """Weights of a format that preserve the scale of activations, as they are stored."""
    deviation, number = shape[-1] ** -0.5, int(np.prod(shape))
    if form == "F32":
        if len(shape) == 1:
            return np.full(shape, -1 if name.endswith("ssm_a") else name.endswith("norm.weight"), np.float32)
        return draw.standard_normal(shape, np.float32) * np.float32(deviation)
    if form == "BF16":
        generator = torch.Generator().manual_seed(int(draw.integers(1 << 32)))
        made = torch.empty(shape, dtype=torch.bfloat16).normal_(0, deviation, generator=generator)
        found: np.ndarray = made.view(torch.uint8).numpy()
        return found
    header, scale = {
        "Q8_0": (2, np.array([deviation / 74], np.float16).view(np.uint8)),
        "MXFP4": (1, np.array([128 + round(np.log2(deviation / 6))], np.uint8)),
    }[form]
    raw = draw.integers(0, 256, (number // 32, header + (32 if form == "Q8_0" else 16)), np.uint8)
    raw[:, :header] = scale
    return raw.reshape(*shape[:-1], -1)


def write(architecture: str, form: str, path: Path) -> None:
    """Writes the GGUF file of a shape."""
    shape, draw = SHAPES[architecture], np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(VOCABULARY, Path(directory))
        tokenizer = json.loads((Path(directory) / "tokenizer.json").read_text())["model"]
    common = {
        "block_count": shape.layers,
        "context_length": 4096,
        "embedding_length": shape.hidden,
        "vocab_size": VOCABULARY,
        "attention.head_count": shape.heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1000000.0,
    }
    writer = GGUFWriter(path, architecture)
    for key, value in (common | shape.metadata).items():
        add(writer, f"{architecture}.{key}", value)
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    for key, value in {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * len(tokens),
        "merges": [" ".join(pair) for pair in tokenizer["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "add_bos_token": False,
    }.items():
        add(writer, f"tokenizer.ggml.{key}", value)
    tensors = {"token_embd.weight": (VOCABULARY, shape.hidden), f"{shape.last_norm}.weight": (shape.hidden,)}
    if not shape.tied:
        tensors["output.weight"] = (VOCABULARY, shape.hidden)
    for layer in range(shape.layers):
        tensors |= {f"blk.{layer}.{name}": size for name, size in shape.layer(layer)}
    for name, size in tensors.items():
        own = shape.experts if shape.experts and "_exps.weight" in name else form
        own = "F32" if len(size) == 1 or name.endswith(PLAIN) else own
        writer.add_tensor(name, random_blocks(name, size, own, draw), raw_dtype=GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Result(NamedTuple):
    """What decode steps have computed."""

    rate: float  # tokens per second
    ids: list[list[int]]  # of each row: the prompt, and the token that each step has read


class Peer(NamedTuple):
    """How llama.cpp computes."""

    flash: bool  # attention
    threads: int


def start(file: Path, rows: int, tokens: int, run: Path) -> TorchEngine:
    """This server's engine with the file, for rows of up to that many tokens."""
    settings = Settings(
        model_dir=model_directory(str(file)),
        run_dir=run,
        device="cpu",
        dtype="bfloat16",
        max_batch_size=rows,
        max_total_tokens=tokens,
        max_batch_total_tokens=2 * rows * tokens,
        max_batch_prefill_tokens=min(2048, 2 * rows * tokens),
        packed_weights_bytes=0,  # a thread that writes them would compute while steps are measured
    )
    return start_engine(settings, lambda stage, percent: None)


def ours(engine: TorchEngine, rows: int, prompt: int, tokens: int, clock: Callable[[], float]) -> Result:
    """Decode steps, one at a time."""
    engine.reset()
    requests = Requests(engine, range(rows), prompt, tokens + 2, apart=prompt)
    results = [collected(engine, engine.launch(step)) for step in requests.prompts()]
    decode = list(requests.steps(tokens))  # a scheduler plans them in a process of its own
    began = clock()
    steps = [collected(engine, engine.launch(step)) for step in decode]
    rate = rows * tokens / (clock() - began)
    columns = [unpack_int32(b"".join(one.token_ids for one in results))]
    columns += [unpack_int32(one.token_ids) for one in steps[:-1]]
    return Result(rate, [[*requests.prompt_ids(row), *read] for row, read in enumerate(zip(*columns, strict=True))])


@contextmanager
def llama_decode(file: Path, rows: int, tokens: int, directory: Path) -> Iterator[Callable[..., float]]:
    """Starts and ends llama.cpp. Yields a function of the token ids of rows, how many of them are the prompt, the
    settings and whether CPU time counts, which returns tokens per second. Raises Failed."""
    command: list[str | Path | int] = [llama_cpp_program("llama_decode", directory), file, rows, tokens]
    # Memory of malloc in huge pages. llama.cpp's weights would have small ones, which take it up to 1.7 times as long.
    environ = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(list(map(str, command)), stdin=pipe, stdout=pipe, text=True, env=environ) as process:

        def theirs(ids: list[list[int]], prompt: int, peer: Peer, cpu: bool) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            steps = len(ids[0]) - prompt
            words = [int(peer.flash), peer.threads, len(ids), prompt, steps, *chain.from_iterable(ids)]
            print(*words, file=process.stdin, flush=True)
            said = process.stdout.readline().split()
            if not said:
                raise Failed(f"llama.cpp does not compute {file}")
            return len(ids) * steps / float(said[cpu])

        try:
            yield theirs
        finally:
            process.kill()


def measure(options: argparse.Namespace, architecture: str, threads: int, cpu: bool) -> None:
    """Measures a shape and prints its lines."""
    prompt, tokens, clock = options.prompt, options.tokens, time.process_time if cpu else time.perf_counter
    form = options.format or ("Q8_0" if SHAPES[architecture].experts else "BF16")
    path = workloads.PEERS_DIRECTORY / "models" / f"{architecture}-{form}.gguf"
    file = workloads.whole(path, partial(write, architecture, form))
    most, longest = max(options.rows), -(-(prompt + tokens + 2) // PAGE) * PAGE
    settings = [Peer(flash, number) for flash in (False, True) for number in range(1, threads + 1)]
    with tempfile.TemporaryDirectory(prefix="tgi-") as run:
        engine = start(file, most, longest, Path(run))
        with llama_decode(file, most, longest, Path(run)) as theirs:
            best: dict[int, Peer] = {}
            for rows in options.rows:
                ids = ours(engine, rows, prompt, tokens, clock).ids
                rates = {peer: theirs(ids, prompt, peer, cpu) for peer in settings}
                best[rows] = max(rates, key=rates.__getitem__)
            turns = []
            for _ in range(options.turns):
                turn = []
                for rows in options.rows:
                    own = ours(engine, rows, prompt, tokens, clock)
                    turn.append((own.rate, theirs(own.ids, prompt, best[rows], cpu)))
                turns.append(turn)
    for at, rows in enumerate(options.rows):
        mine, other = ([turn[at][side] for turn in turns] for side in range(2))
        ratios = [one / two for one, two in zip(mine, other, strict=True)]
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        how = f"{'flash' if best[rows].flash else 'plain'}, {best[rows].threads}"
        figures = f"{statistics.median(mine):.1f} | {statistics.median(other):.1f} | {how} | {middle:.2f}"
        print(f"| {architecture}, {form} | {rows} | {figures} | {low:.2f} to {high:.2f} |", flush=True)


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SHAPES), help="architectures")
    parser.add_argument("--format", default="", choices=("BF16", "Q8_0"), help="of all matrices but gpt-oss' experts")
    parser.add_argument("--rows", type=counts, default="1,8,32")
    parser.add_argument("--turns", type=count, default=3)
    parser.add_argument("--prompt", type=count, default=16, help="tokens")
    parser.add_argument("--tokens", type=count, default=16, help="decode steps of a turn")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    cpu = options.clock == "cpu"
    threads = 1 if cpu else usable_cores()
    os.environ[THREADS_VARIABLE] = str(threads)
    titles = ("", "rows", "ours, tokens/s", "llama.cpp", "its attention, threads", "ratio", "by turn")
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|", flush=True)
    for architecture in options.only.split(","):
        measure(options, architecture, threads, cpu)


if __name__ == "__main__":
    main()
