"""The rules that a generation request must keep, in their order, with TGI's messages: a table to be read."""

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tgi.api import errors, grammar
from tgi.api.shapes.native import GenerateParameters
from tgi.api.shapes.openai import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS
from tgi.api.steering import MOST_BIASES, NONE, Steering, biases, is_id
from tgi.kernel.messages import MOST_PROMPT_TOPS
from tgi.kernel.sampling import LIMITS
from tgi.kernel.settings import Settings


class Ask(NamedTuple):
    """What the rules look at: the request, how it came, and the limits of this server."""

    inputs: str | None  # None: a chat, or token ids
    p: GenerateParameters
    stream: bool
    settings: Settings
    max_input_tokens: int
    vocab_size: int
    steering: Steering = NONE
    adapters: Container[str] = ()
    ids: Sequence[int] = ()  # the prompt, if it is one of token ids
    echo: bool = False  # the prompt is part of the answer

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
    def highest_stop_id(self) -> int:
        """The highest of the stop token ids; -1 if there are none."""
        return max(self.steering.stop_token_ids, default=-1)

    @property
    def stray_id(self) -> int | None:
        """The first token id of the prompt that is not in the vocabulary."""
        return next((token for token in self.ids if not 0 <= token < self.vocab_size), None)

    @property
    def samples(self) -> bool:
        """Whether anything asks for random draws."""
        return bool(self.p.do_sample) or any(getattr(self.p, name) is not None for name in ("temperature", *LIMITS))


class Rule(NamedTuple):
    """A condition that must not hold, and what the client is told if it does."""

    # Path of the field that it is about, of GenerateParameters (or `inputs`), or of the body. None: several fields.
    param: str | None
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
    Rule("best_of", lambda a: a.stream and _is(a.p.best_of, lambda v: v != 1),
         "`best_of` != 1 is not supported when streaming tokens"),
    Rule("decoder_input_details", lambda a: a.stream and bool(a.p.decoder_input_details),
         "`decoder_input_details` == true is not supported when streaming tokens"),
    Rule("best_of", lambda a: not a.stream and _is(a.p.best_of, lambda v: v > 1) and a.settings.max_best_of == 1,
         "`best_of` != 1 is not allowed for this endpoint", counted=False),
    Rule("best_of", lambda a: not a.stream and _is(a.p.best_of, lambda v: v > a.settings.max_best_of),
         "`best_of` must be > 0 and <= {ask.settings.max_best_of}. Given: {ask.p.best_of}", counted=False),
]

# After it. The rules on token counts and on what a grammar says are the tokenizer's.
RULES = [
    Rule("best_of", lambda a: _is(a.p.best_of, lambda v: v > 1) and not a.samples,
         "you must use sampling when `best_of` is > 1"),
    Rule("temperature", lambda a: _is(a.p.temperature, lambda v: v <= 0), "`temperature` must be strictly positive"),
    Rule("repetition_penalty", lambda a: _is(a.p.repetition_penalty, lambda v: v <= 0),
         "`repetition_penalty` must be strictly positive"),
    Rule("frequency_penalty", lambda a: not -2 <= a.frequency_penalty <= 2,
         "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    Rule("top_p", lambda a: _is(a.p.top_p, _share), "`top_p` must be > 0.0 and < 1.0"),
    Rule("typical_p", lambda a: _is(a.p.typical_p, _share), "`typical_p` must be > 0.0 and < 1.0"),
    Rule("min_p", lambda a: _is(a.p.min_p, lambda v: not 0 <= v <= 1), "`min_p` must be >= 0.0 and <= 1.0"),
    Rule("top_k", lambda a: _is(a.p.top_k, lambda v: v <= 0), "`top_k` must be strictly positive"),
    Rule("max_new_tokens", lambda a: a.p.max_new_tokens == 0 and not a.echo,
         "`max_new_tokens` must be strictly positive"),
    Rule("min_new_tokens", lambda a: _is(a.p.max_new_tokens, lambda v: v < (a.p.min_new_tokens or 0)),
         "`min_new_tokens` must be <= `max_new_tokens`. Given: {ask.p.min_new_tokens} and {ask.p.max_new_tokens}"),
    Rule("stop", lambda a: len(a.p.stops) > a.settings.max_stop_sequences,
         "`stop` supports up to {ask.settings.max_stop_sequences} stop sequences. Given: {ask.stops}"),
    Rule("seed", lambda a: a.p.seed is not None and _is(a.p.best_of, lambda v: v > 1),
         "`seed` must not be set when `best_of` > 1"),
    Rule("top_n_tokens", lambda a: _is(a.p.top_n_tokens, lambda v: v > a.settings.max_top_n_tokens),
         "`top_n_tokens` must be >= 0 and <= {ask.settings.max_top_n_tokens}. Given: {ask.p.top_n_tokens}"),
    Rule("inputs", lambda a: a.inputs == "", "`inputs` cannot be empty"),
    Rule("prompt", lambda a: a.stray_id is not None,
         "`prompt` must hold token ids >= 0 and < {ask.vocab_size}. Given: {ask.stray_id}"),
    Rule("truncate", lambda a: _is(a.p.truncate, lambda v: not 0 < v <= a.max_input_tokens),
         "`truncate` must be strictly positive and less than {ask.max_input_tokens}. Given: {ask.p.truncate}"),
    Rule("grammar", lambda a: grammar.wanted(a.p.grammar)
         and (a.settings.disable_grammar_support or not grammar.readable(a.p.grammar)), "grammar is not supported"),
    Rule("logit_bias", lambda a: a.highest_biased >= a.vocab_size,
         "`logit_bias` must name token ids < {ask.vocab_size}. Given: {ask.highest_biased}"),
    Rule("stop_token_ids", lambda a: a.highest_stop_id >= a.vocab_size,
         "`stop_token_ids` must be token ids < {ask.vocab_size}. Given: {ask.highest_stop_id}"),
    Rule("adapter_id", lambda a: a.p.adapter_id is not None and a.p.adapter_id not in a.adapters,
         "`adapter_id` {ask.p.adapter_id} not found"),
]

# OpenAI's routes, before their fields become parameters. `ask` is the body there.
OPENAI = [
    Rule("n", lambda r: r.n == 0, "`n` must be strictly positive"),
    Rule("presence_penalty", lambda r: _is(r.presence_penalty, lambda v: not -2 <= v <= 2),
         "`presence_penalty` must be >= -2.0 and <= 2.0"),
    Rule("truncate_prompt_tokens", lambda r: _is(r.truncate_prompt_tokens, lambda v: v <= 0),
         "`truncate_prompt_tokens` must be strictly positive"),
    Rule("logit_bias", lambda r: len(biases(r)) > MOST_BIASES,
         f"`logit_bias` supports up to {MOST_BIASES} tokens"),
    Rule("logit_bias", lambda r: not all(map(is_id, biases(r))),
         "`logit_bias` must name tokens by their ids, as in {{\"42\": -100}}"),
    Rule("logit_bias", lambda r: not all(-100 <= value <= 100 for value in biases(r).values()),
         "`logit_bias` values must be >= -100.0 and <= 100.0"),
    Rule("stop_token_ids", lambda r: len(r.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS,
         f"`stop_token_ids` supports up to {MAX_STOP_TOKEN_IDS} token ids"),
    Rule("bad_words", lambda r: len(r.bad_words or ()) > MAX_BAD_WORDS
         or sum(map(len, r.bad_words or ())) > MAX_BAD_WORD_CHARACTERS,
         f"`bad_words` supports up to {MAX_BAD_WORDS} words of {MAX_BAD_WORD_CHARACTERS} characters in all"),
    Rule("bad_words", lambda r: not all(word.strip() for word in r.bad_words or ()),
         "`bad_words` must not hold words that are empty or white space"),
    Rule(None, lambda r: len(r.constraints) > 1, "only one of {ask.constraint_names} can be used"),
    Rule("structured_outputs.structural_tag", lambda r: r.structured.structural_tag is not None,
         "`structured_outputs.structural_tag` is not supported by this server"),
    Rule("structured_outputs.whitespace_pattern", lambda r: r.structured.whitespace_pattern is not None,
         "`structured_outputs.whitespace_pattern` is not supported by this server"),
    Rule("structured_outputs.disable_any_whitespace", lambda r: bool(r.structured.disable_any_whitespace),
         "`structured_outputs.disable_any_whitespace` is not supported by this server"),
]
COMPLETIONS = [
    Rule("best_of", lambda r: _is(r.best_of, lambda v: v != (r.n or 1)),
         "`best_of` other than `n` is not supported by this server"),
    Rule("logprobs", lambda r: bool(r.echo) and _is(r.logprobs, lambda v: v > MOST_PROMPT_TOPS),
         f"`logprobs` must be <= {MOST_PROMPT_TOPS} with `echo`"),
]
# fmt: on


def check(ask: Any, rules: list[Rule], names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises ApiError for the first rule that is broken. `names` are the request's own names of parameters."""
    for rule in rules:
        if rule.broken(ask):
            param = None if rule.param is None else names.get(rule.param, rule.param)
            raise errors.validation(rule.detail.format(ask=ask), param=param, counted=rule.counted)
