"""The work register: what a process has in hand right now, in shared memory, for those who must know when it has died.

Requests are stated by their fingerprints as numbers (8 bytes), each with one store. A queued request is not in it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tgi.microkernel.mapped_file import map_file

FINGERPRINT_BYTES = 8
# Words of the register, of 8 bytes each: the process's boot id, what its threads work on, whether it works on the
# batch, and the batch.
_BOOT, _UNITS, _BATCH_IN_HAND, _SLOTS, _WORDS = 0, 1, 15, 16, 4096


class WorkRegister:
    """The register of one process, in any buffer. The process writes it, others only read.

    `units[k] = fingerprint` states what thread k works on, 0 that it works on no request. `slots[k] = fingerprint`
    states a request of the batch, which is in hand after `set_batch_in_hand(True)`.
    """

    def __init__(self, buffer: Any = None) -> None:
        """`buffer`: writable, as large as a register; None: memory of this process, for code that runs without one."""
        words = memoryview(bytearray(FINGERPRINT_BYTES * _WORDS) if buffer is None else buffer).cast("B").cast("Q")
        self._words = words
        self.units = words[_UNITS:_BATCH_IN_HAND]
        self.slots = words[_SLOTS:]

    @classmethod
    def open(cls, path: Path) -> "WorkRegister":
        """The register in this file, which is created if it is missing. It outlives its process."""
        return cls(map_file(path, FINGERPRINT_BYTES * _WORDS))

    def begin_life(self, boot: bytes) -> None:
        """A new process takes the register: nothing is in hand."""
        self._words[:] = memoryview(bytes(FINGERPRINT_BYTES * _WORDS)).cast("Q")
        self._words[_BOOT] = fingerprint_number(boot)

    @property
    def boot(self) -> bytes:
        """The boot id of the process that wrote it last."""
        return _fingerprint(self._words[_BOOT])

    def set_batch_in_hand(self, in_hand: bool) -> None:
        """States whether the process works on the batch as a whole."""
        self._words[_BATCH_IN_HAND] = in_hand

    def in_hand(self) -> bytes:
        """The fingerprints in hand, 8 bytes each, each once."""
        words: Iterable[int] = self.units
        if self._words[_BATCH_IN_HAND]:
            words = [*self.units, *self.slots]
        return b"".join(dict.fromkeys(_fingerprint(word) for word in words if word))


def split_fingerprints(column: bytes) -> list[bytes]:
    """The fingerprints of a column as `in_hand` returns it."""
    return [column[at : at + FINGERPRINT_BYTES] for at in range(0, len(column), FINGERPRINT_BYTES)]


def fingerprint_number(fingerprint: bytes) -> int:
    """A fingerprint as the register holds it. 0, which states nothing, for any that has another length."""
    return int.from_bytes(fingerprint, "little") if len(fingerprint) == FINGERPRINT_BYTES else 0


def _fingerprint(number: int) -> bytes:
    return number.to_bytes(FINGERPRINT_BYTES, "little")
