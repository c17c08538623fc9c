"""Ids of long texts, stretch by stretch between the tokens that stand in them, and the memory of stretches."""

import re
from threading import Lock

from tokenizers import Tokenizer

from tgi.kernel.pack import INT32, pack

# A text of fewer characters is encoded whole, in less than a millisecond.
LONG_TEXT = 2 << 10
# That are remembered, each stretch counting OVERHEAD more: some 10 bytes for each, with its ids.
MOST_CHARACTERS = 4 << 20
OVERHEAD = 64


class Stretches:
    """A chat sends its whole history in each turn, and a template writes tokens such as `<|im_end|>` between messages.
    A tokenizer takes these out of the text before all else, and what is left between two of them has the same ids in
    any text. So what has been encoded once is found again, and a turn encodes its new messages alone.

    That does not hold for tokens that take in the spaces beside them, or are found in whole words only: a tokenizer
    with such a token encodes texts whole. May be used from any thread.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = {one.content: (number, one) for number, one in tokenizer.get_added_tokens_decoder().items()}
        # The others are looked for within a stretch, once it is normalized.
        named = {content: both for content, both in added.items() if content and not both[1].normalized}
        self._ids = {content: pack(INT32, [number]) for content, (number, _) in named.items()}
        self._named: re.Pattern[str] | None = None
        if named and not any(one.lstrip or one.rstrip or one.single_word for _, one in named.values()):
            # As a tokenizer does it: what begins first, and of those the longest.
            self._named = re.compile(f"({'|'.join(map(re.escape, sorted(named, key=len, reverse=True)))})")
        self._added = _added(tokenizer)
        self._known: dict[tuple[bool, str], bytes] = {}  # the last one that was asked for comes last
        self._characters = 0  # of these, OVERHEAD included
        self._lock = Lock()

    def ids(self, text: str, add_special_tokens: bool) -> bytes | None:
        """The ids of a text as an int32 column. None: it must be encoded whole, since it is not long, or there is no
        token in it that divides it. Raises what the tokenizer raises."""
        if self._named is None or self._added is None or len(text) < LONG_TEXT:
            return None
        first, *rest = self._named.split(text)
        if not rest:
            return None
        columns = [self._stretch("", first)]
        for token, stretch in zip(rest[::2], rest[1::2], strict=True):
            columns += self._ids[token], self._stretch(token, stretch)
        before, behind = self._added if add_special_tokens else (b"", b"")
        return b"".join((before, *columns, behind))

    def _stretch(self, behind: str, stretch: str) -> bytes:
        """The ids of a stretch behind a token, or without one at the beginning of a text, where some tokenizers add a
        space."""
        if not stretch:
            return b""
        key = not behind, stretch
        with self._lock:
            column = self._known.pop(key, None)
            if column is not None:
                self._known[key] = column
                return column
        (encoding,) = self._tokenizer.encode_batch_fast([behind + stretch], add_special_tokens=False)
        column = pack(INT32, encoding.ids)[4 if behind else 0 :]
        with self._lock:
            self._remember(key, column)
        return column

    def _remember(self, key: tuple[bool, str], column: bytes) -> None:
        if key in self._known:
            return  # another thread was faster
        self._known[key] = column
        self._characters += len(key[1]) + OVERHEAD
        while self._characters > MOST_CHARACTERS:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._characters -= len(oldest[1]) + OVERHEAD


def _added(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """What the tokenizer puts before and behind each text if it is to add special tokens; None: it cannot be told."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    ids, mask = encoding.ids, encoding.special_tokens_mask
    if 0 not in mask:
        return None
    first, last = mask.index(0), len(mask) - mask[::-1].index(0)
    return pack(INT32, ids[:first]), pack(INT32, ids[last:])
