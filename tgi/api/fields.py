"""Fields of requests to OpenAI's routes that no shape has: those that are refused, and those without effect.

Nothing that changes an answer is ignored silently. A field that OpenAI, vLLM, SGLang or TGI define, that would change
the answer and is not implemented, is refused with a 422 that names it, unless its value asks for what happens anyway. A
field that cannot change the answer is accepted. A field that is in none of these tables is accepted and listed once in
the log.

docs/compatibility.md shows the first table; a test holds them together.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from tgi.api import errors
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.completions import CompletionRequest

log = logging.getLogger(__name__)

CHAT, COMPLETIONS = (ChatRequest,), (CompletionRequest,)
BOTH = CHAT + COMPLETIONS

REFUSAL = "`{name}` is not supported by this server"

# A process logs at most this many unknown names, and at most this many characters of each.
MAX_LOGGED = 64
MAX_NAME = 64


class Refused(NamedTuple):
    """Fields that are refused. `fields` maps each to its neutral values; null is neutral for all."""

    what: str  # they are about
    bodies: tuple[type[Struct], ...]  # of the routes that refuse them
    fields: Mapping[str, tuple[Any, ...]]


REFUSED = [
    Refused(
        "beam search",
        BOTH,
        {"use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,)},
    ),
    Refused(
        "which tokens may be drawn",
        BOTH,
        {
            "allowed_token_ids": (),
            "logits_processors": ([],),
            "custom_logit_processor": (),
            "custom_params": ({},),
            "vllm_xargs": ({},),
            "watermarking": (False,),
        },
    ),
    Refused(
        "the form of the text",
        BOTH,
        {
            "guided_whitespace_pattern": (),
            "structural_tag": (),
        },
    ),
    Refused(
        "where the text ends",
        BOTH,
        {"stop_regex": ([],), "no_stop_trim": (False,), "repetition_detection": (), "thinking_token_budget": (-1,)},
    ),
    Refused(
        "the prompt",
        BOTH,
        {"truncation_side": ("left",), "prompt_embeds": (), "session_params": ({},), "lora_path": ()},
    ),
    Refused(
        "the prompt of a chat",
        CHAT,
        {
            "add_special_tokens": (False,),
            "chat_template": (),
            "documents": ([],),
            "echo": (False,),
            "input_ids": (),
            "prompt": (),
            "suffix": (),
            "task": (),
        },
    ),
    Refused(
        "reasoning",
        BOTH,
        {
            "reasoning_effort": (),
            "reasoning": ({},),
            "include_reasoning": (True,),
            "separate_reasoning": (True,),
            "verbosity": ("medium",),
        },
    ),
    Refused(
        "more in the answer",
        BOTH,
        {
            "prompt_logprobs": (),
            "logprob_token_ids": (),
            "return_tokens_as_token_ids": (False,),
            "return_token_ids": (False,),
            "return_prompt_token_ids": (False,),
            "return_prompt_text": (False,),
            "return_hidden_states": (False,),
            "return_routed_experts": (False,),
            "return_cached_tokens_details": (False,),
            "return_meta_info": (False,),
        },
    ),
    Refused(
        "OpenAI's services, and calls of its older form",
        CHAT,
        {
            "audio": (),
            "modalities": (["text"],),
            "moderation": (),
            "web_search_options": (),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "best_of": (1,),
        },
    ),
    Refused(
        "chats",
        COMPLETIONS,
        {
            "messages": (),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "top_logprobs": (0,),
            "chat_template_kwargs": ({},),
        },
    ),
    Refused(
        "KV caches of other servers, or apart from those of other clients",
        BOTH,
        {
            "cache_salt": (),
            "kv_transfer_params": ({},),
            "ec_transfer_params": ({},),
            "bootstrap_host": (),
            "bootstrap_port": (),
            "bootstrap_room": (),
        },
    ),
    Refused(
        "TGI's native routes",
        BOTH,
        {
            "inputs": (),
            "parameters": ({},),
            "adapter_id": (),
            "decoder_input_details": (False,),
            "details": (False,),
            "do_sample": (True,),
            "grammar": (),
            "ignore_eos_token": (False,),
            "max_new_tokens": (),
            "min_new_tokens": (0,),
            "return_full_text": (False,),
            "top_n_tokens": (0,),
            "truncate": (),
            "watermark": (False,),
        },
    ),
]

# Names and bookkeeping, the order of requests, what only saves time, and options of inputs that are not served.
WITHOUT_EFFECT = frozenset(
    {
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user",
        "custom_labels", "data_parallel_rank", "disagg_prefill_dp_rank", "extra_key", "guided_decoding_backend",
        "images_config", "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch", "mm_processor_kwargs",
        "ngram_corpus_id", "priority", "request_id", "return_mm_kwargs", "return_token_offsets", "rid",
        "routed_dp_rank", "routed_experts_prompt_start", "routed_experts_start_len", "session_id",
        "spaces_between_special_tokens", "stream_interval", "stream_reasoning", "use_audio_in_video",
    }
)  # fmt: skip


class UnknownNames:
    """Lists each name once, up to MAX_LOGGED of them."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, names: list[str]) -> None:
        """Names that came in one request."""
        room = MAX_LOGGED - len(self._logged)
        fresh = sorted({name[:MAX_NAME] for name in names} - self._logged)[:room]
        if fresh:
            self._logged.update(fresh)
            log.warning("a request had fields that this server does not know: %s", ", ".join(map(ascii, fresh)))


_unknown_names = UnknownNames()
_members = msgspec.json.Decoder(dict[str, Raw]).decode


class Fields:
    """Checks the names in the bodies of one shape."""

    def __init__(self, shape: type[Struct]) -> None:
        self._known = WITHOUT_EFFECT.union(shape.__struct_encode_fields__)
        self._refused = {
            name: neutral for one in REFUSED if shape in one.bodies for name, neutral in one.fields.items()
        }

    def check(self, body: bytes) -> None:
        """Looks at the names of the object that `body` is. Raises ApiError for one that is refused, and what msgspec
        raises for a body that is no JSON in a place where the shape does not look."""
        members = _members(body)
        if members.keys() <= self._known:
            return
        unknown = []
        for name, raw in members.items():
            if name in self._known:
                continue
            if (neutral := self._refused.get(name)) is None:
                unknown.append(name)
            elif (value := msgspec.json.decode(raw)) is not None and value not in neutral:
                raise errors.validation(REFUSAL.format(name=name), param=name, counted=False)
        if unknown:
            _unknown_names.log(unknown)
