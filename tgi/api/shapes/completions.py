"""POST /v1/completions: what it takes."""

from typing import Annotated

from msgspec import Meta

from tgi.api.shapes.openai import OpenAiRequest
from tgi.api.shapes.types import ShapeError, UInt32, doc

Prompt = Annotated[
    str | Annotated[list[str], doc(minItems=1)], Meta(title="Prompt", extra={"untagged": "PromptDeserializer"})
]


class CompletionRequest(OpenAiRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt
    suffix: Annotated[
        str | None, doc("The text to append to the prompt. It is not supported: any but null is refused with a 422.")
    ] = None
    # OpenAI's; TGI ignores them
    best_of: Annotated[
        UInt32 | None, doc("Generate so many completions of each prompt and return the likeliest `n`.", example=2)
    ] = None
    logprobs: Annotated[
        UInt32 | None, doc("Return the log probabilities of the tokens, and so many of the likeliest at each place.")
    ] = None
    echo: Annotated[bool | None, doc("Whether the prompt comes back before the completion")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        super().__post_init__()
        if self.prompt == []:
            raise ShapeError("Empty array detected. Do not use an empty array for the prompt.", "prompt")

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"top_n_tokens": "logprobs", "inputs": "prompt"}

    @property
    def prompts(self) -> list[str]:
        """The prompts as a list."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt
