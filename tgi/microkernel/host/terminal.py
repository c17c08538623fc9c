"""The terminal that a server was started from: its hang-up ends the server, while any other SIGHUP reloads files. And
what a terminal can show."""

import os
import select
import signal
from typing import TextIO


class ControllingTerminal:
    """The controlling terminal of this process, if it has one. To be created before SIGHUP gets a handler."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: the server outlives its terminal
            return
        try:
            self._descriptor = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:
            return  # a service or a container: there is no terminal

    def has_hung_up(self) -> bool:
        """Whether the terminal was closed, or the connection to it was lost."""
        if self._descriptor is None:
            return False
        poll = select.poll()
        poll.register(self._descriptor, 0)  # POLLHUP is always reported
        return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def writable(stream: TextIO, text: str, plain: str) -> str:
    """The text, or `plain` where the encoding of the stream lacks it."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return plain
    return text
