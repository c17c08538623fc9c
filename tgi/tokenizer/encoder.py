"""Text to token ids: prompts for the model, and tokens with byte offsets for the tokenize routes; token limits."""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from tgi.hub.pooling import PoolingConfig
from tgi.microkernel.messages.codec import INT32, ITEM_BYTES, UINT8, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    IMAGE_DIGEST_BYTES,
    DeploymentLimits,
    FinishReason,
    Generate,
    ImageSegment,
    PoolingInput,
    Tokenize,
    Tokenized,
)
from tgi.microkernel.observability import tracing
from tgi.tokenizer.answers.formats import MARKED_FORMATS, AnswerFormat, FormatTokens
from tgi.tokenizer.chat import ChatRenderer, ReasoningLimit, RenderedChat
from tgi.tokenizer.chat_template import TemplateError
from tgi.tokenizer.detokenizer import create_detokenizer
from tgi.tokenizer.images import ImagePlaceholders, PlaceholderError, expanded_column, without_first
from tgi.tokenizer.structured_output.grammar import CheckedGrammar, GrammarError
from tgi.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tgi.microkernel.observability.otlp import Tracer

log = logging.getLogger(__name__)

# TGI generates in chunks of this many tokens, and admits a request if its first chunk fits into the context. This
# server generates without chunks, but accepts the same requests: one that asks for more than fits gets what fits.
TGI_CHUNK_TOKENS = 1024
# Of the keywords that are not enforced: their length in a header and a log line, and the schemas that are remembered as
# logged.
MAX_NOT_ENFORCED_CHARACTERS = 2000
MAX_LOGGED_SCHEMAS = 256


NO_VECTORS = "this model generates text: it makes no embeddings, scores or classes of its inputs"
NO_TEXT = "this model generates no text: it makes a vector of its input (see /v1/embeddings, /rerank and /classify)"
TEXT_COMES_LATER = (
    "the answers of this model begin with something else than their text, so they have no probabilities here"
)

# The grammar of an answer for the worker, from the client's as JSON and the chat. Raises GrammarError.
BuildGrammar = Callable[[bytes, RenderedChat | None], CheckedGrammar]


class EncodeError(Exception):
    """The tokenizer could not encode a text. The message is for the client."""


class EncodedPrompt(NamedTuple):
    """A prompt as token ids, with its grammar."""

    ids: bytes  # int32
    token_count: int
    characters: int  # of the prompt's text
    token_starts: bytes = b""  # int32, with `prompt_logprobs_from`: number of characters before each token
    grammar: str = ""  # for the worker
    grammar_error: str = ""  # why the grammar is rejected, for the client
    not_enforced: list[str] = []  # keywords of schemas, see CheckedGrammar
    answer_format: AnswerFormat | None = None  # None: the answer is plain text
    bad_words: list[list[int]] = []  # token sequences of Generate.bad_words
    listed_ids: list[int] = []  # of Generate.listed_texts
    text: str = ""  # the decoded text, if the prompt came as ids
    reasoning_limit: ReasoningLimit | None = None  # of an answer that may have reasoning
    images: list[ImageSegment] = []
    encoder_tokens: int = 0  # of an encoder-decoder model: the ids of its input; then come those of the decoder

    @property
    def input_tokens(self) -> int:
        """The number of tokens that a client has sent."""
        return self.encoder_tokens or self.token_count


class UnconstrainedPrompt(NamedTuple):
    """An encoded prompt whose grammar is not compiled yet."""

    prompt: EncodedPrompt
    chat: RenderedChat | None


class PromptRejection(NamedTuple):
    """Why a prompt was not encoded or not admitted. `reason` is INVALID, TEMPLATE or FAILED;
    `message` is for the client."""

    reason: FinishReason
    message: str


class PromptEncoder:
    """Encodes Generate and Tokenize messages. Thread-safe."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        chats: ChatRenderer,
        tracer: "Tracer | None" = None,
        pooling: PoolingConfig | None = None,
        image_token: str = "",
        images_first: bool = False,
        decoder_start: int | None = None,
    ) -> None:
        """`pooling`: of a model that ends in a vector. `image_token`, `images_first`: of ImagePlaceholders.
        `decoder_start`: the id that the decoder of an encoder-decoder model starts with."""
        self._vocabulary = vocabulary
        self._chats = chats
        self._placeholders = ImagePlaceholders(vocabulary, image_token, images_first)
        self._tracer = tracer
        self._decoder_start = decoder_start
        self.format_tokens = FormatTokens(vocabulary, chats.formats.described)
        self._pooled = PooledPrompts(vocabulary, pooling)

    def encode_generate(self, generate: Generate) -> EncodedPrompt | UnconstrainedPrompt | PromptRejection:
        """Encodes the prompt of a request. The special tokens of a chat are written by its template.

        If the answer has a grammar, returns an UnconstrainedPrompt for `compile_grammar`.
        """
        try:
            if generate.pooling is None and self._pooled.only:
                raise EncodeError(NO_TEXT)
            text, add_special_tokens, chat = generate.inputs, generate.add_special_tokens, None
            if generate.chat:
                with tracing.trace_span(self._tracer, "apply_chat_template", generate.context.traceparent):
                    chat = self._chats.render_chat(generate.chat)
                text, add_special_tokens = chat.text, False
            if generate.images:
                text = self._placeholders.with_margins(text, generate.images)
            with tracing.trace_span(self._tracer, "tokenize", generate.context.traceparent):
                if generate.pooling is not None:
                    return self._pooled.encode(generate, generate.pooling)
                if generate.input_ids:
                    prompt = prompt_from_ids(self._vocabulary, generate.input_ids, generate.truncate)
                else:
                    with_starts = generate.prompt_logprobs_from is not None
                    truncate = None if generate.images else generate.truncate
                    prompt = encode_prompt(self._vocabulary, text, add_special_tokens, truncate, with_starts)
            if generate.images:
                prompt = self._with_images(prompt, generate)
            if self._decoder_start is not None:
                prompt = with_decoder_start(prompt, self._decoder_start)
            if chat is not None and chat.answer_format is not None:
                prompt = prompt._replace(answer_format=chat.answer_format, reasoning_limit=chat.reasoning_limit)
            if generate.bad_words:
                prompt = prompt._replace(bad_words=encode_bad_words(self._vocabulary, generate.bad_words))
            if generate.listed_texts:
                prompt = prompt._replace(listed_ids=listed_ids(self._vocabulary, generate.listed_texts, prompt))
            if generate.grammar or (chat is not None and chat.tools):
                return UnconstrainedPrompt(prompt, chat)
            return prompt
        except (EncodeError, PlaceholderError) as error:
            return PromptRejection(FinishReason.INVALID, str(error))
        except TemplateError as error:
            return PromptRejection(FinishReason.TEMPLATE, str(error))

    def _with_images(self, prompt: EncodedPrompt, generate: Generate) -> EncodedPrompt:
        """A prompt with its images, truncated. Raises PlaceholderError."""
        expanded = self._placeholders.expand(prompt.ids, generate.images)
        cut = _truncate(expanded.ids, prompt.characters, [], generate.truncate)
        dropped = len(expanded.origins) - cut.token_count
        starts = expanded_column(prompt.token_starts, expanded.origins[dropped:])
        return prompt._replace(
            ids=cut.ids,
            token_count=cut.token_count,
            token_starts=starts,
            images=without_first(expanded.images, dropped),
        )

    def compile_grammar(
        self, unconstrained: UnconstrainedPrompt, generate: Generate, build: BuildGrammar
    ) -> EncodedPrompt:
        """Compiles the grammar of a request for its encoded prompt. An error is reported after errors of the token
        limits."""
        prompt, chat = unconstrained
        try:
            with tracing.trace_span(self._tracer, "compile_grammar", generate.context.traceparent):
                built = build(generate.grammar, chat)
        except GrammarError as error:
            return prompt._replace(grammar_error=str(error))
        not_enforced = _limited(built.not_enforced)
        if not_enforced:
            _log_not_enforced(", ".join(not_enforced))
        answer_format = prompt.answer_format
        if answer_format is not None and built.call_formats:
            given = answer_format.call_formats
            known = {one.name: one for one in (*given, *MARKED_FORMATS.values())}
            call_formats = tuple(known[name] for name in built.call_formats)
            answer_format = answer_format._replace(call_formats=call_formats, text_has_grammar=True)
        return prompt._replace(grammar=built.text, not_enforced=not_enforced, answer_format=answer_format)

    def encode_tokenize(self, tokenize: Tokenize) -> Tokenized:
        if tokenize.ids:
            text = self._vocabulary.tokenizer.decode(unpack_int32(tokenize.ids), skip_special_tokens=False)
            return Tokenized(tokenize.rid, b"", b"", b"", b"", text=text)
        if not tokenize.chat:
            return self._tokenize(tokenize, tokenize.inputs, tokenize.add_special_tokens)
        try:
            text = self._chats.render_chat(tokenize.chat).text
        except TemplateError as error:
            return Tokenized(tokenize.rid, b"", b"", b"", b"", str(error), reason=FinishReason.TEMPLATE)
        answer = self._tokenize(tokenize, text, False)
        return answer if answer.error else answer._replace(text=answer.text or text)

    def _tokenize(self, tokenize: Tokenize, text: str, add_special_tokens: bool) -> Tokenized:
        """The tokens of a text with its images. All of an image are at its placeholder in the text, which is returned
        if there are images: their processor may have added to it."""
        if not tokenize.images:
            return tokenize_text(self._vocabulary, tokenize.rid, text, add_special_tokens)
        try:
            text = self._placeholders.with_margins(text, tokenize.images)
            answer = tokenize_text(self._vocabulary, tokenize.rid, text, add_special_tokens)
            if answer.error:
                return answer
            ids, origins, _ = self._placeholders.expand(answer.token_ids, tokenize.images)
        except PlaceholderError as error:
            return Tokenized(tokenize.rid, b"", b"", b"", b"", str(error))
        return answer._replace(
            token_ids=ids,
            byte_starts=expanded_column(answer.byte_starts, origins),
            byte_stops=expanded_column(answer.byte_stops, origins),
            special=bytes(answer.special[at] for at in origins),
            text=text,
        )


class PooledPrompts:
    """Encodes the prompts of requests that end in a vector. Thread-safe.

    Special tokens stay when a text is truncated, as in sentence-transformers: the tokens between them give way.
    """

    def __init__(self, vocabulary: Vocabulary, pooling: PoolingConfig | None) -> None:
        self._vocabulary = vocabulary
        self._pooling = pooling
        self._prompts = {} if pooling is None else dict(pooling.prompts)
        self.only = pooling is not None  # the model makes nothing else

    def encode(self, generate: Generate, wanted: PoolingInput) -> EncodedPrompt:
        """The ids of a text, of a pair, or those that were given. Raises EncodeError."""
        if self._pooling is None:
            raise EncodeError(NO_VECTORS)
        limit = self._pooling.longest if wanted.truncate is None else wanted.truncate or self._pooling.max_tokens
        if generate.input_ids:
            ids = unpack_int32(generate.input_ids)
            if not all(0 <= token < self._pooling.vocab_size for token in ids):
                raise EncodeError(f"`input` must hold token ids >= 0 and < {self._pooling.vocab_size}")
            if wanted.truncate is not None:
                ids = ids[-limit:] if wanted.keep_end else ids[:limit]
            return EncodedPrompt(pack_column(INT32, ids), len(ids), 0)
        if wanted.prompt and wanted.prompt not in self._prompts:
            known = ", ".join(self._prompts) or "none"
            raise EncodeError(f"`prompt_name` {wanted.prompt} is not one of the model's prompts: {known}")
        text = self._prompts.get(wanted.prompt, "") + generate.inputs
        given = [text] if wanted.pair is None else [(text, wanted.pair)]
        try:
            (encoding,) = self._vocabulary.tokenizer.encode_batch_fast(
                given, add_special_tokens=generate.add_special_tokens
            )
        except Exception as error:  # see encode_prompt
            raise EncodeError(f"tokenizer error {error}") from error
        ids = encoding.ids
        if self._pooling.typed and wanted.pair is not None:
            offset = self._pooling.vocab_size
            ids = [token + offset * kind for token, kind in zip(ids, encoding.type_ids, strict=True)]
        if wanted.truncate is not None and len(ids) > limit:
            ids = _shortened(ids, encoding.special_tokens_mask, encoding.sequence_ids, limit, wanted.keep_end)
        return EncodedPrompt(pack_column(INT32, ids), len(ids), len(text) + len(wanted.pair or ""))


def _shortened(
    ids: list[int], special: list[int], sequences: list[int | None], limit: int, keep_end: bool
) -> list[int]:
    """At most `limit` ids: of a pair those of the longer sequence are dropped first, one by one, in front with
    `keep_end`, else at the end. Special tokens are kept as long as others are left."""
    places: dict[int, list[int]] = {}
    for place, (mark, sequence) in enumerate(zip(special, sequences, strict=True)):
        if not mark and sequence is not None:
            places.setdefault(sequence, []).append(place)
    lists = list(places.values())
    excess = len(ids) - limit
    keep = [len(one) for one in lists]
    while excess and any(keep):
        longest = max(range(len(keep)), key=lambda index: (keep[index], index))
        others = [count for index, count in enumerate(keep) if index != longest]
        cut = min(excess, max(1, keep[longest] - max(others, default=0)))
        keep[longest] -= cut
        excess -= cut
    dropped = set()
    for one, count in zip(lists, keep, strict=True):
        dropped.update(one[: len(one) - count] if keep_end else one[count:])
    kept = [token for place, token in enumerate(ids) if place not in dropped]
    return kept[-limit:] if keep_end else kept[:limit]


def _limited(keywords: list[str]) -> list[str]:
    """The first keywords, up to MAX_NOT_ENFORCED_CHARACTERS, and how many more there are."""
    ends = accumulate(len(keyword) + 2 for keyword in keywords)
    shown = [keyword for keyword, end in zip(keywords, ends, strict=True) if end <= MAX_NOT_ENFORCED_CHARACTERS]
    return shown if len(shown) == len(keywords) else [*shown, f"and {len(keywords) - len(shown)} more"]


@lru_cache(maxsize=MAX_LOGGED_SCHEMAS)
def _log_not_enforced(keywords: str) -> None:
    """Logs the keywords of a request's schemas once."""
    log.info("keywords of a schema are not enforced: %s", keywords)


# Limits on token counts


def token_limit_error(limits: DeploymentLimits, prompt_tokens: int, max_new_tokens: int | None) -> str:
    """Returns TGI's message for a prompt that exceeds the limits, or "". The checks have TGI's order.

    `max_input_tokens` leaves room for a generated token: with `max_new_tokens` 0 the prompt may have one token more.
    """
    room = max(limits.max_total_tokens - prompt_tokens, 0)
    requested = min(room if max_new_tokens is None else max_new_tokens, TGI_CHUNK_TOKENS)
    if prompt_tokens == 0:
        return "`inputs` cannot be empty"
    if prompt_tokens + requested > limits.max_total_tokens:
        return (
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {prompt_tokens} `inputs` tokens and {requested} `max_new_tokens`"
        )
    if prompt_tokens - (max_new_tokens == 0) > limits.max_input_tokens:
        return f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {prompt_tokens}"
    return ""


def pooled_limit_error(limits: DeploymentLimits, tokens: int, about: str = "") -> str:
    """The message for a text that ends in a vector and exceeds the limits, or "". `about` precedes a lower bound."""
    if tokens == 0:
        return "`inputs` cannot be empty"
    if tokens > limits.max_input_tokens:
        return f"`inputs` must have at most {limits.max_input_tokens} tokens. Given: {about}{tokens}"
    return ""


def min_token_limit_error(limits: DeploymentLimits, least: int, max_new_tokens: int | None) -> str:
    """The same for a prompt of which only a lower bound is known; "" if it may fit."""
    if least <= limits.max_total_tokens:
        return ""
    return token_limit_error(limits, least, max_new_tokens).replace("Given: ", "Given: at least ")


def max_generated_tokens(limits: DeploymentLimits, prompt_tokens: int, max_new_tokens: int | None) -> int:
    """Maximum number of tokens to generate: `max_new_tokens`, or less if the context has less room."""
    room = limits.max_total_tokens - prompt_tokens
    return room if max_new_tokens is None else min(max_new_tokens, room)


# Encoding


def encode_prompt(
    vocabulary: Vocabulary, text: str, add_special_tokens: bool, truncate: int | None, with_starts: bool = False
) -> EncodedPrompt:
    """Encodes `text`. `truncate` keeps that many last tokens; `with_starts` sets `token_starts`. Raises EncodeError."""
    starts: list[int] = []
    try:
        # encode_batch_fast leaves the offsets out. Unlike `encode`, both release the GIL.
        if with_starts:
            (encoding,) = vocabulary.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            ids, starts = pack_column(INT32, encoding.ids), _token_starts(encoding.offsets)
        elif (cached := vocabulary.segment_cache.encode(text, add_special_tokens)) is not None:
            ids = cached
        else:
            (encoding,) = vocabulary.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = pack_column(INT32, encoding.ids)
    except Exception as error:  # the package raises plain Exception, and TypeError for a lone surrogate
        raise EncodeError(f"tokenizer error {error}") from error
    return _truncate(ids, len(text), starts, truncate)


def prompt_from_ids(vocabulary: Vocabulary, ids: bytes, truncate: int | None) -> EncodedPrompt:
    """Makes a prompt of ids (an int32 column) and decodes its text, with special tokens."""
    detokenizer = create_detokenizer(vocabulary, [])
    pieces = [detokenizer.decode_token(token_id) for token_id in unpack_int32(ids)]
    starts = [*accumulate(map(len, pieces[:-1]), initial=0)]
    text = "".join(pieces)
    return _truncate(ids, len(text), starts, truncate)._replace(text=text)


def _truncate(ids: bytes, characters: int, starts: list[int], truncate: int | None) -> EncodedPrompt:
    """Keeps the last `truncate` tokens; all if it is None."""
    count = len(ids) // 4
    dropped = 0 if truncate is None else max(0, count - truncate)
    return EncodedPrompt(
        ids=ids[ITEM_BYTES * dropped :],
        token_count=count - dropped,
        characters=characters,
        token_starts=pack_column(INT32, starts[dropped:]),
    )


def with_decoder_start(prompt: EncodedPrompt, start: int) -> EncodedPrompt:
    """The prompt of an encoder-decoder model: its ids are the encoder's input, and the decoder starts with `start`. The
    input is a segment that the worker computes as a whole, since each of its keys and values depends on all of it."""
    if not prompt.token_count:
        return prompt
    digest = blake2b(prompt.ids, digest_size=IMAGE_DIGEST_BYTES).digest()
    return prompt._replace(
        ids=prompt.ids + pack_column(INT32, [start]),
        token_count=prompt.token_count + 1,
        token_starts=prompt.token_starts and prompt.token_starts + pack_column(INT32, [prompt.characters]),
        images=[ImageSegment(0, prompt.token_count, digest, "input")],
        encoder_tokens=prompt.token_count,
    )


def encode_bad_words(vocabulary: Vocabulary, words: Sequence[str]) -> list[list[int]]:
    """Encodes bad words as vLLM does. Raises EncodeError.

    Each word gives its token sequence, and that of the word after a space if it has as many tokens and begins with a
    different one.
    """
    forms = [space + word.lstrip() for word in words for space in ("", " ")]
    try:
        encodings = vocabulary.tokenizer.encode_batch_fast(forms, add_special_tokens=False)
    except Exception as error:  # see encode_prompt
        raise EncodeError(f"tokenizer error {error}") from error
    sequences: list[list[int]] = []
    for begin in range(0, len(encodings), 2):
        bare, after_space = (encoding.ids for encoding in encodings[begin : begin + 2])
        if bare:
            sequences.append(bare)
            if len(after_space) == len(bare) and after_space[0] != bare[0]:
                sequences.append(after_space)
    return sequences


def listed_ids(vocabulary: Vocabulary, texts: Sequence[str], prompt: EncodedPrompt) -> list[int]:
    """The tokens that read like these texts at the beginning of the answer to a prompt. Raises EncodeError."""
    answer = prompt.answer_format
    if answer is not None and (answer.channels or answer.starts_in_reasoning):
        raise EncodeError(TEXT_COMES_LATER)
    found = [vocabulary.ids_of(text) for text in texts]
    if not all(found):
        missing = ", ".join(text for text, ids in zip(texts, found, strict=True) if not ids)
        raise EncodeError(f"this model has no token of its own for: {missing}")
    return [token_id for ids in found for token_id in ids]


def _token_starts(offsets: list[tuple[int, int]]) -> list[int]:
    """Number of characters before each token.

    A token starts where the previous one stopped, since an offset may leave out the token's space. Tokens that share a
    character have the same start. Tokens that a template has added lie between characters.
    """
    starts, reached = [], 0
    for start, stop in offsets:
        starts.append(min(start, reached) if stop > start else reached)
        reached = max(reached, stop)
    return starts


def tokenize_text(vocabulary: Vocabulary, rid: int, text: str, add_special_tokens: bool) -> Tokenized:
    """Encodes `text` with UTF-8 byte offsets. If that fails, returns a Tokenized with `error`."""
    try:
        (encoding,) = vocabulary.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    except Exception as error:  # see encode_prompt
        return Tokenized(rid, b"", b"", b"", b"", f"tokenizer error {error}")
    ids, offsets = encoding.ids, encoding.offsets
    starts = [start for start, _ in offsets]
    stops = [stop for _, stop in offsets]
    if not text.isascii():
        byte_offsets = _byte_offsets(text, starts, stops)
        starts = [byte_offsets[start] for start in starts]
        stops = [byte_offsets[stop] for stop in stops]
    return Tokenized(
        rid=rid,
        token_ids=pack_column(INT32, ids),
        byte_starts=pack_column(INT32, starts),
        byte_stops=pack_column(INT32, stops),
        special=pack_column(UINT8, [token_id in vocabulary.special_ids for token_id in ids]),
    )


def _byte_offsets(text: str, *positions: list[int]) -> dict[int, int]:
    """Maps positions in characters to UTF-8 byte offsets, in one pass over `text`."""
    offsets = {}
    before, size = 0, 0
    for position in sorted(set().union(*positions)):
        size += len(text[before:position].encode())
        offsets[position] = size
        before = position
    return offsets
