"""Shared by the checks that ask about pictures: the server, the pictures, and the examples of docs/images.md."""

import base64
import contextlib
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ["TGI_PICTURES_URL"]
PICTURES = Path(os.environ["TGI_PICTURES"])  # PNG files, and answers.json: by name of the file
ANSWERS: dict[str, str] = json.loads((PICTURES / "answers.json").read_text())
BAR = 0.95
PAGE = Path("docs/images.md")


def messages(name: str) -> list[Any]:
    """A chat that asks what is in a picture."""
    url = "data:image/png;base64," + base64.b64encode((PICTURES / name).read_bytes()).decode()
    text = {"type": "text", "text": "What is in the picture?"}
    return [{"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url}}]}]


def check_answers(ask: Callable[[list[Any]], str | None]) -> None:
    """Asserts that enough answers are exactly right."""
    found = {name: ask(messages(name)) for name in ANSWERS}
    wrong = {name: text for name, text in found.items() if text != ANSWERS[name]}
    assert len(wrong) <= (1 - BAR) * len(ANSWERS) + 1e-9, {name: (text, ANSWERS[name]) for name, text in wrong.items()}


def check_example(library: str) -> None:
    """Runs the page's example for a library, which says in a comment what it prints."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [code] = [block for block in blocks if f"from {library} import" in block]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("http://localhost:3000", URL), {})
    assert printed.getvalue().strip() == code.rstrip().rpartition("# ")[2]
