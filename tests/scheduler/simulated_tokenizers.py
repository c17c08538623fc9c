"""Simulated tokenizers: they check every message about the requests that they have submitted."""

from typing import Any

from tests.tops import Tops, split_tops
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import unpack_float32, unpack_int32, unpack_uint32
from tgi.microkernel.messages.protocol import End, FinishReason, PromptLogprobs, RequestContext, Status, Tokens, encode
from tgi.microkernel.messages.sampling_params import SamplingParams

GREEDY = SamplingParams(1)


class SubmittedRequest:
    """A request as its tokenizer knows it."""

    def __init__(
        self,
        prompt: list[int],
        new: int,
        stop_ids: list[int],
        sampling: SamplingParams,
        resume: list[int],
        prompt_top_n: int | None = None,
        context: RequestContext = RequestContext(),  # noqa: B008
    ) -> None:
        self.prompt = prompt
        self.new = new  # max_new_tokens
        self.stop_ids = stop_ids
        self.sampling = encode(sampling)
        self.cache_salt = sampling.adapter_digest
        self.wants_tops = sampling.top_n > 0
        self.ids = list(resume)
        self.tops: list[Tops] = []  # the top-n alternatives of each id that was received
        self.prompt_top_n = prompt_top_n  # None: no prompt logprobs
        self.prompt_logprobs: list[float] = []  # received, from the prompt's second token on
        self.prompt_tops: Tops = []  # of all prompt tokens, concatenated
        self.context = context
        self.end: End | None = None
        self.cancelled_by_client = False
        self.resumed = len(resume)  # number of ids when it was last submitted

    @property
    def expected_prompt_logprobs(self) -> int:
        """How many prompt logprobs it must receive."""
        return 0 if self.prompt_top_n is None else len(self.prompt) - 1


class SimulatedTokenizer:
    """One life of a tokenizer process. Asserts that the messages it receives are legal."""

    def __init__(self, index: int, life: int) -> None:
        self.peer = PeerId("tokenizer", index, f"boot-{life}".encode())
        self.requests: dict[int, SubmittedRequest] = {}
        self.statuses: list[Status] = []
        self.longest_run = 0  # tokens of one request in one message

    def receive(self, message: Any) -> None:
        if isinstance(message, Status):
            self.statuses.append(message)
            return
        if isinstance(message, Tokens):
            rids, counts = unpack_uint32(message.rids), unpack_uint32(message.counts)
            ids, logprobs = unpack_int32(message.token_ids), unpack_float32(message.logprobs)
            assert len(rids) == len(set(rids)) == len(counts)
            assert len(ids) == len(logprobs) == sum(counts)
            assert min(counts) >= 1
            self.longest_run = max(self.longest_run, *counts)
            tops = split_tops(message) or [[]] * len(ids)
            assert any(tops) == bool(message.top_counts), "top-n columns without an entry"
            each = [rid for rid, count in zip(rids, counts, strict=True) for _ in range(count)]
            for rid, token, top in zip(each, ids, tops, strict=True):
                request = self.requests[rid]
                assert request.end is None, "a token after the end"
                assert not request.cancelled_by_client, "a token after a cancel"
                assert len(request.prompt_logprobs) == request.expected_prompt_logprobs, (
                    "a token before all prompt logprobs"
                )
                assert bool(top) == request.wants_tops
                request.ids.append(token)
                request.tops.append(top)
            return
        assert isinstance(message, End | PromptLogprobs), message
        request = self.requests[message.rid]
        if isinstance(message, PromptLogprobs):
            assert request.end is None, "logprobs after the end"
            assert not request.cancelled_by_client, "logprobs after a cancel"
            assert request.prompt_top_n is not None, "prompt logprobs were not requested"
            assert len(request.ids) == request.resumed, "prompt logprobs after a token"
            request.prompt_logprobs += unpack_float32(message.logprobs)
            request.prompt_tops += zip(unpack_int32(message.top_ids), unpack_float32(message.top_logprobs), strict=True)
            return
        assert request.end is None, "two ends"
        request.end = message
        assert message.prompt_tokens == len(request.prompt)
        assert message.generated_tokens == len(request.ids) or message.reason == FinishReason.QUARANTINED
        assert message.queue_us >= 0
        assert message.inference_us >= 0
