"""Reads golden files: exchanges of a request and the response that the wire contract promises, byte by byte.

A file begins with lines of `#` that say what it holds and from which sections of the contract it is written.
Each exchange is

    === what it shows
    tokenizer: the name of a scripted answer (scripts.py); absent: nothing below the front end is asked
    server: name=value, one setting that is not the default; may be repeated
    given: a state of the server (conftest.py)
    order: any, if events of different choices may come in any order; they are then written choice by choice
    --- request
    POST /generate HTTP/1.1
    content-type: application/json

    {"inputs":"x"}
    --- response
    HTTP/1.1 200
    content-type: application/json

    {"generated_text":" a"}

In a body `⏎` is a line feed and the file's own line breaks are nothing: they are there for the reader.
In a response `{{name}}` stands for what differs from run to run or is left open: PLACEHOLDERS has the pattern of each.
Where a name comes twice in one body, both must be the same text. `{{byte ff}}` in a request is that byte.
A header of the response that is `(none)` must not be there. Headers that are not listed may be there or not.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tgi

CASES = Path(__file__).parent / "cases"

PLACEHOLDERS = {
    "version": re.escape(tgi.__version__),
    "created": r"\d{10}",  # Unix seconds; the test looks at the clock as well
    "chat id": r"chatcmpl-[0-9A-Za-z_-]{8,}",
    "completion id": r"cmpl-[0-9A-Za-z_-]{8,}",
    "call id": r"call_[0-9A-Za-z_-]{8,}",
    "other call id": r"call_[0-9A-Za-z_-]{8,}",
    "seed": r"\d{1,20}",
    "other seed": r"\d{1,20}",
    "seconds": r"\d+(\.\d+)?(e-\d+)?",
    "milliseconds": r"\d+",
    "wait": r"[1-9]\d*",  # whole seconds
    "line": r"\d+",
    "column": r"\d+",
    "position": r"( at line \d+ column \d+)?",  # the contract does not say whether there is one
    "path": r"([a-z_]+(\[\d+\])?(\.[a-z_]+(\[\d+\])?)*: )?",  # nor whether there is one here
    "null or count": r"(null|\d+)",
    "words": r"[^\n]*\w[^\n]*",  # a text that the contract leaves open
    "keep-alive comments": r"(:\n\n)+",
    "html type": r"text/html(; charset=utf-8)?",
    "rest": r"[\s\S]*",
    "exposition": r'(# (HELP|TYPE) [^\n]+\n|[a-z_]+(\{[^\n]*\})? (\d+(\.\d+)?(e[+-]?\d+)?|\+Inf|NaN)\n|\n)+',
}  # fmt: skip
_HOLE = re.compile(r"\{\{([a-z][a-z -]*)\}\}")


@dataclass
class Exchange:
    """One request and its expected response. Bodies are as in the file, without its line breaks."""

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
        """The settings that are not the defaults; a name that is repeated makes a tuple."""
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
        """The request as it goes over the socket. Host, length and `connection: close` are added if not written."""
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
        """What the response's header must match as a whole."""
        return _pattern(self.headers[name])

    @property
    def expected(self) -> re.Pattern[str]:
        """What the response's body must match as a whole."""
        return _pattern(self.body)

    def difference(self, body: str) -> str:
        """Where a body that does not match leaves what is expected, for the reader of a failed test."""
        pieces = re.findall(rf"{_HOLE.pattern}|([\s\S])", self.body)
        pieces = [char or f"{{{{{name}}}}}" for name, char in pieces]
        good, end = 0, 0
        for count in range(len(pieces) + 1):
            found = _pattern("".join(pieces[:count])).match(body)
            if found is None:
                break
            good, end = count, found.end()
        wanted = "".join(pieces[good:])
        same, came = body[max(0, end - 60) : end], body[end : end + 200]
        return f"equal up to {same!r}\nexpected: {wanted[:200]!r}\nreceived: {came!r}"


def _pattern(text: str) -> re.Pattern[str]:
    """The expected text as a pattern in which a placeholder's second occurrence repeats the first."""
    seen: list[str] = []
    parts = []
    for place, part in enumerate(_HOLE.split(text)):
        if place % 2 == 0:
            parts.append(re.escape(part))
        elif part in seen:
            parts.append(f"(?P=hole{seen.index(part)})")
        else:
            parts.append(f"(?P<hole{len(seen)}>{PLACEHOLDERS[part]})")
            seen.append(part)
    return re.compile("".join(parts))


def holes(pattern: re.Pattern[str], text: str, expected: str) -> dict[str, str]:
    """What stood in place of each placeholder of `expected`."""
    found = pattern.fullmatch(text)
    assert found is not None
    names = list(dict.fromkeys(_HOLE.findall(expected)))
    return {name: found[f"hole{place}"] for place, name in enumerate(names)}


def _body(text: str) -> str:
    return text.replace("\n", "").replace("⏎", "\n")


def exchanges() -> Iterator[Exchange]:
    """All exchanges of all files."""
    for path in sorted(CASES.glob("*.http")):
        yield from read(path)


def read(path: Path) -> list[Exchange]:
    """The exchanges of a file. Raises ValueError for a file that is not as described above."""
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
            raise ValueError(f"{place}: {item!r} says nothing that is known")
    head, _, body = pieces[4].partition("\n\n")
    status, *lines = head.strip().split("\n")
    exchange.status = int(status.removeprefix("HTTP/1.1 "))
    exchange.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    exchange.body = _body(body)
    if unknown := set(_HOLE.findall(exchange.body + "".join(exchange.headers.values()))) - set(PLACEHOLDERS):
        raise ValueError(f"{place}: no pattern for the placeholder {sorted(unknown)}")
    return exchange
