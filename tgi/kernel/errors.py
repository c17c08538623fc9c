"""Errors that are written for the person at the terminal."""

# Exit code of a process whose user must act: starting it again would only fail again.
FATAL = 3


class UserError(Exception):
    """Something the user can mend. The text says what happened, what was expected and what to do.

    The command line prints it without a traceback and exits with `code`.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class ProtocolError(Exception):
    """A frame that is not a message: wrong tag, wrong type, too large. The text says which field."""
