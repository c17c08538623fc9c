"""The adapters that requests may choose among, and the requests to change that, each until it is answered."""

from tgi.kernel.link import Peer
from tgi.kernel.messages import Adapt, Adapted
from tgi.kernel.presence import Adapter
from tgi.tokenizer.request import Request


class Adapters:
    """What the floors below have told, and what is asked of them."""

    def __init__(self) -> None:
        self.loaded: list[Adapter] = []
        self._digests: dict[str, bytes] = {}
        self._asked: dict[int, tuple[Peer, Adapt]] = {}  # by our rids: who asked for what

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._asked

    def told(self, loaded: list[Adapter]) -> None:
        """Takes what a Status says."""
        if loaded != self.loaded:
            self.loaded = loaded
            self._digests = {adapter.name: adapter.digest for adapter in loaded}

    def give(self, request: Request) -> str:
        """Gives a request the adapter that it names. Why that cannot be, for the client; "" if it can.

        One that has ids goes on with the adapter that drew them, or fails where that is gone.
        """
        sampling = request.asked.sampling
        if not sampling.adapter or (request.asked.resume and sampling.adapter_digest):
            return ""
        if (digest := self._digests.get(sampling.adapter)) is None:
            return f"`adapter_id` {sampling.adapter} not found"
        request.asked = request.asked._replace(sampling=sampling._replace(adapter_digest=digest))
        return ""

    def ask(self, rid: int, api: Peer, adapt: Adapt) -> Adapt:
        """An api wants a change. Returns what the scheduler is to be sent under this rid."""
        self._asked[rid] = (api, adapt)
        return adapt._replace(rid=rid)

    def again(self) -> list[Adapt]:
        """What a scheduler that takes another's place is to be sent."""
        return [adapt._replace(rid=rid) for rid, (_, adapt) in self._asked.items()]

    def answered(self, answer: Adapted) -> tuple[Peer, Adapted] | None:
        """The scheduler's answer: who is to hear of it, and as what."""
        if (asked := self._asked.pop(answer.rid, None)) is None:
            return None
        api, adapt = asked
        return api, answer._replace(rid=adapt.rid)

    def api_gone(self, api: Peer) -> None:
        """Its requests are answered to nobody."""
        self._asked = {rid: asked for rid, asked in self._asked.items() if asked[0] != api}
