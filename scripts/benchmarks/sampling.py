"""Measures the step from logits to tokens: greedy, sampled, each logits processor alone, and all of them.

    scripts/bench sampling [--rows 256] [--vocab 49152] [--repetitions 15]

Every row has 128 prompt ids and 128 generated ids, and all rows have the same parameters. Kinds run in turn, so that
other load affects them alike. Prints the median CPU time of one thread in ms, the same per row, and the median ratio
to greedy in the same round. The n-th most likely token has a probability of about n^-1.5, as in language models, so a
nucleus is small; a high temperature widens it and has its own line.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.settings.options import count
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import sample
from tgi.worker.sampling.sampling_batch import SamplingBatch, SamplingColumns
from tgi.worker.sampling.token_bitmask import BITS_PER_WORD, GrammarBitmask
from tgi.worker.sampling.watermark import Watermark

CPU = torch.device("cpu")
PROMPT, LENGTH = 128, 256
BIASED = 20
WORDS, WORD = 20, 3

BIAS: dict[str, Any] = {"bias_ids": pack_column(INT32, range(BIASED)), "biases": pack_column(FLOAT32, [1.0] * BIASED)}
BAD_WORDS: dict[str, Any] = {
    "bad_word_ids": pack_column(INT32, range(WORDS * WORD)),
    "bad_word_lengths": pack_column(INT32, [WORD] * WORDS),
}
ENDS: dict[str, Any] = {"min_new_tokens": LENGTH, "end_ids": pack_column(INT32, [2])}
KINDS = {
    "greedy": SamplingParams(0),
    "drawn": SamplingParams(0, do_sample=True),
    "temperature": SamplingParams(0, temperature=0.8),
    "top_k 40": SamplingParams(0, top_k=40),
    "top_p 0.9": SamplingParams(0, top_p=0.9),
    "top_p 0.9, temperature 3": SamplingParams(0, top_p=0.9, temperature=3.0),
    "typical_p 0.9": SamplingParams(0, typical_p=0.9),
    "min_p 0.1": SamplingParams(0, min_p=0.1),
    "xtc at each position": SamplingParams(0, xtc_probability=1.0),
    "greedy, repetition penalty": SamplingParams(0, repetition_penalty=1.1),
    "greedy, frequency penalty (TGI's)": SamplingParams(0, frequency_penalty=0.5),
    "greedy, frequency and presence penalty (OpenAI's)": SamplingParams(0, count_penalty=0.5, presence_penalty=0.5),
    f"greedy, {BIASED} biases": SamplingParams(0, **BIAS),
    f"greedy, {WORDS} bad words of {WORD} tokens": SamplingParams(0, **BAD_WORDS),
    "greedy, a least length": SamplingParams(0, **ENDS),
    "greedy, 5 likeliest": SamplingParams(0, top_n=5),
    "greedy, a grammar's mask": SamplingParams(0, grammar="any"),
    "greedy, watermark": SamplingParams(0, watermark=True),
    "greedy, watermark, new lists": SamplingParams(0, watermark=True),
}
KINDS["everything"] = SamplingParams(
    0,
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.5,
    count_penalty=0.5,
    presence_penalty=0.5,
    top_n=5,
    grammar="any",
    watermark=True,
    **BIAS,
    **BAD_WORDS,
    **ENDS,
)


class Bench(NamedTuple):
    """A batch of equal rows. `run` overwrites its logits."""

    batch: SamplingBatch
    noise: Noise

    @classmethod
    def of(cls, sampling: SamplingParams, rows: int, vocab: int, noise: Noise, kept: int) -> "Bench":
        """A batch of rows with these parameters."""
        params = SamplingColumns.allocate(rows)
        for row in range(rows):
            params.assign(row, sampling._replace(seed=row), PROMPT)
        ids = torch.randint(vocab, (rows, LENGTH), generator=torch.Generator().manual_seed(1))

        def history(chosen: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> torch.Tensor:
            return ids[torch.from_numpy(chosen), int(begins[0]) : int(ends[0])]

        words = np.random.default_rng(1).integers(-(2**31), 2**31, (rows, -(-vocab // BITS_PER_WORD)), np.int32)
        masks = GrammarBitmask(np.arange(rows), words, [""] * rows) if sampling.grammar else None
        mark = Watermark(vocab, CPU, max_cached=kept)
        return cls(SamplingBatch(params, np.full(rows, LENGTH), history, masks, mark), noise)

    def run(self, logits: torch.Tensor) -> None:
        """Runs until stopped."""
        sample(logits, self.batch, self.noise)


def timed(work: Callable[[torch.Tensor], None], logits: torch.Tensor) -> float:
    """Milliseconds of this thread's CPU time."""
    scores = logits.clone()
    begun = time.thread_time()
    work(scores)
    return (time.thread_time() - begun) * 1e3


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=count, default=256)
    parser.add_argument("--vocab", type=count, default=49152)
    parser.add_argument("--repetitions", type=count, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)  # the measured CPU time is that of one thread
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(given.rows, given.vocab, generator=generator).argsort(-1)
    logits = torch.randn(order.shape, generator=generator) * 0.5 - 1.5 * (order + 1).log()
    noise = Noise(given.vocab, CPU)
    benches = {
        name: Bench.of(sampling, given.rows, given.vocab, noise, 1 if "new" in name else 1 << 20)
        for name, sampling in KINDS.items()
    }
    for bench in benches.values():
        bench.run(logits.clone())
    rounds = [{name: timed(bench.run, logits) for name, bench in benches.items()} for _ in range(given.repetitions)]
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, one thread")
    load = os.getloadavg()[0]
    print(f"{given.rows} rows, {given.vocab} tokens, medians of {given.repetitions} rounds, load {load:.1f}\n")
    print("| every row asks for | ms | µs per row | times greedy |\n|---|---|---|---|")
    for name in KINDS:
        median = statistics.median(times[name] for times in rounds)
        ratio = statistics.median(times[name] / times["greedy"] for times in rounds)
        print(f"| {name} | {median:.1f} | {median / given.rows * 1e3:.0f} | {ratio:.1f} |")
