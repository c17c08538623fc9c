"""One request as the scheduler knows it: its ids, where it is, and which slot and pages it holds; and who asked."""

from array import array
from functools import lru_cache

from tgi.kernel.link import Peer
from tgi.kernel.messages import MOST_PROMPT_TOPS, Add, End, Reason
from tgi.kernel.pack import INT32, ints
from tgi.kernel.states import QUEUED
from tgi.scheduler.lane import Lane
from tgi.scheduler.lookup import Lookup
from tgi.scheduler.model import Model
from tgi.scheduler.tokens import NOTHING, Columns, Row, Top

NO_SLOT = -1
# A step number that is never reached: results do not concern a request without a slot.
NEVER = 1 << 62
# So many times a worker may die under a request that does not get on, before the request is tried alone.
SUSPECT = 2


class Request:
    """Ids are positions 0, 1, …: the prompt, then what was generated. The token at position p is computed (its keys
    and values are written) by a row that covers p; the row that computes the last known position draws the next."""

    __slots__ = (
        "cached_tokens",
        "client",
        "first_planned",
        "guesser",
        "ids",
        "lane",
        "last_start",
        "limit",
        "order",
        "pages",
        "place",
        "planned",
        "prefix",
        "prompt_from",
        "prompt_tokens",
        "prompt_top_n",
        "published",
        "received",
        "rid",
        "room",
        "salt",
        "sampling",
        "shares",
        "since",
        "slot",
        "state",
        "stop_ids",
        "strikes",
        "turn",
        "wanted",
    )

    prompt_from: int  # from this position on the logprobs of the prompt's tokens are still to be told
    # What it is given with its slot; without one these mean nothing.
    pages: list[int]
    room: int  # tokens that its pages hold
    planned: int  # positions below this are computed by the steps sent so far; in a lane, that knows better
    shares: bool  # whether others may find its pages, and it theirs
    published: int  # so many of its pages were found, or can be
    prefix: bytes  # what the ids in these are called
    place: int  # in its lane
    turn: int  # after so many steps of the lane it needs a page, or draws the last token

    def __init__(self, client: "Client", add: Add, order: int, received: float) -> None:
        """Raises ValueError or ProtocolError if a column of `add` is none, or a field has no meaning."""
        self.client = client
        self.rid = add.rid
        self.order = order  # of arrival; a smaller number goes first
        self.received = received
        self.first_planned: float | None = None
        self.ids = ids = array(INT32, add.prompt)
        self.prompt_tokens = self.prompt_from = tokens = len(ids)
        self.prompt_top_n = 0
        if add.prompt_from or add.prompt_top_n:
            self._tell(add)
        if add.resume:
            ids.frombytes(add.resume)
        self.limit = limit = tokens + add.max_new_tokens  # so many ids end it
        self.last_start = limit - 2  # the position that the last decode row computes
        self.sampling = add.sampling
        self.stop_ids = _id_set(add.stop_ids)
        self.salt = add.salt
        self.state = QUEUED
        self.strikes = 0  # deaths of workers that were computing it, since it last got on
        self.cached_tokens = 0  # of the prompt, found in the prefix cache when it was first admitted
        self.guesser: Lookup | Model | None = None  # whom its drafts come from; None: it has none
        self.wanted = 0  # pages that were missing when it was last refused admission
        self.lane: Lane | None = None  # while it decodes
        self.slot = NO_SLOT
        self.since = NEVER  # the first step of its stay in the slot: only results from this on concern it

    def _tell(self, add: Add) -> None:
        """Logprobs of its prompt are wanted."""
        if add.prompt_from < 0 or not 0 <= add.prompt_top_n <= MOST_PROMPT_TOPS:
            raise ValueError(f"prompt_from is {add.prompt_from} and prompt_top_n {add.prompt_top_n}")
        self.prompt_from = min(add.prompt_from or self.prompt_tokens, self.prompt_tokens)
        self.prompt_top_n = add.prompt_top_n

    def grow(self, page: int, size: int) -> None:
        """It has got another page, for so many tokens."""
        self.pages.append(page)
        self.room += size
        if self.lane is not None:
            self.lane.has_room(self)

    @property
    def generated(self) -> int:
        """Ids behind the prompt, resumed ones included."""
        return len(self.ids) - self.prompt_tokens

    @property
    def suspected(self) -> bool:
        """Whether it is to be tried alone."""
        return self.strikes >= SUSPECT

    @property
    def tells(self) -> bool:
        """Whether logprobs of its prompt are still to be told."""
        return self.prompt_from < self.prompt_tokens

    @property
    def scored(self) -> bool:
        """Whether no token is drawn: it ends when all logprobs of its prompt are told."""
        return self.limit == self.prompt_tokens

    def finished(self) -> Reason | None:
        """Why it is complete, if it is. Length counts before an end token, as in TGI."""
        if len(self.ids) >= self.limit:
            return Reason.LENGTH
        return Reason.EOS if self.generated and self.ids[-1] in self.stop_ids else None

    def end(self, reason: Reason, message: str, now: float) -> End:
        """What its client is told when it has ended at `now`."""
        begun = now if self.first_planned is None else self.first_planned
        return End(
            self.rid,
            reason,
            message,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated,
            cached_tokens=self.cached_tokens,
            queue_us=int((begun - self.received) * 1e6),
            inference_us=int((now - begun) * 1e6),
        )


class Client:
    """One life of a tokenizer: its requests by its own numbers, and its rows of the result being handled."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.requests: dict[int, Request] = {}
        self.columns: Columns = NOTHING
        self.rows: list[Row] = []  # behind those in the columns
        self.tops: list[Top] = []  # one for each row, or none at all; where there are some, no columns

    def take_rows(self) -> tuple[Columns, list[Row], list[Top]]:
        """The rows and what goes with them; then there are none."""
        rows = self.columns, self.rows, self.tops
        self.columns, self.rows, self.tops = NOTHING, [], []
        return rows


@lru_cache(maxsize=64)
def _id_set(column: bytes) -> frozenset[int]:
    """The ids of a column. Nearly all requests have the same few."""
    return frozenset(ints(column))
