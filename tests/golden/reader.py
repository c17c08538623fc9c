"""Reads golden files: requests and the exact bytes of the responses that the wire contract requires.

A file begins with comment lines (`#`): its content and the sections of the contract that it covers.
Each exchange is

    === title
    tokenizer: the name of a scripted answer (scripts.py); absent: the request must not reach the tokenizer
    server: name=value, a setting other than the default; may be repeated
    given: a state of the server (conftest.py)
    order: any, if events of different choices may be interleaved in any order; the file lists them by choice
    --- request
    POST /generate HTTP/1.1
    content-type: application/json

    {"inputs":"x"}
    --- response
    HTTP/1.1 200
    content-type: application/json

    {"generated_text":" a"}

In a body `⏎` is a line feed; the line breaks of the file are removed.
In a response `{{name}}` is a placeholder for text that varies or that the contract leaves open; see PLACEHOLDERS. Two
occurrences of one name in a body must match the same text. `{{byte ff}}` in a request is that byte.
A header of the response with the value `(none)` must be absent. Headers that are not listed are not checked.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tgi

CASES = Path(__file__).parent / "cases"

PLACEHOLDERS = {
    "version": re.escape(tgi.__version__),
    "created": r"\d{10}",  # Unix seconds; the test also compares them with the clock
    "completed": r"\d{10}",
    "chat id": r"chatcmpl-[0-9A-Za-z_-]{8,}",
    "completion id": r"cmpl-[0-9A-Za-z_-]{8,}",
    "call id": r"call_[0-9A-Za-z_-]{8,}",
    "other call id": r"call_[0-9A-Za-z_-]{8,}",
    "response id": r"resp_[0-9A-Za-z_-]{8,}",
    "item id": r"(msg|rs|fc|ctc)_[0-9A-Za-z_-]{8,}",
    "other item id": r"(msg|rs|fc|ctc)_[0-9A-Za-z_-]{8,}",
    "third item id": r"(msg|rs|fc|ctc)_[0-9A-Za-z_-]{8,}",
    "conversation id": r"conv_[0-9A-Za-z_-]{8,}",
    "message id": r"msg_[0-9A-Za-z_-]{8,}",
    "tool use id": r"toolu_[0-9A-Za-z_-]{8,}",
    "digest": r"[0-9a-f]{8,}",
    "seed": r"\d{1,20}",
    "other seed": r"\d{1,20}",
    "seconds": r"\d+(\.\d+)?(e-\d+)?",
    "milliseconds": r"\d+",
    "wait": r"[1-9]\d*",  # whole seconds
    "line": r"\d+",
    "column": r"\d+",
    "position": r"( at line \d+ column \d+)?",  # optional by the contract
    "path": r"([a-z_]+(\[\d+\])?(\.[a-z_]+(\[\d+\])?)*: )?",  # optional by the contract
    "null or count": r"(null|\d+)",
    "words": r"[^\n]*\w[^\n]*",  # text that the contract leaves open
    "keep-alive comments": r"(:\n\n)+",
    "html type": r"text/html(; charset=utf-8)?",
    "rest": r"[\s\S]*",
    "exposition": r'(# (HELP|TYPE) [^\n]+\n|[a-z_]+(\{[^\n]*\})? (\d+(\.\d+)?(e[+-]?\d+)?|\+Inf|NaN)\n|\n)+',
}  # fmt: skip
_PLACEHOLDER = re.compile(r"\{\{([a-z][a-z -]*)\}\}")


@dataclass
class Exchange:
    """One request and its expected response, as in the file; `body` without the file's line breaks."""

    title: str
    place: str  # file and line, for messages
    tokenizer: str = "nothing"
    given: str = ""
    order: str = "as written"
    server: list[str] = field(default_factory=list)
    request: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""

    @property
    def settings(self) -> dict[str, object]:
        """The settings other than the defaults; those that accept several values as tuples."""
        values: dict[str, object] = {}
        for item in self.server:
            name, _, text = item.partition("=")
            if name in ("api_key", "cors_allow_origin"):
                values[name] = (*values.get(name, ()), text)  # type: ignore[misc]
            else:
                values[name] = int(text) if text.isdigit() else {"true": True, "false": False}.get(text, text)
        return values

    @property
    def bytes(self) -> bytes:
        """The request as sent. `host`, `content-length` and `connection: close` are added if missing."""
        head, _, body = self.request.partition("\n\n")
        data = b"".join(
            bytes.fromhex(part) if place % 2 else part.encode()
            for place, part in enumerate(re.split(r"\{\{byte (\w\w)\}\}", _body(body)))
        )
        first, *lines = head.strip().split("\n")
        names = {line.partition(":")[0].lower() for line in lines}
        added = {"host": "test", "connection": "close"}
        if data and "transfer-encoding" not in names:
            added["content-length"] = str(len(data))
        lines += [f"{name}: {value}" for name, value in added.items() if name not in names]
        return "".join(f"{line}\r\n" for line in [first, *lines, ""]).encode() + data

    def header(self, name: str) -> re.Pattern[str]:
        """The pattern that the whole header of the response must match."""
        return _pattern(self.headers[name])

    @property
    def expected(self) -> re.Pattern[str]:
        """The pattern that the whole body of the response must match."""
        return _pattern(self.body)

    def difference(self, body: str) -> str:
        """A message that shows where a body begins to differ from the expected one."""
        pieces = re.findall(rf"{_PLACEHOLDER.pattern}|([\s\S])", self.body)
        pieces = [char or f"{{{{{name}}}}}" for name, char in pieces]
        good, end = 0, 0
        for count in range(len(pieces) + 1):
            found = _pattern("".join(pieces[:count])).match(body)
            if found is None:
                break
            good, end = count, found.end()
        wanted = "".join(pieces[good:])
        equal, received = body[max(0, end - 60) : end], body[end : end + 200]
        return f"equal up to {equal!r}\nexpected: {wanted[:200]!r}\nreceived: {received!r}"


def _pattern(text: str) -> re.Pattern[str]:
    """The pattern of an expected text; a placeholder's second occurrence must repeat the first."""
    seen: list[str] = []
    parts = []
    for place, part in enumerate(_PLACEHOLDER.split(text)):
        if place % 2 == 0:
            parts.append(re.escape(part))
        elif part in seen:
            parts.append(f"(?P=hole{seen.index(part)})")
        else:
            parts.append(f"(?P<hole{len(seen)}>{PLACEHOLDERS[part]})")
            seen.append(part)
    return re.compile("".join(parts))


def placeholder_values(pattern: re.Pattern[str], text: str, expected: str) -> dict[str, str]:
    """The text that each placeholder of `expected` has matched, by name."""
    found = pattern.fullmatch(text)
    assert found is not None
    names = list(dict.fromkeys(_PLACEHOLDER.findall(expected)))
    return {name: found[f"hole{place}"] for place, name in enumerate(names)}


def _body(text: str) -> str:
    return text.replace("\n", "").replace("⏎", "\n")


def exchanges() -> Iterator[Exchange]:
    """All exchanges of all files."""
    for path in sorted(CASES.glob("*.http")):
        yield from read_exchanges(path)


def read_exchanges(path: Path) -> list[Exchange]:
    """The exchanges of a file. Raises ValueError if the file has another format than described above."""
    text = path.read_text()
    preface, *parts = re.split(r"^=== ", text, flags=re.MULTILINE)
    if not parts or any(line and not line.startswith("#") for line in preface.split("\n")):
        raise ValueError(f"{path.name}: expected lines of # and then exchanges that begin with ===")
    found = []
    line = preface.count("\n") + 1
    for part in parts:
        found.append(_exchange(part, f"{path.stem}:{line}"))
        line += part.count("\n")
    return found


def _exchange(text: str, place: str) -> Exchange:
    pieces = re.split(r"^--- (request|response)\n", text, flags=re.MULTILINE)
    if [*pieces[1::2]] != ["request", "response"]:
        raise ValueError(f"{place}: expected `--- request` and `--- response`, once each")
    title, *setup = pieces[0].strip().split("\n")
    exchange = Exchange(title, place, request=pieces[2])
    for item in setup:
        name, _, value = item.partition(": ")
        if name == "server":
            exchange.server.append(value)
        elif name in ("tokenizer", "given", "order"):
            setattr(exchange, name, value)
        else:
            raise ValueError(f"{place}: {item!r} is not a known field")
    head, _, body = pieces[4].partition("\n\n")
    status, *lines = head.strip().split("\n")
    exchange.status = int(status.removeprefix("HTTP/1.1 "))
    exchange.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    exchange.body = _body(body)
    if unknown := set(_PLACEHOLDER.findall(exchange.body + "".join(exchange.headers.values()))) - set(PLACEHOLDERS):
        raise ValueError(f"{place}: no pattern for the placeholder {sorted(unknown)}")
    return exchange
