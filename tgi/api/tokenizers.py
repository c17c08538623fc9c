"""The tokenizers of this front end: what is known of each, and which one gets a request."""

from tgi.api.downstream import Connection
from tgi.api.requests import LiveRequest
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.protocol import Status

# A tokenizer whose work has made no progress for this long gets no new request if there is another.
STUCK_SECONDS = 2.0


class TokenizerConnection(Connection[LiveRequest]):
    """One tokenizer, and the requests that are assigned to it."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.status: Status | None = None

    @property
    def can_compute(self) -> bool:
        """Whether a request sent to it now would be computed, by what is known of it."""
        status = self.status
        return status is not None and status.ready and status.healthy and status.limits is not None and not self.silent

    def has_adapter(self, name: str) -> bool:
        """Whether the schedulers of this tokenizer have an adapter; "": none is needed."""
        return not name or (self.status is not None and any(one.name == name for one in self.status.adapters))

    @property
    def stuck(self) -> bool:
        """Whether its work makes no progress."""
        return (self.beat.progress_age_ms or 0) > 1000 * STUCK_SECONDS


def choose_tokenizer(tokenizers: list[TokenizerConnection], request: LiveRequest) -> TokenizerConnection | None:
    """The tokenizer with the fewest requests, ready ones first, and those that make progress. A request that may be
    resumed goes where its key leads every front end. None if no tokenizer responds."""
    adapter = request.adapter
    return min(
        [tokenizer for tokenizer in tokenizers if tokenizer.responds],
        key=lambda tokenizer: (
            tokenizer.status is None or not tokenizer.status.ready,
            tokenizer.stuck,
            adapter != "" and not tokenizer.has_adapter(adapter),
            request.tokenizer_rank(tokenizer.replica_id),
            len(tokenizer.requests),
        ),
        default=None,
    )
