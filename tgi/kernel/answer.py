"""What an api is told of an answer while it comes: the prompt's size and tokens, then the tokens of each step, their
texts, and the parts of an answer that holds more than text.

It ends with an End; messages.py says which way each message goes.
"""

from enum import StrEnum
from typing import NamedTuple


class Prompted(NamedTuple):
    """A chat has become a prompt and was admitted, or a prompt of ids; comes before its first token, and again after a
    loss."""

    rid: int
    prompt_tokens: int
    characters: int  # of the prompt's text
    divided: bool = False  # the answer comes in parts: they are what a client is shown, not `Texts.texts`
    text: str = ""  # the decoded prompt, if it came as ids


class PromptTokens(NamedTuple):
    """Some tokens of a request's prompt, in order, from `Generate.prompt_from` to its end; all before the first Texts.

    Logprobs are those of the model, whatever the request's sampling. Beside each token stand
    min(prompt_top_n, vocabulary) likeliest ones, likeliest first, the lowest id first among equals. The first token of
    the prompt has none, and NaN for a logprob.
    """

    rid: int
    ids: bytes  # int32
    logprobs: bytes  # float32, same length
    starts: bytes  # int32, same length: the characters of the prompt's text that stand before each token
    texts: list[str]  # same length: each token decoded by itself
    top_ids: bytes = b""  # int32
    top_logprobs: bytes = b""  # float32, same length
    top_texts: list[str] = []  # same length


class Kind(StrEnum):
    """What a part of a chat's answer is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"  # a tool is called; the text is its whole name
    ARGUMENTS = "arguments"  # more of the latest call's arguments, as JSON text


class Part(NamedTuple):
    """A piece of an answer that is divided (Prompted.divided). Nothing of it is held back or special."""

    token: int  # which token of its Texts lets it be shown; of no meaning in an End
    kind: str  # a Kind
    text: str


class Texts(NamedTuple):
    """The tokens of one step for one front end, in columns: request k got counts[k] tokens, in order.

    `held` is empty if nothing is held back. `top_counts` is empty if no request asks for top_n; else token j has
    top_counts[j] entries in the other top columns, likeliest first.
    """

    rids: bytes  # uint32
    counts: bytes  # uint32
    ids: bytes  # int32, sum(counts)
    logprobs: bytes  # float32, sum(counts)
    special: bytes  # uint8, sum(counts): 1 where the token's text is not part of the answer's (most special tokens)
    texts: list[str]  # sum(counts); "" while a character is incomplete
    held: bytes = b""  # uint32, sum(counts): characters at the end of the text so far that may belong to a stop string
    top_counts: bytes = b""  # uint32, sum(counts)
    top_ids: bytes = b""  # int32, sum(top_counts)
    top_logprobs: bytes = b""  # float32, sum(top_counts)
    top_special: bytes = b""  # uint8, sum(top_counts)
    top_texts: list[str] = []  # sum(top_counts): each token decoded by itself
    parts: list[Part] = []  # of the requests whose answers are divided, in order
