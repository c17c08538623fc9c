"""Every message between processes. Read from top to bottom: links, the life of a request, then the messages in the
order in which a request meets them (api, media, tokenizer, scheduler, worker, and back).

Requests travel down, tokens travel up:

    api  -- LoadImage -->  media  -- ImageLoaded -->  api, for each image of a request, before its Generate
    api  -- Generate, Tokenize, Cancel -->  tokenizer  -- Add, Cancel, Stop -->  scheduler  -- Step -------->  worker
    api  <-- Texts, End, Tokenized     --  tokenizer  <-- Tokens, End       --  scheduler  <-- StepResult --  worker
    (before its first Texts or Tokens a request may get Prompted, PromptTokens, PromptLogprobs)
    (UpdateAdapter travels down to the worker, its answer AdapterUpdated up)
    (TransferPages travels from the scheduler to the worker, its answer PagesTransferred back)
    (OfferMemory, JoinGroup and GroupFormed are exchanged by the ranks of one worker)
    (images of other hosts: NeedImage travels from the scheduler to the worker, FetchImage from there up to the api, and
    ImageChunk back)
    (Hello in both directions of every link, Goodbye at an orderly end, Beat every half second, but not to a worker;
    Status travels up whenever something changed)

`rid` numbers a request on one link. The process that sends the request down chooses it, unique within its own lifetime.
Every link has its own numbering, so a rid means nothing on another link.

Columns (`bytes` fields named in the plural) are packed little-endian numbers, see codec.py. Within a protocol version
fields are appended only, with defaults, and tags are positions in MESSAGES, so peers of different
versions of tgi understand each other. Any other change needs a new PROTOCOL: links reject peers with another one.
SamplingParams is declared in sampling_params.py, KVGroup in kv_groups.py.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from tgi.microkernel.admission.api_keys import MAX_WEIGHT, MIN_WEIGHT
from tgi.microkernel.messages.codec import Codec
from tgi.microkernel.messages.kv_groups import (
    ONE_FULL_GROUP,
    KVGroup,
    groups_out_of_range,
    longest_request,
    pages_needed,
    recurrent_group,
)
from tgi.microkernel.messages.sampling_params import SamplingDefaults, SamplingParams

# 2: RequestContext in Generate, Tokenize and Add. 3: KV groups, each with a page table of its own.
PROTOCOL = 3
# In the direction of requests.
ROLES = ("api", "media", "tokenizer", "scheduler", "worker")
# The roles of the peers of a link, by the own role and whether the link binds. So keys of front ends do not admit a
# process that claims to be a scheduler.
PEER_ROLES = {
    ("api", False): ("media", "tokenizer"),
    ("media", True): ("api",),
    ("tokenizer", True): ("api",),
    ("tokenizer", False): ("scheduler",),
    ("scheduler", True): ("tokenizer", "worker"),
    ("worker", False): ("scheduler", "worker"),  # further ranks connect to the first one
    ("worker", True): ("worker",),
}
# Roles that get no Beats and watch no peer: a worker that computes does not look at its links.
ROLES_WITHOUT_BEATS = ("worker",)
# Steps that the scheduler may send before the first one is answered. A step with drafts is alone.
PIPELINE_DEPTH = 2
# Maximum of SamplingParams.top_n: bounds the size of a StepResult.
MAX_TOP_TOKENS = 1024
# Maximum of prompt_top_n. Lower, since one step may compute thousands of prompt tokens.
MAX_PROMPT_TOP_TOKENS = 20
# Maximum number of draft tokens per row and step: StepResult.counts (draft tokens + 1) are 8-bit.
MAX_DRAFT_TOKENS = 254


# --- links ------------------------------------------------------------------------------------------------------------


class LastExit(NamedTuple):
    """How the previous process of a role and replica ended, as its supervisor saw it: the evidence for crash isolation.

    `outside`: a signal ended it that neither its supervisor nor the kernel's memory limit had sent, so that the work in
    progress is hardly the cause. `in_progress` are the fingerprints of the requests that it was working on, 8 bytes
    each; empty if it does not know them, as the worker.
    """

    boot: bytes
    cause: str
    outside: bool
    in_progress: bytes = b""
    lived_ms: int = 0  # from its start on


class SuspectRecord(NamedTuple):
    """A request that the scheduler suspects of crashing processes: fields as in `crash_isolation.Suspect`."""

    fingerprint: bytes
    strikes: int
    quarantined: bool
    cause: str
    blamed_at: float
    outside_deaths: int
    group: int
    tokens_left: int


class PredecessorState(NamedTuple):
    """What a scheduler takes over from the one that ended before it, from a file in the run directory and from its
    supervisor. The first message that it handles; never sent over a link."""

    suspects: list[SuspectRecord]
    last_exit: LastExit | None = None
    adapter_changes: list["UpdateAdapter"] = []  # by name the latest that is wanted, see WorkerAdapters


class ModelTask(StrEnum):
    """What a model makes of a text."""

    GENERATE = "generate"  # tokens
    EMBED = "embed"  # one vector
    CLASSIFY = "classify"  # one logit for each label, or one score of a pair of texts


class ModelSource(NamedTuple):
    """What /info shows of the served model's files; sha and tag are "" if it did not come from the Hub. Then what a
    front end needs to know of a model that ends in a vector."""

    sha: str = ""  # commit
    pipeline_tag: str = ""
    eos_token_ids: list[int] = []  # ascending
    task: str = ModelTask.GENERATE  # a ModelTask
    normalizes: bool = False  # the model's vectors have length 1
    labels: list[str] = []  # of a classifier, by index
    multi_label: bool = False  # its labels do not exclude each other
    prompts: list[str] = []  # names of the prompts that PoolingInput may ask for
    image_token: str = ""  # what a prompt has for each image; "": the model reads text alone


class Hello(NamedTuple):
    """The first message in each direction of a connection: identifies the process.

    The same role and replica with a new `boot` id means that the process was restarted and has lost its state; its
    upstream neighbour then resubmits the requests in flight. `model` is a hash of what is served (config,
    tokenizer, quantization, type of the KV cache), empty while unknown. Neighbours with different hashes reject
    each other.
    """

    protocol: int
    role: str
    replica: int  # index among the processes of its role: 0, 1, …
    boot: bytes
    model: str = ""
    epoch: int = 0
    rank: int = 0
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # tokenizers only: defaults for requests on /v1
    site: str = ""  # the id of its run directory: each has its own replica 0 of a role
    last_exit: LastExit | None = None  # None: the first process of its supervisor
    source: ModelSource | None = None  # tokenizers only, for front ends that have no model directory
    keeps_pages: bool = False  # workers only: it shares the KV cache of the process of `last_exit`, which is as it was


class LinkRejected(NamedTuple):
    """The answer to a Hello whose protocol version or model differs: `message` says why. The link stays unused."""

    message: str


class Ping(NamedTuple):
    """Liveness probe without an answer: a failed send means that the peer has disconnected."""


class Beat(NamedTuple):
    """Sent every half second to every neighbour but a worker, by a process whose loop turns. Only upstream neighbours
    read the fields.

    `progress_age_ms`: since the process, or one below it, has finished a part of its work; None if it has no work.
    `limit_ms`: how long that may take, as learned from earlier work; 0: unknown. `work` is for people.
    """

    progress_age_ms: int | None
    limit_ms: int = 0
    work: str = ""


class Goodbye(NamedTuple):
    """The last message of a process that ends because it was told to: its neighbours go on without it at once, and know
    that no request is the cause. The connecting side answers with a Goodbye of its own; the other waits for that before
    it closes the connection."""


UNDIVIDED_IMAGES, UNDIVIDED_PROMPT = "images", "prompt"  # each image; all of the prompt
# A worker keeps what its vision tower has computed of this many images that it computes in slices.
MAX_DIVIDED_IMAGES = 4


class DeploymentLimits(NamedTuple):
    """The limits that the worker measured when it was first ready. They hold until the deployment ends."""

    max_total_tokens: int  # prompt and generated tokens of one request
    max_input_tokens: int  # prompt tokens of one request
    max_batch_total_tokens: int  # tokens that the KV cache holds in requests of max_total_tokens
    max_batch_prefill_tokens: int  # tokens computed in one step
    max_batch_size: int  # slots: rows that may run at once
    pages: int
    page_size: int  # tokens per page
    vocab_size: int
    dtype: str  # "float32", "bfloat16", "float16"
    device: str  # "cpu", "cuda"
    groups: list[KVGroup] = ONE_FULL_GROUP  # what the model's layers keep; each but a recurrent one has a page table
    undivided: str = ""  # what of a prompt with images one step computes as a whole, since its tokens see later ones
    max_running_images: int = 1 << 16  # of the requests that hold slots; one that holds them alone may have more
    tower_slices: int = 1  # into which the vision tower's work for an image may be divided; 1: it is not

    def pages_needed(self, tokens: int) -> int:
        """The pages that a request of this many tokens holds at most."""
        return pages_needed(self.groups, tokens, self.max_batch_prefill_tokens, self.page_size)

    @property
    def state_slots(self) -> int:
        """Recurrent states that the worker keeps: of the slots, of rows that pad a batch, snapshots, and those before
        the drafts of a step; 0: its model has no recurrent layers."""
        recurrent = recurrent_group(self.groups)
        return 0 if recurrent is None else self.max_batch_size + 1 + recurrent.snapshots + recurrent.drafts

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache, recurrent states included."""
        return self.pages * self.groups[0].page_bytes + self.state_slots * self.groups[-1].page_bytes

    def longest_request(self) -> int:
        """The tokens of the longest request, within `max_total_tokens`, for which there are pages."""
        return longest_request(
            self.groups, self.pages, self.max_batch_prefill_tokens, self.page_size, self.max_total_tokens
        )


# What a process allocates grows with these limits: far above those of any worker, and below what exhausts memory.
LARGEST_LIMITS = {"max_batch_size": 1 << 16, "pages": 1 << 24, "page_size": 1 << 16}
LARGEST_OTHER_LIMIT = 2**31 - 1  # token counts and ids are int32


def limits_out_of_range(limits: DeploymentLimits) -> str:
    """Which limits no worker can have, in words; "" if there are none."""
    numbers = {name: value for name, value in limits._asdict().items() if isinstance(value, int)}
    faults = [
        f"{name} is {value}"
        for name, value in numbers.items()
        if not 1 <= value <= LARGEST_LIMITS.get(name, LARGEST_OTHER_LIMIT)
    ]
    if fault := groups_out_of_range(limits.groups):
        faults.append(fault)
    if not faults and limits.pages_needed(1) > limits.pages:
        faults.append(f"pages is {limits.pages}, {limits.pages_needed(1)} are needed for one token")
    return "; ".join(faults)


# What a request was promised with its tokens and pages; the same for every worker that may compute it.
EQUAL_LIMITS = ("page_size", "vocab_size", "dtype")


def limits_shortfall(
    held: DeploymentLimits,
    offered: DeploymentLimits,
    minimum: Sequence[str],
    equal: Sequence[str] = EQUAL_LIMITS,
) -> str:
    """Why a worker does not meet the limits that hold, in words; "" if it does. `minimum`: the limits of which it may
    offer more. `equal`: those of which it may not; of groups, what a scheduler plans with, not the bytes of a page, and
    more snapshots are as good."""
    lacking = [
        f"a KV group has {mine.snapshots} snapshots, at least {least.snapshots} are needed"
        for least, mine in zip(held.groups, offered.groups, strict=False)
        if "groups" in equal and mine.snapshots < least.snapshots
    ]
    held, offered = (
        limits._replace(groups=[group._replace(page_bytes=0, snapshots=0) for group in limits.groups])
        for limits in (held, offered)
    )
    faults = [
        f"{name} is {getattr(offered, name)}, at least {getattr(held, name)} is needed"
        for name in minimum
        if getattr(offered, name) < getattr(held, name)
    ]
    faults += [
        f"{name} is {getattr(offered, name)} instead of {getattr(held, name)}"
        for name in equal
        if getattr(offered, name) != getattr(held, name)
    ]
    return "; ".join([*faults, *lacking])


class LoadedAdapter(NamedTuple):
    """A loaded LoRA adapter. `digest` identifies its content: it separates prefix caches, and detects at a replay that
    another adapter was loaded under the same name."""

    name: str
    path: str  # its directory
    digest: bytes


class UpdateAdapter(NamedTuple):
    """Loads the LoRA adapter in directory `path` under this name, or unloads it if `path` is empty.

    Forwarded hop by hop to the worker; answered by AdapterUpdated under the same rid. Idempotent: loading the same
    content under the same name does nothing, so the request may be repeated after a restart. Requests that run with an
    unloaded adapter finish with it. The worker applies it when it has begun all steps that were sent before.

    A tokenizer stamps each change, so that all schedulers come to the same state: of two changes of a name the later
    one holds. The change that takes one back has the next stamp, so that it replaces no other. With rid 0 it tells a
    scheduler of a change that it may not know, which is not answered.
    """

    rid: int
    name: str
    path: str
    stamp: int = 0  # microseconds since 1970, and later than that of each change that the tokenizer knew; 0: none yet

    def replaces(self, other: "UpdateAdapter | None") -> bool:
        """Whether this is a later change of the same name."""
        return other is None or (self.stamp, self.path) > (other.stamp, other.path)


# Changes of adapters that are remembered. Of more, those that unload are forgotten first.
MAX_ADAPTER_CHANGES = 256


def record_change(changes: dict[str, UpdateAdapter], change: UpdateAdapter) -> bool:
    """Remembers a change under its name. Returns False if a later one is known, or the same."""
    if not change.replaces(changes.get(change.name)):
        return False
    changes[change.name] = change._replace(rid=0)
    if len(changes) > MAX_ADAPTER_CHANGES:
        del changes[min(changes, key=lambda name: (changes[name].path != "", changes[name].stamp))]
    return True


class Status(NamedTuple):
    """The state of the processes below the sender. Sent up at each change; each hop forwards the worst that it knows.

    `ready`: a request that is sent down now would be computed. `healthy` is false while work is in flight and no step
    has finished within the limit. `stage` and `percent` describe start-up ("loading weights", 40).

    From a scheduler: `suspects` are the fingerprints of requests that may have ended or stopped its worker. They are
    tried there, so that they do not end the workers of other replicas. `draining`: it takes no new requests.
    `adapter_changes` are those that it has carried out, and those that it was told of and will carry out.
    """

    ready: bool
    healthy: bool
    stage: str
    percent: int
    limits: DeploymentLimits | None = None
    queued: int = 0
    running: int = 0
    predicted_wait_ms: int = 0  # predicted queue time of a request that arrives now
    mean_end_interval_ms: int = 0  # recent mean time between the ends of two requests
    adapters: list[LoadedAdapter] = []  # those that requests may name, in their order of loading
    suspects: bytes = b""  # 8 bytes each
    draining: bool = False
    adapter_changes: list[
        UpdateAdapter
    ] = []  # from a scheduler: the latest change of each name, without those at start


# --- the life of a request --------------------------------------------------------------------------------------------


class RequestState(StrEnum):
    """The state of a request in the scheduler. The api and the tokenizer know QUEUED and ENDED only."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


# As module constants for hot loops, where the attribute lookup of an enum is measurable.
QUEUED, PREFILL, DECODE, ENDED = RequestState


class RequestEvent(dict[RequestState, RequestState]):
    """A transition of the request state machine: `request.state = END[request.state]`.

    Raises ValueError in a state in which the event is illegal: a defect of this program, never a result of input.
    """

    def __init__(self, name: str, leads: dict[RequestState, RequestState]) -> None:
        super().__init__(leads)
        self.name = name

    def __missing__(self, state: RequestState) -> RequestState:
        raise ValueError(f"illegal transition: {self.name!r} in state {state}")


# The single source of legal transitions. ENDED is final and is reached exactly once.
CHUNK = RequestEvent("chunk", {QUEUED: PREFILL, PREFILL: PREFILL})
LAST_CHUNK = RequestEvent("last chunk", {QUEUED: DECODE, PREFILL: DECODE})
PREEMPT = RequestEvent("preempt", {PREFILL: QUEUED, DECODE: QUEUED})
WORKER_LOST = RequestEvent("worker lost", {PREFILL: QUEUED, DECODE: QUEUED})
END = RequestEvent("end", {QUEUED: ENDED, PREFILL: ENDED, DECODE: ENDED})
EVENTS = (CHUNK, LAST_CHUNK, PREEMPT, WORKER_LOST, END)


class FinishReason(StrEnum):
    """Why a request ended. The first three are SUCCESSES, with all tokens delivered."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    CANCELLED = "cancelled"  # the client disconnected or cancelled the request
    INVALID = "validation"  # rejected before the first token; `message` is for the client
    OVERLOADED = "overloaded"
    FAILED = "generation"  # `message` describes the failure
    QUARANTINED = "quarantined"  # as FAILED, and the request must not be sent again: it crashes processes
    TIMEOUT = "timeout"  # its deadline has passed; `message` tells the time that it had
    TEMPLATE = "template"  # the chat template cannot render the messages; `message` is for the client


# The ends of requests that have got all their tokens.
SUCCESSES = frozenset((FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP))

# `End.message` of a cancelled request whose stream goes on: it is kept for the client, or another request resumes it.
DETACHED = "detached from its stream"


class RequestContext(NamedTuple):
    """What a request carries from the front end to the scheduler: the front end makes it at each submission, the
    tokenizer hands it on.

    `fingerprint` names the request in crash isolation, 8 bytes: equal for equal requests of clients, b"" for one that
    is never suspected. `client` is whose share of the server it uses; its weight and priority come with each request,
    so that the scheduler needs no table of clients.

    `generation_id` is the same at each submission of a generation, and no other's; 0: unknown. `attempt` counts the
    submissions: a later one replaces an earlier one, which a process that was stopped may still have.
    """

    fingerprint: bytes = b""
    request_key: int = 0  # of the HTTP request, for the flight recorder; 0: not recorded
    request_index: int = 0  # of this generation in the HTTP request
    client: str = ""  # digest of the API key, else the client's address
    weight: float = 1.0  # of the client's share, see api_keys.py
    priority: int = 0  # requests of a higher priority are admitted first
    generation_id: int = 0
    attempt: int = 0
    deadline_ms: int = 0  # milliseconds that the client still waits when this is sent; 0: no limit
    waited_ms: int = 0  # since the front end received it, if known: its place in the queue
    traceparent: str = ""  # W3C trace context

    def after(self, elapsed_ms: int) -> "RequestContext":
        """The context of the same request when it is passed on so much later. Clocks of processes are not compared."""
        if not elapsed_ms:
            return self
        deadline_ms = self.deadline_ms and max(1, self.deadline_ms - elapsed_ms)
        return self._replace(deadline_ms=deadline_ms, waited_ms=self.waited_ms + elapsed_ms)

    def out_of_range(self) -> str:
        """Which number no front end sends, in words; "" if there is none."""
        # `request_key` and `request_index` are stamped as uint64 and int32, the times counted in int64.
        if not 0 <= self.request_key < 2**64:
            return f"the context's `request_key` is {self.request_key}"
        if not 0 <= self.request_index < 2**31:
            return f"the context's `request_index` is {self.request_index}"
        if not 0 <= self.deadline_ms < 2**63:
            return f"the context's `deadline_ms` is {self.deadline_ms}"
        if not 0 <= self.waited_ms < 2**63:
            return f"the context's `waited_ms` is {self.waited_ms}"
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            return f"the context's `weight` is {self.weight}"
        return ""


# --- api -> media, and back -------------------------------------------------------------------------------------------


class ImageInput(NamedTuple):
    """An image of a prompt, which a media process has fetched, decoded and processed.

    The prompt has a placeholder for each image, the model's image token, in the order of the images. The placeholder's
    id is replaced by `prompt_ids`. The file `name` of the media directory has the tensors that the model's processor
    returned (safetensors).
    """

    digest: bytes  # 16 bytes, of the encoded image, the processor's configuration and its arguments
    prompt_ids: bytes  # int32
    name: str  # see valid_file_name
    site: str = ""  # whose media directory it is in, as Hello.site; "": the worker's
    size: int = 0  # bytes of the file


class LoadImage(NamedTuple):
    """Asks a media process for the image at `url`: an https, http or data URL. Answered by ImageLoaded under the same
    rid; a Cancel ends it without an answer. `images` is how many the prompt has: some processors divide an image into
    tiles only if it is alone.

    The media process keeps the image's file under `name` in the media directory, where the api removes it when the
    request has ended. `detail` is OpenAI's: "low" makes the image small first.
    """

    rid: int
    name: str  # see valid_file_name
    url: str
    detail: str = ""
    context: RequestContext = RequestContext()
    images: int = 1


class ImageLoaded(NamedTuple):
    """The answer to LoadImage. `error` is for the client; "" on success. `overloaded`: the same may succeed later."""

    rid: int
    image: ImageInput = ImageInput(b"", b"", "")
    error: str = ""
    overloaded: bool = False


# --- api -> tokenizer -------------------------------------------------------------------------------------------------


class PoolingInput(NamedTuple):
    """A Generate that ends in a vector (End.vector) instead of tokens."""

    pair: str | None = None  # a second text, which is encoded with `inputs` as one pair; None: there is none
    truncate: int | None = None  # keep the first n tokens; 0: as many as the model takes
    keep_end: bool = False  # `truncate` keeps the last ones instead
    prompt: str = ""  # the name of one of the model's prompts, which precedes the text


class Generate(NamedTuple):
    """A generation request. The prompt is `inputs`, or `chat` or `input_ids` if one of these is not empty.

    `chat` is a chat as JSON (keys: `tokenizer/chat.py`). `input_ids` get no special tokens. `resume_ids` are the ids
    that the client has received before a process was lost: they are not sent again, the stream continues after them.

    With `prompt_logprobs_from` the prompt's tokens are returned (PromptTokens) from this position on; a resumed request
    leaves out those that the client has. `grammar` is a grammar as JSON (keys:
    `tokenizer/structured_output/grammar.py`): the tokenizer validates it and puts the worker's form into `sampling`. It
    also puts the ids of `bad_words`, which are never generated, and of all tokens that read like one of `listed_texts`,
    whose logprobs are listed in place of the likeliest tokens', there. If the answer to a chat may hold reasoning or
    tool calls, it comes divided into parts.

    `stop_token_ids` end the text like the model's EOS, even with `ignore_eos`. With `hide_stop` the text excludes the
    stop string or the stop token, and `Texts.held_chars` says what must not be shown yet.

    A tokenizer keeps all it has sent about a request with a `resume_key` until `resume_window_ms` after its End, or
    after the loss of the client or the api; it continues the request meanwhile. A Generate with the same key and no
    `resume_ids`, from any api, takes it over: all is sent again under the new rid, then what follows.

    With `alone` the tokenizer works on the request only while it has nothing else in progress.

    `images` belong to `inputs` or `chat`, whose text has a placeholder for each.
    """

    rid: int
    inputs: str
    sampling: SamplingParams
    max_new_tokens: int | None = None  # None: up to the context length; 0: only the prompt is computed
    truncate: int | None = None  # keep the last n prompt tokens
    stop_strings: list[str] = []
    add_special_tokens: bool = True
    ignore_eos: bool = False
    resume_ids: bytes = b""  # int32
    chat: bytes = b""
    hide_stop: bool = False
    prompt_logprobs_from: int | None = None  # 0: from the first token on; None: the prompt's tokens are not returned
    prompt_top_n: int = 0  # alternatives returned with each prompt token; at most MAX_PROMPT_TOP_TOKENS
    grammar: bytes = b""
    stop_token_ids: bytes = b""  # int32
    bad_words: list[str] = []
    skip_special_tokens: bool = True  # leave special tokens out of the text
    input_ids: bytes = b""  # int32
    alone: bool = False
    resume_key: bytes = b""
    resume_window_ms: int = 0
    resume_limit: int = 0  # this many of the client's streams may run without an api; 0: any number
    tells_prompt: bool = False  # Prompted is sent for a text, too: the client is told the prompt's length in a stream
    context: RequestContext = RequestContext()
    pooling: PoolingInput | None = None  # with max_new_tokens 0: the request ends in a vector
    listed_texts: list[str] = []  # with `top_n` > 0
    images: list[ImageInput] = []  # in the order of their placeholders


class Tokenize(NamedTuple):
    """A request of the tokenize routes. `chat`, `alone` and `images` as in Generate. Answered by Tokenized."""

    rid: int
    inputs: str
    add_special_tokens: bool = True
    chat: bytes = b""
    alone: bool = False
    context: RequestContext = RequestContext()
    ids: bytes = b""  # int32: to be converted to text, in place of `inputs`
    images: list[ImageInput] = []


class Cancel(NamedTuple):
    """Ends a request whose result is not needed any more (api-tokenizer and tokenizer-scheduler). Answered by End.

    With `client_lost` (api-tokenizer) a request with a `resume_key` continues in the tokenizer for its window.
    """

    rid: int
    client_lost: bool = False


class OfferMemory(NamedTuple):
    """From the first rank of a worker to a further one that it has not started: memory for collective operations,
    which is the file descriptor `file` of the process `pid`. Its name has the `token`."""

    pid: int
    file: int
    token: str


class JoinGroup(NamedTuple):
    """The answer to OfferMemory: the rank is ready to form a group. `host` is an id of its machine. `settings`, a JSON
    object, must be the same on all ranks. `memory_error` says why it cannot use the memory, or is empty."""

    rank: int
    ranks: int
    host: str
    settings: str
    memory_error: str = "it was offered none"


class GroupFormed(NamedTuple):
    """The answer to JoinGroup when all ranks have joined: the port at the first rank's host where torch.distributed
    meets, how many lower ranks run on the receiver's machine, and how many in all. With an `error` the first rank has
    refused it. When a member is gone, all others end. If `shares_memory`, all ranks use the memory of the first one."""

    port: int
    local_rank: int
    local_ranks: int
    error: str = ""
    shares_memory: bool = False


# --- tokenizer -> scheduler -------------------------------------------------------------------------------------------


class ResetSlots(NamedTuple):
    """Removes all requests of a rank's slots. The content of the KV pages stays."""


class PageExtra(NamedTuple):
    """What the keys and values from this position of a prompt on depend on besides ids, such as the content of an
    image: the prefix cache matches a page that contains the position only under an equal digest."""

    position: int
    digest: bytes


class ImageSegment(NamedTuple):
    """The ids of a prompt that stand for an image: their embeddings come from the model's vision tower.

    `length` ids from `position` on; those among them that are not the model's image token, such as marks of rows, are
    embedded as text. The worker reads the file `name` of the media directory when it computes the image, and keeps
    its embeddings under the `digest`. If the file is on another host (`site`), it reads the one that it has received.
    """

    position: int
    length: int
    digest: bytes
    name: str  # see valid_file_name
    site: str = ""  # as in ImageInput
    size: int = 0


# Of an image's digest, of the name of its file, and of the file: a megapixel of patches is 12 MB in float32.
IMAGE_DIGEST_BYTES = 16
MAX_FILE_NAME = 255
MAX_IMAGE_FILE_BYTES = 1 << 30
# Of the file, in one message: less than a second of 10 Mbit/s.
IMAGE_CHUNK_BYTES = 256 << 10


def valid_file_name(name: str) -> bool:
    """Whether this names a file of the media directory itself: letters, digits, `.`, `-` and `_`, not a dot first."""
    plain = name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    return plain and not name.startswith(".") and len(name) <= MAX_FILE_NAME


class Add(NamedTuple):
    """A tokenized request. `resume_ids` were generated before (by a worker or scheduler that died, or before a
    preemption): they are computed as prefill and count as generated.

    `sampling` is an encoded SamplingParams, which the scheduler hands on as it is. A sampled id among `stop_ids` ends
    the request. `max_new_tokens` includes the resumed ids. `cache_salt`, if not empty, is the digest of the adapter
    that computes the pages: the prefix cache matches pages of equal salt only.

    `prompt_logprobs_from` and `prompt_top_n` as in Generate, answered by PromptLogprobs; 0: not wanted. With
    `max_new_tokens` 0 they or `pooling` are required: the request ends when all prompt logprobs were sent, or with the
    vector of its prompt.

    For each of `images` the prefix cache needs one of `extras`, at its position.
    """

    rid: int
    prompt_ids: bytes  # int32
    max_new_tokens: int
    sampling: bytes
    stop_ids: bytes = b""  # int32
    resume_ids: bytes = b""  # int32
    cache_salt: bytes = b""
    prompt_logprobs_from: int = 0
    prompt_top_n: int = 0
    context: RequestContext = RequestContext()
    pooling: bool = False  # the request ends in a vector (End.vector)
    extras: list[PageExtra] = []  # in the order of positions
    images: list[ImageSegment] = []  # in the order of positions, none of them in another


class Stop(NamedTuple):
    """A stop string was found in the text: ends the request with FinishReason.STOP and drops its steps in flight."""

    rid: int


# --- scheduler -> worker, and back ------------------------------------------------------------------------------------


class SlotAssignment(NamedTuple):
    """Puts a request into a slot of the worker. `token_ids` are all ids known so far: prompt, then generated.

    With `prompt_logprobs_from` > 0, a row that computes position p also returns the logprob of the token at p + 1 if
    that belongs to the prompt and p + 1 >= prompt_logprobs_from. No row then starts after prompt_logprobs_from - 1.
    """

    slot: int
    token_ids: bytes  # int32
    prompt_tokens: int
    sampling: bytes  # encoded SamplingParams
    prompt_logprobs_from: int = 0
    prompt_top_n: int = 0
    extras: list[PageExtra] = []  # of its pages, the adapter included; HeldPages tells them to the next scheduler
    images: list[ImageSegment] = []  # of its prompt


class Step(NamedTuple):
    """One forward pass: changes to the worker's slots, then the rows to compute.

    The worker keeps token ids, page tables and sampling parameters of each slot. It applies `slots` (new requests with
    empty page tables), appends the pages `page_ids` to the tables `page_tables` in order, and computes the rows. Slot
    s has a table for each of the G KV groups that have pages (DeploymentLimits.groups): table s * G + g belongs to
    group g. Row k computes the tokens at positions starts[k] .. starts[k] + counts[k] - 1 of slot rows[k] and writes
    their keys and values to the pages of those positions. If samples[k] is 1, it then samples the token at position
    starts[k] + counts[k]. The worker appends it to the slot's ids, so the next step can read it on the device before
    the scheduler has received it.

    Recurrent layers have a state per slot, which a row overwrites; one that begins at position 0 begins with zeros. The
    worker copies the states in `state_copies` before it computes the rows, and before it applies `slots`.

    Speculation: row k also computes drafts[k] draft tokens after the known ones. It samples after each draft token as
    long as the draft matches the sampled token, so it yields 1 to drafts[k] + 1 tokens (StepResult.counts). The length
    of the row is unknown until then: the step after a step with drafts is sent only when that has been answered.
    The worker takes the states of recurrent layers back to the first rejected draft. A step has no more drafts than
    the group of such layers (KVGroup.drafts) tells.

    Images: before the rows the worker computes the slices of its vision tower that `tower` tells, in order. Such a step
    may have no rows. What is left of an image that a row needs is computed with that row.
    """

    number: int  # counts up from 1 in an epoch
    epoch: int  # number of this worker's life, by the scheduler; a StepResult of another epoch is dropped
    slots: list[SlotAssignment]
    page_tables: bytes  # int32: numbers of page tables
    page_ids: bytes  # int32, same length; -1 in a group with a sliding window: no row needs this page
    rows: bytes  # int32: slot of each row
    starts: bytes  # int32: first position of each row
    counts: bytes  # int32: tokens that each row computes, >= 1
    samples: bytes  # uint8
    drafts: bytes = b""  # int32, one per row; empty: none has any. A row with drafts has samples = 1
    draft_ids: bytes = b""  # int32, sum(drafts); empty: the worker's draft model proposes them
    limit_ms: int = 0  # the worker hangs if it computes this step for longer; 0: nothing is known of such steps
    state_copies: bytes = b""  # int32: pairs of source and target, in order: slot s, or snapshot n as -1 - n
    tower: bytes = b""  # int32: triples of a slot, the index of one of its images, and how many slices more


class StepResult(NamedTuple):
    """The tokens of a step: one entry per row with samples = 1, in the order of `Step.rows`.

    A non-empty `error`: the step failed as a whole, no token was sampled, and the worker continues. With
    `out_of_memory` the step was too large for the memory that is free; what earlier steps have computed stays.
    """

    number: int
    epoch: int
    counts: bytes  # uint8: tokens per sampling row (more than one with speculation)
    token_ids: bytes  # int32, sum(counts)
    logprobs: bytes  # float32, sum(counts)
    forward_us: int = 0
    error: str = ""
    top_counts: bytes = b""  # top columns as in Texts
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    prompt_logprobs: bytes = b""  # float32: of the prompt tokens that this step computed, row by row
    prompt_top_ids: bytes = b""  # int32: with each of them min(SlotAssignment.prompt_top_n, vocabulary) alternatives
    prompt_top_logprobs: bytes = b""  # float32, same length
    row_errors: list[str] = []  # empty, or per row why it cannot continue (then its tokens are invalid), or ""
    out_of_memory: bool = False
    # float32: a vector for each row that ends a prompt of which neither a token nor prompt logprobs are wanted, in the
    # order of the rows; all of one length.
    vectors: bytes = b""
    encoder_us: int = 0  # of forward_us: what the vision tower took
    encoder_positions: int = 0  # image tokens that it computed


class HeldPages(NamedTuple):
    """KV pages that the worker has computed for the scheduler before this one: `page_ids` hold the keys and values of
    `token_ids`, from the first token on, of each KV group one after the other; -1: the page is not held. A recurrent
    group has instead the numbers of the snapshots taken at the ends of these pages. A worker that is ready sends one
    for each slot to a scheduler that connects, before its Status."""

    token_ids: bytes  # int32, as many as the pages hold
    page_ids: bytes  # int32
    extras: list[PageExtra] = []  # as in SlotAssignment


# Of a page in a file: a digest of all ids up to its end, and of what else its content depends on.
PAGE_KEY_BYTES = 32
MAX_STORED_PAGES = 1 << 20


class StoredPages(NamedTuple):
    """The KV pages that a worker keeps in files, of earlier lives, too. A worker with --prefix-cache-dir that is ready
    sends it to a scheduler that connects, before its Status."""

    keys: bytes  # PAGE_KEY_BYTES each, the least recently used first
    most: int  # pages that there may be, at most MAX_STORED_PAGES


class TransferPages(NamedTuple):
    """Tells the worker to write KV pages to files, or with `load` to read them from files, when it has computed all
    steps that were sent before. Answered by PagesTransferred under the same number.

    Until then no step writes the pages, and with `load` none reads them.
    """

    number: int
    load: bool
    page_ids: bytes  # int32
    keys: bytes  # of each page
    removed: bytes = b""  # keys of pages whose files are to be removed


class PagesTransferred(NamedTuple):
    """The answer to TransferPages: its first `done` pages were transferred. Of the next one there is no usable file."""

    number: int
    done: int


# --- images of other hosts --------------------------------------------------------------------------------------------


class NeedImage(NamedTuple):
    """From the scheduler to a worker that is ready: requests need an image whose file, of `size` bytes, is on another
    host; with size 0: none does any more. Until then the worker keeps the file.

    The worker answers with a FetchImage for each chunk that it lacks, a few ahead, and with one whose `offset` is the
    size when it has all. If the message comes again meanwhile, it asks again: the request over which the chunks came
    has ended.
    """

    digest: bytes
    size: int


class FetchImage(NamedTuple):
    """Asks for the bytes of an image's file from `offset` on. Answered by an ImageChunk.

    The scheduler finds a request with this image, and sends it to its tokenizer, which sends it to its front end. With
    an `error` the worker cannot have the image; that, and that it has all, is for the scheduler alone.
    """

    rid: int  # 0 from the worker
    digest: bytes
    offset: int
    error: str = ""
    overloaded: bool = False  # with an error: images of other requests take the room for it


class ImageChunk(NamedTuple):
    """The answer to FetchImage: IMAGE_CHUNK_BYTES of the file, or what is left. The scheduler hands it on to its worker
    as it is. With an `error` the file cannot be read, which ends the request."""

    rid: int
    digest: bytes
    offset: int
    data: bytes
    error: str = ""


# --- scheduler -> tokenizer -------------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """The tokens of one step for one tokenizer: request rids[k] got counts[k] tokens. Top columns as in Texts.

    `load` is how many requests of all tokenizers the scheduler has; -1: not told."""

    rids: bytes  # uint32
    counts: bytes  # uint32
    token_ids: bytes  # int32, sum(counts)
    logprobs: bytes  # float32, sum(counts)
    top_counts: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    load: int = -1


class PromptLogprobs(NamedTuple):
    """Logprobs of the next tokens of a prompt: in order, each once, from `Add.prompt_logprobs_from` to the end of the
    prompt, all before the request's first Tokens. Top columns as in PromptTokens."""

    rid: int
    logprobs: bytes  # float32
    top_ids: bytes = b""  # int32
    top_logprobs: bytes = b""  # float32


# --- tokenizer -> api -------------------------------------------------------------------------------------------------


class Prompted(NamedTuple):
    """The scheduler admitted a request whose prompt is a chat or ids, that `tells_prompt`, or whose schemas are not
    enforced in full. Sent before its first token, and again after a process was lost."""

    rid: int
    prompt_tokens: int
    characters: int  # of the prompt's text
    in_parts: bool = False  # the client is shown `Texts.parts`, not `Texts.texts`
    text: str = ""  # the decoded prompt, if it came as ids
    not_enforced: list[str] = []  # JSON pointers in URI fragments to keywords of schemas, after the name of a tool


class TokenBytes(NamedTuple):
    """A token that is a part of a character, so that no text tells its bytes."""

    token_id: int
    data: bytes


class PromptTokens(NamedTuple):
    """Some tokens of a prompt, in order, from `Generate.prompt_logprobs_from` to its end; all before the first Texts.

    Logprobs are the model's, before the request's sampling parameters apply. Each token has min(prompt_top_n,
    vocabulary) alternatives: highest logprob first, then lowest id. The first token of a prompt has none, and a logprob
    of NaN. So has a token that the model does not score (the image token of mllama), which has alternatives.
    """

    rid: int
    token_ids: bytes  # int32
    logprobs: bytes  # float32, same length
    char_starts: bytes  # int32, same length: characters of the prompt's text before each token
    texts: list[str]  # same length: each token decoded by itself
    top_ids: bytes = b""  # int32
    top_logprobs: bytes = b""  # float32, same length
    top_texts: list[str] = []  # same length
    partial: list[TokenBytes] = []  # of the tokens and alternatives that are parts of characters; each id once


class PartKind(StrEnum):
    """The kind of a part of a chat's answer."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"  # begins a tool call; the text is the complete name of the tool
    ARGUMENTS = "arguments"  # more of the latest call's arguments, as JSON text


class AnswerPart(NamedTuple):
    """A piece of an answer in parts (Prompted.in_parts). Contains no special tokens, and nothing of it is held back."""

    token_index: int  # index of the token in its Texts that completes this piece; meaningless in an End
    kind: str  # a PartKind
    text: str


class Texts(NamedTuple):
    """The tokens of one step for one front end, in columns: request rids[k] got counts[k] tokens, in order.

    `held_chars` is empty if nothing is held back. `top_counts` is empty if no request asks for top_n; else token j has
    top_counts[j] entries in the other top columns, highest logprob first.
    """

    rids: bytes  # uint32
    counts: bytes  # uint32
    token_ids: bytes  # int32, sum(counts)
    logprobs: bytes  # float32, sum(counts)
    special: bytes  # uint8, sum(counts): 1 if the token's text is not part of the answer (most special tokens)
    texts: list[str]  # sum(counts); "" while a character is incomplete
    held_chars: bytes = b""  # uint32, sum(counts): characters at the text's end that may belong to a stop string
    top_counts: bytes = b""  # uint32, sum(counts)
    top_ids: bytes = b""  # int32, sum(top_counts)
    top_logprobs: bytes = b""  # float32, sum(top_counts)
    top_special: bytes = b""  # uint8, sum(top_counts)
    top_texts: list[str] = []  # sum(top_counts): each token decoded by itself
    parts: list[AnswerPart] = []  # of the requests whose answers come in parts, in order
    partial: list[TokenBytes] = []  # of the tokens and alternatives that are parts of characters; each id once


class End(NamedTuple):
    """The end of a request, sent exactly once, on the links scheduler-tokenizer and tokenizer-api.

    Durations are microseconds measured within one process, since clocks of different processes are not compared.
    """

    rid: int
    reason: str  # a FinishReason
    message: str = ""
    text: str = ""  # api link only: the whole generated text without special tokens
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    validation_us: int = 0  # tokenizer: received -> sent to the scheduler
    queue_us: int = 0  # scheduler: received -> first planned into a step
    inference_us: int = 0  # scheduler: first planned -> last token
    parts: list[AnswerPart] = []  # api link only: parts that the end of the text completes, after those of its tokens
    retry_after_ms: int = 0  # with OVERLOADED: until a request of this client should be admitted in time; 0: unknown
    vector: bytes = b""  # float32: what a request with `pooling` ends in


class Tokenized(NamedTuple):
    """The answer to Tokenize. `error` is "" on success."""

    rid: int
    token_ids: bytes  # int32
    byte_starts: bytes  # int32: offset of each token in the UTF-8 bytes of the text
    byte_stops: bytes  # int32
    special: bytes  # uint8
    error: str = ""
    text: str = ""  # the rendered chat, or the text of `ids`; "" for a Tokenize of a text
    reason: str = FinishReason.INVALID  # the kind of the error: INVALID, TEMPLATE or OVERLOADED


class AdapterUpdated(NamedTuple):
    """The answer to UpdateAdapter. On success the Status with the new list of adapters was sent before."""

    rid: int
    error: str = ""  # for the client; "" on success


class ReadAdapter(NamedTuple):
    """From the first rank of a group on several hosts to the others: read the LoRA adapter in directory `path`, whose
    content has this digest, for an UpdateAdapter that may follow. Answered by AdapterUpdated under the same rid."""

    rid: int
    name: str
    path: str
    digest: bytes


# The tag of a message is its index in this list: append only.
MESSAGES: list[type] = [
    Hello,
    Status,
    SamplingParams,
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
    StepResult,
    LinkRejected,
    Prompted,
    Ping,
    PromptTokens,
    PromptLogprobs,
    UpdateAdapter,
    AdapterUpdated,
    Goodbye,
    PredecessorState,
    Beat,
    HeldPages,
    ResetSlots,
    JoinGroup,
    GroupFormed,
    ReadAdapter,
    OfferMemory,
    LoadImage,
    ImageLoaded,
    StoredPages,
    TransferPages,
    PagesTransferred,
    NeedImage,
    FetchImage,
    ImageChunk,
]

codec = Codec(MESSAGES)
encode = codec.encode
decode = codec.decode
