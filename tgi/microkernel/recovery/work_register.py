"""The work register: what a process has in progress right now, in shared memory, for those who must know when it has
died.

Requests are registered by their fingerprints as numbers (8 bytes), each with one store. A queued request is not in it.
"""

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tgi.microkernel.host.mapped_file import map_file
from tgi.microkernel.messages.protocol import RequestContext

FINGERPRINT_BYTES = 8
# Words of the register, of 8 bytes each: the process's boot id, what its threads work on, whether it works on the
# batch, and the batch.
_BOOT, _UNITS, _BATCH_IN_PROGRESS, _SLOTS, _WORDS = 0, 1, 15, 16, 4096


class Named(Protocol):
    """A request, or a message about one. The fingerprint of its context is its name in crash isolation, and b"" that of
    one that is never suspected."""

    @property
    def context(self) -> RequestContext: ...


NamedT = TypeVar("NamedT", bound=Named)


class WorkRegister:
    """The register of one process, in any buffer. The process writes it, others only read.

    `units[k]` states the fingerprint of what thread k works on, 0 that it works on no request: `working_on`.
    `slots[k] = fingerprint` registers a request of the batch, which is in progress during `working_on_batch`.
    """

    def __init__(self, buffer: Any = None) -> None:
        """`buffer`: writable, as large as a register; None: memory of this process, for code that runs without one."""
        words = memoryview(bytearray(FINGERPRINT_BYTES * _WORDS) if buffer is None else buffer).cast("B").cast("Q")
        self._words = words
        self.units = words[_UNITS:_BATCH_IN_PROGRESS]
        self.slots = words[_SLOTS:]
        self._end = [_EndOfWork(words, word) for word in range(_BATCH_IN_PROGRESS + 1)]

    @classmethod
    def open(cls, path: Path) -> "WorkRegister":
        """The register in this file, which is created if it is missing. It outlives its process."""
        return cls(map_file(path, FINGERPRINT_BYTES * _WORDS))

    def begin_life(self, boot: bytes) -> None:
        """A new process takes the register: nothing is in progress."""
        self._words[:] = memoryview(bytes(FINGERPRINT_BYTES * _WORDS)).cast("Q")
        self._words[_BOOT] = int.from_bytes(boot, "little")

    @property
    def boot(self) -> bytes:
        """The boot id of the process that wrote it last."""
        return _fingerprint(self._words[_BOOT])

    def working_on(self, request: RequestContext, thread: int = 0) -> "_EndOfWork":
        """`with register.working_on(request):` states that a thread works on this request."""
        self.units[thread] = register_number(request)
        return self._end[_UNITS + thread]

    def working_on_each(self) -> "_EndOfWork":
        """`with register.working_on_each():` around a loop of the process's own thread over many requests, which states
        each by `units[0] = register_number(...)`."""
        return self._end[_UNITS]

    def working_on_batch(self) -> "_EndOfWork":
        """`with register.working_on_batch():` states that the process works on the batch as a whole."""
        self._words[_BATCH_IN_PROGRESS] = 1
        return self._end[_BATCH_IN_PROGRESS]

    def in_progress(self) -> bytes:
        """The fingerprints in progress, 8 bytes each, each once."""
        words: Iterable[int] = self.units
        if self._words[_BATCH_IN_PROGRESS]:
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


def split_in_progress(column: bytes) -> list[bytes]:
    """The fingerprints of a column as `in_progress` returns it."""
    return [column[at : at + FINGERPRINT_BYTES] for at in range(0, len(column), FINGERPRINT_BYTES)]


def join_in_progress(fingerprints: Iterable[bytes]) -> bytes:
    """The column of these fingerprints, without those of requests that no other process knows by them."""
    return b"".join(one for one in fingerprints if len(one) == FINGERPRINT_BYTES)


def names_of(requests: Iterable[Named]) -> dict[bytes, None]:
    """The fingerprints of those requests that have one, in their order."""
    found = dict.fromkeys(request.context.fingerprint for request in requests)
    found.pop(b"", None)
    return found


def among(requests: Iterable[NamedT], fingerprints: Container[bytes]) -> list[NamedT]:
    """Those of the requests that have one of these fingerprints."""
    return [request for request in requests if request.context.fingerprint in fingerprints]


def register_number(request: RequestContext) -> int:
    """A request as the register holds it. 0, which names none, if its fingerprint has another length."""
    return int.from_bytes(request.fingerprint, "little") if len(request.fingerprint) == FINGERPRINT_BYTES else 0


def _fingerprint(number: int) -> bytes:
    return number.to_bytes(FINGERPRINT_BYTES, "little")
