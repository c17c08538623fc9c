"""The workloads on which servers are compared, and their prompts."""

import json
import random
import re
from pathlib import Path
from typing import NamedTuple


class Workload(NamedTuple):
    """Streams at once, each with so many tokens in and out; `shared` tokens more stand before all of them."""

    streams: int
    tokens_in: int
    tokens_out: int
    shared: int = 0

    def __str__(self) -> str:
        shared = f"{self.shared} shared + " if self.shared else ""
        return f"{self.streams} x {shared}{self.tokens_in} in, {self.tokens_out} out"


Workloads = dict[str, Workload]
# What a model's own steps cost.
STEPS: Workloads = {
    "W1": Workload(1, 128, 128),
    "W2": Workload(8, 128, 128),
    "W3": Workload(32, 128, 64),
    "W4": Workload(8, 32, 32, shared=1024),
    "W5": Workload(2, 2048, 16),
}
# The same for models that are meant for a GPU, which has room for more at once.
WIDE: Workloads = STEPS | {"W6": Workload(64, 128, 128)}
# What everything around them costs.
STACK: Workloads = {"stack": Workload(64, 32, 128)}
# Before the first measurement of a turn: every path is used once.
FIRST = Workload(2, 48, 8)


class Words:
    """Words that are one token each behind any other, so that a text has as many tokens as words, for every server."""

    def __init__(self, tokenizer: Path) -> None:
        """`tokenizer` is the tokenizer.json of a byte-level BPE."""
        from tokenizers import Tokenizer

        vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
        encode = Tokenizer.from_file(str(tokenizer)).encode
        written = sorted(f" {token[1:]}" for token in vocabulary if re.fullmatch("Ġ[a-z]{2,}", token))
        self.words = [word for word in written if len(encode(word, add_special_tokens=False)) == 1]
        if len(self.words) < 100:
            raise ValueError(f"{tokenizer} has {len(self.words)} words of one token; prompts need at least 100.")

    def text(self, tokens: int, draw: random.Random) -> str:
        """A text of exactly so many tokens."""
        return "".join(draw.choices(self.words, k=tokens))

    def prompts(self, workload: Workload, seed: str) -> tuple[list[str], str | None]:
        """The prompts of one repetition; and of the request that comes before them, if they share a beginning.

        Nobody has seen them before: another `seed`, other prompts.
        """
        draw = random.Random(seed)
        shared = self.text(workload.shared, draw)
        before = shared + self.text(workload.tokens_in, draw) if shared else None
        return [shared + self.text(workload.tokens_in, draw) for _ in range(workload.streams)], before
