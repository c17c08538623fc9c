"""Records a shell session in a terminal as an SVG that plays once: the picture of the README.

    python scripts/record_terminal.py docs/figures/terminal.svg

Starts a server with the demo model, asks it with `tgi chat`, and kills its worker in the middle of the answer. Needs
the command `tgi` in the PATH, and port 3000. Programs that draw SVG without animations show the whole session.
"""

import os
import pty
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

COLUMNS = 110
# Longer pauses are shortened. What is typed: after a moment, character by character.
MAX_PAUSE_SECONDS, PAUSE_SECONDS, TYPING_SECONDS = 1.2, 0.6, 0.02
WIDTH, HEIGHT, MARGIN = 8.4, 18, 14  # of a cell, and around all, in pixels
STEP_TIMEOUT_SECONDS = 120
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x07")
PROMPT = "$ "

QUESTION = "Write a short story about a lighthouse."
# What is typed once the text before it has been printed.
SESSION = (
    (r"\$ $", "tgi up --hostname 127.0.0.1 &"),
    (r"  ask  .*\n", ""),
    (r"\$ $", "(sleep 3; kill -9 $(tgi ps | awk '/worker-0/ {print $2}'); echo -n ' [the worker is killed] ') &"),
    (r"\$ $", f"echo '{QUESTION}' | tgi chat --max-tokens 200 --temperature 0"),
    (r"\$ $", "tgi down"),
    (r"\$ $", "exit"),
)


class Cell(NamedTuple):
    """A character on the screen, when it was written, in seconds, and whether it was typed."""

    character: str
    time: float
    typed: bool


def record(session: Iterable[tuple[str, str]], environment: dict[str, str]) -> Iterator[tuple[float, str]]:
    """Runs bash in a terminal, and types each line of the session when its pattern has been printed. Yields what is
    printed, with its time in seconds. Raises TimeoutError if a pattern does not come."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    began = time.monotonic()
    try:
        printed = ""
        for pattern, line in session:
            deadline = time.monotonic() + STEP_TIMEOUT_SECONDS
            while not re.search(pattern, CONTROL.sub("", printed)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{pattern!r} was not printed, but: {printed}")
                text = read(terminal, 0.1)
                printed += text
                yield time.monotonic() - began, text
            time.sleep(PAUSE_SECONDS)
            for character in f"{line}\n":
                os.write(terminal, character.encode())
                time.sleep(TYPING_SECONDS)
                printed = read(terminal)
                yield time.monotonic() - began, printed
        while text := read(terminal, STEP_TIMEOUT_SECONDS):  # until bash ends
            yield time.monotonic() - began, text
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGHUP)
        os.waitpid(pid, 0)


def read(terminal: int, seconds: float = 0.0) -> str:
    """What has been printed; waits until there is something, at most for some seconds. Nothing if bash has ended."""
    if not select.select([terminal], [], [], seconds)[0]:
        return ""
    try:
        printed = os.read(terminal, 65536)
    except OSError:  # EIO
        return ""
    return printed.decode(errors="replace").replace("\r\n", "\n")


def screen(printed: Iterable[tuple[float, str]]) -> list[list[Cell]]:
    """The rows of the whole session, as long as it is. Pauses are shortened."""
    rows: list[list[Cell]] = [[]]
    last = shown = 0.0
    for at, text in printed:
        shown += min(at - last, MAX_PAUSE_SECONDS)
        last = at
        for character in CONTROL.sub("", text):
            if character == "\r":
                rows[-1].clear()
            elif character == "\n":
                rows.append([])
            else:
                if len(rows[-1]) == COLUMNS:
                    rows.append([])
                rows[-1].append(Cell(character, shown, typed=False))
    return [typed(row) if "".join(one.character for one in row).startswith(PROMPT) else row for row in rows]


def typed(row: list[Cell]) -> list[Cell]:
    """The row of a command."""
    return [cell._replace(typed=place >= len(PROMPT)) for place, cell in enumerate(row)]


def svg(rows: list[list[Cell]]) -> str:
    """The picture. What is written at one time is one element, with the delay of its animation."""
    width, height = round(COLUMNS * WIDTH + 2 * MARGIN), len(rows) * HEIGHT + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="A recorded terminal">',
        "<style>rect{fill:#1b1f24}text{fill:#d0d7de;font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre;"
        "animation:shown 1ms step-end backwards}.typed{fill:#7ee787}@keyframes shown{from{opacity:0}}"
        "@media (prefers-reduced-motion:reduce){text{animation:none}}</style>",
        f'<rect width="{width}" height="{height}" rx="8"/>',
    ]
    for number, row in enumerate(rows, 1):
        column = 0
        for (at, kind), cells in groupby(row, lambda cell: (round(cell.time, 2), cell.typed)):
            text = "".join(cell.character for cell in cells)
            x, y = MARGIN + column * WIDTH, MARGIN + number * HEIGHT - 5
            column += len(text)
            if text.strip():
                style = ' class="typed"' if kind else ""
                lines.append(
                    f'<text x="{x:.1f}" y="{y}" textLength="{len(text) * WIDTH:.1f}" style="animation-delay:{at:.2f}s"'
                    f"{style}>{escape(text)}</text>"
                )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Writes the recorded session to the file that the command line names."""
    (target,) = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="tgi") as run:
        settings = {"PS1": PROMPT, "TERM": "dumb", "COLUMNS": str(COLUMNS), "TGI_RUN": run}
        rows = screen(record(SESSION, os.environ | settings))
    Path(target).write_text(svg(rows))


if __name__ == "__main__":
    main()
