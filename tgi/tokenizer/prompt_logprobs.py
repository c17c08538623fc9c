"""Prompt tokens for the api: ids and texts from here, logprobs and top-n alternatives from the scheduler."""

from collections.abc import Iterator

from tgi.microkernel.messages.codec import FLOAT32, ITEM_BYTES, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import Generate, PromptLogprobs, PromptTokens
from tgi.tokenizer.encoder import EncodedPrompt
from tgi.tokenizer.vocabulary import Vocabulary

# One prefill step brings the logprobs of thousands of tokens. They are sent in messages of at most this many.
MAX_TOKENS_PER_MESSAGE = 4096


class PromptTokensStream:
    """Makes the PromptTokens messages of one request. All positions before `next_position` have been sent, or are the
    input of an encoder: of a prompt of an encoder-decoder model the decoder's start alone is told, as in TGI."""

    def __init__(self, generate: Generate, prompt: EncodedPrompt, vocabulary: Vocabulary) -> None:
        self._first = prompt.encoder_tokens
        self.next_position = self._first + (generate.prompt_logprobs_from or 0)
        self._api_rid = generate.rid
        self._prompt = prompt
        self._vocabulary = vocabulary

    def first_token_message(self) -> Iterator[PromptTokens]:
        """The first token, which has no logprob (NaN). Call it once, when the request is admitted."""
        if self.next_position == self._first:
            yield self._next_message(pack_column(FLOAT32, [float("nan")]), b"", b"")

    def logprob_messages(self, logprobs: PromptLogprobs) -> Iterator[PromptTokens]:
        """The next tokens with their logprobs."""
        limit = ITEM_BYTES * MAX_TOKENS_PER_MESSAGE  # bytes of a column
        top_bytes = len(logprobs.top_ids) // max(
            1, len(logprobs.logprobs) // ITEM_BYTES
        )  # bytes of a top column per token
        for begin in range(0, len(logprobs.logprobs), limit):
            tops = slice(begin // ITEM_BYTES * top_bytes, (begin + limit) // ITEM_BYTES * top_bytes)
            yield self._next_message(
                logprobs.logprobs[begin : begin + limit], logprobs.top_ids[tops], logprobs.top_logprobs[tops]
            )

    def _next_message(self, logprobs: bytes, top_ids: bytes, top_logprobs: bytes) -> PromptTokens:
        start = ITEM_BYTES * self.next_position
        span = slice(start, start + len(logprobs))
        self.next_position += len(logprobs) // ITEM_BYTES
        ids, token_text = self._prompt.ids[span], self._vocabulary.token_text
        return PromptTokens(
            self._api_rid,
            ids,
            logprobs,
            self._prompt.token_starts[span],
            [token_text(token_id) for token_id in unpack_int32(ids)],
            top_ids,
            top_logprobs,
            [token_text(token_id) for token_id in unpack_int32(top_ids)],
            self._vocabulary.token_bytes(self._vocabulary.partial.keys() & unpack_int32(ids + top_ids)),
        )
