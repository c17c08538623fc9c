"""The division of one request's answer: what of its tokens may be shown by now is divided into parts."""

from tgi.kernel.messages import Reason
from tgi.tokenizer.answer.divide import Divider, Found
from tgi.tokenizer.answer.formats import Answer
from tgi.tokenizer.answer.marks import MARK, Marks


class Division:
    """The division of a request's answer, behind the curtain of its stop strings."""

    __slots__ = ("_divider", "_marks", "_unseen")

    def __init__(self, answer: Answer, marks: Marks) -> None:
        self._divider = Divider(answer, marks)
        self._marks = marks
        self._unseen = ""

    def push(self, number: int, text: str, held: int, hidden: bool) -> list[Found]:
        """Takes a token and its text, which may be `hidden`; of the visible text so far, `held` characters must not be
        shown yet."""
        self._unseen += self._marks.character(number) if hidden else text
        if not held:
            shown, self._unseen = self._unseen, ""
        else:
            at = len(self._unseen)
            while held:
                at -= 1
                held -= MARK.match(self._unseen, at) is None
            shown, self._unseen = self._unseen[:at], self._unseen[at:]
        return self._divider.feed(shown) if shown else []

    def end(self, reason: str | None) -> list[Found]:
        """What the end of the request lets be shown. What is held back then is a stop string, or was none."""
        last = [] if reason == Reason.STOP else self._divider.feed(self._unseen)
        return last + self._divider.end()
