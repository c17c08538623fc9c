"""The table of sampling parameters. It is the record that the API sends to the worker.

`SamplingParams` declares each parameter once: its type and neutral value as a field of the record, everything else in
the `Parameter` of that field. Derived from it are:

- the request fields with their JSON schemas (api/shapes/parameters.py), the range checks (api/validation.py) and the
  conversion of requests (api/request_parameters.py)
- the accepted values in generation_config.json (hub/model_config.py)
- the worker's columns (worker/sampling/sampling_batch.py) and the parameters of its warm-up steps
- docs/parameters.md, and the values in property tests (tests/parameters.py)

To add a parameter:

1. Append a field with a `Parameter` to `SamplingParams`.
2. Write the function that applies it in worker/sampling/logits_processors.py and add it to LOGITS_PROCESSORS there.
3. Add its formula to the reference in tests/worker/test_sampling.py. The tests of request fields, ranges, batch
   independence and speculation include the new parameter without a change.
4. Run `python scripts/parameters.py > docs/parameters.md`.

A rule that is not a range, for example for a combination of parameters, goes into api/validation.py.
"""

from typing import Annotated, Any, Literal, NamedTuple, get_type_hints


class Range(NamedTuple):
    """The values that a parameter accepts. Others get a 422 with `message`, which is TGI's where TGI has the parameter,
    even if TGI's bounds differ (1.0 for top_p)."""

    message: str
    above: float | None = None  # exclusive lower bound
    minimum: float | None = None
    maximum: float | None = None

    def contains(self, value: float) -> bool:
        return (
            (self.above is None or value > self.above)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words: "> 0 and <= 1"."""
        signs = {">": self.above, ">=": self.minimum, "<=": self.maximum}
        return " and ".join(f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None)


class RequestField(NamedTuple):
    """A parameter as a field of request bodies."""

    description: str = ""  # in the OpenAPI document; "": Parameter.effect
    example: Any = None  # not neutral on native routes, because the warm-up steps use it
    name: str = ""  # "": the name in SamplingParams
    off_values: tuple[int, ...] = ()  # values below the range that are accepted and leave the parameter neutral


class Parameter(NamedTuple):
    """The declaration of a sampling parameter, except its Python type and its neutral value."""

    effect: str  # one line for docs/parameters.md
    json_type: Literal["bool", "f32", "i32", "u32"]  # type of the request field, under TGI's (Rust's) name
    range: Range | None = None  # None: all values of the type
    native: RequestField | None = None  # in `parameters` of TGI's routes; None: TGI's routes do not accept it
    openai: RequestField | None = None  # in the bodies of /v1/chat/completions and /v1/completions
    samples: bool = False  # whether a value that is not neutral makes a request sample
    column: str = ""  # numpy dtype of the worker's column; "": float32, int64 or bool, according to json_type

    @property
    def openai_range(self) -> Range | None:
        """The range on OpenAI's routes, including `off_values`."""
        if self.range is None or self.openai is None or not self.openai.off_values:
            return self.range
        return self.range._replace(above=None, minimum=min(self.openai.off_values))


class SamplingDefaults(NamedTuple):
    """The defaults of requests on /v1: sampling parameters in the model's generation_config.json, and `max_tokens`.

    Each name is also the name of a request field. None: not in the file.
    """

    temperature: float | None = None  # 0: greedy
    top_k: int | None = None  # 0 and -1: off
    top_p: float | None = None
    min_p: float | None = None  # 0: off
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # not transformers' max_new_tokens: published models fill their context, as in TGI

    @property
    def given(self) -> dict[str, float]:
        """The parameters that the file has."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class SamplingParams(NamedTuple):
    """How the tokens of one request are sampled. The default of a field is the neutral value of the parameter.

    Sent from the API to the worker as an encoded message inside other messages; the scheduler only checks it.
    Fields are only ever appended. The API or the tokenizer sets the fields that have a note instead of a `Parameter`.
    """

    seed: Annotated[int, "uint64; drawn by the api when the client sends none"]
    do_sample: Annotated[
        bool,
        Parameter(
            "Samples at temperature 1 even if no other parameter asks for it. On /v1 requests sample unless "
            "`temperature` is 0.",
            "bool",
            native=RequestField(
                "Activate logits sampling. True where a request has no `parameters` at all.", example=True
            ),
        ),
    ] = False
    temperature: Annotated[
        float,
        Parameter(
            "Divides the scores. 0 (on /v1): the likeliest token always, whatever the other parameters are.",
            "f32",
            Range("`temperature` must be strictly positive", above=0),
            native=RequestField("The value used to module the logits distribution.", example=0.5),
            openai=RequestField(
                "What sampling temperature to use, between 0 and 2. Higher values like 0.8 will make the output more "
                "random, while lower values like 0.2 will make it more focused and deterministic. 0 always takes the "
                "likeliest token.\n\nWe generally recommend altering this or `top_p` but not both.",
                example=1.0,
                off_values=(0,),
            ),
            samples=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            "Keeps this many of the likeliest tokens, and those that tie with the last of them.",
            "i32",
            Range("`top_k` must be strictly positive", above=0),
            native=RequestField(
                "The number of highest probability vocabulary tokens to keep for top-k-filtering.", example=10
            ),
            openai=RequestField(
                "Draw from this many of the likeliest tokens; 0 and -1 mean off.", example=10, off_values=(-1, 0)
            ),
            samples=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        Parameter(
            "Keeps the likeliest tokens until their probabilities add up to this share.",
            "f32",
            Range("`top_p` must be > 0.0 and < 1.0", above=0, maximum=1),
            native=RequestField("Top-p value for nucleus sampling. 1.0 means off.", example=0.95),
            openai=RequestField(
                "An alternative to sampling with temperature, called nucleus sampling, where the model considers the "
                "results of the tokens with top_p probability mass. So 0.1 means only the tokens comprising the top "
                "10% probability mass are considered. 0 always takes the likeliest token.",
                example=0.95,
                off_values=(0,),
            ),
            samples=True,
            column="float64",
        ),
    ] = 1.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            "Divides the scores of tokens that prompt or answer have, or multiplies them if they are negative.",
            "f32",
            Range("`repetition_penalty` must be strictly positive", above=0),
            native=RequestField(
                "The parameter for repetition penalty. 1.0 means no penalty.\n"
                "See [this paper](https://arxiv.org/pdf/1909.05858.pdf) for more details.",
                example=1.03,
            ),
            openai=RequestField(
                "1.0 means no penalty; see [this paper](https://arxiv.org/pdf/1909.05858.pdf) for more details.",
                example=1.03,
            ),
        ),
    ] = 1.0
    top_n: Annotated[
        int,
        Parameter(
            "Lists this many of the likeliest tokens at each position (more where several tie with the last), at most "
            "`--max-top-n-tokens`. On /v1 `top_logprobs` and `logprobs` ask for it.",
            "u32",
            native=RequestField(
                "The number of highest probability vocabulary tokens to keep for top-n-filtering.",
                example=5,
                name="top_n_tokens",
            ),
        ),
    ] = 0
    choice: Annotated[int, "index among the answers to one prompt; each has noise of its own from the same seed"] = 0
    typical_p: Annotated[
        float,
        Parameter(
            "Keeps the tokens whose surprise is nearest to the entropy until their probabilities add up to this share "
            "([paper](https://arxiv.org/abs/2202.00666)).",
            "f32",
            Range("`typical_p` must be > 0.0 and < 1.0", above=0, maximum=1),
            native=RequestField(
                "Typical Decoding mass. 1.0 means off.\nSee [Typical Decoding for Natural Language Generation]"
                "(https://arxiv.org/abs/2202.00666) for more information.",
                example=0.95,
            ),
            openai=RequestField(
                "Typical decoding mass, see [Typical Decoding for Natural Language "
                "Generation](https://arxiv.org/abs/2202.00666). 1.0 means off.",
                example=0.95,
            ),
            samples=True,
            column="float64",
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "TGI's: subtracts this, times the token's share of all ids of prompt and answer, from its score.",
            "f32",
            Range("`frequency_penalty` must be >= -2.0 and <= 2.0", minimum=-2, maximum=2),
            native=RequestField(
                "The parameter for frequency penalty. 0.0 means no penalty\n"
                "Penalize new tokens based on their existing frequency in the text so far,\n"
                "decreasing the model's likelihood to repeat the same line verbatim.",
                example=0.1,
            ),
            column="float64",
        ),
    ] = 0.0
    count_penalty: Annotated[
        float,
        Parameter(
            "OpenAI's: subtracts this, times how often the token was generated, from its score.",
            "f32",
            Range("`frequency_penalty` must be >= -2.0 and <= 2.0", minimum=-2, maximum=2),
            openai=RequestField(
                "Number between -2.0 and 2.0. Positive values penalize new tokens based on their existing frequency "
                "in the text so far, decreasing the model's likelihood to repeat the same line verbatim.",
                example=1.0,
                name="frequency_penalty",
            ),
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Parameter(
            "OpenAI's: subtracts this from the score of each token that was generated.",
            "f32",
            Range("`presence_penalty` must be >= -2.0 and <= 2.0", minimum=-2, maximum=2),
            openai=RequestField(
                "Number between -2.0 and 2.0. Positive values penalize new tokens based on whether they appear in the "
                "text so far, increasing the model's likelihood to talk about new topics.",
                example=0.1,
            ),
        ),
    ] = 0.0
    bias_ids: Annotated[bytes, "int32: the token ids of logit_bias, each once"] = b""
    biases: Annotated[bytes, "float32: the values of logit_bias"] = b""
    grammar: Annotated[str, 'what the text must match, as worker/sampling/grammar.py reads it; "": anything'] = ""
    watermark: Annotated[
        bool,
        Parameter(
            "Marks the text so that [`tgi watermark`](watermark.md) finds it.",
            "bool",
            native=RequestField(
                "Watermarking with [A Watermark for Large Language Models](https://arxiv.org/abs/2301.10226).",
                example=True,
            ),
        ),
    ] = False
    min_new_tokens: Annotated[
        int,
        Parameter(
            "Until this many tokens are generated no token and no stop string ends the text. At most `max_new_tokens`. "
            "TGI does not have it.",
            "u32",
            native=RequestField(
                "Minimum number of tokens to generate: before that no token ends the text, and no stop string.",
                example=5,
            ),
            openai=RequestField(
                "The minimum number of tokens to generate: before that no token ends the text, and no stop string.",
                example=5,
                name="min_tokens",
            ),
        ),
    ] = 0
    end_ids: Annotated[bytes, "int32; from the tokenizer, if min_new_tokens is not 0"] = b""
    adapter: Annotated[str, 'the name of a LoRA adapter; "": the model alone'] = ""
    adapter_digest: Annotated[bytes, "the adapter's digest; the tokenizer corrects it unless ids are resumed"] = b""
    min_p: Annotated[
        float,
        Parameter(
            "Keeps the tokens whose probability is at least this share of the largest one. TGI does not have it.",
            "f32",
            Range("`min_p` must be >= 0.0 and <= 1.0", minimum=0, maximum=1),
            native=RequestField(
                "Tokens whose probability is below this share of the largest one are not drawn. 0 means off.",
                example=0.05,
            ),
            openai=RequestField(
                "Draw from tokens whose probability is at least this share of the largest one; 0 means off.",
                example=0.05,
            ),
            samples=True,
            column="float64",
        ),
    ] = 0.0
    bad_word_ids: Annotated[
        bytes, "int32: token sequences that must not be generated, concatenated; from the tokenizer"
    ] = b""
    bad_word_lengths: Annotated[bytes, "int32: the number of tokens of each of these sequences"] = b""
    xtc_probability: Annotated[
        float,
        Parameter(
            "XTC, exclude top choices: with this probability at each position, removes all tokens whose probability is "
            "at least `xtc_threshold`, except the least likely of them. TGI does not have it.",
            "f32",
            Range("`xtc_probability` must be >= 0.0 and <= 1.0", minimum=0, maximum=1),
            native=RequestField(example=0.5),
            openai=RequestField(example=0.5),
            samples=True,
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Parameter(
            "The probability from which on `xtc_probability` removes tokens; above 0.5 it removes none. TGI does not "
            "have it.",
            "f32",
            Range("`xtc_threshold` must be >= 0.0 and <= 1.0", minimum=0, maximum=1),
            native=RequestField(example=0.2),
            openai=RequestField(example=0.2),
        ),
    ] = 0.1
    reasoning_budget: Annotated[int, "tokens of reasoning, with reasoning_close_ids; from the tokenizer"] = 0
    reasoning_open_ids: Annotated[bytes, 'int32: what begins reasoning; b"": the answer begins within it'] = b""
    reasoning_close_ids: Annotated[bytes, 'int32: what is forced after the budget; b"": there is no budget'] = b""
    reasoning_special_ids: Annotated[bytes, "int32: those of both that are special tokens, which no text equals"] = b""
    reasoning_repeats: Annotated[bool, "whether reasoning may begin later than at the beginning, and again"] = False
    listed_ids: Annotated[
        bytes, "int32: the tokens that are listed, in place of the top_n likeliest; from the tokenizer"
    ] = b""

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled; greedy otherwise."""
        return self.do_sample or any(getattr(self, name) != NEUTRAL[name] for name in SAMPLED_BY)

    def greedy(self) -> "SamplingParams":
        """The same record with neutral values for everything that makes a request sample."""
        return self._replace(do_sample=False, **{name: NEUTRAL[name] for name in SAMPLED_BY})


# Name -> the Parameter or the note of each field, in the order of the record.
FIELDS: dict[str, Parameter | str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
}
PARAMETERS = {name: field for name, field in FIELDS.items() if isinstance(field, Parameter)}
NEUTRAL: dict[str, Any] = {name: SamplingParams._field_defaults[name] for name in PARAMETERS}
RANGES = {name: parameter.range for name, parameter in PARAMETERS.items() if parameter.range is not None}
# The parameters besides do_sample that make a request sample.
SAMPLED_BY = tuple(name for name, parameter in PARAMETERS.items() if parameter.samples)
