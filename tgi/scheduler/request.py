"""Requests as the scheduler knows them, the tokenizer process each belongs to, and the client whose share it uses."""

from array import array
from collections import deque
from functools import lru_cache
from typing import Protocol

import numpy as np

from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, unpack_int32
from tgi.microkernel.messages.protocol import (
    IMAGE_DIGEST_BYTES,
    MAX_IMAGE_FILE_BYTES,
    MAX_PROMPT_TOP_TOKENS,
    QUEUED,
    UNDIVIDED_IMAGES,
    UNDIVIDED_PROMPT,
    Add,
    DeploymentLimits,
    End,
    FinishReason,
    ImageSegment,
    PageExtra,
    decode,
    valid_file_name,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.recovery.work_register import register_number
from tgi.scheduler.columns import NO_TOKENS, SampledColumns, SampledRow, TopTokens

NO_SLOT = -1
NO_SNAPSHOTS: list[int] = []
MAX_EXTRA_BYTES = 256
MAX_RID = 2**32 - 1  # the columns of rids are uint32
# A step number that is never reached: results do not concern a request without a slot.
NO_STEP = 1 << 62


# What a computed prompt token and a generated token add to a counter.
INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


class Drafter(Protocol):
    """Where a request's drafts come from: `speculation.NgramProposer` or `speculation.DraftAcceptance`."""

    @property
    def acceptance(self) -> float:
        """Probability that the next draft is accepted; 0 if there is none."""
        ...

    def record_verification(self, drafted: int, accepted: int) -> None:
        """Records that the first `accepted` of `drafted` tokens were accepted."""


class Partition(Protocol):
    """The operations of `decode_batch.DecodePartition` on one of its requests."""

    starts: "array[int]"

    def page_added(self, request: "Request") -> None:
        """To be called when the request has got another page."""

    def set_start(self, request: "Request", start: int) -> None:
        """Sets the position that the request's next row computes."""


class Request:
    """`token_ids[p]` is the token at position p: the prompt, then what was generated. A row that covers position p
    computes it (writes its keys and values); the row that computes the last known position samples the next token."""

    __slots__ = (
        "arrival",
        "block_hash",
        "cache_salt",
        "cached_tokens",
        "capacity",
        "charged_tokens",
        "context",
        "decodes_since",
        "drafter",
        "due_step",
        "extras",
        "first_planned_at",
        "found_tokens",
        "images",
        "last_start",
        "max_total_tokens",
        "missing_pages",
        "page_keys",
        "partition",
        "partition_index",
        "planned",
        "pooling",
        "prompt_logprobs_from",
        "prompt_tokens",
        "prompt_top_n",
        "published_pages",
        "read_from",
        "received_at",
        "rid",
        "sampling",
        "share",
        "shares_pages",
        "slot",
        "snapshot_at",
        "state",
        "stop_ids",
        "tables",
        "tables_from_step",
        "token_ids",
        "tokenizer",
        "tower_images",
        "tower_slices",
        "valid_from_step",
        "vector",
        "work_number",
    )

    share: "ClientShare"  # set when the waiting queue gets it
    prompt_logprobs_from: int  # logprobs of prompt tokens from this position on are still to be sent
    # These mean something only while it holds a slot.
    tables: list[list[int]]  # its page tables, one for each KV group: pages in the order of positions, or NO_PAGE
    capacity: int  # tokens that its pages hold: those of the shortest table
    found_tokens: int  # positions that were computed when it got its slot: its first pages were in the prefix cache
    planned: int  # positions below this are computed by the steps sent so far; while it decodes, see `partition.starts`
    tower_images: int  # its first images, which the vision tower has computed by the steps sent so far
    tower_slices: int  # and what it has computed of the one after them, see DeploymentLimits.tower_slices
    shares_pages: bool  # whether it uses the prefix cache: finds pages of other requests, and they find its pages
    published_pages: int  # of each table: its first pages, which are in the prefix cache
    block_hash: bytes  # of the last of these pages in the first group
    snapshot_at: list[int]  # positions of its prompt at which a snapshot of its recurrent state is to be taken
    partition_index: int  # its index in the columns of its partition
    decodes_since: int  # the step after which it entered the partition
    due_step: int  # the step count of its partition at which it needs a page or samples its last token

    def __init__(self, tokenizer: "TokenizerPeer", add: Add, arrival: int, received_at: float) -> None:
        """`arrival`: its place in the order of arrival, which no other request has. Raises ValueError or ProtocolError
        if a column of `add` is malformed or a field is out of range."""
        if not 0 <= add.rid <= MAX_RID:
            raise ValueError(f"rid is {add.rid}")
        if fault := add.context.out_of_range():
            raise ValueError(fault)
        if not isinstance(decode(add.sampling), SamplingParams):
            raise ValueError("sampling is another message")
        self.rid = add.rid
        self.context = context = add.context
        if not context.fingerprint:  # crash isolation names it nevertheless, by what no other request has
            self.context = context._replace(fingerprint=b"request %d" % arrival)
        self.sampling = add.sampling
        self.cache_salt = add.cache_salt
        self.extras = [PageExtra(0, add.cache_salt), *add.extras] if add.cache_salt else add.extras
        self.images = add.images
        self.pooling = add.pooling
        self.tokenizer = tokenizer
        self.charged_tokens = 0  # positions that its client's counter includes
        self.arrival = arrival
        self.work_number = register_number(self.context)  # in the work register
        self.received_at = received_at
        self.first_planned_at: float | None = None
        self.token_ids = token_ids = array(INT32, add.prompt_ids)
        self.prompt_tokens = self.prompt_logprobs_from = tokens = len(token_ids)
        self.prompt_top_n = 0
        if add.prompt_logprobs_from or add.prompt_top_n:
            self._set_prompt_logprobs(add.prompt_logprobs_from, add.prompt_top_n)
        if self.extras and (fault := extras_out_of_range(self.extras, tokens)):
            raise ValueError(fault)
        if self.images and (fault := images_out_of_range(self.images, self.extras, tokens)):
            raise ValueError(fault)
        if add.resume_ids:
            token_ids.frombytes(add.resume_ids)
        self.max_total_tokens = max_total_tokens = tokens + add.max_new_tokens
        self.last_start = max_total_tokens - 2  # the position that the last decode row computes
        self.stop_ids = _stop_id_set(add.stop_ids)
        self.state = QUEUED
        self.cached_tokens = 0  # prompt tokens found in the prefix cache when it was first admitted
        self.drafter: Drafter | None = None  # None: no drafts
        self.missing_pages = 0  # pages that were needed when its admission last failed; 0: not tried
        self.partition: Partition | None = None  # while it decodes
        self.slot = NO_SLOT
        self.snapshot_at = NO_SNAPSHOTS
        self.vector = b""  # what it ends in, with `pooling`
        self.page_keys: list[bytes] = []  # of its first pages, those that are known; see page_index.py
        self.read_from: object = None  # the PageIndex that has looked for its pages in files
        self.valid_from_step = NO_STEP  # results of earlier steps were computed before it got its slot
        self.tables_from_step = NO_STEP  # the first step with `tables`, which stay when it has left its slot

    def _set_prompt_logprobs(self, begin: int, top_n: int) -> None:
        if begin < 0 or not 0 <= top_n <= MAX_PROMPT_TOP_TOKENS:
            raise ValueError(f"prompt_logprobs_from is {begin} and prompt_top_n {top_n}")
        self.prompt_logprobs_from = min(begin or self.prompt_tokens, self.prompt_tokens)
        self.prompt_top_n = top_n

    def add_page(self, pages: list[int], page_size: int) -> None:
        """Appends a page of `page_size` tokens to each of its page tables."""
        for table, page in zip(self.tables, pages, strict=True):
            table.append(page)
        self.capacity += page_size
        if self.partition is not None:
            self.partition.page_added(self)

    @property
    def generated_tokens(self) -> int:
        """Tokens after the prompt, resumed ones included."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether logprobs of its prompt are still to be sent."""
        return self.prompt_logprobs_from < self.prompt_tokens

    @property
    def prompt_only(self) -> bool:
        """Whether no token is sampled: it ends when all logprobs of its prompt are sent, or with its vector."""
        return self.max_total_tokens == self.prompt_tokens

    def image_chunk(
        self, start: int, end: int, budget: int, cost: float, waits: bool, undivided: str
    ) -> tuple[int, int]:
        """Where a chunk from `start` ends that would end at `end`, and the positions of the images that the vision
        tower computes for it: those that begin in it, and one whose begin was found in the prefix cache. With
        `undivided` (DeploymentLimits) it may end later.

        The tokens, and `cost` tokens for each of those positions, are within `budget`: the chunk ends before an image
        that is not. An image at its start is computed in any case; so is the first one unless it `waits`: others have
        a share of the step.
        """
        if whole := undivided == UNDIVIDED_PROMPT:
            end = max(end, self.prompt_tokens)
        first, positions, left = 0 if start == self.found_tokens else start, 0, float(budget)
        for position, length, *_ in self.images:
            stop = position + length
            if stop <= start:
                continue
            if position >= end:
                break
            computed = length if position >= first else 0
            cut = undivided == UNDIVIDED_IMAGES and stop > end
            if position > start and not whole:
                if cut or (waits and stop - start + cost * computed > left):
                    return position, positions
                if waits:
                    left -= cost * computed
                    end = min(end, max(stop, start + int(left)))
            elif cut:
                end = stop
            positions, waits = positions + computed, waits or computed > 0
        return end, positions

    def next_image(self, start: int, end: int, undivided: str) -> ImageSegment | None:
        """The first image of a chunk from `start` to before `end` that the vision tower has not computed as a whole.
        Its index is `tower_images` then."""
        for image in self.images[self.tower_images :]:
            if image.position >= end and undivided != UNDIVIDED_PROMPT:
                return None
            if image.position + image.length > start:
                return image
            self.tower_images, self.tower_slices = self.tower_images + 1, 0  # it is in the prefix cache
        return None

    def undivided_tokens(self, undivided: str) -> int:
        """The most tokens of its prompt that one step has to compute together."""
        if not self.images or not undivided:
            return 1
        return self.prompt_tokens if undivided == UNDIVIDED_PROMPT else max(one.length for one in self.images)

    def finish_reason(self) -> FinishReason | None:
        """LENGTH or EOS if it is complete. LENGTH takes precedence, as in TGI."""
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH
        return FinishReason.EOS if self.generated_tokens and self.token_ids[-1] in self.stop_ids else None

    def end_message(self, reason: FinishReason, message: str, now: float, retry_after_ms: int = 0) -> End:
        begun = now if self.first_planned_at is None else self.first_planned_at
        return End(
            self.rid,
            reason,
            message,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            cached_tokens=self.cached_tokens,
            queue_us=int((begun - self.received_at) * 1e6),
            inference_us=int((now - begun) * 1e6),
            retry_after_ms=retry_after_ms,
            vector=self.vector,
        )


def extras_out_of_range(extras: list[PageExtra], tokens: int) -> str:
    """Why pages of this many tokens cannot have these extras, in words; "" if they can."""
    last = 0
    for position, digest in extras:
        if not last <= position < tokens:
            return f"an extra of a page is at position {position} of {tokens}, after one at {last}"
        if len(digest) > MAX_EXTRA_BYTES:
            return f"an extra of a page has {len(digest)} bytes, at most {MAX_EXTRA_BYTES} are possible"
        last = position
    return ""


def images_out_of_range(images: list[ImageSegment], extras: list[PageExtra], tokens: int) -> str:
    """Why a prompt of this many tokens, whose pages have these extras, cannot have these images; "" if it can."""
    end, known = 0, set(extras)
    for position, length, digest, name, site, size in images:
        if not (end <= position < position + length <= tokens):
            return f"an image has positions {position} to {position + length - 1} of {tokens}, after one to {end - 1}"
        if len(digest) != IMAGE_DIGEST_BYTES or PageExtra(position, digest) not in known:
            return f"the image at position {position} has no digest among the extras of the pages"
        if not valid_file_name(name):
            return f"{name!r} is not the name of a file of the media directory"
        if not (0 < size <= MAX_IMAGE_FILE_BYTES or not site):
            return f"the file of an image on another host has {size} bytes"
        end = position + length
    return ""


@lru_cache(maxsize=64)
def _stop_id_set(column: bytes) -> frozenset[int]:
    """The ids of an int32 column. Cached, because nearly all requests have the same stop ids."""
    return frozenset(unpack_int32(column))


def validation_error(request: Request, limits: DeploymentLimits | None) -> str:
    """Why no worker with these limits can compute the request, in TGI's words; "" if one can. `limits` is None before
    the first worker is ready.

    `max_input_tokens` leaves room for one generated token, so a prompt-only request may have one token more.
    """
    tokens, total = request.prompt_tokens, request.max_total_tokens
    if not tokens:
        return "`inputs` cannot be empty"
    if total <= tokens and not (request.prompt_only and (request.lacks_prompt_logprobs or request.pooling)):
        return "`max_new_tokens` must be strictly positive"
    if limits is None:
        return ""
    if total > limits.max_total_tokens:
        return (
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {tokens} `inputs` tokens and {total - tokens} `max_new_tokens`"
        )
    if tokens > limits.max_input_tokens and not (request.prompt_only and tokens == limits.max_input_tokens + 1):
        return f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {tokens}"
    if (together := request.undivided_tokens(limits.undivided)) > limits.max_batch_prefill_tokens:
        what = "a prompt with images" if limits.undivided == UNDIVIDED_PROMPT else "an image"
        return (
            f"{what} must have at most {limits.max_batch_prefill_tokens} tokens (`max_batch_prefill_tokens`), since "
            f"this model computes it in one step. Given: {together}"
        )
    # A negative id is large as uint32. `reduce` because `max` makes two calls of Python code for it.
    if np.maximum.reduce(np.frombuffer(request.token_ids, np.uint32)) >= limits.vocab_size:
        return f"token ids must be below {limits.vocab_size}, and not negative"
    return ""


class TokenizerPeer:
    """One life of a tokenizer process: its requests by rid, and the tokens that the current result brings them."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.requests: dict[int, Request] = {}
        self.token_columns: SampledColumns = NO_TOKENS
        self.token_rows: list[SampledRow] = []  # follow those in the columns
        self.top_tokens: list[TopTokens] = []  # empty, or one per row; then the columns are empty

    def take_tokens(self) -> tuple[SampledColumns, list[SampledRow], list[TopTokens]]:
        tokens = self.token_columns, self.token_rows, self.top_tokens
        self.token_columns, self.token_rows, self.top_tokens = NO_TOKENS, [], []
        return tokens


class ClientShare:
    """The requests of one client of the server (an API key, or an address), and its virtual token counter.

    While its requests decode, each step adds the same to the counter, so nothing is counted per row: the counter is a
    linear function of the step number, made exact when a request leaves the decode rows.
    """

    __slots__ = ("decoding", "ended", "entered_steps", "in_heap", "input_cost", "name", "output_cost", "priority",
                 "running", "served", "waiting", "weight")  # fmt: skip

    input_cost: float  # what a computed prompt token adds to `served`
    output_cost: float  # and a generated one

    def __init__(self, name: str, weight: float, priority: int) -> None:
        self.name = name
        self.waiting: deque[Request] = deque()  # in the order of arrival; some have ended
        self.ended = 0  # how many of `waiting` have ended
        self.running = 0  # requests that hold a slot
        self.decoding = 0  # of these, requests in the decode rows
        self.entered_steps = 0  # sum of the step numbers at which those entered
        self.served = 0.0  # tokens computed for it / weight, without the rows of `decoding`
        self.in_heap = False  # whether the queue's heap has an entry of it
        self.set_rank(weight, priority)

    def set_rank(self, weight: float, priority: int) -> None:
        """Sets weight and priority, which a reloaded key file may change."""
        self.weight = weight
        self.priority = priority
        self.input_cost = INPUT_WEIGHT / weight
        self.output_cost = OUTPUT_WEIGHT / weight

    def counter(self, step: int) -> float:
        """The virtual token counter when step number `step` is planned."""
        return self.served + self.output_cost * (self.decoding * step - self.entered_steps)

    def enter_decode(self, request: Request, step: int) -> None:
        """A request decodes from the step after this one on."""
        request.decodes_since = step
        self.decoding += 1
        self.entered_steps += step

    def leave_decode(self, request: Request) -> None:
        """A request has left the decode rows: counts the positions that it has computed there."""
        self.decoding -= 1
        self.entered_steps -= request.decodes_since
        if (tokens := request.planned - request.charged_tokens) > 0:
            self.served += self.output_cost * tokens
            request.charged_tokens = request.planned

    @property
    def load(self) -> tuple[int, float]:
        """Orders clients by who is preempted first: lower priority, then more slots for its weight."""
        return -self.priority, self.running / self.weight

    def may_preempt(self, other: "ClientShare", step: int) -> bool:
        """Whether a request of this client that waits may take the slot of a running one of the other. Between equal
        priorities only if the other then still holds at least as much for its weight, so that the slot does not come
        and go, and if it has been served at least as much."""
        if other is self or not other.running:
            return False
        if other.priority != self.priority:
            return other.priority < self.priority
        return (other.running - 1) / other.weight >= (self.running + 1) / self.weight and self.counter(
            step
        ) <= other.counter(step)
