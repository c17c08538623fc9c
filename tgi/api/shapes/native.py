"""TGI's own routes: what /generate, /generate_stream, / and /tokenize take."""

from typing import Any, Literal

from msgspec import Struct

from tgi.api import float32
from tgi.api.shapes.types import Float32, Int32, Size, UInt32, UInt64, check_seed, stop_strings


class Grammar(Struct):
    """What the generated text must match."""

    type: Literal["json", "json_object", "regex", "json_schema", "text"]
    value: Any = None
    json_schema: Any = None


class GenerateParameters(Struct, kw_only=True):
    """The `parameters` object of the native routes. None means "not given"."""

    best_of: Size | None = None
    temperature: Float32 | None = None
    repetition_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    top_k: Int32 | None = None
    top_p: Float32 | None = None
    typical_p: Float32 | None = None
    do_sample: bool | None = None
    max_new_tokens: UInt32 | None = None
    return_full_text: bool | None = None
    stop: list[str] | str | None = None
    truncate: Size | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: UInt64 | None = None
    top_n_tokens: UInt32 | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None

    def __post_init__(self) -> None:
        """Floats are rounded to float32 as on TGI's side, so that bounds and draws see the same number."""
        check_seed(self.seed)
        for name in ("temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, float32.rounded(value))

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return stop_strings(self.stop)


class GenerateRequest(Struct):
    """Body of POST /generate and /generate_stream."""

    inputs: str
    parameters: GenerateParameters | None = None

    @property
    def effective(self) -> GenerateParameters:
        """The parameters that hold: a request without any samples."""
        return GenerateParameters(do_sample=True) if self.parameters is None else self.parameters


class CompatGenerateRequest(GenerateRequest):
    """Body of POST /, where `stream` chooses the form of the answer."""

    stream: bool = False


class TokenizeRequest(GenerateRequest):
    """Body of POST /tokenize; the parameters are looked at for their shape only."""

    add_special_tokens: bool | None = None
