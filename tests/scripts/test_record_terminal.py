"""The recorded terminal: what a real shell has printed is on the picture, when it was printed."""

import os
import re
from xml.etree import ElementTree

from scripts.record_terminal import COLUMNS, PROMPT, record, screen, svg

SVG = "{http://www.w3.org/2000/svg}"


def test_a_session_is_drawn_as_it_was_printed() -> None:
    session = [
        (r"\$ $", "echo '<first>'; sleep 0.5; printf 'wrong\\rright'; echo"),
        (r"\$ $", f"printf '%0{COLUMNS + 5}d\\n' 7"),
        (r"\$ $", "exit"),
    ]
    rows = screen(record(session, os.environ | {"PS1": PROMPT, "TERM": "dumb", "COLUMNS": str(COLUMNS)}))
    lines = ["".join(cell.character for cell in row) for row in rows]
    first, second = lines.index("<first>"), lines.index("right")
    assert rows[second][0].time - rows[first][0].time >= 0.4
    number = lines.index("0" * COLUMNS)
    assert lines[number + 1] == "00007"
    typed = ["".join(cell.character for cell in row if cell.typed) for row in rows]
    assert [line for line in typed if line] == [line for _, line in session]
    drawn = ElementTree.fromstring(svg(rows))
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "<first>" in texts
    assert all(re.search(r"delay:\d+\.\d\ds$", str(text.get("style"))) for text in drawn.iter(f"{SVG}text"))
