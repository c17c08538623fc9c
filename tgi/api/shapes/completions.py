"""POST /v1/completions: what it takes."""

from typing import Annotated

from msgspec import Meta, Struct

from tgi.api.shapes.chat import StreamOptions
from tgi.api.shapes.native import GrammarType
from tgi.api.shapes.types import Float32, Int32, ShapeError, UInt32, UInt64, check_seed, stop_strings

Prompt = Annotated[str | list[str], Meta(extra={"untagged": "PromptDeserializer"})]


class CompletionRequest(Struct, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompt
    model: str | None = None
    max_tokens: UInt32 | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    stream: bool | None = None
    seed: UInt64 | None = None
    suffix: str | None = None
    repetition_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    stop: list[str] | str | None = None
    # OpenAI's; TGI ignores them
    n: UInt32 | None = None
    best_of: UInt32 | None = None
    logprobs: UInt32 | None = None
    echo: bool | None = None
    presence_penalty: Float32 | None = None
    logit_bias: list[Float32] | dict[str, Float32] | None = None
    stream_options: StreamOptions | None = None
    # Not TGI's, but what clients of other servers send
    top_k: Int32 | None = None
    typical_p: Float32 | None = None
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
