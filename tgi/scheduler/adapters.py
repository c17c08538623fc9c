"""Which adapters the worker has, and the requests to change that: each is kept until a worker has answered it."""

import logging
from itertools import count

from tgi.kernel.link import Peer
from tgi.kernel.messages import Adapt, Adapted
from tgi.kernel.presence import Adapter

log = logging.getLogger(__name__)


class Adapters:
    """A worker that takes another's place loads what the settings name, and is made to load and unload what differs
    from what its predecessor had; until that is done it `lacks` something. Then it is asked what is not answered yet.

    Changes are sent when no step is under way, and no step is sent before them: so the worker has what it was known to
    have when a step was planned, as long as that takes.
    """

    def __init__(self) -> None:
        self.loaded: list[Adapter] = []  # what tokenizers are told: as the latest worker has it, or is to have it
        self._there: list[Adapter] = []  # what the worker has told
        self._asked: dict[int, tuple[Peer, Adapt]] = {}  # by our numbers: who asked for what
        self._lacking: dict[int, Adapt] = {}
        self._numbers = count(1)
        self._ordered: dict[int, str] = {}  # what the worker has been sent and not answered: the names
        self._orders: list[Adapt] = []  # to be sent once no step is under way
        self._known = False  # whether `loaded` was ever told
        self._open = False  # whether this worker has told what it has

    @property
    def lacks(self) -> bool:
        """Whether the worker is still to become what the one before it was."""
        return bool(self._lacking)

    @property
    def waits(self) -> bool:
        """Whether there is something to `take` before another step is sent."""
        return bool(self._orders)

    def take(self) -> list[Adapt]:
        """What the worker is to be sent now that no step is under way."""
        orders, self._orders = self._orders, []
        return orders

    def ask(self, tokenizer: Peer, adapt: Adapt) -> None:
        """A tokenizer wants a change."""
        number = next(self._numbers)
        self._asked[number] = (tokenizer, adapt)
        if self._open:
            self._order({number: adapt})

    def told(self, loaded: list[Adapter]) -> None:
        """A worker that is ready says what it has."""
        orders: dict[int, Adapt] = {}
        if not self._open:
            self._open = True
            if self._known:
                self._lacking = {next(self._numbers): change for change in _changes(loaded, self.loaded)}
            orders = self._lacking | {number: adapt for number, (_, adapt) in self._asked.items()}
        self._there, self._known = loaded, True
        self._show()
        self._order(orders)

    def _order(self, orders: dict[int, Adapt]) -> None:
        self._ordered |= {number: adapt.name for number, adapt in orders.items()}
        self._orders += [adapt._replace(rid=number) for number, adapt in orders.items()]

    def has(self, digest: bytes) -> bool:
        """Whether the worker is sure to have the adapter of this content: it says so, and is not to change it."""
        changing = self._ordered.values()
        return any(adapter.digest == digest and adapter.name not in changing for adapter in self._there)

    def answered(self, answer: Adapted) -> tuple[Peer, Adapted] | None:
        """The worker's answer: who is to hear of it, and as what."""
        self._ordered.pop(answer.rid, None)
        if (change := self._lacking.pop(answer.rid, None)) is not None:
            if answer.error:
                log.error("The restarted worker has not got adapter %s again: %s", change.name, answer.error)
            self._show()
            return None
        if (asked := self._asked.pop(answer.rid, None)) is None:
            log.debug("nobody waits for this answer: the tokenizer that asked is gone")
            return None
        tokenizer, adapt = asked
        return tokenizer, answer._replace(rid=adapt.rid)

    def _show(self) -> None:
        if not self._lacking:
            self.loaded = self._there

    def worker_gone(self) -> None:
        """What it has not answered is asked again of the next one."""
        self._open = False
        self._lacking = {}
        self._ordered = {}
        self._orders = []

    def tokenizer_gone(self, tokenizer: Peer) -> None:
        """Its requests are answered to nobody."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0] != tokenizer}


def _changes(there: list[Adapter], wanted: list[Adapter]) -> list[Adapt]:
    """What makes of the adapters that are there those that are wanted, but for the rids."""
    has = {adapter.name: adapter.path for adapter in there}
    wants = {adapter.name: adapter.path for adapter in wanted}
    unloads = [Adapt(0, name, "") for name in has if name not in wants]
    return unloads + [Adapt(0, name, path) for name, path in wants.items() if has.get(name) != path]
