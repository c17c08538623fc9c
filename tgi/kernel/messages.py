"""Every message that flows between the floors. Read this file to know the house (and presence.py, what a process says
of itself, sampling.py, how a request draws, answer.py, how an answer is told, and states.py, a request's life).

Direction of travel (a request walks down, tokens walk up):

    api  -- Generate, Tokenize, Cancel -->  tokenizer  -- Add, Cancel, Stop -->  scheduler  -- Step -->    worker
    api  <-- Texts, End, Tokenized     --  tokenizer  <-- Tokens, End       --  scheduler  <-- Result --  worker
    (before its first Texts or Tokens a request may get Prompted, PromptTokens, PromptLogprobs)
    (Adapt walks down all the way, and its Adapted up)
    (Hello in both directions of every link; Status travels up from wherever something changed)

`rid` numbers a request on one link. It is chosen by the side that sends the request down and is unique for the life
of that process; every hop has its own numbering, so a rid means nothing beyond its link.

Columns (`bytes` fields named in the plural) are packed little-endian numbers, see kernel/pack.py.
Fields are only ever appended, with defaults.
"""

from enum import StrEnum
from typing import NamedTuple

from tgi.kernel.answer import Part, Prompted, PromptTokens, Texts
from tgi.kernel.codec import Codec
from tgi.kernel.presence import Hello, Ping, Refused, Status
from tgi.kernel.sampling import Sampling as Sampling

# So many of the likeliest tokens stand at most beside a drawn one: a Result must stay a small message.
MOST_TOPS = 1024
# So many stand at most beside a token of the prompt: a step, and a message, has thousands of these.
MOST_PROMPT_TOPS = 20
# So many tokens of a row may be drafted in one step: a Result counts what it drew in 8 bits.
MOST_DRAFTS = 254


class Reason(StrEnum):
    """Why a request ended. The first three are successes with all their tokens delivered."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    CANCELLED = "cancelled"  # the side that asked is gone or asked to stop
    INVALID = "validation"  # refused before any token; `message` is for the client
    OVERLOADED = "overloaded"
    FAILED = "generation"  # `message` says what broke
    TEMPLATE = "template"  # the chat template cannot render the messages; `message` is for the client


class End(NamedTuple):
    """The one and only end of a request, on the links api-tokenizer and tokenizer-scheduler.

    Durations are microseconds spent at the hops, so no clock readings ever cross a process border.
    """

    rid: int
    reason: str  # a Reason
    message: str = ""
    text: str = ""  # api link only: the whole generated text, special tokens left out
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    validation_us: int = 0  # tokenizer: received -> handed to the scheduler
    queue_us: int = 0  # scheduler: received -> first planned into a step
    inference_us: int = 0  # scheduler: first planned -> last token
    parts: list[Part] = []  # api link only: what the end of the text brings, behind the parts of its tokens


# --- api <-> tokenizer (answer.py has what comes of a Generate before its End) ----------------------------------------


class Generate(NamedTuple):
    """A request for tokens. `resume` holds the ids that the client has already been shown (int32 column): they are
    not sent again, and the stream goes on behind them.

    `chat`, if not empty, is a chat as JSON (`tokenizer/chat.py` names its keys) and takes the place of `inputs`. So
    does `input_ids`, if not empty: the prompt as ids, to which no special tokens are added. With `hide_stop` the text
    ends before the stop string, and `Texts.held` says what must not be shown yet.

    With `prompt_from` the tokens of the prompt come back too (PromptTokens), from this position on: 0 means all of
    them, and whoever resumes leaves out those that it has.
    `grammar`, if not empty, is a grammar as JSON (`tokenizer/grammar.py` names its keys): the tokenizer checks it and
    puts what the worker reads into `sampling`.
    A chat whose answer may hold more than text (reasoning, calls of tools) is divided into parts.

    `stop_token_ids` end the text as the model's own EOS does, also with `ignore_eos`. With `hide_stop` the text leaves
    out the token that ends it. `bad_words` are not generated: the tokenizer puts their ids into `sampling`.
    """

    rid: int
    inputs: str
    sampling: Sampling
    max_new_tokens: int | None = None  # None: fill the context; 0: only the prompt is computed
    truncate: int | None = None  # keep the last n prompt tokens
    stop: list[str] = []
    add_special_tokens: bool = True
    ignore_eos: bool = False
    resume: bytes = b""
    trace: str = ""
    chat: bytes = b""
    hide_stop: bool = False
    prompt_from: int | None = None  # None: the prompt's tokens are not wanted
    prompt_top_n: int = 0  # with each of them so many of the likeliest in its place; at most MOST_PROMPT_TOPS
    grammar: bytes = b""
    stop_token_ids: bytes = b""  # int32
    bad_words: list[str] = []
    skip_special_tokens: bool = True  # leave special tokens out of the text
    input_ids: bytes = b""  # int32


class Tokenize(NamedTuple):
    """Encode only, for the tokenize routes. `chat` as in Generate."""

    rid: int
    inputs: str
    add_special_tokens: bool = True
    chat: bytes = b""


class Tokenized(NamedTuple):
    """The answer to Tokenize. `starts` and `stops` are UTF-8 byte offsets into the text. `error` is "" on success."""

    rid: int
    ids: bytes  # int32
    starts: bytes  # int32
    stops: bytes  # int32
    special: bytes  # uint8
    error: str = ""
    text: str = ""  # what a chat has become; "" if none was given
    reason: str = Reason.INVALID  # which kind of error, if there is one: that or TEMPLATE


class Adapt(NamedTuple):
    """Load the LoRA adapter in directory `path` under this name, or unload it if `path` is empty.

    Goes down to the worker, hop by hop, and is answered by Adapted under the same rid. Loading a name that is there
    with the same content does nothing, so whoever restarts a floor may ask again. An adapter that is unloaded goes on
    for the requests that run.
    """

    rid: int
    name: str
    path: str


class Adapted(NamedTuple):
    """The answer to Adapt. On success the Status that tells of it was sent before."""

    rid: int
    error: str = ""  # for the client; "" on success


class Cancel(NamedTuple):
    """Nobody waits for this request any more (api-tokenizer and tokenizer-scheduler). Answered by its End."""

    rid: int


# --- tokenizer <-> scheduler ------------------------------------------------------------------------------------------


class Add(NamedTuple):
    """A request for ids. `prompt` and `resume` are int32 columns; `resume` are ids that were generated before (by a
    worker or scheduler that died, or before a preemption): they come back as prefill and count as generated.

    `sampling` is an encoded Sampling, handed on to the slot as it is. `stop_ids` (int32) end the request when drawn.
    `max_new_tokens` counts the resumed ids too. `salt`, if not empty, is the digest of the adapter that computes its
    pages: nobody else finds them.

    With `prompt_from` the logprobs of the prompt's tokens are wanted too (PromptLogprobs), from this position on. Where
    `max_new_tokens` is 0 these must be wanted, and the request ends when they have all been sent.
    """

    rid: int
    prompt: bytes
    max_new_tokens: int
    sampling: bytes
    stop_ids: bytes = b""
    resume: bytes = b""
    salt: bytes = b""
    trace: str = ""
    epoch: int = 0
    prompt_from: int = 0
    prompt_top_n: int = 0


class Stop(NamedTuple):
    """A stop string was found in the text: end this request with Reason.STOP and drop what is in the pipeline."""

    rid: int


class Tokens(NamedTuple):
    """The tokens of one step for one tokenizer: request rids[k] got counts[k] tokens. Top columns as in Texts."""

    rids: bytes  # uint32
    counts: bytes  # uint32
    ids: bytes  # int32, sum(counts)
    logprobs: bytes  # float32, sum(counts)
    top_counts: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(NamedTuple):
    """Logprobs of the next tokens of a prompt: in order, each once, from `Add.prompt_from` to the prompt's end; all
    before the request's first Tokens. Top columns as in PromptTokens."""

    rid: int
    logprobs: bytes  # float32
    top_ids: bytes = b""  # int32
    top_logprobs: bytes = b""  # float32


# --- scheduler <-> worker ---------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """A request moves into a slot of the worker. `tokens` (int32) are all ids known so far: prompt, then generated.

    Where `prompt_from` is not 0, a row that computes position p tells the logprob of the token at p + 1 as well, if
    that belongs to the prompt and p + 1 >= prompt_from. No row starts behind position prompt_from - 1 then.
    """

    slot: int
    tokens: bytes
    prompt_tokens: int
    sampling: bytes  # encoded Sampling
    prompt_from: int = 0
    prompt_top_n: int = 0


class Step(NamedTuple):
    """One forward pass, as changes to the worker's slots followed by the rows to compute.

    The worker keeps, per slot, the token ids, the page table and the sampling record. It applies `slots` (new
    occupants: an empty page table), then appends pages `page_ids` to the tables of `page_slots`, in order, then
    computes. Row k runs the tokens at positions starts[k] .. starts[k] + counts[k] - 1 of slot rows[k], whose keys
    and values go to the pages of those positions. Where draws[k] is 1 the row then draws the token of position
    starts[k] + counts[k], which the worker stores behind the others, so the next step can read it on the device
    before the scheduler has seen it.

    With speculation row k also runs drafts[k] tokens that it is only thought to draw, behind the known ones. It draws
    behind each of them as long as the draft is what was drawn, so it gets 1 to drafts[k] + 1 tokens (Result.counts).
    As its length is then unknown, a step after a step with drafts is sent only when the latter has been answered.
    """

    number: int  # counts up from 1 in an epoch
    epoch: int  # the scheduler's numbering of worker lives; a Result of another epoch is dropped
    slots: list[Slot]
    page_slots: bytes  # int32
    page_ids: bytes  # int32, same length
    rows: bytes  # int32 slots
    starts: bytes  # int32 positions
    counts: bytes  # int32 tokens to compute, >= 1
    draws: bytes  # uint8
    drafts: bytes = b""  # int32, one per row; empty: none has any. A row with drafts has draws = 1
    draft_ids: bytes = b""  # int32, sum(drafts); empty: the worker's draft model is to find them


class Result(NamedTuple):
    """What a step drew: one entry per row with draws = 1, in the order of `Step.rows`.

    `error` is non-empty if the step failed as a whole (then nothing was drawn and the worker goes on).
    """

    number: int
    epoch: int
    counts: bytes  # uint8: tokens per drawing row (more than one with speculation)
    ids: bytes  # int32, sum(counts)
    logprobs: bytes  # float32, sum(counts)
    forward_us: int = 0
    error: str = ""
    top_counts: bytes = b""  # as in Texts
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    prompt_logprobs: bytes = b""  # float32: of the prompts' tokens that this step tells, row by row
    prompt_top_ids: bytes = b""  # int32: beside each of them, min(Slot.prompt_top_n, vocabulary)
    prompt_top_logprobs: bytes = b""  # float32, same length
    faults: list[str] = []  # empty, or one per row of the step: why it cannot go on (what it drew means nothing), or ""


# The tag of a message is its place in this list: append only.
MESSAGES: list[type] = [
    Hello,
    Status,
    Sampling,
    End,
    Generate,
    Texts,
    Tokenize,
    Tokenized,
    Cancel,
    Add,
    Stop,
    Tokens,
    Step,
    Result,
    Refused,
    Prompted,
    Ping,
    PromptTokens,
    PromptLogprobs,
    Adapt,
    Adapted,
]

codec = Codec(MESSAGES)
encode = codec.encode
decode = codec.decode
