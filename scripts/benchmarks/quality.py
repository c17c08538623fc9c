"""Measures the loss of quantization: perplexity of a text in bfloat16 and in the formats made from it, and with keys
and values in 8 bits: floats as on a GPU, integers as on our CPU kernels.

    scripts/bench quality [--model-id FILE.gguf] [--windows 16] [--length 512]

The text is pydoc_data.topics, Python's language reference, cut into independent windows. Prints for each format the
bits per weight of the layers, the perplexity, the relative error of the logits against bfloat16 (norm of the
difference over the norm of the logits without their mean), and the share of equal most likely tokens. A quantized
model is also measured in its own bits, and "bfloat16" is then its dequantized form. 8-bit floats are dequantized,
since no CPU computes with them, as on a GPU in steps of few rows; with more rows a GPU also uses 8-bit activations.
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

from tgi.hub.model_config import read_model_config
from tgi.hub.resolver import model_directory
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.options import count
from tgi.worker.attention import build_attention
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.attention.interface import AttentionBackend, ForwardBatch
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.distributed.sharding import whole_model
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import read_model_spec
from tgi.worker.models.weight_loader import DecoderWeightLoader
from tgi.worker.quantization.weight import QuantizedWeight, Weight, as_plain
from tgi.worker.quantization.weight_sources import QuantizingWeightSource, WeightSource

CPU = torch.device("cpu")
CACHES = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Plain:
    """A weight source that dequantizes all weights of the file."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The stored tensor."""
        return self._source.tensor(name, *shape)

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """The dequantized weight."""
        return as_plain(self._source.weight(name, outputs, inputs), torch.bfloat16)


class Counted:
    """A weight source that counts the bits of the layers' weights."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._bytes = self._numbers = 0

    @property
    def bits(self) -> float:
        """Mean bits per weight."""
        return 8 * self._bytes / self._numbers

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor that is not a matrix; not counted."""
        return self._source.tensor(name, *shape)

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """A weight; counted unless it is the embedding or the head."""
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
    attention: AttentionBackend


class Score:
    """Sums of a format over all tokens."""

    def __init__(self) -> None:
        self.tokens = self.agreed = 0
        self.surprise = self.error = self.size = 0.0

    def add(self, logits: Tensor, exact: Tensor, next_ids: Tensor) -> None:
        """Adds tokens: logits [n, vocab] and targets [n]."""
        self.tokens += len(next_ids)
        self.surprise += float(F.cross_entropy(logits, next_ids, reduction="sum"))
        self.error += float((logits - exact).square().sum())
        self.size += float((exact - exact.mean(1, keepdim=True)).square().sum())
        self.agreed += int((logits.argmax(1) == exact.argmax(1)).sum())

    def __str__(self) -> str:
        perplexity = torch.tensor(self.surprise / self.tokens).exp()
        return f"{perplexity:.3f} | {(self.error / self.size) ** 0.5:.2%} | {self.agreed / self.tokens:.2%}"


def load(directory: Path, positions: int) -> list[Format]:
    """The model in its own bits if it is quantized, and in all formats that can be made, bfloat16 first."""
    recipe = read_model_spec(directory, "bfloat16")
    config = recipe.decoder
    if config is None:
        raise UserError(f"The model in {directory} runs through transformers: its weights cannot be quantized.")
    kernels, _ = select_cpu_kernels([recipe], "cpu")
    formats: dict[str, Callable[[WeightSource], WeightSource]] = {
        "bf16": Plain,
        "int8": lambda source: QuantizingWeightSource(Plain(source), "int8"),
        "int4": lambda source: QuantizingWeightSource(Plain(source), "int4"),
        "fp8": lambda source: QuantizingWeightSource(Plain(source), "fp8"),
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
            weights = DecoderWeightLoader(read, config, whole_model(config), torch.bfloat16, CPU, kernels).load(
                lambda percent: None
            )
            model = DecoderModel(config, weights, torch.bfloat16, CPU, kernels)
            pages = -(-positions // 16)
            found.append(Format(name, source.bits, model, build_attention(model.kv, pages, CPU)))
    exact = found[0]
    for name, stored in CACHES.items():
        attention = CudaAttention(exact.model.kv._replace(stored_dtype=stored), pages, CPU)
        found.append(exact._replace(name=f"{exact.name}, cache {name}", attention=attention))
    if kernels is not None:
        cache = build_attention(exact.model.kv._replace(stored_dtype=torch.int8), pages, CPU)
        found.append(exact._replace(name=f"{exact.name}, cache int8", attention=cache))
    return found


def logits(model: Model, attention: AttentionBackend, ids: Sequence[int]) -> Tensor:
    """Logits after each of the ids, float32 [ids, vocab]."""
    count, size = len(ids), attention.page_size
    positions = torch.arange(count)
    batch = ForwardBatch(
        tokens=torch.tensor(ids),
        positions=positions,
        slot_mapping=positions[None],
        cu_query_lens=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        page_table=torch.arange(-(-count // size), dtype=torch.int32)[None, None],
        logits_indices=positions,
        query_lens_host=[count],
        context_lens_host=[count],
    )
    return model.forward(batch, attention)


def windows(directory: Path, count: int, length: int) -> list[list[int]]:
    """`windows` pieces of the text of `length` tokens each."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    ids = read_tokenizer(read_model_config(directory)).encode(text, add_special_tokens=False).ids
    return [ids[start : start + length] for start in range(0, min(len(ids), count * length) - length + 1, length)]


def main() -> None:
    """Parses the command line, measures and prints."""
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
