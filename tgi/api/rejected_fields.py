"""Request fields of OpenAI's routes that are not implemented: those that are rejected, and those without effect.

A field that changes an answer is never ignored silently. One that OpenAI, vLLM, SGLang or TGI define, that would change
the answer and is not implemented, is rejected with a 422 that names it, unless its value is neutral: then it asks for
what happens anyway. A field that cannot change the answer is accepted. Any other field is accepted too, and its name is
logged once; so are members of the objects in NESTED_MEMBERS.

docs/compatibility.md shows REJECTED_FIELDS; a test holds them together.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from tgi.api import errors
from tgi.api.shapes.chat import (
    ChatRequest,
    CustomTool,
    FunctionDefinition,
    ReasoningOptions,
    ThinkingOptions,
    Tool,
    ToolChoiceObject,
)
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.shapes.messages import MessagesTool, OutputConfig, OutputFormat, ThinkingConfig, ToolUseChoice
from tgi.api.shapes.native import GrammarType, JsonSchemaConfig
from tgi.api.shapes.openai import StreamOptions
from tgi.api.shapes.responses import ReasoningConfig, ResponsesTool, TextConfig, TextFormat, ToolFormat

log = logging.getLogger(__name__)

CHAT, COMPLETIONS = (ChatRequest,), (CompletionRequest,)
BOTH = CHAT + COMPLETIONS

REJECTION_TEXT = "`{name}` is not supported by this server"

# Limits on the log of unknown fields, which clients write: names for each process, and characters for each name.
MAX_LOGGED = 64
MAX_NAME = 64


class RejectedFields(NamedTuple):
    """Fields of one topic that are rejected unless they are null or have a neutral value."""

    topic: str
    bodies: tuple[type[Struct], ...]  # the request types that lack these fields
    fields: Mapping[str, tuple[Any, ...]]  # name -> neutral values


REJECTED_FIELDS = [
    RejectedFields(
        "beam search",
        BOTH,
        {"use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,)},
    ),
    RejectedFields(
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
    RejectedFields(
        "the form of the text",
        BOTH,
        {
            "guided_whitespace_pattern": (),
            "structural_tag": (),
        },
    ),
    RejectedFields(
        "where the text ends",
        BOTH,
        {"stop_regex": ([],), "no_stop_trim": (False,), "repetition_detection": ()},
    ),
    RejectedFields(
        "the prompt",
        BOTH,
        {"truncation_side": ("left",), "prompt_embeds": (), "session_params": ({},), "lora_path": ()},
    ),
    RejectedFields(
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
    RejectedFields("reasoning", BOTH, {"include_reasoning": (True,), "separate_reasoning": (True,)}),
    RejectedFields(
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
    RejectedFields(
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
    RejectedFields(
        "chats",
        COMPLETIONS,
        {
            "messages": (),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "top_logprobs": (0,),
            "chat_template_kwargs": ({},),
            "reasoning_effort": ("none",),
            "verbosity": ("medium",),
            "reasoning": ({},),
            "thinking": (False,),
            "think": (False,),
            "enable_thinking": (False,),
            "thinking_budget": (-1,),
            "thinking_token_budget": (-1,),
        },
    ),
    RejectedFields(
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
    RejectedFields(
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

# Accepted without effect: names and bookkeeping, the order of requests, hints that only save time, and options of
# inputs that are not supported.
IGNORED_FIELDS = frozenset(
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


class Members(NamedTuple):
    """The members of an object, or of each object in a list, that are not unknown."""

    names: frozenset[str]
    inner: Mapping[str, "Members"] = {}


def _members(shape: type[Struct], *ignored: str, **inner: Members) -> Members:
    return Members(frozenset((*shape.__struct_encode_fields__, *ignored)), inner)


NESTED_MEMBERS = {
    "reasoning": _members(ReasoningOptions, "summary"),
    "thinking": _members(ThinkingOptions),
    "response_format": _members(GrammarType, json_schema=_members(JsonSchemaConfig, "description", "strict")),
    "stream_options": _members(StreamOptions, "include_obfuscation"),
    "tool_choice": _members(ToolChoiceObject),
    "tools": _members(Tool, function=_members(FunctionDefinition), custom=_members(CustomTool)),
}


class UnknownFieldLog:
    """Logs the name of each unknown field once, up to MAX_LOGGED names."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, names: list[str]) -> None:
        """Logs those of the names of one request that have not been logged yet."""
        free = MAX_LOGGED - len(self._logged)
        new = sorted({name[:MAX_NAME] for name in names} - self._logged)[:free]
        if new:
            self._logged.update(new)
            log.warning("a request has fields that are unknown to this server: %s", ", ".join(map(ascii, new)))


_unknown_field_log = UnknownFieldLog()
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_object_or_list = msgspec.json.Decoder(dict[str, Raw] | list[Raw] | str | float | bool | None).decode


def _unknown_members(raw: Raw, members: Members, path: str) -> Iterator[str]:
    value = _decode_object_or_list(raw)
    if isinstance(value, list):
        for entry in value:
            yield from _unknown_members(entry, members, path)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in members.names:
                yield f"{path}.{name}"
            elif name in members.inner:
                yield from _unknown_members(inner, members.inner[name], f"{path}.{name}")


class ProtocolFields(NamedTuple):
    """The fields of a protocol that its request type lacks."""

    ignored: Mapping[str, str]  # name -> why they have no effect
    rejected: Mapping[str, tuple[Any, ...]]  # name -> neutral values
    nested: Mapping[str, Members] = {}


MESSAGES_FIELDS = ProtocolFields(
    {
        "cache_control": "every prefix of a prompt is cached",
        "context_management": "the history is used as it is sent",
        "diagnostics": "about Anthropic's cache",
        "inference_geo": "there is one place",
        "metadata": "bookkeeping",
        "service_tier": "keys have [priorities](fairness.md)",
        "speed": "there is one speed",
        "user_profile_id": "bookkeeping",
        "workspace_id": "bookkeeping",
    },
    {"container": (), "mcp_servers": ([],), "thread": ()},
    {
        "tool_choice": _members(ToolUseChoice),
        "tools": _members(MessagesTool, "cache_control", "allowed_callers", "eager_input_streaming", "input_examples"),
        "thinking": _members(ThinkingConfig, "display"),
        "output_config": _members(OutputConfig, format=_members(OutputFormat)),
    },
)


DECISIONS_FIELDS = ProtocolFields(
    {"priority": "keys have [priorities](fairness.md)", "safety_identifier": "bookkeeping"},
    {"cache_salt": (), "joint": (False,)},
)
SYSTEMONE_FIELDS = ProtocolFields(
    {"priority": "keys have [priorities](fairness.md)", "request_id": "bookkeeping"},
    {"audio": ([],), "cache_salt": (), "images": ([],), "joint": (False,), "temperature": (), "videos": ([],)},
)
RESPONSES_FIELDS = ProtocolFields(
    {
        "access_programs": "about OpenAI's models",
        "background_options": "background responses have no options here",
        "client_metadata": "bookkeeping",
        "max_tool_calls": "it limits the built-in tools, which are refused",
        "prompt_cache_key": "every prefix of a prompt is cached",
        "prompt_cache_options": "every prefix of a prompt is cached",
        "prompt_cache_retention": "every prefix of a prompt is cached",
        "safety_identifier": "bookkeeping",
        "service_tier": "keys have [priorities](fairness.md)",
        "stream_options": "there is no obfuscation to switch off",
        "user": "bookkeeping",
    },
    {"context_management": ([],), "image": (), "moderation": (), "prompt": ()},
    {
        "reasoning": _members(ReasoningConfig, "context", "mode"),
        "text": _members(TextConfig, format=_members(TextFormat)),
        "tools": _members(
            ResponsesTool, "allowed_callers", "async", "defer_loading", "output_schema", format=_members(ToolFormat)
        ),
    },
)


class FieldChecker:
    """Checks the field names in the bodies of one request type: of a protocol, else of chats or completions."""

    def __init__(self, shape: type[Struct], protocol: ProtocolFields | None = None) -> None:
        if protocol is None:
            rejected = [one.fields for one in REJECTED_FIELDS if shape in one.bodies]
            names = {name: neutral for fields in rejected for name, neutral in fields.items()}
            protocol = ProtocolFields(dict.fromkeys(IGNORED_FIELDS, ""), names, NESTED_MEMBERS)
        self._known = frozenset(protocol.ignored).union(shape.__struct_encode_fields__)
        self._rejected = protocol.rejected
        self._nested = protocol.nested

    def check(self, body: bytes) -> None:
        """Checks a body of which the request type has been decoded.

        Raises ApiError for a rejected field, msgspec.DecodeError or UnicodeDecodeError where a field that the request
        type lacks is not valid JSON.
        """
        members = _decode_members(body)
        unknown = [
            path
            for name, nested in self._nested.items()
            if name in self._known and name in members
            for path in _unknown_members(members[name], nested, name)
        ]
        for name, raw in members.items():
            if name in self._known:
                continue
            if (neutral := self._rejected.get(name)) is None:
                unknown.append(name)
            elif (value := msgspec.json.decode(raw)) is not None and value not in neutral:
                raise errors.validation_error(REJECTION_TEXT.format(name=name), param=name, counted=False)
        if unknown:
            _unknown_field_log.log(unknown)
