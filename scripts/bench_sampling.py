"""Measures what a step spends from logits to tokens: greedy, drawn, each processor by itself, and all of them.

    .venv/bin/python scripts/bench_sampling.py [--rows 256] [--vocab 49152] [--repetitions 15]

Every row has 128 ids of a prompt and 128 of an answer, and all rows ask for the same. Kinds are measured in turn, a
round after the other, so that other work on the machine disturbs them alike. Printed are the median in ms of the CPU
time of one thread, that divided by the rows, and the median of the ratios to greedy in the same round.

Logits are as a language model's: the n-th likeliest token has a probability of about n^-1.5, so a nucleus is small. A
high temperature makes it wide, and has a line of its own.
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

from tgi.kernel.messages import Sampling
from tgi.kernel.option import count
from tgi.kernel.pack import FLOAT32, INT32, pack
from tgi.worker.masks import BITS, Masks
from tgi.worker.noise import Noise
from tgi.worker.params import Draws, Params
from tgi.worker.sampling import sample
from tgi.worker.watermark import Watermark

CPU = torch.device("cpu")
PROMPT, LENGTH = 128, 256
BIASED = 20
WORDS, WORD = 20, 3

BIAS: dict[str, Any] = {"bias_ids": pack(INT32, range(BIASED)), "biases": pack(FLOAT32, [1.0] * BIASED)}
BAD_WORDS: dict[str, Any] = {
    "bad_word_ids": pack(INT32, range(WORDS * WORD)),
    "bad_word_lengths": pack(INT32, [WORD] * WORDS),
}
ENDS: dict[str, Any] = {"min_new_tokens": LENGTH, "end_ids": pack(INT32, [2])}
KINDS = {
    "greedy": Sampling(0),
    "drawn": Sampling(0, do_sample=True),
    "temperature": Sampling(0, temperature=0.8),
    "top_k 40": Sampling(0, top_k=40),
    "top_p 0.9": Sampling(0, top_p=0.9),
    "top_p 0.9, temperature 3": Sampling(0, top_p=0.9, temperature=3.0),
    "typical_p 0.9": Sampling(0, typical_p=0.9),
    "min_p 0.1": Sampling(0, min_p=0.1),
    "greedy, repetition penalty": Sampling(0, repetition_penalty=1.1),
    "greedy, frequency penalty (TGI's)": Sampling(0, frequency_penalty=0.5),
    "greedy, frequency and presence penalty (OpenAI's)": Sampling(0, count_penalty=0.5, presence_penalty=0.5),
    f"greedy, {BIASED} biases": Sampling(0, **BIAS),
    f"greedy, {WORDS} bad words of {WORD} tokens": Sampling(0, **BAD_WORDS),
    "greedy, a least length": Sampling(0, **ENDS),
    "greedy, 5 likeliest": Sampling(0, top_n=5),
    "greedy, a grammar's mask": Sampling(0, grammar="any"),
    "greedy, watermark": Sampling(0, watermark=True),
    "greedy, watermark, new lists": Sampling(0, watermark=True),
}
ALL: dict[str, Any] = {"grammar": "any", "watermark": True, "min_p": 0.01, **BIAS, **BAD_WORDS, **ENDS}
KINDS["everything"] = Sampling(0, False, 0.8, 40, 0.9, 1.1, 5, 0, 0.9, 0.5, 0.5, 0.5, **ALL)


class Bench(NamedTuple):
    """A batch of equal rows. `run` overwrites the logits that it is given."""

    draws: Draws
    noise: Noise

    @classmethod
    def of(cls, sampling: Sampling, rows: int, vocab: int, noise: Noise, kept: int) -> "Bench":
        params = Params.empty(rows)
        for row in range(rows):
            params.put(row, sampling._replace(seed=row), PROMPT)
        ids = torch.randint(vocab, (rows, LENGTH), generator=torch.Generator().manual_seed(1))

        def history(chosen: NDArray[np.int64], begins: NDArray[np.int64]) -> torch.Tensor:
            return ids[torch.from_numpy(chosen), int(begins[0]) :]

        words = np.random.default_rng(1).integers(-(2**31), 2**31, (rows, -(-vocab // BITS)), np.int32)
        masks = Masks(np.arange(rows), words, [""] * rows) if sampling.grammar else None
        mark = Watermark(vocab, CPU, kept=kept)
        return cls(Draws(params, np.full(rows, LENGTH), history, masks, mark), noise)

    def run(self, logits: torch.Tensor) -> None:
        sample(logits, self.draws, self.noise)


def timed(work: Callable[[torch.Tensor], None], logits: torch.Tensor) -> float:
    """Milliseconds of this thread's CPU time."""
    scores = logits.clone()
    begun = time.thread_time()
    work(scores)
    return (time.thread_time() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=count, default=256)
    parser.add_argument("--vocab", type=count, default=49152)
    parser.add_argument("--repetitions", type=count, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)  # so that its CPU time is all there is
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


if __name__ == "__main__":
    main()
