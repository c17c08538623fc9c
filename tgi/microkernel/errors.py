"""Errors of the whole program: UserError for users, ProtocolError for invalid frames."""

# Exit code of a process with an error that a restart cannot fix.
FATAL = 3


class UserError(Exception):
    """An error that the user can fix. The text says what happened, what was expected and what to do.

    The command line prints it without a traceback and exits with `code`.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class ProtocolError(Exception):
    """A frame that is not a valid message: wrong tag, wrong type, too large. The text names the field."""
