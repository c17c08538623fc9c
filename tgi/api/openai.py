"""What OpenAI's routes have in common: parameters, the prompt of a chat, ids, finish reasons, visible text."""

import time
import uuid
from collections.abc import Container
from itertools import repeat
from json.encoder import encode_basestring as quote
from typing import NamedTuple

import tgi
from tgi.api import errors
from tgi.api.columns import Columns, Top
from tgi.api.errors import ApiError
from tgi.api.service import Service
from tgi.api.shapes.chat import ChatRequest, ImageChunk
from tgi.api.shapes.native import GenerateParameters
from tgi.api.shapes.openai import OpenAiRequest
from tgi.api.tools import Offer
from tgi.kernel.messages import End, Reason
from tgi.kernel.sampling import SamplingDefaults

DONE = "data: [DONE]\n\n"


def parameters(
    request: OpenAiRequest, adapters: Container[str], max_new_tokens: int | None, top_n: int
) -> GenerateParameters:
    """The request's parameters under TGI's names, without those that are OpenAI's alone (Steering). Requests sample,
    except at temperature 0; the values that mean "off" to OpenAI's clients (top_p 1, top_k 0 and -1) are left out.
    A `model` that is none of the `adapters` is the served one, whatever it is called."""
    greedy = request.temperature == 0
    return GenerateParameters(
        do_sample=not greedy,
        temperature=None if greedy else request.temperature,
        top_p=None if request.top_p == 1 else request.top_p,
        top_k=None if request.top_k in (0, -1) else request.top_k,
        typical_p=None if request.typical_p == 1 else request.typical_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        max_new_tokens=max_new_tokens,
        stop=request.stops,
        seed=request.seed,
        top_n_tokens=top_n or None,
        grammar=next(iter(request.constraints.values()), None),
        min_new_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        truncate=request.truncate_prompt_tokens,
        adapter_id=request.model if request.model in adapters else None,
    )


def fill_in(request: OpenAiRequest, defaults: SamplingDefaults) -> None:
    """Sets fields that are absent or null to the model's defaults. What a client sends holds, also values that mean
    "off"."""
    for name, value in defaults.given.items():
        if getattr(request, name) is None:
            setattr(request, name, value)


def chat_prompt(request: ChatRequest, offer: Offer) -> bytes:
    """What the tokenizer makes the prompt of. Raises ApiError: 422 for images."""
    for message in request.messages:
        if isinstance(message.content, list) and any(isinstance(part, ImageChunk) for part in message.content):
            text = "`image_url` parts are not supported: this model reads text alone"
            raise errors.validation(text, param="messages")
    return request.chat(offer.tools, offer.must)


class Stamp(NamedTuple):
    """What all parts of one answer carry. Strings are JSON already."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def new(cls, service: Service, prefix: str, adapter: str) -> "Stamp":
        """Of an answer that begins now, with an id of its own. `model` names what answers, whatever name was asked for:
        the adapter, or the served model if `adapter` is empty."""
        return cls(
            f'"{prefix}-{uuid.uuid4().hex}"',
            int(time.time()),
            quote(adapter or service.model_id),
            quote(f"{tgi.__version__}-{service.settings.docker_label or 'native'}"),
        )


def finish_reason(end: End | None) -> str:
    """As JSON; null before the end."""
    if end is None:
        return "null"
    return '"length"' if end.reason == Reason.LENGTH else '"stop"'


class Usage:
    """Tokens of a whole answer: the prompt counts once, however many choices it has."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._prompts: dict[int, int] = {}
        self._completion = 0

    def add(self, place: int, end: End, generated: int) -> None:
        """Takes in a finished generation."""
        self._prompts[place // self._choices] = end.prompt_tokens
        self._completion += generated

    def render(self) -> str:
        """As JSON."""
        return usage(sum(self._prompts.values()), self._completion)


def usage(prompt: int, completion: int) -> str:
    """Token counts as JSON."""
    return f'{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{prompt + completion}}}'


def failure(error: ApiError, openai_errors: bool) -> str:
    """The events that end a stream that cannot go on, in OpenAI's form or in TGI's."""
    native = f'{{"error":{{"message":{quote(error.message)},"http_status_code":{error.status}}}}}'
    return f"data: {error.openai_event().decode() if openai_errors else native}\n\n{DONE}"


def likeliest(columns: Columns, at: int, top_n: int) -> list[Top]:
    """The `top_n` likeliest tokens in place of one, the lower id first among equals. Where several tie for the last
    place the columns have all of them, which native routes list."""
    return columns.tops[at][:top_n] if columns.tops else []


class Visible:
    """The part of a generation's text that a client may see, token by token: special tokens left out, and what may
    turn out to begin a stop string held back until it does not."""

    def __init__(self) -> None:
        self._shown = 0  # characters
        self._pending = ""

    def pieces(self, columns: Columns, end: End | None) -> list[str]:
        """What each of these tokens lets be shown. With the `end`, the last one brings all that is missing."""
        pieces = []
        for text, special, held in zip(columns.texts, columns.special, columns.held or repeat(0), strict=False):
            if not special:
                self._pending += text
            free = max(0, len(self._pending) - held)
            pieces.append(self._pending[:free])
            self._pending = self._pending[free:]
            self._shown += free
        if end is not None:
            before = self._shown - len(pieces[-1])
            pieces[-1] = end.text[before:]
            self._shown, self._pending = len(end.text), ""
        return pieces
