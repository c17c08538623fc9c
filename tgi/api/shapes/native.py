"""Requests of TGI's own routes: /generate, /generate_stream, / and /tokenize."""

from typing import Annotated, Any, Literal

from msgspec import Struct

from tgi.api.shapes.parameters import NativeSamplingFields
from tgi.api.shapes.types import ShapeError, Size, UInt32, UInt64, check_seed, doc, stop_strings

GrammarKind = Literal["json", "json_object", "regex", "json_schema", "text", "choice", "grammar"]


class GrammarType(Struct):
    """What the generated text must match: a JSON schema, any JSON object, a regular expression, one of several strings,
    or a grammar in Lark or GBNF. Where TGI has `value`, OpenAI's clients send `json_schema`, and those of
    llama.cpp `schema` with `json_object`."""

    type: GrammarKind
    value: Any = None
    json_schema: Any = None
    schema: Any = None

    def __post_init__(self) -> None:
        """Raises ShapeError if a type lacks its value or has one of another type."""
        if self.schema is not None and (self.type != "json_object" or self.value is not None):
            raise ShapeError("only `json_object` without `value` takes `schema`", "schema")
        if self.type in ("json", "regex", "choice", "grammar") and self.value is None:
            raise ShapeError("missing field `value`")
        if self.type in ("regex", "grammar") and not isinstance(self.value, str):
            raise ShapeError("invalid type, expected a string", "value")
        if self.type == "choice" and not (
            isinstance(self.value, list) and self.value and all(isinstance(one, str) for one in self.value)
        ):
            raise ShapeError("invalid type, expected a sequence of strings, and not empty", "value")
        if self.type == "json_schema":
            name = "value" if self.json_schema is None else "json_schema"
            config = getattr(self, name)
            if config is None:
                raise ShapeError("missing field `value`")
            if not isinstance(config, dict):
                raise ShapeError("invalid type, expected struct JsonSchemaConfig", name)
            if "schema" not in config:
                raise ShapeError("missing field `schema`", name)
            if not isinstance(config.get("name"), str | None):
                raise ShapeError("invalid type, expected a string", name)


class JsonSchemaConfig(Struct):
    """A JSON schema with a name."""

    schema: Annotated[Any, doc("The actual JSON schema definition")]
    name: Annotated[str | None, doc("Optional name identifier for the schema")] = None


class GenerateParameters(NativeSamplingFields, kw_only=True):
    """How to generate. A field that is null counts as absent."""

    best_of: Annotated[
        Size | None, doc("Generate best_of sequences and return the one if the highest token logprobs.", example=1)
    ] = None
    max_new_tokens: Annotated[
        UInt32 | None,
        doc("Maximum number of tokens to generate; without it, until the context is full.", example=20, minimum=1),
    ] = None
    return_full_text: Annotated[
        bool | None, doc("Whether to prepend the prompt to the generated text", example=False)
    ] = None
    stop: Annotated[
        list[str] | str | None,
        doc("Stop generating tokens if a member of `stop` is generated.", example=["photographer"]),
    ] = None
    truncate: Annotated[
        Size | None, doc("Truncate inputs tokens to the given size: the last ones stay.", minimum=1)
    ] = None
    details: Annotated[bool | None, doc("Whether to return generation details.")] = None
    decoder_input_details: Annotated[bool | None, doc("Whether to return decoder input token logprobs and ids.")] = None
    seed: Annotated[UInt64 | None, doc("Random sampling seed.", example=42)] = None
    grammar: Annotated[GrammarType | None, doc("What the generated text must match.")] = None
    adapter_id: Annotated[str | None, doc("Lora adapter id")] = None
    # Fields that TGI lacks, of transformers and other servers
    ignore_eos: Annotated[
        bool | None, doc("Go on where the model would end the text, until `max_new_tokens`.", example=False)
    ] = None
    ignore_eos_token: Annotated[bool | None, doc("TGI's inner name of `ignore_eos`.")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        check_seed(self.seed)

    @classmethod
    def with_sampling(cls, **fields: Any) -> "GenerateParameters":
        """Parameters with these fields and `do_sample`."""
        return cls(**fields | {"do_sample": True})

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return stop_strings(self.stop)

    @property
    def ignores_eos(self) -> bool:
        """Whether `ignore_eos` is set, under either of its names."""
        return bool(self.ignore_eos or self.ignore_eos_token)


class GenerateRequest(Struct):
    """Body of POST /generate and /generate_stream."""

    inputs: Annotated[str, doc(example="My name is Olivier and I")]
    parameters: GenerateParameters | None = None

    @property
    def effective(self) -> GenerateParameters:
        """The parameters in effect: a request without `parameters` samples."""
        return GenerateParameters.with_sampling() if self.parameters is None else self.parameters


class DetokenizeRequest(Struct):
    """Body of POST /detokenize."""

    tokens: Annotated[list[UInt32], doc(example=[1, 306, 626])]
    model: Annotated[str | None, doc("Without effect: all adapters have the tokenizer of the model")] = None


class CompatGenerateRequest(GenerateRequest):
    """Body of POST /, where `stream` chooses the form of the answer."""

    stream: Annotated[bool | None, doc("Whether to answer token by token")] = None


class TokenizeRequest(GenerateRequest):
    """Body of POST /tokenize; the parameters are looked at for their shape only."""

    add_special_tokens: Annotated[
        bool | None, doc("Whether to encode as a prompt, with the tokens that begin and end one; true if absent")
    ] = None
