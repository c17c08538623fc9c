"""Measures transformers' continuous batching on the same shape and load as `scripts/bench stack`.

    scripts/bench peer-gpu [--shape 8b] [--requests 256] [--json FILE] [--device cpu --shape two-layer]

The model has random weights, which are made on the device. The requests are those of `scripts/bench offline`, all at
once, greedy, without an end token. What it needs once (graphs, kernels) happens before the clock starts. It computes as
it does by default: with FlashAttention if that is installed, CUDA graphs where it uses them.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from scripts.benchmarks.http_load import Load, loads
from scripts.benchmarks.offline import prompt_ids
from scripts.benchmarks.shapes import CONFIG, SHAPES
from scripts.benchmarks.stack import CONTEXT
from tgi.microkernel.settings.options import count

PATIENCE = 240.0  # seconds without a finished request


def random_model(config: dict[str, Any], device: str) -> Any:
    """A model of transformers with random bfloat16 weights."""
    described = transformers.AutoConfig.for_model(**config)
    described.bos_token_id = described.eos_token_id = described.pad_token_id = None
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def run(manager: Any, load: Sequence[Load], vocabulary: int) -> float:
    """Seconds of these requests at once. Raises RuntimeError if one fails."""
    began = heard = time.perf_counter()
    wanted = {
        manager.add_request(prompt_ids(one, vocabulary), max_new_tokens=one.outputs, eos_token_id=-1): one.outputs
        for one in load
    }
    while wanted:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            heard = time.perf_counter()
            if result.error is not None or len(result.generated_tokens) != wanted.pop(result.request_id):
                raise RuntimeError(f"{len(result.generated_tokens)} tokens of a request: {result.error}")
        elif not manager.is_running() or time.perf_counter() - heard > PATIENCE:
            raise RuntimeError(f"it has stopped, with {len(wanted)} requests left")
    return time.perf_counter() - began


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=count, default=256)
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of requests")
    parser.add_argument("--attention", help="transformers' attn_implementation, in place of its choice")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    options = parser.parse_args()
    config = CONFIG | SHAPES[options.shape] | {"max_position_embeddings": CONTEXT}
    with torch.inference_mode():
        model = random_model(config, options.device)
        if options.attention:
            model.set_attn_implementation(options.attention)
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=CONTEXT)
        manager = model.init_continuous_batching(generation_config=greedy)
        manager.start()
        try:
            warm = run(manager, loads(8, options.scale, seed=3), config["vocab_size"])
            load = loads(options.requests, options.scale)
            seconds = run(manager, load, config["vocab_size"])
        finally:
            manager.stop(block=True, timeout=5)
    figures = {
        "version": transformers.__version__,
        "attention": model.config._attn_implementation,
        "warm_up_s": warm,
        "seconds": seconds,
        "tokens_per_s": sum(one.outputs for one in load) / seconds,
    }
    print("| transformers' continuous batching | |\n|---|---|")
    print(*(f"| {name} | {value} |" for name, value in figures.items()), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
