"""Text to ids: prompts for the model, and tokens with their byte offsets for the tokenize routes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from tgi.kernel import tracing
from tgi.kernel.messages import Generate, Reason, Tokenize, Tokenized
from tgi.kernel.pack import INT32, UINT8, ints, pack
from tgi.tokenizer.answer.formats import Answer
from tgi.tokenizer.answer.tools import AnswerGrammars
from tgi.tokenizer.chat import Chats
from tgi.tokenizer.decode import decoder
from tgi.tokenizer.grammar import GrammarError
from tgi.tokenizer.template import TemplateError
from tgi.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tgi.kernel.trace import Tracer


class EncodeError(Exception):
    """The tokenizer could not read this text. The message is for the client."""


class Prompt(NamedTuple):
    """The ids of a prompt, as an int32 column, how many, and how many characters the text had; and its grammar.

    `starts` (int32) says how many of these stand before each token; empty if that was not asked for.
    """

    ids: bytes
    tokens: int
    characters: int
    starts: bytes = b""
    grammar: str = ""  # as workers read it
    fault: str = ""  # why the grammar is refused, for the client
    answer: Answer | None = None  # what the answer holds besides text; None: it is text alone
    bad_words: list[list[int]] = []  # the token sequences of Generate.bad_words
    text: str = ""  # if the prompt came as ids: what they say


class Refusal(NamedTuple):
    """Why there is no prompt, for the client: `reason` is INVALID or TEMPLATE."""

    reason: Reason
    message: str


class Encoder:
    """What is asked of a tokenizer, texts and chats, to ids. May be called from any thread; prompts with a grammar
    from one thread alone."""

    def __init__(self, vocabulary: Vocabulary, chats: Chats, tracer: "Tracer | None" = None) -> None:
        self._vocabulary = vocabulary
        self._chats = chats
        self._tracer = tracer
        self._grammars = AnswerGrammars(vocabulary)
        self.marks = self._grammars.marks

    def prompt(self, asked: Generate) -> Prompt | Refusal:
        """The prompt of a request. A chat's template writes the special tokens itself."""
        try:
            text, add_special_tokens, chat = asked.inputs, asked.add_special_tokens, None
            if asked.chat:
                with tracing.span(self._tracer, "apply_chat_template", asked.trace):
                    chat = self._chats.read(asked.chat)
                text, add_special_tokens = chat.text, False
            with tracing.span(self._tracer, "tokenize", asked.trace):
                if asked.input_ids:
                    made = prompt_of_ids(self._vocabulary, asked.input_ids, asked.truncate)
                else:
                    starts = asked.prompt_from is not None
                    made = prompt(self._vocabulary, text, add_special_tokens, asked.truncate, starts)
            if chat is not None and chat.answer is not None:
                made = made._replace(answer=chat.answer)
            if asked.bad_words:
                made = made._replace(bad_words=bad_words(self._vocabulary, asked.bad_words))
            if not asked.grammar and not (chat is not None and chat.tools):
                return made
            with tracing.span(self._tracer, "compile_grammar", asked.trace):
                return made._replace(grammar=self._grammars.read(asked.grammar, chat))
        except GrammarError as error:
            return made._replace(fault=str(error))  # the rules on token counts come first
        except EncodeError as error:
            return Refusal(Reason.INVALID, str(error))
        except TemplateError as error:
            return Refusal(Reason.TEMPLATE, str(error))

    def tokenized(self, asked: Tokenize) -> Tokenized:
        """The answer to a Tokenize."""
        if not asked.chat:
            return tokenized(self._vocabulary, asked.rid, asked.inputs, asked.add_special_tokens)
        try:
            text = self._chats.text(asked.chat)
        except TemplateError as error:
            return Tokenized(asked.rid, b"", b"", b"", b"", str(error), reason=Reason.TEMPLATE)
        answer = tokenized(self._vocabulary, asked.rid, text, False)
        return answer if answer.error else answer._replace(text=text)


def prompt(
    vocabulary: Vocabulary, text: str, add_special_tokens: bool, truncate: int | None, starts: bool = False
) -> Prompt:
    """The ids of `text`, the last `truncate` of them if that is given, and where they start. Raises EncodeError."""
    begins: list[int] = []
    try:
        # encode_batch_fast leaves the offsets out. Unlike encode, both let other threads run meanwhile.
        if starts:
            (encoding,) = vocabulary.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            column, begins = pack(INT32, encoding.ids), _starts(encoding.offsets)
        elif (known := vocabulary.stretches.ids(text, add_special_tokens)) is not None:
            column = known
        else:
            (encoding,) = vocabulary.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            column = pack(INT32, encoding.ids)
    except Exception as error:  # the package raises plain Exception, and TypeError for a lone surrogate
        raise EncodeError(f"tokenizer error {error}") from error
    return _truncated(column, len(text), begins, truncate)


def prompt_of_ids(vocabulary: Vocabulary, column: bytes, truncate: int | None) -> Prompt:
    """The same for a prompt that comes as ids, with their text: special tokens are part of it."""
    state = decoder(vocabulary, [])
    pieces = [state.feed(number) for number in ints(column)]
    begins = [*accumulate(map(len, pieces[:-1]), initial=0)]
    text = "".join(pieces)
    return _truncated(column, len(text), begins, truncate)._replace(text=text)


def _truncated(column: bytes, characters: int, begins: list[int], truncate: int | None) -> Prompt:
    """The last `truncate` of these ids."""
    tokens = len(column) // 4
    cut = 0 if truncate is None else max(0, tokens - truncate)
    return Prompt(column[4 * cut :], tokens - cut, characters, pack(INT32, begins[cut:]))


def bad_words(vocabulary: Vocabulary, words: Sequence[str]) -> list[list[int]]:
    """The token sequences of these words as vLLM has them: of each word, and of the word behind a space where that is
    as many tokens and begins with another one. Raises EncodeError."""
    forms = [space + word.lstrip() for word in words for space in ("", " ")]
    try:
        encodings = vocabulary.tokenizer.encode_batch_fast(forms, add_special_tokens=False)
    except Exception as error:  # as above
        raise EncodeError(f"tokenizer error {error}") from error
    found: list[list[int]] = []
    for begin in range(0, len(encodings), 2):
        first, behind = (encoding.ids for encoding in encodings[begin : begin + 2])
        if first:
            found.append(first)
            if len(behind) == len(first) and behind[0] != first[0]:
                found.append(behind)
    return found


def _starts(offsets: list[tuple[int, int]]) -> list[int]:
    """Characters before each token. A token begins where the one before it ended: an offset may leave out its space.
    Only those that share a character begin together. What a template has added stands between characters."""
    found, reached = [], 0
    for start, stop in offsets:
        found.append(min(start, reached) if stop > start else reached)
        reached = max(reached, stop)
    return found


def tokenized(vocabulary: Vocabulary, rid: int, text: str, add_special_tokens: bool) -> Tokenized:
    """The tokens of `text` with UTF-8 byte offsets. A text that cannot be read gives a Tokenized with `error` set."""
    try:
        (encoding,) = vocabulary.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    except Exception as error:  # as above
        return Tokenized(rid, b"", b"", b"", b"", f"tokenizer error {error}")
    ids, offsets = encoding.ids, encoding.offsets
    starts = [start for start, _ in offsets]
    stops = [stop for _, stop in offsets]
    if not text.isascii():
        at = _byte_positions(text, starts, stops)
        starts = [at[start] for start in starts]
        stops = [at[stop] for stop in stops]
    special = [number in vocabulary.special for number in ids]
    return Tokenized(rid, pack(INT32, ids), pack(INT32, starts), pack(INT32, stops), pack(UINT8, special))


def _byte_positions(text: str, *positions: list[int]) -> dict[int, int]:
    """Where the given characters of `text` begin in its UTF-8 form. Reads the text once."""
    found = {}
    before, size = 0, 0
    for position in sorted(set().union(*positions)):
        size += len(text[before:position].encode())
        found[position] = size
        before = position
    return found
