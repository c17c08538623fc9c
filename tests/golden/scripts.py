"""Scripted answers of the tokenizer process, by name: small enough to derive every expected byte by hand.

Every answer says that the prompt has 3 tokens (a chat's: 12 characters), and that the request took 1 ms to validate,
2 ms in the queue and 30 ms to compute.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    AnswerPart,
    End,
    FinishReason,
    Generate,
    PartKind,
    Prompted,
    PromptTokens,
    Texts,
    Tokenize,
    Tokenized,
)
from tgi.tokenizer.encoder import TEXT_COMES_LATER

Answer = Callable[[Any], list[Any] | None]


class Token(NamedTuple):
    """A generated token. `held` counts trailing characters of the text that may belong to a stop string; `top` are the
    most likely alternatives; `parts` (kind and text) are the parts of the answer that it completes."""

    id: int
    text: str
    logprob: float
    special: bool = False
    held: int = 0
    top: "tuple[Token, ...]" = ()
    parts: tuple[tuple[PartKind, str], ...] = ()


A = Token(5, " a", -0.34)
B = Token(6, " b", -1.0703125)
EOS = Token(2, "</s>", -0.01, True)
A_OF_TWO = A._replace(top=(A, B))
PROMPT_TOPS = (Token(9, " é", -0.0625), B)
TIED = A._replace(top=(A, B, Token(7, " c", B.logprob), Token(8, " d", -5.25)))
EOS_OF_TWO = EOS._replace(top=(EOS, A._replace(logprob=-5.25)))


def texts(message: Generate, *tokens: Token) -> Texts:
    """These tokens of one request, with top tokens if the request asks for them."""
    return step([(message, token) for token in tokens])


def step(rows: list[tuple[Generate, Token]]) -> Texts:
    """One token per row."""
    tokens = [token for _, token in rows]
    tops = [
        [*token.top] if message.listed_texts else top_tokens(token, message.sampling.top_n) for message, token in rows
    ]
    top = [other for others in tops for other in others]
    asked = any(message.sampling.top_n for message, _ in rows)
    held = any(token.held for token in tokens)
    return Texts(
        pack_column(UINT32, [message.rid for message, _ in rows]),
        pack_column(UINT32, [1] * len(rows)),
        pack_column(INT32, [token.id for token in tokens]),
        pack_column(FLOAT32, [token.logprob for token in tokens]),
        bytes(token.special for token in tokens),
        [token.text for token in tokens],
        held_chars=pack_column(UINT32, [token.held for token in tokens]) if held else b"",
        top_counts=pack_column(UINT32, [len(others) for others in tops]) if asked else b"",
        top_ids=pack_column(INT32, [token.id for token in top]),
        top_logprobs=pack_column(FLOAT32, [token.logprob for token in top]),
        top_special=bytes(token.special for token in top),
        top_texts=[token.text for token in top],
        parts=[AnswerPart(at, *part) for at, token in enumerate(tokens) for part in token.parts],
    )


def top_tokens(token: Token, top_n: int) -> list[Token]:
    """The top tokens that a worker lists: the `top_n` most likely, and all that tie with the last of these."""
    last = min((other.logprob for other in token.top[:top_n]), default=0.0)
    return [other for other in token.top if top_n and other.logprob >= last]


def end(message: Generate, reason: FinishReason, text: str, count: int, detail: str = "") -> End:
    """The end of a request after `count` tokens."""
    return End(message.rid, reason, detail, text, 3, count, 0, 1_000, 2_000, 30_000)


def admitted(message: Generate, divided: bool = False) -> list[Any]:
    """The messages before the first token: a chat's length, the text of token ids, and, if requested, the tokens of the
    prompt "A é"."""
    before: list[Any] = [Prompted(message.rid, 3, 12, divided)] if message.chat else []
    if message.tells_prompt:
        before.append(Prompted(message.rid, 3, 1))
    if message.input_ids:
        before.append(Prompted(message.rid, 3, 3, text="A é"))
    if message.prompt_logprobs_from is not None:
        tops = PROMPT_TOPS[: message.prompt_top_n]
        before.append(
            PromptTokens(message.rid, pack_column(INT32, [1]), pack_column(FLOAT32, [float("nan")]), bytes(4), ["<s>"])
        )
        before.append(
            PromptTokens(
                message.rid,
                pack_column(INT32, [7, 9]),
                pack_column(FLOAT32, [-2.5, -0.0625]),
                pack_column(INT32, [0, 1]),
                ["A", " é"],
                pack_column(INT32, [token.id for token in tops] * 2),
                pack_column(FLOAT32, [token.logprob for token in tops] * 2),
                [token.text for token in tops] * 2,
            )
        )
    return before


def tokens(reason: FinishReason, text: str, *row: Token, detail: str = "") -> Callable[[], Answer]:
    """A request that gets these tokens, one message each, and then ends."""

    def answer(message: Generate) -> list[Any]:
        return [
            *admitted(message), *(texts(message, token) for token in row), end(message, reason, text, len(row), detail),
        ]  # fmt: skip

    return lambda: answer


def divided(reason: FinishReason, *row: Token, rest: tuple[tuple[PartKind, str], ...] = ()) -> Callable[[], Answer]:
    """The same for an answer that is divided into parts. The `rest` becomes known at the end of the text."""

    def answer(message: Generate) -> list[Any]:
        text = "".join(token.text for token in row if not token.special)
        last = end(message, reason, text, len(row))._replace(parts=[AnswerPart(0, *part) for part in rest])
        return [*admitted(message, True), *(texts(message, token) for token in row), last]

    return lambda: answer


def refused(reason: FinishReason, detail: str = "") -> Callable[[], Answer]:
    """A request that ends without other messages. POST /tokenize is rejected with the same text."""

    def answer(message: Any) -> list[Any]:
        if isinstance(message, Tokenize):
            return [Tokenized(message.rid, b"", b"", b"", b"", detail, "", reason)]
        return [End(message.rid, reason, detail)]

    return lambda: answer


def failed_at_once() -> Answer:
    """A request that was admitted and then failed, before its first token."""
    return lambda message: [*admitted(message), End(message.rid, FinishReason.FAILED, "Server error: out of memory")]


def stop_string() -> Answer:
    """ " a", " EN", "D" with the stop string "END". If it is excluded from the text, its beginning is held back."""

    def answer(message: Generate) -> list[Any]:
        hidden = message.hide_stop
        row = [A, Token(7, " EN", -0.5, held=2 * hidden), Token(8, "D", -0.25, held=3 * hidden)]
        text = " a " if hidden else " a END"
        return [*admitted(message), *(texts(message, token) for token in row), end(message, FinishReason.STOP, text, 3)]

    return answer


def together(*rows: tuple[Token, ...]) -> Callable[[], Answer]:
    """As many requests as rows, each of which gets a token per step. The first step waits for all requests."""

    def script() -> Answer:
        waiting: list[Generate] = []

        def answer(message: Generate) -> list[Any]:
            waiting.append(message)
            if len(waiting) < len(rows):
                return []
            waiting.sort(key=lambda each: (each.inputs, each.sampling.choice))
            parts = any(token.parts for row in rows for token in row)
            answers = [each for message in waiting for each in admitted(message, parts)]
            for place in range(max(map(len, rows))):
                drawn = [(each, row[place]) for each, row in zip(waiting, rows, strict=True) if place < len(row)]
                answers.append(step(drawn))
                for each, row in zip(waiting, rows, strict=True):
                    if place == len(row) - 1:
                        text = "".join(token.text for token in row if not token.special)
                        reason = FinishReason.EOS if row[-1].special else FinishReason.LENGTH
                        answers.append(end(each, reason, text, len(row)))
            return answers

        return answer

    return script


def second_fails() -> Answer:
    """The first of two requests succeeds, the second one fails."""
    scripts = [SCRIPTS['" a", end of sequence'](), failed_at_once()]
    return lambda message: scripts.pop(0)(message)


def pieces(starts: list[int], stops: list[int]) -> Callable[[], Answer]:
    """A text of three tokens, the first of which is special. A chat becomes "a é"."""

    def answer(message: Tokenize) -> list[Any]:
        columns = (pack_column(INT32, column) for column in ([1, 7, 9], starts, stops))
        return [Tokenized(message.rid, *columns, b"\1\0\0", text="a é" if message.chat or message.ids else "")]

    return lambda: answer


def nothing() -> Answer:
    """For requests that must not reach the tokenizer: their answer would contain this text."""
    said = "the front end has sent down what it should have answered by itself"
    return refused(FinishReason.FAILED, said)()


def no_pieces() -> Answer:
    """A text of no tokens."""
    return lambda message: [Tokenized(message.rid, b"", b"", b"", b"")]


def label(message: Generate) -> list[Any]:
    """A question with labels, for each of which one token stands, and for B two."""
    among = ("A", -2.0), ("B", -3.5), ("B", -4.5), ("0", -2.5), ("1", -3.0)
    top = tuple(Token(at, text, logprob) for at, (text, logprob) in enumerate(among) if text in message.listed_texts)
    first = A._replace(top=top)
    return [*admitted(message), texts(message, first), end(message, FinishReason.LENGTH, first.text, 1)]


def vectors(message: Generate) -> list[Any]:
    """A vector of the lengths of a text and its pair, and of the sum of ids."""
    assert message.pooling is not None
    numbers = [
        len(message.inputs) + 0.5,
        float(len(message.pooling.pair or "")),
        float(sum(unpack_int32(message.input_ids))),
    ]
    return [End(message.rid, FinishReason.LENGTH, prompt_tokens=5, vector=pack_column(FLOAT32, numbers))]


def score(message: Generate) -> list[Any]:
    """One number: how much longer the pair is than the text."""
    assert message.pooling is not None
    numbers = [float(len(message.pooling.pair or "") - len(message.inputs)) / 4]
    return [End(message.rid, FinishReason.LENGTH, prompt_tokens=7, vector=pack_column(FLOAT32, numbers))]


# A call of f as a model may write it, in tokens that complete a part of it or none.
OPENING = Token(20, "<tool_call>", -0.5, True)
NAME = Token(21, '{"name": "f", "arguments": ', -0.25, parts=((PartKind.CALL, "f"),))
BEGIN = Token(22, '{"a":', -0.125, parts=((PartKind.ARGUMENTS, '{"a":'),))
REST = Token(23, ' "é"}}', -0.75, parts=((PartKind.ARGUMENTS, ' "é"}'),))
TEXT_BEGINS = Token(28, '{"input": "a\\', -0.5, parts=((PartKind.ARGUMENTS, '{"input": "a\\'),))
TEXT_ENDS = Token(29, 'n\\"é"}}', -0.5, parts=((PartKind.ARGUMENTS, 'n\\"é"}'),))
CLOSING = Token(24, "</tool_call>", -0.5, True)
CALL = (OPENING, NAME, BEGIN, REST, CLOSING)
# A token that ends content, calls f, and begins a call of g.
BOTH = Token(25, "Well. f() g()", -0.5, parts=(
    (PartKind.TEXT, "Well."), (PartKind.CALL, "f"), (PartKind.ARGUMENTS, "{}"),
    (PartKind.CALL, "g"), (PartKind.ARGUMENTS, '{"b":'),
))  # fmt: skip
THOUGHT = Token(26, "<think>Hm", -0.5, parts=((PartKind.REASONING, "Hm"),))
SAID = Token(27, ".</think>Yes", -0.5, parts=((PartKind.REASONING, "."), (PartKind.TEXT, "Yes")))
SHOWN = A._replace(parts=((PartKind.TEXT, " a"),))

TOO_LONG = "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 2040 `inputs` tokens and 20 `max_new_tokens`"

SCRIPTS: dict[str, Callable[[], Answer]] = {
    "nothing": nothing,
    "silence": lambda: lambda message: None,
    '" a", end of sequence': tokens(FinishReason.EOS, " a", A_OF_TWO, EOS_OF_TWO),
    "no token, length": tokens(FinishReason.LENGTH, ""),
    '" a" before " b" and " c", which tie, length': tokens(FinishReason.LENGTH, " a", TIED),
    '" a", " b", length': tokens(FinishReason.LENGTH, " a b", A, B),
    '"" and "é" of one character, end of sequence': tokens(
        FinishReason.EOS, "é", Token(195, "", -0.5), Token(169, "é", -0.0625), EOS
    ),
    '"é" in one token, length': tokens(FinishReason.LENGTH, "é", Token(233, "é", -0.0625)),
    "control characters and no finite logprob, length": tokens(
        FinishReason.LENGTH, '"\\\n\t\x01/é🙂', Token(9, '"\\\n\t\x01/é🙂', float("-inf"))
    ),
    '" a", " EN", "D", stop string "END"': stop_string,
    '" a", " EN" held back, "D", length': tokens(
        FinishReason.LENGTH, " a END", A, Token(7, " EN", -0.5, held=2), Token(8, "D", -0.25)
    ),
    '" a", " EN" held back, end of sequence': tokens(FinishReason.EOS, " a EN", A, Token(7, " EN", -0.5, held=2), EOS),
    '" a", " EN" held back, length': tokens(FinishReason.LENGTH, " a EN", A, Token(7, " EN", -0.5, held=2)),
    "failure before the first token": failed_at_once,
    '" a", then failure': tokens(FinishReason.FAILED, "", A, detail="Server error: out of memory"),
    '" a", then overloaded': tokens(FinishReason.OVERLOADED, "", A),
    '" a", then cancelled': tokens(FinishReason.CANCELLED, "", A),
    "too long": refused(FinishReason.INVALID, TOO_LONG),
    "text that comes later": refused(FinishReason.INVALID, TEXT_COMES_LATER),
    "tokenizer error": refused(FinishReason.INVALID, "tokenizer error unknown token"),
    "no schema": refused(FinishReason.INVALID, "grammar is not valid: a schema is an object"),
    "not enforced": refused(
        FinishReason.INVALID, "cannot compile regex from schema: `not` cannot be enforced (at #)"
    ),
    "overloaded": refused(FinishReason.OVERLOADED),
    "template error": refused(FinishReason.TEMPLATE, "syntax error: no system messages (in <string>:1)"),
    "no template": refused(FinishReason.TEMPLATE, "template not found"),
    '" a", end of sequence | " b", length, in turn': together((A, EOS), (B,)),
    '" b", length | " a", end of sequence, in turn': together((B,), (A, EOS)),
    '" a", " b", length | " b", " a", length, in turn': together((A, B), (B, A)),
    '" a", end of sequence | failure': second_fails,
    "a call of f": divided(FinishReason.EOS, *CALL, EOS),
    "a call of n.f": divided(FinishReason.EOS, NAME._replace(parts=((PartKind.CALL, "n.f"),)), BEGIN, REST, EOS),
    "a call of f with top tokens": divided(FinishReason.EOS, NAME._replace(top=(NAME,)), BEGIN, REST, EOS),
    "text, and calls of f and g": divided(FinishReason.EOS, BOTH, REST, EOS),
    "a call of f, the rest of which the end brings": divided(
        FinishReason.EOS, NAME, BEGIN, rest=((PartKind.ARGUMENTS, " 1"), (PartKind.ARGUMENTS, "}"))
    ),
    "a call of f that is cut off": divided(FinishReason.LENGTH, OPENING, NAME, BEGIN),
    "a call of f that a stop string cuts off": divided(FinishReason.STOP, NAME, BEGIN),
    "a call of f of which only the name is known": divided(FinishReason.LENGTH, NAME),
    "text, though there are tools": divided(FinishReason.EOS, SHOWN, EOS),
    "text that the end brings": divided(FinishReason.LENGTH, A, rest=((PartKind.TEXT, " a"),)),
    "reasoning, then text": divided(FinishReason.EOS, THOUGHT, SAID, EOS),
    "reasoning that is cut off": divided(FinishReason.LENGTH, THOUGHT),
    "reasoning, then a call of f": divided(FinishReason.EOS, THOUGHT, NAME, BEGIN, REST, EOS),
    "a call of f with a text": divided(FinishReason.EOS, NAME, TEXT_BEGINS, TEXT_ENDS, EOS),
    "a call of f | text, in turn": together((NAME, BEGIN, REST, EOS), (SHOWN, EOS)),
    "labels": lambda: label,
    "a vector of lengths": lambda: vectors,
    "a score of lengths": lambda: score,
    "no pieces": no_pieces,
    "three pieces of \"a é\"": pieces([0, 0, 1], [0, 1, 4]),
    "three pieces of \"éa\", cut inside a character": pieces([0, 0, 1], [0, 1, 3]),
}  # fmt: skip
