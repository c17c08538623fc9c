#!/usr/bin/env python3
"""Prints docs/wire-protocol.md, made from tgi/kernel/messages.py and the files that it names (redirect it there)."""

import ast
import inspect
import io
import re
import sys
import tokenize

from tgi.kernel import answer, messages, presence, sampling
from tgi.kernel.codec import MAX_FRAME_BYTES
from tgi.kernel.states import EVENTS, State

HEAD = """# Wire protocol

<!-- Made by scripts/wire_protocol.py from tgi/kernel/messages.py and the files that it names; a test holds them
together. Do not edit. -->

Processes exchange frames over ZeroMQ. A frame is one message: a msgpack array `[tag, *fields]`. One ZeroMQ multipart
message carries all frames that a process has for one neighbour at that moment, so a step costs one send per neighbour.

- Fields are only ever appended, with defaults: a missing trailing field takes its default, a surplus one is ignored.
- Types are checked on decode; a frame that does not fit is dropped and logged, and the link lives on.
- A frame larger than {frame} MiB is refused by the socket.
- Columns are `bytes` fields that hold packed little-endian numbers (int32, uint32, float32 or uint8).
- Nothing is ever unpickled.
- Protocol version: {version}.

A link is a ROUTER on the stable side and a DEALER on the side that comes and goes. Each new connection begins with a
`Hello` in both directions; a `Hello` is therefore also the news that whatever was in flight before is lost.

"""


def main() -> None:
    """Prints the page."""
    sys.stdout.write(page())


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD.format(frame=MAX_FRAME_BYTES >> 20, version=presence.PROTOCOL)]
    module_doc = inspect.getdoc(messages) or ""
    parts.append(
        "## Who sends what\n\n```\n" + module_doc.split("\n\n")[2].replace("\n    ", "\n").strip() + "\n```\n\n"
    )
    parts.append(module_doc.split("\n\n")[3].replace("\n", " ") + "\n\n")
    parts.append("## Messages\n\n")
    for tag, cls in enumerate(messages.MESSAGES):
        parts.append(_section(f"### {tag} `{cls.__name__}`", cls))
    inner = (presence.Limits, presence.Adapter, sampling.SamplingDefaults, answer.Part, messages.Slot)
    parts += [_section(f"### `{cls.__name__}` (inside other messages)", cls) for cls in inner]
    parts.append("## Why a request ended\n\n" + _enum("reason", messages.Reason) + "\n")
    parts.append("## What a part of an answer is\n\n" + _enum("kind", answer.Kind) + "\n")
    parts.append("## States of a request\n\nEvery request that is added ends exactly once. `ended` has no way out.\n\n")
    parts.append("| from | what happens | to |\n|---|---|---|\n")
    parts += [f"| {a} | {event.name} | {event[a]} |\n" for a in State for event in EVENTS if a in event]
    return "".join(parts)


def _section(title: str, cls: type) -> str:
    rows = "".join(f"| `{name}` | `{kind}` | {note} |\n" for name, kind, note in _fields(cls))
    return f"{title}\n\n{inspect.getdoc(cls)}\n\n| field | type | |\n|---|---|---|\n{rows}\n"


def _fields(cls: type) -> list[tuple[str, str, str]]:
    """(name, type and default, comment) of each field, from the source."""
    source = inspect.getsource(cls)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = []
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign):
            kind = ast.unparse(node.annotation) + (f" = {ast.unparse(node.value)}" if node.value else "")
            found.append((ast.unparse(node.target), kind.replace("|", "\\|"), comments.get(node.lineno, "")))
    return found


def _enum(title: str, cls: type) -> str:
    lines = inspect.getsource(cls).splitlines()
    rows = [re.match(r'\s+[A-Z]+ = "(\w+)"(?:\s+# (.*))?', line) for line in lines]
    return f"| {title} | |\n|---|---|\n" + "".join(f"| `{row[1]}` | {row[2] or ''} |\n" for row in rows if row)


if __name__ == "__main__":
    main()
