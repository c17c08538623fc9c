"""Tokens in parallel columns (one entry per token in each), as they travel and as routes read them, and their JSON in
TGI's format. The JSON is written by hand: per token that is several times faster than an encoder."""

import asyncio
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from json.encoder import encode_basestring as quote
from typing import NamedTuple

from tgi.api.float32 import float32_to_json
from tgi.microkernel.messages.codec import unpack_float32, unpack_int32, unpack_uint32
from tgi.microkernel.messages.protocol import AnswerPart, PromptTokens, Texts

# Tokens of JSON that are written before other tasks have a turn: a few milliseconds. A body may hold a million tokens.
MAX_ITEMS_PER_TURN = 4096

_BOOL = ("false", "true")


class TopToken(NamedTuple):
    """One of the likeliest tokens at a position."""

    id: int
    text: str
    logprob: float
    special: int


class TokenColumns(NamedTuple):
    """Generated tokens of one request. `held`, `tops` and `parts` are empty if the request does not need them."""

    ids: "array[int]"
    logprobs: "array[float]"
    special: bytearray
    texts: list[str]
    held: "array[int]" = array("I")  # characters at the end of the visible text that may begin a stop string
    tops: list[list[TopToken]] = []
    parts: list[list[AnswerPart]] = []  # what each token adds to an answer that consists of parts

    def select(self, selection: slice) -> "TokenColumns":
        return TokenColumns._make(column[selection] for column in self)


# Shared, so never extended: the first tokens replace it.
NO_TOKENS = TokenColumns(array("i"), array("f"), bytearray(), [])


class TextsColumns(NamedTuple):
    """The token columns of a Texts message, unpacked once. Each request cuts its tokens out of them."""

    ids: "array[int]"
    logprobs: "array[float]"
    special: bytearray
    texts: list[str]
    held: "array[int]"
    tops: list[list[TopToken]]
    parts: list[list[AnswerPart]]
    partial: dict[int, bytes]  # the bytes of the ids among them that are parts of characters

    @classmethod
    def from_message(cls, message: Texts) -> "TextsColumns":
        """With the top tokens and parts grouped by token."""
        tops = _tops_by_token(message) if message.top_counts else []
        parts = _parts_by_token(message) if message.parts else []
        return cls(
            array("i", message.token_ids), array("f", message.logprobs), bytearray(message.special), message.texts,
            array("I", message.held_chars), tops, parts, dict(message.partial),
        )  # fmt: skip


def _parts_by_token(message: Texts) -> list[list[AnswerPart]]:
    parts: list[list[AnswerPart]] = [[] for _ in message.texts]
    for part in message.parts:
        parts[part.token_index].append(part)
    return parts


def _tops_by_token(message: Texts) -> list[list[TopToken]]:
    columns = (
        unpack_int32(message.top_ids),
        message.top_texts,
        unpack_float32(message.top_logprobs),
        message.top_special,
    )
    tops = map(TopToken, *columns)
    return [list(islice(tops, count)) for count in unpack_uint32(message.top_counts)]


class PromptColumns(NamedTuple):
    """The tokens of a prompt; empty if the request does not ask for them."""

    ids: "array[int]"
    logprobs: "array[float]"  # NaN for the first
    starts: "array[int]"  # offset of each token in the prompt, in characters
    texts: list[str]
    tops: list[dict[str, float]]  # logprob of the top tokens at each position by name, likeliest last; {} for the first
    partial: dict[int, bytes]  # the bytes of the ids that are parts of characters

    @classmethod
    def empty(cls) -> "PromptColumns":
        return cls(array("i"), array("f"), array("i"), [], [], {})

    def extend(self, more: PromptTokens) -> None:
        """Appends the tokens of a message."""
        self.ids.frombytes(more.token_ids)
        self.logprobs.frombytes(more.logprobs)
        self.starts.frombytes(more.char_starts)
        self.texts.extend(more.texts)
        self.partial.update(more.partial)
        top_n = len(more.top_texts) // max(1, len(more.texts))
        logprobs = array("f", more.top_logprobs)
        names = [
            token_name(text, self.partial.get(token))
            for text, token in zip(more.top_texts, unpack_int32(more.top_ids), strict=True)
        ]
        for begin in range(0, top_n * len(more.texts), top_n or 1):
            # Reversed, so that of several tokens with the same name the likeliest is kept.
            pairs = zip(names[begin : begin + top_n], logprobs[begin : begin + top_n], strict=True)
            self.tops.append(dict(reversed([*pairs])))
        if not top_n:
            self.tops.extend({} for _ in more.texts)


def token_name(text: str, partial: bytes | None) -> str:
    """What OpenAI's older logprobs format calls a token: its text, or its bytes if they are a part of a character."""
    return text if partial is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in partial)


def tokens_json(columns: TokenColumns) -> list[str]:
    """Each token as a JSON object in TGI's format."""
    return [
        f'{{"id":{token},"text":{quote(text)},"logprob":{float32_to_json(logprob)},"special":{_BOOL[special]}}}'
        for token, text, logprob, special in zip(
            columns.ids, columns.texts, columns.logprobs, columns.special, strict=True
        )
    ]


def top_tokens_json(tops: Iterable[TopToken]) -> str:
    """The top tokens at one position as a JSON array in TGI's format."""
    items = (
        f'{{"id":{top.id},"text":{quote(top.text)},"logprob":{float32_to_json(top.logprob)},"special":{_BOOL[top.special]}}}'
        for top in tops
    )
    return f"[{','.join(items)}]"


async def prefill_json(prompt: PromptColumns) -> str:
    """The tokens of a prompt as a JSON array in TGI's format."""
    items = (
        f'{{"id":{token},"text":{quote(text)},"logprob":{float32_to_json(logprob)}}}'
        for token, text, logprob in zip(prompt.ids, prompt.texts, prompt.logprobs, strict=True)
    )
    return f"[{await join_in_turns(items)}]"


async def join_in_turns(items: Iterator[str]) -> str:
    """Joins JSON items with commas. Other tasks have a turn after every MAX_ITEMS_PER_TURN items."""
    joined = []
    while chunk := ",".join(islice(items, MAX_ITEMS_PER_TURN)):
        joined.append(chunk)
        await asyncio.sleep(0)
    return ",".join(joined)
