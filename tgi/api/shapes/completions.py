"""The request of POST /v1/completions."""

from typing import Annotated, Any

from msgspec import Meta

from tgi.api.shapes.openai import OpenAiRequest
from tgi.api.shapes.types import Int32, ShapeError, UInt32, UInt32OrAbsent, doc

# msgspec allows only one list type in a union; __post_init__ checks that the items of a list have one type.
Prompt = Annotated[
    str | Annotated[list[str | Int32 | list[Int32]], doc(minItems=1)],
    Meta(title="Prompt", extra={"untagged": "PromptDeserializer"}),
]


class CompletionRequest(OpenAiRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[
        UInt32OrAbsent | None,
        doc(
            "The maximum number of tokens that can be generated; without it, or with -1, until the context is full. "
            "With `echo` it may be 0: the prompt alone comes back.",
            example=32,
        ),
    ] = None
    suffix: Annotated[
        str | None, doc("The text to append to the prompt. It is not supported: any but null is refused with a 422.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("Whether the tokenizer adds special tokens to a text; true if absent")
    ] = None
    # OpenAI's fields that TGI ignores
    best_of: Annotated[
        UInt32 | None,
        doc("Generate this number of completions of each prompt and return the likeliest `n`.", example=2),
    ] = None
    logprobs: Annotated[
        UInt32 | None,
        doc("Return the log probabilities of the tokens, and this number of the likeliest at each position."),
    ] = None
    echo: Annotated[bool | None, doc("Whether the prompt comes back before the completion")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        super().__post_init__()
        if self.prompt == []:
            raise ShapeError("Empty array detected. Do not use an empty array for the prompt.", "prompt")
        if isinstance(self.prompt, list) and len({*map(type, self.prompt)}) > 1:
            raise ShapeError("data did not match any variant of untagged enum PromptDeserializer", "prompt")

    @property
    def names(self) -> dict[str, str]:
        """The request's own names of parameters, for `param` of errors."""
        return super().names | {"top_n_tokens": "logprobs", "inputs": "prompt"}

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list: each a text, or token ids."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
