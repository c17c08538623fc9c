"""Tokenizers as the scheduler's neighbours: they check everything they hear about the requests that they have."""

from typing import Any

from tests.tops import Tops, split_tops
from tgi.kernel.link import Peer
from tgi.kernel.messages import End, PromptLogprobs, Sampling, Tokens, encode
from tgi.kernel.pack import floats, ints, uints
from tgi.kernel.presence import Status

GREEDY = Sampling(1)


class Asked:
    """A request as its tokenizer knows it."""

    def __init__(
        self,
        prompt: list[int],
        new: int,
        stop_ids: list[int],
        sampling: Sampling,
        resume: list[int],
        prompt_top_n: int | None = None,
    ) -> None:
        self.prompt = prompt
        self.new = new
        self.stop_ids = stop_ids
        self.sampling = encode(sampling)
        self.salt = sampling.adapter_digest
        self.asks = sampling.top_n > 0
        self.ids = list(resume)
        self.tops: list[Tops] = []  # beside each id that was sent
        self.prompt_top_n = prompt_top_n  # None: the logprobs of the prompt are not wanted
        self.told: list[float] = []  # logprobs of the prompt, from its second token on
        self.told_tops: Tops = []  # all beside them
        self.end: End | None = None
        self.told_to_stop = False
        self.resumed = len(resume)  # ids that it had when it was last submitted

    @property
    def tells(self) -> int:
        """How many logprobs of its prompt there are to be told."""
        return 0 if self.prompt_top_n is None else len(self.prompt) - 1


class Tokenizer:
    """One life of a tokenizer: holds the core to its promises."""

    def __init__(self, place: int, life: int) -> None:
        self.peer = Peer("tokenizer", place, f"boot-{life}".encode())
        self.requests: dict[int, Asked] = {}
        self.statuses: list[Status] = []
        self.longest = 0  # run of tokens for one request in one message

    def hears(self, message: Any) -> None:
        if isinstance(message, Status):
            self.statuses.append(message)
            return
        if isinstance(message, Tokens):
            rids, counts, ids, logprobs = (
                uints(message.rids), uints(message.counts), ints(message.ids), floats(message.logprobs),
            )  # fmt: skip
            assert len(rids) == len(set(rids)) == len(counts)
            assert len(ids) == len(logprobs) == sum(counts)
            assert min(counts) >= 1
            self.longest = max(self.longest, *counts)
            tops = split_tops(message) or [[]] * len(ids)
            assert any(tops) == bool(message.top_counts), "columns of nothing"
            each = [rid for rid, count in zip(rids, counts, strict=True) for _ in range(count)]
            for rid, token, top in zip(each, ids, tops, strict=True):
                asked = self.requests[rid]
                assert asked.end is None, "a token after the end"
                assert not asked.told_to_stop, "a token after a cancel"
                assert len(asked.told) == asked.tells, "a token before all logprobs of the prompt"
                assert bool(top) == asked.asks
                asked.ids.append(token)
                asked.tops.append(top)
            return
        assert isinstance(message, End | PromptLogprobs), message
        asked = self.requests[message.rid]
        if isinstance(message, PromptLogprobs):
            assert asked.end is None, "logprobs after the end"
            assert not asked.told_to_stop, "logprobs after a cancel"
            assert asked.prompt_top_n is not None, "nobody asked for these"
            assert len(asked.ids) == asked.resumed, "logprobs of the prompt after a token"
            asked.told += floats(message.logprobs)
            asked.told_tops += zip(ints(message.top_ids), floats(message.top_logprobs), strict=True)
            return
        assert asked.end is None, "two ends"
        asked.end = message
        assert message.prompt_tokens == len(asked.prompt)
        assert message.generated_tokens == len(asked.ids)
        assert message.queue_us >= 0
        assert message.inference_us >= 0
