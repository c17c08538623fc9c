"""What processes say of themselves: who they are, in which life, and how they and the floors below fare.

These belong to no request; messages.py says which way each message goes.
"""

from typing import NamedTuple

from tgi.kernel.sampling import SamplingDefaults

PROTOCOL = 1


class Hello(NamedTuple):
    """The first message in each direction of a link: who speaks, and in which life.

    A new `boot` in an old `place` means that the process was restarted and knows nothing; its upstream neighbour then
    submits again what was in flight. `model` is a fingerprint of what is served (config, tokenizer, quantization, type
    of the KV cache), empty while unknown; neighbours whose fingerprints differ refuse each other.
    """

    protocol: int
    role: str
    place: int  # which one of its role: 0, 1, …
    boot: bytes
    model: str = ""
    epoch: int = 0
    rank: int = 0
    defaults: SamplingDefaults = SamplingDefaults()  # of a tokenizer: what its front ends apply to requests on /v1


class Refused(NamedTuple):
    """The answer to a Hello that does not fit (protocol or model differ), in words. The link stays unused."""

    message: str


class Ping(NamedTuple):
    """Says nothing and is not answered: who cannot be sent one is gone."""


class Limits(NamedTuple):
    """What the worker measured when it was first ready. Holds for the deployment's life."""

    max_total_tokens: int  # prompt + generated, one request
    max_input_tokens: int  # prompt, one request
    max_batch_total_tokens: int  # tokens of KV cache: pages * page_size
    max_batch_prefill_tokens: int  # tokens computed in one step
    max_batch_size: int  # slots: rows that may run at once
    pages: int
    page_size: int  # tokens per page
    vocab_size: int
    dtype: str  # "float32", "bfloat16", "float16"
    device: str  # "cpu", "cuda"


class Adapter(NamedTuple):
    """A LoRA adapter that is loaded. `digest` names its content: it separates prefix caches, and replays from another
    adapter that has come under the same name."""

    name: str
    path: str  # its directory
    digest: bytes


class Status(NamedTuple):
    """How the floors below are. Sent up whenever it changes; each hop forwards the worst of what it sees.

    `ready` means: a request sent down now would be computed. `healthy` is false while work is in flight and no step
    has finished within the limit. `stage` and `percent` describe start-up ("loading weights", 40).
    """

    ready: bool
    healthy: bool
    stage: str
    percent: int
    limits: Limits | None = None
    queued: int = 0
    running: int = 0
    wait_ms: int = 0  # predicted time in the queue of a request that came now
    end_ms: int = 0  # mean time from the end of one request to the next, of late
    adapters: list[Adapter] = []  # those that a request may ask for, by name in their order of loading
