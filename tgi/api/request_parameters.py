"""What a request asks for, in one form for all routes: sampling parameters and the other generation parameters.

The conversion goes from request bodies (api/shapes) to `SamplingParams`, to TGI's `GenerateParameters` and to the
grammar that the tokenizer reads.
"""

import re
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tgi.api import float32
from tgi.api.shapes.native import GenerateParameters, GrammarType
from tgi.api.shapes.openai import OpenAiRequest
from tgi.api.shapes.parameters import NATIVE, OPENAI
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column
from tgi.microkernel.messages.sampling_params import PARAMETERS, SAMPLED_BY, SamplingDefaults, SamplingParams

# Limits the size of messages: the biases travel with each generation of a request.
MAX_BIASES = 1024

# As many alternatives as OpenAI's routes list, and as many stop strings as code editors send for a completion.
OPENAI_TOP_LOGPROBS = 20
OPENAI_STOP_STRINGS = 32

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


class RequestedSampling(NamedTuple):
    """The sampling parameters of one request. A default is the value of a request that lacks the field."""

    given: Mapping[str, Any]  # the parameters of the table that the request has, by their names in SamplingParams
    # OpenAI's routes alone:
    logit_bias: Mapping[int, float] = MappingProxyType({})
    greedy: bool = False  # temperature or top_p 0: all parameters that make a request sample are ignored
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    # What a request may ask for even if --max-top-n-tokens or --max-stop-sequences is lower.
    least_top_n_limit: int = 0
    least_stop_limit: int = 0

    @classmethod
    def from_native(cls, parameters: GenerateParameters) -> "RequestedSampling":
        values = {name: getattr(parameters, field.name) for name, field in NATIVE.items()}
        return cls({name: _as_float32(name, value) for name, value in values.items() if value is not None})

    @classmethod
    def from_openai(cls, request: OpenAiRequest, top_n: int) -> "RequestedSampling":
        """The sampling parameters of a request to OpenAI's routes that has passed OPENAI_RULES.

        The request samples unless its temperature or top_p is 0. `top_n` is the number of alternatives that its
        logprobs list.
        """
        values = {name: getattr(request, field.name) for name, field in OPENAI.items()}
        greedy = values["temperature"] == 0 or values["top_p"] == 0
        given = {
            name: _as_float32(name, value)
            for name, value in values.items()
            if value is not None and value not in OPENAI[name].off_values
        }
        return cls(
            given | {"do_sample": not greedy, "top_n": top_n},
            logit_bias={int(token): float32.round_to_float32(value) for token, value in sent_biases(request).items()},
            greedy=greedy,
            stop_token_ids=request.stop_token_ids or (),
            bad_words=request.bad_words or (),
            skip_special_tokens=request.skip_special_tokens is not False,
            least_top_n_limit=OPENAI_TOP_LOGPROBS,
            least_stop_limit=OPENAI_STOP_STRINGS,
        )

    @property
    def samples(self) -> bool:
        """Whether the request has a parameter that makes it sample. As in TGI, a neutral value counts too."""
        return bool(self.given.get("do_sample")) or any(name in self.given for name in SAMPLED_BY)

    def to_params(self, seed: int, choice: int) -> SamplingParams:
        """The record for one generation. `choice` is its index among the answers to one prompt that share a seed."""
        params = SamplingParams(
            seed=seed,
            choice=choice,
            bias_ids=pack_column(INT32, self.logit_bias.keys()),
            biases=pack_column(FLOAT32, self.logit_bias.values()),
            **self.given,
        )
        return params.greedy() if self.greedy else params


def _as_float32(name: str, value: Any) -> Any:
    """Rounds floats to float32 as TGI does, so that range checks and the worker see the same number."""
    return float32.round_to_float32(value) if PARAMETERS[name].json_type == "f32" else value


def openai_generate_parameters(request: OpenAiRequest, adapters: Container[str]) -> GenerateParameters:
    """The parameters of a request to OpenAI's routes, except those of sampling, under TGI's names. A `model` that is
    not the name of an adapter means the served model."""
    return GenerateParameters(
        max_new_tokens=request.max_new_tokens,
        stop=request.stops,
        seed=request.seed,
        grammar=next(iter(request.constraints.values()), None),
        ignore_eos=request.ignore_eos,
        truncate=request.truncate_prompt_tokens,
        adapter_id=request.model if request.model in adapters else None,
    )


def apply_model_defaults(request: OpenAiRequest, defaults: SamplingDefaults) -> None:
    """Sets the fields that are absent or null to the model's defaults. Values that a client sends have precedence, also
    neutral ones."""
    sent = {"max_tokens": request.max_new_tokens}  # under either of its names
    for name, value in defaults.given.items():
        if sent.get(name, getattr(request, name)) is None:
            setattr(request, name, value)


def sent_biases(request: OpenAiRequest) -> Mapping[str, float]:
    """The entries of `logit_bias`, not yet validated. TGI's array form has no effect."""
    return request.logit_bias if isinstance(request.logit_bias, dict) else {}


def is_token_id(text: str) -> bool:
    """Whether the text is a token id in plain decimal digits."""
    return _TOKEN_ID.fullmatch(text) is not None


# --- grammars ---------------------------------------------------------------------------------------------------------

_ANY_OBJECT = {"type": "object"}
# Grammar types whose value is not a JSON schema, and their keys in the message to the tokenizer.
_GRAMMAR_KEYS = {"regex": "regex", "choice": "regex", "grammar": "grammar"}
# The characters that have a meaning in a regular expression.
_REGEX_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def constrains_text(grammar: GrammarType | None) -> bool:
    """Whether the generated text has to match something."""
    return grammar is not None and grammar.type != "text"


def is_supported_grammar(grammar: GrammarType) -> bool:
    """Whether the value has a type that the tokenizer can read: a JSON schema is an object, or one as a string."""
    return grammar.type in _GRAMMAR_KEYS or isinstance(_grammar_value(grammar), dict | str)


def encode_grammar(grammar: GrammarType | None) -> bytes:
    """A readable grammar as JSON for the tokenizer (keys: tokenizer/structured_output/grammar.py); b"" without one."""
    if grammar is None or not constrains_text(grammar):
        return b""
    value = _grammar_value(grammar)
    if grammar.type == "choice":
        value = "|".join(_REGEX_SPECIAL.sub(r"\\\g<0>", one) for one in value)
    key = _GRAMMAR_KEYS.get(grammar.type, "schema_text" if isinstance(value, str) else "schema")
    return msgspec.json.encode({key: value})


def _grammar_value(grammar: GrammarType) -> Any:
    """The JSON schema, regular expression, list of choices or grammar."""
    if grammar.type == "json_schema":
        config = grammar.value if grammar.json_schema is None else grammar.json_schema
        return config["schema"]
    if grammar.type == "json_object" and grammar.value is None:
        return _ANY_OBJECT if grammar.schema is None else grammar.schema
    return grammar.value
