"""What is known of where a model directory came from: its commit on the Hub, and what the Hub says it is for."""

import re
from pathlib import Path

_TAG = re.compile(r"^pipeline_tag:\s*[\"']?([\w-]+)", re.MULTILINE)


def commit(directory: Path) -> str | None:
    """The commit of a snapshot in the Hub's cache; None for any other directory."""
    return directory.name if directory.parent.name == "snapshots" else None


def pipeline_tag(directory: Path) -> str | None:
    """What the head of a snapshot's model card says ("text-generation"); None if it says nothing, or elsewhere."""
    if commit(directory) is None:
        return None
    try:
        card = (directory / "README.md").read_text(errors="replace")
    except OSError:
        return None
    head = card.split("---", 2)[1] if card.startswith("---") else ""
    found = _TAG.search(head)
    return found[1] if found else None
