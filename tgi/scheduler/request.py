"""One request as the scheduler knows it: its ids, where it is, and which slot and pages it holds."""

from array import array
from typing import TYPE_CHECKING

from tgi.kernel.messages import Reason, State, transition
from tgi.kernel.pack import INT32

if TYPE_CHECKING:
    from tgi.scheduler.outbox import Client

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
        "hashes",
        "ids",
        "last_start",
        "limit",
        "order",
        "pages",
        "planned",
        "prompt_tokens",
        "publish_at",
        "received",
        "rid",
        "room",
        "salt",
        "sampling",
        "since",
        "slot",
        "state",
        "stop_ids",
        "strikes",
        "wanted",
    )

    def __init__(
        self,
        client: "Client",
        rid: int,
        order: int,
        received: float,
        *,
        prompt: bytes,
        resume: bytes,
        max_new_tokens: int,
        sampling: bytes,
        stop_ids: frozenset[int],
        salt: bytes,
    ) -> None:
        """Raises ValueError if `prompt` or `resume` is no int32 column."""
        self.client = client
        self.rid = rid
        self.order = order  # of arrival; a smaller number goes first
        self.received = received
        self.first_planned: float | None = None
        self.ids = array(INT32, prompt)
        self.prompt_tokens = len(self.ids)
        self.ids.frombytes(resume)
        self.limit = self.prompt_tokens + max_new_tokens  # so many ids end it
        self.last_start = self.limit - 2  # the position that the last decode row computes
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.salt = salt
        self.state = State.QUEUED
        self.strikes = 0  # deaths of workers that were computing it, since it last got on
        self.cached_tokens = 0  # of the prompt, found in the prefix cache when it was first admitted
        self.hashes: list[bytes] = []  # of its full pages, as far as they were asked for
        self.wanted = 0  # pages that were missing when it was last refused admission
        self.leave_slot()

    def leave_slot(self) -> None:
        """It holds nothing at the worker; results of steps under way no longer concern it."""
        self.slot = NO_SLOT
        self.pages: list[int] = []
        self.room = 0  # tokens that its pages hold
        self.planned = 0  # positions below this are computed by the steps sent so far
        self.since = NEVER  # the first step of its stay in the slot
        self.publish_at = NEVER  # when it has more ids than this, another page is full and computed

    def become(self, event: str) -> None:
        """Moves to the state that the table of transitions gives."""
        self.state = transition(self.state, event)

    @property
    def generated(self) -> int:
        """Ids behind the prompt, resumed ones included."""
        return len(self.ids) - self.prompt_tokens

    @property
    def suspected(self) -> bool:
        """Whether it is to be tried alone."""
        return self.strikes >= SUSPECT

    def finished(self) -> Reason | None:
        """Why it is complete, if it is. Length counts before an end token, as in TGI."""
        if len(self.ids) >= self.limit:
            return Reason.LENGTH
        return Reason.EOS if self.generated and self.ids[-1] in self.stop_ids else None
