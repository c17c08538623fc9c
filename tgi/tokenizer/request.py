"""The state of one request in the tokenizer: its prompt, its generated ids and text, and how it ends."""

from array import array
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, ITEM_BYTES, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    Add,
    AnswerPart,
    End,
    FinishReason,
    Generate,
    PageExtra,
    PoolingInput,
    Prompted,
    PromptLogprobs,
    PromptTokens,
    RequestContext,
    Texts,
    encode,
)
from tgi.microkernel.recovery.work_register import register_number
from tgi.tokenizer.answers.formats import FormatTokens, reasoning_sampling
from tgi.tokenizer.answers.parser import StreamingAnswerParser
from tgi.tokenizer.detokenizer import CONTEXT_TOKENS, IncrementalDetokenizer, create_detokenizer
from tgi.tokenizer.encoder import EncodedPrompt
from tgi.tokenizer.prompt_logprobs import PromptTokensStream
from tgi.tokenizer.stop_strings import ReasoningSpan, StopStringFilter, StopStringMatcher
from tgi.tokenizer.vocabulary import Vocabulary


class RequestStage(StrEnum):
    """Stages of a request in the tokenizer."""

    ENCODING = "encoding"  # its prompt is not encoded yet
    HELD = "held"  # encoded; waits for the deployment's limits
    LIVE = "live"  # sent to the scheduler, or will be when one connects
    CANCELLING = "cancelling"  # Cancel was sent to the scheduler; its End will be forwarded
    ENDED = "ended"  # the api has its End or has disconnected; waits for the scheduler's End


class TokenizerRequestState:
    """One request. `rid` is the tokenizer's number, used with the scheduler; `generate.rid` is the api's.

    Keeps all that is needed to send the request to a restarted scheduler.

    `finish_reason` is set by the token that ends the request. If several reasons apply, the order is TGI's: length,
    EOS, stop string. Hidden stop strings come first, so that the text never contains one, and so do `stop_token_ids`.
    With `max_new_tokens` 0 it is set when all prompt tokens have been sent to the api. Stop strings that are complete
    before `min_new_tokens` are ordinary text, and so are hidden ones within reasoning.

    `visible_texts` are the texts of the tokens that are not hidden; their last `held_characters` must not be shown yet.
    `token_hidden` says whether the latest token is hidden.
    """

    __slots__ = (
        "_detokenizer", "_hidden_ids", "_min_new_tokens", "_reasoning", "_stop_filter", "_stop_matcher",
        "_stop_token_ids", "answer_parser", "api", "finish_reason", "generate", "generated_ids", "held_characters",
        "is_chat", "last_texts", "max_new_tokens", "prompt", "prompt_tokens_stream", "received", "rid", "stage",
        "stays", "stop_ids", "submitted", "suspected_at", "token_hidden", "validation_us", "visible_texts",
        "work_number",
    )  # fmt: skip

    def __init__(self, rid: int, api: PeerId, generate: Generate, received: float) -> None:
        self.rid = rid
        self.api = api
        self.generate = generate
        self.work_number = register_number(generate.context)  # in the work register
        self.received = received  # seconds on the pool's clock
        self.submitted = received
        self.stage = RequestStage.ENCODING
        self.suspected_at: int | None = None  # the ids that it had when it was last among a replica's suspects
        self.stays = False  # it was among those of two replicas with hardly an id in between
        self.is_chat = bool(generate.chat)
        self.prompt = EncodedPrompt(b"", 0, 0)
        self.max_new_tokens = 0
        self.stop_ids: frozenset[int] = frozenset()  # `stop_token_ids` and, without `ignore_eos`, the model's EOS
        self.validation_us = 0
        self.prompt_tokens_stream: PromptTokensStream | None = None  # with `prompt_logprobs_from`
        self.generated_ids = array(INT32)
        self.visible_texts: list[str] = []
        self.token_hidden = False
        self.finish_reason: FinishReason | None = None
        self.last_texts: Texts | None = None  # sent just before the End, since the api shows both as one
        self.held_characters = 0
        self.answer_parser: StreamingAnswerParser | None = None  # its caller parses each token after append_token
        stop_strings = generate.stop_strings if any(generate.stop_strings) else []
        self._stop_filter = StopStringFilter(stop_strings) if stop_strings and generate.hide_stop else None
        self._stop_matcher = StopStringMatcher(stop_strings) if stop_strings and not generate.hide_stop else None
        self._reasoning: ReasoningSpan | None = None  # until it ends, with a stop filter
        self._stop_token_ids = frozenset(unpack_int32(generate.stop_token_ids))
        self._hidden_ids: frozenset[int] = frozenset()
        self._detokenizer: IncrementalDetokenizer | None = None
        self._min_new_tokens = 0

    def set_prompt(self, prompt: EncodedPrompt) -> None:
        """Sets the encoded prompt, and drops its source (up to megabytes) from `generate`."""
        self.stage = RequestStage.HELD
        self.prompt = prompt
        self.generate = self.generate._replace(
            inputs="", chat=b"", grammar=b"", input_ids=b"", bad_words=[], listed_texts=[], images=[]
        )
        if self.generate.pooling is not None:
            self.generate = self.generate._replace(pooling=PoolingInput())

    def start(
        self, vocabulary: Vocabulary, format_tokens: FormatTokens, max_new_tokens: int, model_vocab_size: int
    ) -> None:
        """Makes a validated request live. Decodes resumed ids, whose texts the api already has.

        Ids from `model_vocab_size` on cannot be generated, and are left out of the sampling parameters.
        """
        self.stage = RequestStage.LIVE
        self.max_new_tokens = max_new_tokens
        self.stop_ids = self._stop_token_ids | (frozenset() if self.generate.ignore_eos else vocabulary.eos_ids)
        self._min_new_tokens = self.generate.sampling.min_new_tokens
        sampling: dict[str, Any] = {}
        if self.generate.sampling.grammar != self.prompt.grammar:
            sampling["grammar"] = self.prompt.grammar
        if self._min_new_tokens:
            end_ids = sorted(token_id for token_id in self.stop_ids if token_id < model_vocab_size)
            sampling["end_ids"] = pack_column(INT32, end_ids)
        if words := [word for word in self.prompt.bad_words if max(word) < model_vocab_size]:
            sampling["bad_word_ids"] = pack_column(INT32, [token_id for word in words for token_id in word])
            sampling["bad_word_lengths"] = pack_column(INT32, map(len, words))
        if listed := [token_id for token_id in self.prompt.listed_ids if token_id < model_vocab_size]:
            sampling["listed_ids"] = pack_column(INT32, listed)
        limit, answer_format = self.prompt.reasoning_limit, self.prompt.answer_format
        if limit is not None and answer_format is not None:
            budget = limit.budget(max_new_tokens)
            sampling |= reasoning_sampling(answer_format, format_tokens, budget, model_vocab_size)
        if sampling:
            self.generate = self.generate._replace(sampling=self.generate.sampling._replace(**sampling))
        if self.generate.skip_special_tokens:
            self._hidden_ids = vocabulary.special_ids
        if self.generate.hide_stop and not self.stop_ids <= self._hidden_ids:
            self._hidden_ids |= self.stop_ids
        if self.generate.prompt_logprobs_from is not None:
            self.prompt_tokens_stream = PromptTokensStream(self.generate, self.prompt, vocabulary)
        self._detokenizer = create_detokenizer(
            vocabulary,
            unpack_int32(self.prompt.ids[ITEM_BYTES * self.prompt.encoder_tokens :][-ITEM_BYTES * CONTEXT_TOKENS :]),
        )
        if answer_format is not None:
            self.answer_parser = StreamingAnswerParser(answer_format, format_tokens)
            if answer_format.reasoning_tags is not None:
                self._reasoning = ReasoningSpan(*answer_format.reasoning_tags, answer_format.starts_in_reasoning)
            if not format_tokens.ids <= self._hidden_ids:
                self._hidden_ids |= format_tokens.ids
        for token_id in unpack_int32(self.generate.resume_ids):
            if self.finish_reason is None:
                text = self.append_token(token_id)
                if self.answer_parser is not None:
                    self.answer_parser.parse_token(token_id, text, self.held_characters, self.token_hidden)

    def prompt_messages(self) -> Iterator[Prompted | PromptTokens]:
        """The messages on the prompt for the api, when the request is admitted. Call it once."""
        prompt = self.prompt
        if self.is_chat or prompt.text or prompt.not_enforced or self.generate.tells_prompt:
            yield Prompted(
                rid=self.generate.rid,
                prompt_tokens=prompt.input_tokens,
                characters=prompt.characters,
                in_parts=prompt.answer_format is not None,
                text=prompt.text,
                not_enforced=prompt.not_enforced,
            )
            self.prompt = prompt._replace(text="")
        if self.prompt_tokens_stream is not None:
            yield from self.prompt_tokens_stream.first_token_message()
        self._finish_if_prompt_only()

    @property
    def context(self) -> RequestContext:
        """As the api has sent it."""
        return self.generate.context

    @property
    def in_progress(self) -> bool:
        """Whether ids are still to be generated for a client."""
        return self.stage is RequestStage.LIVE and self.finish_reason is None

    def prompt_logprob_messages(self, logprobs: PromptLogprobs) -> Iterator[PromptTokens]:
        """The next prompt tokens for the api, with the scheduler's logprobs."""
        if self.prompt_tokens_stream is not None:
            yield from self.prompt_tokens_stream.logprob_messages(logprobs)
        self._finish_if_prompt_only()

    def _finish_if_prompt_only(self) -> None:
        """With `max_new_tokens` 0, ends the request when all prompt tokens are sent, unless a vector is to come."""
        stream = self.prompt_tokens_stream
        if (
            self.max_new_tokens == 0
            and self.generate.pooling is None
            and (stream is None or stream.next_position >= self.prompt.token_count)
        ):
            self.finish_reason = FinishReason.LENGTH

    def append_token(self, token_id: int) -> str:
        """Appends a generated id and returns its text. Sets `finish_reason` if it is the last one."""
        assert self._detokenizer is not None
        self.generated_ids.append(token_id)
        text = self._detokenizer.decode_token(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = FinishReason.EOS
        elif len(self.generated_ids) >= self.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        elif (
            self._stop_matcher is not None
            and (match := self._stop_matcher.match_piece(text, self._stop_strings_enabled)) is not None
        ):
            self.finish_reason = FinishReason.STOP
            text = text[: match.end]
        self.token_hidden = token_id in self._hidden_ids
        if text and not self.token_hidden:
            self.visible_texts.append(text)
        if self._stop_filter is not None:
            self._apply_stop_filter(self._stop_filter, text)
        return text

    @property
    def _stop_strings_enabled(self) -> bool:
        """False while fewer than `min_new_tokens` are generated."""
        return len(self.generated_ids) >= self._min_new_tokens

    def _apply_stop_filter(self, stop_filter: StopStringFilter, text: str) -> None:
        if self._reasoning is not None:
            reasoning = self._reasoning.take_piece(text)
            if self._reasoning.ended:
                self._reasoning = None
            if reasoning:
                stop_filter.pass_over(text[:reasoning], self.token_hidden)
                text = text[reasoning:]
        visible_length = stop_filter.filter_piece(text, self.token_hidden, self._stop_strings_enabled)
        self.held_characters = stop_filter.held_characters
        if visible_length is not None:
            self.finish_reason = FinishReason.STOP
            self.visible_texts = ["".join(self.visible_texts)[:visible_length]]

    def add_message(self, now: float) -> Add:
        """This request for the scheduler, with the ids generated so far."""
        stream = self.prompt_tokens_stream
        return Add(
            rid=self.rid,
            prompt_ids=self.prompt.ids,
            max_new_tokens=self.max_new_tokens,
            sampling=encode(self.generate.sampling),
            stop_ids=pack_column(INT32, sorted(self.stop_ids)),
            resume_ids=self.generated_ids.tobytes(),
            cache_salt=self.generate.sampling.adapter_digest,
            prompt_logprobs_from=0 if stream is None else stream.next_position,
            prompt_top_n=self.generate.prompt_top_n,
            context=self.generate.context.after(int((now - self.received) * 1000)),
            pooling=self.generate.pooling is not None,
            extras=[PageExtra(image.position, image.digest) for image in self.prompt.images],
            images=self.prompt.images,
        )

    def end_message(self, reason: str, message: str = "", scheduler_end: End | None = None) -> End:
        """The End for the api, with the measurements of the scheduler's End."""
        parts = [] if self.answer_parser is None else self.answer_parser.finish(self.finish_reason)
        return End(
            rid=self.generate.rid,
            reason=reason,
            message=message,
            text="".join(self.visible_texts),
            prompt_tokens=self.prompt.input_tokens,
            generated_tokens=len(self.generated_ids),
            cached_tokens=scheduler_end.cached_tokens if scheduler_end else 0,
            validation_us=self.validation_us,
            queue_us=scheduler_end.queue_us if scheduler_end else 0,
            inference_us=scheduler_end.inference_us if scheduler_end else 0,
            parts=[AnswerPart(0, kind, text) for kind, text in parts],
            retry_after_ms=scheduler_end.retry_after_ms if scheduler_end else 0,
            vector=scheduler_end.vector if scheduler_end else b"",
        )
