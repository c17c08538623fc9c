"""Responses of TGI's own routes: /generate, /generate_stream, /, /tokenize and /chat_tokenize."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from tgi.api.shapes.types import Float32, ResponseBody, Size, UInt32, UInt64, doc

FinishReason = Annotated[
    Literal["length", "eos_token", "stop_sequence"], Meta(title="FinishReason", examples=["length"])
]
TokenId = Annotated[UInt32, doc(example=0)]
TokenText = Annotated[str, doc(example="test")]
Logprob = Annotated[Float32 | None, doc(example=-0.34)]
Count = Annotated[UInt32, doc(example=1)]
DrawnSeed = Annotated[
    UInt64 | None, doc("The seed of the samples, given or not; null where nothing was sampled", example=42)
]


class PrefillToken(ResponseBody):
    """A token of the prompt. The first has no logprob."""

    id: TokenId
    text: TokenText
    logprob: Logprob


class Token(ResponseBody):
    """A generated token, or one that might have been."""

    id: TokenId
    text: TokenText
    logprob: Logprob
    special: Annotated[bool, doc(example=False)]


class BestOfSequence(ResponseBody, kw_only=True):
    """One of the other sequences of a request with `best_of`."""

    generated_text: Annotated[str, doc(example="test")]
    finish_reason: FinishReason
    generated_tokens: Count
    seed: DrawnSeed = None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(ResponseBody, kw_only=True):
    """How a text was generated."""

    finish_reason: FinishReason
    generated_tokens: Count
    seed: DrawnSeed = None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(ResponseBody):
    """A generated text."""

    generated_text: Annotated[str, doc(example="test")]
    details: Details | UnsetType = UNSET


class StreamDetails(ResponseBody, kw_only=True):
    """How a streamed text was generated."""

    finish_reason: FinishReason
    generated_tokens: Count
    seed: DrawnSeed = None
    input_length: Count


class StreamResponse(ResponseBody, kw_only=True):
    """The data of one event. The last one has the whole text, and the details if they were asked for."""

    index: Annotated[UInt32, doc("Counts the events from 1")]
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: Annotated[str | None, doc(example="test")] = None
    details: StreamDetails | None = None


class SimpleToken(ResponseBody):
    """A token of a text, with its place in the UTF-8 bytes of the text."""

    id: TokenId
    text: TokenText
    start: Annotated[Size, doc(example=0)]
    stop: Annotated[Size, doc(example=2)]
    special: Annotated[bool, doc(example=False)]


TokenizeResponse = Annotated[list[SimpleToken], Meta(title="TokenizeResponse")]


class ChatTokenizeResponse(ResponseBody):
    """A chat as the model would read it."""

    tokenize_response: TokenizeResponse
    templated_text: str


class DetokenizeResponse(ResponseBody):
    """The text of token ids."""

    prompt: Annotated[str, doc(example="<s>I am")]
