"""A step on its way: its columns while it is planned, and what it must be answered with once it is sent."""

from array import array
from typing import NamedTuple

from tgi.kernel.messages import Result, Slot, Step
from tgi.kernel.pack import INT32, pack_ints
from tgi.scheduler.lane import ONE, Lane
from tgi.scheduler.prompts import Telling, told_fit
from tgi.scheduler.request import Client, Request
from tgi.scheduler.tokens import tops_fit


class Section(NamedTuple):
    """Rows of a step that are a whole lane, as it was when the step was planned."""

    client: Client
    begin: int  # the first of them among the drawing rows
    end: int
    rids: bytes  # uint32
    ids: "list[array[int]]"
    stops: list[frozenset[int]]
    union: set[int]  # no other id is in any of these


class Flight(NamedTuple):
    """A step that was sent and not yet answered."""

    step: Step
    drawing: list[Request]  # the rows that draw, in their order
    sections: list[Section]  # the first of these
    last: list[Request]  # those of them that draw their last token, because there may be no more
    prefilling: list[Request]  # rows of chunks that do not finish their prompt
    telling: list[Telling]  # the rows that tell logprobs of their prompts, in their order
    decode_rows: int
    prefill_tokens: int
    admitted: int  # requests that came from the queue
    joined: bool  # they joined others that ran already
    sent: float
    drafts: list[int]  # of each decode row, which are the first that draw; empty if none has any
    left: int  # `Batch.left` when it was planned: as long as that is the same, all rows are of requests that are there

    @property
    def requests(self) -> list[Request]:
        """Those that have a row."""
        return self.drawing + self.prefilling

    @property
    def in_order(self) -> list[Request]:
        """The same in the order of the step's rows."""
        drawing, prefilling = iter(self.drawing), iter(self.prefilling)
        return [next(drawing if draws else prefilling) for draws in self.step.draws]

    @property
    def method(self) -> str:
        """TGI's word for what it computes."""
        return "prefill" if self.prefill_tokens else "decode"

    def fault(self, result: Result, vocab_size: int) -> str:
        """In what a result does not answer this step; "" if it does."""
        number, rows = self.step.number, len(self.drawing)
        if result.number != number:
            return f"the result of step {result.number} came where that of step {number} was due"
        drawn = rows
        if result.counts != b"\1" * rows:
            if not self._fits(result.counts):
                return (
                    f"the result of step {number} does not have a token for each of {rows} rows and at most its drafts"
                )
            drawn = sum(result.counts)
        if len(result.ids) != 4 * drawn or len(result.logprobs) != 4 * drawn:
            return f"the result of step {number} does not have an id and a logprob for each of {drawn} tokens"
        if len(result.faults) not in (0, len(self.step.draws)):
            return f"the result of step {number} names {len(result.faults)} faults for {len(self.step.draws)} rows"
        if not tops_fit(result, drawn):
            return f"the columns of likeliest tokens in the result of step {number} do not fit its {drawn} tokens"
        if not told_fit(result, self.telling, vocab_size):
            return f"the result of step {number} does not have the logprobs of the prompts' tokens that it computed"
        return ""

    def _fits(self, counts: bytes) -> bool:
        """Whether each drawing row can have got so many tokens."""
        most = [1 + drafts for drafts in self.drafts] + [1] * (len(self.drawing) - len(self.drafts))
        return len(counts) == len(most) and all(1 <= count <= one for count, one in zip(counts, most, strict=True))


class Outline:
    """A step that is being planned: first the decode rows, in columns, then the chunks of prompts."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.page_slots: list[bytes] = []  # int32
        self.page_ids: list[int] = []
        self.rows = array(INT32)
        self.starts = array(INT32)
        self.chunks: list[tuple[int, int, int, bool]] = []  # slot, start, tokens, whether it draws
        self.drafts: list[int] = []  # as in Flight
        self.guesses: list[bytes] = []  # of each row in `drafts`: the ids, int32
        self.drawing: list[Request] = []
        self.sections: list[Section] = []
        self.last: list[Request] = []
        self.prefilling: list[Request] = []
        self.telling: list[Telling] = []

    def decode(self, request: Request) -> None:
        """A row for one request in a lane."""
        lane = request.lane
        assert lane is not None
        start = lane.starts[request.place]
        self.drawing.append(request)
        self.rows.append(request.slot)
        self.starts.append(start)
        lane.move(request, start + 1)

    def decode_lane(self, client: Client, lane: Lane) -> None:
        """A row for each request in a lane."""
        begin = len(self.drawing)
        self.drawing += lane.requests
        self.rows += lane.slots
        self.starts += lane.starts
        columns = lane.rids.tobytes(), lane.ids.copy(), lane.stops.copy()
        self.sections.append(Section(client, begin, len(self.drawing), *columns, lane.union))
        lane.advance()

    def flight(self, number: int, epoch: int, joined: bool, left: int, now: float) -> Flight:
        """The outline as a step to send."""
        decode_rows, prefill_tokens = len(self.rows), 0
        rows, starts, counts, draws = self.rows.tobytes(), self.starts.tobytes(), ONE * decode_rows, b"\1" * decode_rows
        if self.chunks:
            slots, begins, lengths, ends = zip(*self.chunks, strict=True)
            rows += pack_ints(slots)
            starts += pack_ints(begins)
            counts += pack_ints(lengths)
            draws += bytes(ends)
            prefill_tokens = sum(lengths)
        pages = b"".join(self.page_slots), pack_ints(self.page_ids)
        step = Step(number, epoch, self.slots, *pages, rows, starts, counts, draws)
        if self.drafts:
            column = pack_ints(self.drafts) + bytes(4 * len(self.chunks))
            step = step._replace(drafts=column, draft_ids=b"".join(self.guesses))
        return Flight(
            step,
            self.drawing,
            self.sections,
            self.last,
            self.prefilling,
            self.telling,
            decode_rows,
            prefill_tokens,
            len(self.slots),
            joined and bool(self.slots),
            now,
            self.drafts,
            left,
        )
