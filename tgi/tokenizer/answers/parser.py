"""Tool parser and reasoning parser: divides a streamed answer into text, reasoning, tool calls and arguments."""

import json
import re
from collections import deque
from collections.abc import Callable, Generator

from tgi.microkernel.messages.protocol import FinishReason, PartKind
from tgi.tokenizer.answers.arguments import (
    JsonScan,
    PythonLiteral,
    escaped,
    is_never_text,
    is_text,
    scan_json,
    string_json,
    value_json,
)
from tgi.tokenizer.answers.formats import (
    MAX_BARE_WORD,
    STAND_IN,
    WHITESPACE,
    AnswerFormat,
    ArgumentTags,
    CallPlaceholder,
    Channels,
    FormatTokens,
    ToolCallFormat,
    call_prefix,
)

ParsedPart = tuple[PartKind, str]


class StreamingAnswerParser:
    """Parses the tokens of one request. Text that the stop-string filter holds back is not parsed yet."""

    __slots__ = ("_format_tokens", "_parser", "_unparsed", "_visible")

    def __init__(self, answer_format: AnswerFormat, format_tokens: FormatTokens) -> None:
        self._parser = AnswerParser(answer_format, format_tokens)
        self._format_tokens = format_tokens
        self._unparsed: deque[str] = deque()  # pieces of text, with stand-ins for hidden tokens
        self._visible = 0  # characters of `_unparsed` without stand-ins

    def parse_token(self, token_id: int, text: str, held_characters: int, hidden: bool) -> list[ParsedPart]:
        """Parses a token with its text, and returns the parts that may be shown now.

        The last `held_characters` of the visible text so far are not parsed yet.
        """
        piece = self._format_tokens.stand_in(token_id) if hidden else text
        if not held_characters and not self._unparsed:
            return self._parser.parse_piece(piece) if piece else []
        self._unparsed.append(piece)
        self._visible += _visible_length(piece)
        piece = self._release(held_characters)
        return self._parser.parse_piece(piece) if piece else []

    def _release(self, held_characters: int) -> str:
        """Takes what comes before the last `held_characters` visible ones."""
        unparsed, released = self._unparsed, []
        while unparsed:
            rest = self._visible - _visible_length(unparsed[0])
            if rest < held_characters:
                break
            self._visible = rest
            released.append(unparsed.popleft())
        if unparsed:
            first, at = unparsed[0], 0
            while self._visible > held_characters or STAND_IN.match(first, at):
                self._visible -= STAND_IN.match(first, at) is None
                at += 1
            released.append(first[:at])
            unparsed[0] = first[at:]
        return "".join(released)

    def finish(self, reason: str | None) -> list[ParsedPart]:
        """Returns the last parts. Held text is dropped with FinishReason.STOP: it is the stop string."""
        last = [] if reason == FinishReason.STOP else self._parser.parse_piece("".join(self._unparsed))
        return last + self._parser.finish(reason == FinishReason.EOS)


class AnswerParser:
    """Parses the text of one answer. Its grammar makes the model write well-formed calls; anything else is text, and so
    is what only begins like a call.

    The result does not depend on how the answer is cut into pieces. What may be the beginning of a marker, a tag or a
    call is held back, and so is white space before it.

    The methods that are generators consume `_rest`, and yield when they need more of the answer. They leave in it only
    what the next piece may complete: what is searched for each piece does not grow with the answer.
    """

    __slots__ = (
        "_answer_format", "_complete", "_finished", "_generator", "_held_space", "_parts", "_piece_text", "_rest",
        "_taken", "_text_end", "_tool",
    )  # fmt: skip

    def __init__(self, answer_format: AnswerFormat, format_tokens: FormatTokens) -> None:
        self._answer_format = answer_format
        self._piece_text: Callable[[str], str] = format_tokens.piece_text
        self._rest = ""  # received, but not consumed yet
        self._held_space: list[str] = []  # white space that is a part of the text only if more text follows
        self._taken: list[str] | None = None  # what was consumed of a call whose name is not complete: it may be text
        self._tool = ""  # the name of the call that is parsed
        self._text_end = ""  # the tag that ends the text, if another one has begun it
        self._finished = False
        self._complete = False  # the model has ended the answer by itself
        self._parts: list[ParsedPart] = []
        self._generator = self._parse_answer()
        next(self._generator)

    def parse_piece(self, text: str) -> list[ParsedPart]:
        """Parses the next piece of text, with stand-ins for hidden tokens. Returns the parts that may be shown now."""
        self._rest += text
        return self._resume()

    def finish(self, complete: bool = False) -> list[ParsedPart]:
        """Ends the answer. Returns the parts that were held back. A call that has only begun is text if the model has
        ended the answer there (`complete`), and is dropped if the answer was cut."""
        self._finished, self._complete = True, complete
        return self._resume()

    def _resume(self) -> list[ParsedPart]:
        self._parts = []
        next(self._generator, None)
        return self._parts

    def _emit(self, kind: PartKind, text: str) -> None:
        """Adds a part without its stand-ins. Adjacent parts of the same kind become one, except the names of calls."""
        text = STAND_IN.sub("", text)
        if self._parts and self._parts[-1][0] is kind is not PartKind.CALL:
            self._parts[-1] = (kind, self._parts[-1][1] + text)
        elif text:
            self._parts.append((kind, text))

    def _emit_text(self, kind: PartKind, text: str, space: str) -> None:
        """Emits a part, but holds these characters back where they end it."""
        shown = text.rstrip(space)
        if shown:
            self._emit(kind, "".join(self._held_space) + shown)
            self._held_space = [text[len(shown) :]]
        elif text:
            self._held_space.append(text)

    def _emit_call(self, name: str) -> None:
        """Begins a call. Raises _FormatViolation if no such tool may be called."""
        tools = self._answer_format.tools
        if not name or (tools is not None and name not in tools):
            raise _FormatViolation
        self._emit(PartKind.CALL, name)
        self._tool, self._taken = name, None
        self._held_space.clear()

    def _parse_answer(self) -> Generator[None]:
        if self._answer_format.channels:
            yield from self._parse_channels()
        yield from self._parse_reasoning()
        yield from self._parse_text_tag()
        yield from self._parse_bare_calls()
        if self._answer_format.text_has_grammar:
            yield from self._parse_marked_calls()
            while not self._finished or self._rest:
                self._emit(PartKind.TEXT, "".join(self._held_space) + self._consume(len(self._rest)))
                self._held_space.clear()
                yield
        while (found := (yield from self._parse_text())) is not None:
            yield from self._attempt_calls(*found)

    def _parse_reasoning(self) -> Generator[None]:
        """Parses reasoning at the beginning of the answer; drops its tags and the newlines around them."""
        tags = self._answer_format.reasoning_tags
        if tags is None:
            return
        if not self._answer_format.starts_in_reasoning:
            opening = self._piece_text(tags.open)
            if not (yield from self._begins_with((opening,))):
                return
            self._strip_left(WHITESPACE)
            self._consume(len(opening))
        yield from self._skip("\n")
        close = self._piece_text(tags.close)
        while (at := self._rest.find(close)) < 0 and not self._finished:
            shown = len(self._rest) - _partial_marker_length(self._rest, close)
            self._emit_text(PartKind.REASONING, self._consume(shown), "\n")
            yield
        self._emit_text(PartKind.REASONING, self._consume(at if at >= 0 else len(self._rest)), "\n")
        self._held_space.clear()
        if at >= 0:
            self._consume(len(close))
            yield from self._skip("\n")

    def _parse_text_tag(self) -> Generator[None]:
        """Drops the tag that begins the text, and the newlines behind it."""
        if self._answer_format.text_tags is None:
            return
        opening, closing = map(self._piece_text, self._answer_format.text_tags)
        if (yield from self._begins_with((opening,))):
            self._strip_left(WHITESPACE)
            self._consume(len(opening))
            yield from self._skip("\n")
            self._text_end = closing

    # Where calls may begin

    def _parse_bare_calls(self) -> Generator[None]:
        """Parses calls without a marker at the beginning of the answer, or behind its reasoning."""
        for call_format in self._answer_format.call_formats:
            if call_format.bare and (yield from self._begins_with(call_prefix(call_format))):
                yield from self._attempt_calls(call_format, "")
                return

    def _parse_marked_calls(self) -> Generator[None]:
        """Parses calls with a marker at the beginning of the answer, or behind its reasoning."""
        for call_format in self._answer_format.call_formats:
            marker = self._piece_text(call_format.marker)
            if marker and (yield from self._begins_with((marker,))):
                space = len(self._rest) - len(self._rest.lstrip(WHITESPACE))
                yield from self._attempt_calls(call_format, self._consume(space + len(marker)))
                return

    def _parse_text(self) -> Generator[None, None, tuple[ToolCallFormat, str] | None]:
        """Parses text up to and with a marker. Returns the marker and its format; None at the end of the answer. Drops
        the tag that ends the text, and the white space around it."""
        call_formats = self._answer_format.call_formats
        markers = {self._piece_text(known.marker): known for known in call_formats if known.marker}
        while True:
            signs = [*markers, *filter(None, [self._text_end])]
            positions = [(at, sign) for sign in signs if (at := self._rest.find(sign)) >= 0]
            if positions:
                at, sign = min(positions)
                self._emit_text(PartKind.TEXT, self._consume(at), WHITESPACE)
                self._consume(len(sign))
                if sign in markers:
                    return markers[sign], sign
                self._text_end = ""
                self._held_space.clear()
                yield from self._skip(WHITESPACE)
                continue
            if self._finished:
                self._emit(PartKind.TEXT, "".join(self._held_space) + self._consume(len(self._rest)))
                return None
            if signs:
                held = max(_partial_marker_length(self._rest, sign) for sign in signs)
                self._emit_text(PartKind.TEXT, self._consume(len(self._rest) - held), WHITESPACE)
            else:
                self._emit(PartKind.TEXT, self._consume(len(self._rest)))
            yield

    def _attempt_calls(self, call_format: ToolCallFormat, marker: str) -> Generator[None]:
        """Parses calls behind this marker. What turns out to be no call is text; markers within it count."""
        self._taken = [marker]
        try:
            yield from self._parse_calls(call_format)
        except _FormatViolation:
            if self._taken is not None:
                text = "".join(self._taken) + self._rest
                shown = len(text) - len(text.lstrip(WHITESPACE)) + 1
                self._emit_text(PartKind.TEXT, text[:shown], WHITESPACE)
                self._rest = text[shown:]
        except _Truncated:
            self._held_space.clear()
        self._taken = None

    # Calls

    def _parse_calls(self, call_format: ToolCallFormat) -> Generator[None]:
        """Parses calls, from behind the first marker to the end of the last call."""
        for piece in call_format.before:
            yield from self._expect(piece)
        separators = (*call_format.between, call_format.marker if call_format.marker_repeats else "")
        separators = tuple(piece for piece in separators if piece.strip(WHITESPACE))
        while True:
            for at, piece in enumerate(call_format.call):
                yield from self._parse_call_piece(call_format, at, piece)
            next_piece = (separators or call_format.call)[0]
            another = next_piece is not CallPlaceholder.WORD
            if not another:  # only what ends the calls can be told from another call
                next_piece = call_format.after[0]
            text = self._piece_text(next_piece)
            found = yield from self._begins_with((text,))
            if self._finished and not found and begins_with(self._rest, (text,)) is None:
                if not self._complete or not self._rest.strip(WHITESPACE):
                    self._rest = ""  # the beginning of what comes next, which was cut off
                break
            if found is not another:
                break
            self._taken = []
            for piece in separators:
                yield from self._expect(piece)
        self._taken = None
        for piece in call_format.after:
            yield from self._expect(piece)
        yield from self._skip(WHITESPACE)

    def _parse_call_piece(self, call_format: ToolCallFormat, at: int, piece: str) -> Generator[None]:
        match piece:
            case CallPlaceholder.NAME:
                yield from self._expect('"')
                name = ['"']
                while True:
                    if (match := _STRING_CHARACTERS.match(self._rest)) is not None:
                        name.append(self._consume(match.end()))
                    if self._rest.startswith('"'):
                        break
                    yield from self._need_more()
                self._emit_call(_load_string("".join(name) + self._consume(1)))
            case CallPlaceholder.WORD:
                self._emit_call((yield from self._parse_word(call_format.word_ends())))
            case CallPlaceholder.INDEX:
                yield from self._parse_index(self._piece_text(call_format.call[at + 1]))
            case CallPlaceholder.ARGUMENTS:
                yield from self._expect("{")
                yield from self._parse_object()
            case CallPlaceholder.FIELDS:
                yield from self._skip(WHITESPACE)
                self._strip_left(",")
                yield from self._skip(WHITESPACE)
                yield from self._parse_object()
            case CallPlaceholder.TAGS:
                yield from self._parse_tags(call_format.tags, call_format.call[at + 1])
            case CallPlaceholder.KEYWORDS:
                yield from self._parse_keywords()
            case CallPlaceholder.LITERALS:
                yield from self._parse_literals(self._piece_text(call_format.quote))
            case _:
                yield from self._expect(piece)

    def _parse_word(self, ends: tuple[str, ...]) -> Generator[None, None, str]:
        """A name without quotes, up to one of these pieces, which stay."""
        ends = tuple(map(self._piece_text, ends))
        word = ""
        while True:
            found = [at for end in ends if (at := self._rest.find(end)) >= 0]
            if found:
                return (word + self._consume(min(found))).strip(WHITESPACE)
            held = max(_partial_marker_length(self._rest, end) for end in ends)
            word += self._consume(len(self._rest) - held)
            if not self._may_be_name(word.strip(WHITESPACE)):
                raise _FormatViolation
            yield from self._need_more()

    def _may_be_name(self, word: str) -> bool:
        """Whether a word is the beginning of the name of a tool."""
        tools = self._answer_format.tools
        return tools is None or any(name.startswith(word) for name in tools)

    def _parse_index(self, end: str) -> Generator[None]:
        while (at := self._rest.find(end)) < 0:
            beginning = self._rest[: len(self._rest) - _partial_marker_length(self._rest, end)]
            if len(beginning) > MAX_INDEX or STAND_IN.search(beginning):
                raise _FormatViolation
            yield from self._need_more()
        self._consume(at)

    def _parse_object(self) -> Generator[None]:
        """Parses a JSON object from behind its opening brace, as arguments."""
        self._emit(PartKind.ARGUMENTS, "{")
        yield from self._parse_json(JsonScan(1))

    def _parse_json(self, scan: JsonScan) -> Generator[None]:
        """Parses the rest of a JSON object or list, as arguments."""
        while True:
            complete, scan = scan_json(self._rest, scan)
            self._emit(PartKind.ARGUMENTS, self._consume(complete))
            if not scan.depth:
                return
            yield from self._need_more()

    def _parse_tags(self, tags: ArgumentTags, following: str) -> Generator[None]:
        """Parses arguments with one element each, up to the piece that follows them."""
        types = (self._answer_format.tools or {}).get(self._tool, {})
        begin, separator = "{", ""
        self._emit(PartKind.ARGUMENTS, begin)
        opening, key_end = self._piece_text(tags.open), self._piece_text(tags.key_end)
        while (yield from self._next_of(opening, self._piece_text(following))) == 0:
            self._consume(len(opening))
            key: list[str] = []
            yield from self._read_up_to(key_end, key.append)
            name = STAND_IN.sub("", "".join(key)).strip(WHITESPACE)
            allowed = types.get(name)
            starts = [self._piece_text(start) for start in (tags.text_start, tags.json_start)]
            if tags.text_start:
                which = yield from self._next_of(*starts)
                self._consume(len(starts[which]))
                if starts[0] != starts[1]:
                    allowed = ["string"] if which == 0 else [one for one in allowed or _NO_TEXT if one != "string"]
            self._emit(PartKind.ARGUMENTS, f"{separator}{string_json(name)}: ")
            separator = ", "
            yield from self._parse_tagged_value(tags, allowed)
        self._emit(PartKind.ARGUMENTS, "}")

    def _parse_tagged_value(self, tags: ArgumentTags, types: list[str] | None) -> Generator[None]:
        close = self._piece_text(tags.close)
        if tags.own_lines:
            while not self._rest:
                yield from self._need_more()
            self._consume(self._rest.startswith("\n"))
        if is_text(types):
            self._emit(PartKind.ARGUMENTS, '"')
            line_end: list[str] = []  # the line feed that may be the one before the closing tag

            def show(text: str) -> None:
                text = "".join(line_end) + text
                line_end[:] = ["\n"] if tags.own_lines and text.endswith("\n") else []
                self._emit(PartKind.ARGUMENTS, escaped(STAND_IN.sub("", text.removesuffix("".join(line_end)))))

            yield from self._read_up_to(close, show)
            self._emit(PartKind.ARGUMENTS, '"')
            return
        if is_never_text(types):
            yield from self._skip_in_call()
            if self._rest[0] in "{[":
                yield from self._parse_json(JsonScan())
                yield from self._expect(tags.close)
                return
        value: list[str] = []
        yield from self._read_up_to(close, value.append)
        text = STAND_IN.sub("", "".join(value))
        if tags.own_lines:
            text = text.removesuffix("\n")
        self._emit(PartKind.ARGUMENTS, value_json(text, types))

    def _parse_keywords(self) -> Generator[None]:
        """Parses Python's keyword arguments, up to the bracket behind them."""
        self._emit(PartKind.ARGUMENTS, "{")
        separator = ""
        while (yield from self._next_of(")", "")) != 0:
            key: list[str] = []
            yield from self._read_up_to("=", key.append)
            name = "".join(key).strip(WHITESPACE)
            if not _IDENTIFIER.fullmatch(name):
                raise _FormatViolation
            self._emit(PartKind.ARGUMENTS, f"{separator}{string_json(name)}: ")
            separator = ", "
            yield from self._skip_in_call()
            literal = PythonLiteral()
            while not literal.ended:
                try:
                    text, length = literal.convert(self._rest)
                except ValueError:
                    raise _FormatViolation from None
                self._consume(length)
                self._emit(PartKind.ARGUMENTS, text)
                if not literal.ended:
                    yield from self._need_more()
            if self._rest[0] == ",":
                self._consume(1)
        self._emit(PartKind.ARGUMENTS, "}")

    def _parse_literals(self, quote: str) -> Generator[None]:
        """Parses an object from behind its brace, with keys without quotes and texts between two of these quotes."""
        brackets = ["}"]
        self._emit(PartKind.ARGUMENTS, "{")
        while brackets:
            yield from self._skip_in_call()
            while self._rest != quote and quote.startswith(self._rest):
                yield from self._need_more()
            if self._rest.startswith(quote):
                self._consume(len(quote))
                self._emit(PartKind.ARGUMENTS, '"')
                yield from self._read_up_to(
                    quote, lambda text: self._emit(PartKind.ARGUMENTS, escaped(STAND_IN.sub("", text)))
                )
                self._emit(PartKind.ARGUMENTS, '"')
                continue
            mark = self._rest[0]
            if mark in "{[":
                brackets.append("}" if mark == "{" else "]")
            elif mark in "}]":
                if brackets.pop() != mark:
                    raise _FormatViolation
            elif mark not in ",:":
                yield from self._parse_bare_word()
                continue
            self._consume(1)
            self._emit(PartKind.ARGUMENTS, mark + " " if mark in ",:" else mark)

    def _parse_bare_word(self) -> Generator[None]:
        """Parses a key or a value without quotes; what is no JSON value is a text."""
        while (match := _BARE_WORD.match(self._rest)) is not None and match.end() == len(self._rest):
            if match.end() > MAX_BARE_WORD:
                raise _FormatViolation
            yield from self._need_more()
        if match is None:
            raise _FormatViolation
        word = self._consume(match.end())
        yield from self._skip_in_call()
        self._emit(PartKind.ARGUMENTS, string_json(word) if self._rest[0] == ":" else value_json(word, None))

    # Channels

    def _parse_channels(self) -> Generator[None]:
        """Parses an answer that consists of messages with headers. What has no header is text."""
        start, channel, message = map(self._piece_text, (Channels.START, Channels.CHANNEL, Channels.MESSAGE))
        ends = [self._piece_text(piece) for piece in (Channels.END, Channels.CALL, Channels.RETURN)]
        kinds: set[PartKind] = set()
        while not self._finished or self._rest:
            if not (yield from self._begins_header(start, channel)):
                yield from self._parse_message(PartKind.TEXT, [start, channel, *ends], kinds)
                continue
            header: list[str] = []
            try:
                yield from self._read_up_to(message, header.append)
            except (_FormatViolation, _Truncated):
                return
            text = "".join(header)
            name = _RECIPIENT.search(text)
            if name is not None and self._tool_is_known(name[1]):
                yield from self._parse_channel_call(name[1])
                yield from self._parse_message(None, [start, *ends], kinds)
                continue
            spoken = text.rpartition(channel)[2].split()
            reasons = spoken[:1] == [Channels.REASONING] or (name is None and _OTHER_RECIPIENT.search(text))
            kind = PartKind.REASONING if reasons else PartKind.TEXT
            yield from self._parse_message(kind, [start, *ends], kinds)

    def _tool_is_known(self, name: str) -> bool:
        tools = self._answer_format.tools
        return bool(self._answer_format.call_formats) and (tools is None or name in tools)

    def _begins_header(self, start: str, channel: str) -> Generator[None, None, bool]:
        for sign in (start, channel, Channels.RECIPIENT):
            if (yield from self._begins_with((sign,))):
                return True
        return False

    def _parse_channel_call(self, name: str) -> Generator[None]:
        try:
            yield from self._expect("{")
            self._emit_call(name)
            yield from self._parse_object()
        except (_FormatViolation, _Truncated):
            pass

    def _parse_message(self, kind: PartKind | None, ends: list[str], kinds: set[PartKind]) -> Generator[None]:
        """Parses the text of a message up to one of these pieces; an END is consumed. None: the text is dropped."""
        begun = False
        while True:
            found = min(((at, end) for end in ends if (at := self._rest.find(end)) >= 0), default=None)
            length = len(self._rest) if found is None else found[0]
            if found is None and not self._finished:
                length -= max(_partial_marker_length(self._rest, end) for end in ends)
            text = STAND_IN.sub("", self._consume(length))
            if text and kind is not None:
                if not begun and kind in kinds:
                    self._emit(kind, "\n")  # another message of this kind
                self._emit(kind, text)
                begun = True
                kinds.add(kind)
            if found is not None:
                if found[1] in ends[-3:]:
                    self._consume(len(found[1]))
                return
            if self._finished:
                return
            yield

    # What comes next

    def _expect(self, piece: str) -> Generator[None]:
        """Consumes this piece and white space before it. Raises _FormatViolation."""
        text = self._piece_text(piece)
        yield from self._skip(WHITESPACE)
        while not self._rest.startswith(text):
            if not text.startswith(self._rest):
                raise _FormatViolation
            yield from self._need_more()
        self._consume(len(text))

    def _next_of(self, one: str, other: str) -> Generator[None, None, int]:
        """Which of two texts comes next, behind white space, which is consumed: 0 or 1; "" stands for anything else.
        Raises _FormatViolation."""
        yield from self._skip_in_call()
        while True:
            if self._rest.startswith(one):
                return 0
            if not one.startswith(self._rest) and self._rest.startswith(other):
                return 1
            if not one.startswith(self._rest) and not other.startswith(self._rest):
                raise _FormatViolation
            yield from self._need_more()

    def _read_up_to(self, end: str, take: Callable[[str], object]) -> Generator[None]:
        """Hands over what comes before this text, which is consumed too."""
        while (at := self._rest.find(end)) < 0:
            length = len(self._rest) - _partial_marker_length(self._rest, end)
            if length:
                take(self._consume(length))
            yield from self._need_more()
        take(self._consume(at))
        self._consume(len(end))

    def _begins_with(self, pieces: tuple[str, ...]) -> Generator[None, None, bool]:
        """Whether these pieces come next, with white space before each. Consumes nothing."""
        passed: list[str] = []
        answer = True
        for piece in pieces:
            text = self._piece_text(piece)
            while True:
                stripped = self._rest.lstrip(WHITESPACE)
                passed.append(self._rest[: len(self._rest) - len(stripped)])
                self._rest = stripped
                if stripped.startswith(text):
                    passed.append(text)
                    self._rest = stripped[len(text) :]
                    break
                if self._finished or not text.startswith(stripped):
                    answer = False
                    break
                yield
            if not answer:
                break
        self._rest = "".join(passed) + self._rest
        return answer

    def _need_more(self) -> Generator[None]:
        """Waits for more. Within a call, the end of a cut answer drops the rest: an incomplete call is not text."""
        if self._finished:
            if self._complete and self._taken is not None:
                raise _FormatViolation
            self._rest = ""
            raise _Truncated
        yield

    def _skip(self, characters: str) -> Generator[None]:
        """Skips all of these characters that come next, also in later pieces."""
        self._strip_left(characters)
        while not self._rest and not self._finished:
            yield
            self._strip_left(characters)

    def _skip_in_call(self) -> Generator[None]:
        """Skips white space up to what follows, which must come."""
        yield from self._skip(WHITESPACE)
        if not self._rest:
            yield from self._need_more()

    def _strip_left(self, characters: str) -> None:
        self._consume(len(self._rest) - len(self._rest.lstrip(characters)))

    def _consume(self, length: int) -> str:
        consumed, self._rest = self._rest[:length], self._rest[length:]
        if self._taken is not None and consumed:
            self._taken.append(consumed)
        return consumed


class _FormatViolation(Exception):
    """The answer does not continue as its format requires."""


class _Truncated(Exception):
    """The answer was cut within a call."""


# Characters of an id within a call.
MAX_INDEX = 64
# Types of a value that a tag declares to be no text.
_NO_TEXT = ["integer", "number", "boolean", "null", "object", "array"]
# Whole characters of a JSON string.
_STRING_CHARACTERS = re.compile(r'(?:[^"\\]|\\.)+', re.DOTALL)
_BARE_WORD = re.compile("[^\\s,:{}\\[\\]<\ud800-\udfff]+")
_IDENTIFIER = re.compile(r"\w+")
# In the header of a message, which may contain stand-ins: the tool that it is for, or another recipient.
_RECIPIENT = re.compile(rf"{re.escape(Channels.RECIPIENT)}([^\s<\ud800-\udfff]+)")
_OTHER_RECIPIENT = re.compile(r"to=(?!user\b|assistant\b)")


def _load_string(text: str) -> str:
    """Decodes a JSON string. Raises _FormatViolation."""
    try:
        value = json.loads(text)
    except ValueError:
        raise _FormatViolation from None
    assert isinstance(value, str)
    return value


def begins_with(text: str, pieces: tuple[str, ...]) -> bool | None:
    """Whether a text begins with these pieces, with white space before each; None if more text is needed."""
    for piece in pieces:
        text = text.lstrip(WHITESPACE)
        if not text.startswith(piece):
            return None if piece.startswith(text) else False
        text = text[len(piece) :]
    return True


def _visible_length(piece: str) -> int:
    """Its characters without stand-ins."""
    return len(STAND_IN.sub("", piece))


def _partial_marker_length(text: str, marker: str) -> int:
    """Length of the longest proper prefix of the marker that ends the text."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
