"""What a benchmark asks: conversations of drawn or given lengths.

Texts are drawn from common words. How many words make a token of the server's tokenizer is measured first
(`run.calibrate`), so that prompts have about the wanted length on any server.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError

SOME_TEXT = """river mountain city answer question evening water people walk light number theory music history science
garden table window letter ocean bridge forest engine market doctor teacher winter summer morning story picture road
paper house horse field stone metal glass color sound voice night train plane ship island coast valley north south"""
WORDS = SOME_TEXT.split()
MAX_TOKENS = 1 << 20  # of one text
MAX_FILE_BYTES = 2 << 30


class Turn(NamedTuple):
    """What the user says, and the tokens that the answer has at most."""

    text: str
    output_tokens: int


class Conversation(NamedTuple):
    """A system prompt ("": none) and the user's turns, each of which is asked when the one before is answered."""

    system: str
    turns: tuple[Turn, ...]


class Shape(NamedTuple):
    """Lengths in tokens. `spread`: lengths are uniform between 1 - spread and 1 + spread of these, or exponential with
    this mean, from an eighth to three times of it, if `exponential`."""

    input_tokens: int = 512
    output_tokens: int = 128
    shared_tokens: int = 0  # a system prompt that all conversations have
    turns: int = 1
    spread: float = 0.0
    exponential: bool = False


# By the name on the command line.
SHAPES = {
    "random": Shape(),
    "sharegpt": Shape(224, 194, exponential=True),  # the mean lengths of its first turns
    "shared-prefix": Shape(128, 128, shared_tokens=1024),
    "multi-turn": Shape(128, 128, turns=6, spread=0.5),
    "agent": Shape(256, 64, shared_tokens=3072, turns=8, spread=0.5),  # tools in the system prompt, then their results
}


def conversations(shape: Shape, words_per_token: float, seed: int) -> Iterator[Conversation]:
    """Without end. Conversations of two seeds have no common texts, so that no cache helps from one to the other."""
    draw = random.Random(seed)
    shared = f"{seed} {_text(draw, shape.shared_tokens, words_per_token)}" if shape.shared_tokens else ""
    while True:
        turns = [
            Turn(
                f"{draw.getrandbits(32):08x} {_text(draw, _length(draw, shape.input_tokens, shape), words_per_token)}",
                _length(draw, shape.output_tokens, shape),
            )
            for _ in range(shape.turns)
        ]
        yield Conversation(shared, tuple(turns))


def _length(draw: random.Random, mean: int, shape: Shape) -> int:
    if shape.exponential:
        return max(1, round(min(max(draw.expovariate(1 / mean), mean / 8), 3 * mean)))
    return max(1, round(mean * draw.uniform(1 - shape.spread, 1 + shape.spread)))


def _text(draw: random.Random, tokens: int, words_per_token: float) -> str:
    return " ".join(draw.choices(WORDS, k=max(1, round(tokens * words_per_token))))


def read_file(path: Path, output_tokens: int, tokens_per_character: float) -> list[Conversation]:
    """The conversations of a file: ShareGPT's JSON (`conversations` of `from` and `value`, of which the first question
    is asked and the answer gives the length), or JSON lines with `prompt` or `messages`, and `max_tokens`.

    Raises UserError.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{path} has more than {MAX_FILE_BYTES >> 30} GB. Give a part of it.")
        text = path.read_text()
        rows = (
            json.loads(text) if text.lstrip()[:1] == "[" else [json.loads(line) for line in text.splitlines() if line]
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON or JSON lines: {error}") from error
    found = [one for row in rows if (one := _conversation(row, output_tokens, tokens_per_character)) is not None]
    if not found:
        raise UserError(f"{path} has no row with `conversations`, `messages` or `prompt`.")
    return found


def _conversation(row: Any, output_tokens: int, tokens_per_character: float) -> Conversation | None:
    if not isinstance(row, dict):
        return None
    wanted = row.get("max_tokens", row.get("output_tokens", output_tokens))
    if not isinstance(wanted, int) or not 0 < wanted <= MAX_TOKENS:
        return None
    said = row.get("conversations")
    if isinstance(said, list):
        texts = [one.get("value", "") for one in said if isinstance(one, dict)]
        if len(texts) < 2 or not texts[0]:
            return None
        return Conversation("", (Turn(texts[0], max(1, round(len(texts[1]) * tokens_per_character))),))
    if isinstance(messages := row.get("messages"), list):
        return _of_messages(messages, wanted)
    prompt = row.get("prompt")
    return Conversation("", (Turn(prompt, wanted),)) if isinstance(prompt, str) and prompt else None


def _of_messages(messages: Sequence[Any], wanted: int) -> Conversation | None:
    texts = [
        (one.get("role"), one["content"])
        for one in messages
        if isinstance(one, dict) and isinstance(one.get("content"), str)
    ]
    system = next((text for role, text in texts if role == "system"), "")
    turns = tuple(Turn(text, wanted) for role, text in texts if role == "user")
    return Conversation(system, turns) if turns else None
