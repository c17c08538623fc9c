#!/usr/bin/env python
"""Measures what fewer bits cost: how well a model foretells a text, in bfloat16 and in the formats made from that, and
with its keys and values in 8 bits, as they are kept on a GPU.

    .venv/bin/python scripts/bench_quality.py [--model-id FILE.gguf] [--windows 16] [--length 512]

The text is that of pydoc_data.topics, the language reference that every Python carries; it is cut into windows that are
foretold apart. Printed are, for each format, the bits of a weight of the layers, the perplexity, the relative error of
the logits against bfloat16 (the norm of the difference over the norm of the logits without their mean), and how often
the likeliest token is the same. A model whose weights are quantized already is measured in its own bits too, and what
stands here as bfloat16 is what those stand for. 8-bit floats are dequantized, since no CPU computes with them: so it
is on a GPU in steps of few rows, while in others the activations are 8-bit floats as well.
"""

import argparse
import pydoc_data.topics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.hub.card import read_card
from tgi.hub.resolve import model_directory
from tgi.hub.tokens import read_tokenizer
from tgi.kernel.errors import UserError
from tgi.kernel.option import count
from tgi.worker.attention import build_attention
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.batch import Attention, Batch, Model
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.load import read_recipe
from tgi.worker.models.decoder import Decoder
from tgi.worker.models.weights import WeightReader
from tgi.worker.native.choose import find_kernels
from tgi.worker.quantization.source import QuantizingSource, Source
from tgi.worker.quantization.weight import QuantizedWeight, Weight, plain

CPU = torch.device("cpu")
CACHES = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Plain:
    """A source whose weights are plain, whatever they are in the file."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str, *shape: int) -> Tensor:
        """As the file has it."""
        return self._source.tensor(name, *shape)

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """What the file's stands for."""
        return plain(self._source.weight(name, outputs, inputs), torch.bfloat16)


class Counted:
    """A source that counts the bits of what it gives for the layers."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._bytes = self._numbers = 0

    @property
    def bits(self) -> float:
        """Of a weight, on average."""
        return 8 * self._bytes / self._numbers

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Not counted."""
        return self._source.tensor(name, *shape)

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """Counted, unless it is the first layer or the last."""
        found = self._source.weight(name, outputs, inputs)
        if ".layers." in name:
            self._bytes += found.nbytes
            self._numbers += outputs * inputs
        return found


class Format(NamedTuple):
    """A model in one of the formats."""

    name: str
    bits: float
    model: Model
    attention: Attention


class Score:
    """What a format has shown so far, over all tokens."""

    def __init__(self) -> None:
        self.tokens = self.agreed = 0
        self.surprise = self.error = self.size = 0.0

    def add(self, logits: Tensor, exact: Tensor, next_ids: Tensor) -> None:
        """Of some tokens, [n, vocab] and [n]."""
        self.tokens += len(next_ids)
        self.surprise += float(F.cross_entropy(logits, next_ids, reduction="sum"))
        self.error += float((logits - exact).square().sum())
        self.size += float((exact - exact.mean(1, keepdim=True)).square().sum())
        self.agreed += int((logits.argmax(1) == exact.argmax(1)).sum())

    def __str__(self) -> str:
        perplexity = torch.tensor(self.surprise / self.tokens).exp()
        return f"{perplexity:.3f} | {(self.error / self.size) ** 0.5:.2%} | {self.agreed / self.tokens:.2%}"


def load(directory: Path, positions: int) -> list[Format]:
    """The model in its own bits if it has some, and in all formats that can be made, the first of them bfloat16."""
    recipe = read_recipe(directory, "bfloat16")
    config = recipe.decoder
    if config is None:
        raise UserError(f"The model in {directory} runs through transformers: its weights cannot be quantized.")
    kernels, _ = find_kernels([recipe], "cpu")
    formats: dict[str, Callable[[Source], Source]] = {
        "bf16": Plain,
        "int8": lambda source: QuantizingSource(Plain(source), "int8"),
        "int4": lambda source: QuantizingSource(Plain(source), "int4"),
        "fp8": lambda source: QuantizingSource(Plain(source), "fp8"),
    }
    found = []
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        stored = recipe.scheme.stored_source(checkpoint)
        probe = "model.layers.0.self_attn.o_proj", config.hidden, config.heads * config.head_dim
        if isinstance(stored.weight(*probe), QuantizedWeight):
            formats["as it is"] = lambda source: source
        for name, made in formats.items():
            source = Counted(made(stored))
            read = Plain(source) if name == "fp8" else source
            weights = WeightReader(read, config, torch.bfloat16, CPU, kernels).weights(lambda percent: None)
            model = Decoder(config, weights, torch.bfloat16, CPU, kernels)
            pages = -(-positions // 16)
            found.append(Format(name, source.bits, model, build_attention(model.kv, pages, CPU)))
    exact = found[0]
    for name, stored in CACHES.items():
        attention = CudaAttention(exact.model.kv._replace(stored=stored), pages, CPU, "plain")
        found.append(exact._replace(name=f"{exact.name}, cache {name}", attention=attention))
    return found


def logits(model: Model, attention: Attention, ids: Sequence[int]) -> Tensor:
    """Behind each of the ids, float32 [ids, vocab]."""
    count, size = len(ids), attention.page_size
    positions = torch.arange(count)
    batch = Batch(
        tokens=torch.tensor(ids),
        positions=positions,
        cache_at=positions,
        cu_query=torch.tensor([0, count], dtype=torch.int32),
        context=torch.tensor([count], dtype=torch.int32),
        page_table=torch.arange(-(-count // size), dtype=torch.int32)[None],
        draw_at=positions,
        query_lengths=[count],
        context_lengths=[count],
    )
    return model.forward(batch, attention)


def windows(directory: Path, count: int, length: int) -> list[list[int]]:
    """So many pieces of the text, of so many tokens each."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    ids = read_tokenizer(read_card(directory)).encode(text, add_special_tokens=False).ids
    return [ids[start : start + length] for start in range(0, min(len(ids), count * length) - length + 1, length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", help="default: the demo model")
    parser.add_argument("--windows", type=count, default=16)
    parser.add_argument("--length", type=count, default=512)
    arguments = parser.parse_args()
    directory = model_directory(arguments.model_id)
    formats = load(directory, arguments.length)
    scores = [Score() for _ in formats]
    pieces = windows(directory, arguments.windows, arguments.length)
    for ids in pieces:
        exact = None
        for (_, _, model, attention), score in zip(formats, scores, strict=True):
            found = logits(model, attention, ids[:-1])
            exact = found if exact is None else exact
            score.add(found, exact, torch.tensor(ids[1:]))
    print(f"{directory.name}, {scores[0].tokens} tokens in {len(pieces)} windows\n")
    print("| weights | bits | perplexity | logit error | same token |\n| --- | --- | --- | --- | --- |")
    for (name, bits, _, _), score in zip(formats, scores, strict=True):
        print(f"| {name} | {bits:.2f} | {score} |")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
