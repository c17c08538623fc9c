"""Ids of long texts, stretch by stretch between the tokens that stand in them, and the memory of stretches."""

import re
from collections import defaultdict
from collections.abc import Iterable
from os.path import commonprefix
from threading import Lock

from tokenizers import Tokenizer

from tgi.kernel.pack import INT32, pack

# A text of fewer characters is encoded whole, in less than a millisecond.
LONG_TEXT = 2 << 10
# Of stretches that are remembered, with their ids. Characters count as bytes; OVERHEAD is what else each takes.
MOST_BYTES = 32 << 20
OVERHEAD = 300
# Choices on the way to one token in a pattern of them, each of which is a group in another.
DEEPEST = 32


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
            self._named = re.compile(f"({_longest(named)})")
        self._added = _added(tokenizer)
        self._known: dict[tuple[bool, str], bytes] = {}  # the last one that was asked for comes last
        self._bytes = 0  # that these take
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
        self._bytes += _size(key[1], column)
        while self._bytes > MOST_BYTES:
            oldest = next(iter(self._known))
            self._bytes -= _size(oldest[1], self._known.pop(oldest))


def _size(stretch: str, column: bytes) -> int:
    """Bytes that an entry takes, about. Equal texts count alike, which is not so by sys.getsizeof."""
    return len(stretch) + len(column) + OVERHEAD


def _longest(words: Iterable[str], depth: int = 0) -> str:
    """A pattern of the longest of these words that stands at a place. What begins alike is looked at once: some
    tokenizers have thousands of tokens, and trying one after the other would take longer than to encode the text."""
    if depth > DEEPEST:
        return f"(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})"
    alike: dict[str, list[str]] = defaultdict(list)
    for word in words:
        alike[word[:1]].append(word)
    ends = bool(alike.pop("", None))  # one of the words, if none goes on
    begins = [commonprefix(some) for some in alike.values()]  # noqa: RUF071 (of characters)
    choices = [
        re.escape(begin) + _longest([word[len(begin) :] for word in some], depth + 1)
        for begin, some in zip(begins, alike.values(), strict=True)
    ]
    return f"(?:{'|'.join(choices)}){'?' * ends}" if choices else ""


def _added(tokenizer: Tokenizer) -> tuple[bytes, bytes] | None:
    """What the tokenizer puts before and behind each text if it is to add special tokens; None: it cannot be told."""
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
        return None  # of several post-processors the mask tells the last one's alone
    return pack(INT32, ids[:first]), pack(INT32, ids[last:])
