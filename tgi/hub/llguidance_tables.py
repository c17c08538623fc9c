"""llguidance's token tables and limits, the same where grammars are checked (tokenizer) and applied (worker)."""

from collections.abc import Iterable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer


# Limits count steps, not time, so that a grammar that was accepted once always is. The first two bound a compilation to
# about 0.5 s, the next three a mask to about 20 ms, the last one memory (1 to 2 kB per state).
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
# Added to every grammar; the last such line counts. Without it the library explores forced text for each mask, 0.1 s
# for a literal of 10 kB, which no limit counts.
OPTIONS = '%llguidance {"no_forcing": true}\n'
# For the test texts of a grammar check: a grammar that needs this many states early would exceed LIMITS later.
TRIAL_LIMITS = _limits(200_000, 10_000)


def token_table(tokenizer: Tokenizer, eos_ids: Sequence[int], size: int) -> LLTokenizer:
    """The token table of a tokenizer, for masks of at least `size` tokens. Takes about 0.5 s and holds the GIL."""
    size = max(size, tokenizer.get_vocab_size(with_added_tokens=True))
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(eos_ids) or None)


def piece_table(pieces: Iterable[bytes]) -> LLTokenizer:
    """A token table from the distinct byte strings alone; token 0 is EOS. Takes a third of the time and a tenth of the
    memory of `token_table`."""
    return LLTokenizer(TokenizerWrapper(_PieceTokenizer(list(dict.fromkeys([b"", *pieces])))))


class _PieceTokenizer:
    """The tokenizer interface that TokenizerWrapper requires."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._longest = max(map(len, tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Greedy longest-match tokenization, up to the first byte that no token covers."""
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


def new_matcher(table: LLTokenizer, grammar: str, limits: LLParserLimits = LIMITS) -> LLMatcher:
    """A matcher at the beginning of a text; in an error state if the grammar is invalid. Releases the GIL."""
    return LLMatcher(table, grammar, log_level=0, limits=limits)
