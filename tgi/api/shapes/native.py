"""TGI's own routes: what /generate, /generate_stream, / and /tokenize take."""

from typing import Annotated, Any, Literal

from msgspec import Struct

from tgi.api import float32
from tgi.api.shapes.types import Float32, Int32, ShapeError, Size, UInt32, UInt64, check_seed, doc, stop_strings

GrammarKind = Literal["json", "json_object", "regex", "json_schema", "text", "choice", "grammar"]


class GrammarType(Struct):
    """What the generated text must match: a JSON schema, any JSON object, a regular expression, one of several strings,
    or a grammar in Lark or GBNF. Where TGI has `value`, OpenAI's clients send `json_schema`."""

    type: GrammarKind
    value: Any = None
    json_schema: Any = None

    def __post_init__(self) -> None:
        """Each type has what it needs. Raises ShapeError."""
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


class GenerateParameters(Struct, kw_only=True):
    """How to generate. A field that is null counts as absent."""

    best_of: Annotated[
        Size | None, doc("Generate best_of sequences and return the one if the highest token logprobs.", example=1)
    ] = None
    temperature: Annotated[
        Float32 | None,
        doc("The value used to module the logits distribution.", example=0.5, exclusiveMinimum=0),
    ] = None
    repetition_penalty: Annotated[
        Float32 | None,
        doc(
            "The parameter for repetition penalty. 1.0 means no penalty.\n"
            "See [this paper](https://arxiv.org/pdf/1909.05858.pdf) for more details.",
            example=1.03,
            exclusiveMinimum=0,
        ),
    ] = None
    frequency_penalty: Annotated[
        Float32 | None,
        doc(
            "The parameter for frequency penalty. 0.0 means no penalty\n"
            "Penalize new tokens based on their existing frequency in the text so far,\n"
            "decreasing the model's likelihood to repeat the same line verbatim.",
            example=0.1,
            minimum=-2,
            maximum=2,
        ),
    ] = None
    top_k: Annotated[
        Int32 | None,
        doc(
            "The number of highest probability vocabulary tokens to keep for top-k-filtering.",
            example=10,
            exclusiveMinimum=0,
        ),
    ] = None
    top_p: Annotated[
        Float32 | None,
        doc("Top-p value for nucleus sampling. 1.0 means off.", example=0.95, exclusiveMinimum=0, maximum=1),
    ] = None
    typical_p: Annotated[
        Float32 | None,
        doc(
            "Typical Decoding mass. 1.0 means off.\nSee [Typical Decoding for Natural Language Generation]"
            "(https://arxiv.org/abs/2202.00666) for more information.",
            example=0.95,
            exclusiveMinimum=0,
            maximum=1,
        ),
    ] = None
    do_sample: Annotated[
        bool | None,
        doc("Activate logits sampling. True where a request has no `parameters` at all.", example=True),
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
    watermark: Annotated[
        bool | None,
        doc(
            "Watermarking with [A Watermark for Large Language Models](https://arxiv.org/abs/2301.10226).", example=True
        ),
    ] = None
    details: Annotated[bool | None, doc("Whether to return generation details.")] = None
    decoder_input_details: Annotated[bool | None, doc("Whether to return decoder input token logprobs and ids.")] = None
    seed: Annotated[UInt64 | None, doc("Random sampling seed.", example=42)] = None
    top_n_tokens: Annotated[
        UInt32 | None,
        doc("The number of highest probability vocabulary tokens to keep for top-n-filtering.", example=5),
    ] = None
    grammar: Annotated[GrammarType | None, doc("What the generated text must match.")] = None
    adapter_id: Annotated[str | None, doc("Lora adapter id")] = None
    # Not TGI's: transformers and other servers have them
    min_p: Annotated[
        Float32 | None,
        doc(
            "Tokens whose probability is below this share of the largest one are not drawn. 0 means off.",
            example=0.05,
            minimum=0,
            maximum=1,
        ),
    ] = None
    min_new_tokens: Annotated[
        UInt32 | None,
        doc("Minimum number of tokens to generate: before that no token ends the text, and no stop string.", example=5),
    ] = None
    ignore_eos: Annotated[
        bool | None, doc("Go on where the model would end the text, until `max_new_tokens`.", example=False)
    ] = None
    ignore_eos_token: Annotated[bool | None, doc("TGI's inner name of `ignore_eos`.")] = None

    def __post_init__(self) -> None:
        """Floats are rounded to float32 as on TGI's side, so that bounds and draws see the same number."""
        check_seed(self.seed)
        for name in ("temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p", "min_p"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, float32.rounded(value))

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return stop_strings(self.stop)

    @property
    def ignores_eos(self) -> bool:
        """Under either name."""
        return bool(self.ignore_eos or self.ignore_eos_token)


class GenerateRequest(Struct):
    """Body of POST /generate and /generate_stream."""

    inputs: Annotated[str, doc(example="My name is Olivier and I")]
    parameters: GenerateParameters | None = None

    @property
    def effective(self) -> GenerateParameters:
        """The parameters that hold: a request without any samples."""
        return GenerateParameters(do_sample=True) if self.parameters is None else self.parameters


class CompatGenerateRequest(GenerateRequest):
    """Body of POST /, where `stream` chooses the form of the answer."""

    stream: Annotated[bool | None, doc("Whether to answer token by token")] = None


class TokenizeRequest(GenerateRequest):
    """Body of POST /tokenize; the parameters are looked at for their shape only."""

    add_special_tokens: Annotated[
        bool | None, doc("Whether to encode as a prompt, with the tokens that begin and end one; true if absent")
    ] = None
