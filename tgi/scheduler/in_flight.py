"""Steps that were sent and are not answered yet: their pipeline, the check of a result against its step, and the
distribution of what a result brings to the requests and their tokenizers."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import compress, repeat
from typing import NamedTuple

from tgi.microkernel.messages.codec import ITEM_BYTES, column_slice, unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import PIPELINE_DEPTH, FinishReason, PromptLogprobs, Step, StepResult
from tgi.microkernel.recovery.work_register import names_of
from tgi.scheduler.columns import (
    SampledColumns,
    TopTokens,
    compress_columns,
    split_top_tokens,
    top_tokens_fit,
)
from tgi.scheduler.counters import Counters
from tgi.scheduler.decode_batch import PartitionRows
from tgi.scheduler.estimators import SizeClass
from tgi.scheduler.kv_cache import KVCacheManager
from tgi.scheduler.request import Request


class PromptLogprobRow(NamedTuple):
    """A row of a step whose result brings logprobs of this many prompt tokens."""

    request: Request
    tokens: int


class InFlightStep(NamedTuple):
    """A step that was sent and is not answered yet.

    Its sampling rows are, in this order: whole partitions, other decode rows, prefill chunks that end their prompt.
    """

    message: Step
    sampling_requests: list[Request]  # the requests of the sampling rows, in order
    partition_rows: list[PartitionRows]  # those of the sampling rows that are whole partitions
    finishing: list[Request]  # those of the sampling rows that sample their request's last token by length
    prefilling: list[Request]  # the requests of chunks that sample nothing
    prompt_logprob_rows: list[PromptLogprobRow]  # in the order of the step's rows
    encoding: list[Request]  # the requests without a row for whose images the vision tower works
    pooled: list[Request]  # those of `prefilling` that end in a vector, in the order of the step's rows
    decode_rows: int
    prefill_tokens: int
    encoder_positions: int  # of images, which the vision tower computes
    admitted: int  # requests that came from the queue
    joined: bool  # whether admitted requests joined others that ran already
    sent_at: float
    drafts: list[int]  # draft tokens of each decode row; empty if no row has any
    early_exits: int  # `RunningBatch.early_exits` when it was planned; while that is the same, no request has left
    size: SizeClass
    late_after: float | None  # seconds, from StepLimits
    plan_ahead_after: float  # seconds, from StepLimits

    @property
    def requests(self) -> list[Request]:
        """The requests that it works on."""
        return self.sampling_requests + self.prefilling + self.encoding

    @property
    def requests_in_row_order(self) -> list[Request]:
        """The request of each row of the step."""
        sampling, prefilling = iter(self.sampling_requests), iter(self.prefilling)
        return [next(sampling if samples else prefilling) for samples in self.message.samples]

    @property
    def description(self) -> str:
        """What it computes, for people."""
        return f"step {self.message.number}: {self.decode_rows} decode rows, {self.prefill_tokens} prompt tokens"

    @property
    def method(self) -> str:
        """The value of the label `method` in TGI's metrics."""
        return "prefill" if self.prefill_tokens or not self.decode_rows else "decode"

    def mismatch(self, result: StepResult, vocab_size: int) -> str:
        """Why the result does not match this step, or ""."""
        number, rows = self.message.number, len(self.sampling_requests)
        if result.number != number:
            return f"expected the result of step {number}, got that of step {result.number}"
        sampled = rows
        if result.counts != b"\1" * rows:
            if not self._draft_counts_fit(result.counts):
                return f"the result of step {number} does not have 1 to 1 + drafts tokens for each of {rows} rows"
            sampled = sum(result.counts)
        if len(result.token_ids) != ITEM_BYTES * sampled or len(result.logprobs) != ITEM_BYTES * sampled:
            return f"the result of step {number} does not have an id and a logprob for each of {sampled} tokens"
        if len(result.row_errors) not in (0, len(self.message.samples)):
            errors = len(result.row_errors)
            return f"the result of step {number} has {errors} row errors for {len(self.message.samples)} rows"
        if not top_tokens_fit(result, sampled):
            return f"the top-n columns in the result of step {number} do not fit its {sampled} tokens"
        if not prompt_logprobs_fit(result, self.prompt_logprob_rows, vocab_size):
            return f"the prompt logprobs in the result of step {number} do not fit its rows"
        if not vectors_fit(result, len(self.pooled)):
            return f"the vectors in the result of step {number} do not fit its {len(self.pooled)} pooled rows"
        return ""

    def _draft_counts_fit(self, counts: bytes) -> bool:
        """Whether each sampling row has between 1 token and one more than its drafts."""
        most = [1 + drafts for drafts in self.drafts] + [1] * (len(self.sampling_requests) - len(self.drafts))
        return len(counts) == len(most) and all(1 <= count <= one for count, one in zip(counts, most, strict=True))


class StepPipeline:
    """The steps in flight. A worker runs steps and answers them in order. Steps are numbered within epochs: an epoch
    ends when the worker is lost or a step fails. Times are seconds."""

    def __init__(self, stall_limit: float, first_epoch: int) -> None:
        """`stall_limit`: time without an answer, with steps in flight, after which the worker counts as stalled, unless
        the step is late before."""
        self.epoch = first_epoch
        self.next_number = 1  # of the next step, in this epoch
        self._stall_limit = stall_limit
        self._answer_limit = stall_limit  # seconds that the next answer may take
        self._steps: deque[InFlightStep] = deque()
        self._abandoned: set[tuple[int, int]] = set()  # (epoch, number) of steps after a failed one, still unanswered
        self._progress_at = 0.0  # when a step was last answered, or sent while none was in flight
        self.plan_ahead_at = 0.0  # when the next step should be planned

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> list[InFlightStep]:
        """All steps in flight, the oldest first."""
        return list(self._steps)

    @property
    def latest(self) -> InFlightStep | None:
        """The step that was sent last."""
        return self._steps[-1] if self._steps else None

    @property
    def has_room(self) -> bool:
        """Whether another step may be sent."""
        if self._abandoned or (self._steps and self._steps[-1].message.tower):
            return False  # a prompt that arrives while the vision tower computes is not to wait for more of its slices
        return len(self._steps) < PIPELINE_DEPTH

    def add(self, step: InFlightStep, now: float) -> None:
        if not self._steps:
            self._begin(step, now)
        self.next_number += 1
        self._steps.append(step)

    def pop_answered(self, result: StepResult, now: float) -> tuple[InFlightStep, float, bool] | None:
        """Removes the oldest step, which this result should answer. Returns it with its seconds of execution, counted
        from the later of its sending and the previous answer, and whether it was sent while no other was in flight;
        None if the result belongs to a former epoch."""
        if result.epoch != self.epoch or not self._steps:
            self._abandoned.discard((result.epoch, result.number))
            return None
        step = self._steps.popleft()
        sent_at, progress_at = step.sent_at, self._progress_at
        was_alone = progress_at <= sent_at
        if self._steps:
            self._begin(self._steps[0], now)
        else:
            self._progress_at, self.plan_ahead_at = now, 0.0
        return step, now - (sent_at if was_alone else progress_at), was_alone

    def _begin(self, step: InFlightStep, now: float) -> None:
        """The worker computes this step from now on."""
        late_after, stall_limit = step.late_after, self._stall_limit
        self._answer_limit = stall_limit if late_after is None or late_after > stall_limit else late_after
        self._progress_at, self.plan_ahead_at = now, now + step.plan_ahead_after

    def step_failed(self) -> None:
        """The step that was answered last has failed, so later ones build on what it did not compute. Their answers are
        awaited before another step is sent, so that no other request is blamed if they crash the worker."""
        self._abandoned = {(self.epoch, one.message.number) for one in self._steps}
        self._begin_epoch()

    def worker_lost(self) -> None:
        """Clears the pipeline: no step in it will be answered."""
        self._abandoned.clear()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._steps.clear()
        self.plan_ahead_at = 0.0
        self._answer_limit = self._stall_limit
        self.epoch += 1
        self.next_number = 1

    @property
    def answer_limit(self) -> float:
        """Seconds that the next answer may take."""
        return self._answer_limit

    def is_stalled(self, now: float) -> bool:
        """Whether the next answer is overdue."""
        return bool(self._steps or self._abandoned) and now >= self._progress_at + self._answer_limit

    def stalls_at(self, now: float) -> float | None:
        """When it will be stalled unless an answer comes; None if it is already, or no answer is due."""
        if not (self._steps or self._abandoned):
            return None
        due_at = self._progress_at + self._answer_limit
        return due_at if now < due_at else None


def requests_in_progress(steps: list[InFlightStep]) -> dict[bytes, None]:
    """The names of the requests that these steps work on. Those that have been cancelled or preempted since are
    included: the worker computes their rows nevertheless."""
    return names_of(request for step in steps for request in step.requests)


# --- distribution of results ------------------------------------------------------------------------------------------

FinishedRequests = list[tuple[Request, FinishReason]]


def distribute_tokens(step: InFlightStep, result: StepResult, early_exits: int) -> FinishedRequests:
    """Adds one token to each request with a sampling row, and to the columns of its tokenizer. `early_exits`: those of
    the running batch now. Returns the requests that are complete.

    Whole partitions are distributed by column, the other rows (and all rows of a result with top-n tokens) one by one.
    """
    number = step.message.number
    sampled = unpack_int32(result.token_ids)
    rest = 0  # index of the first sampling row that is not distributed by column
    stopped: list[Request] = []
    if result.top_counts:
        for request, top in zip(step.sampling_requests, split_top_tokens(result), strict=True):
            if number >= request.valid_from_step:
                request.tokenizer.top_tokens.append(top)
    else:
        some_left = early_exits != step.early_exits
        for rows in step.partition_rows:
            stopped += _distribute_partition(rows, step, result, sampled, some_left)
            rest = rows.end
    if rest < len(sampled):
        logprobs = unpack_float32(result.logprobs[ITEM_BYTES * rest :])
        for request, token, logprob in zip(step.sampling_requests[rest:], sampled[rest:], logprobs, strict=True):
            if number < request.valid_from_step:
                continue  # it has left its slot since this step was planned
            request.token_ids.append(token)
            request.tokenizer.token_rows.append((request.rid, token, logprob))
            if token in request.stop_ids:
                stopped.append(request)
    # LENGTH takes precedence over EOS, as in TGI.
    finished = [(one, FinishReason.EOS) for one in stopped if len(one.token_ids) < one.max_total_tokens]
    length = FinishReason.LENGTH
    return finished + [(one, length) for one in step.finishing if number >= one.valid_from_step]


def _distribute_partition(
    rows: PartitionRows, step: InFlightStep, result: StepResult, sampled: list[int], some_left: bool
) -> Iterable[Request]:
    """Distributes the rows of a partition by column. `some_left`: requests have left their slots since the step was
    planned, perhaps of this partition. Returns the requests that have sampled one of their stop ids."""
    begin, end, token_ids, stop_ids = rows.begin, rows.end, rows.token_ids, rows.stop_ids
    tokens = sampled[begin:end]
    columns = SampledColumns(
        rows.rids, column_slice(result.token_ids, begin, end), column_slice(result.logprobs, begin, end)
    )
    if some_left:
        valid = [step.message.number >= request.valid_from_step for request in step.sampling_requests[begin:end]]
        tokens = [*compress(tokens, valid)]
        token_ids, stop_ids = [*compress(token_ids, valid)], [*compress(stop_ids, valid)]
        columns = compress_columns(columns, valid)
    for ids, token in zip(token_ids, tokens, strict=True):
        ids.append(token)
    rows.tokenizer.token_columns = columns
    if rows.stop_id_union.isdisjoint(tokens):
        return ()
    requests: Iterable[Request] = step.sampling_requests[begin:end]
    if some_left:
        requests = compress(requests, valid)
    return [one for one, ids, token in zip(requests, stop_ids, tokens, strict=True) if token in ids]


def distribute_token_runs(
    step: InFlightStep, result: StepResult, kv_cache: KVCacheManager, counters: Counters
) -> FinishedRequests:
    """The same for a step with drafts: a row brings its accepted drafts and one more token. Tokens after the end of a
    request are dropped."""
    number = step.message.number
    tokens = zip(
        unpack_int32(result.token_ids), unpack_float32(result.logprobs), _top_tokens_or_none(result), strict=False
    )
    finished: FinishedRequests = []
    for row, (request, count) in enumerate(zip(step.sampling_requests, result.counts, strict=True)):
        run = [next(tokens) for _ in range(count)]
        drafted = step.drafts[row] if row < len(step.drafts) else 0
        counters.draft_tokens += drafted
        counters.accepted_draft_tokens += count - 1
        if number < request.valid_from_step:
            continue
        if drafted and request.drafter is not None:
            request.drafter.record_verification(drafted, count - 1)
        for token, logprob, top in run:
            request.token_ids.append(token)
            request.tokenizer.token_rows.append((request.rid, token, logprob))
            if top is not None:
                request.tokenizer.top_tokens.append(top)
            if reason := request.finish_reason():
                finished.append((request, reason))
                break
        # The positions of rejected drafts are computed again.
        if request.partition is not None:
            request.partition.set_start(request, len(request.token_ids) - 1)
        kv_cache.mark_filled([request])
    return finished


def _top_tokens_or_none(result: StepResult) -> Iterable[TopTokens | None]:
    return split_top_tokens(result) if result.top_counts else repeat(None)


# --- vectors ----------------------------------------------------------------------------------------------------------


def vectors_fit(result: StepResult, rows: int) -> bool:
    """Whether a result has a vector for each of these rows."""
    size = len(result.vectors)
    return size > 0 and size % (ITEM_BYTES * rows) == 0 if rows else not size


def split_vectors(step: InFlightStep, result: StepResult) -> Iterator[tuple[Request, bytes]]:
    """The vector of each pooled row."""
    size = len(result.vectors) // max(1, len(step.pooled))
    for index, request in enumerate(step.pooled):
        yield request, result.vectors[index * size : (index + 1) * size]


# --- prompt logprobs --------------------------------------------------------------------------------------------------


def prompt_logprob_row(request: Request, start: int, end: int) -> PromptLogprobRow | None:
    """The prompt logprobs that a row brings which computes positions `start` to `end` - 1: each position brings that of
    the next token. None if it brings none.

    The worker counts the same: logprobs that were sent since the request got its slot belong to positions before
    `start`.
    """
    tokens = min(end, request.prompt_tokens - 1) - max(start, request.prompt_logprobs_from - 1)
    return PromptLogprobRow(request, tokens) if tokens > 0 else None


def prompt_logprobs_fit(result: StepResult, rows: list[PromptLogprobRow], vocab_size: int) -> bool:
    """Whether the prompt columns of a result have the sizes that belong to these rows."""
    if not rows:
        return not (result.prompt_logprobs or result.prompt_top_ids or result.prompt_top_logprobs)
    logprobs = ITEM_BYTES * sum(row.tokens for row in rows)
    tops = ITEM_BYTES * sum(row.tokens * min(row.request.prompt_top_n, vocab_size) for row in rows)
    sizes = (len(result.prompt_logprobs), len(result.prompt_top_ids), len(result.prompt_top_logprobs))
    return sizes == (logprobs, tops, tops)


def split_prompt_logprobs(
    rows: list[PromptLogprobRow], result: StepResult, vocab_size: int
) -> Iterator[tuple[Request, PromptLogprobs]]:
    """The prompt logprobs that each of these rows brings, as a message."""
    end = top_end = 0
    for request, tokens in rows:
        begin, end = end, end + tokens
        top_begin, top_end = top_end, top_end + tokens * min(request.prompt_top_n, vocab_size)
        yield (
            request,
            PromptLogprobs(
                request.rid,
                column_slice(result.prompt_logprobs, begin, end),
                column_slice(result.prompt_top_ids, top_begin, top_end),
                column_slice(result.prompt_top_logprobs, top_begin, top_end),
            ),
        )
