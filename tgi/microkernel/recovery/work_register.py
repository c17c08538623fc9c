"""The work register: what a process has in progress right now, in shared memory, for those who must know when it has
died.

Requests are registered by their fingerprints as numbers (8 bytes), each with one store. A queued request is not in it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tgi.microkernel.host.mapped_file import map_file
from tgi.microkernel.messages.protocol import RequestContext

FINGERPRINT_BYTES = 8
# Words of the register, of 8 bytes each: the process's boot id, what its threads work on, whether it works on the
# batch, and the batch.
_BOOT, _UNITS, _BATCH_IN_HAND, _SLOTS, _WORDS = 0, 1, 15, 16, 4096


class WorkRegister:
    """The register of one process, in any buffer. The process writes it, others only read.

    `units[k]` states the fingerprint of what thread k works on, 0 that it works on no request: `working_on`.
    `slots[k] = fingerprint` registers a request of the batch, which is in progress during `working_on_batch`.
    """

    def __init__(self, buffer: Any = None) -> None:
        """`buffer`: writable, as large as a register; None: memory of this process, for code that runs without one."""
        words = memoryview(bytearray(FINGERPRINT_BYTES * _WORDS) if buffer is None else buffer).cast("B").cast("Q")
        self._words = words
        self.units = words[_UNITS:_BATCH_IN_HAND]
        self.slots = words[_SLOTS:]
        self._end = [_EndOfWork(words, word) for word in range(_BATCH_IN_HAND + 1)]

    @classmethod
    def open(cls, path: Path) -> "WorkRegister":
        """The register in this file, which is created if it is missing. It outlives its process."""
        return cls(map_file(path, FINGERPRINT_BYTES * _WORDS))

    def begin_life(self, boot: bytes) -> None:
        """A new process takes the register: nothing is in progress."""
        self._words[:] = memoryview(bytes(FINGERPRINT_BYTES * _WORDS)).cast("Q")
        self._words[_BOOT] = fingerprint_number(boot)

    @property
    def boot(self) -> bytes:
        """The boot id of the process that wrote it last."""
        return _fingerprint(self._words[_BOOT])

    def working_on(self, request: RequestContext, thread: int = 0) -> "_EndOfWork":
        """`with register.working_on(request):` states that a thread works on this request."""
        self.units[thread] = fingerprint_number(request.fingerprint)
        return self._end[_UNITS + thread]

    def working_on_batch(self) -> "_EndOfWork":
        """`with register.working_on_batch():` states that the process works on the batch as a whole."""
        self._words[_BATCH_IN_HAND] = 1
        return self._end[_BATCH_IN_HAND]

    def in_progress(self) -> bytes:
        """The fingerprints in progress, 8 bytes each, each once."""
        words: Iterable[int] = self.units
        if self._words[_BATCH_IN_HAND]:
            words = [*self.units, *self.slots]
        return b"".join(dict.fromkeys(_fingerprint(word) for word in words if word))


class _EndOfWork:
    """Clears a word at the end of a `with` block, but not for an exception: what it may end was caused by this work."""

    __slots__ = ("_word", "_words")

    def __init__(self, words: "memoryview[int]", word: int) -> None:
        self._words, self._word = words, word

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._words[self._word] = 0


def split_fingerprints(column: bytes) -> list[bytes]:
    """The fingerprints of a column as `in_progress` returns it."""
    return [column[at : at + FINGERPRINT_BYTES] for at in range(0, len(column), FINGERPRINT_BYTES)]


def fingerprint_number(fingerprint: bytes) -> int:
    """A fingerprint as the register holds it. 0, which states nothing, for any that has another length."""
    return int.from_bytes(fingerprint, "little") if len(fingerprint) == FINGERPRINT_BYTES else 0


def _fingerprint(number: int) -> bytes:
    return number.to_bytes(FINGERPRINT_BYTES, "little")
