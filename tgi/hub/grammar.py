"""Grammars as llguidance reads them, with the same limits wherever they are checked or obeyed."""

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

# What a grammar may take. Fuel and items are counted, not timed, so that a grammar that was accepted once always is.
# The first two bound a compilation to about half a second, the next two a mask to some 20 ms, the last one memory: a
# state takes 1 to 2 kB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    max_grammar_size=500_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


def token_table(tokenizer: Tokenizer, eos_ids: Sequence[int], size: int) -> LLTokenizer:
    """The bytes of a tokenizer's tokens, for masks of at least `size` tokens. Takes some half a second, in which no
    other thread of the process runs."""
    size = max(size, tokenizer.get_vocab_size(with_added_tokens=True))
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(eos_ids) or None)


def byte_table() -> LLTokenizer:
    """The 256 bytes as tokens."""
    return LLTokenizer("byte")


def matcher(table: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a text. One that could not be made is in an error state. Other threads run on."""
    return LLMatcher(table, grammar, log_level=0, limits=LIMITS)
