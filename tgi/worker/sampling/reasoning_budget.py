"""The reasoning budget of a row: once that many tokens of reasoning are generated, its closing marker is forced.

What is forced depends on the generated ids alone. So it is the same in any batch, with drafts, and after a resumption.
"""

from collections.abc import Callable
from typing import NamedTuple

from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.sampling_params import SamplingParams

WHITESPACE = b" \t\r\n"
# Bytes in which a marker is looked for, longer than any.
MAX_MARKER = 256


class ReasoningMarkers(NamedTuple):
    """What opens and closes the reasoning of an answer."""

    open: bytes  # b"": the answer begins within reasoning
    close: bytes
    close_ids: list[int]  # writes `close`
    special_ids: frozenset[int]  # marks of `open` and `close` that text never equals
    repeats: bool  # reasoning may begin anywhere and again, not only at the beginning


class ReasoningBudget:
    """How much of its budget a row has left. `token_bytes`: the bytes of token ids."""

    def __init__(self, markers: ReasoningMarkers, budget: int, token_bytes: Callable[[list[int]], bytes]) -> None:
        self._markers = markers
        self._left = budget
        self._token_bytes = token_bytes
        self._open: bool | None = not markers.open  # whether it is within reasoning; None: none can follow
        self._recent = b""  # the text in which a marker may be incomplete
        self._ids: list[int] = []  # the last tokens of the reasoning, fewer than write the marker

    @classmethod
    def from_params(cls, params: SamplingParams, token_bytes: Callable[[list[int]], bytes]) -> "ReasoningBudget | None":
        """None without a budget. Raises ValueError for a closing marker that is no text."""
        if not params.reasoning_close_ids:
            return None
        special = frozenset(unpack_int32(params.reasoning_special_ids))
        close_ids = list(unpack_int32(params.reasoning_close_ids))
        opening, close = (
            b"".join(_marked_bytes(token, special, token_bytes) for token in ids).strip(WHITESPACE)
            for ids in (unpack_int32(params.reasoning_open_ids), close_ids)
        )
        if not close:
            raise ValueError("what ends its reasoning is no text")
        markers = ReasoningMarkers(opening, close, close_ids, special, params.reasoning_repeats and bool(opening))
        return cls(markers, params.reasoning_budget, token_bytes)

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        if not self._open or self._left > 0:
            return None
        close = self._markers.close_ids
        for written in range(min(len(self._ids), len(close) - 1), 0, -1):
            if self._ids[-written:] == close[:written]:
                return close[written]
        return close[0]

    def consume(self, token: int) -> None:
        if self._open is None:
            return
        markers = self._markers
        text = self._recent + _marked_bytes(token, markers.special_ids, self._token_bytes)
        if self._open:
            self._left -= 1
            self._ids = [*self._ids, token][-len(markers.close_ids) :]
        elif not markers.repeats:
            text = text.lstrip(WHITESPACE)
            if not text.startswith(markers.open) and not markers.open.startswith(text):
                self._open = None  # the answer begins without reasoning
                return
        marker = markers.close if self._open else markers.open
        before, found, text = text.rpartition(marker)
        if found:
            self._ids = []
            self._open = not self._open if markers.repeats or not self._open else None
        self._recent = (text if found else before + text)[-MAX_MARKER:]

    def copy(self) -> "ReasoningBudget":
        """A budget that goes on from here by itself."""
        made = ReasoningBudget(self._markers, self._left, self._token_bytes)
        made._open, made._recent, made._ids = self._open, self._recent, self._ids
        return made


def _marked_bytes(token: int, special: frozenset[int], token_bytes: Callable[[list[int]], bytes]) -> bytes:
    """The bytes of a token; of a special one, bytes that no text has."""
    return b"\xff%d\xff" % token if token in special else token_bytes([token])
