"""Cache of the token ids of text segments, so that each turn of a chat encodes its new messages only."""

import re
from collections import defaultdict
from collections.abc import Iterable
from os.path import commonprefix
from threading import Lock

from tokenizers import Tokenizer

from tgi.microkernel.messages.codec import INT32, pack_column

# In characters. Shorter texts are encoded whole, which takes less than a millisecond.
MIN_TEXT_CHARACTERS = 2 << 10
# Estimated size of all entries. A character counts as one byte; ENTRY_OVERHEAD_BYTES is added per entry.
MAX_CACHE_BYTES = 32 << 20
ENTRY_OVERHEAD_BYTES = 300
# Nested groups in the pattern of added tokens. Beyond this depth the tokens are listed as alternatives.
MAX_PATTERN_DEPTH = 32


class SegmentCache:
    """Encodes long texts segment by segment, and caches the ids of each segment. Thread-safe.

    A chat sends its whole history with each turn, and templates write added tokens such as `<|im_end|>` between
    messages. A tokenizer splits the text at these tokens before anything else, so the segment between two of them has
    the same ids in every text.

    That does not hold for added tokens with `lstrip`, `rstrip` or `single_word`, which depend on the text around them.
    A tokenizer with such a token encodes all texts whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = {one.content: (token_id, one) for token_id, one in tokenizer.get_added_tokens_decoder().items()}
        # Tokens with `normalized` are searched later, in the normalized text of a segment.
        splitting = {content: both for content, both in added.items() if content and not both[1].normalized}
        self._token_ids = {content: pack_column(INT32, [token_id]) for content, (token_id, _) in splitting.items()}
        self._split_pattern: re.Pattern[str] | None = None
        if splitting and not any(one.lstrip or one.rstrip or one.single_word for _, one in splitting.values()):
            # Same rule as the tokenizer: leftmost match, of these the longest.
            self._split_pattern = re.compile(f"({_longest_match_pattern(splitting)})")
        self._template_ids = _template_ids(tokenizer)
        self._cache: dict[tuple[bool, str], bytes] = {}  # least recently used first
        self._bytes = 0
        self._lock = Lock()

    def encode(self, text: str, add_special_tokens: bool) -> bytes | None:
        """The ids of a text as an int32 column.

        Returns None if the text must be encoded whole: it is short, or contains no token to split at. Raises what the
        tokenizer raises.
        """
        if self._split_pattern is None or self._template_ids is None or len(text) < MIN_TEXT_CHARACTERS:
            return None
        first, *rest = self._split_pattern.split(text)
        if not rest:
            return None
        columns = [self._segment_ids("", first)]
        for token, segment in zip(rest[::2], rest[1::2], strict=True):
            columns += self._token_ids[token], self._segment_ids(token, segment)
        prefix, suffix = self._template_ids if add_special_tokens else (b"", b"")
        return b"".join((prefix, *columns, suffix))

    def _segment_ids(self, token_before: str, segment: str) -> bytes:
        """The ids of a segment. `token_before` is "" at the beginning of a text, where some tokenizers add a space."""
        if not segment:
            return b""
        key = not token_before, segment
        with self._lock:
            column = self._cache.pop(key, None)
            if column is not None:
                self._cache[key] = column
                return column
        (encoding,) = self._tokenizer.encode_batch_fast([token_before + segment], add_special_tokens=False)
        column = pack_column(INT32, encoding.ids)[4 if token_before else 0 :]
        with self._lock:
            self._store(key, column)
        return column

    def _store(self, key: tuple[bool, str], column: bytes) -> None:
        if key in self._cache:
            return  # another thread has stored it meanwhile
        self._cache[key] = column
        self._bytes += _entry_size(key[1], column)
        while self._bytes > MAX_CACHE_BYTES:
            oldest = next(iter(self._cache))
            self._bytes -= _entry_size(oldest[1], self._cache.pop(oldest))


def _entry_size(segment: str, column: bytes) -> int:
    """Estimated bytes of an entry. Unlike sys.getsizeof, equal for equal texts."""
    return len(segment) + len(column) + ENTRY_OVERHEAD_BYTES


def _longest_match_pattern(words: Iterable[str], depth: int = 0) -> str:
    """Builds a pattern that matches the longest of these words at a position.

    Common prefixes are factored out: some tokenizers have thousands of added tokens, and trying each would take longer
    than encoding the text.
    """
    if depth > MAX_PATTERN_DEPTH:
        return f"(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})"
    by_first_character: dict[str, list[str]] = defaultdict(list)
    for word in words:
        by_first_character[word[:1]].append(word)
    optional = bool(by_first_character.pop("", None))  # one word ends here
    prefixes = [commonprefix(group) for group in by_first_character.values()]  # noqa: RUF071 (of characters)
    choices = [
        re.escape(prefix) + _longest_match_pattern([word[len(prefix) :] for word in group], depth + 1)
        for prefix, group in zip(prefixes, by_first_character.values(), strict=True)
    ]
    return f"(?:{'|'.join(choices)}){'?' * optional}" if choices else ""


def _template_ids(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """The ids that the tokenizer adds before and after a text with `add_special_tokens`; None if unknown."""
    try:
        bare = tokenizer.encode("a", add_special_tokens=False).ids
        encoding = tokenizer.encode("a", add_special_tokens=True)
    except Exception:  # the package raises plain Exception, here for a vocabulary without "a" and without unknowns
        return None
    ids, mask = encoding.ids, encoding.special_tokens_mask
    if 0 not in mask:
        return None
    first, last = mask.index(0), len(mask) - mask[::-1].index(0)
    if ids[first:last] != bare:
        return None  # with several post-processors the mask covers the tokens of the last one only
    return pack_column(INT32, ids[:first]), pack_column(INT32, ids[last:])
