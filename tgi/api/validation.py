"""The rules that a generation request must keep, in their order, with TGI's messages: a table to be read."""

from collections.abc import Callable, Container
from typing import Any, NamedTuple

from tgi.api import errors, grammar
from tgi.api.shapes.native import GenerateParameters
from tgi.api.steering import MOST_BIASES, NONE, Steering, biases, is_id
from tgi.kernel.messages import MOST_PROMPT_TOPS
from tgi.kernel.settings import Settings


class Ask(NamedTuple):
    """What the rules look at: the request, how it came, and the limits of this server."""

    inputs: str | None  # None: a chat
    p: GenerateParameters
    stream: bool
    settings: Settings
    max_input_tokens: int
    vocab_size: int
    steering: Steering = NONE
    adapters: Container[str] = ()

    @property
    def stops(self) -> int:
        """How many stop strings."""
        return len(self.p.stops)

    @property
    def frequency_penalty(self) -> float:
        """In one of its two meanings: no route has both."""
        return self.p.frequency_penalty or self.steering.frequency_penalty

    @property
    def highest_biased(self) -> int:
        """The highest token id that has a bias; -1 if none has."""
        return max(self.steering.logit_bias, default=-1)

    @property
    def samples(self) -> bool:
        """Whether anything asks for random draws."""
        p = self.p
        return bool(p.do_sample) or any(x is not None for x in (p.temperature, p.top_k, p.top_p, p.typical_p))


class Rule(NamedTuple):
    """A numbered condition that must not hold, and what the client is told if it does."""

    number: str
    broken: Callable[[Any], bool]  # of an Ask, or of the body of one of OpenAI's routes
    detail: str  # formatted with `ask`
    counted: bool = True  # in tgi_request_failure


def _is(value: float | None, test: Callable[[float], bool]) -> bool:
    return value is not None and test(value)


def _share(value: float) -> bool:
    """Outside (0, 1]. TGI refuses 1.0 as well; here it means "off"."""
    return value <= 0 or value > 1


# fmt: off
# Before a place among the concurrent requests is taken.
EARLY = [
    Rule("1a", lambda a: a.stream and _is(a.p.best_of, lambda v: v != 1),
         "`best_of` != 1 is not supported when streaming tokens"),
    Rule("1b", lambda a: a.stream and bool(a.p.decoder_input_details),
         "`decoder_input_details` == true is not supported when streaming tokens"),
    Rule("2a", lambda a: not a.stream and _is(a.p.best_of, lambda v: v > 1) and a.settings.max_best_of == 1,
         "`best_of` != 1 is not allowed for this endpoint", counted=False),
    Rule("2b", lambda a: not a.stream and _is(a.p.best_of, lambda v: v > a.settings.max_best_of),
         "`best_of` must be > 0 and <= {ask.settings.max_best_of}. Given: {ask.p.best_of}", counted=False),
]

# After it. The rules on token counts (17 to 20) and on what a grammar says (22 to 24) are the tokenizer's.
RULES = [
    Rule("4", lambda a: _is(a.p.best_of, lambda v: v > 1) and not a.samples,
         "you must use sampling when `best_of` is > 1"),
    Rule("5", lambda a: _is(a.p.temperature, lambda v: v <= 0), "`temperature` must be strictly positive"),
    Rule("6", lambda a: _is(a.p.repetition_penalty, lambda v: v <= 0),
         "`repetition_penalty` must be strictly positive"),
    Rule("7", lambda a: not -2 <= a.frequency_penalty <= 2,
         "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    Rule("8", lambda a: _is(a.p.top_p, _share), "`top_p` must be > 0.0 and < 1.0"),
    Rule("9", lambda a: _is(a.p.typical_p, _share), "`typical_p` must be > 0.0 and < 1.0"),
    Rule("10", lambda a: _is(a.p.top_k, lambda v: v <= 0), "`top_k` must be strictly positive"),
    Rule("11", lambda a: a.p.max_new_tokens == 0, "`max_new_tokens` must be strictly positive"),
    Rule("min_new_tokens", lambda a: _is(a.p.max_new_tokens, lambda v: v < (a.p.min_new_tokens or 0)),
         "`min_new_tokens` must be <= `max_new_tokens`. Given: {ask.p.min_new_tokens} and {ask.p.max_new_tokens}"),
    Rule("12", lambda a: len(a.p.stops) > a.settings.max_stop_sequences,
         "`stop` supports up to {ask.settings.max_stop_sequences} stop sequences. Given: {ask.stops}"),
    Rule("13", lambda a: a.p.seed is not None and _is(a.p.best_of, lambda v: v > 1),
         "`seed` must not be set when `best_of` > 1"),
    Rule("14", lambda a: _is(a.p.top_n_tokens, lambda v: v > a.settings.max_top_n_tokens),
         "`top_n_tokens` must be >= 0 and <= {ask.settings.max_top_n_tokens}. Given: {ask.p.top_n_tokens}"),
    Rule("15", lambda a: a.inputs == "", "`inputs` cannot be empty"),
    Rule("16", lambda a: _is(a.p.truncate, lambda v: not 0 < v <= a.max_input_tokens),
         "`truncate` must be strictly positive and less than {ask.max_input_tokens}. Given: {ask.p.truncate}"),
    Rule("21", lambda a: grammar.wanted(a.p.grammar)
         and (a.settings.disable_grammar_support or not grammar.readable(a.p.grammar)), "grammar is not supported"),
    Rule("logit_bias", lambda a: a.highest_biased >= a.vocab_size,
         "`logit_bias` must name token ids < {ask.vocab_size}. Given: {ask.highest_biased}"),
    Rule("adapter_id", lambda a: a.p.adapter_id is not None and a.p.adapter_id not in a.adapters,
         "`adapter_id` {ask.p.adapter_id} not found"),
]

# OpenAI's routes, before their fields become parameters. `ask` is the body there.
OPENAI = [
    Rule("n", lambda r: r.n == 0, "`n` must be strictly positive"),
    Rule("presence_penalty", lambda r: _is(r.presence_penalty, lambda v: not -2 <= v <= 2),
         "`presence_penalty` must be >= -2.0 and <= 2.0"),
    Rule("logit_bias", lambda r: len(biases(r)) > MOST_BIASES,
         f"`logit_bias` supports up to {MOST_BIASES} tokens"),
    Rule("logit_bias", lambda r: not all(map(is_id, biases(r))),
         "`logit_bias` must name tokens by their ids, as in {{\"42\": -100}}"),
    Rule("logit_bias", lambda r: not all(-100 <= value <= 100 for value in biases(r).values()),
         "`logit_bias` values must be >= -100.0 and <= 100.0"),
    Rule("constraints", lambda r: len(r.constraints) > 1,
         "only one of {ask.constraint_names} can be used"),
    Rule("structural_tag", lambda r: any(tag is not None for tag in (r.structural_tag, r.structured.structural_tag)),
         "`structural_tag` is not supported"),
    Rule("whitespace_pattern", lambda r: any(pattern is not None for pattern in
                                             (r.guided_whitespace_pattern, r.structured.whitespace_pattern)),
         "`whitespace_pattern` is not supported: between the parts of a JSON text there may be one space"),
    Rule("disable_any_whitespace", lambda r: bool(r.structured.disable_any_whitespace),
         "`disable_any_whitespace` is not supported: between the parts of a JSON text there may be one space"),
]
COMPLETIONS = [
    Rule("best_of", lambda r: _is(r.best_of, lambda v: v != (r.n or 1)),
         "`best_of` other than `n` is not supported by this server"),
    Rule("echo", lambda r: bool(r.echo) and _is(r.logprobs, lambda v: v > MOST_PROMPT_TOPS),
         f"`logprobs` must be <= {MOST_PROMPT_TOPS} with `echo`"),
]
# fmt: on


def check(ask: Any, rules: list[Rule]) -> None:
    """Raises ApiError for the first rule that is broken."""
    for rule in rules:
        if rule.broken(ask):
            raise errors.validation(rule.detail.format(ask=ask), counted=rule.counted)
