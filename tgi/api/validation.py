"""The rules for generation requests, with TGI's messages, in the order in which TGI checks them.

The ranges of sampling parameters come from the table (messages/sampling_params.py). All other rules stand here.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tgi.api import errors
from tgi.api.request_parameters import (
    MAX_BIASES,
    RequestedSampling,
    constrains_text,
    is_supported_grammar,
    is_token_id,
    sent_biases,
)
from tgi.api.shapes.native import GenerateParameters
from tgi.api.shapes.openai import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS
from tgi.api.shapes.parameters import NATIVE, OPENAI
from tgi.microkernel.messages.protocol import MAX_PROMPT_TOP_TOKENS
from tgi.microkernel.messages.sampling_params import RANGES
from tgi.microkernel.settings.table import Settings


class RuleContext(NamedTuple):
    """The request and the limits of this server, as the rules see them."""

    inputs: str | None  # the prompt's text; None for a chat or token ids
    parameters: GenerateParameters
    stream: bool
    settings: Settings
    max_input_tokens: int
    vocab_size: int
    sampling: RequestedSampling
    adapters: Container[str] = ()
    ids: Sequence[int] = ()  # the token ids of a prompt that is sent as such
    echo: bool = False  # the prompt is part of the answer

    @property
    def stop_count(self) -> int:
        return len(self.parameters.stops)

    @property
    def highest_bias_id(self) -> int:
        """The highest token id in `logit_bias`; -1 if it is empty."""
        return max(self.sampling.logit_bias, default=-1)

    @property
    def highest_stop_id(self) -> int:
        """The highest of the stop token ids; -1 if there are none."""
        return max(self.sampling.stop_token_ids, default=-1)

    @property
    def unknown_id(self) -> int | None:
        """The first token id of the prompt that is not in the vocabulary."""
        return next((token for token in self.ids if not 0 <= token < self.vocab_size), None)

    @property
    def top_n(self) -> int:
        return int(self.sampling.given.get("top_n", 0))

    @property
    def max_top_n(self) -> int:
        """The largest number of alternatives."""
        return max(self.settings.max_top_n_tokens, self.sampling.least_top_n_limit)

    @property
    def max_stops(self) -> int:
        """The largest number of stop strings."""
        return max(self.settings.max_stop_sequences, self.sampling.least_stop_limit)

    @property
    def min_new_tokens(self) -> int:
        return int(self.sampling.given.get("min_new_tokens", 0))


class Rule(NamedTuple):
    """A condition under which a request is rejected, and the message."""

    # Path of the field, in the native names where there is one. None: several fields.
    param: str | None
    is_broken: Callable[[Any], bool]  # takes a RuleContext (c), or the body of one of OpenAI's routes (r)
    message: str  # a format string with c or r, as is_broken has it
    counted: bool = True  # in tgi_request_failure


def _is(value: float | None, test: Callable[[float], bool]) -> bool:
    """Whether the request has the field and its value passes the test."""
    return value is not None and test(value)


def _out_of_range(name: str) -> Rule:
    """The rule for the range of a sampling parameter; `name` is the one in SamplingParams."""
    allowed, field = RANGES[name], NATIVE.get(name) or OPENAI[name]
    return Rule(
        field.name, lambda c: _is(c.sampling.given.get(name), lambda v: not allowed.contains(v)), allowed.message
    )


# Ranges are checked in TGI's order; those of parameters that are not named here follow in the order of the table.
# OPENAI_RULES have the range of presence_penalty.
# fmt: off
_FIRST = ("temperature", "repetition_penalty", "frequency_penalty", "count_penalty", "top_p", "typical_p", "min_p")
# fmt: on
_LATER = [name for name in RANGES if name not in _FIRST and name != "presence_penalty"]
_RANGE_RULES = [_out_of_range(name) for name in (*_FIRST, *_LATER)]

# fmt: off
# Checked before the request takes a permit (--max-concurrent-requests).
RULES_BEFORE_ADMISSION = [
    Rule("best_of", lambda c: c.stream and _is(c.parameters.best_of, lambda v: v != 1),
         "`best_of` != 1 is not supported when streaming tokens"),
    Rule("decoder_input_details", lambda c: c.stream and bool(c.parameters.decoder_input_details),
         "`decoder_input_details` == true is not supported when streaming tokens"),
    Rule("best_of",
         lambda c: not c.stream and _is(c.parameters.best_of, lambda v: v > 1) and c.settings.max_best_of == 1,
         "`best_of` != 1 is not allowed for this endpoint", counted=False),
    Rule("best_of", lambda c: not c.stream and _is(c.parameters.best_of, lambda v: v > c.settings.max_best_of),
         "`best_of` must be > 0 and <= {c.settings.max_best_of}. Given: {c.parameters.best_of}", counted=False),
]

# Checked after that. The tokenizer checks token counts and the contents of grammars.
RULES_AFTER_ADMISSION = [
    Rule("best_of", lambda c: _is(c.parameters.best_of, lambda v: v > 1) and not c.sampling.samples,
         "you must use sampling when `best_of` is > 1"),
    *_RANGE_RULES,
    Rule("max_new_tokens", lambda c: c.parameters.max_new_tokens == 0 and not c.echo,
         "`max_new_tokens` must be strictly positive"),
    Rule("min_new_tokens", lambda c: _is(c.parameters.max_new_tokens, lambda v: v < c.min_new_tokens),
         "`min_new_tokens` must be <= `max_new_tokens`. Given: {c.min_new_tokens} and {c.parameters.max_new_tokens}"),
    Rule("stop", lambda c: c.stop_count > c.max_stops,
         "`stop` supports up to {c.max_stops} stop sequences. Given: {c.stop_count}"),
    Rule("seed", lambda c: c.parameters.seed is not None and _is(c.parameters.best_of, lambda v: v > 1),
         "`seed` must not be set when `best_of` > 1"),
    Rule("top_n_tokens", lambda c: c.top_n > c.max_top_n,
         "`top_n_tokens` must be >= 0 and <= {c.max_top_n}. Given: {c.top_n}"),
    Rule("inputs", lambda c: c.inputs == "", "`inputs` cannot be empty"),
    Rule("prompt", lambda c: c.unknown_id is not None,
         "`prompt` must hold token ids >= 0 and < {c.vocab_size}. Given: {c.unknown_id}"),
    Rule("truncate", lambda c: _is(c.parameters.truncate, lambda v: not 0 < v <= c.max_input_tokens),
         "`truncate` must be strictly positive and less than {c.max_input_tokens}. Given: {c.parameters.truncate}"),
    Rule("grammar", lambda c: constrains_text(c.parameters.grammar)
         and (c.settings.disable_grammar_support or not is_supported_grammar(c.parameters.grammar)),
         "grammar is not supported"),
    Rule("logit_bias", lambda c: c.highest_bias_id >= c.vocab_size,
         "`logit_bias` must name token ids < {c.vocab_size}. Given: {c.highest_bias_id}"),
    Rule("stop_token_ids", lambda c: c.highest_stop_id >= c.vocab_size,
         "`stop_token_ids` must be token ids < {c.vocab_size}. Given: {c.highest_stop_id}"),
    Rule("adapter_id", lambda c: c.parameters.adapter_id is not None and c.parameters.adapter_id not in c.adapters,
         "`adapter_id` {c.parameters.adapter_id} not found"),
]

_RULES_WITHOUT_RANGES = [rule for rule in RULES_AFTER_ADMISSION if rule not in _RANGE_RULES]


def rules_after_admission(sampling: RequestedSampling) -> list[Rule]:
    """Those of RULES_AFTER_ADMISSION that a request may break: most requests give no parameter that has a range."""
    return _RULES_WITHOUT_RANGES if RANGES.keys().isdisjoint(sampling.given) else RULES_AFTER_ADMISSION


# Checked on the bodies of OpenAI's routes, before their fields are converted.
OPENAI_RULES = [
    Rule("n", lambda r: r.n == 0, "`n` must be strictly positive"),
    Rule("presence_penalty", lambda r: _is(r.presence_penalty, lambda v: not RANGES["presence_penalty"].contains(v)),
         RANGES["presence_penalty"].message),
    Rule("truncate_prompt_tokens", lambda r: _is(r.truncate_prompt_tokens, lambda v: v <= 0),
         "`truncate_prompt_tokens` must be strictly positive"),
    Rule("logit_bias", lambda r: len(sent_biases(r)) > MAX_BIASES,
         f"`logit_bias` supports up to {MAX_BIASES} tokens"),
    Rule("logit_bias", lambda r: not all(map(is_token_id, sent_biases(r))),
         "`logit_bias` must name tokens by their ids, as in {{\"42\": -100}}"),
    Rule("logit_bias", lambda r: not all(-100 <= value <= 100 for value in sent_biases(r).values()),
         "`logit_bias` values must be >= -100.0 and <= 100.0"),
    Rule("stop_token_ids", lambda r: len(r.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS,
         f"`stop_token_ids` supports up to {MAX_STOP_TOKEN_IDS} token ids"),
    Rule("bad_words", lambda r: len(r.bad_words or ()) > MAX_BAD_WORDS
         or sum(map(len, r.bad_words or ())) > MAX_BAD_WORD_CHARACTERS,
         f"`bad_words` supports up to {MAX_BAD_WORDS} words of {MAX_BAD_WORD_CHARACTERS} characters in all"),
    Rule("bad_words", lambda r: not all(word.strip() for word in r.bad_words or ()),
         "`bad_words` must not hold words that are empty or white space"),
    Rule(None, lambda r: len(r.constraints) > 1, "only one of {r.constraint_names} can be used"),
    Rule("structured_outputs.structural_tag", lambda r: r.structured.structural_tag is not None,
         "`structured_outputs.structural_tag` is not supported by this server"),
    Rule("structured_outputs.whitespace_pattern", lambda r: r.structured.whitespace_pattern is not None,
         "`structured_outputs.whitespace_pattern` is not supported by this server"),
    Rule("structured_outputs.disable_any_whitespace", lambda r: bool(r.structured.disable_any_whitespace),
         "`structured_outputs.disable_any_whitespace` is not supported by this server"),
]
COMPLETION_RULES = [
    Rule("best_of", lambda r: _is(r.best_of, lambda v: v != (r.n or 1)),
         "`best_of` other than `n` is not supported by this server"),
    Rule("logprobs", lambda r: bool(r.echo) and _is(r.logprobs, lambda v: v > MAX_PROMPT_TOP_TOKENS),
         f"`logprobs` must be <= {MAX_PROMPT_TOP_TOKENS} with `echo`"),
]
# fmt: on


def check_rules(checked: Any, rules: list[Rule], names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises ApiError for the first rule that is broken. `checked` is what the rules take, a RuleContext or a request
    body; `names` maps native names of parameters to those of the request."""
    for rule in rules:
        if rule.is_broken(checked):
            param = None if rule.param is None else names.get(rule.param, rule.param)
            raise errors.validation_error(rule.message.format(c=checked, r=checked), param=param, counted=rule.counted)
