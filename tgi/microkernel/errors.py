"""Errors of the whole program: UserError for users, ProtocolError for invalid frames. And the exception ForkedRole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Exit code of a process with an error that a restart cannot fix.
FATAL = 3


class UserError(Exception):
    """An error that the user can fix. The text says what happened, what was expected and what to do.

    The command line prints it without a traceback and exits with `code`.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class ForkedRole(BaseException):
    """Leaves all functions of a command in a process that a fork server has forked for a role: see fork_server.py."""

    def __init__(self, arguments: list[str]) -> None:
        """`arguments`: of `run_role`."""
        super().__init__(*arguments)
        self.arguments = arguments


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turns an OSError of a block that reads `path`, or files in it, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be read: {error.strerror or error}. Check the name, and that this user "
            "may read it and the directories above it."
        ) from error


class ProtocolError(Exception):
    """A frame that is not a valid message: wrong tag, wrong type, too large. The text names the field."""
