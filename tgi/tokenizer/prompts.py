"""The tokens of a request's prompt on their way up: the scheduler tells logprobs, and here are the ids and texts."""

from collections.abc import Iterator

from tgi.kernel.answer import PromptTokens
from tgi.kernel.messages import Generate, PromptLogprobs
from tgi.kernel.pack import FLOAT32, ints, pack
from tgi.tokenizer.encode import Prompt
from tgi.tokenizer.vocabulary import Vocabulary

# A step tells of thousands of tokens at once. So many make a message of their own: texts and all, it stays small.
MOST_TOKENS = 4096


class PromptTeller:
    """Knows which tokens have gone up: all before position `next`."""

    def __init__(self, asked: Generate, prompt: Prompt, vocabulary: Vocabulary) -> None:
        self.next = asked.prompt_from or 0
        self._rid = asked.rid
        self._prompt = prompt
        self._vocabulary = vocabulary

    def first(self) -> Iterator[PromptTokens]:
        """The first token, which nothing is told of. To be called once the request is admitted."""
        if self.next == 0:
            yield self._piece(pack(FLOAT32, [float("nan")]), b"", b"")

    def tell(self, told: PromptLogprobs) -> Iterator[PromptTokens]:
        """The next tokens."""
        most = 4 * MOST_TOKENS
        per_token = len(told.top_ids) // max(1, len(told.logprobs) // 4)  # bytes of a top column
        for begin in range(0, len(told.logprobs), most):
            tops = slice(begin // 4 * per_token, (begin + most) // 4 * per_token)
            yield self._piece(told.logprobs[begin : begin + most], told.top_ids[tops], told.top_logprobs[tops])

    def _piece(self, logprobs: bytes, top_ids: bytes, top_logprobs: bytes) -> PromptTokens:
        words = slice(4 * self.next, 4 * self.next + len(logprobs))
        self.next += len(logprobs) // 4
        ids, text = self._prompt.ids[words], self._vocabulary.text
        return PromptTokens(
            self._rid,
            ids,
            logprobs,
            self._prompt.starts[words],
            [text(number) for number in ints(ids)],
            top_ids,
            top_logprobs,
            [text(number) for number in ints(top_ids)],
        )
