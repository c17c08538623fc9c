"""Compares every family's tiny model on a device with transformers on the same device.

    scripts/bench families [--device cpu] [--only llama,gemma2] [--json FILE]

In float32: the greedy tokens of prompts of several lengths, by the engine as a worker starts it, with CUDA graphs on a
GPU. transformers computes the prompt with these tokens at once; each must have its highest logit, with a logprob that
differs by at most 1e-3. Families are compared in `--jobs` processes, since compiling kernels takes most of the time.
"""

import argparse
import gc
import json
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers

from scripts.benchmarks.engine_driver import Requests, collected
from scripts.make_model import KINDS, make_model
from tgi.microkernel.settings.options import count
from tgi.microkernel.settings.table import Settings
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.startup import start_engine

PROMPTS = (3, 60)  # tokens; the longer one exceeds the tiny models' sliding windows
ROWS = 3
TOKENS = 12
TOLERANCE = 1e-3


class Compared(NamedTuple):
    """The comparison of one family."""

    kind: str
    different: int  # tokens that are not transformers' choice
    tokens: int
    logprob: float  # the largest difference
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether it computes what transformers computes."""
        return not self.error and not self.different and self.logprob <= TOLERANCE


def generate(engine: TorchEngine, prompt: int) -> tuple[list[int], list[float]]:
    """The greedy tokens behind engine_driver's prompt of that many tokens, and their logprobs, of the last of ROWS
    rows, which are all equal."""
    engine.reset()
    requests = Requests(engine, range(ROWS), prompt, TOKENS)
    ids: list[int] = []
    logprobs: list[float] = []
    for step in (*requests.prompts(), *requests.steps(TOKENS - 1)):
        result = collected(engine, engine.launch(step))
        ids.append(int(np.frombuffer(result.token_ids, np.int32)[-1]))
        logprobs.append(float(np.frombuffer(result.logprobs, np.float32)[-1]))
    return ids, logprobs


def compare(kind: str, directory: Path, run: Path, device: str) -> Compared:
    """One family."""
    settings = Settings(
        model_dir=make_model(kind, directory),
        run_dir=run,
        device=device,
        dtype="float32",
        cuda_graphs=(ROWS + 1,) if device == "cuda" else (),
        max_batch_size=ROWS + 1,
        max_total_tokens=256,
        max_batch_total_tokens=2048,
    )
    engine = start_engine(settings, lambda stage, percent: None)
    # By its name, since not every class can be found by its config.
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32).to(device).eval()
    different = 0
    worst = 0.0
    for prompt in PROMPTS:
        ids, logprobs = generate(engine, prompt)
        known = [(100 + place) % engine.limits.vocab_size for place in range(prompt)]
        with torch.inference_mode():
            logits = model(torch.tensor([known + ids[:-1]], device=device)).logits[0, prompt - 1 :].float()
        found = logits.log_softmax(-1)
        different += int((logits.argmax(-1).cpu() != torch.tensor(ids)).sum())
        theirs = found[torch.arange(len(ids)), torch.tensor(ids)].cpu()
        worst = max(worst, float((theirs - torch.tensor(logprobs)).abs().max()))
    return Compared(kind, different, TOKENS * len(PROMPTS), worst)


def attempt(device: str, kind: str) -> Compared:
    """The comparison, or what it raised: the other families are still of interest."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="tgi-") as store:
        run = Path(store) / "run"
        run.mkdir()
        try:
            return compare(kind, Path(store) / "model", run, device)
        except Exception as error:
            traceback.print_exc()
            return Compared(kind, 0, 0, 0.0, f"{type(error).__name__}: {error}")
        finally:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    """Parses the command line, compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of scripts/make_model.py")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    parser.add_argument("--jobs", type=count, default=1)
    options = parser.parse_args()
    found = []
    print("| family | other tokens | largest difference of a logprob | |\n|---|---|---|---|")
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for one in pool.map(partial(attempt, options.device), options.only.split(",")):
            found.append(one)
            verdict = one.error or ("passed" if one.passed else "failed")
            print(f"| {one.kind} | {one.different} of {one.tokens} | {one.logprob:.2g} | {verdict} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([one._asdict() | {"passed": one.passed} for one in found], indent=1))
    sys.exit(not all(one.passed for one in found))


if __name__ == "__main__":
    main()
