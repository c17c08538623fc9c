"""Turns the tokens of a step into Texts messages: each row is detokenized by its request, and collected per api."""

import time
from array import array
from collections.abc import Iterable, Mapping, MutableSequence
from itertools import accumulate
from typing import Any

from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, ITEM_BYTES, UINT32, unpack_int32, unpack_uint32
from tgi.microkernel.messages.protocol import AnswerPart, FinishReason, Texts, Tokens
from tgi.microkernel.observability import metrics
from tgi.microkernel.recovery.work_register import WorkRegister
from tgi.tokenizer.message_checks import check_tokens
from tgi.tokenizer.request import RequestStage, TokenizerRequestState
from tgi.tokenizer.vocabulary import Vocabulary


class OutputProcessor:
    """Collects the Texts of all steps until `drain_texts`, and the durations of the steps until `flush_metrics`."""

    def __init__(self, vocabulary: Vocabulary, work_register: WorkRegister) -> None:
        """`work_register`: where the requests are registered whose tokens are in progress."""
        self._vocabulary = vocabulary
        self._work_register = work_register
        self._builders: dict[PeerId, TextsBuilder] = {}  # by api
        self._metrics = metrics.ObservationBuffer()
        self._step_seconds = {
            method: self._metrics.values("tgi_batch_decode_duration", method=method) for method in ("prefill", "decode")
        }

    def process_tokens(self, requests: Mapping[int, TokenizerRequestState], tokens: Tokens) -> list[int]:
        """Detokenizes one step. Returns the rids of the requests that a stop string has ended.

        The last tokens of a request that ends are kept in its `last_texts`.
        """
        started = time.perf_counter()
        method = "decode"
        ids, live = unpack_int32(tokens.token_ids), RequestStage.LIVE
        rids, counts = unpack_uint32(tokens.rids), unpack_uint32(tokens.counts)
        check_tokens(tokens, ids, rids, counts)
        top_tokens = TopTokenColumns(tokens) if tokens.top_counts else None
        stopped: list[int] = []
        end = 0
        units = self._work_register.units
        with self._work_register.working_on_each():
            for rid, count in zip(rids, counts, strict=True):
                first, end = end, end + count
                request = requests.get(rid)
                if request is None or request.stage is not live or request.finish_reason is not None:
                    continue  # generated before the scheduler received the Stop or Cancel
                if not request.generated_ids:
                    method = "prefill"
                units[0] = request.work_number
                builder = self._builders.get(request.api)
                if builder is None:
                    builder = self._builders[request.api] = TextsBuilder(self._vocabulary)
                at = first
                while at < end and request.finish_reason is None:
                    token_id = ids[at]
                    text = request.append_token(token_id)
                    builder.texts.append(text)
                    builder.special.append(request.token_hidden)
                    if request.held_characters:
                        builder.set_held_characters(request.held_characters)
                    if (parser := request.answer_parser) is not None:
                        held, hidden = request.held_characters, request.token_hidden
                        builder.add_parts(parser.parse_token(token_id, text, held, hidden))
                    at += 1
                builder.rids.append(request.generate.rid)
                builder.counts.append(at - first)
                builder.ids += tokens.token_ids[ITEM_BYTES * first : ITEM_BYTES * at]
                builder.logprobs += tokens.logprobs[ITEM_BYTES * first : ITEM_BYTES * at]
                if request.finish_reason is not None:
                    builder = builder.split_last_row()
                if top_tokens is not None:
                    builder.add_top_tokens(top_tokens, first, at)
                if request.finish_reason is not None:
                    request.last_texts = builder.build()
                    if request.finish_reason is FinishReason.STOP:
                        stopped.append(rid)
        self._step_seconds[method].append(time.perf_counter() - started)
        if started > self._metrics.due_at:
            self._metrics.flush(started)
        return stopped

    def drain_texts(self) -> list[tuple[PeerId, Texts]]:
        """Returns the collected Texts of each api that has any."""
        messages = [(api, builder.build()) for api, builder in self._builders.items() if builder.rids]
        self._builders = {}
        return messages

    def remove_api(self, api: PeerId) -> None:
        """Drops the collected Texts of an api that has disconnected."""
        self._builders.pop(api, None)

    def flush_metrics(self) -> None:
        """Observes the step durations collected so far. Called before each End, so that the metrics contain all steps
        of a request when its client sees the end of the answer."""
        self._metrics.flush()


class TopTokenColumns:
    """The columns of top-n alternatives of a Tokens message, addressed by token."""

    def __init__(self, tokens: Tokens) -> None:
        self.counts = unpack_uint32(tokens.top_counts)
        self.offsets = [0, *accumulate(self.counts)]  # number of alternatives before each token
        self.ids = tokens.top_ids
        self.logprobs = tokens.top_logprobs


class TextsBuilder:
    """The columns of a Texts message under construction.

    To add a row, append to the public columns; OutputProcessor does so inline, because a call per row would cost about
    5% of a row. Then call `set_held_characters`, `add_parts` or `add_top_tokens` if needed. `held` and the columns of
    top tokens may be shorter than the others: `build` fills them up with zeros.
    """

    __slots__ = (
        "_top_counts", "_top_ids", "_top_logprobs", "_top_special", "_top_texts", "_vocabulary", "counts", "held",
        "ids", "logprobs", "parts", "rids", "special", "texts",
    )  # fmt: skip

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.rids = array(UINT32)
        self.counts = array(UINT32)
        self.ids = bytearray()
        self.logprobs = bytearray()
        self.special = bytearray()
        self.texts: list[str] = []
        self.held = array(UINT32)
        self.parts: list[AnswerPart] = []
        self._vocabulary = vocabulary
        self._top_counts = array(UINT32)
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()
        self._top_special = bytearray()
        self._top_texts: list[str] = []

    def set_held_characters(self, characters: int) -> None:
        """Sets how many characters up to the last token must not be shown yet."""
        _pad_with_zeros(self.held, len(self.texts) - 1)
        self.held.append(characters)

    def add_parts(self, parts: Iterable[tuple[str, str]]) -> None:
        """Adds the answer parts (kind, text) that the last token has completed."""
        token = len(self.texts) - 1
        self.parts += (AnswerPart(token, kind, text) for kind, text in parts)

    def split_last_row(self) -> "TextsBuilder":
        """Moves the last row to a new builder. Call it before `add_top_tokens`."""
        last = TextsBuilder(self._vocabulary)
        begin = len(self.texts) - self.counts[-1]
        _move_tail(self.rids, last.rids, -1)
        _move_tail(self.counts, last.counts, -1)
        _move_tail(self.ids, last.ids, ITEM_BYTES * begin)
        _move_tail(self.logprobs, last.logprobs, ITEM_BYTES * begin)
        _move_tail(self.special, last.special, begin)
        _move_tail(self.texts, last.texts, begin)
        _move_tail(self.held, last.held, begin)
        last.parts = [
            part._replace(token_index=part.token_index - begin) for part in self.parts if part.token_index >= begin
        ]
        del self.parts[len(self.parts) - len(last.parts) :]
        return last

    def add_top_tokens(self, top_tokens: TopTokenColumns, first: int, end: int) -> None:
        """Adds the top-n alternatives of the last row, whose tokens are `first` to `end` of the Tokens message."""
        _pad_with_zeros(self._top_counts, len(self.texts) - (end - first))
        self._top_counts.extend(top_tokens.counts[first:end])
        begin_byte, end_byte = ITEM_BYTES * top_tokens.offsets[first], ITEM_BYTES * top_tokens.offsets[end]
        self._top_ids += top_tokens.ids[begin_byte:end_byte]
        self._top_logprobs += top_tokens.logprobs[begin_byte:end_byte]
        for token_id in unpack_int32(top_tokens.ids[begin_byte:end_byte]):
            self._top_special.append(token_id in self._vocabulary.special_ids)
            self._top_texts.append(self._vocabulary.token_text(token_id))

    def build(self) -> Texts:
        for column in (self.held, self._top_counts):
            if column:
                _pad_with_zeros(column, len(self.texts))
        token_ids = bytes(self.ids)
        partial = self._vocabulary.partial.keys() & array(INT32, token_ids + self._top_ids)
        return Texts(
            rids=self.rids.tobytes(),
            counts=self.counts.tobytes(),
            token_ids=token_ids,
            logprobs=bytes(self.logprobs),
            special=bytes(self.special),
            texts=self.texts,
            held_chars=self.held.tobytes(),
            top_counts=self._top_counts.tobytes() if self._top_ids else b"",
            top_ids=bytes(self._top_ids),
            top_logprobs=bytes(self._top_logprobs),
            top_special=bytes(self._top_special),
            top_texts=self._top_texts,
            parts=self.parts,
            partial=self._vocabulary.token_bytes(partial) if partial else [],
        )


def _move_tail(source: MutableSequence[Any], target: MutableSequence[Any], begin: int) -> None:
    """Moves the entries from `begin` on."""
    target.extend(source[begin:])
    del source[begin:]


def _pad_with_zeros(column: "array[int]", length: int) -> None:
    column.frombytes(bytes(column.itemsize * (length - len(column))))
