"""Grammars as llguidance reads them, with the same limits wherever they are checked or obeyed."""

from collections.abc import Iterable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer


# What a grammar may take. Fuel and items are counted, not timed, so that a grammar that was accepted once always is.
# The first two bound a compilation to about half a second, the next two a mask to some 20 ms, the last one memory: a
# state takes 1 to 2 kB.
def _limits(step_lexer_fuel: int, max_lexer_states: int) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        max_grammar_size=500_000,
        step_lexer_fuel=step_lexer_fuel,
        max_items_in_row=20_000,
        step_max_items=50_000,
        max_lexer_states=max_lexer_states,
        verbose_errors=False,
    )


LIMITS = _limits(200_000, 50_000)
# A line of every grammar; the last such line counts. Without it the library walks, for each mask, through all that can
# come in one way only: along a literal of 10 kB in 0.1 s, which none of the limits counts.
OPTIONS = '%llguidance {"no_forcing": true}\n'
# For the first tokens of a text, when a grammar is tried out: what takes so much so soon would exceed the others later.
TRIAL_LIMITS = _limits(200_000, 10_000)


def token_table(tokenizer: Tokenizer, eos_ids: Sequence[int], size: int) -> LLTokenizer:
    """The bytes of a tokenizer's tokens, for masks of at least `size` tokens. Takes some half a second, in which no
    other thread of the process runs."""
    size = max(size, tokenizer.get_vocab_size(with_added_tokens=True))
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(eos_ids) or None)


def piece_table(pieces: Iterable[bytes]) -> LLTokenizer:
    """A table for tokens of these bytes, each once, that knows nothing else of the tokenizer; token 0 ends a text. It
    takes a third of the time and a tenth of the memory."""
    return LLTokenizer(TokenizerWrapper(_Pieces(list(dict.fromkeys([b"", *pieces])))))


class _Pieces:
    """What TokenizerWrapper asks of a tokenizer."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._longest = max(map(len, tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Token by token, the longest first; what is before the first byte that cannot be written."""
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


def matcher(table: LLTokenizer, grammar: str, limits: LLParserLimits = LIMITS) -> LLMatcher:
    """A matcher at the beginning of a text. One that could not be made is in an error state. Other threads run on."""
    return LLMatcher(table, grammar, log_level=0, limits=limits)
