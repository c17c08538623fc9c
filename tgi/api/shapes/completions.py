"""POST /v1/completions: what it takes."""

from typing import Annotated

from msgspec import Meta, Struct

from tgi.api.shapes.native import GrammarType
from tgi.api.shapes.openai import (
    FrequencyPenalty,
    IgnoreEos,
    LogitBias,
    MaxTokens,
    MinTokens,
    Model,
    N,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Stop,
    Stream,
    StreamOptions,
    Temperature,
    TopK,
    TopP,
    TypicalP,
)
from tgi.api.shapes.types import ShapeError, UInt32, check_seed, doc, stop_strings

Prompt = Annotated[
    str | Annotated[list[str], doc(minItems=1)], Meta(title="Prompt", extra={"untagged": "PromptDeserializer"})
]


class CompletionRequest(Struct, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompt
    model: Model = None
    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    stream: Stream = None
    seed: Seed = None
    suffix: Annotated[
        str | None, doc("The text to append to the prompt. It is not supported: any but null is refused with a 422.")
    ] = None
    repetition_penalty: RepetitionPenalty = None
    frequency_penalty: FrequencyPenalty = None
    stop: Stop = None
    # OpenAI's; TGI ignores them
    n: N = None
    best_of: Annotated[
        UInt32 | None, doc("Generate so many completions of each prompt and return the likeliest `n`.", example=2)
    ] = None
    logprobs: Annotated[
        UInt32 | None, doc("Return the log probabilities of the tokens, and so many of the likeliest at each place.")
    ] = None
    echo: Annotated[bool | None, doc("Whether the prompt comes back before the completion")] = None
    presence_penalty: PresencePenalty = None
    logit_bias: LogitBias = None
    stream_options: StreamOptions | None = None
    # Not TGI's, but what clients of other servers send
    top_k: TopK = None
    typical_p: TypicalP = None
    min_tokens: MinTokens = None
    ignore_eos: IgnoreEos = None
    response_format: GrammarType | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        check_seed(self.seed)
        if self.prompt == []:
            raise ShapeError("Empty array detected. Do not use an empty array for the prompt.", "prompt")

    @property
    def prompts(self) -> list[str]:
        """The prompts as a list."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return stop_strings(self.stop)

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)
